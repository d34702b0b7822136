"""Recipes whose blocks share a scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlp.numerics import formats
from maxlp.numerics.quantized import dequantize, quantize
from maxlp.precision import make_recipe
from tests.precision.fixtures import Layer


@pytest.mark.parametrize("residuals", ["full", "quantized"])
def test_tokens_are_padded_with_zeros_in_the_weight_gradient(residuals):
    """20 tokens give the same result as 32 of which the last 12 are zero, bit for bit."""
    rng = np.random.default_rng(0)
    layer = Layer(make_recipe("mxfp8", residuals=residuals))
    step = jax.jit(lambda *arrays: layer.step(layer.state, *arrays)[:3])
    kernel = jnp.asarray(rng.normal(size=(64, 96)), jnp.bfloat16)
    x, g = (jnp.asarray(rng.normal(size=(2, 20, dim)), jnp.bfloat16) for dim in (64, 96))
    padded = (jnp.pad(a, ((0, 0), (0, 12), (0, 0))) for a in (x, g))
    y, dx, dkernel = step(x, kernel, g)
    padded_x, padded_g = padded
    expected_y, expected_dx, expected = step(padded_x, kernel, padded_g)
    np.testing.assert_array_equal(y, expected_y[:, :20])
    np.testing.assert_array_equal(dx, expected_dx[:, :20])
    np.testing.assert_array_equal(dkernel, expected)
    exact = np.einsum("bsk,bsn->kn", *(np.asarray(a, np.float64) for a in (x, g)))
    assert np.linalg.norm(np.float64(dkernel) - exact) < 0.06 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    "tokens", [(3, length) for length in (1, 20, 50, 77, 100, 197, 257)] + [(3,), (2, 3, 5)]
)
@pytest.mark.parametrize(
    "option", [dict(), dict(format="e2m1"), dict(format="int8", residuals="quantized")]
)
def test_any_number_of_tokens_has_a_weight_gradient(tokens, option):
    """The lengths of CLIP's towers, a Llama's of 100, pooled vectors, and an axis more."""
    layer = Layer(make_recipe("mxfp8", **option))
    x, kernel, g = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((*tokens, 64), (64, 96), (*tokens, 96)))
    y, dx, dkernel, _ = jax.eval_shape(layer.step, layer.state, x, kernel, g)
    assert (y.shape, dx.shape, dkernel.shape) == (g.shape, x.shape, kernel.shape)


@pytest.mark.parametrize(
    ("tokens", "split"),
    [
        ((8, 50), ("fsdp", None)),  # rows on devices, as of a CLIP
        ((2, 100), (None, "fsdp")),  # 25 tokens a device: blocks of 32 lie on two of them
        ((2, 64), (None, "fsdp")),  # 16 tokens a device, without padding
        ((24,), ("fsdp",)),  # pooled vectors, 6 a device
    ],
)
def test_blocks_are_those_of_one_device_on_every_mesh(tokens, split):
    """Small integers: sums are exact in any order. The kernel's blocks are split too: 48 of 96 rows."""
    rng = np.random.default_rng(0)
    shapes = (*tokens, 96), (96, 64), (*tokens, 64)
    arrays = [jnp.asarray(rng.integers(-4, 5, shape), jnp.bfloat16) for shape in shapes]
    layer = Layer(make_recipe("mxfp8"))
    step = jax.jit(lambda *arrays, out: layer.step(layer.state, *arrays, out)[:3], static_argnames="out")
    expected = jax.device_get(step(*arrays, out=None))
    out = P(*split, None)
    specs = P(*split, "tensor"), P("tensor", None), out
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind, kind))
        with jax.set_mesh(mesh):
            placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
            actual = jax.device_get(step(*placed, out=out if kind == AxisType.Explicit else None))
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(("format", "dtype"), [("e4m3fn", jnp.bfloat16), ("e5m10", jnp.float32)])
def test_blocks_of_simulated_formats_are_multiplied_exactly(format, dtype):
    """In bfloat16 as far as it holds the format: up to 8 significant bits, times a power of two."""
    rng = np.random.default_rng(1)
    x, kernel, g = (rng.normal(size=shape).astype(np.float32) for shape in ((32, 64), (64, 96), (32, 96)))
    layer = Layer(make_recipe("simulate", format=format, granularity="block"))

    def step(*arrays):
        return layer.step(layer.state, *arrays)[:3]

    def rounded(a, axis):
        q = jax.jit(lambda a: dequantize(quantize(a, formats.get(format), "block", (axis,)), jnp.float32))(
            a
        )
        return np.asarray(q, np.float64)

    exact = (
        rounded(x, 1) @ rounded(kernel, 0),
        rounded(g, 1) @ rounded(kernel, 1).T,
        rounded(x, 0).T @ rounded(g, 0),
    )
    for ours, expected in zip(jax.jit(step)(x, kernel, g), exact, strict=True):
        # Sums of up to 96 terms in float32; a product in bfloat16 of 11 bits would be off by 2^-9.
        np.testing.assert_allclose(ours, expected, rtol=0, atol=96 * 2.0**-24 * np.abs(expected).max())
    matmuls = [e for e in jax.make_jaxpr(step)(x, kernel, g).eqns if e.primitive.name == "dot_general"]
    assert {v.aval.dtype for e in matmuls for v in e.invars} == {jnp.dtype(dtype)} and len(matmuls) == 3


