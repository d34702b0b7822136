"""Parquet: one document per row."""

import functools
import itertools
from typing import Any

from maxlp.data.readers import as_text, find_files, locate
from maxlp.data.sources import VALIDATION, Source, Spec
from maxlp.data.specs import import_extra, one_line


class ParquetRows:
    """One document per row. Each process keeps a few decoded row groups."""

    def __init__(self, paths: list[str], text_key: str):
        self._text_key = text_key
        sizes = {(p, group): rows for p in paths for group, rows in enumerate(_group_sizes(p, text_key))}
        self._groups = list(sizes)
        self._ends = list(itertools.accumulate(sizes.values())) or [0]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        number, row = locate(self._ends, row)
        path, group = self._groups[number]
        return {"text": as_text(_column(path, group, self._text_key)[row].as_py(), self._text_key)}

    def where(self, row: int) -> str:
        number, row = locate(self._ends, row)
        path, group = self._groups[number]
        return f"{path}: row {row} of row group {group}"

    def paths(self) -> list[str]:
        return list(dict.fromkeys(path for path, _ in self._groups))


def open_parquet(spec: Spec, *, text_key: str = "text", validation: float = VALIDATION) -> Source:
    """Opens Parquet files; `text_key` is the column of the text."""
    _, paths = find_files(spec.path, ".parquet")
    return Source(spec, ParquetRows(paths, text_key), validation=validation)


def _group_sizes(path: str, text_key: str) -> list[int]:
    """Number of rows in each row group."""
    parquet = import_extra("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not a readable Parquet file ({one_line(error)})") from None
    with file:
        names = file.schema_arrow.names
        if text_key not in names:
            raise ValueError(f"{path}: no column {text_key!r}, found: {', '.join(names)}; set ?text_key=")
        metadata = file.metadata
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


@functools.lru_cache(maxsize=8)
def _column(path: str, group: int, column: str) -> Any:
    # Opened anew for each row group: reader threads must not share a ParquetFile.
    with import_extra("pyarrow.parquet").ParquetFile(path) as file:
        return file.read_row_group(group, columns=[column]).column(0)
