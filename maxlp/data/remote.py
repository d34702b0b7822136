"""Data at URLs: finding files, and fetching exactly the bytes that are asked for.

Network failures that may pass are retried for a minute, with warnings. Then they raise an `OSError` with an
errno, which ends the run with an exit code that makes a launcher restart it.
"""

import errno
import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from glob import has_magic
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import unquote

from absl import logging

from maxlp.data.readers.access import expand_braces, find_files, of_kind
from maxlp.runtime import hub, storage
from maxlp.runtime.files import is_url
from maxlp.runtime.messages import one_line

T = TypeVar("T")

WAITS = (1, 2, 4, 8, 16, 32)  # seconds before each further attempt to read
THREADS = 16
ENDS_BYTES = 2**14  # compared where a server gives neither a hash nor a date
HUB = re.compile(
    r"hf://(?P<datasets>datasets/)?(?P<repository>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?P<path>/.*)"
)
STREAM_BYTES = 2**24  # fetched at a time of a file that is read from its beginning to its end

_entries: dict[str, storage.Entry] = {}  # what stores reported about files, kept for the whole process


def find(pattern: str, suffix: str) -> tuple[str, list[str]]:
    """Finds the files that a URL names: a file, a folder, wildcards, `{00..07}` or `{a,b}`.

    Args:
      suffix: of the files that count in a folder, see `access.find_files`.

    Returns:
      The folder to which names are relative, and the URLs in order.

    Raises:
      ValueError: nothing is found.
    """
    pattern = pinned(pattern)
    if not is_url(pattern):
        return find_files(pattern, suffix)
    found: dict[str, storage.Entry] = {}
    urls = expand_braces(pattern)
    with ThreadPoolExecutor(THREADS) as pool:
        for entries in pool.map(lambda url: _find(url, suffix), urls):
            found |= entries
    _entries.update(found)
    parts = pattern.split("/")
    plain = next((i for i, part in enumerate(parts) if has_magic(part) or "{" in part), len(parts))
    root = "/".join(parts[:plain]).rstrip("/")
    return (root.rpartition("/")[0] if root in found else root), list(found)


def _find(url: str, suffix: str) -> dict[str, storage.Entry]:
    is_web = url.startswith("http")
    if has_magic(url):
        if url.startswith(("gs://", "s3://")):
            storage.check(url)
        found = storage.glob(url)
        if is_web:  # of the links in a page, without sizes
            found = {each: storage.stat(each) for each in found}
        if not found:
            raise ValueError(f"no file matches {url}; check the URL")
        return found
    try:
        return {url: _stat_in_time(url)}
    except FileNotFoundError:
        below = {} if is_web else storage.find(url)
    visible = [name for name in sorted(below) if "/." not in f"/{name}"]
    found = {f"{url.rstrip('/')}/{name}": below[name] for name in of_kind(visible, suffix)}
    if not found:
        missing = f"no {suffix or 'readable'} file in the folder" if below else "no file or folder"
        hint = "; a web server has no folders: name files, as in {00..07}" if is_web else ""
        raise ValueError(f"{missing} {url}; check the URL{hint}")
    return found


def pinned(url: str) -> str:
    """The URL; one in the Hugging Face Hub names a commit instead of a branch or tag, which may move.

    Without network (HF_HUB_OFFLINE=1) it is the path in the cache of the Hub's library.

    Raises:
      ValueError: no such repository or revision, no access, or not in the cache.
    """
    if not url.startswith("hf://"):
        return url
    if not (match := HUB.fullmatch(url)):
        raise ValueError(f"{url} names no file of the Hub; write hf://datasets/OWNER/NAME@REVISION/FILE")
    repository, kind = match["repository"], "dataset" if match["datasets"] else "model"
    base = url[: match.start("path")]
    revision = unquote(match["revision"] or "main")
    storage.file_system(url)  # or the message that names what to install
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        folder = _in_hub_cache(url, repository, kind, hub.commits.get(base, revision))
        hub.commits[base] = os.path.basename(folder)
        return folder + match["path"]
    if not re.fullmatch("[0-9a-f]{40}", revision):
        if base not in hub.commits:
            try:
                hub.commits[base] = storage.commit(repository, kind, revision)
            except FileNotFoundError:
                raise ValueError(
                    f"{base}: there is no such {kind} or revision, or it is private; correct the name,"
                    " or log in with `hf auth login`"
                ) from None
        revision = hub.commits[base]
    return f"hf://{match['datasets'] or ''}{repository}@{revision}{match['path']}"


