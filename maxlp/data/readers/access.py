"""Finding and reading files wherever they are: on disk, at a URL, compressed."""

import bisect
import glob
import io
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from typing import BinaryIO

from absl import logging

from maxlp.data.readers import COMPRESSED, walk, walk_folders
from maxlp.runtime.files import is_url

NOT_READ = (".bz2", ".xz", ".lz4", ".zip", ".7z", ".rar")  # bytes would pass for text


def find_files(pattern: str, suffix: str = "") -> tuple[str, list[str]]:
    """Finds the files of a folder, a glob or a single path, or of a URL that names one of these.

    Args:
      pattern: may have braces, as in `{00..07}` or `{a,b}`. A folder is searched with all its subfolders;
        hidden files are left out.
      suffix: of the files that count in a folder; if none has it, compressed files with it count.

    Returns:
      The folder to which names are relative, and the paths: sorted, but in the order of braces.

    Raises:
      ValueError: nothing is found.
    """
    if is_url(pattern):
        from maxlp.data import remote

        return remote.find(pattern, suffix)
    pattern = os.path.expanduser(pattern)
    parts = pattern.split(os.sep)[:-1]
    plain = itertools.takewhile(lambda part: not glob.has_magic(part) and "{" not in part, parts)
    root = os.sep.join(plain) or (os.sep if pattern.startswith(os.sep) else os.curdir)
    if "{" not in pattern or os.path.exists(pattern):
        return (pattern if os.path.isdir(pattern) else root), _find(pattern, suffix)
    return root, [path for each in expand_braces(pattern) for path in _find(each, suffix)]


def _find(pattern: str, suffix: str) -> list[str]:
    """The sorted paths of a folder, a glob or a single path."""
    if os.path.isdir(pattern):
        paths = of_kind(walk(pattern), suffix)
        missing = f"no {suffix or 'readable'} file in the folder"
    else:
        found = {pattern}
        if not os.path.isfile(pattern):
            found = {path for each in expand_folders(pattern) for path in glob.glob(each)}
        # A link whose target is missing is found, too, so that the error names it.
        paths = [path for path in found if os.path.isfile(path) or not os.path.exists(path)]
        missing = "no file matches" if glob.has_magic(pattern) else "no file or folder"
    if not paths:
        raise ValueError(f"{missing} {pattern}; check the path")
    not_read = tuple({*NOT_READ} - {suffix})
    if other := next((path for path in paths if path.endswith(not_read)), None):
        raise ValueError(f"{other} cannot be read; decompress it, or compress it with gzip or zstd")
    return sorted(paths)


def of_kind(paths: Iterable[str], suffix: str) -> list[str]:
    """Those of the paths that have the suffix; if none has, the compressed files of this kind."""
    paths = list(paths)
    compressed = tuple(suffix + each for each in COMPRESSED)
    plain = [path for path in paths if path.endswith(suffix)]
    others = [path for path in paths if path.endswith(compressed)] if suffix else []
    if plain and others:
        message = "only the uncompressed files are read: %d compressed ones are left out, such as %s"
        logging.warning(message, len(others), min(others))
    return plain or others


def open_file(path: str) -> BinaryIO:
    """Opens a file or URL to read all of it; of a URL, large blocks are fetched."""
    if is_url(path):
        from maxlp.data import remote

        return remote.open_stream(path)
    return open(path, "rb")


def read_whole(path: str) -> bytes:
    """The content of a URL or of a compressed file, decompressed."""
    with open_file(path) as file:
        data = file.read()
    if not path.endswith(COMPRESSED):
        return data
    from maxlp.data.local_cache import decompress

    target = io.BytesIO()
    decompress(path, io.BytesIO(data), target)
    return target.getvalue()


def read_range(path: str, start: int, end: int) -> bytes:
    """Bytes `start` to `end` of a file or URL."""
    if is_url(path):
        from maxlp.data import remote

        return remote.read_range(path, start, end)
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(end - start)


def uncompressed(paths: Sequence[str]) -> list[str]:
    """The same files, but in place of each compressed one a copy in the local cache that is not.

    Raises:
      ValueError: a compressed file is truncated or damaged.
    """
    if any(path.endswith(COMPRESSED) for path in paths):
        from maxlp.data import local_cache

        return local_cache.uncompressed(paths)
    return list(paths)


def locate(ends: Sequence[int], row: int) -> tuple[int, int]:
    """The part that holds `row`, and the row within that part; `ends` are running totals of sizes."""
    part = bisect.bisect_right(ends, row)
    return part, row - (ends[part - 1] if part else 0)


def expand_braces(pattern: str) -> list[str]:
    """`a{00..02}{x,y}` → a00x, a00y, a01x …; a leading zero pads all numbers of a range, as in bash.

    Raises:
      ValueError: a range that is empty, such as `{5..1}`.
    """
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        return [pattern]
    bounds = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if bounds:
        if int(bounds[1]) > int(bounds[2]):
            raise ValueError(f"the range {match[0]} is empty; write {{{bounds[2]}..{bounds[1]}}}")
        padded = any(len(bound) > 1 and bound[0] == "0" for bound in bounds.groups())
        width = max(map(len, bounds.groups())) if padded else 0
        middles = [f"{number:0{width}d}" for number in range(int(bounds[1]), int(bounds[2]) + 1)]
    else:
        middles = match[1].split(",")
    rest = expand_braces(pattern[match.end() :])
    return [pattern[: match.start()] + middle + tail for middle in middles for tail in rest]


def expand_folders(pattern: str) -> list[str]:
    """`a/**/b` → a/b, a/x/b, a/x/y/b …: patterns without `**`, one for each folder below a.

    `glob` would follow a link to a folder above it again and again, up to the system's limit of links.
    """
    match = re.fullmatch(r"(.*/|)\*\*(/.*|)", pattern)
    if not match:
        return [pattern]
    above, rest = match[1], match[2][1:] if match[2] else "*"
    roots = [root for each in expand_folders(above) for root in (glob.glob(each) if each else [""])]
    folders = [folder for root in roots for folder, _ in walk_folders(root)]
    return [os.path.join(glob.escape(folder), rest) for folder in folders]
