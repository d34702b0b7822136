"""What the commands share: flags, and users' mistakes reported in one line.

Every command ends with exit code 2 and one line for what the user can correct, whether a flag, a config or
a file. Imports nothing heavy: a mistake in a flag is reported at once.
"""

import errno
import functools
import os
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags.tuple_parser import TupleParser

from maxlp import schema
from maxlp.run.config import ConfigError, choices, load_file
from maxlp.runtime.exits import EXIT_FAILED, EXIT_INTERRUPTED, drop_unread_output, hard_exit
from maxlp.runtime.files import shown

# Errors of paths, and the limit of open files, are the user's to solve; other system errors, such as a full
# disk, may be gone at the next launch.
PATH_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
USER_ERROR_NUMBERS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS, errno.EMFILE)
# JAX raises a `ValueError` or a `JaxRuntimeError`, with one of these in front, when a program on the
# devices fails, such as when another process of the run has died.
JAX_FAILURES = re.compile("(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|UNKNOWN): ")
FINETUNE = "llama/finetune"  # the config of a run that starts --from weights and names no other
MAX_MESSAGE = 800  # characters; a longer one, as with a long path, loses its middle


def _suggestions(unknown: re.Match[str]) -> str:
    *others, last = (f"--{name}" for name in unknown[2].split(", "))
    known = f"{', '.join(others)} or {last}" if others else last
    return f"--{unknown[1]} is unknown; did you mean {known}?"


def _override_without_config(unknown: re.Match[str]) -> str:
    if "config" not in flags.FLAGS:
        return f"--{unknown[1]} is unknown; this command takes no --config, see --help"
    return (
        f"--{unknown[1]} needs --config=PRESET; the command that maxlp.report shows for a run contains its "
        "--config, and the --config.model values that are needed too"
    )


# What absl and ml_collections report for a flag, in this project's words.
WORDINGS: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"^Unknown command line flag '(config\..+?)'.*": _override_without_config,
    r"^Unknown command line flag '(.+?)'\. Did you mean: (.+?) \?.*": _suggestions,
    r"^Unknown command line flag '(.+?)'$": r"--\1 is unknown; see --help",
    r"flag --(\w+)=None: Flag .* must have a value .*": r"--\1 is missing; see --help",
    r"^flag (--.*?): invalid literal for int\(\) with base 10: .*": r"\1 is not an integer",
    r"^flag (--.*?): could not convert string to float: .*": r"\1 is not a number",
    r"^flag (--.*?): .*Non-boolean argument to boolean flag.*": r"\1 is not true or false",
    r"^flag (--[\w.]+)=.*: Failed to parse .* as a ConfigDict: .*": r"\1 is a section; set \1.KEY=VALUE",
    r"^flag (--.*?): (.*)": r"\1: \2",
    r"^The flag 'config\.(.+?)' is defined twice\..*": r"--config is given twice; give one",
}


def define_flags(workdir: str = "Directory of the run.", config_required: bool = True) -> None:
    """The flags ``--config`` and ``--workdir`` of a command."""
    define_config()
    flags.DEFINE_string("workdir", None, workdir)
    flags.mark_flags_as_required(["config", "workdir"] if config_required else ["workdir"])
    flags.declare_key_flag("workdir")


def define_config() -> None:
    """The flag ``--config``, which runs a config file."""
    config_flags.DEFINE_config_file(
        "config",
        None,
        "A preset such as llama/debug, or a Python file with get_config(arg). Choices follow a colon: "
        "llama/8b:precision=fp8_delayed. Change any value with --config.SECTION.KEY=VALUE, for example "
        "--config.optimizer.learning_rate=1e-3; None unsets it.",
    )
    flags.FLAGS["config"].parser = _ConfigParser()
    parsers = flags.IntegerParser, flags.FloatParser, flags.BooleanParser, flags.ArgumentParser
    for kind, parser in zip((int, float, bool, str), parsers, strict=True):
        config_flags.register_flag_parser_for_type(kind, _OrNone(parser()))
    config_flags.register_flag_parser_for_type(tuple, _Tuple())
    flags.declare_key_flag("config")


def define_from() -> None:
    """The flags ``--from`` and ``--swap_tokenizer``, which `read_config` takes into account."""
    flags.DEFINE_string(
        "from",
        None,
        "Weights to start from: a Hugging Face folder, ORG/NAME[@REVISION] on the Hub, or another run. The "
        "model's sizes and the tokenizer come from them; --config is llama/finetune by default.",
    )
    flags.DEFINE_string("swap_tokenizer", None, "With --from: a tokenizer to use instead of its own.")
    flags.declare_key_flag("from")
    flags.declare_key_flag("swap_tokenizer")


