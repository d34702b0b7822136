"""Files and folders that change atomically where renaming is atomic; in buckets see `mirror`."""

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO


def is_url(path: str) -> bool:
    """Whether this names something in a store rather than on disk. Decide it before making a `Path`."""
    return re.match(r"[A-Za-z][\w+.-]*://", path) is not None


def local_path(path: str | os.PathLike[str], name: str = "path") -> Path:
    """Makes a path absolute and expands ``~``. Commands call it for every directory that they are given.

    Args:
      path: a URL in a bucket becomes its local mirror.
      name: what names the path in a message, such as "--workdir".

    Raises:
      ValueError: the path is empty, not UTF-8, in a home that does not exist, or a URL that cannot be used.
    """
    text = os.fspath(path)
    if not text.strip():
        raise ValueError(f"{name}={text} is empty (an unset shell variable?); name a directory")
    if re.match(r"[A-Za-z][\w+.-]*:/", text):  # `Path` makes one slash of two
        from maxlp.runtime import mirror

        return mirror.open_folder(text, name)
    text = os.path.expanduser(text)
    if text.startswith("~"):
        home = text.partition("/")[0]
        raise ValueError(
            f"{name}={text}: {home} is the home directory of no user here; write out the path, or ./{text}"
        )
    text = os.path.abspath(text)
    if os.fsencode(text) != text.encode(errors="replace"):  # libraries in C++ take paths as UTF-8
        raise ValueError(
            f"{name}={text} is not UTF-8; choose another path, or set PYTHONUTF8=1 if the locale is not"
        )
    return Path(text)


def cache_folder() -> Path:
    """The folder for what can be made again: $XDG_CACHE_HOME/maxlp, or ~/.cache/maxlp.

    Raises:
      ValueError: the user has no home directory.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maxlp"
    except RuntimeError:
        raise ValueError(
            "there is no folder for caches: the user has no home directory; set HOME or XDG_CACHE_HOME"
        ) from None


def mirrored(path: Path) -> Any:
    """The `mirror.Mirror` that a path is in, or None."""
    mirror = mirror_module()
    return mirror.find(path) if mirror else None


def bucket(path: Path) -> Any:
    """The module `bucket` if a path is in a mirror, else None."""
    if mirrored(path) is None:
        return None
    from maxlp.runtime import bucket

    return bucket


def shown(text: object) -> str:
    """A text for the user, with URLs instead of their local mirrors."""
    mirror = mirror_module()
    return mirror.with_urls(str(text)) if mirror else str(text)


def mirror_module() -> Any:
    """The module `mirror`, or None: runs on disk do not import it."""
    return sys.modules.get("maxlp.runtime.mirror")


# --- files that are replaced as a whole -----------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of `path` when the block ends.

    A kill or a power cut leaves the old content or the new, and so does an error in the block. Content and
    name are on disk afterwards. Any number of processes may do this at once: one of them is the last.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_TEMPORARY}")
    with naming(path):
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync(path.parent)


_TEMPORARY = ".tmp"
_LEFTOVER = re.compile(rf"\..+\.[0-9a-f]{{8}}{re.escape(_TEMPORARY)}")  # the names that `replacing` gives


def remove_temporaries(directory: Path) -> None:
    """Deletes what kills in `replacing` left in a directory into which no other process writes."""
    for path in directory.glob(f".*{_TEMPORARY}"):
        if _LEFTOVER.fullmatch(path.name) and path.is_file():
            remove(path)


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces a file, see `replacing`."""
    with replacing(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Replaces a file, see `replacing`."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file, see `replacing`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def finite(value: Any) -> Any:
    """A value for JSON, with null for each number that is not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(
    path: Path,
    default: Any = None,
    *,
    kind: type = dict,
    fields: Mapping[str, Any] | None = None,
    remedy: str = "put back a good copy",
) -> Any:
    """Returns the content of a JSON file, or `default` if the file does not exist.

    Args:
      kind: type of the content, `dict` or `list`.
      fields: keys that the object, or each object of the list, must have, with their shapes: a type, a
        dict of keys and shapes, [shape] for a list of any length, several shapes in a list for a list of
        that length, and a tuple for one of several. A key whose shape includes None may be missing.
      remedy: what the user can do about a damaged file without losing the run.

    Raises:
      ValueError: the file is damaged; one line that names it and the remedy.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return default
    except UnicodeDecodeError:
        raise ValueError(f"{path} is damaged (not text); {remedy}") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        found = str(error) if text.strip() else "it is empty"
        raise ValueError(f"{path} is damaged ({found}); {remedy}") from None
    if not isinstance(value, kind):
        found = f"{_JSON_NAMES.get(type(value), 'a number')} instead of {_JSON_NAMES[kind]}"
        raise ValueError(f"{path} is damaged ({found}); {remedy}")
    for item in value if isinstance(value, list) else [value]:
        for key, expected in (fields or {}).items():
            if not isinstance(item, dict) or not _has_shape(item.get(key), expected):
                raise ValueError(f"{path} is damaged (no valid {key!r}); {remedy}")
    return value


def _has_shape(value: Any, shape: Any) -> bool:
    if isinstance(shape, tuple):
        return any(_has_shape(value, each) for each in shape)
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(_has_shape(value.get(k), s) for k, s in shape.items())
    if isinstance(shape, list):
        shapes = shape * len(value) if isinstance(value, list) and len(shape) == 1 else shape
        return isinstance(value, list) and len(value) == len(shapes) and all(map(_has_shape, value, shapes))
    return isinstance(value, shape)


_JSON_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Names `path` in OS errors that name no file, such as those of writing, or only a temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno and str(error.filename or _TEMPORARY).endswith(_TEMPORARY):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


# --- files and folders on disk --------------------------------------------------------------------------


def sync(path: Path) -> None:
    """Returns when the content of a file, or the entries of a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(unfinished: Path, final: Path) -> None:
    """Renames a directory whose files are on disk, and returns when the new name is on disk too."""
    for directory in [unfinished, *unfinished.rglob("*/")]:
        sync(directory)
    unfinished.rename(final)
    sync(final.parent)


def entries(directory: Path) -> list[Path]:
    """What is in a directory; nothing if there is none. Unlike `Path.glob`, fails if it may not be read."""
    return list(directory.iterdir()) if directory.is_dir() else []


def move(path: Path, target: Path) -> None:
    """Renames a folder of a run."""
    if mirror := mirrored(path):
        mirror.move(path, target)
    else:
        path.rename(target)


def send(path: Path) -> None:
    """Copies a file that a command has written to the bucket, if it is in a mirror."""
    if mirror := mirrored(path):
        mirror.send(path)


def unused_path(path: Path) -> Path:
    """Returns `path`, or the first of ``path-2``, ``path-3``, … that does not exist."""
    candidate, count = path, 1
    while candidate.exists():
        count += 1
        candidate = path.with_name(f"{path.name}-{count}")
    return candidate


def remove(path: Path) -> None:
    """Deletes a file or a directory; ignores entries of a directory that cannot be deleted."""
    if mirror := mirrored(path):
        mirror.remove(path)
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def read_when_present(path: Path, timeout: float) -> str:
    """Waits for a file that another process writes atomically, and returns its content.

    Args:
      path: a file in an existing directory.
      timeout: in seconds.

    Raises:
      TimeoutError: the file did not appear in time.
    """
    deadline = time.monotonic() + timeout
    while path.name not in os.listdir(path.parent):  # NFS may cache the result of `exists`
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear within {timeout:.0f} s")
        time.sleep(0.05)
    return path.read_text(encoding="utf-8")
