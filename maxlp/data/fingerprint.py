"""A cheap fingerprint of the files that a run learns from, to notice when they change between two launches.

It covers the names of all files relative to their common folder, their sizes, and content: all of it for at
most `WHOLE_FILES` files of at most `WHOLE_BYTES` bytes together, samples otherwise, spread evenly over all
files as if they were one. The last block of a file counts where formats such as Parquet have their table of
contents. So a corpus that is overwritten, truncated, appended to, reordered or re-encoded is noticed; a few
bytes changed in place in the middle of a large file may not be. Modification times do not count: a copy
of a corpus has the same fingerprint.

Of files at URLs it covers the names, the sizes, and what the store keeps to tell contents apart: a hash, an
ETag or a date. Of files of the Hugging Face Hub it covers the names and the commit, which are the same in
the cache of its library.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from maxlp.runtime.files import is_url

WHOLE_FILES, WHOLE_BYTES = 4096, 2**26
BLOCKS, BLOCK_BYTES = 256, 2**14  # read in samples: this many blocks, and the last block of as many files
THREADS = 16
COMMIT = re.compile(r"(?:^hf://[^@]+@|/(?:datasets|models)--[^/]+/snapshots/)([0-9a-f]{40})/")


def of_files(paths: Sequence[str]) -> str:
    """The fingerprint of files or URLs in this order, 32 hexadecimal digits; a ValueError without any."""
    if not paths:
        raise ValueError("paths() of a data source names no file")
    root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    names = [os.path.relpath(path, root) for path in paths]
    if commit := COMMIT.search(paths[0]):
        return of_json(names, commit[1])
    if is_url(paths[0]):
        from maxlp.data import remote

        entries = _in_threads(remote.stat, paths)
        return of_json(names, [[entry.size, entry.tag] for entry in entries])
    sizes = _in_threads(os.path.getsize, paths)
    if len(paths) <= WHOLE_FILES and sum(sizes) <= WHOLE_BYTES:
        places = [(path, 0, size) for path, size in zip(paths, sizes, strict=True)]
    else:
        places = _samples(paths, sizes)
    # Decoded in the same way under any locale.
    names = [os.fsencode(name).decode("latin-1") for name in names]
    return of_json(names, sizes, _in_threads(_digest, places))


def of_json(*values: Any) -> str:
    """The fingerprint of values that JSON can hold, 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


def _samples(paths: Sequence[str], sizes: Sequence[int]) -> list[tuple[str, int, int]]:
    """(path, offset, size) of the blocks to read."""
    ends = np.cumsum(sizes)
    places = []
    for at in np.linspace(0, max(0, int(ends[-1]) - BLOCK_BYTES), BLOCKS).astype(np.int64):
        number = int(np.searchsorted(ends, at, side="right"))
        places.append((paths[number], int(at - ends[number] + sizes[number]), BLOCK_BYTES))
    for number in np.linspace(0, len(paths) - 1, min(BLOCKS, len(paths))).astype(np.int64):
        places.append((paths[number], max(0, sizes[number] - BLOCK_BYTES), BLOCK_BYTES))
    return places


def _digest(place: tuple[str, int, int]) -> str:
    path, offset, size = place
    with open(path, "rb") as file:
        file.seek(offset)
        return hashlib.sha256(file.read(size)).hexdigest()


def _in_threads(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """As `map`, in a few threads that each take many items, because a task for each takes longer."""
    results: list[Any] = [None] * len(items)

    def take(first: int) -> None:
        for number in range(first, len(items), THREADS):
            results[number] = function(items[number])

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(take, range(THREADS)))
    return results
