"""Binding the sections of a config to what they configure.

A config file is Python with ``get_config(arg)``. Each section of the `ConfigDict` that it returns holds the
arguments of exactly one function or dataclass: the signature is the schema, and nothing has a default in
two places. `bind` checks a section against the signature and its annotations (`schema`), and reports a
mismatch in one line.
"""

import contextlib
import difflib
import functools
import importlib.machinery
import inspect
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

import maxlp
from maxlp import schema

# An installed package holds the presets; in a checkout they lie beside it.
_PACKAGE = Path(maxlp.__file__).parent
PRESETS = next(filter(Path.is_dir, (_PACKAGE / "configs", _PACKAGE.parent / "configs")))

RENAMED = {"data.heldout_source": "data.validation_source"}  # keys of version 0.1 -> today's


class ConfigError(ValueError):
    """A config that cannot work; the message is one line for the user."""


def config_file(value: str) -> str:
    """``llama/debug:ARG`` as ``PATH/llama/debug.py:ARG``; the path of a file stays as it is.

    Raises:
      ConfigError: neither a file nor a preset; the message lists the presets.
    """
    name, colon, arg = value.partition(":")
    if Path(name).is_file():
        return value
    preset = Path(f"{PRESETS / name.removeprefix('configs/').removesuffix('.py')}.py")
    if preset.is_file():
        return f"{preset}{colon}{arg}"
    if not name:
        raise ConfigError(f"--config is empty; {choices()}")
    raise ConfigError(f"--config={name} is neither a file nor a preset; {choices(name)}")


def choices(name: str = "") -> str:
    """The presets, the one most like a name first, for messages."""
    close = [f"did you mean {preset}? " for preset in difflib.get_close_matches(name, presets(), 1)]
    return f"{''.join(close)}presets: {', '.join(presets())}"


def presets() -> list[str]:
    """Names for ``--config``, such as ``llama/debug``."""
    return sorted(str(path.relative_to(PRESETS).with_suffix("")) for path in PRESETS.glob("*/*.py"))


def load_file(path: str) -> ConfigDict:
    """Runs a config file, ``FILE.py``, ``FILE.py:ARG`` or a preset, and returns its config.

    Raises:
      ConfigError: there is no such file, or it fails; the message names the file and the line.
    """
    path, *arguments = config_file(path).split(":", 1)
    loader = importlib.machinery.SourceFileLoader("config_file", path)
    module = types.ModuleType(loader.name)
    module.__file__ = path
    try:
        # Not `exec_module`: it may run the bytecode of another file of this size and second.
        exec(loader.source_to_code(loader.get_data(path), path), vars(module))
        if not callable(get_config := getattr(module, "get_config", None)):
            raise ConfigError(f"{path} has no function get_config(arg), which returns the config")
        c = get_config(*arguments)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{_line_of(error, path)}: {_reason(error)}") from error
    if not isinstance(c, ConfigDict):
        raise ConfigError(
            f"{path}: get_config returns {type(c).__name__}, not a ConfigDict; return the config"
        )
    if any(arguments):
        from maxlp.run.presets import UNREAD, reads_argument

        if not reads_argument(get_config):
            raise ConfigError(f"--config={path}:{arguments[0]}: get_config {UNREAD}")
    return c.lock()


def _line_of(error: BaseException, path: str) -> str:
    """The last line of a file that an error went through, as FILE, line N."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    return f"{path}, line {lines[-1]}" if lines else path


def _reason(error: BaseException) -> str:
    """An error as one line; a ValueError is one of the config file's own checks, and needs no name."""
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def check_section(section: str, values: Any) -> None:
    """Raises a ConfigError unless what a config has as a section are keys and values."""
    if not isinstance(values, ConfigDict | Mapping):
        raise ConfigError(f"config.{section}={values!r} is not a section; write its keys and values")


def bind(function: Callable[..., Any], section: str, values: Any, *later: str) -> functools.partial:
    """``partial(function, **values)``, with the values checked against the function's annotations.

    A nested section becomes the dataclass that the signature asks for, or None if all of its values are
    None and the signature allows that. Where the type of an argument excludes None, None means its default
    value.

    Args:
      section: where the values come from, for messages ("optimizer").
      values: a ConfigDict or another mapping.
      later: arguments that the program supplies, and a config must not.

    Raises:
      ConfigError: an unknown, missing or wrong key or value.
    """
    check_section(section, values)
    parameters, hints = inspect.signature(function).parameters, schema.annotations(function)
    known = [name for name in parameters if name not in later]
    bound = {}
    for key, value in values.items():
        if new := RENAMED.get(f"{section}.{key}"):
            raise ConfigError(f"config.{section}.{key} is now config.{new}")
        if key not in known:
            raise ConfigError(f"config.{section}.{key} {schema.unknown_key(key, known)}")
        hint, required = hints.get(key, Any), parameters[key].default is inspect.Parameter.empty
        value = _convert(hint, f"{section}.{key}", value)
        if value is None and not schema.fits(None, hint):
            if required:
                raise ConfigError(f"config.{section}.{key} is not set; give --config.{section}.{key}=VALUE")
            continue
        with errors_of(section):
            schema.check_value(key, value, hint)
        bound[key] = value
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
    if (section_class := schema.section(hint)) is None:  # keywords, of which unset ones keep their defaults
        return {name: _convert(Any, key, item) for name, item in value.items() if item is not None}
    if type(None) in schema.options(hint) and all(item is None for item in value.values()):
        return None
    return call(section_class, key, value)
