r"""What does low precision gain? Time, TFLOP/s, speed-up over bfloat16 and memory of each recipe.

    python benchmarks/low_precision.py                       # a GPU or TPU: Llama 8B and ViT-H shapes
    python benchmarks/low_precision.py --shapes=tiny --repeats=2     # a CPU: only checks that it runs

Measures for every layer shape each of the three matmuls of a train step alone (operands already quantized),
and the whole layer forward and backward with all its quantization; then a SwiGLU block, whose activations
quantization can fuse with; and last whole train steps of a Llama (Llama 3.2 1B with a smaller vocabulary),
AdamW included. The last column shows what was really compiled: the matmuls of the optimized program by the
dtype of their operands. Prints a Markdown table; --json=FILE also writes the rows.

MFU is relative to the bfloat16 peak for every recipe, so that recipes compare; only the train steps have
one. passes.py counts the passes over the data that quantization costs, without a GPU.
"""

import argparse
import functools
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from training import CompiledRun, llama_config, random_text, timed

from maxlp import precision
from maxlp.core.train_state import num_params
from maxlp.nn import layers
from maxlp.numerics import formats
from maxlp.precision import Recipe
from maxlp.precision.dot import QuantDot
from maxlp.run.experiment import resolve
from maxlp.runtime import hardware

Row = dict[str, Any]
Work = tuple[Callable[..., Any], tuple, float]  # a function, its arguments and its FLOPs

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

# batch size, sequence length and sizes of the Llama that is trained
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


def median_seconds(function: Callable[..., Any], args: tuple, repeats: int) -> float:
    """Median time of a compiled call, after a first one that is not counted."""
    return statistics.median([timed(function, *args)[1] for _ in range(1 + repeats)][1:])


def matmul_types(hlo: str) -> str:
    """The matmuls of an optimized program by the dtypes of their operands: "3×f8e4m3fn·f8e4m3fn"."""
    types = dict(re.findall(r"%([\w.-]+) = \(?(\w+)\[", hlo))
    found = Counter()
    for line in hlo.splitlines():
        match = re.search(r"(?:cublas[^\"]*\"|= \S+ dot\(|= \S+ convolution\()", line)
        operands = re.search(r"(?:custom-call|dot|convolution)\(([^)]*)\)", line)
        if match and operands:
            names = re.findall(r"%([\w.-]+)", operands[1])[:2]
            found["·".join(types.get(name, "?") for name in names)] += 1
    return " ".join(f"{n}×{kind}" for kind, n in sorted(found.items())) or "in fusions"


def measure(what: str, work: Work, repeats: int) -> Row:
    function, args, flops = work
    compiled = jax.jit(function).lower(*args).compile()
    return row(what, compiled, median_seconds(compiled, args, repeats), flops)


def row(what: str, compiled: jax.stages.Compiled, seconds: float, flops: float) -> Row:
    memory = compiled.memory_analysis()
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        "what": what,
        "ms": 1e3 * seconds,
        "tflops": flops / seconds / 1e12,
        "gib": (peak - memory.alias_size_in_bytes) / 2**30,
        "matmuls": matmul_types(compiled.as_text()),
    }


