"""Where documents come from: random access, picklable, in the same order everywhere.

A source is named by a short string, so that a config file and a command line say it alike:

    stdlib                                   the Python standard library that runs this, no download
    text:/data/books/**/*.txt                a folder, a glob or one file; one document a file
    jsonl:/data/c4/*.jsonl?text_key=content  one JSON object a line
    parquet:/data/fineweb                    a folder, a glob or one file; one document a row
    array_record:/data/prepared              a folder written by `python -m maxlp.prepare text`
    tfds:lm1b?data_dir=/data/tfds            a prepared TFDS dataset with random access

Options follow a `?` and are joined by `&`. Several sources joined by `;`, each with a `weight`, are
a mixture: `stdlib?weight=1;jsonl:/data/c4/*.jsonl?weight=3`.

`split` is `train`, `heldout` or `all`, and `?split=` in the spec overrides the one asked for. Files
(stdlib, text) are held out by a hash of their relative path, records (jsonl, parquet, array_record)
one in every 1/`heldout`, so a split does not change when the data moves to another folder. TFDS has
splits of its own: `train`, `validation` for heldout, or any TFDS expression as in
`?split=train[:99%]`.

JSONL and Parquet are read in place. Shuffled over many gigabytes they are slow (Parquet decodes a
whole row group for one document): prepare such a corpus as ArrayRecord once.
"""

import bisect
import functools
import glob
import importlib
import inspect
import itertools
import json
import os
import platform
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

HELDOUT = 0.02
SPLITS = ("train", "heldout", "all")
MANIFEST = "dataset.json"  # what `maxlp.prepare` writes last: without it a folder is not a dataset
MANIFEST_FORMAT = "maxlp-documents-1"
BLOCK_BYTES = 1 << 24  # read at a time to find the lines of a file


class Records(Protocol):
    """What a kind of source reads: documents by row number, in and out of any process."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, Any]: ...


class Source:
    """The documents of one spec and split.

    `source[i]` is `{"text": str | bytes}` or `{"tokens": uint16 or uint32 array [T]}`, without
    beginning- or end-of-document ids. Its repr names the data and its size, nothing of the process.

    Attributes:
      tokenizer: for token documents, `spec` (for `make_tokenizer`), `fingerprint` and `vocab_size`
        of the tokenizer that made them; None for text.
    """

    def __init__(self, name: str, split: str, records: Records, every: int | None = None):
        """Names the documents of one split.

        Args:
          name: what the documents are, for the repr and for errors.
          split: which of them.
          records: the documents of the split, or with `every` those of all splits.
          every: one record in `every` is held out, none when it is 0.
        """
        self.name, self.split, self.records, self.every = name, split, records, every
        self.tokenizer: dict[str, Any] | None = getattr(records, "tokenizer", None)
        total, held = len(records), len(records) // every if every else 0
        sizes = {} if every is None else {"train": total - held, "heldout": held}
        self._len = sizes.get(split, total)
        if not self._len:
            raise ValueError(
                f"source {name!r}: split {split!r} holds none of its {total} documents;"
                " change ?heldout=FRACTION or ?split="
            )

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.records[self.row(index)]

    def row(self, index: int) -> int:
        """The row of the records that document `index` of the split is."""
        index = int(index)
        if not 0 <= index < self._len:
            raise IndexError(f"document {index} of {self!r}")
        if self.every and self.split == "heldout":
            index = index * self.every + self.every - 1
        elif self.every and self.split == "train":
            index += index // (self.every - 1)
        return index

    def __repr__(self) -> str:
        return f"Source({self.name!r}, split={self.split!r}, documents={self._len})"


class Mixture(NamedTuple):
    """Sources to be mixed, with weights that sum to 1."""

    sources: tuple[Source, ...]
    weights: tuple[float, ...]


def make_source(spec: str | Mapping[str, float], split: str = "train") -> Source | Mixture:
    """Opens the documents that `spec` names.

    Args:
      spec: a source, a mixture joined by `;` (see the module), or a mapping from spec to weight.
      split: `train`, `heldout` or `all`; an option `?split=` in the spec comes first.

    Returns:
      A `Source`, or a `Mixture` where there are several.

    Raises:
      ValueError: unknown kind or option, nothing found, a document without text. The first document
        is read here, so that a wrong `text_key` shows at once.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is none of {', '.join(SPLITS)}")
    weighted = dict(spec) if isinstance(spec, Mapping) else _parse_mixture(spec)
    if not weighted:
        raise ValueError(f"source {spec!r} names nothing; try 'stdlib'")
    for name, weight in weighted.items():
        if not weight > 0 or weight == float("inf"):
            raise ValueError(f"source {name!r}: weight {weight} must be positive and finite")
    sources = tuple(_make_one(name, split) for name in weighted)
    if len(sources) == 1:
        return sources[0]
    total = sum(weighted.values())
    return Mixture(sources, tuple(weight / total for weight in weighted.values()))


