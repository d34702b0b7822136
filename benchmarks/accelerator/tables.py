"""Single operations: quantizers, attention, matmuls and layers by recipe, and the contrastive loss.

Each achieved rate is also given as a share of what this device reaches in a plain copy or a plain matmul.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from training import matmul_types

from benchmarks.accelerator.results import Result
from benchmarks.accelerator.training_runs import RUNS, make_config
from maxlp import precision
from maxlp.families.clip.contrastive import ContrastiveConfig, contrastive_sums
from maxlp.families.llama.model import Mlp
from maxlp.nn import attention
from maxlp.numerics import formats
from maxlp.parallel import sharding
from maxlp.precision import Recipe
from maxlp.precision.dot import QuantDot, quantize
from maxlp.run.settings import read

KERNEL_AXIS = (((1,), (0,)), ((), ()))
ROUND = 0.02  # seconds of calls between two readings of the clock: dozens of the shortest calls


def median_seconds(function: Callable[..., Any], *args: Any, rounds: int = 7) -> float:
    """Median seconds of a call of a compiled function, from rounds of many calls without waiting."""
    jax.block_until_ready(function(*args))
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    calls = max(1, round(ROUND / (time.perf_counter() - start)))
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*args)
        jax.block_until_ready(result)
        taken.append((time.perf_counter() - start) / calls)
    return statistics.median(taken)


def with_gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A function of (gradient of the result, *arguments): the result and the arguments' gradients."""

    def both(g, *args):
        y, pull = jax.vjp(function, *args)
        return y, *pull(g)

    return both


def compiled(function: Callable[..., Any], *args: Any) -> jax.stages.Compiled:
    return jax.jit(function).lower(*args).compile()