def _in_hub_cache(url: str, repository: str, kind: str, revision: str) -> str:
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(
            repository, repo_type=kind, revision=revision, local_files_only=True
        )
    except Exception as error:
        raise ValueError(
            f"{url} is not in the cache of the Hub ({one_line(error)}); unset HF_HUB_OFFLINE, or run"
            f" `hf download {repository} --repo-type={kind} --revision={revision}` where there is a network"
        ) from None


def sizes(urls: Sequence[str]) -> list[int | None]:
    """Sizes of files in one folder; None for those that are missing."""
    folder = urls[0].rpartition("/")[0]
    if not folder.startswith("http"):
        listed = {f"{folder}/{name}": entry for name, entry in storage.find(folder).items()}
        _entries.update(listed)
        return [listed[url].size if url in listed else None for url in urls]

    def size(url: str) -> int | None:
        try:
            return stat(url).size
        except FileNotFoundError:
            return None

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(size, urls))


def _stat_in_time(url: str) -> storage.Entry:
    """Size and tag of a file, from a store that may fail to answer."""
    if url.startswith("hf://"):  # gives up by itself, and lists a folder anew in each thread
        return storage.stat(url)
    try:
        return storage.in_time(lambda: storage.stat(url))
    except storage.StorageError as error:
        message = str(error)
        raise storage.StorageError(message if url in message else f"{url}: {message}") from error


def stat(url: str) -> storage.Entry:
    """Size and tag of a file; the tag changes with the content."""
    if url not in _entries:
        _entries[url] = retried(lambda: storage.stat(url), url)
    entry = _entries[url]
    if not entry.tag:
        ends = read_range(url, 0, min(ENDS_BYTES, entry.size))
        ends += read_range(url, max(0, entry.size - ENDS_BYTES), entry.size)
        _entries[url] = entry = entry._replace(tag=hashlib.sha256(ends).hexdigest()[:32])
    return entry


def read_range(url: str, start: int, end: int) -> bytes:
    """Bytes `start` to `end` of a file; a ValueError if the server sends more or fewer."""
    if start == end:
        return b""
    data = retried(lambda: storage.read(url, start, end), url)
    if len(data) != end - start:
        raise ValueError(
            f"{url}: asked for {end - start:,} bytes, got {len(data):,}: the file has changed, or its"
            " server does not send parts of files; copy it to a disk or a bucket"
        )
    return data


def read_if_there(url: str) -> bytes | None:
    """The content of a URL; None if it does not exist."""
    try:
        _stat_in_time(url)
        return retried(lambda: storage.read(url), url)
    except FileNotFoundError:
        return None


def open_stream(url: str) -> BinaryIO:
    """Opens a URL to read all of it, in large blocks."""
    return cast(BinaryIO, io.BufferedReader(RangeFile(url), STREAM_BYTES))


class RangeFile(io.RawIOBase):
    """A file at a URL; each read fetches the bytes that it returns, and no others."""

    def __init__(self, url: str):
        self.name, self._size, self._position = url, stat(url).size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = max(self._position, min(self._position + len(buffer), self._size))
        data = read_range(self.name, self._position, end)
        buffer[: len(data)] = data
        self._position = end
        return len(data)


def retried(function: Callable[[], T], url: str) -> T:
    """The result of a function that reads or writes a URL, tried again after failures that may pass."""
    for wait in (*WAITS, None):
        try:
            return function()
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, _reason(error, url), url) from error
        except PermissionError as error:
            raise PermissionError(errno.EACCES, _reason(error, url), url) from error
        except storage.StorageError as error:
            if wait is None:
                raise OSError(errno.EIO, _reason(error, url), url) from error
            message = "%s; trying again in %d s"
            logging.log_every_n_seconds(logging.WARNING, message, 1, error, wait)
            time.sleep(wait)
    raise AssertionError


def _reason(error: OSError, url: str) -> str:
    return str(error).removeprefix(url).lstrip(": ")