def read_config(workdir: Path | None) -> ConfigDict:
    """The config of the flags, with the model and the tokenizer of the weights ``--from``.

    Args:
      workdir: None for a command that has no run.
    """
    c, start, swap = flags.FLAGS.config, flags.FLAGS["from"].value, flags.FLAGS.swap_tokenizer
    data = c.get("data")  # `settings.read` refuses a config without it, or without precision
    leaves_tokenizer = isinstance(data, ConfigDict) and data.get("tokenizer", "") is None
    if start is not None or swap is not None or leaves_tokenizer:
        from maxlp.run import pretrained  # few runs need it

        c = pretrained.configure(c, workdir, start, swap, overrides())
    precision = c.get("precision")
    if isinstance(precision, ConfigDict) and precision.get("high_precision_from"):
        from maxlp.run import late_phase  # few runs have one

        c = ConfigDict(late_phase.config_now(c.to_dict(), workdir))
    return c


def overrides() -> dict[str, Any]:
    """The keys and values of the config that were set on the command line."""
    return config_flags.get_override_values(flags.FLAGS["config"])


class _ConfigParser(flags.ArgumentParser):
    """Runs a config file with `load_file`, and keeps the config to explain a mistake in an override."""

    config: ConfigDict | None = None

    def parse(self, argument: str) -> ConfigDict:
        self.config = load_file(argument)
        return self.config


class _OrNone(flags.ArgumentParser):
    """Reads None, which unsets a key of the config, and other values as ``parser`` does."""

    def __init__(self, parser: flags.ArgumentParser) -> None:
        self._parser = parser

    def parse(self, argument: Any) -> Any:
        return None if argument == "None" else self._parser.parse(argument)


class _Tuple(TupleParser):
    """Reads a,b as a tuple of two strings, and None as an empty tuple."""

    def parse(self, argument: Any) -> tuple:
        values = () if argument == "None" else super().parse(argument)
        return tuple(argument.split(",")) if values == (argument,) else values


def run(main: Callable[..., Any], num_arguments: int = 0) -> None:
    """Runs a command: parses flags, calls ``main(*arguments)``, prints a user's mistake as one line.

    Args:
      num_arguments: the largest number of positional arguments; more are reported as mistyped flags.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a terminal may have an encoding without × and …
    try:
        app.run(
            lambda argv: _exit_on_error(main, argv[1:]),
            flags_parser=functools.partial(_parse_flags, num_arguments=num_arguments),
        )
    finally:
        drop_unread_output()


def check_first_argument(word: str, commands: Iterable[str]) -> None:
    """Raises a ValueError unless the first argument of a command names one of its subcommands."""
    if word not in (known := tuple(commands)):
        given = f", not {word!r}" if word else ""
        raise ValueError(f"the first argument must be one of {', '.join(known)}{given}")


def _open_closed_streams() -> None:
    """Puts the null device in place of standard streams that the caller has closed, as by ``>&-``."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _parse_flags(argv: list[str], num_arguments: int) -> list[str]:
    given = {word.lstrip("-").partition("=")[0] for word in argv[1:] if word.startswith("-")}
    if "from" in given and "config" not in given:
        argv.insert(1, f"--config={FINETUNE}")
    argv[1:] = _config_first(argv[1:])
    try:
        _check_text(argv)
        rest = flags.FLAGS(argv)
        unread = rest[1 + num_arguments :]
        if unread:
            raise ValueError(f"argument {unread[0]!r} is not a flag; flags are --NAME=VALUE, see --help")
        _check_numbers()
        return rest
    except SystemExit:
        sys.exit(0)  # absl ends --help with 1
    # For an override of an unknown key ml_collections raises AttributeError, KeyError or TypeError.
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        from maxlp.run import unknown_override  # few commands need it

        _fail(unknown_override.explain(argv) or _one_line(error))


def _config_first(words: list[str]) -> list[str]:
    """The words with --config moved before its overrides, whose types are known only from its file."""
    for i, word in enumerate(words):
        if flag := re.match("--?config(=|$)", word):
            end = i + (1 if flag[1] else 2)
            return words[i:end] + words[:i] + words[end:] if end <= len(words) else words
    return words


def _check_text(words: list[str]) -> None:
    """Raises a ValueError for bytes that are not text in the locale's encoding: no file can record them."""
    for word in words:
        if re.search("[\udc80-\udcff]", word):  # what Python puts in place of such a byte
            raise ValueError(
                f"argument {word!a} cannot be read as {sys.getfilesystemencoding()}; give it in UTF-8, and "
                "set PYTHONUTF8=1 where the locale has another encoding"
            )


def _check_numbers() -> None:
    """Raises a ValueError for NaN, infinity and integers that are too large; absl's bounds let NaN pass."""
    for name in flags.FLAGS:
        flag = flags.FLAGS[name]
        if flag.present and not name.startswith("config.") and type(flag.value) in (int, float):
            schema.check_value(f"--{name}", flag.value, type(flag.value))


