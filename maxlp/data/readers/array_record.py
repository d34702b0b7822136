"""Folders written by `maxlp.prepare`: ArrayRecord shards and a manifest.

Shards in gs:// are read where they are, by the library's own client, which tries again for 15 minutes. Of
other URLs, whole shards are copied to the local cache first.

A record is one of

* a document, as UTF-8 bytes or as token ids (little-endian uint16 or uint32, or int32 for a
  conversation, see `data.chat`);
* an image with its caption: the length of a header as little-endian uint32, the header as JSON with
  `text`, `label` and `where` the example came from, and the bytes of the image file.

The manifest records which of them, and is written last: without it a folder is incomplete.
"""

import errno
import itertools
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxlp.data.readers import TOKEN_DTYPES, BrokenExample, read_if_there
from maxlp.data.readers.access import locate
from maxlp.data.sources import VALIDATION, Source, Spec
from maxlp.runtime.files import is_url
from maxlp.runtime.messages import one_line
from maxlp.runtime.open_files import allow_open_files

MANIFEST = "dataset.json"
READ_BYTES = 2**15  # at a time
FORMATS = {"text": "maxlp-documents-1", "image_text": "maxlp-image-text-1"}  # by the content of a source


class Records:
    """The bytes of records in several files, by number.

    A file stays open once it was read from, with 8 bytes of memory per record.

    Args:
      parts: of each file the path, the first record, and how many records from there on.
    """

    def __init__(self, parts: Sequence[tuple[str, int, int]]):
        self._parts = parts
        self._ends = list(itertools.accumulate(count for _, _, count in parts))
        self._readers: list[Any] = [None] * len(parts)  # of the files that were read from
        allow_open_files()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_readers": [None] * len(self._parts)}

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> bytes:
        from array_record.python.array_record_module import ArrayRecordReader

        number, row = locate(self._ends, index)
        path, first, _ = self._parts[number]
        reader = self._readers[number]
        if reader is None:
            options = {"options": "readahead_buffer_size:0", "file_reader_buffer_size": READ_BYTES}
            reader = ArrayRecordReader(path, **options)
            if not reader.ok():
                reader.close()  # raises an error that tells why it could not be opened
            self._readers[number] = reader
        # Not `read([row])`, as in the library's `ArrayRecordDataSource`: its time grows with the file.
        return reader.read(first + row, first + row + 1)[0]


class ArrayRecord:
    """The records of a folder, decoded as `content` and `manifest` prescribe."""

    def __init__(self, folder: str, content: str, manifest: dict[str, Any]):
        self._folder, self._is_image = folder, content == "image_text"
        self._dtype = np.dtype(manifest["dtype"]) if manifest.get("kind") == "tokens" else None
        self._shards = [os.path.join(folder, each["file"]) for each in manifest["shards"]]
        files = self._shards
        if is_url(folder) and not folder.startswith("gs://"):  # which the library reads itself
            from maxlp.data import local_cache

            files = local_cache.copies(files)
        sizes = [each["documents"] for each in manifest["shards"]]
        self._records = Records([(file, 0, size) for file, size in zip(files, sizes, strict=True)])

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, row: int) -> dict[str, Any]:
        try:
            record = self._records[row]
        except RuntimeError as error:  # a wrong checksum, or a store that failed for 15 minutes
            if os.strerror(errno.EMFILE) in str(error):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), self._folder) from error
            if is_url(self._folder) and "orrupted" not in str(error):
                raise OSError(errno.EIO, one_line(error), self._folder) from error
            raise BrokenExample(f"it cannot be read ({one_line(error)}); prepare the data again") from None
        if self._is_image:
            return unpack_example(record)
        if self._dtype is None:
            return {"text": record}
        return {"tokens": np.frombuffer(record, self._dtype.newbyteorder("<")).astype(self._dtype)}

    def where(self, row: int) -> str:
        place = f"{self._folder}: record {row}"
        try:
            return f"{place}, from {self[row]['where']}" if self._is_image else place
        except Exception:  # a record of which nothing can be read, see `sources.Source`
            return place

    def paths(self) -> list[str]:
        return self._shards


def open_array_record(spec: Spec, *, validation: float = VALIDATION) -> Source:
    """Opens a prepared folder."""
    folder = spec.path.rstrip("/") if is_url(spec.path) else os.path.expanduser(spec.path)
    if is_url(folder):
        from maxlp.data import remote

        folder = remote.pinned(folder)
    manifest = read_manifest(folder, spec.content)
    tokenizer = manifest["tokenizer"] if manifest.get("kind") == "tokens" else None
    reader = ArrayRecord(folder, spec.content, manifest)
    if len(reader):
        reader[0]  # fails at once if these are other files of the same sizes
    return Source(
        spec,
        reader,
        validation=validation,
        tokenizer=tokenizer and _describe_tokenizer(folder, **tokenizer),
        classes=manifest.get("classes", ()),
        templates=manifest.get("templates", ()),
    )


