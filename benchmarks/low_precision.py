r"""What low precision wins: time, TFLOP/s, speed-up over bfloat16 and memory for each recipe.

    python benchmarks/low_precision.py                       # a GPU or TPU: Llama 8B and ViT-H shapes
    python benchmarks/low_precision.py --shapes=tiny --repeats=2     # a CPU: does it run

For every layer shape: each of the three matmuls of a training step alone (operands already quantized), and
the whole layer forward and backward with all its quantization; then a SwiGLU block with the activations
that quantization can fuse with; at last whole training steps of a Llama (Llama 3.2 1B with a smaller
vocabulary), AdamW and all. The last column is the proof of what was compiled: the matmuls of the optimized
program by the type of their operands. Prints a Markdown table; --json=FILE keeps the rows.

MFU is of the bfloat16 peak for every recipe, so that it compares; only the steps of Llama have one. What
quantization costs in passes over the data is in passes.py, for which no GPU is needed.
"""

import argparse
import functools
import json
import re
import statistics
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlp import optim, precision
from maxlp.core import gradients
from maxlp.core import train_step as step
from maxlp.families.llama import task as language
from maxlp.families.llama.flops import train_flops_per_token
from maxlp.families.llama.model import Llama
from maxlp.nn import layers
from maxlp.numerics import formats
from maxlp.parallel import sharding
from maxlp.parallel.batches import global_batch
from maxlp.precision import QuantDot
from maxlp.runtime import hardware

# (tokens, inputs, outputs) of the linear layers; ViT-H: 256 images of 257 patches
SHAPES = {
    "llama8b": {
        "q, o": (16384, 4096, 4096),
        "k, v": (16384, 4096, 1024),
        "gate, up": (16384, 4096, 14336),
        "down": (16384, 14336, 4096),
    },
    "vith": {
        "qkv": (65792, 1280, 3840),
        "out": (65792, 1280, 1280),
        "fc1": (65792, 1280, 5120),
        "fc2": (65792, 5120, 1280),
    },
    "tiny": {"square": (256, 128, 128), "wide": (256, 128, 256)},
}
MLP = {"llama8b": (16384, 4096, 14336), "vith": (65792, 1280, 5120), "tiny": (256, 128, 256)}
KERNEL_AXIS = (((1,), (0,)), ((), ()))

# batch, length and sizes of the Llama that is trained
STEPS = {
    "llama8b": dict(
        batch=8, length=2048, vocab_size=32768, embed_dim=2048, num_layers=16, num_heads=32, num_kv_heads=8,
        head_dim=64, mlp_dim=8192,
    ),
    "tiny": dict(
        batch=2, length=64, vocab_size=256, embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=16, mlp_dim=128,
    ),
}  # fmt: skip


