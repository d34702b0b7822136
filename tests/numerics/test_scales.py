"""Scales, against numpy's frexp."""

import jax.numpy as jnp
import numpy as np

from maxlp.numerics import formats
from maxlp.numerics.scales import ceil_power_of_two, scale_for


def test_scales():
    e4m3 = formats.get("float8_e4m3fn")

    def scale(a, **how):
        return np.asarray(scale_for(jnp.float32(a), e4m3, **how))

    assert scale(448) == 1 and scale(0) == 1
    assert scale(448, margin=2) == 4
    assert np.isnan(scale(np.nan)) and np.isinf(scale(np.inf))
    assert np.isnan(scale(np.nan, power_of_two=True)) and np.isinf(scale(np.inf, power_of_two=True))
    # Exponent of amax/448 rounded up: not ceil(log2 amax) - 8, which would give 2 for 300.
    for amax, expected in [(300, 1), (448, 1), (449, 2), (896, 2), (897, 4), (1e-3, 2.0**-18)]:
        assert scale(amax, power_of_two=True) == expected
    assert scale(1e-44) > 0  # a divisor must not be flushed to zero


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
            for amax, scale in ((below, expected), (edge, expected), (above, 2 * expected)):
                np.testing.assert_array_equal(scale_for(amax, to, margin=margin, power_of_two=True), scale)
