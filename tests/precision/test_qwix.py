"""Formats against Google's library qwix, an independent emulation, where it has them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxlp.numerics import formats
from maxlp.numerics.quantized import dequantize, quantize
from maxlp.precision import make_recipe
from tests.precision.fixtures import Layer

qwix = pytest.importorskip("qwix", reason="needs pip install '.[dev]'")

BLOCKS = {  # qwix's name: ours, the size of a block, the rule of its scale
    "mxfp8": ("float8_e4m3fn", 32, "up"),
    "mxfp4": ("float4_e2m1fn", 32, "up"),
    "nvfp4": ("float4_e2m1fn", 16, "e4m3"),
}
# XLA's older emitters, with which the tests compile, round float32 to float16 on the way to E2M1.
ROUND_ONCE = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
ROWS = ("int8", "float8_e4m3fn", "float8_e5m2")


def both_in_blocks(name, x):
    """The array (N, K) in blocks along its last axis, by qwix and by us: values and scales of each."""
    kind, size, rule = BLOCKS[name]
    theirs = jax.jit(
        lambda x: qwix.quantize(x, name, channelwise_axes=[0], tiled_axes={1: size}),
        compiler_options=ROUND_ONCE,
    )(x)
    ours = jax.jit(
        lambda x: quantize(x, formats.get(kind), "block", (1,), block_size=size, block_scales=rule)
    )(x)
    assert theirs.qvalue.dtype == jnp.dtype(kind)
    return theirs, ours


def assert_equal(theirs, ours):
    np.testing.assert_array_equal(ours.codes.astype(jnp.float32), theirs.qvalue.astype(jnp.float32))
    np.testing.assert_array_equal(ours.scale, theirs.scale)


def bfloat16_up_to(largest):
    """Every bfloat16 up to a magnitude as float32, without the subnormal ones, which may be flushed."""
    x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    return x[(np.abs(x) <= largest) & ((x == 0) | (np.abs(x) >= np.finfo(np.float32).tiny))]


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_every_bfloat16_is_rounded_alike(name):
    """A block's largest number is that of the format, so that its scale is 1."""
    kind, size, _ = BLOCKS[name]
    largest = formats.get(kind).max
    x = bfloat16_up_to(largest)
    x = np.pad(x, (0, -len(x) % (size - 1))).reshape(-1, size - 1)
    x = np.pad(x, ((0, 0), (1, 0)), constant_values=largest)
    theirs, ours = both_in_blocks(name, x)
    assert_equal(theirs, ours)
    assert np.all(ours.scale == 1) and len(np.unique(theirs.qvalue.astype(jnp.float32))) > 14


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_scales_are_alike_for_every_exponent(name):
    """Neighbours share a block. qwix has scale 1 for blocks below 1e-19 of the format's largest number."""
    kind, size, _ = BLOCKS[name]
    x = np.sort(np.abs(bfloat16_up_to(np.finfo(np.float32).max)))
    x = x[: len(x) // size * size].reshape(-1, size)
    x = x[x.max(axis=1) > 2e-19 * formats.get(kind).max]
    theirs, ours = both_in_blocks(name, x)
    assert_equal(theirs, ours)
    assert len(np.unique(ours.scale)) > 180
    np.testing.assert_array_equal(jax.jit(qwix.dequantize)(theirs), dequantize(ours, jnp.float32))


def test_blocks_of_nvfp4_are_alike():
    """qwix has no scale of the tensor; one number makes ours 1, up to the two roundings of its division."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(64, 256)) * np.exp(2 * rng.normal(size=(64, 1)))).astype(np.float32)
    x[0, 0] = 448 * 6
    theirs, ours = both_in_blocks("nvfp4", x)
    assert_equal(theirs, ours)
    assert abs(ours.tensor_scale - 1) <= 2.0**-22 and len(np.unique(ours.scale)) > 50


@pytest.mark.parametrize("kind", ROWS)
def test_rows_are_alike(kind):
    """qwix maps the largest integer to 127.5; a calibration of 127.5 / 127 undoes it."""
    x = np.float32(np.random.default_rng(0).normal(size=(64, 256)))
    method = f"absmax,{127.5 / 127}" if kind == "int8" else "absmax"
    theirs = jax.jit(
        lambda x: qwix.quantize(x, jnp.dtype(kind), channelwise_axes=[0], calibration_method=method)
    )(x)
    ours = jax.jit(lambda x: quantize(x, formats.get(kind), "row", (1,)))(x)
    np.testing.assert_allclose(ours.scale, theirs.scale, rtol=3 * 2.0**-24)  # three roundings
    np.testing.assert_array_equal(ours.codes.astype(jnp.float32), theirs.qvalue.astype(jnp.float32))


@pytest.mark.parametrize("name", ["mxfp8", "int8_all"])
def test_matmuls_are_alike(name):
    """The forward matmul of a recipe and qwix's of the same operands; float32 sums in another order."""
    rng = np.random.default_rng(0)
    x, kernel = (np.float32(rng.normal(size=shape)) for shape in ((16, 128), (128, 64)))
    layer = Layer(make_recipe(name))
    y = jax.jit(layer.step)(layer.state, x, kernel, np.zeros((16, 64), np.float32))[0]

    def product(x, kernel):
        how = dict(qtype=jnp.int8, calibration_method=f"absmax,{127.5 / 127}")
        of_x = of_kernel = how
        if name == "mxfp8":
            of_x, of_kernel = (dict(qtype="mxfp8", tiled_axes={axis: 32}) for axis in (1, 0))
        q_x = qwix.quantize(x, channelwise_axes=[0], **of_x)
        q_kernel = qwix.quantize(kernel, channelwise_axes=[1], **of_kernel)
        return qwix.dot_general(q_x, q_kernel, (((1,), (0,)), ((), ())))

    largest_sum = (np.abs(x) @ np.abs(kernel)).max()
    np.testing.assert_allclose(y, jax.jit(product)(x, kernel), rtol=0, atol=128 * 2.0**-24 * largest_sum)