@pytest.mark.parametrize(
    "name", ["fp8_blocks", *(pytest.param(name, marks=pytest.mark.full) for name in ("mxfp8", "nvfp4"))]
)
@pytest.mark.parametrize("options", [dict(), dict(grad_format="float8_e5m2")], ids=str)
def test_matmuls_are_those_of_the_dequantized_operands(name, options):
    """Independent of how the product is computed, with 40 tokens: no multiple of any block."""
    if name == "nvfp4":
        options = dict(hadamard=False, grad_rounding="nearest")
    recipe, rng = make_recipe(name, **options), np.random.default_rng(2)
    x, kernel, g = (rng.normal(size=s).astype(np.float32) for s in ((40, 128), (128, 256), (40, 256)))

    def rounded(array, operand, axis):
        pad = -array.shape[0] % operand.block_size if axis == 0 and len(array) == 40 else 0
        array = np.pad(array, ((0, pad), (0, 0)))
        how = dict(block_size=operand.block_size, block_scales=operand.block_scales)
        q = quantize(array, formats.get(operand.format), operand.granularity, (axis,), **how)
        return np.asarray(dequantize(q, jnp.float32), np.float64)

    expected = (
        rounded(x, recipe.fwd[0], 1) @ rounded(kernel, recipe.fwd[1], 0),
        rounded(g, recipe.dlhs[0], 1) @ rounded(kernel, recipe.dlhs[1], 1).T,
        rounded(x, recipe.drhs[0], 0).T @ rounded(g, recipe.drhs[1], 0),
    )
    layer = Layer(recipe)
    ours = jax.jit(lambda *arrays: layer.step(layer.state, *arrays)[:3])(x, kernel, g)
    for actual, product in zip(ours, expected, strict=True):
        # Sums of up to 256 terms in float32.
        np.testing.assert_allclose(actual, product, rtol=0, atol=256 * 2.0**-24 * np.abs(product).max())


@pytest.mark.parametrize("name", ["mxfp8", "fp8_blocks", "nvfp4"])
def test_only_nvfp4_rounds_a_row_by_the_other_rows_of_its_microbatch(name):
    rng = np.random.default_rng(6)
    x, kernel, g = (rng.normal(size=s).astype(np.float32) for s in ((4, 128), (128, 128), (4, 128)))
    x[3] *= 3
    layer = Layer(make_recipe(name))
    step = jax.jit(lambda x: layer.step(layer.state, x, kernel, g[: len(x)])[0])
    assert np.array_equal(step(x)[:2], step(x[:2])) == (name != "nvfp4")


def test_a_rotation_changes_no_product():
    """Both operands of the weight gradient are rotated, in a format that rounds nothing; 40 tokens."""
    rng = np.random.default_rng(3)
    x, kernel, g = (rng.normal(size=s).astype(np.float32) for s in ((40, 32), (32, 48), (40, 48)))
    layer = Layer(make_recipe("simulate", format="e8m23", granularity="unscaled", hadamard=True))
    dkernel = jax.jit(lambda *arrays: layer.step(layer.state, *arrays)[2])(x, kernel, g)
    # Sums of 16 and of 48 terms in float32.
    np.testing.assert_allclose(dkernel, x.T.astype(np.float64) @ g, rtol=0, atol=64 * 2.0**-24 * 40)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("mxfp8", {}, ["f8E4M3FN", "f8E8M0FNU"]),
        ("mxfp8", dict(block_scales="floor", grad_format="float8_e5m2"), ["f8E5M2>", "f8E8M0FNU"]),
        ("nvfp4", {}, ["f4E2M1FN", "f8E4M3FN>"]),
        ("nvfp4", dict(block_size=32), None),
        ("fp8_blocks", {}, None),
    ],
    ids=str,
)
def test_what_a_gpu_multiplies_in_blocks(name, options, expected):
    """Three block-scaled matmuls in the program for GPUs, where they have the format and the block size."""
    layer = Layer(make_recipe(name, **options))
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((128, 256), (256, 384), (128, 384))]
    step = jax.jit(lambda *arrays: layer.step(layer.state, *arrays)[:3])
    text = step.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "block_scaled_dot" in line and "custom_call" in line]
    assert len(calls) == (3 if expected else 0)
    for dtype in expected or ():
        assert any(dtype in line for line in calls)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_operands_of_the_hardware_are_laid_out_as_it_reads_them(name, monkeypatch):
    """`jax.nn.scaled_matmul`, emulated here, takes codes (B, rows, K) and scales (B, rows, K / block)."""

    def scaled_matmul(a, b, a_scale, b_scale, preferred_element_type):
        def values(codes, scale):
            block = codes.shape[2] // scale.shape[2]
            return codes.astype(jnp.float32) * jnp.repeat(scale.astype(jnp.float32), block, axis=2)

        y = jnp.einsum("brk,bck->brc", values(a, a_scale), values(b, b_scale))
        return y.astype(preferred_element_type)

    by_platform = jax.lax.platform_dependent

    def as_on_gpus(*operands, default=None, **branches):
        return branches.get("cuda", functools.partial(by_platform, default=default, **branches))(*operands)

    rng = np.random.default_rng(3)
    arrays = [
        rng.normal(size=shape).astype(np.float32) for shape in ((2, 64, 128), (128, 256), (2, 64, 256))
    ]
    layer = Layer(make_recipe(name))
    step = [jax.jit(lambda *arrays: layer.step(layer.state, *arrays)[:3]) for _ in range(2)]
    expected = step[0](*arrays)
    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)
    monkeypatch.setattr(jax.lax, "platform_dependent", as_on_gpus)
    for ours, theirs in zip(step[1](*arrays), expected, strict=True):
        # Sums of up to 256 terms in float32.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=256 * 2.0**-24 * np.abs(theirs).max())
