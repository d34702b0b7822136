"""Encoded optimizer states, against bitsandbytes and against all values of each format."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.numerics import blockwise
from maxlp.numerics.blockwise import dynamic_values
from maxlp.numerics.formats import FORMATS, STATES

GOLDEN = Path(__file__).parents[1] / "optim" / "goldens" / "dynamic8.npz"
FLOATS = ["float8_e4m3fn", "float8_e5m2", "float16"]
NEAREST = ["dynamic8", "float8_e4m3fn", "float16"]
KEY = jax.random.key(0)

STATIC = ("name", "signed", "block_size", "layer_axes")
encode = jax.jit(blockwise.encode, static_argnames=STATIC)
decode = jax.jit(blockwise.decode, static_argnames=STATIC[:3])


def wide(shape, decades=4, seed=0):
    """Numbers of many magnitudes, both signs."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 10.0 ** rng.uniform(-decades, 0, shape)).astype(np.float32)


def recoded(x, name, *, signed=True, block_size=0, layer_axes=0, key=KEY):
    """What decoding gives after encoding, as numpy."""
    codes = encode(x, name, signed=signed, block_size=block_size, layer_axes=layer_axes, key=key)
    return np.asarray(decode(codes, name, signed=signed, block_size=block_size))


def test_the_docstring_describes_how_every_format_is_rounded():
    assert set(STATES) <= set(re.findall(r"\w+", blockwise.__doc__))


@pytest.mark.parametrize("sign", ["signed", "unsigned"])
def test_dynamic8_equals_bitsandbytes(sign):
    """The same values, codes and decoding. Its CPU encoder is coarse: ours is at least as close."""
    golden = np.load(GOLDEN)
    signed, x = sign == "signed", golden[f"{sign}_x"]
    np.testing.assert_allclose(dynamic_values(signed), golden[sign], rtol=1e-6)  # theirs are float32
    ours = encode(jnp.asarray(x), "dynamic8", signed=signed, block_size=256)
    theirs = ours._replace(codes=jnp.asarray(golden[f"{sign}_codes"]))
    decoded = [np.asarray(decode(c, "dynamic8", signed=signed, block_size=256)) for c in (ours, theirs)]
    # Products with scales, rounded to float32.
    np.testing.assert_allclose(decoded[1], golden[f"{sign}_decoded"], rtol=1e-6)
    least = golden[sign][golden[sign] > 0].min() * np.abs(x).max()
    assert (np.abs(decoded[0] - x) <= np.abs(decoded[1] - x) * (1 + 1e-5) + least * (not signed)).all()


@pytest.mark.parametrize(("name", "signed"), [*((name, True) for name in NEAREST), ("dynamic8", False)])
def test_encoding_takes_the_nearest_value(name, signed):
    """Against all values of the format, found by decoding all of its codes."""
    x = wide((4, 96)) if signed else wide((4, 96)) ** 2
    got = recoded(x, name, signed=signed)
    if name == "dynamic8":
        values, top = dynamic_values(signed), 1.0
    else:
        to = FORMATS[name]
        codes = np.arange(2**to.bits).astype(f"u{to.bits // 8}")
        with np.errstate(invalid="ignore"):  # the codes of NaN
            values, top = codes.view(to.dtype).astype(np.float64), to.max
    values = values[np.isfinite(values) & (signed | (values > 0))]
    scale = np.abs(np.asarray(x, np.float64)).max() / top
    scale = scale if name == "dynamic8" else 2.0 ** np.ceil(np.log2(scale))
    error = np.abs(np.asarray(x, np.float64)[..., None] - scale * values).min(axis=-1)
    # What is decoded is rounded to float32, by up to 2^-24 of it.
    np.testing.assert_allclose(np.abs(got - x), error, atol=1e-7 * np.abs(x).max())


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("block_size", [0, 32])
def test_float_scales_are_powers_of_two_and_coding_twice_changes_nothing(name, block_size):
    x = 1e-9 * wide((3, 100), seed=1)
    once = encode(x, name, block_size=block_size, layer_axes=1, key=KEY)
    mantissa, _ = np.frexp(once.scale)
    assert (mantissa == 0.5).all()
    assert once.scale.shape == ((3, 4) if block_size else (3, 1))
    value = decode(once, name, block_size=block_size)
    again = encode(value, name, block_size=block_size, layer_axes=1, key=jax.random.key(1))
    np.testing.assert_array_equal(decode(again, name, block_size=block_size), value)
    assert 0.87 < np.abs(value).max() / np.abs(x).max() < 1.13, "the largest number does not overflow"


@pytest.mark.parametrize("signed", [True, False])
def test_companded8_is_within_half_a_step_of_its_function(signed):
    """FlashOptim's functions: 2x / (1 + |x|), and √x of numbers that are never negative."""

    def companded(x):
        return 2 * x / (1 + np.abs(x)) if signed else np.sqrt(x)

    x = wide((4, 96), seed=2, decades=3) if signed else np.square(wide((4, 96), seed=2, decades=3))
    largest = np.repeat(np.abs(x).reshape(4, 3, 32).max(axis=-1), 32, axis=-1).astype(np.float64)
    got = recoded(x, "companded8", signed=signed, block_size=32)
    error = companded(got / largest) - companded(x / largest)
    steps = 127 if signed else 255
    # Half a step; a whole one for the smallest code, which keeps a second moment from becoming zero.
    bound = np.where((companded(np.abs(x) / largest) < 0.5 / steps) & (not signed), 1, 0.5) / steps
    assert (np.abs(error) <= bound * (1 + 1e-4)).all()
    top = np.abs(x) == largest
    np.testing.assert_allclose(got[top], x[top], rtol=1e-6)  # the function and its inverse in float32


