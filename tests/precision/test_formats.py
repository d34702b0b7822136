import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxlp.numerics import formats

# Each of ours beside the type of ml_dtypes (or numpy) with the same values.
REFERENCES = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
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
    codes = np.arange(2 ** (8 * np.dtype(reference).itemsize - 1), dtype=np.uint32)
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
    assert to.max == float(ml_dtypes.finfo(reference).max)
    x = samples(reference)
    x = x[np.abs(x) <= to.max]
    ours = np.asarray(jax.jit(lambda x: formats.cast(x, to))(x)).astype(np.float32)
    np.testing.assert_array_equal(bits(ours), bits(x.astype(reference).astype(np.float32)))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "int8", "e4m3", "e3m4", "e5m10"])
def test_cast_saturates_and_keeps_nan(name):
    to = formats.get(name)
    big = np.float32([to.max * 1.001, 1e9 if to.max < 1e9 else 1e30, np.inf])
    np.testing.assert_array_equal(np.float32(formats.cast(big, to)), to.max)
    np.testing.assert_array_equal(np.float32(formats.cast(-big, to)), -to.max)
    nan = np.float32(formats.cast(jnp.float32(np.nan), to))
    assert nan == 0 if name == "int8" else np.isnan(nan)


def test_int8_rounds_ties_to_even_and_is_symmetric():
    x = np.float32([-128, -127.5, -2.5, -1.5, -0.5, 0, 0.5, 1.5, 2.5, 126.5, 127, 127.5])
    np.testing.assert_array_equal(
        np.asarray(formats.cast(x, formats.get("int8"))), np.clip(np.rint(x), -127, 127).astype(np.int8)
    )


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "e3m4", "e5m10"])
def test_truncation_is_the_largest_value_not_beyond(name):
    reference, to = REFERENCES[name], formats.get(name)
    x = samples(reference)
    x = x[np.abs(x) <= to.max]
    near = x.astype(reference)
    code = bits(near)
    back = np.where(np.abs(near.astype(np.float32)) > np.abs(x), code - 1, code).astype(code.dtype)
    ours = np.asarray(formats.cast(x, to, "truncate")).astype(np.float32)
    np.testing.assert_array_equal(np.abs(ours), np.abs(back.view(reference).astype(np.float32)))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "int8", "e8m7"])
def test_stochastic_rounding_is_unbiased_and_picks_neighbours(name):
    to = formats.get(name)
    step = 2.0 ** (to.min_exponent - to.mantissa_bits) if to.exponent_bits else 1.0
    points = [1.0, 1.03, -1.1, 3.7, 100.3] + ([0.3 * step, 2.6 * step] if name != "e8m7" else [])
    n = 200_000
    for i, value in enumerate(points):
        x = jnp.full(n, value, jnp.float32)
        q = np.asarray(formats.cast(x, to, "stochastic", jax.random.key(i))).astype(np.float64)
        low, high = q.min(), q.max()
        assert len(np.unique(q)) <= 2 and low <= np.float32(value) <= high
        standard_error = (high - low) / 2 / np.sqrt(n)
        assert abs(q.mean() - np.float32(value)) <= 4 * standard_error


def test_scales():
    e4m3 = formats.get("float8_e4m3fn")
    scale = lambda a, **kw: np.asarray(formats.scale_for(jnp.float32(a), e4m3, **kw))  # noqa: E731
    assert scale(448) == 1 and scale(0) == 1
    assert scale(448, margin=2) == 4
    assert np.isnan(scale(np.nan)) and np.isinf(scale(np.inf))
    assert np.isnan(scale(np.nan, power_of_two=True)) and np.isinf(scale(np.inf, power_of_two=True))
    # Exponent of amax/448 rounded up: not ceil(log2 amax) - 8, which would give 2 for 300.
    for amax, expected in [(300, 1), (448, 1), (449, 2), (896, 2), (897, 4), (1e-3, 2.0**-18)]:
        assert scale(amax, power_of_two=True) == expected
    assert scale(1e-44) > 0  # what is flushed to zero must not divide


def test_ceil_power_of_two_against_frexp():
    x = np.exp(np.random.default_rng(0).uniform(-80, 80, 10_000)).astype(np.float32)
    x = np.concatenate([x, 2.0 ** np.arange(-126, 127, dtype=np.float32)])
    mantissa, exponent = np.frexp(x)
    expected = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
    np.testing.assert_array_equal(np.asarray(formats.ceil_power_of_two(x)), expected)


@pytest.mark.parametrize(
    "granularity, axes", [("tensor", (0, 1, 2)), ("row", (2,)), ("block", None), ("unscaled", None)]
)
def test_quantize_against_numpy(granularity, axes):
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(3, 5, 64)) * np.exp(rng.normal(size=(3, 5, 1)) * 3)).astype(np.float32)
    x[1, 2] = 0
    to = formats.get("float8_e4m3fn")
    ours = jax.jit(lambda x: formats.quantize(x, to, granularity, (2,)))(x)
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
    back = np.asarray(formats.dequantize(ours, jnp.float32))
    np.testing.assert_array_equal(back, values.astype(np.float32) * divisor)
    if granularity != "unscaled":
        assert np.abs(back - x).max() / np.abs(x).max() < 2**-4


def test_mx_rounding_up_saturates_nothing():
    x = np.random.default_rng(0).normal(size=(4096, 32)).astype(np.float32)
    to = formats.get("float8_e4m3fn")
    q = formats.quantize(x, to, "block", (1,))
    divided = np.abs(x) / np.asarray(q.scale)
    assert divided.max() <= 448
    error = np.asarray(formats.dequantize(q, jnp.float32)) - x
    assert np.sqrt(np.mean(error**2)) == pytest.approx(0.0265, abs=5e-4)  # OCP's floor rule gives 0.0292


def test_bad_names_and_blocks_are_one_line_errors():
    for name in ("fp8", "e9m2", "e1m2", "e4m24", "float8_e4m3"):
        with pytest.raises(ValueError, match=r"precision format .* is unknown; one of") as error:
            formats.get(name)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="multiple of 32, got 40"):
        formats.quantize(jnp.ones((4, 40)), formats.get("float8_e4m3fn"), "block", (1,))
