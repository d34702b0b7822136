"""The standard library, and text files: one document per file."""

import codecs
import functools
import os
import platform
import sysconfig
import zlib
from collections.abc import Sequence
from typing import Any

from maxlp.data.readers import read_whole, walk
from maxlp.data.sources import SINGLE_DOCUMENT, VALIDATION, Source, Spec

NOT_LIBRARY = ("site-packages", "dist-packages", "__pycache__")


class TextFiles:
    """One document per file, as bytes without a byte order mark."""

    def __init__(self, root: str, names: Sequence[str]):
        self.root, self.names = root, list(names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"text": read_whole(self.where(row)).removeprefix(codecs.BOM_UTF8)}

    def where(self, row: int) -> str:
        return os.path.join(self.root, self.names[row])

    def paths(self) -> list[str]:
        return [os.path.join(self.root, name) for name in self.names]


def open_stdlib(spec: Spec, *, validation: float = VALIDATION) -> Source:
    """Opens the Python source files of the standard library."""
    root, names = _stdlib_files()
    files = TextFiles(root, choose_files(names, spec.split, validation))
    return Source(spec, files, version=f"Python {platform.python_version()}")


def open_files(spec: Spec, *, validation: float = VALIDATION) -> Source:
    """Opens the files of a folder, a glob or a path; a ValueError for the validation split of one file."""
    from maxlp.data.readers.access import find_files  # not for the standard library

    root, paths = find_files(spec.path)
    names = [os.path.relpath(path, root).replace(os.sep, "/") for path in paths]
    if len(names) == 1 and spec.split == "validation":
        raise ValueError(SINGLE_DOCUMENT)
    return Source(spec, TextFiles(root, choose_files(names, spec.split, validation)))


def choose_files(names: Sequence[str], split: str, validation: float) -> list[str]:
    """The names of one split.

    Files are assigned by the hash of their names: about the fraction `validation` of them is for
    validation; of several files at least one, and never all. If `validation` is 0, none is.
    """
    if split == "all":
        return list(names)
    hashes = {name: zlib.crc32(os.fsencode(name)) for name in names}
    limit = validation * 2**32
    if validation:
        limit = min(max(limit, min(hashes.values()) + 1), max(hashes.values()))
    return [name for name in names if (hashes[name] < limit) == (split == "validation")]


@functools.cache
def _stdlib_files() -> tuple[str, list[str]]:
    """Root and relative paths of the library's modules that are valid UTF-8 and not empty."""
    root = sysconfig.get_path("stdlib")
    paths = [path for path in walk(root, skip=NOT_LIBRARY) if path.endswith(".py") and _has_text(path)]
    if not paths:
        raise ValueError(f"no Python source under {root}; use text:PATH instead")
    return root, sorted(os.path.relpath(path, root).replace(os.sep, "/") for path in paths)


def _has_text(path: str) -> bool:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return bool(file.read())
    except UnicodeDecodeError:  # the library's tests of other encodings
        return False
