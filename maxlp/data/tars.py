"""Random access to the samples of WebDataset tars.

A sample is a run of files of one name but for what follows its first dot: `000017.jpg`, `000017.txt`,
`000017.json`, `000017.cls`. Each tar is read through once, headers only, for where its samples lie. That
index is put beside the tar, as `NAME.tar.TYPE-SIZE-TIME.index.npy`, or where the folder cannot be written
kept in memory, and is made again when the tar changes. Indices are mapped into memory: of the 36 bytes a
sample, those in use are shared by all processes of a machine.

Compressed tars have no random access; images gain nothing from it.
"""

import contextlib
import functools
import glob
import itertools
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from absl import logging

from maxlp.data.images import BrokenExample
from maxlp.data.sources import locate, one_line

IMAGE_TYPES = ("jpg", "jpeg", "png", "webp")
INDEX_THREADS = 16
TOLD_TARS = 5  # warnings about images without captions, when their indices are made
INDEX_DTYPE = np.dtype(
    [
        ("header", "<u8"),  # of the image's tar member, which has its name
        ("image", "<u8"),
        ("image_size", "<u4"),
        ("text", "<u8"),
        ("text_size", "<u4"),
        ("label", "<i4"),  # what the .cls file says, -1 without one
    ]
)


class Tars:
    """The samples of tars by number, as dicts; see `__getitem__`."""

    def __init__(self, pattern: str, text: str = "txt"):
        """Indexes the tars.

        Args:
          pattern: a path with braces `{00000..00041}` or wildcards, or a folder.
          text: type of the files with captions: `txt`, or `json:KEY` for an entry of a JSON object.

        Raises:
          ValueError: no such tar, one that is cut short or compressed, one without samples.
        """
        self.paths = find_tars(pattern)
        self._type, _, self._key = text.partition(":")
        with ThreadPoolExecutor(INDEX_THREADS) as pool:
            indexed = list(pool.map(lambda path: index_tar(path, self._type), self.paths))
        # Paths of files, or the indices themselves where there are none: workers get them by name.
        self._indices = indexed
        self._ends = list(itertools.accumulate(len(_index(each)) for each in indexed))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Sample `row`: {"image": bytes, "text": str or None, "label": int or -1}.

        Raises:
          BrokenExample: the JSON has no such caption.
        """
        path, entry = self._entry(row)
        with open(path, "rb") as file:
            image = _read(file, entry["image"], entry["image_size"])
            text = _read(file, entry["text"], entry["text_size"]) if entry["text"] else None
        return {"image": image, "text": self._caption(text), "label": int(entry["label"])}

    def where(self, row: int) -> str:
        """File and key of a sample."""
        path, entry = self._entry(row)
        with open(path, "rb") as file:
            file.seek(int(entry["header"]))
            with tarfile.open(fileobj=file, mode="r:") as tar:
                member = tar.next()
        assert member is not None
        return f"{path}: {_split(member.name)[0]}"

    def _entry(self, row: int) -> tuple[str, np.void]:
        number, row = locate(self._ends, row)
        return self.paths[number], _index(self._indices[number])[row]

    def _caption(self, data: bytes | None) -> str | None:
        if data is None:
            return None
        if self._type != "json":
            return data.decode("utf-8", errors="replace").strip()
        try:
            value = json.loads(data)[self._key]
        except (ValueError, KeyError, TypeError):
            raise BrokenExample(f"the JSON has no {self._key!r}") from None
        if not isinstance(value, str):
            raise BrokenExample(f"{self._key!r} of the JSON is {type(value).__name__}, not text")
        return value


def find_tars(pattern: str) -> list[str]:
    """The files of a pattern with braces or wildcards, or of a folder, in order.

    Raises:
      ValueError: one that the braces name is missing, none is found, or one is compressed.
    """
    pattern = os.path.expanduser(pattern)
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "*.tar")
    paths = []
    for each in _expand_braces(pattern):
        found = sorted(glob.glob(each, recursive=True)) if glob.has_magic(each) else [each]
        paths += [path for path in found if os.path.isfile(path)]
        if not found or not os.path.isfile(found[0]):
            raise ValueError(f"no file {each}; check the path and the range of its braces")
    for path in paths:
        if not path.endswith(".tar"):
            raise ValueError(f"{path} is not a .tar; unpack compressed ones, they have no random access")
    return paths


def index_tar(path: str, text_type: str) -> str | np.ndarray:
    """Makes the index of a tar if there is none, and gives the path of its file, or itself.

    Raises:
      ValueError: the tar is cut short, not a tar or without samples.
    """
    # What an index is of is in its name: with another type of captions, size or time it is another.
    stat = os.stat(path)
    stamp = f"{text_type}-{stat.st_size:x}-{stat.st_mtime_ns:x}"
    index_path = f"{path}.{stamp}.index.npy"
    if os.path.isfile(index_path):
        return index_path
    index = scan_tar(path, text_type)
    with contextlib.suppress(OSError):
        for old in glob.glob(f"{glob.escape(path)}.{text_type}-*.index.npy"):
            os.remove(old)
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(path) or ".", delete=False) as file:
            np.save(file, index)
        os.chmod(file.name, 0o644)  # temporary files are private by default
        os.replace(file.name, index_path)
        return index_path
    return index


def scan_tar(path: str, text_type: str) -> np.ndarray:
    """Reads the headers of a tar: `INDEX_DTYPE` [samples with an image and a caption or label].

    Raises:
      ValueError: the tar is cut short, not a tar or without samples.
    """
    size, end, rows, images = os.path.getsize(path), 0, [], 0
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for _, members in itertools.groupby(_files(tar), key=lambda member: _split(member.name)[0]):
                by_type = {_split(member.name)[1]: member for member in members}
                end = max(member.offset_data + member.size for member in by_type.values())
                if end > size:
                    break
                row = _row(by_type, text_type, file)
                rows += [row] if row else []
                images += any(each in by_type for each in IMAGE_TYPES)
            # After the last file and its padding comes at least one block of zeros.
            file.seek(-(-end // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)
            if end > size or len(file.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it is cut short")
    except tarfile.TarError as error:
        raise ValueError(
            f"{path} is not a whole tar ({one_line(error)}); fetch it again or leave it out"
        ) from None
    if not rows:
        types = f".{'/.'.join(IMAGE_TYPES)} beside a .{text_type} or .cls"
        raise ValueError(f"{path} has no sample of a {types}; set ?text= to the type of its captions")
    if len(rows) < images:
        text = "%s: %d of %d images have neither a .%s nor a .cls beside them and are left out"
        logging.log_first_n(logging.WARNING, text, TOLD_TARS, path, images - len(rows), images, text_type)
    return np.array(rows, INDEX_DTYPE)


def _files(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (member := tar.next()) is not None:
        tar.members.clear()  # it keeps all it has read
        if member.isfile():
            yield member


def _row(by_type: dict[str, tarfile.TarInfo], text_type: str, file: Any) -> tuple[int, ...] | None:
    image = next((by_type[each] for each in IMAGE_TYPES if each in by_type), None)
    text, label = by_type.get(text_type), by_type.get("cls")
    if image is None or (text is None and label is None):
        return None
    place = (text.offset_data, text.size) if text else (0, 0)
    return image.offset, image.offset_data, image.size, *place, _label(label, file) if label else -1


def _label(member: tarfile.TarInfo, file: Any) -> int:
    data = _read(file, member.offset_data, member.size)
    try:
        return int(np.int32(int(data)))
    except (ValueError, OverflowError):
        raise ValueError(
            f"{file.name}: {member.name} is {data[:20]!r}, not the number of a class"
        ) from None


def _split(name: str) -> tuple[str, str]:
    """Key and lower-case type of a member: the name is split at the first dot behind the folder."""
    folder, _, base = name.rpartition("/")
    stem, _, kind = base.partition(".")
    return f"{folder}/{stem}" if folder else stem, kind.lower()


def _read(file: Any, offset: int, size: int) -> bytes:
    file.seek(int(offset))
    return file.read(int(size))


def _index(index: str | np.ndarray) -> np.ndarray:
    return _load(index) if isinstance(index, str) else index


@functools.lru_cache(maxsize=2**14)
def _load(path: str) -> np.ndarray:
    return np.load(path, mmap_mode="r")


def _expand_braces(pattern: str) -> list[str]:
    """`a{00..02}{x,y}` → a00x, a00y, a01x …"""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        return [pattern]
    bounds = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if bounds:
        width = len(bounds[1]) if len(bounds[1]) == len(bounds[2]) or bounds[1][0] == "0" else 0
        middles = [f"{number:0{width}d}" for number in range(int(bounds[1]), int(bounds[2]) + 1)]
    else:
        middles = match[1].split(",")
    rest = _expand_braces(pattern[match.end() :])
    return [pattern[: match.start()] + middle + tail for middle in middles for tail in rest]
