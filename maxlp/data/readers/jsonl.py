"""JSON Lines: one JSON object per line, one document per object."""

import functools
import itertools
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from maxlp.data.readers import BrokenExample, as_text, missing, not_utf8
from maxlp.data.readers.access import find_files, locate, open_file, read_range, uncompressed
from maxlp.data.sources import VALIDATION, Source, Spec
from maxlp.runtime.files import is_url
from maxlp.runtime.messages import one_line

BLOCK_BYTES = 2**24  # read at a time to find the lines of a file
INDEX_THREADS = 8
OF_AN_ARRAY = "write one object per line, as `jq -c '.[]' FILE` does of a file with an array"
NEWLINE, BLANK = b"\n", b" \t\r\n"  # all other bytes of a text are higher


class JsonLines:
    """One document per line. Keeps the offsets of lines in memory, 8 bytes each, and no file open."""

    def __init__(self, paths: list[str], text_key: str, messages_key: str):
        self._key, self._content, self._parse = content_of(text_key, messages_key)
        self._paths, self._files = paths, uncompressed(paths)
        with ThreadPoolExecutor(INDEX_THREADS) as pool:
            self._bounds = list(pool.map(_line_bounds, self._files))
        self._ends = list(itertools.accumulate(len(bounds) - 1 for bounds in self._bounds))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        number, line = locate(self._ends, row)
        start, end = self._bounds[number][line : line + 2].tolist()
        data = read_range(self._files[number], start, end)
        try:
            value = json.loads(data)
        except UnicodeDecodeError as error:
            raise BrokenExample(not_utf8(error, start)) from None
        except (ValueError, RecursionError) as error:
            fix = OF_AN_ARRAY if data.lstrip().startswith(b"[") else "correct the line"
            raise BrokenExample(f"not a complete JSON object ({one_line(error)}); {fix}") from None
        if isinstance(value, list):
            raise BrokenExample(f"an array, not a JSON object; {OF_AN_ARRAY}")
        if not isinstance(value, dict) or self._key not in value:
            found = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise BrokenExample(missing(self._key, found))
        return {self._content: self._parse(value[self._key], self._key)}

    def where(self, row: int) -> str:
        number, line = locate(self._ends, row)
        path, start = self._files[number], int(self._bounds[number][line])
        if is_url(path):  # to count the lines before it would fetch them all
            return f"{path}: document {line + 1}, at byte {start}"
        return f"{self._paths[number]}:{_count_newlines(path, start) + 1}"

    def paths(self) -> list[str]:
        return self._paths


def open_jsonl(
    spec: Spec, *, text_key: str = "text", messages_key: str = "", validation: float = VALIDATION
) -> Source:
    """Opens JSON Lines files; `text_key` is the key of the text in each object, or `messages_key` that of a
    conversation."""
    _, paths = find_files(spec.path, ".jsonl")
    return Source(spec, JsonLines(paths, text_key, messages_key), validation=validation)


def content_of(text_key: str, messages_key: str) -> tuple[str, str, Callable[[Any, str], Any]]:
    """The key of the text or the conversation in a file, its key in a `Source`, and what checks its value.

    Raises:
      ValueError: both keys are given.
    """
    if not messages_key:
        return text_key, "text", as_text
    if text_key != "text":
        raise ValueError(f"text_key={text_key} excludes messages_key={messages_key}; give one of them")
    from maxlp.data.chat import as_messages

    return messages_key, "messages", as_messages


def _count_newlines(path: str, end: int) -> int:
    """How many of the first `end` bytes of a file on disk end a line."""
    starts = range(0, end, BLOCK_BYTES)
    return sum(read_range(path, start, min(start + BLOCK_BYTES, end)).count(NEWLINE) for start in starts)


def _line_bounds(path: str) -> np.ndarray:
    """As `_scan_lines`, which reads the whole file. The result is kept: for a URL in the local cache,
    else in memory, where another split of the same process finds it.
    """
    if is_url(path):
        from maxlp.data import local_cache

        return np.load(local_cache.array(path, "documents", _scan_lines), allow_pickle=False)
    found = os.stat(path)
    return _bounds_of_version(path, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=2**16)
def _bounds_of_version(path: str, size: int, time: int) -> np.ndarray:
    return _scan_lines(path)


def _scan_lines(path: str) -> np.ndarray:
    """Byte offsets of the lines of a file that are not blank, and of its end, int64 [lines + 1]."""
    starts, highest, begins, size, at_start = [], [], [], 0, True
    with open_file(path) as file:
        while block := file.read(BLOCK_BYTES):
            data = np.frombuffer(block, np.uint8)
            # Where the lines of the block begin, and at 0 the rest of one from before it.
            parts = np.insert(np.flatnonzero(data[:-1] == ord(NEWLINE)) + 1, 0, 0)
            starts.append(parts + size)
            highest.append(np.maximum.reduceat(data, parts))
            begins.append(np.insert(np.ones(len(parts) - 1, bool), 0, at_start))
            size, at_start = size + len(data), data[-1] == ord(NEWLINE)
    if not starts:
        return np.zeros(1, np.int64)
    lines = np.flatnonzero(np.concatenate(begins))  # the first part of each
    is_blank = np.isin(np.maximum.reduceat(np.concatenate(highest), lines), list(BLANK))
    return np.append(np.concatenate(starts)[lines][~is_blank], size)
