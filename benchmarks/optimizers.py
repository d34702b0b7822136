"""What does an optimizer cost? Its step time relative to `optax.adamw`, and the bytes of its state.

    python benchmarks/optimizers.py --embed_dim=256 --num_layers=4 --rounds=15
    python benchmarks/optimizers.py --bars

Trains a small Llama on random tokens. The optimizers take turns, one step each, round after round, so that
a slow phase of the machine affects all of them. Prints for each optimizer the median step, the median of
its ratios to plain `optax.adamw` (behind a global-norm clip) within a round, the same ratio of the FLOPs of
all matmuls in the compiled step, and the bytes of all arrays of its state. For GaLore it also prints the
step that refreshes the subspace, and the ratio if one step in `--gap` is such a step. The more tokens a
step has (`--batch_size`), the smaller the optimizer's share.

`--bars` chooses sizes at which the matmuls dominate, 4096 tokens a step, and reports whether StableAdamW
and APOLLO stay within 1.05 and amortized GaLore within 1.10 of AdamW: 4 minutes on 2 idle cores.

The last line is JSON.
"""

import argparse
import dataclasses
import functools
import json
import statistics

import jax
import optax
from ml_collections import ConfigDict
from training import CompiledRun, llama_config, random_text, timed

from maxlp import optim
from maxlp.core.train_state import num_params
from maxlp.run.experiment import Experiment, resolve
from maxlp.run.presets import LOW_BIT
from tests.planning.hlo_flops import matmul_flops

BARS = {"stable_adamw": 1.05, "apollo": 1.05, "galore, randomized": 1.10}


def optimizers(rank: int, gap: int) -> dict[str, dict]:
    """Values of the ``optimizer`` section, by the name to print."""
    galore = {"rank": rank, "update_proj_gap": gap, "basis": "randomized"}
    q_galore = galore | {"projector": "int4", "lazy_threshold": 0.4}
    names = ("adamw", "stable_adamw", "adafactor", "lion", "muon", "normuon", "soap", "apollo_mini")
    names += ("schedule_free_adamw", "adamp", "stable_spam")
    return {name: {"name": name} for name in names} | {
        "adamw, AdaGC": {"adagc.ratio": 1.05},
        "apollo": {"name": "apollo", "options": {"rank": rank}},
        "muon, 8 bits": {"name": "muon", "low_bit": LOW_BIT["8bit"]},
        "galore, svd": {"galore": galore | {"basis": "svd"}},
        "galore, randomized": {"galore": galore},
        "galore + dynamic8": {"galore": galore, "low_bit": LOW_BIT["8bit"]},
        "q_galore": {"galore": q_galore, "low_bit": LOW_BIT["8bit"]},
        "fp8 moments": {"low_bit": LOW_BIT["fp8"]},
        "dynamic8 moments": {"low_bit": LOW_BIT["8bit"]},
        "float16 moments": {"low_bit": {"mu": "float16", "nu": "float16"}},
        "bfloat16 moments": {"low_bit": {"mu": "bfloat16", "nu": "bfloat16"}},
    }


class Contender:
    """One optimizer: its compiled step, its state, and the seconds of its steps."""

    def __init__(self, run: Experiment, batch: dict[str, jax.Array]):
        self.compiled, self.batch = CompiledRun(run), batch
        self.first_steps = [self.first_step() for _ in range(4)][1:]  # the first one warms up
        self.later_steps: list[float] = []

    def first_step(self) -> float:
        """A step from a new state; GaLore computes its subspaces in it."""
        self.state = jax.block_until_ready(self.compiled.initial_state())
        return self.timed_step()

    def timed_step(self) -> float:
        (self.state, _), seconds = timed(self.compiled.step, self.state, self.batch)
        return seconds


def with_optax_adamw(run: Experiment) -> Experiment:
    """The experiment with `optax.adamw` behind a global-norm clip as its optimizer."""
    mask = functools.partial(optim.decay_mask, decay_embeddings=False)
    adamw = optax.adamw(run.schedule, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=mask)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    return dataclasses.replace(run, tx=tx, step=functools.partial(run.step, tx=tx))