def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Random values; with constant ones a GPU draws less power, and so runs faster than in training."""
    return jax.random.normal(jax.random.key(len(shape)), shape, dtype)


# --- what the device reaches ----------------------------------------------------------------------------


def copy_bandwidth(tiny: bool) -> dict[str, float]:
    """Bytes per second that a copy reads and writes, together."""
    x = normal(2**16 if tiny else 2**29)  # 1 GiB
    return {"bytes_per_second": 2 * x.nbytes / median_seconds(compiled(jnp.negative, x), x)}


def measure_square(out: Result) -> float:
    """Measures a square matmul in bfloat16, in FLOP/s."""
    return reference(out, matmul_rate, "matmul 8192³, bfloat16")["flops"]


def reference(out: Result, measure: Callable[[bool], dict[str, float]], what: str) -> dict[str, Any]:
    """Measures the row to which the others of a piece are relative.

    Raises:
      RuntimeError: it cannot be measured, and so the piece fails.
    """
    row = out.measure(functools.partial(measure, out.tiny), what=what)
    if "error" in row:
        raise RuntimeError(f"{what}: {row['error']}")
    return row


def matmul_rate(tiny: bool) -> dict[str, float]:
    n = 128 if tiny else 8192
    a, b = (normal(n, n) for _ in range(2))
    multiply_both = functools.partial(multiply, dtype=jnp.bfloat16)
    return {"flops": 2 * n**3 / median_seconds(compiled(multiply_both, a, b), a, b)}


def multiply(a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.dot_general(a, b, KERNEL_AXIS, preferred_element_type=dtype)


# --- quantizers -----------------------------------------------------------------------------------------


def quantizers(out: Result) -> None:
    """Quantizes an activation with each kind of scale: the bytes that it must move at least, per second."""
    bandwidth = reference(out, copy_bandwidth, "copy")["bytes_per_second"]
    tokens, width = (256, 128) if out.tiny else (16384, 14336)
    x, history = normal(tokens, width), jnp.float32(4.0)
    for name in ("fp8_delayed", "fp8_current", "fp8_rowwise", "int8_all", "mxfp8"):
        measure = functools.partial(quantizer, name, x, history, bandwidth)
        out.measure(measure, what="quantize", shape=[tokens, width], recipe=name)


def quantizer(name: str, x: jax.Array, history: jax.Array, bandwidth: float) -> dict[str, Any]:
    function = functools.partial(quantize_input, in_training(name))
    seconds = median_seconds(compiled(function, x, history), x, history)
    rate = (x.nbytes + x.size) / seconds  # 16 bits read and 8 written
    return dict(ms=1e3 * seconds, bytes_per_second=rate, share=rate / bandwidth)


def in_training(name: str) -> Recipe:
    """A recipe as almost all steps have it: delayed scales do not wait for the data."""
    return dataclasses.replace(precision.make_recipe(name), cold_start=False)


def quantize_input(recipe: Recipe, x: jax.Array, delayed_amax: jax.Array) -> Any:
    """Quantizes an input as a layer does; with delayed scales it also computes the largest magnitude."""
    assert recipe.fwd is not None
    values = quantize(recipe, recipe.fwd[0], x, (1,), delayed_amax)
    return (values, jnp.max(jnp.abs(x))) if recipe.fwd[0].delayed else values


# --- attention ------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Attention of one layer.

    Attributes:
      documents: of about equal length in each row; 0 for no segment ids.
    """

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    documents: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the gradient of the output, and of queries, keys and values."""
        heads = (self.heads, self.heads, self.kv_heads, self.kv_heads)
        return [(self.batch, self.length, n, self.head_dim) for n in heads]


def attention_cases(small: bool) -> list[Case]:
    if small:
        return [
            Case("causal", 2, 256, 4, 2, 64, True, 0),
            Case("3 documents", 2, 256, 4, 2, 64, True, 3),
            Case("CLIP", 2, 50, 4, 4, 80, False, 0),
        ]
    return [
        Case("8 × 2,048", 8, 2048, 32, 8, 128, True, 0),
        Case("2 × 8,192", 2, 8192, 32, 8, 128, True, 0),
        Case("2 × 8,192, 1 document", 2, 8192, 32, 8, 128, True, 1),
        Case("2 × 8,192, 8 documents", 2, 8192, 32, 8, 128, True, 8),
        Case("1 × 32,768, 8 documents", 1, 32768, 32, 8, 128, True, 8),
        Case("ViT-H, 128 × 257", 128, 257, 16, 16, 80, False, 0),
    ]


def attention_kernels(case: Case) -> Iterator[str]:
    """The kernels that support a case on this device; ``xla`` only if its probabilities fit in memory."""
    device = jax.devices()[0]
    mesh = sharding.make_mesh(devices=[device])
    use = attention.Use(
        seq_len=case.length,
        num_heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype="bfloat16",
        packed=case.documents > 0,
        max_documents=case.documents,
        rows=case.batch,
    )
    for name in attention.KERNELS:
        fits = name != "xla" or case.batch * case.heads * case.length**2 <= 2**31
        refused = attention.refusal(name, use, dict(mesh.shape), device.platform, device.device_kind)
        if name not in (attention.AUTO, "ring") and fits and refused is None:
            yield name


def segment_ids(case: Case) -> jax.Array:
    """int32 (B, S), from 1."""
    row = 1 + np.arange(case.length, dtype=np.int32) * case.documents // case.length
    return jnp.tile(row, (case.batch, 1))


def attention_flops(case: Case) -> float:
    """Of the forward pass: two products over all pairs of a query and a key that it sees."""
    pairs = case.length**2 / max(1, case.documents) / (2 if case.causal else 1)
    return 4.0 * case.batch * case.heads * case.head_dim * pairs


def time_attention(out: Result) -> None:
    """Every kernel that takes a case: forward, and forward with backward."""
    rate = measure_square(out)
    for case in attention_cases(out.tiny):
        for name in attention_kernels(case):
            measure = functools.partial(measure_attention, name, case, rate)
            out.measure(measure, what="attention", kernel=name, case=case.name)


def measure_attention(name: str, case: Case, rate: float) -> dict[str, Any]:
    inputs = [normal(*shape) for shape in case.shapes]
    ids = segment_ids(case) if case.documents else None
    attend = functools.partial(attention.kernel(name), causal=case.causal, segment_ids_BS=ids)
    with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
        forward, whole = compiled(attend, *inputs[1:]), compiled(with_gradients(attend), *inputs)
        seconds = [median_seconds(forward, *inputs[1:]), median_seconds(whole, *inputs)]
    flops = attention_flops(case)  # the backward pass does 2.5 times as much
    rates = flops / seconds[0], 3.5 * flops / seconds[1]
    shares = [one / rate for one in rates]
    temporaries = whole.memory_analysis().temp_size_in_bytes
    return dict(ms=[1e3 * s for s in seconds], flops=rates, shares=shares, temporaries=temporaries)


# --- matmuls --------------------------------------------------------------------------------------------

# (tokens, inputs, outputs) of the linear layers of Llama 8B, and of ViT-H with 256 images of 257 patches
SHAPES = {
    "q, o": (16384, 4096, 4096),
    "k, v": (16384, 4096, 1024),
    "gate, up": (16384, 4096, 14336),
    "down": (16384, 14336, 4096),
    "ViT-H fc1": (65792, 1280, 5120),
}
TINY_SHAPES = {"square": (256, 128, 128)}
LAYERS = ("gate, up", "ViT-H fc1", "square")  # measured with all their quantization
GEMM_RECIPES = "bf16", "fp8_current", "int8_all"  # one of each kind of operands


def matmuls(out: Result) -> None:
    """Times each layer's three matmuls alone, then layers and SwiGLU blocks with their quantization."""
    rate = measure_square(out)
    shapes = TINY_SHAPES if out.tiny else SHAPES
    for where, size in shapes.items():
        for name in GEMM_RECIPES:
            for which in ("fwd", "dlhs", "drhs"):
                recipe = precision.make_recipe(name)
                measure = functools.partial(measure_matmuls, rate, gemm, recipe, which, *size)
                out.measure(measure, what=which, layer=where, recipe=name)
    recipes = [name for name in precision.RECIPES if name != "simulate"]
    for name in recipes[:3] if out.tiny else recipes:
        recipe = in_training(name)
        for where in filter(shapes.__contains__, LAYERS):
            measure = functools.partial(measure_matmuls, rate, layer, recipe, *shapes[where])
            out.measure(measure, what="layer", layer=where, recipe=name)
        block = (256, 128, 256) if out.tiny else SHAPES["gate, up"]
        measure = functools.partial(measure_matmuls, rate, swiglu, recipe, *block)
        out.measure(measure, what="block", layer="SwiGLU", recipe=name)


