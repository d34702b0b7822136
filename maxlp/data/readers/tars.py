"""Random access to the samples of WebDataset tars.

A sample is a sequence of files whose names are equal up to the first dot: `000017.jpg`, `000017.txt`,
`000017.json`, `000017.cls`. The headers of each tar are read once to find its samples. The resulting
index is saved beside the tar, as `NAME.tar.TYPE-SIZE-TIME.index.npy`, or kept in memory if the folder
is not writable (36 bytes per sample). It is rebuilt when the tar changes. Of a saved index only the
entry of the sample is read.

A tar at a URL is read once as a whole, because fetching each header by itself takes longer; its index is
kept in the local cache. Then samples are fetched by themselves. Compressed tars have no random access: they
are decompressed into the local cache.
"""

import contextlib
import functools
import glob
import io
import itertools
import json
import os
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import numpy as np
from absl import logging

from maxlp.data.readers import COMPRESSED, BrokenExample, check_utf8
from maxlp.data.readers.access import find_files, locate, open_file, read_range, uncompressed
from maxlp.data.sources import VALIDATION, Source, Spec
from maxlp.runtime.files import is_url
from maxlp.runtime.messages import one_line

IMAGE_TYPES = ("jpg", "jpeg", "png", "webp")
INDEX_THREADS = 16
MAX_FILE_BYTES = 2**30  # of an image or a caption; larger ones count as broken
MAX_WARNINGS = 5  # of a kind
INDEX_DTYPE = np.dtype(
    [
        ("header", "<u8"),  # offset of the image's tar header, which contains its name
        ("image", "<u8"),
        ("image_size", "<u4"),
        ("text", "<u8"),
        ("text_size", "<u4"),
        ("label", "<i4"),  # content of the .cls file, -1 without one
    ]
)