def seconds(function, args, repeats: int) -> float:
    """Median time of a compiled call."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def matmul_types(hlo: str) -> str:
    """ "3×f8e4m3fn·f8e4m3fn": the matmuls of an optimized program by their operands."""
    types = dict(re.findall(r"%([\w.-]+) = \(?(\w+)\[", hlo))
    found = Counter()
    for line in hlo.splitlines():
        match = re.search(r"(?:cublas[^\"]*\"|= \S+ dot\(|= \S+ convolution\()", line)
        operands = re.search(r"(?:custom-call|dot|convolution)\(([^)]*)\)", line)
        if match and operands:
            names = re.findall(r"%([\w.-]+)", operands[1])[:2]
            found["·".join(types.get(name, "?") for name in names)] += 1
    return " ".join(f"{n}×{kind}" for kind, n in sorted(found.items())) or "in fusions"


def measure(name: str, function, args, flops: float, repeats: int) -> dict:
    compiled = jax.jit(function).lower(*args).compile()
    return row(name, compiled, seconds(compiled, args, repeats), flops)


def row(name: str, compiled, taken: float, flops: float) -> dict:
    memory = compiled.memory_analysis()
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return dict(
        what=name,
        ms=1e3 * taken,
        tflops=flops / taken / 1e12,
        gib=(peak - memory.alias_size_in_bytes) / 2**30,
        matmuls=matmul_types(compiled.as_text()),
    )


def normal(*shape: int, dtype=jnp.bfloat16) -> jax.Array:
    """Random, as constant operands would save a GPU power and flatter it."""
    return jax.random.normal(jax.random.key(len(shape)), shape, dtype)


def gemm(recipe, which: str, tokens: int, inputs: int, outputs: int):
    """One matmul of the recipe on operands that are quantized already, and its FLOPs."""
    sizes = dict(
        fwd=(tokens, inputs, outputs), dlhs=(tokens, outputs, inputs), drhs=(inputs, tokens, outputs)
    )
    m, k, n = sizes[which]
    pair = getattr(recipe, which)
    a, b = normal(m, k), normal(k, n)
    if pair is None:
        kind = jnp.bfloat16
    elif pair[0].granularity == "block":
        return None
    else:
        a, b = ((8 * x).astype(formats.get(o.format).dtype) for x, o in zip((a, b), pair, strict=True))
        kind = jnp.int32 if a.dtype == jnp.int8 else jnp.bfloat16
    dot = functools.partial(jax.lax.dot_general, dimension_numbers=KERNEL_AXIS, preferred_element_type=kind)
    return dot, (a, b), 2.0 * m * k * n


def layer(recipe, tokens: int, inputs: int, outputs: int):
    """Forward and backward of one linear layer with a float32 kernel."""
    structure, state = nnx.split(QuantDot(recipe))

    def both(state, x, w, g):
        def y(x, w):
            return nnx.merge(structure, state, copy=True)(x, w.astype(x.dtype), KERNEL_AXIS)

        y, pull = jax.vjp(y, x, w)
        return y, *pull(g)

    kernel = normal(inputs, outputs, dtype=jnp.float32)
    return both, (state, normal(tokens, inputs), kernel, normal(tokens, outputs))


class SwiGLU(nnx.Module):
    def __init__(self, width: int, hidden: int):
        how = dict(
            axes=(None, None), std=0.02, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(0)
        )
        self.gate_proj = layers.Linear(width, hidden, **how)
        self.up_proj = layers.Linear(width, hidden, **how)
        self.down_proj = layers.Linear(hidden, width, **how)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def swiglu(recipe, tokens: int, width: int, hidden: int):
    """Forward and backward of a norm-free SwiGLU block: producers and consumers to fuse with."""
    model = SwiGLU(width, hidden)
    precision.inject(model, recipe, rules=(("*", recipe),))
    structure, params, state = nnx.split(model, nnx.Param, ...)

    def both(params, state, x):
        def loss(params, x):
            y = nnx.merge(structure, params, state, copy=True)(x)
            return jnp.sum(jnp.square(y.astype(jnp.float32)))

        return jax.grad(loss, argnums=(0, 1))(params, x)

    return both, (params, state, normal(tokens, width))


def train_step(recipe, repeats: int, *, batch: int, length: int, **sizes) -> dict:
    """Training steps of a Llama as `maxlp.train` runs them, on one device."""
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    attention = "cudnn" if jax.default_backend() == "gpu" else "xla"
    how = dict(rope_theta=5e5, rope_scaling=None, norm_eps=1e-5, tie_embeddings=False, init_std=0.02,
               dtype="bfloat16", param_dtype="float32", attention=attention, scan_layers=True,
               remat="none", max_seq_len=length)  # fmt: skip

    def make_model(rngs):
        model = Llama(**sizes, **how, rngs=rngs)
        precision.inject(model, recipe)
        return model

    config = optim.OptimizerConfig(
        learning_rate=3e-4, warmup_steps=10, final_lr_fraction=0.1, clip_norm=1.0,
        weight_decay=0.1, b1=0.9, b2=0.95, eps=1e-8,
    )  # fmt: skip
    optimizer = optim.make_tx(config, total_steps=1000)
    tx, schedule = optimizer.tx, optimizer.schedule
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, sizes["vocab_size"], (batch, length + 1), np.int32)
    data = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((batch, length), np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (batch, 1)),
        "loss_mask": np.ones((batch, length), bool),
    }
    with jax.set_mesh(mesh):
        graphdef, abstract = step.abstract_state(make_model, tx, mesh)
        state = jax.jit(functools.partial(step.init_state, make_model, tx, 0))()
        loss = functools.partial(language.next_token_loss, num_chunks=4)
        function = step.jit_train_step(
            abstract,
            mesh,
            graphdef=graphdef,
            gradients=gradients.of_sums(loss, language.num_targets),
            tx=tx,
            schedule=schedule,
        )
        data = global_batch(data, mesh)
        compiled = function.lower(state, data).compile()
        times = []
        for _ in range(repeats + 2):
            start = time.perf_counter()
            state, out = compiled(state, data)
            assert np.isfinite(float(out["loss"]))  # waits
            times.append(time.perf_counter() - start)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(abstract["params"]))
    looked_up = sizes["vocab_size"] * sizes["embed_dim"]
    per_token = train_flops_per_token(
        num_params - looked_up, sizes["num_layers"], sizes["num_heads"], sizes["head_dim"], length
    )[1]
    flops = per_token * batch * length
    found = row("step", compiled, statistics.median(times[2:]), flops)
    return found | dict(mfu=flops / (found["ms"] / 1e3) / hardware.peak_flops().flops)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="llama8b,vith", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--recipes", default=",".join(precision.RECIPES))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", default="", help="file for the rows")
    args = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, median of {args.repeats}\n")
    print("| shapes | layer | recipe | what | ms | TFLOP/s | × bf16 | MFU | GiB | matmuls |")
    print("|---|---|---|---|---:|---:|---:|---:|---:|---|")
    rows, base = [], {}

    def add(shapes: str, where: str, recipe: str, row: dict) -> None:
        key = (shapes, where, row["what"])
        base.setdefault(key, row["ms"])  # bf16 comes first
        row = dict(shapes=shapes, layer=where, recipe=recipe, speedup=base[key] / row["ms"], **row)
        rows.append(row)
        mfu = f"{row['mfu']:.1%}" if "mfu" in row else ""
        print(
            f"| {shapes} | {where} | {recipe} | {row['what']} | {row['ms']:.3f} | {row['tflops']:.1f} "
            f"| {row['speedup']:.2f} | {mfu} | {row['gib']:.2f} | {row['matmuls']} |",
            flush=True,
        )

    names = ["bf16", *(name for name in args.recipes.split(",") if name != "bf16")]
    for shapes in args.shapes.split(","):
        for name in names:
            recipe = precision.make_recipe(name)
            for where, size in SHAPES[shapes].items():
                for which in ("fwd", "dlhs", "drhs"):
                    if (made := gemm(recipe, which, *size)) is not None:
                        dot, operands, flops = made
                        add(shapes, where, name, measure(which, dot, operands, flops, args.repeats))
                function, operands = layer(recipe, *size)
                flops = 6.0 * size[0] * size[1] * size[2]
                add(shapes, where, name, measure("layer", function, operands, flops, args.repeats))
            function, operands = swiglu(recipe, *MLP[shapes])
            tokens, width, hidden = MLP[shapes]
            flops = 18.0 * tokens * width * hidden
            add(shapes, "SwiGLU", name, measure("block", function, operands, flops, args.repeats))
            if shapes in STEPS:
                add(shapes, "Llama", name, train_step(recipe, args.repeats, **STEPS[shapes]))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
