"""Text batches on Grain: documents → tokens → packed windows → global batches.

How a global batch [B, S] comes about, from the outside in:

* A batch has B rows. The rows are fed by V *streams* (V divides B): stream v feeds the rows
  v·B/V … (v+1)·B/V - 1, and reads the documents v, v+V, v+2V, … of each shuffled epoch. V depends
  on B and the number of documents alone: B for a large corpus, so that processes share the work of
  tokenizing, and 1 for a small one, so that every document is seen once before any is seen twice.
* A stream is cut into *blocks*. A block packs the stream's next documents into just enough windows
  for a fixed number of steps, and shuffles the windows, so that a batch is not one long document.
  All blocks of all streams together hold about `shuffle_tokens` tokens.
* A block is a pure function of (seed, stream, block number, where in which document it begins).

So the whole state is the step and, per stream and source, a cursor (document, offset) where the
block in use begins. It is small, it is that of what the consumer has seen, and it mentions neither
processes nor workers: any number of either restores it. The price is that a restore packs the block
in use again, at most `shuffle_tokens` tokens in all.

A process needs the streams that feed its rows, and no other. Blocks are built ahead of need by a
thread, or by worker processes that own whole streams; both are Grain's.

Letters: B batch, S sequence length, W windows of a block, R rows of a stream on this process.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grain
import numpy as np

from maxlp.data import sources as sources_lib
from maxlp.data import tokenizer as tokenizer_lib
from maxlp.data.common import (
    Batch,
    Seeds,
    check,
    check_settings,
    claims,
    in_workers,
    largest_divisor,
    permutation,
    shuffled,
)

Cursor = tuple[int, int]  # (document of the stream, offset in its tokens)

SHUFFLE_TOKENS = 2**20
# A stream of fewer documents would run through its epochs visibly faster or slower than others.
DOCUMENTS_PER_STREAM = 1000
# First-fit fills 0.95 of 16 windows and 0.97 of 64 with web-like lengths, and less of fewer.
FIRST_FIT_WINDOWS = 32
READ_THREADS = 16
READ_AHEAD_TOKENS = 2**18
DOCUMENTS, WINDOWS = 0, 1  # what a permutation is of, so that no two have the same seeds
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def make_data(
    *,
    split: str = "train",
    source: str = "stdlib",
    tokenizer: str = "bytes",
    seq_len: int,
    batch_size: int,
    packing: str = "concat",
    shuffle: bool = True,
    shuffle_tokens: int = SHUFFLE_TOKENS,
    num_epochs: int | None = None,
    num_workers: int = 0,
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> TextDataset:
    """Makes the training or the held-out batches of one data section of a config.

    Args:
      split: "train", or "heldout": one pass in order (`make_eval_dataset`), for which `packing`,
        `shuffle`, `shuffle_tokens`, `num_epochs`, `num_workers` and `seed` mean nothing.
      source: as in `sources.make_source`.
      tokenizer: as in `tokenizer.make_tokenizer`.
      batch_size: rows of the global batch.
      The others: as in `make_text_dataset`.

    Returns:
      The dataset; its `tokenizer` attribute is the tokenizer.

    Raises:
      ValueError: a value that cannot be, a source or tokenizer that cannot be read.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split {split!r} is unknown; choose 'train' or 'heldout'")
    documents = sources_lib.make_source(source, split)
    if not isinstance(documents, sources_lib.Mixture):
        documents = sources_lib.Mixture((documents,), (1.0,))
    encoder = tokenizer_lib.make_tokenizer(tokenizer)
    for part in documents.sources:
        if part.tokenizer and part.tokenizer["fingerprint"] != encoder.fingerprint:
            raise ValueError(
                f"source {part.name!r} holds tokens of the tokenizer {part.tokenizer['spec']},"
                f" not of tokenizer={tokenizer!r}; set that one"
            )
    shape = dict(seq_len=seq_len, global_batch_size=batch_size)
    process = dict(process_index=process_index, process_count=process_count)
    if split == "heldout":
        return make_eval_dataset(documents.sources, encoder, **shape, **process)
    return make_text_dataset(
        documents.sources,
        documents.weights,
        encoder,
        **shape,
        **process,
        packing=packing,
        shuffle=shuffle,
        shuffle_tokens=shuffle_tokens,
        num_epochs=num_epochs,
        num_workers=num_workers,
        seed=seed,
    )


