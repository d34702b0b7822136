"""Quantized operands, against numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxlp.numerics import formats
from maxlp.numerics.quantized import dequantize, pad_to_blocks, quantize


def bits(x):
    return np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}")


@pytest.mark.parametrize(
    "granularity, axes", [("tensor", (0, 1, 2)), ("row", (2,)), ("block", None), ("unscaled", None)]
)
def test_quantize_against_numpy(granularity, axes):
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(3, 5, 64)) * np.exp(rng.normal(size=(3, 5, 1)) * 3)).astype(np.float32)
    x[1, 2] = 0
    to = formats.get("float8_e4m3fn")
    ours = jax.jit(lambda x: quantize(x, to, granularity, (2,)))(x)
    if granularity == "block":
        a = np.abs(x.reshape(3, 5, 2, 32)).max(-1)
        mantissa, exponent = np.frexp(a * np.float32(1 / 448))
        scale = np.where(a == 0, 1, np.ldexp(np.float32(1), exponent - (mantissa == 0.5)))
        divisor = np.repeat(scale, 32, axis=-1)
    else:
        a = 448 if axes is None else np.abs(x).max(axes, keepdims=True)
        divisor = scale = np.where(a == 0, 1, np.float32(a) * np.float32(1 / 448)).astype(np.float32)
    values = np.clip(x * (np.float32(1) / divisor), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(ours.scale), np.broadcast_to(scale, ours.scale.shape))
    np.testing.assert_array_equal(bits(ours.values), bits(values))
    back = np.asarray(dequantize(ours, jnp.float32))
    np.testing.assert_array_equal(back, values.astype(np.float32) * divisor)
    if granularity != "unscaled":
        assert np.abs(back - x).max() / np.abs(x).max() < 2**-4


def test_mx_rounding_up_saturates_nothing():
    x = np.random.default_rng(0).normal(size=(4096, 32)).astype(np.float32)
    to = formats.get("float8_e4m3fn")
    q = quantize(x, to, "block", (1,))
    divided = np.abs(x) / np.asarray(q.scale)
    assert divided.max() <= 448
    error = np.asarray(dequantize(q, jnp.float32)) - x
    assert np.sqrt(np.mean(error**2)) == pytest.approx(0.0265, abs=5e-4)  # OCP's floor rule gives 0.0292


def test_blocks_must_divide_the_axis_or_be_padded():
    to, x = formats.get("float8_e4m3fn"), jnp.ones((4, 40))
    with pytest.raises(ValueError, match="multiple of 32, got 40") as error:
        quantize(x, to, "block", (1,))
    assert "\n" not in str(error.value)
    padded = pad_to_blocks(x, -1)
    np.testing.assert_array_equal(padded, np.pad(np.ones((4, 40)), ((0, 0), (0, 24))))
    np.testing.assert_array_equal(dequantize(quantize(padded, to, "block", (1,)), jnp.float32), padded)
    assert pad_to_blocks(padded, 1) is padded


@pytest.mark.parametrize("margin", [0.0, 1.0])
def test_a_scale_from_another_amax_leaves_the_margin_and_may_be_a_power_of_two(margin):
    """As for delayed scaling: the scale does not depend on the data, which saturates beyond it."""
    x = np.random.default_rng(2).normal(size=(8, 32)).astype(np.float32)
    to, given = formats.get("float8_e4m3fn"), np.float32(0.7)
    for power_of_two in (False, True):
        q = quantize(x, to, "tensor", (1,), delayed_amax=given, margin=margin, power_of_two=power_of_two)
        exact = 0.7 * 2**margin / 448
        scale = 2.0 ** np.ceil(np.log2(exact)) if power_of_two else exact
        np.testing.assert_allclose(q.scale, [[scale]], rtol=0 if power_of_two else 1e-6)
        back = np.asarray(dequantize(q, jnp.float32))
        inside = np.abs(x) <= 448 * scale
        assert 0 < inside.mean() < 1
        np.testing.assert_allclose(back[inside], x[inside], rtol=2**-4, atol=scale * 2.0**-10)
        np.testing.assert_allclose(np.abs(back[~inside]), 448 * scale, rtol=1e-6)


def test_dequantizing_to_bfloat16_rounds_once():
    """A scale that is no power of two is not rounded to bfloat16 before it multiplies."""
    x = np.random.default_rng(4).normal(size=(16, 32)).astype(np.float32)
    q = quantize(x, formats.get("int8"), "row", (1,))
    exact = np.asarray(q.values, np.float32) * np.asarray(q.scale)
    np.testing.assert_array_equal(dequantize(q, jnp.bfloat16), exact.astype(ml_dtypes.bfloat16))