class Tars:
    """The samples of tars by number."""

    def __init__(self, pattern: str, text: str = "txt"):
        """Indexes the tars.

        Args:
          pattern: a path or URL with braces `{00000..00041}` or wildcards, or a folder.
          text: extension of the caption files: `txt`, or `json:KEY` for an entry of a JSON object.

        Raises:
          ValueError: a tar is missing, truncated or damaged, or has no samples.
        """
        self._tars = find_tars(pattern)
        self._files = uncompressed(self._tars)
        kind, _, self._key = text.partition(":")
        self._type = kind.lower()  # as those of the files
        with ThreadPoolExecutor(INDEX_THREADS) as pool:
            # Paths where possible, so that worker processes read the files instead of receiving copies.
            texts = itertools.repeat(self._type)
            self._indices = list(pool.map(index_tar, self._files, texts, self._tars))
        self._ends = list(itertools.accumulate(len(_index(each)) for each in self._indices))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Sample `row`: {"image": bytes, "text": str or None, "label": int or -1}.

        Raises:
          BrokenExample: the caption is not UTF-8, the JSON has none under the given key, or a file is too
            large.
        """
        number, entry = self._entry(row)
        if max(entry["image_size"], entry["text_size"]) > MAX_FILE_BYTES:
            raise BrokenExample(f"its image or caption has more than {MAX_FILE_BYTES >> 30} GiB")
        path = self._files[number]
        image = _read(path, entry["image"], entry["image_size"])
        text = _read(path, entry["text"], entry["text_size"]) if entry["text"] else None
        return {"image": image, "text": self._caption(text), "label": int(entry["label"])}

    def where(self, row: int) -> str:
        """The tar and the key of a sample."""
        number, entry = self._entry(row)
        headers = read_range(self._files[number], int(entry["header"]), int(entry["image"]))
        with tarfile.open(fileobj=io.BytesIO(headers), mode="r:") as tar:
            member = tar.next()
        assert member is not None
        return f"{self._tars[number]}: {_split(member.name)[0]}"

    def paths(self) -> list[str]:
        return self._tars

    def has_captions(self) -> bool:
        return any(_index(each)["text"].any() for each in self._indices)

    def _entry(self, row: int) -> tuple[int, np.void]:
        number, row_of_tar = locate(self._ends, row)
        index = self._indices[number]
        if not isinstance(index, str):
            return number, index[row_of_tar]
        # Mapped indices of thousands of tars would each keep a file open.
        with open(index, "rb") as file:
            file.seek((row - self._ends[number]) * INDEX_DTYPE.itemsize, os.SEEK_END)
            return number, np.frombuffer(file.read(INDEX_DTYPE.itemsize), INDEX_DTYPE)[0]

    def _caption(self, data: bytes | None) -> str | None:
        if data is None:
            return None
        check_utf8(data)
        if self._type != "json":
            return data.decode("utf-8-sig").strip()  # without a mark
        try:
            value = json.loads(data)[self._key]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise BrokenExample(f"the JSON has no {self._key!r}") from None
        if not isinstance(value, str | None):
            raise BrokenExample(f"{self._key!r} of the JSON is {type(value).__name__}, not text")
        return value


def open_tars(spec: Spec, *, text: str = "txt", validation: float = VALIDATION) -> Source:
    """Opens WebDataset tars; see `Tars` for `text`.

    Raises:
      ValueError: there are no tars, or no sample has the file that `text` names.
    """
    found = Tars(spec.path, text)
    if text != "txt" and not found.has_captions():
        kind = text.partition(":")[0]
        raise ValueError(
            f"no sample has a .{kind}; correct ?text={text}, or drop it for images with labels"
        )
    return Source(spec, found, validation=validation)


def find_tars(pattern: str) -> list[str]:
    """The tars of a folder and its subfolders, or of a pattern with braces or wildcards, in order.

    Raises:
      ValueError: no tar is found, or one that the braces name is missing.
    """
    _, paths = find_files(pattern, ".tar")
    for path in paths:
        if not path.endswith((".tar", *(f".tar{each}" for each in COMPRESSED), ".tgz")):
            raise ValueError(f"{path} is not a .tar, nor a compressed one")
    return paths


def index_tar(path: str, text_type: str, name: str) -> str | np.ndarray:
    """Makes the index of a tar unless it exists already.

    Args:
      name: of the tar in messages; `path` is that of a copy in the cache if it is compressed.

    Returns:
      The path of the saved index, or the index itself if it cannot be saved.

    Raises:
      ValueError: the tar is truncated, damaged, not a tar or without samples.
    """
    if is_url(path):
        from maxlp.data import local_cache

        scan = functools.partial(scan_tar, text_type=text_type, name=name)
        return local_cache.array(path, f"index of {text_type}", scan)
    # The file name contains all that the index depends on, so a stale index is never read.
    stat = os.stat(path)
    stamp = f"{text_type}-{stat.st_size:x}-{stat.st_mtime_ns:x}"
    index_path = f"{path}.{stamp}.index.npy"
    if _is_index(index_path):
        return index_path
    index = scan_tar(path, text_type, name)
    with contextlib.suppress(OSError):
        for old in glob.glob(f"{glob.escape(path)}.{text_type}-*.index.npy"):
            if not old.endswith(f".{stamp}.index.npy"):  # which another process may have made meanwhile
                os.remove(old)
        with tempfile.TemporaryDirectory(dir=os.path.dirname(path) or ".") as folder:
            file = os.path.join(folder, "index.npy")
            np.save(file, index)
            os.replace(file, index_path)
        return index_path
    return index


def scan_tar(path: str, text_type: str, name: str) -> np.ndarray:
    """Reads the headers of a tar; for `name` see `index_tar`.

    Returns:
      `INDEX_DTYPE` [N], one row for each sample that has an image and a caption or label.

    Raises:
      ValueError: the tar is truncated, damaged, not a tar or without samples.
    """
    rows, left_out, repeated = [], [], 0
    try:
        with open_file(path) as file:
            for members in _samples(file):
                by_type = {_split(member.name)[1]: member for member in members}
                row = _row(by_type, text_type, file, name)
                if row:
                    rows.append(row)
                else:
                    left_out.append(members[0].name)
                repeated += len(members) - len(by_type)
    except tarfile.TarError as error:
        raise ValueError(
            f"{name} is not a complete tar ({one_line(error)}); download it again or leave it out"
        ) from None
    needed = f"an image (.{'/.'.join(IMAGE_TYPES)}) and a .{text_type} or .cls"
    alike = "side by side and named alike up to the first dot"
    if not rows:
        first = f" (its first file: {left_out[0]})" if left_out else ""
        raise ValueError(
            f"{name} has no sample with {needed}{first}; set ?text= to the extension of its captions, and "
            f"put the files of a sample {alike}, as tar --sort=name does"
        )
    if left_out:
        message = f"%s: %d of %d samples are left out, such as %s: one needs %s, {alike}"
        values = name, len(left_out), len(rows) + len(left_out), left_out[0], needed
        logging.log_first_n(logging.WARNING, message, MAX_WARNINGS, *values)
    if repeated:
        message = "%s: %d files take the place of another with the same key and type"
        logging.log_first_n(logging.WARNING, message, MAX_WARNINGS, name, repeated)
    return np.array(rows, INDEX_DTYPE)


def _samples(file: BinaryIO) -> Iterator[list[tarfile.TarInfo]]:
    """The files of each sample in turn, of a tar that is complete."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for _, group in itertools.groupby(_files(tar), key=lambda member: _split(member.name)[0]):
            yield list(group)
        # tarfile takes a damaged header for the end; that of a complete tar is zeros, one block at least.
        file.seek(tar.offset)
        block = file.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError("it is truncated")
        while block:
            if any(block):
                raise tarfile.ReadError(f"after byte {tar.offset} it is damaged")
            block = file.read(tarfile.RECORDSIZE)


