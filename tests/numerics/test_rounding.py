"""Rounding to every kind of format, against the types of ml_dtypes and numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxlp.numerics import formats, rounding
from maxlp.numerics.rounding import drop_bits

cast = jax.jit(rounding.cast, static_argnames=("to", "rounding"))

# The type of ml_dtypes (or numpy) with the same values as each of our formats.
REFERENCES = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float4_e2m1fn": ml_dtypes.float4_e2m1fn,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3": ml_dtypes.float8_e4m3,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m4": ml_dtypes.float8_e3m4,
    "e5m10": np.float16,
    "e8m7": ml_dtypes.bfloat16,
}


def samples(reference):
    """Finite numbers of every size, ties of the reference format and their neighbours, float32."""
    info = ml_dtypes.finfo(reference)
    smallest, largest = float(info.smallest_subnormal), float(info.max)
    codes = np.arange(2 ** (info.bits - 1), dtype=np.uint32)
    with np.errstate(invalid="ignore"):  # the codes of NaN
        grid = codes.astype(f"u{np.dtype(reference).itemsize}").view(reference).astype(np.float32)
    grid = np.sort(grid[np.isfinite(grid)])
    ties = grid[:-1] + (grid[1:] - grid[:-1]) / 2
    rng = np.random.default_rng(0)
    wide = np.exp(rng.uniform(np.log(smallest / 8), np.log(largest), 50_000)).astype(np.float32)
    x = np.concatenate([grid, ties, np.nextafter(ties, 0), np.nextafter(ties, np.float32(np.inf)), wide])
    if reference is ml_dtypes.bfloat16:  # float32's subnormals are flushed by the backends
        x = x[(x == 0) | (x >= np.finfo(np.float32).tiny)]
    return np.concatenate([x, -x]).astype(np.float32)


def bits(x):
    return np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}")


@pytest.mark.parametrize("name", REFERENCES)
def test_cast_is_bit_equal_to_the_reference_type(name):
    reference, to = REFERENCES[name], formats.get(name)
    x = samples(reference)
    x = x[np.abs(x) <= to.max]
    ours = np.asarray(cast(x, to)).astype(np.float32)
    np.testing.assert_array_equal(bits(ours), bits(x.astype(reference).astype(np.float32)))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "int8", "e4m3", "e3m4", "e5m10"])
def test_cast_saturates_and_keeps_nan(name):
    to = formats.get(name)
    big = np.float32([to.max * 1.001, 1e9 if to.max < 1e9 else 1e30, np.inf])
    np.testing.assert_array_equal(np.float32(cast(big, to)), to.max)
    np.testing.assert_array_equal(np.float32(cast(-big, to)), -to.max)
    nan = np.float32(cast(jnp.float32(np.nan), to))
    assert nan == 0 if name == "int8" else np.isnan(nan)


def test_int8_rounds_ties_to_even_and_is_symmetric():
    x = np.float32([-128, -127.5, -2.5, -1.5, -0.5, 0, 0.5, 1.5, 2.5, 126.5, 127, 127.5])
    np.testing.assert_array_equal(
        np.asarray(cast(x, formats.get("int8"))), np.clip(np.rint(x), -127, 127).astype(np.int8)
    )


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "e3m4", "e5m10"])
def test_truncation_gives_the_next_value_towards_zero(name):
    reference, to = REFERENCES[name], formats.get(name)
    x = samples(reference)
    x = x[np.abs(x) <= to.max]
    near = x.astype(reference)
    code = bits(near)
    back = np.where(np.abs(near.astype(np.float32)) > np.abs(x), code - 1, code).astype(code.dtype)
    ours = np.asarray(cast(x, to, "truncate")).astype(np.float32)
    np.testing.assert_array_equal(np.abs(ours), np.abs(back.view(reference).astype(np.float32)))


def test_truncation_without_a_zero_keeps_the_sign():
    x = np.float32([0.1, 0.9, 1, 2.9, 3, 14.9, 15, 99])
    ours = [np.asarray(cast(values, formats.get("midrise4"), "truncate")) for values in (x, -x)]
    np.testing.assert_array_equal(ours[0], [1, 1, 1, 1, 3, 13, 15, 15])
    np.testing.assert_array_equal(ours[1], -ours[0])


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "int8", "e8m7"])
def test_stochastic_rounding_is_unbiased_and_picks_neighbours(name):
    to = formats.get(name)
    step = 2.0 ** (to.min_exponent - to.mantissa_bits) if to.exponent_bits else 1.0
    points = [1.0, 1.03, -1.1, 3.7, 100.3] + ([0.3 * step, 2.6 * step] if name != "e8m7" else [])
    n = 200_000
    for i, value in enumerate(points):
        x = jnp.full(n, value, jnp.float32)
        q = np.asarray(cast(x, to, "stochastic", jax.random.key(i))).astype(np.float64)
        low, high = q.min(), q.max()
        assert len(np.unique(q)) <= 2 and low <= np.float32(value) <= high
        standard_error = (high - low) / 2 / np.sqrt(n)
        assert abs(q.mean() - np.float32(value)) <= 4 * standard_error


@pytest.mark.parametrize("name", [*formats.MATMULS, "e4m3", "e2m1fn", "e8m7"])
def test_numbers_of_a_format_stay_as_they_are(name, monkeypatch):
    """With any rounding, and whatever the noise."""
    to, rng = formats.get(name), np.random.default_rng(0)
    smallest = 2.0 ** (to.min_exponent - to.mantissa_bits) if 0 < to.exponent_bits < 8 else 0.1
    largest = min(to.max, 1e30)
    x = np.exp(rng.uniform(np.log(smallest), np.log(largest), 999)) * rng.choice([-1, 1], 999)
    exact = np.asarray(cast(x, to)).astype(np.float32)
    if to.odd:
        assert (np.abs(exact) % 2 == 1).all() and (np.abs(exact - x) <= 1).all()
    for noise in (0, 2**32 - 1):
        monkeypatch.setattr(jax.random, "bits", lambda _, shape, dtype, n=noise: jnp.full(shape, n, dtype))
        for how in ("nearest", "truncate", "stochastic"):
            again = rounding.cast(exact, to, how, jax.random.key(0))
            np.testing.assert_array_equal(np.asarray(again).astype(np.float32), exact)


@pytest.mark.parametrize(
    "dtype, drop, narrow", [("float32", 16, ml_dtypes.bfloat16), ("float16", 8, ml_dtypes.float8_e5m2)]
)
def test_stochastic_bits_carry_into_the_exponent_and_keep_nan(dtype, drop, narrow):
    """bfloat16 and E5M2 are the leading bits of float32 and float16, subnormals included."""
    size = np.dtype(dtype).itemsize
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2 ** (8 * size), 4000, np.uint64).astype(f"u{size}")
    codes[:2] = [2 ** (8 * size - 1) - 1, 2 ** (8 * size) - 1]  # NaNs that a carry would make zeros
    noise = rng.integers(0, 2**drop, codes.shape, np.uint32)
    x = codes.view(dtype)
    rounded = np.asarray(drop_bits(jnp.asarray(x), drop, "stochastic", jnp.asarray(noise)))
    leading = (codes >> drop) + ((codes & (2**drop - 1)) + noise >= 2**drop)
    expected = leading.astype(f"u{np.dtype(narrow).itemsize}").view(narrow)
    finite = np.isfinite(x)
    np.testing.assert_array_equal(rounded[finite], expected[finite].astype(dtype))
    np.testing.assert_array_equal(np.isnan(rounded), np.isnan(x))