def make_config(args: argparse.Namespace, optimizer: dict) -> ConfigDict:
    heads = args.embed_dim // 64
    model = {
        "vocab_size": args.vocab_size,
        "embed_dim": args.embed_dim,
        "num_layers": args.num_layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": 64,
        "mlp_dim": args.embed_dim * 11 // 4,
        "max_seq_len": args.seq_len,
        "rope_theta": 10_000.0,
        "dtype": "float32",
        "remat": "none",
    }
    data = {"data.batch_size": args.batch_size, "data.seq_len": args.seq_len}
    return llama_config(model, data | {f"optimizer.{key}": value for key, value in optimizer.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--embed_dim", type=int, default=256)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--rank", type=int, default=0, help="of GaLore and APOLLO; 0 means embed_dim / 4")
    parser.add_argument("--gap", type=int, default=200, help="steps between GaLore's refreshes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="names of optimizers, separated by ;")
    parser.add_argument(
        "--bars",
        action="store_true",
        help="check the goals, with sizes, rounds and optimizers of their own",
    )
    args = parser.parse_args()
    if args.bars:
        vars(args).update(embed_dim=512, num_layers=4, batch_size=8, seq_len=512, rounds=9, gap=200)
        args.only = ";".join(BARS)

    chosen = optimizers(args.rank or args.embed_dim // 4, args.gap)
    if args.only:
        if unknown := [name for name in args.only.split(";") if name not in chosen]:
            parser.error(f"--only={unknown[0]} is unknown; the names: {'; '.join(chosen)}")
        chosen = {name: chosen[name] for name in args.only.split(";")}
    devices = jax.devices()[:1]
    baseline = with_optax_adamw(resolve(make_config(args, {}), devices))
    batch = random_text(baseline)
    contenders = {"optax.adamw": Contender(baseline, batch)}
    for name, optimizer in chosen.items():
        contenders[name] = Contender(resolve(make_config(args, optimizer), devices), batch)
    for _ in range(args.rounds):
        for contender in contenders.values():
            contender.later_steps.append(contender.timed_step())

    rows = report(contenders, args.gap)
    for name, bar in BARS.items() if args.bars else ():
        ratio = rows[name]["amortized_ratio"]
        print(f"{name}: {ratio:.3f} of optax.adamw, {'within' if ratio <= bar else 'ABOVE'} {bar}")
    print(json.dumps(rows))


def report(contenders: dict[str, Contender], gap: int) -> dict[str, dict[str, float]]:
    """Prints the table, and returns its rows by name."""
    baseline = contenders["optax.adamw"]
    base, count = statistics.median(baseline.later_steps), num_params(baseline.state["params"])
    print(f"{count:,} parameters, {jax.devices()[0].device_kind}")
    print(
        f"| {'optimizer':20} | ms/step | ratio | FLOPs | first step ms | amortized | state MiB "
        "| bytes/parameter |"
    )
    print(f"|{'-' * 22}|{'-' * 9}|{'-' * 7}|{'-' * 7}|{'-' * 15}|{'-' * 11}|{'-' * 11}|{'-' * 17}|")
    flops = {name: matmul_flops(one.compiled.program.as_text()) for name, one in contenders.items()}
    rows = {}
    for name, one in contenders.items():
        later, first = statistics.median(one.later_steps), statistics.median(one.first_steps)
        pairs = zip(one.later_steps, baseline.later_steps, strict=True)
        ratio = statistics.median(mine / theirs for mine, theirs in pairs)
        refresh = max(first - later, 0.0) / gap / base if "galore" in name else 0.0
        held = optim.state_bytes(one.state["opt_state"])
        rows[name] = {
            "step_ms": 1e3 * later,
            "ratio": ratio,
            "flops_ratio": flops[name] / flops["optax.adamw"],
            "first_step_ms": 1e3 * first,
            "amortized_ratio": ratio + refresh,
            "state_bytes": held,
            "bytes_per_parameter": held / count,
        }
        print(
            f"| {name:20} | {1e3 * later:7.1f} | {ratio:5.3f} "
            f"| {flops[name] / flops['optax.adamw']:5.3f} | {1e3 * first:13.1f} "
            f"| {ratio + refresh:9.3f} | {held / 2**20:9.2f} | {held / count:15.3f} |"
        )
    return rows


if __name__ == "__main__":
    main()
