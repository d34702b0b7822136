"""Writes ArrayRecord shards with one or several processes; `readers.array_record` reads them."""

import contextlib
import dataclasses
import glob
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from maxlp.data.readers.array_record import MANIFEST
from maxlp.data.remote import retried
from maxlp.data.sources import Source
from maxlp.data.workers import end_with_parent
from maxlp.runtime import storage
from maxlp.runtime.files import is_url
from maxlp.runtime.manifest import md5
from maxlp.runtime.messages import counted, format_seconds, one_line
from maxlp.runtime.new_folder import created, only_writer
from maxlp.runtime.storage import StorageError

UPLOAD_THREADS = 8
SUFFIX = ".array_record"
PARTIAL = ".partial"  # suffix of every file that is not complete

# Makes the record of one example, and its counts for the totals; an empty record is left out.
MakeRecord = Callable[[Source, int], tuple[bytes, dict[str, int]]]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file to write: examples `start` to `stop` of the source."""

    path: str
    start: int
    stop: int


def write_shards(
    output: str, examples: Source, make_record: MakeRecord, shards: int, num_workers: int
) -> list[dict[str, Any]]:
    """Writes examples in order to at most `shards` files in the folder `output`.

    The files are partial until `commit` renames them, and do not depend on `num_workers`.

    Returns:
      The entries of the shards in the manifest.

    Raises:
      ValueError: a worker process died, or a file is incomplete.
    """
    plan = _plan_shards(output, len(examples), shards)
    with ProgressLine(len(examples)) as progress:
        if num_workers == 1:
            return [_write_shard(shard, examples, make_record, progress.add) for shard in plan]
        context = multiprocessing.get_context("spawn")
        # Without locks: a worker that is killed while it holds one would block all other processes.
        documents, sizes = context.RawArray("q", len(plan)), context.RawArray("q", len(plan))
        stop = context.RawValue("b", False)
        pool = futures.ProcessPoolExecutor(
            min(num_workers, len(plan)),
            context,
            _start_worker,
            (examples, make_record, documents, sizes, stop),
        )
        try:
            pending = [pool.submit(_work, number, shard) for number, shard in enumerate(plan)]
            return _wait(pending, lambda: progress.show(sum(documents), sum(sizes)))
        except BrokenProcessPool:
            raise ValueError(
                f"a worker process died (out of memory?); use fewer than --num_workers={num_workers}"
            ) from None
        finally:
            stop.value = True
            pool.shutdown(cancel_futures=True)


def totals(written: list[dict[str, Any]]) -> dict[str, int]:
    """Sums of the counts in the shards' entries."""
    counts = [key for key in written[0] if key not in ("file", "file_size")]
    return {key: sum(shard[key] for shard in written) for key in counts}


@contextlib.contextmanager
def no_partial_files(output: str, names: Collection[str] = ()) -> Iterator[None]:
    """Creates the folder, and removes partial files on entry (those of a killed run) and on exit.

    If the block fails, folders that did not exist are removed too.

    Args:
      names: as in `commit`.

    Raises:
      ValueError: another process is in such a block with the same folder.
    """
    partial = [pattern + PARTIAL for pattern in ("*" + SUFFIX, MANIFEST, *names)]
    with created(Path(output)), only_writer(Path(output)):
        _remove(output, *partial)
        try:
            yield
        finally:
            _remove(output, *partial)


@contextlib.contextmanager
def destination(output: str, names: Collection[str] = ()) -> Iterator[str]:
    """Yields the folder to write to: `output`, or for a URL a temporary one that is uploaded at the end.

    The temporary folder remains only if the upload fails.

    Args:
      names: as in `commit`.
    """
    if not is_url(output):
        yield output
        return
    with contextlib.ExitStack() as undo:
        folder = tempfile.mkdtemp(prefix="maxlp-prepare-")
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder
        try:
            _upload(folder, output, names)
        except OSError as error:
            undo.pop_all()
            reason = f"{error.filename}: {error.strerror}" if error.strerror else one_line(error)
            raise StorageError(
                f"{reason}; the dataset is complete in {folder}: copy its files to {output},"
                f" {MANIFEST} as the last one"
            ) from error


def _upload(folder: str, url: str, names: Collection[str]) -> None:
    """Copies a finished dataset to a bucket; until this is done there is no manifest."""
    files = {name: os.path.join(folder, name) for name in sorted(os.listdir(folder))}
    manifest = files.pop(MANIFEST)
    size = sum(os.path.getsize(path) for path in files.values())
    what = f"{counted(len(files), 'file')} ({size / 1e6:,.1f} MB)"
    print(f"uploading {what} to {url}", file=sys.stderr, flush=True)
    retried(lambda: storage.remove(f"{url}/{MANIFEST}"), url)
    for name in retried(lambda: names_in(url), url):
        if name.endswith(SUFFIX) or name in names:
            storage.remove(f"{url}/{name}")
    with futures.ThreadPoolExecutor(UPLOAD_THREADS) as pool:
        list(pool.map(lambda name: _upload_file(files[name], f"{url}/{name}"), files))
    _upload_file(manifest, f"{url}/{MANIFEST}")


def names_in(url: str) -> list[str]:
    """The names of the files in a folder of a bucket; in folders below it there may be other datasets."""
    return [name for name in storage.find(url) if "/" not in name]


