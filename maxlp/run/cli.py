"""What the commands share: flags, and users' mistakes reported in one line."""

import difflib
import functools
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

import maxlp
from maxlp.run.config import RENAMED
from maxlp.runtime import distributed
from maxlp.runtime.checkpoint import NotWrittenError
from maxlp.runtime.preemption import EXIT_INTERRUPTED

# An installed package holds the presets; in a checkout they lie beside it.
_PACKAGE = Path(maxlp.__file__).parent
PRESETS = next(filter(Path.is_dir, (_PACKAGE / "configs", _PACKAGE.parent / "configs")))

# Users' path errors. Other errors of the system may be transient, so that a launcher tries again.
PATH_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


def define_flags(workdir: str = "Directory of the run.", config_required: bool = True) -> None:
    """The flags ``--config`` and ``--workdir`` of a command."""
    config_flags.DEFINE_config_file(
        "config",
        None,
        "A preset such as llama/debug, or a Python file with get_config(arg). Choices follow a colon: "
        "llama/8b:precision=fp8_delayed. Change any value with --config.SECTION.KEY=VALUE, for example "
        "--config.optimizer.learning_rate=1e-3.",
        lock_config=True,
    )
    flags.DEFINE_string("workdir", None, workdir)
    flags.mark_flags_as_required(["config", "workdir"] if config_required else ["workdir"])
    flags.declare_key_flag("config")
    flags.declare_key_flag("workdir")


def run(main: Callable[[], Any], words: int = 0) -> None:
    """Runs a command: parses the flags, calls ``main()``, and prints a user's mistake as one line.

    Args:
      words: number of arguments that the command takes besides flags; any further ones are mistyped flags.
    """
    app.run(lambda _: _exit_on_error(main), flags_parser=functools.partial(_parse_flags, words=words))


def _parse_flags(argv: list[str], words: int = 0) -> list[str]:
    # ml_collections loads the config while parsing. It raises AttributeError or KeyError for unknown keys,
    # passes on what the file raises with a traceback in its text, and reports a missing file only when the
    # value is used.
    try:
        rest = flags.FLAGS(list(_with_config_files(argv)))
        if (config := flags.FLAGS["config"].value if "config" in flags.FLAGS else None) is not None:
            config.items()
        for word in rest[1 + words :]:
            raise ValueError(f"argument {word!r} is not a flag; flags are --NAME=VALUE, see --help")
        return rest
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError, ImportError) as error:
        _fail(_naming_the_flag(_one_line(error), argv))


def _with_config_files(argv: list[str]) -> Iterator[str]:
    """The arguments, with the file of a preset in place of its name."""
    previous = ""
    for argument in argv:
        name, equals, value = argument.partition("=")
        if name in ("--config", "-config") and equals:
            argument = f"{name}={config_file(value)}"
        elif previous in ("--config", "-config"):
            argument = config_file(argument)
        yield argument
        previous = argument


def config_file(value: str) -> str:
    """``llama/debug:ARG`` as ``PATH/llama/debug.py:ARG``; the path of a file stays as it is.

    Raises:
      FileNotFoundError: neither a file nor a preset; the message lists the presets.
    """
    name, colon, arg = value.partition(":")
    if Path(name).is_file():
        return value
    preset = PRESETS / name.removeprefix("configs/").removesuffix(".py")
    if (path := preset.with_name(f"{preset.name}.py")).is_file():
        return f"{path}{colon}{arg}"
    if not name:
        raise FileNotFoundError(f"--config is empty; {_choices('')}")
    raise FileNotFoundError(f"--config={name} is neither a file nor a preset; {_choices(name)}")


def _choices(name: str) -> str:
    close = [f"did you mean {preset}? " for preset in difflib.get_close_matches(name, presets(), 1)]
    return f"{''.join(close)}presets: {', '.join(presets())}"


def presets() -> list[str]:
    """Names for ``--config``, such as ``llama/debug``."""
    return sorted(str(path.relative_to(PRESETS).with_suffix("")) for path in PRESETS.glob("*/*.py"))


def _one_line(error: Exception) -> str:
    while len(error.args) == 1 and isinstance(error.args[0], Exception):
        error = error.args[0]
    text = str(error.args[0] if len(error.args) == 1 else error)
    text = re.sub(r"flag --(\w+)=None: Flag .* must have a value .*", r"--\1 is missing; see --help", text)
    text = text.replace("--config is missing; see --help", f"--config is missing; {_choices('')}")
    if "Traceback (most recent call last)" in text:
        text = text.strip().splitlines()[-1].partition(": ")[2]
    return " ".join(
        text.replace("Configuration is not available because of an earlier failure to load:", "").split()
    )


def _naming_the_flag(message: str, argv: list[str]) -> str:
    """The message with the whole flag of an unknown key; ml_collections quotes only its last part."""
    key, _, rest = message.removeprefix("'").partition("'")
    names = [argument.partition("=")[0].lstrip("-") for argument in argv if "config." in argument]
    found = [name for name in names if key in name.split(".")[1:]]
    if not (message.startswith("'") and found):
        return message
    if new := RENAMED.get(found[0].removeprefix("config.")):
        return f"{found[0]} is now config.{new}"
    return f"{found[0]}: there is no key {key!r}.{rest}"


def _exit_on_error(main: Callable[[], Any]) -> None:
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    try:
        sys.exit(main())
    except (ValueError, FloatingPointError, KeyboardInterrupt, *PATH_ERRORS) as error:
        if os.environ.get("MAXLP_TRACEBACK"):
            raise
        if isinstance(error, KeyboardInterrupt):
            _fail("interrupted", EXIT_INTERRUPTED)
        # A full disk may have room at the next start: launchers try again after exit code 1.
        code = 1 if isinstance(error, NotWrittenError) else 2
        _fail(f"{error} (MAXLP_TRACEBACK=1 shows where)", code)


def _fail(message: str, code: int = 2) -> typing.NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    distributed.hard_exit(code)
