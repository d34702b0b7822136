"""What does an optimizer cost? Step time over that of `optax.adamw`, and bytes of state.

    python benchmarks/optimizers.py --embed_dim=256 --num_layers=4 --rounds=15
    python benchmarks/optimizers.py --bars

Trains a small Llama on random tokens with each optimizer in turn, a step each, round after round: all
see the same moods of the machine. Printed are the median step, the median of its ratios to the step of
plain `optax.adamw` (behind a global-norm clip) in the same round, and the bytes of all arrays of the
optimizer's state as they are held. For GaLore also the step with a refresh, and what the ratio is when one
step of `--gap` is such a step. The optimizer's part of a step is the smaller the more tokens a step has
(`--batch_size`). `--bars` takes a size at which matmuls are what takes the time, 4096 tokens a step, and
says whether StableAdamW stays within 1.05 and GaLore, amortised, within 1.10 of AdamW: 2 quiet cores, 3
minutes.

The last line is JSON.
"""

import argparse
import functools
import json
import statistics
import time

import jax
import numpy as np
import optax

from maxlp import optim
from maxlp.core import gradients
from maxlp.core import train_step as step
from maxlp.families.llama import task as language
from maxlp.families.llama.model import Llama
from maxlp.parallel import sharding
from maxlp.parallel.batches import global_batch

BARS = {"stable_adamw": 1.05, "galore, randomized": 1.10}
COMMON = dict(
    learning_rate=1e-3,
    schedule="constant",
    warmup_steps=0,
    final_lr_fraction=1.0,
    clip_norm=1.0,
    weight_decay=0.1,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
)


def optimizers(rank: int, gap: int) -> dict[str, dict]:
    """Keywords of `optim.OptimizerConfig`."""
    galore = functools.partial(optim.GaloreConfig, rank=rank, update_proj_gap=gap, basis="randomized")
    low_bit = optim.LowBitConfig
    dynamic8 = low_bit(mu="dynamic8", nu="dynamic8", block_size=256)
    return {
        "adamw": {},
        "stable_adamw": {},
        "adafactor": {},
        "lion": {},
        "muon": {},
        "schedule_free_adamw": {},
        "adamp": {},
        "galore, svd": dict(name="adamw", galore=galore(basis="svd")),
        "galore, randomized": dict(name="adamw", galore=galore()),
        "galore + dynamic8": dict(name="adamw", galore=galore(), low_bit=dynamic8),
        "q_galore": dict(
            name="adamw", galore=galore(projector="int4", lazy_threshold=0.4), low_bit=dynamic8
        ),
        "fp8 moments": dict(name="adamw", low_bit=low_bit(mu="float8_e4m3fn", nu="float8_e5m2")),
        "dynamic8 moments": dict(name="adamw", low_bit=dynamic8),
        "float16 moments": dict(name="adamw", low_bit=low_bit(mu="float16", nu="float16")),
        "bfloat16 moments": dict(name="adamw", low_bit=low_bit(mu="bfloat16", nu="bfloat16")),
    }


