"""Scales, against numpy's frexp."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxlp.numerics import formats
from maxlp.numerics.quantized import dequantize, quantize
from maxlp.numerics.scales import amax, block_scales_for, ceil_power_of_two, scale_for


def test_scales():
    e4m3 = formats.get("float8_e4m3fn")

    def scale(a, **how):
        return np.asarray(scale_for(jnp.float32(a), e4m3, **how))

    assert scale(448) == 1 and scale(0) == 1
    assert scale(448, margin=2) == 4
    assert np.isnan(scale(np.nan)) and np.isinf(scale(np.inf))
    assert np.isnan(scale(np.nan, power_of_two=True)) and np.isinf(scale(np.inf, power_of_two=True))
    # Exponent of amax/448 rounded up: not ceil(log2 amax) - 8, which would give 2 for 300.
    for largest, expected in [(300, 1), (448, 1), (449, 2), (896, 2), (897, 4), (1e-3, 2.0**-18)]:
        assert scale(largest, power_of_two=True) == expected
    assert scale(1e-44) > 0  # a divisor must not be flushed to zero


@pytest.mark.parametrize("shape", [(7,), (4096,), (64, 256), (33, 100)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_amax_keeps_non_finite_numbers(shape, dtype):
    x = np.random.default_rng(0).standard_normal(shape)
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        x.flat[x.size // 3] = bad
        np.testing.assert_equal(np.asarray(jax.jit(amax)(jnp.asarray(x, dtype))), np.float32(abs(bad)))


def test_ceil_power_of_two_against_frexp():
    x = np.exp(np.random.default_rng(0).uniform(-80, 80, 10_000)).astype(np.float32)
    x = np.concatenate([x, 2.0 ** np.arange(-126, 127, dtype=np.float32)])
    mantissa, exponent = np.frexp(x)
    expected = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
    np.testing.assert_array_equal(np.asarray(ceil_power_of_two(x)), expected)
    assert ceil_power_of_two(jnp.float32(2.0**-126), 448.0) == 2.0**-126, "never subnormal, nor zero"


def test_a_power_of_two_is_the_smallest_that_does_not_saturate():
    """At the largest number of a format times a power of two, and one float32 above and below it."""
    for name in ("float8_e4m3fn", "float8_e5m2", "float16", "e3m4"):
        to = formats.FORMATS.get(name) or formats.get(name)
        for margin in (0, 3):
            edge = np.float32(to.max) * np.exp2(np.arange(-30, 30, dtype=np.float32) - margin)
            below, above = np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(np.inf))
            expected = np.exp2(np.arange(-30, 30, dtype=np.float32))
            for top, scale in ((below, expected), (edge, expected), (above, 2 * expected)):
                np.testing.assert_array_equal(scale_for(top, to, margin=margin, power_of_two=True), scale)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_the_floor_of_ocp_against_log2_and_what_it_saturates(name):
    """2^(floor(log2 amax) - emax): maxima between the format's largest number and 2^(emax + 1) saturate."""
    to, rng = formats.get(name), np.random.default_rng(0)
    amax = np.exp(rng.uniform(-60, 60, 10_000)).astype(np.float32)
    amax = np.concatenate([amax, 2.0 ** np.arange(-100, 100, dtype=np.float32)])
    floor, none = block_scales_for(amax, to, "floor")
    emax = {"float8_e4m3fn": 8, "float8_e5m2": 15, "float4_e2m1fn": 2}[name]
    np.testing.assert_array_equal(floor, np.exp2(np.floor(np.log2(amax.astype(np.float64))) - emax))
    assert none is None
    saturated = amax / np.asarray(floor) > to.max
    assert 0.1 < saturated.mean() < 0.5
    assert not (amax / np.asarray(block_scales_for(amax, to, "up")[0]) > to.max).any()
    edge, _ = block_scales_for(np.float32([0, np.inf, np.nan, 1e-44]), to, "floor")
    assert edge[0] == 1 and np.isinf(edge[1]) and np.isnan(edge[2]) and edge[3] > 0


def test_scales_of_nvfp4_against_numpy():
    """A tensor's float32 scale maps its maximum to 448 · 6; a block's is rounded to an E4M3 number."""
    amax = np.exp(np.random.default_rng(0).uniform(-9, 3, 1000)).astype(np.float32)
    scale, of_tensor = block_scales_for(amax, formats.FORMATS["float4_e2m1fn"], "e4m3")
    np.testing.assert_allclose(of_tensor, amax.max() / (448 * 6), rtol=1e-6)  # a quotient in float32
    exact = amax / (6 * np.float32(of_tensor))
    expected = np.maximum(exact.astype(ml_dtypes.float8_e4m3fn).astype(np.float32), 2.0**-9)
    np.testing.assert_allclose(scale, expected, rtol=2**-3)  # a tie may fall to either side
    assert np.mean(np.asarray(scale) == expected) > 0.99 and np.max(scale) == 448
    assert np.asarray(scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist() == scale.tolist()
    code = (exact / np.asarray(scale))[np.asarray(scale) >= 2.0**-6]  # of a block's amax, as a share of 6
    assert 1 < code.max() <= 17 / 16 * (1 + 1e-6)  # a midpoint of E4M3 is at most 17/16 of the number below
    zero, of_zeros = block_scales_for(np.zeros(3, np.float32), formats.FORMATS["float4_e2m1fn"], "e4m3")
    assert of_zeros == 1 and (zero > 0).all()
    _, infinite = block_scales_for(np.float32([1, np.inf]), formats.FORMATS["float4_e2m1fn"], "e4m3")
    assert np.isinf(infinite)


@pytest.mark.parametrize("name", ["int8", "float4_e2m1fn"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_block_hides_a_number_that_is_not_finite_in_another(name, bad):
    """Neither scales in E4M3 nor codes in int8 tell of it: the scale of the tensor does."""
    x = np.ones((1024, 64), np.float32)  # XLA's maximum of so many blocks loses NaN on CPUs
    x[512, 5] = bad
    how = dict(block_size=16, block_scales="e4m3")
    q = jax.jit(lambda x: quantize(x, formats.get(name), "block", (1,), **how))(x)
    assert not np.isfinite(q.tensor_scale) and not np.isfinite(dequantize(q, jnp.float32)).any()


@pytest.mark.parametrize("largest", [1e-31, 1e-33, 1e-34, 1e-44])
def test_blocks_of_zeros_in_a_tiny_tensor_have_a_scale_that_can_be_a_divisor(largest):
    """Zeros divided by a product of scales that is flushed to zero would be NaN."""
    x = np.zeros((3, 16), np.float32)
    x[0], x[1] = largest, largest / 2
    to, how = formats.get("float4_e2m1fn"), dict(block_size=16, block_scales="e4m3")
    q = jax.jit(lambda x: quantize(x, to, "block", (1,), **how))(x)
    assert np.all(np.asarray(q.scale * q.tensor_scale) >= np.finfo(np.float32).tiny)
    # A step of the scale and one of the code; numbers that the backends flush to zero become zero.
    np.testing.assert_allclose(dequantize(q, jnp.float32), x, rtol=2.0**-4, atol=np.finfo(np.float32).tiny)
