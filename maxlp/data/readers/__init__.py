"""Readers: one module for each kind of data, imported only when a source names the kind.

Each module defines the function that opens a source, listed in `maxlp.data.sources.KINDS`. This file
has the helpers that several readers share.
"""

import os
from collections.abc import Iterator, Sequence

import numpy as np

from maxlp.runtime.files import is_url

COMPRESSED = (".gz", ".tgz", ".zst")
TOKEN_DTYPES = ("uint16", "uint32", "int32")


class BrokenExample(ValueError):
    """A single record cannot be used: it is damaged, truncated, not an image or too large."""


def walk(root: str, skip: Sequence[str] = ()) -> Iterator[str]:
    """Paths of all files below `root`, except hidden ones and those in folders named in `skip`."""
    for folder, names in walk_folders(root, skip):
        yield from (os.path.join(folder, name) for name in names if name[0] != ".")


def walk_folders(
    root: str, skip: Sequence[str] = (), above: Sequence[str] = ()
) -> Iterator[tuple[str, list[str]]]:
    """`root` and all folders below it, except those that are hidden or in `skip`; each with its files."""
    # Links are followed, but not back to a folder that they are in.
    above = (*above, os.path.realpath(root))
    _, subfolders, names = next(os.walk(root or os.curdir), (root, [], []))
    yield root, names
    for name in subfolders:
        folder = os.path.join(root, name)
        if name not in skip and name[0] != "." and os.path.realpath(folder) not in above:
            yield from walk_folders(folder, skip, above)


def read_whole(path: str) -> bytes:
    """The content of a file or URL, decompressed."""
    if is_url(path) or path.endswith(COMPRESSED):
        from maxlp.data.readers import access  # not for the standard library

        return access.read_whole(path)
    with open(path, "rb") as file:
        return file.read()


def read_if_there(path: str) -> bytes | None:
    """The bytes of a file or URL as they are; None if there is none."""
    if is_url(path):
        from maxlp.data import remote

        return remote.read_if_there(path)
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return file.read()


def as_text(value: object, key: str) -> str | bytes:
    """Returns `value` if it is text; raises a `BrokenExample` otherwise."""
    if not isinstance(value, str | bytes):
        found = "null" if value is None else type(value).__name__
        raise BrokenExample(f"{key!r} is {found}, not text; remove the record, or set ?text_key=")
    return value


def check_utf8(text: object) -> None:
    """Raises a `BrokenExample` for bytes that are not UTF-8."""
    if isinstance(text, bytes):
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise BrokenExample(not_utf8(error)) from None


def check_tokens(tokens: np.ndarray, vocab_size: int) -> None:
    """Raises a `BrokenExample` for tokens that no `sources.Reader` has, or beyond the vocabulary."""
    if tokens.dtype.name not in TOKEN_DTYPES:
        raise BrokenExample(
            f"its tokens are {tokens.dtype.name}; its reader must return uint16 or uint32, or for a "
            "conversation int32"
        )
    if not len(tokens):
        return
    largest = max(int(tokens.max()), ~int(tokens.min()))  # conversations have complements
    if largest >= vocab_size:
        raise BrokenExample(f"token {largest} is not one of its tokenizer, which has {vocab_size} tokens")


def not_utf8(error: UnicodeDecodeError, start: int = 0) -> str:
    """The message for text in another encoding, which begins at byte `start` of its file."""
    byte = f"byte {start + error.start} (0x{error.object[error.start]:02x}) is not UTF-8"
    return f"{byte}; convert the text, for example with iconv -f LATIN1 -t UTF-8"


def missing(key: str, found: str) -> str:
    """The message for records without the key of the text or of the conversation."""
    return f"no {key!r}, found: {found}; set ?text_key=, or ?messages_key= for conversations"