class Run:
    """One optimizer's compiled step and its state."""

    def __init__(self, tx: optax.GradientTransformation, make_model, mesh, batch):
        graphdef, abstract = step.abstract_state(make_model, tx, mesh)
        places = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        self.batch = batch
        self.init = jax.jit(functools.partial(step.init_state, make_model, tx, 0), out_shardings=places)
        self.step = step.jit_train_step(
            abstract,
            mesh,
            graphdef=graphdef,
            gradients=gradients.of_sums(language.next_token_loss, language.num_targets),
            tx=tx,
            schedule=optax.constant_schedule(1e-3),
        )
        self.first_steps = [self.first_step() for _ in range(4)][1:]  # without the one that compiles
        self.later_steps = []

    def first_step(self) -> float:
        self.state = jax.block_until_ready(self.init())
        return self.timed_step()

    def timed_step(self) -> float:
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--embed_dim", type=int, default=256)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--rank", type=int, default=0, help="of GaLore; 0: embed_dim / 4")
    parser.add_argument("--gap", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="names, with ; between them")
    parser.add_argument("--bars", action="store_true", help="see above; sets sizes, rounds and names")
    args = parser.parse_args()
    if args.bars:
        vars(args).update(embed_dim=512, num_layers=4, batch_size=8, seq_len=512, rounds=9, gap=200)
        args.only = ";".join(BARS)

    heads = args.embed_dim // 64
    make_model = lambda rngs: Llama(  # noqa: E731
        vocab_size=args.vocab_size,
        embed_dim=args.embed_dim,
        num_layers=args.num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=64,
        mlp_dim=args.embed_dim * 11 // 4,
        max_seq_len=args.seq_len,
        rope_theta=10_000.0,
        rope_scaling=None,
        norm_eps=1e-5,
        tie_embeddings=False,
        init_std=0.02,
        dtype="float32",
        param_dtype="float32",
        attention="xla",
        scan_layers=True,
        remat="none",
        rngs=rngs,
    )
    mesh = sharding.make_mesh()
    tokens = np.random.default_rng(0).integers(0, args.vocab_size, (args.batch_size, args.seq_len + 1))
    shape = (args.batch_size, args.seq_len)
    batch = {
        "tokens": tokens[:, :-1].astype(np.int32),
        "targets": tokens[:, 1:].astype(np.int32),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(args.seq_len, dtype=np.int32), shape).copy(),
        "loss_mask": np.ones(shape, bool),
    }

    chosen = optimizers(args.rank or args.embed_dim // 4, args.gap)
    if args.only:
        chosen = {name: chosen[name] for name in args.only.split(";")}
    with jax.set_mesh(mesh):
        batch = global_batch(batch, mesh)
        mask = functools.partial(optim.decay_mask, decay_embeddings=False)
        adamw = optax.adamw(1e-3, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=mask)
        runs = {
            "optax.adamw": Run(optax.chain(optax.clip_by_global_norm(1.0), adamw), make_model, mesh, batch)
        }
        for name, changes in chosen.items():
            config = optim.OptimizerConfig(**COMMON | {"name": name} | changes)
            runs[name] = Run(optim.make_tx(config, total_steps=1000).tx, make_model, mesh, batch)
        for _ in range(args.rounds):
            for run in runs.values():
                run.later_steps.append(run.timed_step())

    rows = report(runs, args.gap)
    for name, bar in BARS.items() if args.bars else ():
        ratio = rows[name]["amortised_ratio"]
        print(f"{name}: {ratio:.3f} of optax.adamw, {'within' if ratio <= bar else 'ABOVE'} {bar}")
    print(json.dumps(rows))


def report(runs: dict[str, Run], gap: int) -> dict[str, dict[str, float]]:
    base = statistics.median(runs["optax.adamw"].later_steps)
    num_params = sum(p.size for p in jax.tree.leaves(runs["optax.adamw"].state["params"]))
    print(f"{num_params:,} parameters, {jax.devices()[0].device_kind}")
    print(
        f"| {'optimizer':20} | ms/step | ratio | first step ms | amortised | state MiB | bytes/parameter |"
    )
    print(f"|{'-' * 22}|{'-' * 9}|{'-' * 7}|{'-' * 15}|{'-' * 11}|{'-' * 11}|{'-' * 17}|")
    rows = {}
    for name, run in runs.items():
        later, first = statistics.median(run.later_steps), statistics.median(run.first_steps)
        pairs = zip(run.later_steps, runs["optax.adamw"].later_steps, strict=True)
        ratio = statistics.median(mine / theirs for mine, theirs in pairs)
        refresh = max(first - later, 0.0) / gap / base if "galore" in name else 0.0
        held = sum(x.nbytes for x in jax.tree.leaves(run.state["opt_state"]))
        rows[name] = {
            "step_ms": 1e3 * later,
            "ratio": ratio,
            "first_step_ms": 1e3 * first,
            "amortised_ratio": ratio + refresh,
            "state_bytes": held,
            "bytes_per_parameter": held / num_params,
        }
        print(
            f"| {name:20} | {1e3 * later:7.1f} | {ratio:5.3f} | {1e3 * first:13.1f} "
            f"| {ratio + refresh:9.3f} | {held / 2**20:9.2f} | {held / num_params:15.3f} |"
        )
    return rows


if __name__ == "__main__":
    main()
