"""Files and folders that change atomically, on any file system that renames atomically."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def local_path(path: str | os.PathLike[str]) -> Path:
    """Makes a path absolute and expands ``~``.

    Raises:
      ValueError: the path is a URL.
    """
    if "://" in os.fspath(path):
        raise ValueError(f"{path} is a URL: mount the bucket (gcsfuse, s3fs) and give its path here")
    return Path(os.path.abspath(os.path.expanduser(path)))


def read_json(path: Path, default: Any = None) -> Any:
    """Returns the content of a JSON file, or `default` if the file does not exist."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return default
    return json.loads(text)


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file atomically, see `write_text`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replaces a file atomically: a kill or a power cut leaves the old content or the new.

    The new content is on disk when this returns.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces a file atomically, see `write_text`."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    sync(temporary)
    temporary.replace(path)


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


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Yields a folder to write to, whose content is moved to `folder` at the end of the block.

    If the block raises, nothing remains of what it wrote, nor of `folder` if it did not exist.

    Args:
      folder: empty or new.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    temporary = folder / ".unfinished"  # inside, because `folder` may be all that can be written to
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in sorted(temporary.iterdir()):
            path.rename(folder / path.name)
        temporary.rmdir()
    except BaseException:
        remove(temporary)
        for each in missing:
            with contextlib.suppress(OSError):
                each.rmdir()
        raise


def unused_path(path: Path) -> Path:
    """Returns `path`, or the first of ``path-2``, ``path-3``, … that does not exist."""
    candidate, count = path, 1
    while candidate.exists():
        count += 1
        candidate = path.with_name(f"{path.name}-{count}")
    return candidate


def remove(path: Path) -> None:
    """Deletes a file or a directory; ignores entries of a directory that cannot be deleted."""
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
    return path.read_text()
