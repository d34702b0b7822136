"""Configs: what the commands do with a ``--config`` file before anything expensive starts.

A config file is Python with ``get_config(arg)``; each section of the `ConfigDict` it returns is the keyword
arguments of exactly one function, so the function's signature is the schema and nothing has a default
in two places. `call` binds a section to its function and turns every misfit into one line.
"""

import functools
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from maxlp.runtime import distributed, preemption

# What a path can be that cannot be. (Other errors of the system may be gone at the next start.)
WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


class ConfigError(ValueError):
    """A config that cannot work; its message is one line for the user."""


def define_flags(workdir: str = "Directory of the run.", config_required: bool = True) -> None:
    """The flags ``--config`` and ``--workdir`` of a command."""
    config_flags.DEFINE_config_file(
        "config",
        None,
        "Python file with get_config(arg), as FILE.py or FILE.py:ARG; change any value with "
        "--config.SECTION.KEY=VALUE, for example --config.optimizer.learning_rate=1e-3.",
        lock_config=True,
    )
    flags.DEFINE_string("workdir", None, workdir)
    flags.mark_flags_as_required(["config", "workdir"] if config_required else ["workdir"])
    flags.declare_key_flag("config")
    flags.declare_key_flag("workdir")


def run(main: Callable[[], Any], words: int = 0) -> None:
    """Runs a command: parses the flags, calls ``main()``, and shows a user's mistake as one line.

    Args:
      words: how many arguments besides flags it takes; others are mistyped flags.
    """
    app.run(lambda _: _exit_on_error(main), flags_parser=functools.partial(_parse_flags, words=words))


def _parse_flags(argv: list[str], words: int = 0) -> list[str]:
    # ml_collections loads the config while parsing: unknown keys come as AttributeError or KeyError, what
    # the file raises as itself with a traceback in its text, a missing file only when the value is used.
    try:
        rest = flags.FLAGS(argv)
        if (config := flags.FLAGS["config"].value if "config" in flags.FLAGS else None) is not None:
            config.items()
        for word in rest[1 + words :]:
            raise ValueError(f"argument {word!r} is not a flag; flags are --NAME=VALUE, see --help")
        return rest
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError, ImportError) as error:
        _fail(_naming_the_flag(_one_line(error), argv))


def _one_line(error: Exception) -> str:
    while len(error.args) == 1 and isinstance(error.args[0], Exception):
        error = error.args[0]
    text = str(error.args[0] if len(error.args) == 1 else error)
    text = re.sub(r"flag --(\w+)=None: Flag .* must have a value .*", r"--\1 is missing; see --help", text)
    if "Traceback (most recent call last)" in text:
        text = text.strip().splitlines()[-1].partition(": ")[2]
    return " ".join(
        text.replace("Configuration is not available because of an earlier failure to load:", "").split()
    )


def _naming_the_flag(message: str, argv: list[str]) -> str:
    """ml_collections says no more of an unknown key than its last part, in quotes."""
    key, _, rest = message.removeprefix("'").partition("'")
    names = [argument.partition("=")[0].lstrip("-") for argument in argv if "config." in argument]
    found = [name for name in names if key in name.split(".")[1:]]
    return f"{found[0]}: there is no key {key!r}.{rest}" if message.startswith("'") and found else message


def _exit_on_error(main: Callable[[], Any]) -> None:
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    try:
        sys.exit(main())
    except (ValueError, FloatingPointError, KeyboardInterrupt, *WRONG_PATH) as error:
        if os.environ.get("MAXLP_TRACEBACK"):
            raise
        if isinstance(error, KeyboardInterrupt):
            _fail("interrupted", preemption.EXIT_INTERRUPTED)
        _fail(f"{error} (MAXLP_TRACEBACK=1 shows where)", getattr(error, "exit_code", 2))


def _fail(message: str, code: int = 2) -> typing.NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    distributed.hard_exit(code)


def bind(function: Callable[..., Any], section: str, values: Any, *later: str) -> functools.partial:
    """``partial(function, **values)`` with the values checked against the function's signature.

    Args:
      section: where the values come from, for messages ("optimizer").
      values: a ConfigDict or another mapping.
      later: arguments that the program supplies and a config must not.

    Raises:
      ConfigError: an unknown, missing or wrongly typed key.
    """
    values = {k: _plain(v) for k, v in values.items()}
    signed = function.__init__ if inspect.isclass(function) else function
    parameters = inspect.signature(signed).parameters
    known = [name for name in parameters if name not in later and name != "self"]
    for key in values:
        if key not in known:
            raise ConfigError(f"config.{section}.{key} is unknown; keys: {', '.join(sorted(known))}")
    for key in known:
        if parameters[key].default is inspect.Parameter.empty and key not in values:
            raise ConfigError(f"config.{section}.{key} is missing")
    hints = typing.get_type_hints(signed)
    for key, value in values.items():
        if _fits(value, hints.get(key, Any)):
            continue
        if value is None:
            raise ConfigError(f"config.{section}.{key} is not set; give --config.{section}.{key}=VALUE")
        expected = hints[key].__name__ if isinstance(hints[key], type) else str(hints[key])
        raise ConfigError(
            f"config.{section}.{key}={value!r} is of type {type(value).__name__}, expected {expected}"
        )
    return functools.partial(function, **values)


def call(function: Callable[..., Any], section: str, values: Any, **extra: Any) -> Any:
    """``function(**values, **extra)``, bound as in `bind`."""
    bound = bind(function, section, values, *extra)
    try:
        return bound(**extra)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"config.{section}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, ConfigDict):
        return value.to_dict()
    if isinstance(value, list):  # what JSON makes of a tuple
        return tuple(_plain(item) for item in value)
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type, as far as config values go."""
    if hint is Any:
        return True
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    kind = origin or hint
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) if isinstance(kind, type) else True
