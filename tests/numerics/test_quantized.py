"""Quantized operands, against numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxlp.numerics import formats
from maxlp.numerics.quantized import dequantize, pad_to_blocks, quantize, rotate, trusted


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
    np.testing.assert_array_equal(bits(ours.codes), bits(values))
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
    with pytest.raises(ValueError, match=r"blocks of 32 do not divide .* \(4, 40\)") as error:
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
        # A scale is a quotient in float32.
        np.testing.assert_allclose(q.scale, [[scale]], rtol=0 if power_of_two else 1e-6)
        back = np.asarray(dequantize(q, jnp.float32))
        inside = np.abs(x) <= 448 * scale
        assert 0 < inside.mean() < 1
        # Half a step of E4M3: 2^-4 of a number, and 2^-10 of the scale below its smallest normal number.
        np.testing.assert_allclose(back[inside], x[inside], rtol=2**-4, atol=scale * 2.0**-10)
        np.testing.assert_allclose(np.abs(back[~inside]), 448 * scale, rtol=1e-6)


def test_dequantizing_to_bfloat16_rounds_once():
    """A scale that is no power of two is not rounded to bfloat16 before it multiplies."""
    x = np.random.default_rng(4).normal(size=(16, 32)).astype(np.float32)
    q = quantize(x, formats.get("int8"), "row", (1,))
    exact = np.asarray(q.codes, np.float32) * np.asarray(q.scale)
    np.testing.assert_array_equal(dequantize(q, jnp.bfloat16), exact.astype(ml_dtypes.bfloat16))


def test_tiles_share_a_scale_along_both_axes():
    """And so do not depend on the axis that a matmul sums over."""
    to, x = (
        formats.get("float8_e4m3fn"),
        np.random.default_rng(3).normal(size=(2, 64, 96)).astype(np.float32),
    )
    how = dict(block_size=32, block_scales="float32")
    q, other = (quantize(x, to, "tile", (axis,), **how) for axis in (1, 2))
    np.testing.assert_array_equal(bits(q.codes), bits(other.codes))
    amax = np.abs(x.reshape(2, 2, 32, 3, 32)).max((2, 4))
    np.testing.assert_array_equal(q.scale, amax * np.float32(1 / 448))
    divisor = np.repeat(np.repeat(np.asarray(q.scale), 32, 1), 32, 2)
    values = np.clip(x * (1 / divisor), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(bits(q.codes), bits(values))
    np.testing.assert_array_equal(dequantize(q, jnp.float32), values.astype(np.float32) * divisor)


def test_an_array_of_two_scales_comes_back():
    """NVFP4: blocks of 16 of very different sizes, each within half a step of E2M1 (1/4 of its value)."""
    rng = np.random.default_rng(4)
    x = (rng.normal(size=(8, 64)) * np.exp(rng.normal(size=(8, 1)))).astype(np.float32)
    q = quantize(x, formats.FORMATS["float4_e2m1fn"], "block", (1,), block_size=16, block_scales="e4m3")
    assert q.scale.shape == (8, 4) and q.tensor_scale.shape == ()
    back = np.asarray(dequantize(q, jnp.float32))
    amax = np.abs(x.reshape(8, 4, 16)).max(-1)
    # Half of the widest step, 2 of 6, and the rounding of the scale: 1/16 of the block's largest value.
    bound = np.repeat(amax * (1 / 6 + 1 / 16), 16, axis=-1)
    assert (np.abs(back - x) <= bound).all()


def test_rotation_keeps_products_and_spreads_outliers():
    rng = np.random.default_rng(5)
    a, b = (rng.normal(size=(3, 64, 8)).astype(np.float32) for _ in range(2))
    a[:, 5] *= 100
    rotated = [np.asarray(rotate(x, 1), np.float64) for x in (a, b)]
    product = np.einsum("btk,btn->bkn", *(np.float64(x) for x in (a, b)))
    # Sums of 16 terms in float32, for values of up to 100 times the rest.
    np.testing.assert_allclose(
        np.einsum("btk,btn->bkn", *rotated), product, rtol=0, atol=16 * 2.0**-23 * np.abs(product).max()
    )
    largest, of_rotated = np.abs(a[:, :16]).max(), np.abs(rotated[0][:, :16]).max()
    assert of_rotated < 0.3 * largest, "an outlier becomes 16 values of a quarter of its size"


def test_random_signs_keep_equal_values_from_becoming_an_outlier():
    ones = jnp.ones((2, 16))
    assert jnp.abs(rotate(ones, 1, random_signs=False)).max() == 4
    assert jnp.abs(rotate(ones, 1)).max() < 3


@pytest.mark.parametrize("name", ["int8", "midrise4"])
def test_what_is_clipped_by_more_than_half_a_step_gets_no_gradient(name):
    to = formats.get(name)
    x = jnp.arange(-to.max - 4, to.max + 4, 1 / 8, dtype=jnp.float32)
    q = quantize(x, to, "tensor", (0,), delayed_amax=jnp.float32(to.max))
    off = np.abs(dequantize(q, jnp.float32) - x)
    half_step = off[np.abs(x) <= to.max].max()  # of a value between two neighbours
    gradient = jax.grad(lambda x: jnp.sum(trusted(x, q, to)))(x)
    np.testing.assert_array_equal(gradient, off <= half_step)
    assert 0 < gradient.mean() < 1


def test_stochastic_rounding_is_right_on_average_and_depends_on_the_data_alone():
    to = formats.get("float4_e2m1fn")
    how = dict(block_size=16, block_scales="up", rounding="stochastic")
    x = np.full((4096, 16), 2.25, np.float32)  # between 2 and 3
    x[:, 0] = 6  # the scale is 1
    q, again = (dequantize(quantize(x, to, "block", (1,), **how), jnp.float32) for _ in range(2))
    np.testing.assert_array_equal(q, again)
    rest = np.asarray(q)[:, 1:]
    assert set(np.unique(rest)) == {2.0, 3.0}
    # 61,440 draws with probability 1/4 of a 3: five standard deviations are 0.0087.
    assert abs(rest.mean() - 2.25) < 5 * np.sqrt(0.25 * 0.75 / rest.size)
    x[0, 1] += 0.125
    other = dequantize(quantize(x, to, "block", (1,), **how), jnp.float32)
    assert np.mean(np.asarray(other) != np.asarray(q)) > 0.2, "other data, other draws"
