"""Binding the sections of a config to what they configure.

A config file is Python with ``get_config(arg)``. Each section of the `ConfigDict` that it returns holds the
arguments of exactly one function or dataclass: the signature is the schema, and nothing has a default in
two places. `bind` checks a section against the signature and reports a mismatch in one line.
"""

import contextlib
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

RENAMED = {"data.heldout_source": "data.validation_source"}  # keys of version 0.1 -> today's


class ConfigError(ValueError):
    """A config that cannot work; the message is one line for the user."""


def bind(function: Callable[..., Any], section: str, values: Any, *later: str) -> functools.partial:
    """``partial(function, **values)``, with the values checked against the function's signature.

    A nested section becomes the dataclass that the signature asks for, or None if all of its values are
    None and the signature allows that. Where the type of an argument excludes None, None means its default
    value.

    Args:
      section: where the values come from, for messages ("optimizer").
      values: a ConfigDict or another mapping.
      later: arguments that the program supplies, and a config must not.

    Raises:
      ConfigError: an unknown, missing or wrongly typed key.
    """
    signed = function.__init__ if inspect.isclass(function) else function
    parameters = inspect.signature(signed).parameters
    hints = typing.get_type_hints(signed)
    known = [name for name in parameters if name not in later and name != "self"]
    bound = {}
    for key, value in values.items():
        if new := RENAMED.get(f"{section}.{key}"):
            raise ConfigError(f"config.{section}.{key} is now config.{new}")
        if key not in known:
            raise ConfigError(f"config.{section}.{key} is unknown; keys: {', '.join(sorted(known))}")
        hint, required = hints.get(key, Any), parameters[key].default is inspect.Parameter.empty
        value = _convert(hint, f"{section}.{key}", value)
        if value is None and not required and not _fits(None, hint):
            continue
        bound[key] = _checked(hint, f"{section}.{key}", value)
    for key in known:
        if parameters[key].default is inspect.Parameter.empty and key not in values:
            raise ConfigError(f"config.{section}.{key} is missing; add it to the config file")
    return functools.partial(function, **bound)


def call(function: Callable[..., Any], section: str, values: Any, **extra: Any) -> Any:
    """``function(**values, **extra)``, bound as in `bind`."""
    bound = bind(function, section, values, *extra)
    with errors_of(section):
        return bound(**extra)


@contextlib.contextmanager
def errors_of(section: str) -> Iterator[None]:
    """Turns a ValueError whose message starts with a key of the section into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"config.{section}.{error}") from error


def _convert(hint: Any, key: str, value: Any) -> Any:
    """Config values as Python values: tuples for lists, dataclasses for nested sections."""
    if isinstance(value, list):  # JSON has no tuples
        return tuple(_convert(Any, key, item) for item in value)
    if not isinstance(value, ConfigDict | Mapping):
        return value
    kinds = (k for k in _options(hint) if isinstance(k, type) and dataclasses.is_dataclass(k))
    if (kind := next(kinds, None)) is None:
        return value.to_dict() if isinstance(value, ConfigDict) else dict(value)
    if type(None) in _options(hint) and all(item is None for item in value.values()):
        return None
    return call(kind, key, value)


def _checked(hint: Any, key: str, value: Any) -> Any:
    if _fits(value, hint):
        return value
    if value is None:
        raise ConfigError(f"config.{key} is not set; give --config.{key}=VALUE")
    expected = " or ".join(getattr(kind, "__name__", str(kind)) for kind in _options(hint))
    raise ConfigError(f"config.{key}={value!r} is of type {type(value).__name__}, expected {expected}")


def _options(hint: Any) -> tuple:
    """The members of a union, or the type itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type, as far as config values go."""
    if hint is Any:
        return True
    if len(options := _options(hint)) > 1:
        return any(_fits(value, option) for option in options)
    kind = typing.get_origin(hint) or hint
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) if isinstance(kind, type) else True
