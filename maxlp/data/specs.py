"""Spec strings, `name?key=value&key=value`."""

import contextlib
import re
from collections.abc import Iterator


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


@contextlib.contextmanager
def naming_key(key: str) -> Iterator[None]:
    """Puts the key of the config that a spec comes from in front of a ValueError about the spec."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
