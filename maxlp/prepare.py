"""Writes a corpus, or images with texts, as ArrayRecord shards, ready for random access at any size.

    python -m maxlp.prepare text --source='jsonl:/data/c4/*.jsonl' --output=/data/c4_text
    python -m maxlp.prepare text --source=parquet:/data/fineweb --output=/data/fineweb_llama3 \\
        --tokenizer=/models/llama3/tokenizer.json --shards=64 --num_workers=16
    python -m maxlp.prepare text --source=stdlib --split=train --output=/data/stdlib \\
        --train_tokenizer=4096
    python -m maxlp.prepare image_text --source='tar:/data/cc12m/{00000..01242}.tar' --output=/data/cc12m_ar

The folder then serves as `array_record:/data/c4_text` wherever a source is named. Sources and
tokenizers are named as in a training config; see maxlp/data/sources.py and maxlp/data/tokenizer.py.

Shards hold the UTF-8 text, or with a tokenizer its ids (uint16, or uint32 from a vocabulary of
65,537 on) without beginning- and end-of-document ids, which training adds. Empty documents are left
out. Beside the shards lie `dataset.json`, written last, and the tokenizer. A run that is killed
leaves no `dataset.json`, and without one the folder is refused as a source.

Images are kept encoded as they are, broken ones too, each with its caption, its label and the file that
it is from.
"""

import contextlib
import dataclasses
import glob
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
from absl import app, flags

from maxlp.data import image_text
from maxlp.data.sources import (
    MANIFEST,
    MANIFEST_FORMAT,
    Mixture,
    Source,
    as_bytes,
    make_source,
    one_line,
    sample_texts,
    split_options,
)
from maxlp.data.tokenizer import Tokenizer, make_tokenizer, train_bpe

PARTIAL = ".partial"  # ends the name of every file that is not complete
TOKENIZER_SAMPLE_BYTES = 64_000_000


