"""Files in buckets and on servers, named by URLs: gs://, s3://, https:// and hf:// (the Hugging Face Hub).

A thin layer over fsspec. Every function takes whole URLs and raises errors of one line that name one.
URLs are kept, never file systems or open files: those survive neither a fork nor pickling.
"""

import base64
import contextlib
import datetime
import importlib.util
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

# The module that each protocol needs, and the extra that installs it.
EXTRAS = {
    "gs": ("gcsfs", "gcs"),
    "s3": ("s3fs", "s3"),
    "http": ("aiohttp", "http"),
    "https": ("aiohttp", "http"),
    "hf": ("huggingface_hub", "hf"),
}
BUCKETS = ("gs", "s3")  # can be written to, and keep MD5 sums
ANSWER_SECONDS = 7.0  # in which a store must answer `check`

_REFUSED = re.compile(r"\b40[13]\b|credential|forbidden|unauthori[sz]ed|access ?denied|anonymous", re.I)
_MAX_REASON = 200  # characters


class StorageError(OSError):
    """A store failed or did not answer; the same command may succeed later."""


class Entry(NamedTuple):
    """A file in a store.

    Attributes:
      size: in bytes.
      md5: of the content, in hexadecimal digits, where the store keeps it.
      tag: changes whenever the content does: MD5, ETag, blob id or time of the last change; "" if none.
      changed: time of the last change in seconds since 1970; 0 if the store does not keep it.
    """

    size: int
    md5: str | None
    tag: str
    changed: float


def file_system(url: str) -> Any:
    """The fsspec file system of a URL.

    Raises:
      ValueError: an unknown protocol, no bucket, or a library that is not installed.
    """
    protocol = _protocol(url)
    import fsspec

    if protocol in BUCKETS:  # without the cache of listings, what others write is seen at once
        return fsspec.filesystem(protocol, use_listings_cache=False)
    return fsspec.filesystem(protocol)


def check(url: str) -> None:
    """Asks the store of a URL for an answer, once and before anything else is done.

    Raises:
      ValueError: as `file_system`.
      OSError: the store refuses, has no such bucket, or does not answer within `ANSWER_SECONDS`.
    """
    protocol, bucket = _protocol(url), url.split("/")[2]

    def ask() -> None:
        fs = file_system(url)
        if protocol == "gs":
            fs.call("GET", "b/{}/o", bucket, maxResults=1, json_out=True)
        elif protocol == "s3":
            fs.call_s3("list_objects_v2", Bucket=bucket, MaxKeys=1)
        else:
            fs.info(url)

    with _explained(f"{protocol}://{bucket}" if protocol in BUCKETS else url):
        in_time(ask)


def find(folder: str) -> dict[str, Entry]:
    """Every file below a folder of a bucket, by its path from there; empty if there is none."""
    fs = file_system(folder)
    with _explained(folder):
        root = fs._strip_protocol(folder).rstrip("/") + "/"
        try:
            found = fs.find(root, detail=True)
        except FileNotFoundError:
            found = {}
    return {name.removeprefix(root): _entry(info) for name, info in found.items() if name != root}


def glob(pattern: str) -> dict[str, Entry]:
    """The files that match a pattern with ``*``, ``?`` or ``**``, by URL and in the order of these."""
    fs = file_system(pattern)
    with _explained(pattern):
        found = fs.glob(pattern, detail=True)
    files = {path: info for path, info in found.items() if info.get("type") != "directory"}
    return {fs.unstrip_protocol(path): _entry(info) for path, info in sorted(files.items())}


def stat(url: str) -> Entry:
    """Size and tag of one file; a FileNotFoundError if it does not exist or is a folder."""
    with _explained(url):
        info = file_system(url).info(url)
        if info.get("type") == "directory":
            raise FileNotFoundError(url)
        return _entry(info)


def commit(repository: str, kind: str, revision: str) -> str:
    """The commit of a repository of the Hugging Face Hub that a branch or a tag is at now.

    Args:
      kind: "dataset" or "model".
    """
    url = f"hf://{'datasets/' if kind == 'dataset' else ''}{repository}@{revision}"
    file_system(url)
    import huggingface_hub
    from huggingface_hub import errors

    with _explained(url):
        try:
            info = huggingface_hub.HfApi().repo_info(repository, revision=revision, repo_type=kind)
            return str(info.sha)
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            raise FileNotFoundError(url) from None


