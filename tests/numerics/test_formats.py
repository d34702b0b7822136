"""Format names and limits, against ml_dtypes."""

import jax.numpy as jnp
import ml_dtypes
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
    assert [formats.get(name).kind for name in formats.MATMUL] == ["float", "float", "int", "simulated"]
    for name in set(formats.FORMATS) - set(formats.MATMUL):
        with pytest.raises(ValueError, match=f"format='{name}' is unknown"):
            formats.get(name)


@pytest.mark.parametrize("name", ["fp8", "e9m2", "e1m2", "e4m24", "float8_e4m3"])
def test_unknown_names_are_one_line_errors(name):
    with pytest.raises(ValueError, match=r"format='.*' is unknown; one of float8_e4m3fn") as error:
        formats.get(name)
    assert "\n" not in str(error.value)