def _one_line(error: BaseException) -> str:
    if isinstance(error.__context__, ConfigError):  # absl repeats the value of the flag in front of it
        error = error.__context__
    text = " ".join(str(error.args[0] if len(error.args) == 1 else error).split())
    for pattern, wording in WORDINGS.items():
        text = re.sub(pattern, wording, text)
    text = text.replace("--config is missing; see --help", f"--config is missing; {choices()}")
    folder = "give the folder of the run, as in --workdir=/tmp/run"
    return text.replace("--workdir is missing; see --help", f"--workdir is missing; {folder}")


def _exit_on_error(main: Callable[..., Any], arguments: list[str]) -> None:
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    sys.unraisablehook = functools.partial(_end_if_interrupted, sys.unraisablehook)
    try:
        sys.exit(main(*arguments))
    except (ValueError, FloatingPointError, KeyboardInterrupt, OSError) as error:
        if os.environ.get("MAXLP_TRACEBACK"):
            raise
        if isinstance(error, KeyboardInterrupt):
            _fail("interrupted", EXIT_INTERRUPTED)
        hint = "" if _is_self_explanatory(error) else " (MAXLP_TRACEBACK=1 shows where)"
        _fail(_reason(error) + hint, EXIT_FAILED if _is_transient(error) else 2)
    except (RuntimeError, AssertionError) as error:
        if os.environ.get("MAXLP_TRACEBACK"):
            raise
        if str(error) == "can't start new thread":
            advice = "raise the limit of processes (ulimit -u, or the pids limit of the container)"
            _fail(f"the system allows no more threads; {advice}", EXIT_FAILED)
        jax = sys.modules.get("jax")
        if JAX_FAILURES.match(str(error)) and jax and jax.distributed.is_initialized():
            cause = "if another process of the run has ended, its output says why"
            _fail(f"{_reason(error)}; {cause} (MAXLP_TRACEBACK=1 shows where)", EXIT_FAILED)
        if not _found_no_device(error):
            raise
        reason = _reason(error) or "JAX could initialize none of these platforms"
        platforms = os.environ.get("JAX_PLATFORMS", "")
        _fail(f"JAX_PLATFORMS={platforms}: {reason}; check the driver and JAX's plugin", EXIT_FAILED)


def _end_if_interrupted(report: Callable[[Any], Any], unraisable: Any) -> None:
    """Ends a command whose Ctrl-C came where Python drops exceptions, as in JAX's garbage collection."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        return report(unraisable)
    print("error: interrupted", file=sys.stderr)
    hard_exit(EXIT_INTERRUPTED)


def _is_self_explanatory(error: BaseException) -> bool:
    """Whether maxlp wrote the message or it names a path, so that a traceback would add nothing."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = Path(__file__).parents[1] in Path(place.filename).parents
    return isinstance(error, PATH_ERRORS) or (is_ours and f"{place.line}".startswith("raise"))


def _found_no_device(error: BaseException) -> bool:
    """Whether JAX found no device; it raises a RuntimeError, or asserts that there is a backend."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.endswith("xla_bridge.py")


def _is_transient(error: BaseException) -> bool:
    """Whether the system failed rather than the user, so that the same command may succeed later."""
    if isinstance(error, OSError):
        return not isinstance(error, PATH_ERRORS) and error.errno not in USER_ERROR_NUMBERS
    if type(error) is ValueError and JAX_FAILURES.match(str(error)):
        return True
    checkpoint = sys.modules.get("maxlp.runtime.checkpoint")  # not imported for a mistake in a flag
    return checkpoint is not None and isinstance(error, checkpoint.NotWrittenError)


def _reason(error: BaseException) -> str:
    """The message; one of the operating system begins with the path, or the flag that gave it."""
    if not isinstance(error, OSError) or not error.strerror:
        return " ".join(str(error).split())
    given = (name for name in flags.FLAGS if flags.FLAGS[name].present)
    flag = next((f"--{name}=" for name in given if flags.FLAGS[name].value == error.filename), "")
    path = f"{flag}{error.filename}: " if error.filename else ""
    advice = "; once this is solved, run the same command again" if _is_transient(error) else ""
    if error.errno == errno.EMFILE:
        advice = "; raise the limit of open files with `ulimit -n`"
    return f"{path}{error.strerror}{advice}"


def _fail(message: str, code: int = 2) -> typing.NoReturn:
    nobody_reads = drop_unread_output()
    if nobody_reads and isinstance(sys.exception(), BrokenPipeError):
        _exit(EXIT_FAILED)
    message = shown(message)
    if len(message) > MAX_MESSAGE:
        message = f"{message[: MAX_MESSAGE // 2]} … {message[-MAX_MESSAGE // 2 :]}"
    print(f"error: {message}", file=sys.stderr, flush=True)
    _exit(code)


def _exit(code: int) -> typing.NoReturn:
    if "jax" in sys.modules:  # its threads may still compile, or wait for other processes
        hard_exit(code)
    sys.exit(code)
