"""Annotations as checks: a value that does not fit gives one line that begins with key and value."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import pytest

from maxlp import schema
from maxlp.schema import (
    Count,
    DecayRate,
    Fraction,
    NotEmpty,
    OneOf,
    Positive,
    PowerOfTwo,
    Range,
    RegularExpression,
    Seed,
)

NAMES = Annotated[str, OneOf({"a": 1, "b": 2})]
PAIRS = tuple[tuple[str, NAMES], ...]
UNBOUNDED = Annotated[float, Range(above=0, infinite=True)]


def without_address(value: object) -> str:
    """The name of a case, the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        ("1", int, "k='1' is of type str, expected int"),
        (True, int, "k=True is of type bool, expected int"),
        (1.0, int, "k=1.0 is of type float, expected int"),
        (1, bool, "k=1 is of type int, expected bool"),
        (None, str, "k=None is of type NoneType, expected str"),
        ("1", int | None, "k='1' is of type str, expected int or None"),
        ("1", Positive | None, "k='1' is of type str, expected float or None"),
        (2**63, int, f"k={2**63} does not fit into 64 bits"),
        (math.nan, float, "k=nan must be a finite number"),
        (-math.inf, float | None, "k=-inf must be a finite number"),
        (math.nan, UNBOUNDED, "k=nan must be a finite number"),
        (-math.inf, UNBOUNDED, "k=-inf must be above 0"),
        (1e39, float, "k=1e+39 must be a finite number of float32"),
        (0, Positive, "k=0 must be above 0"),
        (1e-50, Positive, "k=1e-50 must be above 0 in float32"),
        (-1, Count, "k=-1 must be at least 1"),
        (2**31, Count, "k=2147483648 must be at most 2147483647"),
        (2**32, Seed, "k=4294967296 must be at most 4294967295"),
        (1.5, Fraction | None, "k=1.5 must be between 0 and 1"),
        (1, DecayRate, "k=1 must be at least 0 and below 1"),
        (1 - 1e-9, DecayRate, "k=0.999999999 must be at least 0 and below 1 in float32"),
        (3.0, Annotated[float, PowerOfTwo()], "k=3.0 must be a power of two"),
        ("c", NAMES, "k='c' is unknown; one of a, b"),
        ("c", NAMES | None, "k='c' is unknown; one of a, b"),
        ("(", Annotated[str, RegularExpression()], "k='(' is not a regular expression: missing )"),
        ((), Annotated[tuple[str, ...], NotEmpty()] | None, "k=() has no values; give one"),
        ((1.0, 2.0), tuple[float, float, float], "k=(1.0, 2.0) must have 3 values, (float, float, float)"),
        ((1.0, math.nan), tuple[float, float], "k[1]=nan must be a finite number"),
        (("a",), PAIRS, "k[0]='a' is of type str, expected (str, str); on a command line, \"(('a', "),
        ((("x", "c"),), PAIRS, "k[0][1]='c' is unknown; one of a, b"),
        (["a"], tuple[str, ...], "k=['a'] is of type list, expected (str, …)"),
        ("a", tuple[str, ...], "k='a' is of type str, expected (str, …)"),
        ("a", Mapping[str, Any], "k='a' is of type str, expected keys and values"),
    ],
    ids=without_address,
)
def test_a_value_that_does_not_fit_is_one_line_with_its_key(value, hint, message):
    with pytest.raises(ValueError) as caught:
        schema.check_value("k", value, hint)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    assert not schema.fits(value, hint)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1, float),
        (np.float32(1), float),
        (np.int64(1), int),
        (2**31 - 1, Count),
        (2**32 - 1, Seed),
        (math.inf, UNBOUNDED),
        (None, Positive | None),
        (1, Fraction),
        (0.9999999, DecayRate),  # the largest float32 below 1 is 1 - 6e-8
        (math.log(100), Annotated[float, Range(at_most=math.log(100))]),  # its float32 is larger
        (2.0**-20, Annotated[float, PowerOfTwo()]),
        ((), tuple[str, ...]),
        ((("x", "a"), ("y", "b")), PAIRS),
        ({"x": 1}, Mapping[str, Any]),
        (object(), Any),
    ],
    ids=without_address,
)
def test_a_value_that_fits(value, hint):
    schema.check_value("k", value, hint)
    assert schema.fits(value, hint)


@dataclasses.dataclass(frozen=True)
class Inner:
    steps: Count


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner | None
    rate: Positive = 1.0

    def __post_init__(self):
        schema.check(self)


def test_a_dataclass_checks_its_fields():
    assert Outer(None) and Outer(Inner(1), rate=2)
    with pytest.raises(ValueError, match=r"^inner=3 is of type int, expected keys and values or None$"):
        Outer(3)
    with pytest.raises(ValueError, match=r"^rate=0 must be above 0$"):
        dataclasses.replace(Outer(None), rate=0)


def test_arguments_are_checked_by_the_signature():
    def function(steps: Count, other):
        pass

    schema.check_arguments(function, steps=1, other=object())
    with pytest.raises(ValueError, match=r"^steps=0 must be at least 1$"):
        schema.check_arguments(function, steps=0)


def test_an_unknown_key_names_the_nearest_and_all():
    known = ["learning_rate", "b1"]
    assert schema.unknown_key("lerning_rate", known) == (
        "is unknown (did you mean learning_rate?); keys: b1, learning_rate"
    )
    assert schema.unknown_key("zzz", known) == "is unknown; keys: b1, learning_rate"
    assert schema.unknown_key("zzz", []) == "is unknown; keys: none"