def make_eval_dataset(
    sources: Sequence[Any],
    tokenizer: Any,
    *,
    seq_len: int,
    global_batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
) -> TextDataset:
    """One pass over all documents in order, the sources one after another.

    Batches as in `make_text_dataset` with `packing="concat"`. Every token that has a predecessor in
    its document is a target exactly once, whatever the number of processes; the last batch is
    filled up with padding, and all processes end at the same step. Each process tokenizes all of
    the documents.
    """
    _check_sources(sources)
    documents = grain.MapDataset.concatenate([grain.MapDataset.source(each) for each in sources])
    return make_text_dataset(
        [documents],
        None,
        tokenizer,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        shuffle=False,
        num_epochs=1,
        process_index=process_index,
        process_count=process_count,
    )


def make_text_dataset(
    sources: Sequence[Any],
    weights: Sequence[float] | None,
    tokenizer: Any,
    *,
    seq_len: int,
    global_batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    shuffle_tokens: int = SHUFFLE_TOKENS,
    num_epochs: int | None = None,
    packing: str = "concat",
    num_workers: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> TextDataset:
    """Makes batches of packed text.

    An iterator yields this process's rows of the global batch,
    `process_index * B/process_count …`, as a dict of arrays [B/process_count, S]: `tokens`,
    `targets`, `segment_ids`, `positions` (int32) and `loss_mask` (bool). The global batch of a step
    depends on the documents, the tokenizer, `seed`, `seq_len`, `global_batch_size`, `packing`,
    `shuffle`, `shuffle_tokens` and `num_epochs`, and on nothing else.

    A document is `[bos] tokens [eos]`, each where the tokenizer has it. In a window, documents are
    numbered by `segment_ids` from 1, and `positions` count from 0 in each; padding has segment 0
    and is masked. `loss_mask` is true where the target is the next token of the same document.

    `packing="concat"`: the documents of a stream end to end, cut every S tokens; a document goes on
    in another window where it was cut. Every token is once in `tokens`. There is no padding but at
    the end of the last epoch; one position a document is masked, its last token, whose target is
    the first of another document.

    `packing="first_fit"`: each document in one window, the first that has room among those of its
    block; one longer than S is first split into pieces of S. Every token but the last of a document
    is once in `tokens`, every one but the first once in `targets`. Nothing is masked but padding:
    1 to 5 % of positions for documents of web-like lengths, more where few documents are shorter
    than S/2.

    Args:
      sources: each has `len(source)` and `source[i]`, a dict with "text" (str or bytes) or "tokens"
        (integers, without bos and eos); picklable if `num_workers > 0`.
      weights: shares of the *windows* that come from each source (so of the tokens, not of the
        documents); None for equal shares. A window holds documents of one source only.
      tokenizer: a `tokenizer.Tokenizer`; `bos_id` and `eos_id` may be None where there is none.
      seq_len: S, at least 2.
      global_batch_size: B, a multiple of `process_count`.
      shuffle: whether documents are read in another order each epoch, and windows of a block mixed;
        False keeps the order of the source.
      shuffle_tokens: about how many tokens are mixed, over the whole global batch. More mix better
        and take longer to fill before the first step.
      num_epochs: None repeats without end. A number ends after as many passes with a batch filled
        up with padding; then there is one stream, so each process tokenizes all of the corpus.
      num_workers: processes that tokenize and pack, 0 for a thread of this one. Each owns whole
        streams, so that more of them than this process has streams are not started.
      process_index, process_count: of this process among those that share the global batch.

    Raises:
      ValueError: a value out of range, an empty source.
    """
    _check_sources(sources)
    weights = [1.0] * len(sources) if weights is None else [float(weight) for weight in weights]
    wanted = claims(global_batch_size, num_epochs, num_workers, seed, process_index, process_count) | {
        f"seq_len={seq_len} must be at least 2": seq_len >= 2,
        f"packing={packing!r} is unknown; choose one of {', '.join(PACKERS)}": packing in PACKERS,
        f"num_epochs={num_epochs} needs a single source; a mixture repeats, set num_epochs=None": (
            num_epochs is None or len(sources) == 1
        ),
        f"shuffle_tokens={shuffle_tokens} must not be negative": shuffle_tokens >= 0,
        f"weights {weights} must be {len(sources)} positive numbers, one for each source": (
            len(weights) == len(sources) and all(0 < weight < math.inf for weight in weights)
        ),
    }
    check(wanted)
    settings = dict(
        seed=seed,
        batch_size=global_batch_size,
        seq_len=seq_len,
        packing=packing,
        shuffle=shuffle,
        shuffle_tokens=shuffle_tokens,
        num_epochs=num_epochs,
        tokenizer=tokenizer.fingerprint,
        documents=[len(source) for source in sources],
        weights=[weight / sum(weights) for weight in weights],
    )
    documents = [
        _Documents(source, tokenizer, (seed, DOCUMENTS, number), shuffle, num_epochs)
        for number, source in enumerate(sources)
    ]
    return TextDataset(tokenizer, documents, settings, num_workers, process_index, process_count)


@dataclasses.dataclass(frozen=True)
class TextDataset:
    """Batches of packed text: `iter(dataset)` gives a `TextIterator`. See `make_text_dataset`."""

    tokenizer: Any
    documents: Sequence[_Documents]
    settings: dict[str, Any]
    num_workers: int
    process_index: int
    process_count: int

    def __iter__(self) -> TextIterator:
        return TextIterator(self)


class TextIterator:
    """Yields batches; `get_state` and `set_state` stop and resume exactly.

    The state is a dict that JSON can hold:

      {"step": batches yielded so far,
       "streams": {stream: [[document, offset] for each source]},  where the block in use begins
       "settings": what the order depends on}

    It holds the streams that feed this process. To resume with another number of processes, give
    each the `merge_states` of all.
    """

    def __init__(self, dataset: TextDataset):
        self._dataset = dataset
        settings = dataset.settings
        self._plan = plan = _Plan.make(settings)
        self._rows = plan.rows_of_process(dataset.process_index, dataset.process_count)
        self._step = 0
        start = [(0, 0)] * len(dataset.documents)
        self._cursors = {stream: start for stream, _ in self._rows}
        self._source: grain.DatasetIterator | None = None  # of blocks, built ahead
        self._blocks: list[_Block] = []  # in use, one of each stream

    def __iter__(self) -> TextIterator:
        return self

    def __next__(self) -> Batch:
        index = self._step % self._plan.steps_per_block
        if not self._blocks:
            source = self.start_prefetch()
            self._blocks = [next(source) for _ in self._rows]
        if index >= len(self._blocks[0]["windows"]["tokens"]):
            raise StopIteration
        parts = [{k: a[index] for k, a in block["windows"].items()} for block in self._blocks]
        batch = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        self._step += 1
        if self._step % self._plan.steps_per_block == 0:
            self._cursors = {block["stream"]: block["end"] for block in self._blocks}
            self._blocks = []
        return batch

    def start_prefetch(self) -> grain.DatasetIterator:
        """Begins to build the first blocks; `next` does so too, but by then they are waited for."""
        if self._source is None:
            self._source = self._open_blocks()
            self._source.start_prefetch()
        return self._source

    def metrics(self) -> dict[str, int]:
        """What to record beside the loss: nothing, text is never skipped."""
        return {}

    def get_state(self) -> dict[str, Any]:
        streams = {str(s): [[int(n) for n in c] for c in cs] for s, cs in self._cursors.items()}
        return {"step": self._step, "streams": streams, "settings": dict(self._dataset.settings)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was taken, by this process or, merged, by any number of them.

        Raises:
          ValueError: the state is of other data settings, or lacks streams of this process.
        """
        check_settings(state["settings"], self._dataset.settings)
        missing = [stream for stream, _ in self._rows if str(stream) not in state["streams"]]
        if missing:
            raise ValueError(
                f"data state lacks stream {missing[0]}: it is that of some processes only;"
                " merge_states those of all"
            )
        self.close()
        self._step = state["step"]
        self._cursors = {
            stream: [tuple(cursor) for cursor in state["streams"][str(stream)]] for stream, _ in self._rows
        }

    def close(self) -> None:
        """Ends threads and worker processes; the iterator can still be used, from where it is."""
        if self._source is not None:
            self._source.close()
        self._source, self._blocks = None, []

    def _open_blocks(self) -> grain.DatasetIterator:
        streams = [(stream, rows, self._cursors[stream]) for stream, rows in self._rows]
        first = self._step // self._plan.steps_per_block
        blocks = _Blocks(self._dataset, self._plan, streams, first)
        workers = largest_divisor(len(streams), self._dataset.num_workers)
        if workers:
            buffer = len(streams) // workers
            blocks = in_workers(
                blocks, grain.MultiprocessingOptions(workers, per_worker_buffer_size=buffer)
            )
        return iter(grain.experimental.ThreadPrefetchIterDataset(blocks, prefetch_buffer_size=len(streams)))


# --- streams and blocks -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a global batch is made of streams; the same on every process."""

    batch_size: int
    num_streams: int
    steps_per_block: int

    @classmethod
    def make(cls, settings: dict[str, Any]) -> _Plan:
        batch_size = settings["batch_size"]
        # Processes that end must do so at one step, which none of them knows from a part alone.
        endless = settings["num_epochs"] is None
        full_streams = max(settings["documents"]) // DOCUMENTS_PER_STREAM if endless else 1
        num_streams = largest_divisor(batch_size, max(1, full_streams))
        mixed_tokens = settings["shuffle_tokens"] if settings["shuffle"] else 0
        steps = max(1, mixed_tokens // (batch_size * settings["seq_len"]))
        if settings["packing"] == "first_fit":
            steps = max(steps, math.ceil(FIRST_FIT_WINDOWS * num_streams / batch_size))
        return cls(batch_size, num_streams, steps)

    @property
    def rows_per_stream(self) -> int:
        return self.batch_size // self.num_streams

    def rows_of_process(self, index: int, count: int) -> list[tuple[int, slice]]:
        """The streams that feed a process, each with which of its rows are the process's."""
        size = self.batch_size // count
        rows = range(index * size, (index + 1) * size)
        by_stream = itertools.groupby(rows, key=lambda row: row // self.rows_per_stream)
        result = []
        for stream, group in by_stream:
            own = [row - stream * self.rows_per_stream for row in group]
            result.append((stream, slice(own[0], own[-1] + 1)))
        return result


# {"windows": Batch of arrays [steps, R, S], "stream": number, "end": cursors behind the block}
_Block = dict[str, Any]


class _Blocks(grain.IterDataset):
    """Block after block, each of them for all given streams in turn."""

    def __init__(
        self,
        dataset: TextDataset,
        plan: _Plan,
        streams: list[tuple[int, slice, list[Cursor]]],
        first_block: int,
    ):
        super().__init__()
        self.dataset, self.plan = dataset, plan
        self.streams, self.first_block = streams, first_block

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Grain's hook: what remains for one worker of several."""
        assert not sequential_slice
        self.streams = self.streams[sl]

    def __iter__(self) -> grain.DatasetIterator:
        return _BlockIterator(self)


class _BlockIterator(grain.DatasetIterator):
    def __init__(self, blocks: _Blocks):
        super().__init__()
        self._pool = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="read-documents")
        self._streams = [
            _Stream(blocks.dataset, blocks.plan, number, rows, cursors, self._pool)
            for number, rows, cursors in blocks.streams
        ]
        self._next = blocks.first_block * len(self._streams)

    def __next__(self) -> _Block:
        block, stream = divmod(self._next, len(self._streams))
        self._next += 1
        return self._streams[stream].pack_block(block)

    def close(self) -> None:
        super().close()
        self._pool.shutdown(wait=False)

    # Grain asks for a state after each element. Ours is in the elements (`TextIterator`).
    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class _Stream:
    """Makes the blocks of one stream, in order."""

    def __init__(
        self,
        dataset: TextDataset,
        plan: _Plan,
        number: int,
        rows: slice,
        cursors: list[Cursor],
        pool: ThreadPoolExecutor,
    ):
        self.plan, self.number, self.rows = plan, number, rows
        self.settings, self.pad_id = dataset.settings, dataset.tokenizer.pad_id
        self.readers = [
            _Reader(documents, range(number, len(documents), plan.num_streams), cursor, pool)
            for documents, cursor in zip(dataset.documents, cursors, strict=True)
        ]

    def pack_block(self, block: int) -> _Block:
        num_windows = self.plan.steps_per_block * self.plan.rows_per_stream
        pack = PACKERS[self.settings["packing"]]
        shares = self._shares(block, num_windows)
        parts = [
            pack(reader, count, self.settings["seq_len"], self.pad_id)
            for reader, count in zip(self.readers, shares, strict=True)
            if count
        ]
        windows = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        # Packers fill windows from the first on; only at the end of the last epoch do any stay
        # empty, and of those the last batch gets what it needs.
        used = int(np.count_nonzero(windows["segment_ids"][:, 0]))
        if not used:
            raise StopIteration
        order_W = np.arange(-(-used // self.plan.rows_per_stream) * self.plan.rows_per_stream)
        if self.settings["shuffle"]:
            seeds = (self.settings["seed"], WINDOWS, self.number, block)
            order_W[:used] = permutation(used, seeds)
        chosen = order_W.reshape(-1, self.plan.rows_per_stream)[:, self.rows]
        return {
            "windows": {key: array[chosen] for key, array in windows.items()},
            "stream": self.number,
            "end": [reader.cursor for reader in self.readers],
        }

    def _shares(self, block: int, num_windows: int) -> np.ndarray:
        """How many windows of a block each source gives.

        Multiples of the golden ratio modulo 1 fill the unit interval evenly from any start, so the
        shares come out right over few windows as over many, and over streams as over blocks.
        """
        window = (block * num_windows + np.arange(num_windows)) * self.plan.num_streams
        point = (window + self.number) * GOLDEN_RATIO % 1
        source = np.searchsorted(np.cumsum(self.settings["weights"][:-1]), point, side="right")
        return np.bincount(source, minlength=len(self.readers))


class _Reader:
    """The tokens of one source of one stream, from a cursor on."""

    def __init__(self, documents: _Documents, own: range, cursor: Cursor, pool: ThreadPoolExecutor):
        self._documents, self._own, self._pool = documents, own, pool
        self._document, self.offset = cursor
        self._ahead: list[np.ndarray] = []
        self._empty = 0  # documents in a row, up to the last read

    @property
    def cursor(self) -> Cursor:
        return self._document, self.offset

    def peek(self, index: int) -> np.ndarray | None:
        """The tokens of the `index`-th document from the cursor's, None past the last."""
        while index >= len(self._ahead):
            first = self._document + len(self._ahead)
            # As many as there are threads, unless they are long: a corpus may be one file.
            length = len(self._ahead[-1]) if self._ahead else READ_AHEAD_TOKENS
            count = min(max(1, READ_AHEAD_TOKENS // max(1, length)), READ_THREADS)
            next_own = self._own[first : first + count]
            if not next_own:
                return None
            for document in self._pool.map(self._documents.__getitem__, next_own):
                self._ahead.append(document)
                self._empty = 0 if len(document) > 1 else self._empty + 1
            if self._empty > self._documents.per_epoch:
                raise ValueError(f"none of {self._documents.per_epoch} documents has text")
        return self._ahead[index]

    def advance(self, documents: int, offset: int) -> None:
        del self._ahead[:documents]
        self._document += documents
        self.offset = offset


class _Documents:
    """All epochs of a source's documents in the order they are read, as int32 token arrays."""

    def __init__(self, source: Any, tokenizer: Any, seeds: Seeds, shuffle: bool, num_epochs: int | None):
        self._source, self._encode = source, tokenizer.encode
        self._seeds, self._shuffle = seeds, shuffle
        self.per_epoch = len(source)
        self._len = sys.maxsize if num_epochs is None else num_epochs * self.per_epoch
        self._bos, self._eos = (
            np.array([] if special is None else [special], np.int32)
            for special in (tokenizer.bos_id, tokenizer.eos_id)
        )

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> np.ndarray:
        epoch, index = divmod(index, self.per_epoch)
        if self._shuffle:
            index = shuffled(index, self.per_epoch, (*self._seeds, epoch))
        document = self._source[index]
        tokens = document["tokens"] if "tokens" in document else self._encode(document["text"])
        return np.concatenate([self._bos, tokens, self._eos], dtype=np.int32, casting="unsafe")


# --- packing ------------------------------------------------------------------------------------


def _pack_concat(reader: _Reader, num_windows: int, seq_len: int, pad_id: int) -> Batch:
    """The next `num_windows * seq_len` tokens of `reader`, cut into windows [W, S]."""
    size = num_windows * seq_len
    # One more than the windows hold: the target of the last, and the first of the next block.
    tokens, owner = np.full(size + 1, pad_id, np.int32), np.full(size + 1, -1, np.int32)
    end, index, offset = 0, 0, reader.offset
    while (document := reader.peek(index)) is not None:
        begin, end = end, min(end + len(document) - offset, size + 1)
        tokens[begin:end] = document[offset : offset + end - begin]
        owner[begin:end] = index
        if end > size:
            offset += size - begin
            break
        index, offset = index + 1, 0
    reader.advance(index, offset)
    owner_WS = owner[:-1].reshape(num_windows, seq_len)
    return {
        "tokens": tokens[:-1].reshape(num_windows, seq_len),
        "targets": tokens[1:].reshape(num_windows, seq_len),
        "loss_mask": ((owner[:-1] == owner[1:]) & (owner[:-1] >= 0)).reshape(num_windows, seq_len),
        **_segments(owner_WS),
    }


def _pack_first_fit(reader: _Reader, num_windows: int, seq_len: int, pad_id: int) -> Batch:
    """The next documents of `reader`, up to the first that fits into none of the windows [W, S]."""
    tokens_WS, targets_WS = np.full((2, num_windows, seq_len), pad_id, np.int32)
    owner_WS = np.full((num_windows, seq_len), -1, np.int32)
    free_W = np.full(num_windows, seq_len)
    index, offset = 0, reader.offset
    while (document := reader.peek(index)) is not None:
        size = min(seq_len, len(document) - 1 - offset)
        if size <= 0:
            index, offset = index + 1, 0
            continue
        window = int(np.argmax(free_W >= size))
        if free_W[window] < size:
            break
        begin = seq_len - free_W[window]
        free_W[window] -= size
        tokens_WS[window, begin : begin + size] = document[offset : offset + size]
        targets_WS[window, begin : begin + size] = document[offset + 1 : offset + 1 + size]
        owner_WS[window, begin : begin + size] = index
        offset += size
    reader.advance(index, offset)
    return {
        "tokens": tokens_WS,
        "targets": targets_WS,
        "loss_mask": owner_WS >= 0,
        **_segments(owner_WS),
    }


PACKERS: dict[str, Callable[[_Reader, int, int, int], Batch]] = {
    "concat": _pack_concat,
    "first_fit": _pack_first_fit,
}


def _segments(owner_WS: np.ndarray) -> Batch:
    """Segment ids and positions from the document that each token is of, -1 for padding."""
    starts_WS = np.zeros(owner_WS.shape, bool)
    starts_WS[:, 1:] = owner_WS[:, 1:] != owner_WS[:, :-1]
    column_S = np.arange(owner_WS.shape[1], dtype=np.int32)
    start_WS = np.maximum.accumulate(np.where(starts_WS, column_S, 0), axis=1)
    is_text_WS = owner_WS >= 0
    return {
        "segment_ids": (np.cumsum(starts_WS, axis=1, dtype=np.int32) + 1) * is_text_WS,
        "positions": (column_S - start_WS) * is_text_WS,
    }


def _check_sources(sources: Sequence[Any]) -> None:
    if not sources:
        raise ValueError("sources is empty; give at least one, such as 'stdlib'")
    for number, source in enumerate(sources):
        if not len(source):
            raise ValueError(f"source {number} ({source!r}) has no documents; check its path")