def sample_texts(source: Source | Mixture, max_bytes: int, seed: int) -> Iterator[bytes]:
    """Yields pieces of randomly chosen documents, `max_bytes` bytes in all or all there are.

    Each document gives its first 10 kB before any gives more, so that a few long ones do not stand
    for the rest: on the standard library a tokenizer trained on 4 MB needs 3 % fewer tokens so.
    The sample depends on the source, `max_bytes` and `seed` alone. A mixture gives each of its
    sources the share that its weight says.

    Raises:
      ValueError: the source holds tokens.
    """
    if isinstance(source, Mixture):
        for part, weight in zip(source.sources, source.weights, strict=True):
            yield from sample_texts(part, int(max_bytes * weight), seed)
        return
    if source.tokenizer:
        raise ValueError(f"source {source.name!r} holds tokens; a tokenizer is trained on text")
    start, stop = 0, 10_000
    indices = np.random.default_rng(seed).permutation(len(source)).tolist()
    while indices:
        longer = []
        for index in indices:
            if max_bytes <= 0:
                return
            data = as_bytes(source[index]["text"])
            piece = data[start:stop][:max_bytes]
            max_bytes -= len(piece)
            yield piece
            if len(data) > stop:
                longer.append(index)
        indices, start, stop = longer, stop, 3 * stop  # few passes however long a document is


def as_bytes(text: str | bytes) -> bytes:
    """UTF-8 bytes of `text`; bytes pass unchanged, lone surrogates (JSON has them) become `?`."""
    return text.encode("utf-8", errors="replace") if isinstance(text, str) else bytes(text)


def split_options(spec: str) -> tuple[str, dict[str, str]]:
    """Splits `head?key=value&key=value`; a `?` of a glob is not followed by `key=` and stays."""
    match = re.fullmatch(r"(.*?)\?(\w+=[^&?]*(?:&\w+=[^&?]*)*)", spec)
    if not match:
        return spec, {}
    return match[1], dict(part.split("=", 1) for part in match[2].split("&"))


def one_line(error: BaseException) -> str:
    """The first line of an error's message, to be put into ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def import_extra(module: str) -> Any:
    """Imports a library that only some sources need, or says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"this needs {error.name}; pip install 'maxlp[data]'") from None


# --- the kinds ------------------------------------------------------------------------------------


class _TextFiles:
    """One document a file, as bytes."""

    def __init__(self, root: str, names: Sequence[str]):
        self.root, self.names = root, list(names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> dict[str, Any]:
        with open(os.path.join(self.root, self.names[row]), "rb") as file:
            return {"text": file.read()}


class _JsonLines:
    """One JSON object a line; keeps where each line starts (8 bytes a document), no open files."""

    def __init__(self, paths: list[str], text_key: str):
        self.paths, self.text_key = paths, text_key
        self.starts = [_line_starts(path) for path in paths]
        self.ends = list(itertools.accumulate(len(starts) for starts in self.starts))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        number, row = locate(self.ends, row)
        path, start = self.paths[number], int(self.starts[number][row])
        with open(path, "rb") as file:
            file.seek(start)
            line = file.readline()
        try:
            value = json.loads(line)
        except ValueError as error:
            where = _line_number(path, start)
            raise ValueError(f"{where}: not a complete JSON object ({one_line(error)})") from None
        if not isinstance(value, dict) or self.text_key not in value:
            keys = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            where = _line_number(path, start)
            raise ValueError(f"{where}: no {self.text_key!r}, found: {keys}; set ?text_key=")
        return _text(value[self.text_key], self.text_key, lambda: _line_number(path, start))


class _Parquet:
    """One document a row; a few decoded row groups are kept in each process."""

    def __init__(self, paths: list[str], text_key: str):
        self.text_key = text_key
        self.groups: list[tuple[str, int]] = []
        rows = []
        for path in paths:
            for group, count in enumerate(_parquet_groups(path, text_key)):
                self.groups.append((path, group))
                rows.append(count)
        self.ends = list(itertools.accumulate(rows)) or [0]

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        number, row = locate(self.ends, row)
        path, group = self.groups[number]
        value = _parquet_column(path, group, self.text_key)[row].as_py()
        return _text(value, self.text_key, lambda: f"{path}: row {row} of row group {group}")


class _ArrayRecord:
    """What `maxlp.prepare` wrote: UTF-8 bytes, or token ids as little-endian uint16 or uint32."""

    def __init__(self, folder: str):
        manifest = read_manifest(folder, MANIFEST_FORMAT)
        self.dtype = np.dtype(manifest["dtype"]) if manifest["kind"] == "tokens" else None
        self.tokenizer = manifest["tokenizer"] and _tokenizer_of(folder, **manifest["tokenizer"])
        self.folder = folder
        self.reader = open_shards(folder, manifest)

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, row: int) -> dict[str, Any]:
        try:
            record = self.reader[row]
        except RuntimeError as error:  # its checksum is wrong
            where = f"{self.folder}: document {row}"
            raise ValueError(f"{where} cannot be read ({one_line(error)}); prepare again") from None
        if self.dtype is None:
            return {"text": record}
        return {"tokens": np.frombuffer(record, self.dtype.newbyteorder("<")).astype(self.dtype)}


