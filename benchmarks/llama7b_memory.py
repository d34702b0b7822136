"""What one GPU needs to train a Llama 7B, read from the compiled step; no GPU is needed.

    pip install 'maxlp[aot]'
    python benchmarks/llama7b_memory.py --only=galore8,released
    python benchmarks/llama7b_memory.py --state_only --param_dtype=float32

The step of each optimizer is compiled for one H100 by the real compiler, ahead of time. Printed are the
bytes of the optimizer's state, and the peak: arguments (parameters, state, batch), temporaries and
program, as the compiler's own memory analysis has them. A device offers less than its name: take 95 % of 24
or 80 GB. `released` is `maxlp.layerwise`: each layer is updated in the backward pass, gradients forgotten.

Sizes are those of GaLore's llama_7b (arXiv:2403.03507): parameters in bfloat16, rank 1024, and 8-bit
moments in blocks of 256 (Dettmers et al. 2021). Moments of `adamw` are bfloat16 then, like the parameters;
`adamw32` has float32 ones, as has GaLore. Plain rounding of bfloat16 parameters is what the paper's figures
are of; to train for long take `--param_rounding=stochastic`.
"""

import argparse
import functools
import json
import time

import jax
import numpy as np

from maxlp import optim
from maxlp.core import fused_backward as layerwise
from maxlp.core import gradients
from maxlp.core import train_step as step
from maxlp.families.llama import task as language
from maxlp.families.llama.model import Llama
from maxlp.parallel import sharding
from maxlp.planning import compiled, topologies

COMMON = dict(
    learning_rate=5e-3,
    schedule="cosine",
    warmup_steps=15_000,
    final_lr_fraction=0.1,
    weight_decay=0.0,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    clip_norm=0.0,
)
DYNAMIC8 = optim.LowBitConfig(mu="dynamic8", nu="dynamic8", block_size=256)


def optimizers(rank: int) -> dict[str, dict]:
    """Keywords of `optim.OptimizerConfig`."""
    galore = functools.partial(optim.GaloreConfig, rank=rank, update_proj_gap=500, basis="randomized")
    return {
        "adamw": {},
        "adamw32": dict(name="stable_adamw", options=dict(clip_threshold=float("inf"))),
        "adam8": dict(low_bit=DYNAMIC8),
        "galore": dict(galore=galore()),
        "galore8": dict(galore=galore(), low_bit=DYNAMIC8),
        "q_galore8": dict(galore=galore(projector="int4"), low_bit=DYNAMIC8),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="h100:1x1")
    parser.add_argument("--num_layers", type=int, default=32)
    parser.add_argument("--embed_dim", type=int, default=4096)
    parser.add_argument("--mlp_dim", type=int, default=11008)
    parser.add_argument("--vocab_size", type=int, default=32000)
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--rank", type=int, default=1024)
    parser.add_argument("--param_dtype", default="bfloat16")
    parser.add_argument("--param_rounding", help="stochastic or kahan; plain by default")
    parser.add_argument("--only", default="", help="comma-separated: optimizers; all, or released, or not")
    parser.add_argument("--state_only", action="store_true", help="do not compile")
    args = parser.parse_args()
    only = set(filter(None, args.only.split(",")))

    heads = args.embed_dim // 128
    make_model = lambda rngs: Llama(  # noqa: E731
        vocab_size=args.vocab_size,
        embed_dim=args.embed_dim,
        num_layers=args.num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        mlp_dim=args.mlp_dim,
        max_seq_len=args.seq_len,
        rope_theta=10_000.0,
        rope_scaling=None,
        norm_eps=1e-6,
        tie_embeddings=False,
        init_std=0.02,
        dtype="bfloat16",
        param_dtype=args.param_dtype,
        attention="xla",
        scan_layers=True,
        remat="block",
        rngs=rngs,
    )
    topologies.compile_without_devices()
    devices = jax.devices()[:1] if args.state_only else topologies.devices(topologies.parse(args.topology))
    mesh = sharding.make_mesh(devices=devices)
    shape = jax.ShapeDtypeStruct(
        (args.batch_size, args.seq_len), np.int32, sharding=sharding.batch_sharding(mesh)
    )
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), shape)
    batch["loss_mask"] = jax.ShapeDtypeStruct(shape.shape, np.bool_, sharding=shape.sharding)

    print("| optimizer | released | state GB | of AdamW | peak GB | arguments | temporaries | compile s |")
    print("|---|---|---|---|---|---|---|---|")
    base, rows = None, []
    with jax.set_mesh(mesh):
        for name, changes in optimizers(args.rank).items():
            if only & optimizers(args.rank).keys() and name not in only | {"adamw"}:
                continue
            config = optim.OptimizerConfig(**COMMON | changes, param_rounding=args.param_rounding)
            optimizer = optim.make_tx(config, total_steps=150_000)
            tx, schedule = optimizer.tx, optimizer.schedule
            graphdef, abstract = step.abstract_state(make_model, tx, mesh)
            state = optim.state_bytes(abstract["opt_state"])
            base = base or state
            common = dict(graphdef=graphdef, tx=tx, schedule=schedule)
            for released in (False, True):
                wanted = {"released"} if released else {"not"}
                if args.state_only or (only & {"released", "not"} and not only & wanted):
                    continue
                if only & optimizers(args.rank).keys() and name not in only:
                    continue
                memory, seconds = compile_for(abstract, batch, mesh, released, common)
                row = dict(name=name, released=released, state=state, ratio=state / base, peak=memory.peak)
                row |= dict(arguments=memory.arguments, temporaries=memory.temporaries)
                rows.append(row)
                print(
                    f"| {name} | {'yes' if released else 'no'} | {state / 1e9:.2f} | {state / base:.3f} "
                    f"| {memory.peak / 1e9:.2f} | {memory.arguments / 1e9:.2f} "
                    f"| {memory.temporaries / 1e9:.2f} | {seconds:.0f} |",
                    flush=True,
                )
            if args.state_only:
                print(f"| {name} | | {state / 1e9:.2f} | {state / base:.3f} | | | | |")
    print(json.dumps(rows))


def compile_for(abstract, batch, mesh, released: bool, common: dict) -> tuple[compiled.Memory, float]:
    sums = language.next_token_loss, language.num_targets
    if released:
        function = functools.partial(layerwise.train_step, loss_fn=sums[0], weight=sums[1], **common)
    else:
        function = functools.partial(step.train_step, gradients=gradients.of_sums(*sums), **common)
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    jitted = jax.jit(function, donate_argnums=0, out_shardings=(places, sharding.replicated(mesh)))
    start = time.perf_counter()
    done = jitted.trace(abstract, batch).lower(lowering_platforms=("cuda",)).compile()
    return compiled.read_memory(done, "gpu"), time.perf_counter() - start


if __name__ == "__main__":
    main()