Work = tuple[Callable[..., Any], tuple, float]  # a function, its arguments and its FLOPs


def measure_matmuls(rate: float, make: Callable[..., Work], *args: Any) -> dict[str, Any]:
    function, operands, flops = make(*args)
    with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
        done = compiled(function, *operands)
    seconds = median_seconds(done, *operands)
    types = " ".join(f"{n}×{kind}" for kind, n in sorted(matmul_types(done.as_text() or "").items()))
    return dict(
        ms=1e3 * seconds,
        flops=flops / seconds,
        share=flops / seconds / rate,
        matmuls=types or "in fusions",
        temporaries=done.memory_analysis().temp_size_in_bytes,
    )


def gemm(recipe: Recipe, which: str, tokens: int, inputs: int, outputs: int) -> Work:
    """One matmul of the recipe on operands that are quantized already."""
    sizes = dict(
        fwd=(tokens, inputs, outputs), dlhs=(tokens, outputs, inputs), drhs=(inputs, tokens, outputs)
    )
    m, k, n = sizes[which]
    a, b = normal(m, k), normal(k, n)
    if (pair := getattr(recipe, which)) is not None:
        a, b = ((8 * x).astype(formats.get(o.format).dtype) for x, o in zip((a, b), pair, strict=True))
    kind = jnp.int32 if a.dtype == jnp.int8 else jnp.bfloat16
    return functools.partial(multiply, dtype=kind), (a, b), 2.0 * m * k * n


def linear(recipe: Recipe) -> tuple[Callable[..., Any], nnx.State]:
    """Forward and backward pass of one linear layer, and its initial state.

    The function takes (state, gradient of the output, input, kernel), and returns ((output, gradients of
    input and kernel), new state). Without the new state XLA would leave out the amaxes that delayed scaling
    records.
    """
    structure, state = nnx.split(QuantDot(recipe))

    def both(state, g, x, w):
        def product(x, w):
            dot = nnx.merge(structure, state, copy=True)
            return dot(x, w.astype(x.dtype), KERNEL_AXIS), nnx.state(dot)

        y, pull, new_state = jax.vjp(product, x, w, has_aux=True)
        return (y, *pull(g)), new_state

    return both, state


def layer(recipe: Recipe, tokens: int, inputs: int, outputs: int) -> Work:
    """A linear layer with a float32 kernel."""
    function, state = linear(recipe)
    kernel = normal(inputs, outputs, dtype=jnp.float32)
    arguments = (state, normal(tokens, outputs), normal(tokens, inputs), kernel)
    return function, arguments, 6.0 * tokens * inputs * outputs


def swiglu(recipe: Recipe, tokens: int, width: int, hidden: int) -> Work:
    """Forward and backward of Llama's MLP; quantization can fuse with its activations."""
    config = read(make_config(RUNS["8b_bf16"], tiny=True)).model
    model = Mlp(dataclasses.replace(config, embed_dim=width, mlp_dim=hidden), nnx.Rngs(0))
    precision.inject(model, recipe, rules=(("*", recipe),))
    structure, params, state = nnx.split(model, nnx.Param, ...)

    def both(params, state, x):
        def loss(params, x):
            model = nnx.merge(structure, params, state, copy=True)
            value = jnp.sum(jnp.square(model(x).astype(jnp.float32)))
            return value, nnx.split(model, nnx.Param, ...)[2]

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    return both, (params, state, normal(1, tokens, width)), 18.0 * tokens * width * hidden


# --- the contrastive loss -------------------------------------------------------------------------------


def contrastive(out: Result) -> None:
    """Times the loss and its gradients, with all logits at once and in tiles."""
    for pairs in (256,) if out.tiny else (32768, 131072):
        for width in (64,) if out.tiny else (512, 1024):
            for method in ("plain", "tiled") if pairs <= 32768 else ("tiled",):
                measure = functools.partial(measure_contrastive, pairs, width, method)
                out.measure(measure, pairs=pairs, width=width, method=method)


def measure_contrastive(pairs: int, width: int, method: str) -> dict[str, Any]:
    config = ContrastiveConfig(kind="softmax", method=method)
    image, text = (
        x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in normal(2, pairs, width, dtype=jnp.float32)
    )

    def loss(image, text, scale):
        return contrastive_sums(image, text, scale, 0.0, config)["loss"] / pairs

    with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
        args = (image, text, jnp.float32(14.0))
        done = compiled(jax.value_and_grad(loss, argnums=(0, 1, 2)), *args)
        seconds = median_seconds(done, *args, rounds=3)
    temporaries = done.memory_analysis().temp_size_in_bytes
    return dict(ms=1e3 * seconds, temporaries=temporaries, loss=float(done(*args)[0]))