class _Tfds:
    """A prepared TFDS dataset, through its random-access data source (no TensorFlow)."""

    def __init__(self, name: str, split: str, text_key: str, data_dir: str | None):
        self.name, self.text_key = name, text_key
        self.examples = open_tfds(name, split, data_dir)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> dict[str, Any]:
        example, where = self.examples[row], f"TFDS {self.name!r}: example {row}"
        if self.text_key not in example:
            keys = ", ".join(example)
            raise ValueError(f"{where}: no {self.text_key!r}, found: {keys}; set ?text_key=")
        return _text(example[self.text_key], self.text_key, lambda: where)


def _stdlib(name: str, path: str, split: str, *, heldout: float = HELDOUT) -> Source:
    root, names = _stdlib_files()
    chosen = _choose_files(names, split, heldout)
    return Source(f"{name} (Python {platform.python_version()})", split, _TextFiles(root, chosen))


def _text_files(name: str, path: str, split: str, *, heldout: float = HELDOUT) -> Source:
    root, paths = _find_files(name, path, "")
    names = [os.path.relpath(each, root).replace(os.sep, "/") for each in paths]
    if len(names) == 1 and split == "heldout":
        raise ValueError(
            f"source {name!r} is one document, of which no part can be held out; cut it into several files,"
            " or add ?split=all to measure on what is trained on"
        )
    return Source(name, split, _TextFiles(root, _choose_files(names, split, heldout)))


def _jsonl(name: str, path: str, split: str, *, text_key: str = "text", heldout: float = HELDOUT) -> Source:
    _, paths = _find_files(name, path, ".jsonl")
    return Source(name, split, _JsonLines(paths, text_key), every(heldout))


def _parquet(
    name: str, path: str, split: str, *, text_key: str = "text", heldout: float = HELDOUT
) -> Source:
    _, paths = _find_files(name, path, ".parquet")
    return Source(name, split, _Parquet(paths, text_key), every(heldout))


def _array_record(name: str, path: str, split: str, *, heldout: float = HELDOUT) -> Source:
    return Source(name, split, _ArrayRecord(os.path.expanduser(path)), every(heldout))


def _tfds(
    name: str, path: str, split: str, *, text_key: str = "text", data_dir: str | None = None
) -> Source:
    return Source(name, split, _Tfds(path, split, text_key, data_dir))


KINDS = {
    "stdlib": _stdlib,
    "text": _text_files,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "array_record": _array_record,
    "tfds": _tfds,
}


# --- specs ----------------------------------------------------------------------------------------


def _parse_mixture(spec: str) -> dict[str, float]:
    weighted = {}
    for part in filter(None, (part.strip() for part in spec.split(";"))):
        head, options = split_options(part)
        weight = _number(part, "weight", options.pop("weight", "1"))
        rest = "&".join(f"{key}={value}" for key, value in options.items())
        weighted[f"{head}?{rest}" if rest else head] = weight
    return weighted


def _make_one(spec: str, split: str) -> Source:
    kind, path, split, options = parse_spec(spec, split, KINDS, pathless=("stdlib",), also=("weight",))
    source = KINDS[kind](spec, path, split, **options)
    source[0]
    return source


