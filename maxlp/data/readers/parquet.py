"""Parquet: one document per row."""

import functools
import itertools
from typing import Any

from maxlp.data.chat import as_messages
from maxlp.data.readers import as_text, find_files, locate, missing
from maxlp.data.sources import VALIDATION, Source, Spec
from maxlp.data.specs import import_extra, one_line


class ParquetRows:
    """One document per row. Each process keeps a few decoded row groups."""

    def __init__(self, paths: list[str], text_key: str, messages_key: str = ""):
        self._key, self._is_chat = messages_key or text_key, bool(messages_key)
        sizes = {(p, group): rows for p in paths for group, rows in enumerate(_group_sizes(p, self._key))}
        self._groups = list(sizes)
        self._ends = list(itertools.accumulate(sizes.values())) or [0]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        number, row = locate(self._ends, row)
        path, group = self._groups[number]
        value = _column(path, group, self._key)[row].as_py()
        if self._is_chat:
            return {"messages": as_messages(value, self._key)}
        return {"text": as_text(value, self._key)}

    def where(self, row: int) -> str:
        number, row = locate(self._ends, row)
        path, group = self._groups[number]
        return f"{path}: row {row} of row group {group}"

    def paths(self) -> list[str]:
        return list(dict.fromkeys(path for path, _ in self._groups))


def open_parquet(
    spec: Spec, *, text_key: str = "text", messages_key: str = "", validation: float = VALIDATION
) -> Source:
    """Opens Parquet files; `text_key` is the column of the text, `messages_key` that of conversations."""
    _, paths = find_files(spec.path, ".parquet")
    return Source(spec, ParquetRows(paths, text_key, messages_key), validation=validation)


def _group_sizes(path: str, key: str) -> list[int]:
    """Number of rows in each row group."""
    parquet = import_extra("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not a readable Parquet file ({one_line(error)})") from None
    with file:
        names = file.schema_arrow.names
        if key not in names:
            raise ValueError(f"{path}: {missing(key, ', '.join(names))}")
        metadata = file.metadata
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


@functools.lru_cache(maxsize=8)
def _column(path: str, group: int, column: str) -> Any:
    # Opened anew for each row group: reader threads must not share a ParquetFile.
    with import_extra("pyarrow.parquet").ParquetFile(path) as file:
        return file.read_row_group(group, columns=[column]).column(0)