def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Random values: with constant operands a GPU needs less power and runs faster than in training."""
    return jax.random.normal(jax.random.key(len(shape)), shape, dtype)


def gemm(recipe: Recipe, which: str, tokens: int, inputs: int, outputs: int) -> Work | None:
    """One matmul of the recipe on operands that are quantized already; None for formats in blocks."""
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


def layer(recipe: Recipe, tokens: int, inputs: int, outputs: int) -> Work:
    """Forward and backward of one linear layer with a float32 kernel."""
    structure, state = nnx.split(QuantDot(recipe))

    def both(state, x, w, g):
        def y(x, w):
            return nnx.merge(structure, state, copy=True)(x, w.astype(x.dtype), KERNEL_AXIS)

        y, pull = jax.vjp(y, x, w)
        return y, *pull(g)

    kernel = normal(inputs, outputs, dtype=jnp.float32)
    arguments = (state, normal(tokens, inputs), kernel, normal(tokens, outputs))
    return both, arguments, 6.0 * tokens * inputs * outputs


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


def swiglu(recipe: Recipe, tokens: int, width: int, hidden: int) -> Work:
    """Forward and backward of a SwiGLU block without a norm; quantization can fuse with its activations."""
    model = SwiGLU(width, hidden)
    precision.inject(model, recipe, rules=(("*", recipe),))
    structure, params, state = nnx.split(model, nnx.Param, ...)

    def both(params, state, x):
        def loss(params, x):
            y = nnx.merge(structure, params, state, copy=True)(x)
            return jnp.sum(jnp.square(y.astype(jnp.float32)))

        return jax.grad(loss, argnums=(0, 1))(params, x)

    return both, (params, state, normal(tokens, width)), 18.0 * tokens * width * hidden


def train_step(recipe: str, repeats: int, *, batch: int, length: int, **sizes: int) -> Row:
    """Train steps of a Llama as `maxlp.train` runs them, on one device."""
    model = {
        **sizes,
        "max_seq_len": length,
        "attention": "flash" if jax.default_backend() == "gpu" else "xla",
        "remat": "none",
    }
    changes = {
        "precision.recipe": recipe,
        "precision.first_blocks": 0,
        "precision.last_blocks": 0,
        "data.batch_size": batch,
        "data.seq_len": length,
        "loss.num_chunks": 4,
        "optimizer.warmup_steps": 10,
    }
    run = resolve(llama_config(model, changes), jax.devices()[:1])
    compiled = CompiledRun(run)
    state, data, times = compiled.initial_state(), random_text(run), []
    for _ in range(2 + repeats):
        (state, metrics), taken = timed(compiled.step, state, data)
        assert np.isfinite(metrics["loss"])
        times.append(taken)
    s = run.settings
    per_token = run.family.flops_per_unit(s.model, s.data, num_params(state["params"]))[1]
    seconds, flops = statistics.median(times[2:]), per_token * batch * length
    measured = row("step", compiled.step, seconds, flops)
    peak = hardware.published_flops(jax.devices()[0].device_kind)
    return measured | ({} if peak is None else {"mfu": flops / seconds / peak})


# --- the table ----------------------------------------------------------------------------------------


class Table:
    """The rows, printed as they come; bfloat16 must be the first recipe of each shape."""

    def __init__(self):
        self.rows: list[Row] = []
        self.base: dict[tuple[str, str, str], float] = {}  # milliseconds of the first recipe
        print("| shapes | layer | recipe | what | ms | TFLOP/s | × bf16 | MFU | GiB | matmuls |")
        print("|---|---|---|---|---:|---:|---:|---:|---:|---|")

    def add(self, shapes: str, where: str, recipe: str, row: Row) -> None:
        base = self.base.setdefault((shapes, where, row["what"]), row["ms"])
        row = {"shapes": shapes, "layer": where, "recipe": recipe, "speedup": base / row["ms"], **row}
        self.rows.append(row)
        mfu = f"{row['mfu']:.1%}" if "mfu" in row else ""
        print(
            f"| {shapes} | {where} | {recipe} | {row['what']} | {row['ms']:.3f} | {row['tflops']:.1f} "
            f"| {row['speedup']:.2f} | {mfu} | {row['gib']:.2f} | {row['matmuls']} |",
            flush=True,
        )


def measure_recipe(table: Table, shapes: str, name: str, repeats: int) -> None:
    recipe = precision.make_recipe(name)
    for where, size in SHAPES[shapes].items():
        for which in ("fwd", "dlhs", "drhs"):
            if (work := gemm(recipe, which, *size)) is not None:
                table.add(shapes, where, name, measure(which, work, repeats))
        table.add(shapes, where, name, measure("layer", layer(recipe, *size), repeats))
    table.add(shapes, "SwiGLU", name, measure("block", swiglu(recipe, *MLP[shapes]), repeats))
    if shapes in STEPS:
        table.add(shapes, "Llama", name, train_step(name, repeats, **STEPS[shapes]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="llama8b,vith", help=f"any of {', '.join(SHAPES)}")
    parser.add_argument("--recipes", default=",".join(precision.RECIPES))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", default="", help="file for the rows")
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, median of {args.repeats}\n")
    names = ["bf16", *(name for name in args.recipes.split(",") if name != "bf16")]
    table = Table()
    for shapes in args.shapes.split(","):
        for name in names:
            measure_recipe(table, shapes, name, args.repeats)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(table.rows, file, indent=1)


if __name__ == "__main__":
    main()
