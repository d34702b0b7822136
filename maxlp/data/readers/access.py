"""Access to files wherever they are: on disk, at a URL, compressed."""

import glob
import os
import re
from collections.abc import Sequence
from typing import BinaryIO

from maxlp.data.readers import COMPRESSED, walk_folders
from maxlp.runtime.files import is_url


def open_file(path: str) -> BinaryIO:
    """Opens a file or URL to read all of it; of a URL, large blocks are fetched."""
    if is_url(path):
        from maxlp.data import remote

        return remote.open_stream(path)
    return open(path, "rb")


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