class Spec(NamedTuple):
    """`kind:path?key=value&split=…` in its parts, the options as their function takes them."""

    kind: str
    path: str
    split: str
    options: dict[str, Any]


def parse_spec(
    spec: str,
    split: str,
    kinds: Mapping[str, Callable],
    pathless: Sequence[str] = (),
    also: Sequence[str] = (),
) -> Spec:
    """Takes a spec apart and checks it.

    Args:
      split: used unless the spec has one.
      kinds: by name, what opens them; their keyword-only parameters are the options.
      pathless: those that take no path.
      also: options that the caller took out, for the message.

    Raises:
      ValueError: unknown kind, option or split, a path missing or too many, a number that is none.
    """
    head, texts = split_options(spec)
    kind, _, path = head.partition(":")
    if kind not in kinds:
        raise ValueError(f"source {spec!r}: unknown kind {kind!r}; known: {', '.join(kinds)}")
    if not path and kind not in pathless:
        raise ValueError(f"source {spec!r} lacks what to read; write '{kind}:PATH'")
    if path and kind in pathless:
        others = ", ".join(name for name in kinds if name not in pathless)
        raise ValueError(f"source {spec!r}: {kind} takes no path; for one there are {others}")
    split = texts.pop("split", split)
    if split not in SPLITS and kind != "tfds":
        raise ValueError(f"source {spec!r}: split {split!r} is none of {', '.join(SPLITS)}")
    parameters = inspect.signature(kinds[kind], eval_str=True).parameters.values()
    known = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}
    options: dict[str, Any] = {}
    for key, text in texts.items():
        if key not in known:
            choices = ", ".join([*known, "split", *also])
            raise ValueError(f"source {spec!r}: unknown option {key!r}; {kind} takes {choices}")
        options[key] = _number(spec, key, text) if known[key] is float else text
    part = options.get("heldout", 0.0)
    if isinstance(part, float) and not 0 <= part <= 0.5:
        raise ValueError(f"source {spec!r}: heldout={part} must be a fraction from 0 to 0.5")
    return Spec(kind, path, split, options)


def _number(spec: str, key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"source {spec!r}: {key}={value!r} is not a number") from None


def every(heldout: float) -> int:
    """One record in how many is held out, if that part of them is; 0 for none."""
    return round(1 / heldout) if heldout else 0


def _choose_files(names: Sequence[str], split: str, heldout: float) -> list[str]:
    """Those of a split: held out is that share of the files, by their names' hashes, and one at least."""
    if split == "all":
        return list(names)
    hashes = {name: zlib.crc32(os.fsencode(name)) for name in names}
    below = heldout * 2**32
    if heldout and len(names) > 1:
        below = max(below, min(hashes.values()) + 1)
    return [name for name in names if (hashes[name] < below) == (split == "heldout")]


# --- files ----------------------------------------------------------------------------------------


@functools.cache
def _stdlib_files() -> tuple[str, list[str]]:
    """Root and relative paths of the library's modules, the empty and those not UTF-8 left out."""
    root = sysconfig.get_path("stdlib")
    names = []
    for path in _walk(root, skip={"site-packages", "dist-packages", "__pycache__"}):
        if path.endswith(".py") and _has_text(path):
            names.append(os.path.relpath(path, root).replace(os.sep, "/"))
    if not names:
        raise ValueError(f"source 'stdlib': no Python source under {root}; use text:PATH instead")
    return root, sorted(names)


def _has_text(path: str) -> bool:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return bool(file.read())
    except UnicodeDecodeError:  # the library's tests of other encodings
        return False


def _walk(root: str, skip: set[str] | frozenset[str] = frozenset()) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skip and name[0] != "."]
        yield from (os.path.join(folder, name) for name in files if name[0] != ".")


def _find_files(spec: str, pattern: str, suffix: str) -> tuple[str, list[str]]:
    """Returns the folder that relative names start from, and the sorted files of a pattern."""
    pattern = os.path.expanduser(pattern)
    if os.path.isdir(pattern):
        root, paths = pattern, [path for path in _walk(pattern) if path.endswith(suffix)]
        missing = f"no {suffix or 'readable'} file in the folder {pattern}"
    elif glob.has_magic(pattern):
        parts = itertools.takewhile(lambda part: not glob.has_magic(part), pattern.split(os.sep))
        root = os.sep.join(parts) or (os.sep if pattern.startswith(os.sep) else os.curdir)
        paths = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
        missing = f"no file matches {pattern}"
    else:
        root = os.path.dirname(pattern) or os.curdir
        paths = [pattern] if os.path.isfile(pattern) else []
        missing = f"no file or folder {pattern}"
    if not paths:
        raise ValueError(f"source {spec!r}: {missing}")
    return root, sorted(paths)