def _upload_file(path: str, url: str) -> None:
    retried(lambda: storage.upload(Path(path), url), url)
    with open(path, "rb") as file:
        own, found = hashlib.file_digest(file, md5).hexdigest(), storage.stat(url)
    if found.size != os.path.getsize(path) or found.md5 not in (None, own):
        raise StorageError(f"{url} is not what was uploaded")


def commit(
    output: str, manifest: dict[str, Any], other_files: dict[str, bytes], names: Collection[str] = ()
) -> None:
    """Replaces the old files in `output` with the new ones; until this is done there is no manifest.

    Args:
      other_files: written beside the shards, content by name.
      names: of further files that are not kept, such as the chat template of another tokenizer.
    """
    _remove(output, MANIFEST, "*" + SUFFIX, *names)
    for shard in manifest["shards"]:
        path = os.path.join(output, shard["file"])
        os.replace(path + PARTIAL, path)
    for name, data in {**other_files, MANIFEST: json.dumps(manifest, indent=2).encode()}.items():
        path = os.path.join(output, name)
        with open(path + PARTIAL, "wb") as file:
            file.write(data)
        os.replace(path + PARTIAL, path)


def _remove(folder: str, *patterns: str) -> None:
    for pattern in patterns:
        for path in glob.glob(os.path.join(glob.escape(folder), pattern)):
            os.remove(path)


def _plan_shards(output: str, examples: int, shards: int) -> list[Shard]:
    shards = min(shards, examples)
    ends = [examples * number // shards for number in range(shards + 1)]
    names = [f"{number:05d}-of-{shards:05d}{SUFFIX}" for number in range(shards)]
    return [Shard(os.path.join(output, name), ends[i], ends[i + 1]) for i, name in enumerate(names)]


def _write_shard(
    shard: Shard, examples: Source, make_record: MakeRecord, add: Callable[[int, int], None]
) -> dict[str, Any]:
    from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

    path, records = shard.path + PARTIAL, 0
    totals: Counter[str] = Counter()
    try:
        with contextlib.closing(ArrayRecordWriter(path, "group_size:1")) as writer:
            for index in range(shard.start, shard.stop):
                data, counts = make_record(examples, index)
                add(1, counts["bytes"])
                totals.update(counts)
                if data:
                    records += 1
                    writer.write(data)
        with contextlib.closing(ArrayRecordReader(path)) as reader:
            if reader.num_records() != records:
                raise ValueError(f"{path} lacks some of its {records} records; is the disk full?")
    except RuntimeError as error:
        if path not in str(error):
            raise
        raise OSError(one_line(error)) from error  # of the file, such as a full disk
    return {
        "file": os.path.basename(shard.path),
        "file_size": os.path.getsize(path),
        "documents": records,
        **totals,
    }


# --- worker processes -----------------------------------------------------------------------------


def _wait(pending: list[futures.Future], show: Callable[[], None]) -> list[Any]:
    """The results in order; raises the first error without waiting for the rest."""
    waiting: Any = pending
    while waiting:
        done, waiting = futures.wait(waiting, 0.5, futures.FIRST_EXCEPTION)
        show()
        for each in done:
            each.result()
    return [each.result() for each in pending]


def _start_worker(examples: Source, make_record: MakeRecord, documents: Any, sizes: Any, stop: Any) -> None:
    """Keeps what `_work` needs.

    Args:
      documents, sizes: shared arrays with the documents and bytes of each shard so far.
      stop: a shared bool, set when the other workers have to stop.
    """
    global _worker
    _worker = examples, make_record, documents, sizes, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and stops its workers
    end_with_parent()


def _work(number: int, shard: Shard) -> dict[str, Any]:
    examples, make_record, documents, sizes, stop = _worker

    def add(count: int, size: int) -> None:
        if stop.value:
            raise RuntimeError("another worker failed")
        documents[number] += count
        sizes[number] += size

    return _write_shard(shard, examples, make_record, add)


class ProgressLine:
    """A line on stderr: rewritten twice a second on a terminal, else a new line every ten seconds."""

    def __init__(self, total: int):
        self.total, self.documents, self.bytes = total, 0, 0
        self.terminal = sys.stderr.isatty()
        self.start = self.shown = time.monotonic()

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self.terminal:  # ends the line on a terminal, so that an error begins a new one
            self.show(self.documents, self.bytes, last=True)

    def add(self, documents: int, size: int) -> None:
        self.show(self.documents + documents, self.bytes + size)

    def show(self, documents: int, size: int, last: bool = False) -> None:
        """Sets the totals so far, and prints them if the last line is old enough."""
        self.documents, self.bytes, now = documents, size, time.monotonic()
        if not last and now - self.shown < (0.5 if self.terminal else 10):
            return
        self.shown, seconds = now, max(now - self.start, 1e-9)
        left = format_seconds(seconds * (self.total - documents) / max(documents, 1))
        read = f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"
        line = (
            f"{documents:,} of {counted(self.total, 'document')} ({documents / self.total:.0%}), {read},"
            f" {size / 1e6 / seconds:,.1f} MB/s, {left} left"
        )
        if self.terminal:  # a line that is wrapped could not be rewritten
            width = shutil.get_terminal_size().columns - 1
            line = f"\r{line[:width]:<{width}}"
        print(line, end="\n" if last or not self.terminal else "", file=sys.stderr, flush=True)