def read_manifest(folder: str, content: str) -> dict[str, Any]:
    """Reads the manifest of a prepared folder.

    Raises:
      ValueError: the folder is incomplete or damaged, or holds other content.
    """
    path = os.path.join(folder, MANIFEST)
    data = read_if_there(path)
    if data is None:
        raise ValueError(f"{folder} holds no {MANIFEST}: give the --output of a finished `maxlp.prepare`")
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({one_line(error)}); prepare the data again") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMATS[content]:
        raise ValueError(
            f"{path}: format {found!r} is not {FORMATS[content]!r}; prepare the data with"
            f" `maxlp.prepare {content}`"
        )
    if wrong := _wrong_entry(manifest):
        raise ValueError(f"{path} is damaged ({wrong}); prepare the data again")
    paths = [os.path.join(folder, shard["file"]) for shard in manifest["shards"]]
    for shard, shard_path, size in zip(manifest["shards"], paths, _sizes(paths), strict=True):
        if size != shard["file_size"]:
            found = "is missing" if size is None else f"has {size} bytes, expected {shard['file_size']}"
            raise ValueError(f"{shard_path} {found}; prepare the data again")
    return manifest


def _sizes(paths: list[str]) -> list[int | None]:
    """Sizes of files or URLs, None for those that are missing."""
    if is_url(paths[0]):
        from maxlp.data import remote

        return remote.sizes(paths)
    return [os.path.getsize(path) if os.path.isfile(path) else None for path in paths]


def _wrong_entry(manifest: dict[str, Any]) -> str | None:
    """What is missing from a manifest or has the wrong type; None if nothing."""
    entries: list[tuple[str, Any, dict[str, Any]]]
    if manifest["format"] == FORMATS["image_text"]:
        entries = [("", manifest, {"shards": list, "classes": list})]
    elif manifest.get("kind") == "tokens":
        entries = [("", manifest, {"shards": list, "dtype": str, "tokenizer": dict})]
        tokenizer = {"fingerprint": str, "vocab_size": int, "options": dict, "file": (str, type(None))}
        entries.append(("tokenizer: ", manifest.get("tokenizer"), tokenizer))
    else:
        entries = [("", manifest, {"shards": list, "kind": str})]
    shards = manifest.get("shards")
    for number, shard in enumerate(shards if isinstance(shards, list) else ()):
        entries.append((f"shards[{number}]: ", shard, {"file": str, "file_size": int, "documents": int}))
    for where, entry, kinds in entries:
        for key, kind in kinds.items():
            if not isinstance(entry, dict) or not isinstance(entry.get(key), kind):
                return f"{where}no valid {key!r}"
    names = [shard["file"] for shard in manifest["shards"]]
    if not names or any(os.path.basename(name) != name for name in names):
        return "its shards are not files of this folder"
    if manifest.get("kind", "text") not in ("text", "tokens"):
        return f"kind {manifest['kind']!r} is unknown"
    if manifest.get("dtype") not in (None, *TOKEN_DTYPES):
        return f"dtype {manifest['dtype']!r} is unknown"
    total = sum(shard["documents"] for shard in manifest["shards"])
    if manifest.get("documents", total) != total:
        return f"its shards have {total} documents, not {manifest['documents']!r}"
    if min(shard["documents"] for shard in manifest["shards"]) < 0:
        return "a shard has a negative number of documents"
    return None


def pack_example(image: bytes, text: str | None, label: int, where: str) -> bytes:
    """Packs an image file, its caption and label, and the place it came from into one record."""
    header = json.dumps({"text": text, "label": label, "where": where}).encode()
    return len(header).to_bytes(4, "little") + header + image


def unpack_example(data: bytes) -> dict[str, Any]:
    """The arguments of `pack_example` by name."""
    end = 4 + int.from_bytes(data[:4], "little")
    header = json.loads(data[4:end])
    return {key: header[key] for key in ("text", "label", "where")} | {"image": data[end:]}


def _describe_tokenizer(
    folder: str, file: str | None, options: dict[str, str], fingerprint: str, vocab_size: int
) -> dict[str, Any]:
    """`Source.tokenizer` from the manifest's entry."""
    spec = os.path.join(folder, file) if file else fingerprint
    if options:
        spec += "?" + "&".join(f"{key}={value}" for key, value in options.items())
    return {"spec": spec, "fingerprint": fingerprint, "vocab_size": vocab_size}