def _text(value: Any, key: str, where: Any) -> dict[str, Any]:
    if not isinstance(value, str | bytes):
        raise ValueError(f"{where()}: {key!r} is {type(value).__name__}, not text")
    return {"text": value}


def locate(ends: Sequence[int], row: int) -> tuple[int, int]:
    """The part that holds `row`, and the row within it; `ends` are running totals."""
    part = bisect.bisect_right(ends, row)
    return part, row - (ends[part - 1] if part else 0)


def _line_starts(path: str) -> np.ndarray:
    """Byte offsets [n] int64 of the lines of a file that are not blank."""
    starts, size = [np.zeros(1, np.int64)], 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            starts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + size + 1)
            size += len(block)
    all_starts = np.concatenate(starts)
    lengths = np.diff(all_starts, append=size)
    return all_starts[lengths > len("\r\n")]


def _line_number(path: str, start: int) -> str:
    with open(path, "rb") as file:
        number = file.read(start).count(b"\n") + 1
    return f"{path}:{number}"


def _parquet_groups(path: str, text_key: str) -> list[int]:
    """Rows in each row group."""
    parquet = import_extra("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not a readable Parquet file ({one_line(error)})") from None
    with file:
        names = file.schema_arrow.names
        if text_key not in names:
            found = ", ".join(names)
            raise ValueError(f"{path}: no column {text_key!r}, found: {found}; set ?text_key=")
        metadata = file.metadata
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _tokenizer_of(
    folder: str, file: str | None, options: dict[str, str], fingerprint: str, vocab_size: int
) -> dict[str, Any]:
    spec = os.path.join(folder, file) if file else fingerprint
    if options:
        spec += "?" + "&".join(f"{key}={value}" for key, value in options.items())
    return {"spec": spec, "fingerprint": fingerprint, "vocab_size": vocab_size}


@functools.lru_cache(maxsize=8)
def _parquet_column(path: str, group: int, column: str) -> Any:
    # Opened anew for each row group: a ParquetFile is not to be shared between reader threads.
    with import_extra("pyarrow.parquet").ParquetFile(path) as file:
        return file.read_row_group(group, columns=[column]).column(0)


def read_manifest(folder: str, kind: str) -> dict[str, Any]:
    """What `maxlp.prepare` wrote last into a folder, if it is of this format and its files are there."""
    path = os.path.join(folder, MANIFEST)
    if not os.path.isfile(path):
        raise ValueError(
            f"{folder} holds no {MANIFEST}: not a folder that `maxlp.prepare` wrote to its end"
        )
    with open(path, encoding="utf-8") as file:
        try:
            manifest = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({one_line(error)}): prepare again") from None
    if manifest.get("format") != kind:
        raise ValueError(f"{path}: format {manifest.get('format')!r} is not {kind!r}")
    for shard in manifest["shards"]:
        shard_path = os.path.join(folder, shard["file"])
        size = os.path.getsize(shard_path) if os.path.isfile(shard_path) else None
        if size != shard["file_size"]:
            found = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(f"{shard_path} {found}, expected {shard['file_size']}: prepare again")
    return manifest


def open_shards(folder: str, manifest: dict[str, Any]) -> Any:
    """The records of a folder by number, as bytes; `manifest` is what `read_manifest` found there."""
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    # The record range spares the reader from opening every shard only to count it.
    return ArrayRecordDataSource(
        [f"{os.path.join(folder, shard['file'])}[0:{shard['documents']}]" for shard in manifest["shards"]]
    )


def open_tfds(name: str, split: str, data_dir: str | None, decoders: Any = None) -> Any:
    """Examples of a prepared TFDS dataset by number, or a `ValueError` that says how to prepare it."""
    split = {"heldout": "validation"}.get(split, split)
    tfds = import_extra("tensorflow_datasets")
    try:
        return tfds.data_source(name, split=split, data_dir=data_dir, download=False, decoders=decoders)
    except Exception as error:  # TFDS raises many types, some with pages of text
        where = f" in data_dir {data_dir}" if data_dir else ""
        raise ValueError(
            f"TFDS {name!r}, split {split!r}{where} cannot be opened ({one_line(error)}); prepare"
            " it with `tfds build --file_format=array_record` and set ?data_dir= and ?split="
        ) from None
