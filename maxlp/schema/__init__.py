"""The values that config keys may have: annotations of fields and arguments, checked where they enter.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Schedule:
        kind: Annotated[str, OneOf(KINDS)]
        steps: Count
        peak: Positive
        floor: Fraction | None = None

        def __post_init__(self):
            schema.check(self)

An annotation is a type, and in `Annotated` the rules that go beyond it. Whatever the rules, an integer fits
into 64 bits and a number is finite in float32, the widest dtype that a model computes in: `Range` compares
strict bounds with the rounded number, so that 1 - 1e-9 is not below 1. Imports nothing else of maxlp.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Protocol

import numpy as np

_INTEGER = (int, np.integer)
_NUMBER = (*_INTEGER, float, np.floating)
_SCALAR = (str, *_NUMBER, type(None))
_TINY = float(np.finfo(np.float32).tiny)  # smaller numbers are zero: devices flush them


class Rule(Protocol):
    """What a value must fulfil beyond its type."""

    def error(self, value: Any) -> str | None:
        """What is wrong and how to fix it, as a phrase that follows KEY=VALUE; None for a valid value."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """Bounds of a number; ``infinite`` also allows infinity."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    infinite: bool = False

    def error(self, value: Any) -> str | None:
        """See `Rule`."""
        if self._holds(value, value if isinstance(value, _INTEGER) else _float32(value)):
            return None
        return f"must be {self}" + (" in float32" if self._holds(value, value) else "")

    def _holds(self, x: Any, rounded: Any) -> bool:
        return (
            (self.at_least is None or x >= self.at_least)
            and (self.above is None or rounded > self.above)
            and (self.at_most is None or x <= self.at_most)
            and (self.below is None or rounded < self.below)
        )

    def __str__(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            return f"between {self.at_least:.10g} and {self.at_most:.10g}"
        bounds = dict(at_least=self.at_least, above=self.above, at_most=self.at_most, below=self.below)
        parts = (f"{k.replace('_', ' ')} {v:.10g}" for k, v in bounds.items() if v is not None)
        return " and ".join(parts)


class OneOf:
    """One of these names; for a mapping, one of its keys."""

    def __init__(self, choices: Iterable[str]):
        self.choices = tuple(choices)

    def error(self, value: Any) -> str | None:
        return None if value in self.choices else f"is unknown; one of {', '.join(self.choices)}"


@dataclasses.dataclass(frozen=True)
class RegularExpression:
    """A regular expression of Python's `re`."""

    def error(self, value: Any) -> str | None:
        try:
            re.compile(value)
        except re.error as error:
            return f"is not a regular expression: {error}"
        return None


@dataclasses.dataclass(frozen=True)
class NotEmpty:
    """A tuple that has values."""

    def error(self, value: Any) -> str | None:
        return None if value else "has no values; give one or more, or leave it unset"


@dataclasses.dataclass(frozen=True)
class PowerOfTwo:
    """A power of two, which may be below 1."""

    def error(self, value: Any) -> str | None:
        return None if value > 0 and math.frexp(value)[0] == 0.5 else "must be a power of two"


INT32, UINT32 = Range(at_most=2**31 - 1), Range(at_most=2**32 - 1)
Count = Annotated[int, Range(at_least=1), INT32]
CountOrZero = Annotated[int, Range(at_least=0), INT32]
Seed = Annotated[int, Range(at_least=0), UINT32]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(at_least=0)]
Fraction = Annotated[float, Range(at_least=0, at_most=1)]
PositiveFraction = Annotated[float, Range(above=0, at_most=1)]
DecayRate = Annotated[float, Range(at_least=0, below=1)]


# --- checks ---------------------------------------------------------------------------------------------


def check(config: Any) -> None:
    """Checks the fields of a dataclass against their annotations; call it in ``__post_init__``.

    Raises:
      ValueError: the first value that does not fit; the message begins with KEY=VALUE.
    """
    hints = annotations(type(config))
    for field in dataclasses.fields(config):
        check_value(field.name, getattr(config, field.name), hints[field.name])


def check_arguments(function: Callable, **arguments: Any) -> None:
    """Checks arguments against the annotations of a function; raises as `check` does."""
    hints = annotations(function)
    for key, value in arguments.items():
        check_value(key, value, hints.get(key, Any))


def check_value(key: str, value: Any, hint: Any) -> None:
    """Checks one value against an annotation; raises as `check` does."""
    if isinstance(value, _SCALAR) and _scalar_fits(value, hint):
        return
    if message := _error(key, value, hint):
        raise ValueError(message)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value fits an annotation."""
    return _error("", value, hint) is None


# Remembered: the planner's search checks the same values in thousands of settings. (True is not 1.)
_scalar_fits = functools.lru_cache(maxsize=10_000, typed=True)(fits)


@functools.cache
def annotations(function: Callable) -> dict[str, Any]:
    """The annotations of the arguments of a function or a class, or of a dataclass's fields."""
    if inspect.isclass(function) and not dataclasses.is_dataclass(function):
        function = function.__init__
    return typing.get_type_hints(function, include_extras=True)


