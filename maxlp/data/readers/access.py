"""Access to files wherever they are: on disk, at a URL, compressed."""

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import BinaryIO

from maxlp.data.readers import COMPRESSED
from maxlp.runtime.files import is_url


def open_file(path: str) -> BinaryIO:
    """Opens a file or URL to read all of it; of a URL, large blocks are fetched."""
    return resolve_name("maxlp.data.remote:open_stream")(path) if is_url(path) else open(path, "rb")


def read_range(path: str, start: int, end: int) -> bytes:
    """Bytes `start` to `end` of a file or URL."""
    if is_url(path):
        return resolve_name("maxlp.data.remote:read_range")(path, start, end)
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(end - start)


def uncompressed(paths: Sequence[str]) -> list[str]:
    """The same files, but in place of each compressed one a copy in the local cache that is not.

    Raises:
      ValueError: a compressed file is truncated or damaged.
    """
    if any(path.endswith(COMPRESSED) for path in paths):
        return resolve_name("maxlp.data.local_cache:uncompressed")(paths)
    return list(paths)