def read(url: str, start: int | None = None, end: int | None = None) -> bytes:
    """The content of a file, or its bytes from `start` to `end`; no other bytes are fetched."""
    fs = file_system(url)
    with _explained(url):
        if url.startswith("hf://") and start is not None:  # whose `cat_file` reads in blocks of 5 MB
            with fs.open(url, "rb", cache_type="none", size=end) as file:  # and asks for no size
                file.seek(start)
                return file.read(-1 if end is None else end - start)
        return fs.cat_file(url, start=start, end=end)


def write(url: str, content: bytes, *, create: bool = False) -> None:
    """Writes a file, which is there as a whole once this returns.

    Args:
      create: fail if it exists, for contents of less than 5 MB.

    Raises:
      FileExistsError: with `create`, the file exists.
    """
    fs = file_system(url)
    with _explained(url):
        fs.pipe_file(url, content, mode="create" if create else "overwrite")


def upload(path: Path, url: str) -> None:
    """Copies a file of any size to a bucket."""
    fs = file_system(url)
    with _explained(url):
        fs.put_file(str(path), url)


def download(url: str, path: Path) -> None:
    """Copies a file of any size from a bucket."""
    fs = file_system(url)
    with _explained(url):
        fs.get_file(url, str(path))


def remove(url: str) -> None:
    """Deletes a file, or a folder with everything in it; what does not exist is ignored."""
    fs = file_system(url)
    with _explained(url), contextlib.suppress(FileNotFoundError):
        fs.rm(url.rstrip("/"), recursive=True)


def copy(source: str, target: str) -> None:
    """Copies a file within a bucket; the store itself moves the bytes."""
    with _explained(source):
        file_system(source).copy(source, target)


def in_time(function: Callable[[], T]) -> T:
    """Calls a function in a thread, which is abandoned after `ANSWER_SECONDS`.

    The libraries below retry for minutes, and look for credentials on servers that may not exist.

    Raises:
      StorageError: it took too long.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    for error in errors:
        raise error
    if not results:
        raise StorageError(f"no answer within {ANSWER_SECONDS:.0f} s; check network, address and login")
    return results[0]


# --- helpers --------------------------------------------------------------------------------------------


def _protocol(url: str) -> str:
    """The protocol of a URL, whose library is installed; raises as `file_system` does."""
    protocol, _, rest = url.partition("://")
    if protocol not in EXTRAS:
        known = ", ".join(f"{known}://" for known in EXTRAS)
        raise ValueError(f"{url} has an unknown protocol; URLs begin with {known}")
    if not rest.partition("/")[0]:
        raise ValueError(f"{url} names no {'bucket' if protocol in BUCKETS else 'file'}")
    module, extra = EXTRAS[protocol]
    if not all(importlib.util.find_spec(name) for name in ("fsspec", module)):
        raise ValueError(f"{url} needs {module}: pip install 'maxlp[{extra}]'")
    for library in (module, "google.auth"):  # they log every error that they raise, or try again after
        logging.getLogger(library).setLevel(logging.CRITICAL)
    return protocol


def _entry(info: dict[str, Any]) -> Entry:
    """From a listing. MD5 is `md5Hash` on gs; on s3 it is the ETag, except of files uploaded in parts."""
    changed = info.get("LastModified") or info.get("mtime")
    etag = str(info.get("ETag") or info.get("etag") or "").strip('"')
    md5 = etag if re.fullmatch("[0-9a-f]{32}", etag) else None
    if "md5Hash" in info:
        md5 = base64.b64decode(info["md5Hash"]).hex()
    tag = md5 or etag or info.get("blob_id") or changed or info.get("Last-Modified") or ""
    seconds = changed.timestamp() if isinstance(changed, datetime.datetime) else 0.0
    return Entry(info.get("size") or 0, md5, str(tag), seconds)


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    """Turns errors of fsspec and of the libraries below it into four kinds of one-line errors."""
    try:
        yield
    except FileExistsError:
        raise FileExistsError(f"{url} exists already") from None
    except Exception as error:
        if isinstance(error, FileNotFoundError):
            cause = error.__cause__  # over http, of any failure to find out about a file
            failed = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
            if cause is None or not (failed or getattr(cause, "status", 404) != 404):
                raise FileNotFoundError(f"{url} does not exist") from error
            error = cause
        reason = " ".join(str(error).split())[:_MAX_REASON] or type(error).__name__
        if isinstance(error, PermissionError) or _REFUSED.search(f"{type(error).__name__} {reason}"):
            raise PermissionError(
                f"{url}: access refused ({reason}); log in, or set the credentials of this store"
            ) from error
        raise StorageError(f"{url}: {reason}") from error