def prepare_text(
    source: str,
    output: str,
    split: str = "all",
    tokenizer: str = "",
    train_tokenizer: int = 0,
    shards: int = 16,
    num_workers: int = 1,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes the documents of `source` to the folder `output`.

    The files hold the documents in the order of the source and do not depend on `num_workers`.

    Args:
      source: as in `maxlp.data.sources.make_source`, but no mixture.
      output: the folder; made if missing.
      split: `train`, `heldout` or `all`.
      tokenizer: as in `maxlp.data.tokenizer.make_tokenizer`; empty to write text.
      train_tokenizer: train a byte-level BPE of this many ids on the source and use it; 0 not to.
      shards: number of files, at most one a document.
      num_workers: processes; 1 works in this one.
      overwrite: replace a dataset that is there, once the new one is complete.

    Returns:
      What was written as `dataset.json`.

    Raises:
      ValueError: `output` holds a dataset already, or the source, split or tokenizer is wrong.
    """
    if tokenizer and train_tokenizer:
        raise ValueError("give tokenizer or train_tokenizer, not both")
    _check_output(output, shards, num_workers, overwrite)
    documents = make_source(source, split)
    if isinstance(documents, Mixture):
        raise ValueError(f"source {source!r} is a mixture; prepare each part and mix in training")
    if documents.tokenizer:
        raise ValueError(f"source {source!r} holds tokens already; give the text they came from")

    encoder: Tokenizer | None = make_tokenizer(tokenizer) if tokenizer else None
    if train_tokenizer:
        with tempfile.TemporaryDirectory() as folder:
            sample = sample_texts(documents, TOKENIZER_SAMPLE_BYTES, seed=0)
            encoder = train_bpe(sample, train_tokenizer, os.path.join(folder, "tokenizer.json"))

    with _no_partial_files(output):
        written = _write_shards(output, documents, _TextRecords(encoder), shards, num_workers)
        manifest = _manifest(documents, split, written, encoder, split_options(tokenizer)[1])
        _commit(output, manifest, encoder.files if encoder else {})
    return manifest


def prepare_image_text(
    source: str,
    output: str,
    split: str = "all",
    shards: int = 16,
    num_workers: int = 1,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes the images of `source` with their captions and labels to the folder `output`.

    The files hold the examples in the order of the source and do not depend on `num_workers`.

    Args:
      source: as in `maxlp.data.image_text`, but not `glyphs`, which are drawn.
      The others: as in `prepare_text`.

    Returns:
      What was written as `dataset.json`.

    Raises:
      ValueError: `output` holds a dataset already, or the source or split is wrong.
    """
    _check_output(output, shards, num_workers, overwrite)
    records = image_text.open_records(source, split)
    with _no_partial_files(output):
        written = _write_shards(output, records, _ImageTextRecords(), shards, num_workers)
        manifest = {
            "format": image_text.MANIFEST_FORMAT,
            "source": source,
            "split": split,
            "classes": list(records.classes),
            **_totals(written),
            "shards": written,
        }
        _commit(output, manifest, {})
    return manifest


def _check_output(output: str, shards: int, num_workers: int, overwrite: bool) -> None:
    if shards < 1 or num_workers < 1:
        raise ValueError(f"shards={shards} and num_workers={num_workers} must be at least 1")
    if os.path.exists(os.path.join(output, MANIFEST)) and not overwrite:
        raise ValueError(f"{output} holds a dataset already; pass --overwrite to replace it")


@contextlib.contextmanager
def _no_partial_files(output: str) -> Iterator[None]:
    """Makes the folder, and removes what a run that was killed left there, and this one."""
    os.makedirs(output, exist_ok=True)
    _remove(output, "*" + PARTIAL)
    try:
        yield
    finally:
        _remove(output, "*" + PARTIAL)


def _manifest(
    documents: Source,
    split: str,
    written: list[dict[str, Any]],
    encoder: Tokenizer | None,
    options: dict[str, str],
) -> dict[str, Any]:
    totals = _totals(written)
    if not totals["documents"]:
        raise ValueError(f"source {documents.name!r}: all of its documents are empty")
    return {
        "format": MANIFEST_FORMAT,
        "kind": "tokens" if encoder else "text",
        "dtype": _token_dtype(encoder).name if encoder else None,
        "source": documents.name,
        "split": split,
        "empty_documents": len(documents) - totals["documents"],
        **totals,
        "tokenizer": encoder
        and {
            "fingerprint": encoder.fingerprint,
            "file": next(iter(encoder.files), None),
            "options": options,
            "vocab_size": encoder.vocab_size,
        },
        "shards": written,
    }


def _totals(written: list[dict[str, Any]]) -> dict[str, int]:
    return {key: sum(shard[key] for shard in written) for key in written[0] if key.endswith("s")}


def _commit(output: str, manifest: dict[str, Any], beside: dict[str, bytes]) -> None:
    """Puts the new files in place of the old ones; there is no manifest until all of them are."""
    _remove(output, MANIFEST)
    _remove(output, "*.array_record")
    for shard in manifest["shards"]:
        path = os.path.join(output, shard["file"])
        os.replace(path + PARTIAL, path)
    files = {**beside, MANIFEST: json.dumps(manifest, indent=2).encode()}
    for name, data in files.items():
        path = os.path.join(output, name)
        with open(path + PARTIAL, "wb") as file:
            file.write(data)
        os.replace(path + PARTIAL, path)


def _remove(folder: str, pattern: str) -> None:
    for path in glob.glob(os.path.join(glob.escape(folder), pattern)):
        os.remove(path)


# --- records --------------------------------------------------------------------------------------


class _TextRecords:
    """Documents as UTF-8 bytes, or with a tokenizer as its ids; the empty ones are left out."""

    def __init__(self, encoder: Tokenizer | None):
        self.encoder = encoder

    def __call__(self, documents: Source, index: int) -> tuple[bytes, dict[str, int]]:
        """The record, and what it adds to the totals."""
        data = as_bytes(documents[index]["text"])
        size, tokens = len(data), 0
        if self.encoder and data:
            ids = self.encoder.encode(data)
            data, tokens = ids.astype(_token_dtype(self.encoder)).tobytes(), len(ids)
        return data, {"bytes": size, "tokens": tokens}


class _ImageTextRecords:
    """Images with captions and labels."""

    def __call__(self, documents: Any, index: int) -> tuple[bytes, dict[str, int]]:
        data = image_text.pack_record(documents.source[index], documents.where(index))
        return data, {"bytes": len(data)}


# --- shards ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file to write: documents `start` to `stop` of the source."""

    path: str
    start: int
    stop: int


def _plan(output: str, documents: int, shards: int) -> list[Shard]:
    shards = min(shards, documents)
    ends = [documents * number // shards for number in range(shards + 1)]
    paths = [os.path.join(output, f"{number:05d}-of-{shards:05d}.array_record") for number in range(shards)]
    return [Shard(*each) for each in zip(paths, ends[:-1], ends[1:], strict=True)]


def _write_shards(
    output: str, documents: Any, record: Callable, shards: int, num_workers: int
) -> list[dict[str, Any]]:
    plan = _plan(output, len(documents), shards)
    with Progress(len(documents)) as progress:
        if num_workers == 1:
            return [_write_shard(shard, documents, record, progress.add) for shard in plan]
        context = multiprocessing.get_context("spawn")
        counters = context.Array("q", 3)  # documents, bytes, whether to stop
        pool = futures.ProcessPoolExecutor(
            min(num_workers, len(plan)), context, _start_worker, (documents, record, counters)
        )
        try:
            pending = [pool.submit(_work, shard) for shard in plan]
            return _wait(pending, lambda: progress.show(*counters[:2]))
        except BrokenProcessPool:
            raise ValueError(
                f"a worker process died (out of memory?); try less than --num_workers={num_workers}"
            ) from None
        finally:
            counters[2] = True
            pool.shutdown(cancel_futures=True)


def _wait(pending: list[futures.Future], show: Callable[[], None]) -> list[Any]:
    """Results in order; raises the first error without waiting for the rest."""
    waiting: Any = pending
    while waiting:
        done, waiting = futures.wait(waiting, 0.5, futures.FIRST_EXCEPTION)
        show()
        for each in done:
            each.result()
    return [each.result() for each in pending]


def _start_worker(documents: Any, record: Callable, counters: Any) -> None:
    global _worker
    _worker = documents, record, counters
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which stops us
    # A pool's idle workers wait for ever if the process that made them is killed.
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(shard: Shard) -> dict[str, Any]:
    documents, record, counters = _worker

    def add(count: int, size: int) -> None:
        if counters[2]:
            raise RuntimeError("another worker failed")
        with counters.get_lock():
            counters[0] += count
            counters[1] += size

    return _write_shard(shard, documents, record, add)


def _write_shard(
    shard: Shard, documents: Any, record: Callable, add: Callable[[int, int], None]
) -> dict[str, Any]:
    """Writes the file, still PARTIAL, and returns its entry in the manifest."""
    from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

    path, records = shard.path + PARTIAL, 0
    totals: Counter[str] = Counter()
    with contextlib.closing(ArrayRecordWriter(path, "group_size:1")) as writer:
        for index in range(shard.start, shard.stop):
            data, counts = record(documents, index)
            add(1, counts["bytes"])
            totals.update(counts)
            if data:
                records += 1
                writer.write(data)
    with contextlib.closing(ArrayRecordReader(path)) as reader:
        if reader.num_records() != records:
            raise ValueError(f"{path} lacks some of its {records} documents; is the disk full?")
    return {
        "file": os.path.basename(shard.path),
        "file_size": os.path.getsize(path),
        "documents": records,
        **totals,
    }


def _token_dtype(encoder: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if encoder.vocab_size <= 2**16 else "<u4")


class Progress:
    """A line on stderr: rewritten on a terminal twice a second, else a new one every ten."""

    def __init__(self, total: int):
        self.total, self.documents, self.bytes = total, 0, 0
        self.terminal = sys.stderr.isatty()
        self.start = self.shown = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.show(self.documents, self.bytes, last=True)

    def add(self, documents: int, size: int) -> None:
        self.show(self.documents + documents, self.bytes + size)

    def show(self, documents: int, size: int, last: bool = False) -> None:
        """Sets how much is done in all, and says so when it is time."""
        self.documents, self.bytes, now = documents, size, time.monotonic()
        if not last and now - self.shown < (0.5 if self.terminal else 10):
            return
        self.shown, seconds = now, max(now - self.start, 1e-9)
        left = seconds * (self.total - documents) / max(documents, 1)
        line = (
            f"{documents:,} of {self.total:,} documents ({documents / self.total:.0%}),"
            f" {size / 1e6:,.1f} MB, {size / 1e6 / seconds:,.1f} MB/s, {left:,.0f} s left"
        )
        end = "\n" if last or not self.terminal else ""
        print(f"\r{line:<80}" if self.terminal else line, end=end, file=sys.stderr, flush=True)


# --- the command ----------------------------------------------------------------------------------


def define_flags() -> None:
    """Defines the flags of the command; not on import, other commands have the same names."""
    flags.DEFINE_string("source", None, "What to read, as kind:path; see above.")
    flags.DEFINE_string("output", None, "Folder to write.")
    flags.DEFINE_string("split", "all", "Documents to take: train, heldout or all.")
    flags.DEFINE_string("tokenizer", "", "Write the ids of this tokenizer; empty writes text.")
    flags.DEFINE_integer("train_tokenizer", 0, "Train a BPE of this many ids and write its ids.")
    flags.DEFINE_integer("shards", 16, "Number of files.")
    flags.DEFINE_integer("num_workers", 1, "Number of processes.")
    flags.DEFINE_bool("overwrite", False, "Replace a dataset that is there.")


def text_command() -> None:
    """`prepare text`: flags to arguments, and a line on what was written."""
    names = ("source", "output", "split", "tokenizer", "train_tokenizer", "shards", "num_workers")
    kwargs = _kwargs(*names, "overwrite")
    made = prepare_text(**kwargs)
    tokens = f", {made['tokens']:,} tokens" if made["kind"] == "tokens" else ""
    print(
        f"wrote {made['documents']:,} documents, {made['bytes']:,} bytes{tokens} in"
        f" {len(made['shards'])} shards; use them as array_record:{kwargs['output']}"
    )


def image_text_command() -> None:
    """`prepare image_text`: flags to arguments, and a line on what was written."""
    for name in ("tokenizer", "train_tokenizer"):
        if flags.FLAGS[name].value:
            raise ValueError(f"--{name} is for text; captions are kept as they are, drop it")
    kwargs = _kwargs("source", "output", "split", "shards", "num_workers", "overwrite")
    made = prepare_image_text(**kwargs)
    print(
        f"wrote {made['documents']:,} images, {made['bytes']:,} bytes in {len(made['shards'])} shards;"
        f" use them as array_record:{kwargs['output']}"
    )


def _kwargs(*names: str) -> dict[str, Any]:
    for name in ("source", "output"):
        if not flags.FLAGS[name].value:
            raise ValueError(f"--{name} is missing; see --help")
    return {name: flags.FLAGS[name].value for name in names}


COMMANDS = {"text": text_command, "image_text": image_text_command}


def main(argv: list[str]) -> None:
    if len(argv) != 2 or argv[1] not in COMMANDS:
        given = " ".join(argv[1:]) or "nothing"
        sys.exit(f"prepare: expected one subcommand of: {', '.join(COMMANDS)}; got {given}")
    try:
        COMMANDS[argv[1]]()
    except (ValueError, OSError) as error:
        sys.exit(f"prepare: {one_line(error)}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
