"""Block scales where the number of tokens is no multiple of a block."""

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
    """20 tokens give the numbers of 32 of which the last 12 are zero, to the bit."""
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


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("tokens", "split"),
    [
        ((8, 50), ("fsdp", None)),  # rows on devices, as of a CLIP
        ((2, 100), (None, "fsdp")),  # 25 tokens a device: blocks of 32 lie on two of them
        ((2, 64), (None, "fsdp")),  # 16 tokens a device, without padding
        ((24,), ("fsdp",)),  # pooled vectors, 6 a device
    ],
)
def test_blocks_are_those_of_one_device_on_every_mesh(tokens, split, kind):
    """Small integers: sums are exact in any order. The kernel's blocks are split too: 48 of 96 rows."""
    rng = np.random.default_rng(0)
    shapes = (*tokens, 96), (96, 64), (*tokens, 64)
    arrays = [jnp.asarray(rng.integers(-4, 5, shape), jnp.bfloat16) for shape in shapes]
    layer = Layer(make_recipe("mxfp8"))
    step = jax.jit(lambda *arrays, out: layer.step(layer.state, *arrays, out)[:3], static_argnames="out")
    expected = jax.device_get(step(*arrays, out=None))
    out = P(*split, None)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        specs = P(*split, "tensor"), P("tensor", None), out
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
