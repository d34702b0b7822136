"""The training step of maxlp, with the flags and the line of JSON of `bare_llama.py`.

    python benchmarks/maxlp_llama.py --embed_dim=256 --num_layers=6 --dtype=bfloat16 --steps=20

Everything is what `maxlp.train` runs: the same model, optimizer chain, loss and compiled step, on a mesh of
all devices, and a batch with segment ids, positions and a mask.
"""

import argparse
import functools
import json
import time

import jax
import numpy as np

from maxlp import optim
from maxlp.core import gradients
from maxlp.core import train_step as step
from maxlp.families.llama import task as language
from maxlp.families.llama.model import Llama
from maxlp.parallel import sharding
from maxlp.parallel.batches import global_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--embed_dim", type=int, default=256)
    parser.add_argument("--num_layers", type=int, default=6)
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--num_kv_heads", type=int, default=4)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--mlp_dim", type=int, default=768)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--attention", default="xla")
    parser.add_argument("--remat", default="none")
    parser.add_argument("--unroll", action="store_true", help="no scan over the layers")
    parser.add_argument("--num_chunks", type=int, default=1, help="pieces of the cross-entropy")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    def make_model(rngs):
        return Llama(
            vocab_size=args.vocab_size,
            embed_dim=args.embed_dim,
            num_layers=args.num_layers,
            num_heads=args.num_heads,
            num_kv_heads=args.num_kv_heads,
            head_dim=args.head_dim,
            mlp_dim=args.mlp_dim,
            max_seq_len=args.seq_len,
            rope_theta=10000.0,
            rope_scaling=None,
            norm_eps=1e-5,
            tie_embeddings=args.tied,
            init_std=None,
            dtype=args.dtype,
            param_dtype="float32",
            attention=args.attention,
            scan_layers=not args.unroll,
            remat=args.remat,
            rngs=rngs,
        )

    config = optim.OptimizerConfig(
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
    optimizer = optim.make_tx(config, total_steps=10**6)
    tx, schedule = optimizer.tx, optimizer.schedule
    mesh = sharding.make_mesh(fsdp=-1)
    rng = np.random.default_rng(0)
    shape = (args.batch_size, args.seq_len)
    tokens = rng.integers(0, args.vocab_size, (args.batch_size, args.seq_len + 1), np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(args.seq_len, dtype=np.int32), shape),
        "loss_mask": np.ones(shape, bool),
    }
    with jax.set_mesh(mesh):
        graphdef, abstract = step.abstract_state(make_model, tx, mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        init = functools.partial(step.init_state, make_model, tx, 0)
        state = jax.jit(init, out_shardings=shardings)()
        batch = global_batch(batch, mesh)
        train_step = step.jit_train_step(
            abstract,
            mesh,
            graphdef=graphdef,
            gradients=gradients.of_sums(
                functools.partial(language.next_token_loss, num_chunks=args.num_chunks),
                language.num_targets,
            ),
            tx=tx,
            schedule=schedule,
        )
        start = time.perf_counter()
        compiled = train_step.lower(abstract, batch).compile()
        state, metrics = jax.block_until_ready(compiled(state, batch))
        compile_seconds = time.perf_counter() - start
        seconds = []
        for _ in range(args.steps):
            start = time.perf_counter()
            state, metrics = jax.block_until_ready(compiled(state, batch))
            seconds.append(time.perf_counter() - start)
    tokens_per_step = args.batch_size * args.seq_len
    result = {
        "name": "maxlp",
        **vars(args),
        "num_params": sum(p.size for p in jax.tree.leaves(state["params"])),
        "compile_seconds": round(compile_seconds, 2),
        "step_seconds_min": min(seconds),
        "step_seconds_median": float(np.median(seconds)),
        "tokens_per_sec_max": tokens_per_step / min(seconds),
        "tokens_per_sec_median": tokens_per_step / float(np.median(seconds)),
        "loss": float(metrics["loss"]),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
