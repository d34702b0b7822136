"""The memory that one GPU needs to train a Llama 7B, from the compiled step; no GPU is needed.

    pip install 'maxlp[aot]'
    python benchmarks/llama7b_memory.py --only=galore8,released
    python benchmarks/llama7b_memory.py --state_only --param_dtype=float32

Compiles the step of each optimizer ahead of time for one H100 with XLA's own compiler. Prints the bytes of
the optimizer's state, and the peak by the compiler's memory analysis: arguments (parameters, state, batch),
temporaries and program. A device offers less than its nominal memory: about 95 % of 24 or 80 GB. "released"
updates each layer in the backward pass, so that gradients are freed layer by layer
(`core.fused_backward`). The first command above compiles one of the twelve programs, in 13 seconds of CPU
time.

The sizes are those of GaLore's llama_7b (arXiv:2403.03507): parameters in bfloat16, rank 1024, and 8-bit
moments in blocks of 256 (Dettmers et al. 2021). The moments of `adamw` have the dtype of the parameters;
those of `adamw32` are float32, as in GaLore. The paper's figures are of bfloat16 parameters that are
rounded to nearest; use `--param_rounding=stochastic` for long runs.
"""

import argparse
import json
from typing import Any

import jax
from training import topology

from maxlp import optim
from maxlp.families.llama.presets import llama
from maxlp.nn.layers import DTYPES
from maxlp.optim.config import BF16_ROUNDINGS
from maxlp.planning import compiled, topologies
from maxlp.run.experiment import Experiment, resolve
from maxlp.run.presets import LOW_BIT

MODES = "not", "released"
SEQ_LEN = 256
EIGHT_BIT = {f"low_bit.{key}": value for key, value in LOW_BIT["8bit"].items()}
GALORE = {"galore.rank": 1024, "galore.update_proj_gap": 500, "galore.basis": "randomized"}
OPTIMIZERS: dict[str, dict[str, Any]] = {  # values of the ``optimizer`` section, by the name to print
    "adamw": {},
    "adamw32": {"name": "stable_adamw", "options": {"clip_threshold": float("inf")}},
    "adam8": EIGHT_BIT,
    "galore": GALORE,
    "galore8": GALORE | EIGHT_BIT,
    "q_galore8": GALORE | {"galore.projector": "int4"} | EIGHT_BIT,
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", type=topology, default="h100:1x1")
    parser.add_argument("--param_dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument(
        "--param_rounding",
        choices=BF16_ROUNDINGS,
        help="as optimizer.param_rounding; to the nearest by default",
    )
    parser.add_argument(
        "--only", default="", help="comma-separated names of optimizers, and released or not"
    )
    parser.add_argument("--state_only", action="store_true", help="do not compile")
    args = parser.parse_args()
    args.only = set(filter(None, args.only.split(",")))
    known = [*OPTIMIZERS, *MODES]
    if unknown := sorted(args.only - {*known}):
        parser.error(f"--only={unknown[0]} is unknown; the names: {', '.join(known)}")
    return args


def experiment(args: argparse.Namespace, optimizer: dict[str, Any], released: bool, device) -> Experiment:
    """The run with an optimizer on one device.

    Args:
      released: updates each layer in the backward pass.
    """
    c = llama(
        vocab_size=32000,
        embed_dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        mlp_dim=11008,
        max_seq_len=SEQ_LEN,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        param_dtype=args.param_dtype,
    )
    c.data.update(source="unread", tokenizer="bytes", seq_len=SEQ_LEN, batch_size=1)
    c.loss.num_chunks = 1
    c.train.update(total_steps=150_000, release_gradients=released)
    c.spikes.statistics = False
    c.optimizer.update(
        learning_rate=5e-3,
        warmup_steps=15_000,
        weight_decay=0.0,
        b2=0.999,
        eps=1e-6,
        clip_norm=0.0,
        param_rounding=args.param_rounding,
    )
    with c.unlocked():
        c.optimizer.update_from_flattened_dict(optimizer)
    return resolve(c, [device])


def main() -> None:
    args = parse_args()
    topologies.compile_without_devices()
    devices = jax.devices() if args.state_only else topologies.devices(args.topology)
    device = devices[0]
    names = [name for name in OPTIMIZERS if not args.only & OPTIMIZERS.keys() or name in args.only]
    modes = [mode for mode in MODES if not args.only & {*MODES} or mode in args.only]

    print("| optimizer | released | state GB | of AdamW | peak GB | arguments | temporaries | compile s |")
    print("|---|---|---|---|---|---|---|---|")
    base, rows = state_bytes(experiment(args, OPTIMIZERS["adamw"], False, device)), []
    for name in names:
        state = state_bytes(experiment(args, OPTIMIZERS[name], False, device))
        if args.state_only:
            print(f"| {name} | | {state / 1e9:.2f} | {state / base:.3f} | | | | |")
            continue
        for mode in modes:
            released = mode == "released"
            done = compiled.compile_step(experiment(args, OPTIMIZERS[name], released, device))
            assert done.memory is not None
            memory = done.memory
            row = dict(name=name, released=released, state=state, ratio=state / base, peak=done.peak)
            rows.append(row | dict(arguments=memory.arguments, temporaries=memory.temporaries))
            print(
                f"| {name} | {'yes' if released else 'no'} | {state / 1e9:.2f} | {state / base:.3f} "
                f"| {done.peak / 1e9:.2f} | {memory.arguments / 1e9:.2f} "
                f"| {memory.temporaries / 1e9:.2f} | {done.seconds:.0f} |",
                flush=True,
            )
    print(json.dumps(rows))


def state_bytes(run: Experiment) -> int:
    """Bytes of the optimizer's state."""
    _, abstract = run.abstract_state()
    return optim.state_bytes(abstract["opt_state"])


if __name__ == "__main__":
    main()