@pytest.mark.parametrize("name", ["dynamic8", "companded8", "int8", *FLOATS])
def test_a_second_moment_never_becomes_zero(name):
    """Not even where a division by the scale underflows, as that of 1e-35 by a scale of 1e3 does."""
    x = np.float32([[0.0, 1e-35, 1e-20, 1e-12, 1e-3, 1e3]])
    got = recoded(x, name, signed=False)
    assert (got[0, 1:] > 0).all() and got[0, 0] == 0
    assert (recoded(x, name)[0, 1:3] == 0).all(), "signed numbers may become zero"
    subnormal = recoded(np.float32([[0.0, 1e-40]]), name, signed=False)
    assert (subnormal == 0).all(), "the scale of zeros, 1, would make it large"


@pytest.mark.parametrize("name", ["dynamic8", "companded8", "int8", "int4", *FLOATS])
def test_zeros_stay_zeros(name):
    zeros = encode(np.zeros((1, 6), np.float32), name, layer_axes=0, key=KEY)
    assert (np.asarray(decode(zeros, name)) == 0).all() and (np.asarray(zeros.scale) == 1).all()


def test_an_outlier_costs_precision_in_its_block_only():
    x = wide((1, 512), decades=0.5)
    x[0, 3] = 1e6
    for name in ("float8_e4m3fn", "int8"):
        error = np.abs(recoded(x, name, block_size=256) - x)[0, 256:]
        whole = np.abs(recoded(x, name) - x)[0, 256:]
        assert error.mean() < 0.05 * whole.mean()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "float16"])
def test_nan_stays_nan_and_spoils_no_other_number(name):
    """Of any sign and payload: with random bits added, 0x7fffffff would become -0."""
    x = np.full((1, 64), 0.5, np.float32)
    x.view(np.uint32)[0, [3, 4, 5]] = [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF]
    got = recoded(x, name)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
    np.testing.assert_array_equal(got[~np.isnan(x)], x[~np.isnan(x)])


def test_each_layer_has_its_own_scale():
    x = wide((3, 8, 8)) * np.float32([1.0, 1e3, 1e-3]).reshape(3, 1, 1)
    together = recoded(x, "float8_e4m3fn", layer_axes=1)
    for i in range(3):
        np.testing.assert_array_equal(together[i], recoded(x[i], "float8_e4m3fn"))


@pytest.mark.parametrize(("name", "top"), [("int8", 127), ("int4", 7)])
def test_integers_are_within_half_a_step(name, top):
    x = wide((5, 64), decades=1)
    step = np.repeat(np.abs(x).reshape(5, 4, 16).max(axis=-1), 16, axis=-1) / top
    assert (np.abs(recoded(x, name, block_size=16) - x) <= 0.5001 * step).all()
    assert encode(x, name).codes.nbytes == x.size * (1 if name == "int8" else 0.5)


@pytest.mark.parametrize(("name", "bits"), [("bfloat16", 7), ("float8_e5m2", 2)])
def test_stochastic_rounding_picks_a_neighbour_and_is_unbiased(name, bits):
    x = wide((4, 50), decades=2)
    keys = jax.random.split(jax.random.key(0), 2000)
    rounded = np.asarray(jax.jit(jax.vmap(lambda k: decode(encode(x, name, key=k), name)))(keys))
    gap = 2.0 ** (np.floor(np.log2(np.abs(x))) - bits)
    assert (np.abs(rounded - x) < gap).all()
    np.testing.assert_allclose((rounded.mean(axis=0) - x) / gap, 0, atol=0.06)  # 5 σ of 0.5/√2000
    np.testing.assert_array_equal(recoded(rounded[0], name, key=keys[1]), rounded[0])


def test_a_second_moment_in_e5m2_decays():
    """By 2 % a step, where the next value below is 12 to 20 % away: rounded to nearest it would not."""
    x = np.linspace(1.0, 2.0, 1000, dtype=np.float32)[None]

    def decayed(x, key):
        codes = encode(0.98 * x, "float8_e5m2", signed=False, key=key)
        return decode(codes, "float8_e5m2", signed=False), None

    last, _ = jax.lax.scan(decayed, x, jax.random.split(KEY, 100))
    # 100 roundings give each of 1,000 numbers a standard deviation of 0.6 of it: 5 σ of 0.6 / √1000.
    np.testing.assert_allclose(last.mean() / x.mean(), 0.98**100, rtol=0.1)


@pytest.mark.parametrize("name", FLOATS)
def test_second_moments_keep_what_would_round_away_in_expectation(name):
    """A decay by 1e-4 is below half the distance of numbers in float16: with b2=0.9999 none would fall."""
    x = np.full((1, 2**20), 1 - 1e-4, np.float32)
    lost = 1 - recoded(x, name, signed=False).astype(np.float64).mean()
    np.testing.assert_allclose(lost, 1e-4, rtol=0.18)  # 5 σ of the 839 numbers that become 0.875 in E5M2
