"""Format names and limits, against ml_dtypes."""

from statistics import NormalDist

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxlp.numerics import formats


@pytest.mark.parametrize(
    "name, reference",
    [(name, f.dtype) for name, f in formats.FORMATS.items() if f.kind == "float"]
    + [
        ("e4m3fn", ml_dtypes.float8_e4m3fn),
        ("e4m3", ml_dtypes.float8_e4m3),
        ("e3m4", ml_dtypes.float8_e3m4),
        ("e2m1fn", None),
        ("e5m10", jnp.float16),
        ("e8m7", jnp.bfloat16),
    ],
)
def test_limits(name, reference):
    f = formats.FORMATS.get(name) or formats.get(name)
    if reference is None:
        assert (f.max, f.min_exponent, f.bits) == (4.0, 0, 4)  # of 3 top mantissas one is NaN
        return
    info = ml_dtypes.finfo(reference)
    assert (f.max, 2.0**f.min_exponent, f.bits) == (float(info.max), float(info.tiny), info.bits)
    assert f.needs_scale == (f.bits < 16 or name in ("float16", "e5m10"))


def test_blocks_have_the_size_of_the_specification():
    """OCP Microscaling Formats (MX) Specification 1.0, table 1; kernels for MXFP8 take no other."""
    assert formats.MX_BLOCK == 32


def test_formats_of_matmuls_are_distinct_from_those_of_states():
    kinds = ["float", "float", "int", "simulated", *3 * ["int"]]
    assert [formats.get(name).kind for name in formats.MATMULS] == kinds
    assert set(formats.STATES) | set(formats.MATMULS) == set(formats.FORMATS)
    for name in set(formats.FORMATS) - set(formats.MATMULS):
        with pytest.raises(ValueError, match=f"format='{name}' is unknown"):
            formats.get(name)


@pytest.mark.parametrize("name", [name for name, f in formats.FORMATS.items() if f.clip])
def test_gaussian_data_is_clipped_where_its_squared_error_is_least(name):
    """On 2^16 quantiles, against clipping 1 % earlier or later."""
    to = formats.get(name)
    quantiles = [NormalDist().inv_cdf((i + 0.5) / 2**16) for i in range(2**16)]

    def error(clip):
        x = np.clip(np.array(quantiles) * to.max / clip, -to.max, to.max)
        return np.mean((np.array(quantiles) - (2 * np.rint(x / 2 + 0.5) - 1) * clip / to.max) ** 2)

    assert error(to.clip) < min(error(0.99 * to.clip), error(1.01 * to.clip))
    assert to.max == 2**to.bits - 1 and to.bits == int(name[-1])


@pytest.mark.parametrize("name", ["fp8", "e9m2", "e1m2", "e4m24", "e8m3fn", "e4m0fn", "float8_e4m3"])
def test_unknown_names_are_one_line_errors(name):
    with pytest.raises(ValueError, match=r"format='.*' is unknown; one of float8_e4m3fn") as error:
        formats.get(name)
    assert "\n" not in str(error.value)