def options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def section(hint: Any) -> Any:
    """The dataclass that a nested section becomes: the annotation or a member of the union; else None."""
    return next((kind for kind in options(hint) if dataclasses.is_dataclass(kind)), None)


def unknown_key(key: str, known: Iterable[str], kind: str = "keys") -> str:
    """The phrase for an unknown key: the nearest known one, and all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(str(key), known, n=1)
    suggestion = f" (did you mean {near[0]}?)" if near else ""
    return f"is unknown{suggestion}; {kind}: {', '.join(known) or 'none'}"


# --- one value ------------------------------------------------------------------------------------------


def _error(key: str, value: Any, hint: Any) -> str | None:
    """The message for a value that does not fit; None if it fits."""
    hint, rules = _split(hint)
    if len(members := options(hint)) > 1:
        errors = [_error(key, value, member) for member in members]
        if None in errors:
            return None
        # For a value of the right type, the message of the rule it breaks; else one that names all types.
        of_type = (e for e, m in zip(errors, members, strict=True) if _is_instance(value, _split(m)[0]))
        return next(of_type, None) or _wrong_type(key, value, hint)
    if not _is_instance(value, hint):
        return _wrong_type(key, value, hint)
    if isinstance(value, tuple) and (items := _item_error(key, value, hint)):
        return items
    broken = _rule_error(value, rules)
    return None if broken is None else f"{key}={value!r} {broken}"


def _split(hint: Any) -> tuple[Any, tuple[Rule, ...]]:
    """An annotation's type and its rules."""
    if typing.get_origin(hint) is Annotated:
        kind, *rules = typing.get_args(hint)
        return kind, tuple(rules)
    return hint, ()


def _rule_error(value: Any, rules: tuple[Rule, ...]) -> str | None:
    """The phrase of the first rule that a value of the right type breaks."""
    if isinstance(value, _INTEGER) and not -(2**63) <= value < 2**63:
        return "does not fit into 64 bits; use a smaller number"
    if isinstance(value, _NUMBER) and not math.isfinite(_float32(value)):
        infinite = any(isinstance(rule, Range) and rule.infinite for rule in rules)
        if not (infinite and math.isinf(value)):
            return "must be a finite number" + (" of float32" if math.isfinite(value) else "")
    for rule in rules:
        phrase = rule.error(value)
        if phrase is not None:
            return phrase
    return None


def _item_error(key: str, value: tuple, hint: Any) -> str | None:
    """The message for a tuple with an item that does not fit."""
    kinds = typing.get_args(hint)
    if not kinds:
        return None
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(kinds) != len(value):
        return f"{key}={value!r} must have {len(kinds)} values, {name(hint)}"
    for i, (item, kind) in enumerate(zip(value, kinds, strict=True)):
        message = _error(f"{key}[{i}]", item, kind)
        if message is not None:
            return message
    return None


def _is_instance(value: Any, kind: Any) -> bool:
    """Whether a value is of a type, apart from what is in it."""
    if kind is None:
        return value is None
    if kind is Any:  # since Python 3.11 a class, of which nothing is an instance
        return True
    kind = typing.get_origin(kind) or kind
    if kind in (int, float):
        return isinstance(value, _INTEGER if kind is int else _NUMBER) and not isinstance(value, bool)
    return not isinstance(kind, type) or isinstance(value, kind)  # other annotations are not checked


def _wrong_type(key: str, value: Any, hint: Any) -> str:
    message = f"{key}={value!r} is of type {type(value).__name__}, expected {name(hint)}"
    kinds = typing.get_args(hint)
    if isinstance(value, str) and kinds[:1] == (str,) and Ellipsis not in kinds:
        message += "; on a command line, \"(('a', 'b'), ('c', 'd'))\""
    return message


def name(hint: Any) -> str:
    """An annotation in a message: "int or None", "(str, str)", "(str, …)"."""
    hint = _split(hint)[0]
    if len(members := options(hint)) > 1:
        return " or ".join(map(name, members))
    if hint in (None, type(None)):
        return "None"
    if typing.get_origin(hint) is tuple:
        kinds = ("…" if kind is Ellipsis else name(kind) for kind in typing.get_args(hint))
        return f"({', '.join(kinds)})"
    if dataclasses.is_dataclass(hint) or typing.get_origin(hint) is Mapping:
        return "keys and values"
    return getattr(hint, "__name__", str(hint))


def _float32(value: Any) -> float:
    """A number as a device computes with it."""
    try:
        with np.errstate(over="ignore"):
            x = float(np.float32(value))
    except OverflowError:  # an integer beyond float64
        return math.copysign(math.inf, value)
    return 0.0 if abs(x) < _TINY else x
