"""Spec strings, `name?key=value&key=value`, optional libraries, and error messages."""

import contextlib
import importlib
import re
from collections.abc import Iterator
from typing import Any


def split_options(spec: str) -> tuple[str, dict[str, str]]:
    """Splits `name?key=value&key=value` into the name and the options.

    A `?` that is not followed by `key=` is part of the name, so wildcards stay as they are.

    Raises:
      ValueError: an option is given twice.
    """
    match = re.fullmatch(r"(.*?)\?(\w+=[^&?]*(?:&\w+=[^&?]*)*)", spec)
    if not match:
        return spec, {}
    parts = [part.split("=", 1) for part in match[2].split("&")]
    options = dict(parts)
    if len(options) < len(parts):
        raise ValueError(f"{spec!r} gives an option twice")
    return match[1], options


def import_extra(module: str, extra: str = "data") -> Any:
    """Imports an optional library, which the extra of this name installs.

    Raises:
      ValueError: the library is not installed; the message contains the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; run pip install 'maxlp[{extra}]'") from None


@contextlib.contextmanager
def naming_key(key: str) -> Iterator[None]:
    """Puts the key of the config that a spec comes from in front of a ValueError about the spec."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def one_line(error: BaseException) -> str:
    """The first line of an error's message, for use in another message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
