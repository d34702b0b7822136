"""Text batches on Grain: documents → tokens → packed windows → global batches.

A global batch [B, S] is built as follows:

* The B rows are fed by V *streams*, where V divides B: stream v feeds the rows v·B/V … (v+1)·B/V - 1,
  and reads the documents v, v+V, v+2V, … of each shuffled epoch. V is B for a large corpus, so that
  processes share the work of tokenizing, and 1 for a small one, so that every document is packed once
  before any is packed again. Data that ends (`num_epochs`) has one stream.
* Each stream is cut into *blocks*. A block packs the stream's next documents into just enough windows
  for a fixed number of steps, and shuffles the windows, so that a batch is not one long document. The
  blocks of all streams together hold about `shuffle_tokens` tokens, and at least one global batch; if the
  corpus is smaller, that is several epochs.
* A block is a pure function of (seed, stream, number of the block, document and offset where it
  begins).

The state is therefore the step and, for each stream and source, the cursor (document, offset) at
which the current block begins. It is small, it describes exactly what the consumer has seen, and it
does not mention processes or workers, so any number of either can restore it. The cost is that
restoring packs the current block of each stream again.

A process builds only the streams that feed its rows. Grain builds blocks ahead of need, in a thread
or in worker processes, each of which owns whole streams.

Letters: B batch, S sequence length, V streams, W windows of a block, R rows of a stream on this process.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

import grain
import numpy as np
from absl import logging

from maxlp import schema
from maxlp.data import common
from maxlp.data.common import Batch, Seeds
from maxlp.data.packing import PACKERS
from maxlp.data.sources import Mixture, check_split, make_source
from maxlp.data.specs import naming_key
from maxlp.data.tokenizers import Tokenizer, make_tokenizer
from maxlp.schema import INT32, Count, OneOf, Range

Cursor = tuple[int, int]  # (document of the stream, offset in its tokens)

# With fewer documents per stream, some streams would visibly be epochs ahead of others.
DOCUMENTS_PER_STREAM = 1000
# With web-like lengths, first-fit fills 0.95 of 16 windows and 0.97 of 64, and less of fewer windows.
FIRST_FIT_WINDOWS = 32
READ_THREADS = 16
READ_AHEAD_TOKENS = 2**18
DOCUMENTS, WINDOWS = 0, 1  # part of the seeds, so that the two kinds of permutations are independent
# Fields of `TextDataConfig` that determine the batches; the state of an iterator records them.
SETTINGS = ("batch_size", "seq_len", "packing", "max_documents", "shuffle", "shuffle_tokens", "num_epochs")
ORDER = {"documents", "weights", "seed", "shuffle"}  # settings that determine the documents of a stream
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDataConfig:
    """The `data` section of a config that trains on text.

    Attributes:
      source: documents, as in `sources.make_source`.
      tokenizer: as in `tokenizers.make_tokenizer`.
      seq_len: S, at least 2.
      batch_size: B, rows of the global batch.
      packing: "concat" joins the documents of a stream and cuts every S tokens; a document that is
        cut continues in another window. There is no padding except at the end of the last epoch, and
        one position per document is masked: its last token, whose target belongs to another document.
        "first_fit" keeps each document in one window, the first with enough room among those of its
        block; a document longer than S is split into pieces of S. Only padding is masked: 1 to 5 % of
        positions for documents of web-like lengths, more if few documents are shorter than S/2.
        Conversations need "first_fit": one longer than S is truncated, and skipped if no answer remains;
        the metrics `data/conversations_cut` and `data/conversations_skipped` are the fractions of both.
        Only answers are targets.
      max_documents: the most documents in a window, which `nn.attention.cudnn` needs to know; None for any
        number. A window that holds this many is closed, and the rest of it is padding.
      shuffle: whether each epoch reads the documents in another order, and the windows of a block are
        mixed; False keeps the order of the source, in which later epochs may begin elsewhere.
      shuffle_tokens: about how many tokens are mixed, over all rows of the global batch, and at least one
        global batch. More tokens mix better, but take longer to read before the first step.
      num_epochs: None repeats forever. A number ends the data after that many passes, with a
        padded batch, and uses a single stream, so that each process tokenizes the whole corpus.
      num_workers: processes that tokenize and pack; 0 uses a thread. Each owns whole streams, so no
        more are started than this process has streams.
    """

    source: str
    tokenizer: str
    seq_len: Annotated[int, Range(at_least=2), INT32]
    batch_size: Count
    packing: Annotated[str, OneOf(PACKERS)] = "concat"
    max_documents: Count | None = None
    shuffle: bool = True
    shuffle_tokens: Annotated[int, Range(at_least=0)] = 2**20
    num_epochs: Count | None = None
    num_workers: common.Workers = 0

    def __post_init__(self):
        schema.check(self)


def make_data(
    config: TextDataConfig, *, split: str, seed: int = 0, process_index: int = 0, process_count: int = 1
) -> TextDataset:
    """Opens the source and the tokenizer of `config`, and makes batches of one split.

    Validation is one pass over the documents, packed by "concat", or "first_fit" if there are
    conversations; of `config` it uses only the source, the tokenizer and the sizes. Each source of a
    mixture is in order and spread evenly over the pass, whatever its weight. Every token that has a
    predecessor in its document is a target exactly once; in conversations, every token of an answer. The
    last batch is padded. All processes end at the same step, and each tokenizes all documents.

    Args:
      split: "train" or "validation".
      seed, process_index, process_count: as in `make_dataset`.

    Raises:
      ValueError: a value out of range, or a source or tokenizer that cannot be read.
    """
    check_split(split, ("train", "validation"))
    with naming_key("data.tokenizer"):
        tokenizer = make_tokenizer(config.tokenizer)
    with naming_key("data.source"):
        opened = make_source(config.source, split, tokenizer.any_bytes)
    sources, weights = opened if isinstance(opened, Mixture) else ((opened,), (1.0,))
    for part in sources:
        if part.tokenizer and part.tokenizer["fingerprint"] != tokenizer.fingerprint:
            raise ValueError(
                f"data.source: source {part.name!r} holds tokens of the tokenizer "
                f"{part.tokenizer['spec']}, not of data.tokenizer={config.tokenizer!r}; set that tokenizer"
            )
    documents: Sequence[Any] = sources
    chats = [_is_conversation(part[0]) for part in sources]
    if any(chats):
        from maxlp.data.chat import open_conversations

        documents, template = open_conversations(sources, chats, tokenizer, config)
    read = documents
    if split == "validation":
        weights, seed = [1.0], 0
        packing = "first_fit" if any(chats) else "concat"
        config = dataclasses.replace(config, packing=packing, shuffle=False, num_epochs=1, num_workers=0)
        if len(documents) > 1:
            from maxlp.data.interleaved import Interleaved

            read = [Interleaved(documents)]
    made = make_dataset(
        read,
        weights,
        tokenizer,
        config,
        seed=seed,
        process_index=process_index,
        process_count=process_count,
    )
    if split == "train":
        made.settings[common.FINGERPRINTS] = [part.fingerprint for part in sources]
        if any(chats):
            made.settings[common.CHAT_FINGERPRINT] = template
    return dataclasses.replace(made, sources=documents, is_train=split == "train")


def _is_conversation(document: dict[str, Any]) -> bool:
    """Whether a record is a conversation: messages, or tokens of a signed dtype (see `data.chat`)."""
    tokens = document.get("tokens")
    return "messages" in document or (tokens is not None and tokens.dtype.kind == "i")


def make_dataset(
    sources: Sequence[Any],
    weights: Sequence[float],
    tokenizer: Tokenizer,
    config: TextDataConfig,
    *,
    seed: int,
    process_index: int,
    process_count: int,
) -> TextDataset:
    """Makes batches of packed documents.

    An iterator yields this process's rows of the global batch, `process_index * B/process_count …`, as a
    dict of arrays [B/process_count, S]: `tokens`, `targets`, `segment_ids`, `positions` (int32) and
    `loss_mask` (bool); see `packing`. The global batch of a step depends only on the documents, the
    tokenizer, the seed and `config` without `num_workers`. A document is `[bos] tokens [eos]`; one
    without tokens is left out.

    Args:
      sources: each has `len(source)` > 0 and `source[i]`, a dict with "text" (str or bytes) or "tokens"
        (integers, without bos and eos), or as in `chat.Conversations`; picklable if there are workers.
      weights: relative shares of the *windows*, hence of the tokens, that come from each source. A
        window holds documents of one source only.
      tokenizer: encodes texts, and gives the special tokens.
      config: `source` and `tokenizer` are not used.
      seed: determines the order of documents and windows.
      process_index: index of this process among those that share the global batch.
      process_count: number of these processes.

    Raises:
      ValueError: a batch or a process index that does not fit the processes, or a mixture with epochs.
    """
    assert len(sources) == len(weights) > 0
    common.check_process(config.batch_size, seed, process_index, process_count)
    if config.num_epochs is not None and len(sources) > 1:
        raise ValueError(
            f"num_epochs={config.num_epochs} needs a single source; for a mixture set num_epochs=None"
        )
    settings = {name: getattr(config, name) for name in SETTINGS} | dict(
        seed=seed,
        tokenizer=tokenizer.fingerprint,
        documents=[len(source) for source in sources],
        weights=[weight / sum(weights) for weight in weights],
    )
    if config.shuffle:
        settings |= common.shuffle_settings(map(len, sources))
    num_streams = _Plan.make(settings).num_streams
    documents = [
        _Documents(source, tokenizer, (seed, DOCUMENTS, number), config, num_streams)
        for number, source in enumerate(sources)
    ]
    return TextDataset(tokenizer, documents, settings, config.num_workers, process_index, process_count)


@dataclasses.dataclass(frozen=True)
class TextDataset:
    """Batches of packed text: `iter(dataset)` gives a `TextIterator`. See `make_data`.

    Attributes:
      sources: where the documents come from, to estimate their tokens.
      is_train: whether a run records the metrics, so that a warning may refer to them.
    """

    tokenizer: Tokenizer
    documents: Sequence[_Documents]
    settings: dict[str, Any]
    num_workers: int
    process_index: int
    process_count: int
    sources: Sequence[Any] = ()
    is_train: bool = True

    def __iter__(self) -> TextIterator:
        return TextIterator(self)

    def describe(self, steps: int = 0) -> str:
        """How many documents and, unless that takes long to estimate, tokens there are.

        Args:
          steps: of training, for which the epochs are counted; 0 for validation data.
        """
        from maxlp.data import estimates  # only a launch needs them

        return estimates.describe(self.sources, self.tokenizer, self.settings, steps)


class TextIterator(common.PrefetchingIterator):
    """Yields batches; `get_state` and `set_state` save and restore the position exactly.

    The "streams" of a state map each stream that feeds this process to [[document, offset] for each
    source], where the current block begins. To resume with another number of processes, give each the
    `merge_states` of all.
    """

    def __init__(self, dataset: TextDataset):
        self._dataset = dataset
        self._plan = _Plan.make(dataset.settings)
        self._rows = self._plan.rows_of_process(dataset.process_index, dataset.process_count)
        self._step = 0
        self._cursors = {stream: [(0, 0)] * len(dataset.documents) for stream, _ in self._rows}
        self._blocks: list[_Block] = []  # the current block of each stream
        self._counts: dict[int, Counter[str]] = {}  # of conversations, by stream

    def __next__(self) -> Batch:
        index = self._step % self._plan.steps_per_block
        if not self._blocks:
            blocks = self.start_prefetch()
            self._blocks = [next(blocks) for _ in self._rows]
            self._count_conversations()
        if index >= len(self._blocks[0]["windows"]["tokens"]):
            raise StopIteration
        parts = [{k: a[index] for k, a in block["windows"].items()} for block in self._blocks]
        batch = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        self._step += 1
        if self._step % self._plan.steps_per_block == 0:
            self._cursors = {block["stream"]: block["end"] for block in self._blocks}
            self._blocks = []
        return batch

    def metrics(self) -> dict[str, float]:
        """`data/conversations_cut` and `data/conversations_skipped`, where they are not zero.

        They are fractions of the conversations that this process has read since its launch or the last
        resume; no other text is ever skipped.
        """
        total: Counter[str] = sum(self._counts.values(), Counter())
        names = ("cut", "skipped")
        return {f"data/conversations_{name}": total[name] / total["read"] for name in names if total[name]}

    def _count_conversations(self) -> None:
        before = self.metrics()
        self._counts |= {block["stream"]: block["conversations"] for block in self._blocks}
        if self._dataset.is_train:
            for name in self.metrics().keys() - before:
                message = "there are conversations that do not fit data.seq_len; see the metric %s"
                logging.warning(message, name)

    def get_state(self) -> dict[str, Any]:
        streams = {str(s): [[int(n) for n in c] for c in cs] for s, cs in self._cursors.items()}
        return {"step": self._step, "streams": streams, "settings": dict(self._dataset.settings)}

    def set_state(self, state: dict[str, Any], allow_change: bool = False) -> None:
        """Moves to the position at which `state` was taken, by this process or merged from several.

        Args:
          allow_change: whether the state may come from other data or settings. If documents and order are
            the same, reading continues at the current block. It is divided again for another number of
            streams, and shuffled differently if its windows have changed. Otherwise reading starts at the
            first document.

        Raises:
          ValueError: the state has other data settings, or lacks streams of this process.
        """
        changed = common.check_settings(state["settings"], self._dataset.settings, allow_change)
        streams, own = state["streams"], [stream for stream, _ in self._rows]
        before = _Plan.make(self._dataset.settings | state["settings"]).num_streams
        same = before == self._plan.num_streams
        needed = own if same else range(before)
        if missing := [stream for stream in needed if str(stream) not in streams]:
            raise ValueError(
                f"data state lacks stream {missing[0]}: it comes from only some of the processes;"
                " merge the states of all processes with merge_states"
            )
        if changed & ORDER:
            logging.warning("the documents or their order have changed: reading starts at the first one")
            streams = {str(stream): [(0, 0)] * len(self._dataset.documents) for stream in own}
        elif not same:
            streams = self._redistribute(list(streams.values()))
        if changed.intersection(SETTINGS) and not changed & ORDER:
            logging.warning("the last data.shuffle_tokens are mixed again: some may come twice, some never")
        self.close()
        self._step = state["step"]
        same_text = not changed & {common.FINGERPRINTS, common.CHAT_FINGERPRINT}
        self._cursors = {
            stream: [(document, offset if same_text else 0) for document, offset in streams[str(stream)]]
            for stream, _ in self._rows
        }

    def _redistribute(self, cursors: list[list[Cursor]]) -> dict[str, list[Cursor]]:
        """Cursors of the current streams, at about as many documents as the saved streams had read."""
        read = [sum(document for document, _ in of_source) for of_source in zip(*cursors, strict=True)]
        n = self._plan.num_streams  # stream s reads documents s, s + n, s + 2n, …
        return {str(s): [(max(0, -(-(count - s) // n)), 0) for count in read] for s, _ in self._rows}

    def close(self) -> None:
        super().close()
        self._blocks = []

    def _open(self) -> grain.DatasetIterator:
        feeds = [_Feed(stream, rows, self._cursors[stream]) for stream, rows in self._rows]
        first, workers = self._step // self._plan.steps_per_block, self._dataset.num_workers
        count = min(max(1, workers), len(feeds))
        parts = [_Blocks(self._dataset, self._plan, feeds[i::count], first) for i in range(count)]
        made: Any = parts[0]
        if workers:
            from maxlp.data.in_workers import InWorkers

            made = InWorkers(parts, len(feeds))
        return iter(grain.experimental.ThreadPrefetchIterDataset(made, prefetch_buffer_size=len(feeds)))


# --- streams and blocks ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a global batch is composed of streams; the same on every process."""

    batch_size: int
    num_streams: int
    steps_per_block: int

    @classmethod
    def make(cls, settings: dict[str, Any]) -> _Plan:
        batch_size = settings["batch_size"]
        # Finite data has one stream, because all processes must end at the same step.
        endless = settings["num_epochs"] is None
        full_streams = max(settings["documents"]) // DOCUMENTS_PER_STREAM if endless else 1
        num_streams = common.largest_divisor(batch_size, max(1, full_streams))
        mixed_tokens = settings["shuffle_tokens"] if settings["shuffle"] else 0
        steps = max(1, mixed_tokens // (batch_size * settings["seq_len"]))
        if settings["packing"] == "first_fit":
            steps = max(steps, math.ceil(FIRST_FIT_WINDOWS * num_streams / batch_size))
        return cls(batch_size, num_streams, steps)

    @property
    def rows_per_stream(self) -> int:
        return self.batch_size // self.num_streams

    def rows_of_process(self, index: int, count: int) -> list[tuple[int, slice]]:
        """The streams that feed process `index`, and which rows of each the process takes."""
        size = self.batch_size // count
        rows = range(index * size, (index + 1) * size)
        result = []
        for stream, group in itertools.groupby(rows, key=lambda row: row // self.rows_per_stream):
            own = [row - stream * self.rows_per_stream for row in group]
            result.append((stream, slice(own[0], own[-1] + 1)))
        return result


class _Feed(NamedTuple):
    """A stream that feeds this process: which of its rows, and where in each source the block begins."""

    stream: int
    rows: slice
    cursors: list[Cursor]


# {"windows": arrays [steps, R, S], "stream": number, "end": cursors after the block,
#  "conversations": how many of them were read, cut and skipped so far}
_Block = dict[str, Any]


class _Blocks(grain.IterDataset):
    """Block after block, each for all given streams in turn."""

    def __init__(self, dataset: TextDataset, plan: _Plan, feeds: list[_Feed], first_block: int):
        super().__init__()
        self.dataset, self.plan, self.feeds, self.first_block = dataset, plan, feeds, first_block

    def __iter__(self) -> grain.DatasetIterator:
        return _BlockIterator(self)


class _BlockIterator(grain.DatasetIterator):
    def __init__(self, blocks: _Blocks):
        super().__init__()
        self._pool = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="read-documents")
        self._streams = [_Stream(blocks.dataset, blocks.plan, feed, self._pool) for feed in blocks.feeds]
        self._next = blocks.first_block * len(self._streams)

    def __next__(self) -> _Block:
        block, stream = divmod(self._next, len(self._streams))
        self._next += 1
        return self._streams[stream].pack_block(block)

    def close(self) -> None:
        super().close()
        self._pool.shutdown(wait=False)

    # Grain reads a state after each element; the state that matters is in the elements (`_Block`).
    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class _Stream:
    """Makes the blocks of one stream, in order."""

    def __init__(self, dataset: TextDataset, plan: _Plan, feed: _Feed, pool: ThreadPoolExecutor):
        self.plan, self.number, self.rows = plan, feed.stream, feed.rows
        self.settings, self.pad_id = dataset.settings, dataset.tokenizer.pad_id
        self.queues = [
            _DocumentQueue(documents, range(feed.stream, len(documents), plan.num_streams), cursor, pool)
            for documents, cursor in zip(dataset.documents, feed.cursors, strict=True)
        ]

    def pack_block(self, block: int) -> _Block:
        num_windows = self.plan.steps_per_block * self.plan.rows_per_stream
        pack = PACKERS[self.settings["packing"]]
        shares = self._shares(block, num_windows)
        parts = [
            pack(queue, count, self.settings["seq_len"], self.pad_id, self.settings["max_documents"])
            for queue, count in zip(self.queues, shares, strict=True)
            if count
        ]
        windows = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        # Packers fill windows from the first on. Windows are empty only at the end of the last epoch;
        # those that complete the last batch are kept.
        used = int(np.count_nonzero(windows["segment_ids"][:, 0]))
        if not used:
            raise StopIteration
        order_W = np.arange(-(-used // self.plan.rows_per_stream) * self.plan.rows_per_stream)
        if self.settings["shuffle"]:
            seeds = (self.settings["seed"], WINDOWS, self.number, block)
            order_W[:used] = common.permutation(used, seeds)
        chosen = order_W.reshape(-1, self.plan.rows_per_stream)[:, self.rows]
        return {
            "windows": {key: array[chosen] for key, array in windows.items()},
            "stream": self.number,
            "end": [queue.cursor for queue in self.queues],
            "conversations": sum((queue.conversations for queue in self.queues), Counter()),
        }

    def _shares(self, block: int, num_windows: int) -> np.ndarray:
        """How many windows of a block each source provides.

        Multiples of the golden ratio modulo 1 fill the unit interval evenly from any start, so the
        shares are right over a few windows as well as over many, and across streams as well as across
        blocks.
        """
        window = (block * num_windows + np.arange(num_windows)) * self.plan.num_streams
        point = (window + self.number) * GOLDEN_RATIO % 1
        source = np.searchsorted(np.cumsum(self.settings["weights"][:-1]), point, side="right")
        return np.bincount(source, minlength=len(self.queues))


class _DocumentQueue:
    """The documents of one source and stream from a cursor on (`packing.Documents`), with read-ahead."""

    def __init__(self, documents: _Documents, own: range, cursor: Cursor, pool: ThreadPoolExecutor):
        self._documents, self._own, self._pool = documents, own, pool
        self._document, self.offset = cursor
        self._ahead: list[np.ndarray] = []
        self._empty = 0  # consecutive documents without text, up to the last one read
        self.conversations: Counter[str] = Counter()

    @property
    def cursor(self) -> Cursor:
        return self._document, self.offset

    def peek(self, index: int) -> np.ndarray | None:
        while index >= len(self._ahead):
            first = self._document + len(self._ahead)
            # One document per thread, or fewer if documents are long: a corpus may be a single file.
            length = len(self._ahead[-1]) if self._ahead else READ_AHEAD_TOKENS
            count = min(max(1, READ_AHEAD_TOKENS // max(1, length)), READ_THREADS)
            next_own = self._own[first : first + count]
            if not next_own:
                return None
            for document, counts in self._pool.map(self._documents.__getitem__, next_own):
                self._ahead.append(document)
                self.conversations.update(counts)
                self._empty = 0 if len(document) else self._empty + 1
            # A single stream meets every document within two epochs, whatever their orders. One of several
            # may miss the few with text of a small source until an epoch's order brings one of them.
            if self._empty > 2 * self._documents.per_epoch and not self._documents.have_text_later:
                what = "an answer within data.seq_len" if self.conversations else "text"
                raise ValueError(
                    f"none of the {self._documents.per_epoch} documents has {what}; check data.source"
                )
        return self._ahead[index]

    def advance(self, documents: int, offset: int) -> None:
        del self._ahead[:documents]
        self._document += documents
        self.offset = offset


class _Documents:
    """All epochs of a source's documents in reading order.

    Each is an int32 array [T] of tokens, and for a conversation the names of the counters that it adds to.
    """

    def __init__(
        self, source: Any, tokenizer: Tokenizer, seeds: Seeds, config: TextDataConfig, num_streams: int
    ):
        self._source, self._encode = source, tokenizer.encode
        self._seeds, self._shuffle = seeds, config.shuffle
        self.per_epoch, self._num_streams = len(source), num_streams
        self._len = sys.maxsize if config.num_epochs is None else config.num_epochs * self.per_epoch
        self._bos, self._eos = [tokenizer.bos_id], [tokenizer.eos_id]

    @functools.cached_property
    def have_text_later(self) -> bool:
        """Whether each stream meets a document with text sometime: there is one, and the order changes."""
        return self._shuffle and any(len(self[i][0]) for i in range(self.per_epoch))

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> tuple[np.ndarray, tuple[str, ...]]:
        epoch, place = divmod(index, self.per_epoch)
        if self._shuffle:
            place = common.shuffled(place, self.per_epoch, (*self._seeds, epoch))
        else:
            # A stream comes to every `gcd`-th document only. Once it has read these, it continues with
            # their neighbours, so that it reads all documents in the end.
            sizes = self.per_epoch, self._num_streams
            place = (place + index // math.lcm(*sizes) % math.gcd(*sizes)) % self.per_epoch
        document = self._source[place]
        if "conversation" in document:  # with the special tokens of its template
            return document["conversation"], document["counts"]
        tokens = document["tokens"] if "tokens" in document else self._encode(document["text"])
        if not len(tokens):  # left out, as by `maxlp.prepare`
            return np.empty(0, np.int32), ()
        return np.concatenate([self._bos, tokens, self._eos], dtype=np.int32, casting="unsafe"), ()
