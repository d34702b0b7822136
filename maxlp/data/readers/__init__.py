"""Readers: one module for each kind of data, imported only when a source names the kind.

Each module defines the function that opens a source, listed in `maxlp.data.sources.KINDS`. This file
has the helpers that several readers share.
"""

import bisect
import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

from maxlp.data.specs import load

COMPRESSED = (".gz", ".tgz", ".zst")


class BrokenExample(ValueError):
    """A single record cannot be used: it is damaged, truncated, not an image or too large."""


def find_files(pattern: str, suffix: str = "") -> tuple[str, list[str]]:
    """Finds the files of a folder, a glob or a single path, or of a URL that names one of these.

    Args:
      pattern: a folder is searched with all its subfolders; hidden files are left out.
      suffix: of the files that count in a folder; where there is none, of the files that are compressed.

    Returns:
      The folder to which names are relative, and the sorted paths.

    Raises:
      ValueError: nothing is found.
    """
    if is_url(pattern):
        return load("maxlp.data.remote:find")(pattern, suffix)
    pattern = os.path.expanduser(pattern)
    if os.path.isdir(pattern):
        root, paths = pattern, of_kind(walk(pattern), suffix)
        missing = f"no {suffix or 'readable'} file in the folder {pattern}"
    elif glob.has_magic(pattern):
        parts = itertools.takewhile(lambda part: not glob.has_magic(part), pattern.split(os.sep))
        root = os.sep.join(parts) or (os.sep if pattern.startswith(os.sep) else os.curdir)
        paths = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
        missing = f"no file matches {pattern}"
    else:
        root = os.path.dirname(pattern) or os.curdir
        paths = [pattern] if os.path.isfile(pattern) else []
        missing = f"no file or folder {pattern}"
    if not paths:
        raise ValueError(f"{missing}; check the path")
    return root, sorted(paths)


def of_kind(paths: Iterable[str], suffix: str) -> list[str]:
    """Those of the paths that have the suffix; if none has, the compressed files of this kind."""
    paths = list(paths)
    compressed = tuple(suffix + each for each in COMPRESSED)
    plain = [path for path in paths if path.endswith(suffix)]
    return plain or [path for path in paths if path.endswith(compressed)]


def expand_braces(pattern: str) -> list[str]:
    """`a{00..02}{x,y}` → a00x, a00y, a01x …"""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        return [pattern]
    bounds = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if bounds:
        width = len(bounds[1]) if len(bounds[1]) == len(bounds[2]) or bounds[1][0] == "0" else 0
        middles = [f"{number:0{width}d}" for number in range(int(bounds[1]), int(bounds[2]) + 1)]
    else:
        middles = match[1].split(",")
    rest = expand_braces(pattern[match.end() :])
    return [pattern[: match.start()] + middle + tail for middle in middles for tail in rest]


def walk(root: str, skip: Sequence[str] = ()) -> Iterator[str]:
    """Paths of all files below `root`, except hidden ones and those in folders named in `skip`."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skip and name[0] != "."]
        yield from (os.path.join(folder, name) for name in files if name[0] != ".")


def is_url(path: str) -> bool:
    """Whether this is a URL rather than a path."""
    return "://" in path


def open_file(path: str) -> BinaryIO:
    """Opens a file or URL to read all of it; of a URL, large blocks are fetched."""
    return load("maxlp.data.remote:open_stream")(path) if is_url(path) else open(path, "rb")


def read_range(path: str, start: int, end: int) -> bytes:
    """Bytes `start` to `end` of a file or URL."""
    if is_url(path):
        return load("maxlp.data.remote:read_range")(path, start, end)
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(end - start)


def read_whole(path: str) -> bytes:
    """The content of a file or URL, decompressed."""
    if is_url(path) or path.endswith(COMPRESSED):
        return load("maxlp.data.remote:read_whole")(path)
    with open(path, "rb") as file:
        return file.read()


def uncompressed(paths: Sequence[str]) -> list[str]:
    """The same files, but in place of each compressed one a copy in the local cache that is not.

    Raises:
      ValueError: a compressed file is truncated or damaged.
    """
    if any(path.endswith(COMPRESSED) for path in paths):
        return load("maxlp.data.local_cache:uncompressed")(paths)
    return list(paths)


def locate(ends: Sequence[int], row: int) -> tuple[int, int]:
    """The part that holds `row`, and the row within that part; `ends` are running totals of sizes."""
    part = bisect.bisect_right(ends, row)
    return part, row - (ends[part - 1] if part else 0)


def as_text(value: object, key: str) -> str | bytes:
    """Returns `value` if it is text; raises a `BrokenExample` otherwise."""
    if not isinstance(value, str | bytes):
        raise BrokenExample(f"{key!r} is {type(value).__name__}, not text")
    return value