def _files(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (member := tar.next()) is not None:
        tar.members.clear()  # tarfile would keep every header it has read
        # Hidden files, which macOS adds beside each, would divide samples.
        if member.isfile() and not os.path.basename(member.name).startswith("."):
            yield member


def _row(
    by_type: dict[str, tarfile.TarInfo], text_type: str, file: BinaryIO, name: str
) -> tuple[int, ...] | None:
    image = next((by_type[each] for each in IMAGE_TYPES if each in by_type), None)
    text, label = by_type.get(text_type), by_type.get("cls")
    if image is None or (text is None and label is None):
        return None
    # A size that is too large is stored as one that fits in the index and is still too large.
    image_size, text_size = (min(each.size, MAX_FILE_BYTES + 1) if each else 0 for each in (image, text))
    text_start = text.offset_data if text else 0
    number = _label(label, file, name) if label else -1
    return image.offset, image.offset_data, image_size, text_start, text_size, number


def _label(member: tarfile.TarInfo, file: BinaryIO, name: str) -> int:
    file.seek(member.offset_data)
    data = file.read(min(member.size, 100))
    try:
        return int(np.int32(int(data)))
    except (ValueError, OverflowError):
        raise ValueError(
            f"{name}: {member.name} contains {data[:20]!r}, not the number of a class; repair the tar"
        ) from None


def _split(name: str) -> tuple[str, str]:
    """Key and lower-case extension of a member: the base name is split at its first dot."""
    folder, _, base = name.rpartition("/")
    stem, _, kind = base.partition(".")
    return f"{folder}/{stem}" if folder else stem, kind.lower()


def _read(path: str, offset: int, size: int) -> bytes:
    return read_range(path, int(offset), int(offset) + int(size))


def _is_index(path: str) -> bool:
    """Whether this is a complete index; one that is damaged is made anew."""
    try:
        index = _map(path)
    except (OSError, ValueError, EOFError):
        return False
    return index.dtype == INDEX_DTYPE and index.ndim == 1 and len(index) > 0


def _index(index: str | np.ndarray) -> np.ndarray:
    return _map(index) if isinstance(index, str) else index


def _map(path: str) -> np.ndarray:
    return np.load(path, mmap_mode="r", allow_pickle=False)  # a pickle could run any code
