"""Parquet: one document per row.

Of a file at a URL only the footer and one column of the row groups that are used are fetched. Decoded row
groups are kept in the local cache as long as its disk has room, because documents are read in random order.
"""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from maxlp.data.readers import missing
from maxlp.data.readers.access import find_files, locate
from maxlp.data.readers.jsonl import content_of
from maxlp.data.sources import VALIDATION, Source, Spec
from maxlp.runtime.extras import import_extra
from maxlp.runtime.files import is_url
from maxlp.runtime.messages import one_line

THREADS = 16  # that read footers


class ParquetRows:
    """One document per row. Each process keeps a few decoded row groups."""

    def __init__(self, paths: list[str], text_key: str, messages_key: str):
        self._key, self._content, self._parse = content_of(text_key, messages_key)
        with ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(lambda path: _group_sizes(path, self._key), paths))
        sizes = {
            (path, group): rows
            for path, groups in zip(paths, found, strict=True)
            for group, rows in enumerate(groups)
        }
        self._groups = list(sizes)
        self._ends = list(itertools.accumulate(sizes.values())) or [0]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        number, row = locate(self._ends, row)
        path, group = self._groups[number]
        value = _column(path, group, self._key)[row].as_py()
        return {self._content: self._parse(value, self._key)}

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
    try:
        file = _open(path)
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path} is not a readable Parquet file ({one_line(error)})") from None
    with file:
        names = file.schema_arrow.names
        if key not in names:
            raise ValueError(f"{path}: {missing(key, ', '.join(names))}")
        metadata = file.metadata
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _open(path: str) -> Any:
    # Opened anew for each row group: reader threads must not share a ParquetFile.
    parquet = import_extra("pyarrow.parquet")
    if not is_url(path):
        return parquet.ParquetFile(path)
    return parquet.ParquetFile(_open_url(path), metadata=_footer(path), pre_buffer=True)


def _open_url(url: str) -> Any:
    from maxlp.data.remote import RangeFile

    return RangeFile(url)


@functools.lru_cache(maxsize=64)
def _footer(url: str) -> Any:
    return import_extra("pyarrow.parquet").read_metadata(_open_url(url))


@functools.lru_cache(maxsize=8)
def _column(path: str, group: int, column: str) -> Any:
    if is_url(path):
        from maxlp.data import local_cache

        if local_cache.has_room():
            pyarrow = import_extra("pyarrow")
            make = functools.partial(_save_column, group=group, column=column)
            saved = local_cache.cached(path, f"row group {group} of {column}", make)
            return pyarrow.ipc.open_file(pyarrow.memory_map(saved)).read_all().column(0)
    return _read_column(path, group, column)


def _read_column(path: str, group: int, column: str) -> Any:
    with _open(path) as file:
        return file.read_row_group(group, columns=[column]).column(0)


def _save_column(path: str, target: BinaryIO, group: int, column: str) -> None:
    pyarrow = import_extra("pyarrow")
    table = pyarrow.table({column: _read_column(path, group, column)})
    with pyarrow.ipc.new_file(target, table.schema) as writer:
        writer.write_table(table)
