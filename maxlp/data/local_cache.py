"""A cache on the local disk of what is derived from files without random access.

It is at $XDG_CACHE_HOME/maxlp/data, or ~/.cache/maxlp/data, and can be deleted when no run uses it. An
entry is made again when its file changes in size, time, hash or ETag, and replaces the former one:

    FILE/CONTENT/ENTRY    each a hash: of the path, of size and time or tag, of what was made
"""

import errno
import fcntl
import gzip
import hashlib
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from maxlp.data.readers import COMPRESSED
from maxlp.data.readers.access import open_file
from maxlp.runtime import files
from maxlp.runtime.extras import import_extra
from maxlp.runtime.files import is_url
from maxlp.runtime.messages import counted, one_line

THREADS = 8
COPY_BYTES = 2**20
TELL_SECONDS = 10.0
SPARE_BYTES = 20 * 2**30  # left free by what is kept only to be faster

Make = Callable[[str, BinaryIO], None]  # makes an entry from a path or URL


def folder() -> Path:
    """The folder of the cache."""
    return files.cache_folder() / "data"


def uncompressed(paths: Sequence[str]) -> list[str]:
    """The paths, but in place of each compressed file its decompressed copy in the cache.

    Raises:
      ValueError: a file is truncated or damaged.
    """
    compressed = [path for path in paths if path.endswith(COMPRESSED)]
    copies = dict(zip(compressed, _cached_all("decompressing", compressed, _decompress), strict=True))
    return [copies.get(path, path) for path in paths]


def copies(urls: Sequence[str]) -> list[str]:
    """Paths of copies of these files in the cache."""
    return _cached_all("copying", urls, _copy)


def array(path: str, what: str, make: Callable[[str], np.ndarray]) -> str:
    """The path of a .npy file with the array that `make` makes of a file or URL."""

    def save(path: str, target: BinaryIO) -> None:
        np.save(target, make(path), allow_pickle=False)

    return cached(path, what, save)


def cached(path: str, what: str, make: Make) -> str:
    """The path of an entry, made unless it is there.

    Args:
      path: the file or URL that it is made from.
      what: what is made of it.
      make: writes it. Of several processes, one does so and the others wait.
    """
    entry = _entry(path, what)
    if entry.exists():
        return str(entry)
    if not _is_writable():
        message = f"{os.strerror(errno.EACCES)}; set XDG_CACHE_HOME to a folder that you can write to"
        raise OSError(errno.EACCES, message, str(folder()))
    entry.parent.mkdir(parents=True, exist_ok=True)
    lock = entry.with_suffix(".lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not entry.exists():
            _remove_leftovers(entry)
            with files.replacing(entry) as target:
                make(path, target)
        lock.unlink(missing_ok=True)  # whoever waits for it finds the entry
    return str(entry)


def decompress(path: str, source: BinaryIO, target: BinaryIO) -> None:
    """Decompresses `source` into `target`; the suffix of `path`, its name, tells the format.

    Raises:
      ValueError: it is truncated or damaged.
    """
    try:
        with _decompressing(path, source) as data:
            shutil.copyfileobj(data, target, COPY_BYTES)
            if not source.tell():
                raise EOFError("it is empty")
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(
            f"{path} is truncated or damaged ({one_line(error)}); copy it again or leave it out"
        ) from None


def _cached_all(doing: str, paths: Sequence[str], make: Make) -> list[str]:
    """As `cached`, for several files at once; reports its progress."""
    missing = [path for path in paths if not _entry(path, make.__name__).exists()]
    if missing:
        size = sum(_size(path) for path in missing)
        _check_space(size)
        _tell(f"{doing} {counted(len(missing), 'file')} ({size / 1e6:,.1f} MB) into {folder()}")
    shown = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        pending = [pool.submit(cached, path, make.__name__, make) for path in missing]
        try:
            for done, future in enumerate(as_completed(pending), 1):
                future.result()
                if time.monotonic() > shown + TELL_SECONDS:
                    shown = time.monotonic()
                    _tell(f"{doing}: {done:,} of {counted(len(missing), 'file')}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [str(_entry(path, make.__name__)) for path in paths]


def _decompress(path: str, target: BinaryIO) -> None:
    with open_file(path) as source:
        decompress(path, source, target)


def _copy(path: str, target: BinaryIO) -> None:
    with open_file(path) as source:
        shutil.copyfileobj(source, target, COPY_BYTES)


def _decompressing(path: str, source: BinaryIO) -> Any:
    if path.endswith((".gz", ".tgz")):
        return gzip.GzipFile(fileobj=source)
    return import_extra("pyarrow").CompressedInputStream(source, "zstd")


# --- entries --------------------------------------------------------------------------------------


def _entry(path: str, what: str) -> Path:
    """Where an entry is, or would be."""
    if is_url(path):
        from maxlp.data import remote

        found = remote.stat(path)
        return folder() / _hash(path) / _hash(found.size, found.tag) / _hash(what)
    path, found = os.path.abspath(path), os.stat(path)
    return folder() / _hash(path) / _hash(found.st_size, found.st_mtime_ns) / _hash(what)


def _hash(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _size(path: str) -> int:
    if is_url(path):
        from maxlp.data import remote

        return remote.stat(path).size
    return os.path.getsize(path)


def _remove_leftovers(entry: Path) -> None:
    """Deletes entries of former contents of the same file, and what a killed process left of this one."""
    others = [path for path in entry.parent.parent.iterdir() if path != entry.parent]
    for path in [*others, *entry.parent.glob(f".{entry.name}.*")]:
        files.remove(path)


def has_room() -> bool:
    """Whether the cache takes entries that only save time: it is writable, and has space to spare."""
    return _is_writable() and shutil.disk_usage(_on_disk()).free > SPARE_BYTES


def _check_space(size: int) -> None:
    """Raises an error of the system if there is no room for `size` more bytes."""
    if shutil.disk_usage(_on_disk()).free < size:
        message = f"no room for {size / 1e9:,.1f} GB; set XDG_CACHE_HOME to a folder on a larger disk"
        raise OSError(errno.ENOSPC, message, str(folder()))


def _is_writable() -> bool:
    return os.access(_on_disk(), os.W_OK | os.X_OK)


def _on_disk() -> Path:
    return next(path for path in (folder(), *folder().parents) if path.exists())


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
