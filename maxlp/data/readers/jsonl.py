"""JSON Lines: one JSON object per line, one document per object."""

import itertools
import json
from typing import Any

import numpy as np

from maxlp.data.chat import as_messages
from maxlp.data.readers import BrokenExample, as_text, find_files, locate, missing
from maxlp.data.sources import VALIDATION, Source, Spec
from maxlp.data.specs import one_line

BLOCK_BYTES = 2**24  # read at a time to find the lines of a file


class JsonLines:
    """One document per line. Keeps the offsets of lines in memory, 8 bytes each, and no file open."""

    def __init__(self, paths: list[str], text_key: str, messages_key: str = ""):
        self._paths, self._key, self._is_chat = paths, messages_key or text_key, bool(messages_key)
        self._starts = [_line_starts(path) for path in paths]
        self._ends = list(itertools.accumulate(len(starts) for starts in self._starts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        path, start = self._place(row)
        with open(path, "rb") as file:
            file.seek(start)
            line = file.readline()
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BrokenExample(f"not a complete JSON object ({one_line(error)})") from None
        if not isinstance(value, dict) or self._key not in value:
            found = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise BrokenExample(missing(self._key, found))
        if self._is_chat:
            return {"messages": as_messages(value[self._key], self._key)}
        return {"text": as_text(value[self._key], self._key)}

    def where(self, row: int) -> str:
        path, start = self._place(row)
        with open(path, "rb") as file:
            number = file.read(start).count(b"\n") + 1
        return f"{path}:{number}"

    def paths(self) -> list[str]:
        return self._paths

    def _place(self, row: int) -> tuple[str, int]:
        number, row = locate(self._ends, row)
        return self._paths[number], int(self._starts[number][row])


def open_jsonl(
    spec: Spec, *, text_key: str = "text", messages_key: str = "", validation: float = VALIDATION
) -> Source:
    """Opens JSON Lines files; `text_key` is the key of the text in each object, or `messages_key` that of a
    conversation."""
    _, paths = find_files(spec.path, ".jsonl")
    return Source(spec, JsonLines(paths, text_key, messages_key), validation=validation)


def _line_starts(path: str) -> np.ndarray:
    """Byte offsets, int64 [n], of the lines of a file that are not blank."""
    starts, size = [np.zeros(1, np.int64)], 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            starts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + size + 1)
            size += len(block)
    all_starts = np.concatenate(starts)
    lengths = np.diff(all_starts, append=size)
    is_line = lengths > len("\r\n")
    with open(path, "rb") as file:
        for i in np.flatnonzero(lengths == 2).tolist():  # a blank line, or one character
            file.seek(int(all_starts[i]))
            is_line[i] = bool(file.read(2).strip())
    return all_starts[is_line]
