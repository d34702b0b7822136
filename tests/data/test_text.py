"""Packing against slow references, and what a global batch must not depend on."""

import collections
import dataclasses
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from maxlp.data import common, text
from maxlp.data.sources import Mixture
from maxlp.data.tokenizer import ByteTokenizer

BOS, EOS, PAD = 1, 2, 0
KEYS = ("tokens", "targets", "segment_ids", "positions", "loss_mask")


@dataclasses.dataclass
class Specials:
    bos_id: int | None = BOS
    eos_id: int | None = EOS
    pad_id: int = PAD
    fingerprint: str = "specials"

    def encode(self, text):
        return np.array([int(word) for word in text.split()], np.int32)


def corpus(num_documents, longest, seed=0, first=0):
    """Documents whose tokens are all different, so that each tells where it is from."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest, num_documents)
    return [
        {"tokens": 10 + (first + i) * longest + np.arange(length, dtype=np.uint32)}
        for i, length in enumerate(lengths)
    ]


def with_specials(document, tokenizer):
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return bos + document["tokens"].tolist() + eos


def make(sources, weights=None, tokenizer=None, **kwargs):
    defaults = dict(seq_len=8, global_batch_size=4, seed=0, shuffle_tokens=96)
    return text.make_text_dataset(sources, weights, tokenizer or Specials(), **(defaults | kwargs))


def take(iterator, steps=None):
    """The next `steps` batches, or all: dict of arrays [steps, B, S]."""
    batches = [batch for _, batch in zip(range(steps or sys.maxsize), iterator, strict=False)]
    return {key: np.stack([batch[key] for batch in batches]) for key in KEYS}


def join(parts):
    return {key: np.concatenate([part[key] for part in parts], axis=1) for key in KEYS}


def assert_equal(batches, expected, **where):
    for key in KEYS:
        np.testing.assert_array_equal(batches[key], expected[key], err_msg=f"{key} {where}")
        assert batches[key].dtype == (bool if key == "loss_mask" else np.int32)


def slow_windows(windows, seq_len, batch_size):
    """Windows as lists of (token, target, document, position, counts) → batches, padded."""
    blank = (PAD, PAD, None, 0, False)
    rows = [window + [blank] * (seq_len - len(window)) for window in windows]
    rows += [[blank] * seq_len] * (-len(rows) % batch_size)
    segments = []
    for row in rows:
        seen = list(dict.fromkeys(document for _, _, document, _, _ in row if document is not None))
        segments.append([0 if d is None else seen.index(d) + 1 for _, _, d, _, _ in row])
    shape = (-1, batch_size, seq_len)

    def column(i):
        return [[entry[i] for entry in row] for row in rows]

    return {
        "tokens": np.reshape(column(0), shape),
        "targets": np.reshape(column(1), shape),
        "segment_ids": np.reshape(segments, shape),
        "positions": np.reshape(column(3), shape),
        "loss_mask": np.reshape(column(4), shape),
    }


def slow_concat(documents, seq_len):
    stream = [(token, i) for i, document in enumerate(documents) for token in document]
    windows, previous = [], None
    for at, (token, owner) in enumerate(stream):
        if at % seq_len == 0:
            windows.append([])
            previous = None
        target, next_owner = stream[at + 1] if at + 1 < len(stream) else (PAD, None)
        position = position + 1 if owner == previous else 0  # noqa: F821 (set where it restarts)
        windows[-1].append((token, target, owner, position, owner == next_owner))
        previous = owner
    return windows


def slow_first_fit(documents, seq_len, windows_per_block):
    done, block = [], [[] for _ in range(windows_per_block)]
    for number, document in enumerate(documents):
        pairs = list(itertools.pairwise(document))
        for begin in range(0, len(pairs), seq_len):
            piece = [
                (token, target, number, position, True)
                for position, (token, target) in enumerate(pairs[begin : begin + seq_len])
            ]
            fitting = [window for window in block if len(window) + len(piece) <= seq_len]
            if not fitting:
                done += block
                block = [[] for _ in range(windows_per_block)]
                fitting = block
            fitting[0].extend(piece)
    return done + [window for window in block if window]


@pytest.mark.parametrize(
    "tokenizer", [Specials(), Specials(bos_id=None), Specials(eos_id=None), Specials(None, None)]
)
@pytest.mark.parametrize(("longest", "seq_len"), [(7, 8), (60, 8), (60, 33), (7, 2)])
@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_packing_equals_slow_reference(tokenizer, longest, seq_len, packing):
    documents = corpus(40, longest)
    dataset = make(
        [documents], None, tokenizer, seq_len=seq_len, packing=packing, shuffle=False, num_epochs=1
    )
    marked = [with_specials(document, tokenizer) for document in documents]
    if packing == "concat":
        windows = slow_concat(marked, seq_len)
    else:
        windows = slow_first_fit(marked, seq_len, text.FIRST_FIT_WINDOWS)
    assert_equal(take(iter(dataset)), slow_windows(windows, seq_len, 4))


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_each_token_once_an_epoch_whatever_the_shuffle(packing):
    documents = corpus(60, 50)
    batches = take(iter(make([documents], packing=packing, num_epochs=2)))
    successor = {}
    for document in documents:
        marked = with_specials(document, Specials())
        successor |= dict(itertools.pairwise(marked[1:]))  # BOS has many
    real = batches["segment_ids"] > 0
    tokens, targets = batches["tokens"], batches["targets"]
    counts = collections.Counter(tokens[real].tolist())
    assert all(counts.pop(token) == 2 for token in successor)
    assert counts.keys() <= {BOS, EOS} and counts[BOS] == 2 * len(documents)

    counted = collections.Counter(targets[batches["loss_mask"]].tolist())
    assert counted[EOS] == 2 * len(documents) and BOS not in counted
    assert all(counted[token] == 2 for token in successor)
    for token, target in zip(tokens[batches["loss_mask"]], targets[batches["loss_mask"]], strict=True):
        assert token == BOS or successor[int(token)] == target
    assert not (batches["loss_mask"] & ~real).any()


def order_of(documents, **kwargs):
    """The first tokens of the documents in reading order: a block of one window mixes nothing."""
    batches = take(iter(make([documents], global_batch_size=1, shuffle_tokens=0, **kwargs)))
    begins = batches["targets"][(batches["tokens"] == BOS) & batches["loss_mask"]]
    return [int(token) for token in begins if token != EOS]


def test_shuffle_differs_by_epoch_and_seed_and_is_a_permutation():
    documents = corpus(50, 20)
    whole = order_of(documents, shuffle=False, num_epochs=1)
    orders = {}
    for seed in range(3):
        both = order_of(documents, num_epochs=2, seed=seed)
        orders[seed, 0], orders[seed, 1] = both[: len(whole)], both[len(whole) :]
    assert all(sorted(order) == whole for order in orders.values())
    assert len({tuple(order) for order in [whole, *orders.values()]}) == 7


@pytest.mark.parametrize("size", [1, 2, 1000, 2**16 + 3])
def test_any_number_of_documents_is_permuted(size):
    orders = [[common.shuffled(i, size, (seed, 5)) for i in range(size)] for seed in (0, 1)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert size < 1000 or np.mean(np.equal(*orders)) < 0.01


def test_windows_of_a_block_are_mixed():
    documents = corpus(50, 200)
    plain = take(iter(make([documents], shuffle_tokens=0)), 12)
    mixed = take(iter(make([documents], shuffle_tokens=12 * 4 * 8)), 12)
    rows = {
        key: batches["tokens"].reshape(-1, 8).tolist()
        for key, batches in [("plain", plain), ("mixed", mixed)]
    }
    assert rows["plain"] != rows["mixed"] and sorted(rows["plain"]) == sorted(rows["mixed"])


def test_small_corpus_is_read_through_before_it_repeats():
    documents = corpus(30, 100)
    total = sum(len(with_specials(document, Specials())) for document in documents)
    batches = take(iter(make([documents], global_batch_size=64, shuffle_tokens=0)), total // 512)
    counts = collections.Counter(batches["tokens"].ravel().tolist())
    assert max(count for token, count in counts.items() if token > EOS) == 1


def test_large_corpus_feeds_each_row_its_own_documents(monkeypatch):
    monkeypatch.setattr(text, "DOCUMENTS_PER_STREAM", 50)
    documents = corpus(1000, 40)
    dataset = make([documents], global_batch_size=12)
    total = sum(len(with_specials(document, Specials())) for document in documents)
    batches = take(iter(dataset), total // (12 * 8))
    origin = np.where(batches["tokens"] > EOS, (batches["tokens"] - 10) // 40, -1)
    counts = collections.Counter(n for row in range(12) for n in set(origin[:, row].flat) - {-1})
    assert max(counts.values()) == 2  # a row ahead of another is in the next epoch by now
    assert len(counts) > 0.85 * len(documents)
    assert np.mean([count == 1 for count in counts.values()]) > 0.8


VARIANTS = [
    dict(packing="concat"),
    dict(packing="first_fit"),
    dict(packing="concat", num_epochs=1),
    dict(packing="first_fit", weights=[3, 1]),
    dict(packing="concat", weights=[3, 1], global_batch_size=24),
]


def variant(kwargs, **more):
    sources = [corpus(400, 30)]
    if "weights" in kwargs:
        sources.append(corpus(300, 60, seed=1, first=1000))
    return make(sources, **(dict(global_batch_size=12) | kwargs | more))


@pytest.mark.parametrize("kwargs", VARIANTS)
def test_global_batch_does_not_depend_on_process_count(kwargs, monkeypatch):
    # 400 documents over streams of at least 100: 4 streams of 3 or 6 rows, which no 12 processes share.
    monkeypatch.setattr(text, "DOCUMENTS_PER_STREAM", 100)
    steps = None if "num_epochs" in kwargs else 40
    expected = take(iter(variant(kwargs)), steps)
    for count in (2, 3, 4, 12):
        parts = [
            take(iter(variant(kwargs, process_index=i, process_count=count)), steps) for i in range(count)
        ]
        assert_equal(join(parts), expected, process_count=count)


def test_global_batch_and_resume_do_not_depend_on_workers(monkeypatch):
    monkeypatch.setattr(text, "DOCUMENTS_PER_STREAM", 100)
    documents = [{"text": f"{i} " * (i % 9)} for i in range(400)]
    plain, resumed, busy = (
        iter(make([documents], None, ByteTokenizer(), num_workers=workers)) for workers in (0, 0, 2)
    )
    take(plain, 7)
    busy.set_state(json.loads(json.dumps(plain.get_state())))
    assert_equal(take(busy, 20), take(plain, 20))
    assert busy.get_state() == plain.get_state()
    resumed.set_state(busy.get_state())
    busy.close()
    assert_equal(take(resumed, 20), take(plain, 20))


@pytest.mark.parametrize("kwargs", VARIANTS)
def test_resume_is_exact_on_any_number_of_processes(kwargs, monkeypatch):
    monkeypatch.setattr(text, "DOCUMENTS_PER_STREAM", 100)
    steps = len(take(iter(variant(kwargs)))["tokens"]) if "num_epochs" in kwargs else 40
    expected = take(iter(variant(kwargs)), steps)
    rng = np.random.default_rng(0)
    for stop in {0, 1, steps - 1, *rng.integers(2, steps, 4).tolist()}:
        states = []
        for i in range(4):
            iterator = iter(variant(kwargs, process_index=i, process_count=4))
            if stop:
                take(iterator, stop)
            states.append(iterator.get_state())
        merged = json.loads(json.dumps(common.merge_states(states)))
        rest = {key: array[stop:] for key, array in expected.items()}
        for count in (1, 2, 4):
            parts = []
            for i in range(count):
                iterator = iter(variant(kwargs, process_index=i, process_count=count))
                next(iterator)  # a used iterator goes there as well
                iterator.set_state(merged)
                assert iterator.get_state()["step"] == stop
                parts.append(take(iterator, steps - stop))
            assert_equal(join(parts), rest, stop=stop, process_count=count)


def test_end_is_kept_by_a_state():
    iterator = iter(make([corpus(20, 30)], num_epochs=1))
    take(iterator)
    other = iter(make([corpus(20, 30)], num_epochs=1))
    other.set_state(iterator.get_state())
    for ended in (iterator, other, other):
        with pytest.raises(StopIteration):
            next(ended)


def test_state_of_other_data_or_too_few_processes_is_refused(monkeypatch):
    monkeypatch.setattr(text, "DOCUMENTS_PER_STREAM", 100)
    documents = corpus(400, 30)
    half = [make([documents], process_index=i, process_count=2) for i in range(2)]
    states = [iter(each).get_state() for each in half]
    with pytest.raises(ValueError, match=r"lacks stream 2.*merge_states"):
        iter(make([documents])).set_state(states[0])
    with pytest.raises(ValueError, match="seq_len=8, now seq_len=16"):
        iter(make([documents], seq_len=16)).set_state(common.merge_states(states))
    with pytest.raises(ValueError, match=r"documents=\[400\], now documents=\[401\]"):
        iter(make([corpus(401, 30)])).set_state(common.merge_states(states))
    states[1]["step"] += 1
    with pytest.raises(ValueError, match="different step: 0 and 1"):
        common.merge_states(states)


def test_eval_counts_each_token_once_for_any_process_count():
    sources = [corpus(30, 40), corpus(7, 90, first=100)]
    expected = collections.Counter()
    for document in sources[0] + sources[1]:
        expected.update(with_specials(document, Specials())[1:])
    for count in (1, 2, 3, 6):
        parts = [
            take(
                iter(
                    text.make_eval_dataset(
                        sources,
                        Specials(),
                        seq_len=16,
                        global_batch_size=6,
                        process_index=i,
                        process_count=count,
                    )
                )
            )
            for i in range(count)
        ]
        assert len({len(part["tokens"]) for part in parts}) == 1
        batches = join(parts)
        assert collections.Counter(batches["targets"][batches["loss_mask"]].tolist()) == expected


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_mixture_shares_are_of_windows_and_windows_are_not_mixed(packing, monkeypatch):
    monkeypatch.setattr(text, "DOCUMENTS_PER_STREAM", 100)
    sources = [corpus(400, 10), corpus(100, 80, seed=1, first=1000), corpus(50, 80, first=2000)]
    batches = take(iter(make(sources, [5, 3, 2], packing=packing)), 500)
    first_of_source = [0, 10 + 1000 * 80, 10 + 2000 * 80]
    rows = batches["tokens"].reshape(-1, 8)
    origin = np.where(rows > EOS, np.searchsorted(first_of_source, rows, side="right"), 0)
    largest = origin.max(axis=1, keepdims=True)
    assert ((origin == largest) | (origin == 0)).all()
    seen = np.bincount(largest.ravel(), minlength=4)[1:] / np.count_nonzero(largest)
    np.testing.assert_allclose(seen, [0.5, 0.3, 0.2], atol=0.02)


def test_a_source_that_fails_is_reported_by_next():
    documents = [{"text": "1 2"}, {"text": "broken"}]
    with pytest.raises(ValueError, match=r"invalid literal.*broken"):
        next(iter(make([documents])))


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_documents_without_text_are_an_error_and_no_endless_loop(packing):
    with pytest.raises(ValueError, match="none of 3 documents has text"):
        next(iter(make([[{"text": ""}] * 3], None, Specials(bos_id=None), packing=packing)))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(seq_len=1), "seq_len=1 must be at least 2"),
        (
            dict(global_batch_size=6, process_count=4),
            "batch_size=6 must be a positive multiple of the 4",
        ),
        (dict(global_batch_size=0), "batch_size=0 "),
        (
            dict(process_index=2, process_count=2),
            "process_index=2 must be in 0 … process_count-1=1",
        ),
        (dict(packing="best"), "packing='best' is unknown; choose one of concat, first_fit"),
        (dict(seed=-1), "seed=-1 "),
        (dict(num_epochs=0), "num_epochs=0 "),
        (dict(num_workers=-1), "num_workers=-1 "),
        (dict(shuffle_tokens=-1), "shuffle_tokens=-1 "),
        (dict(weights=[1.0, 1.0]), "weights .* must be 1 positive"),
        (dict(weights=[0.0]), "weights .* must be 1 positive"),
        (dict(sources=[]), "sources is empty"),
        (dict(sources=[[]]), "no documents"),
        (dict(sources=[corpus(2, 5), corpus(2, 5)], num_epochs=1), "needs a single source"),
    ],
)
def test_wrong_values_are_told_in_one_line(kwargs, message):
    with pytest.raises(ValueError, match=message) as error:
        make(**(dict(sources=[corpus(3, 9)]) | kwargs))
    assert "\n" not in str(error.value)


def test_make_data_reads_the_standard_library():
    kwargs = dict(source="stdlib", tokenizer="bytes", seq_len=64, batch_size=4, shuffle_tokens=2**12)
    train, heldout = (text.make_data(split=split, **kwargs) for split in ("train", "heldout"))
    batch = next(iter(train))
    window = train.tokenizer.decode(batch["tokens"][0])
    documents = (train.documents[0][i] for i in range(len(train.settings["documents"]) * 10**4))
    assert any(window in train.tokenizer.decode(document) for document in documents)
    assert next(iter(heldout))["tokens"][0, 0] == train.tokenizer.bos_id
    with pytest.raises(ValueError, match="split 'test' is unknown"):
        text.make_data(split="test", **kwargs)


def test_make_data_mixes_and_refuses_tokens_of_another_tokenizer(monkeypatch):
    class Documents(list):
        name, tokenizer = "array_record:/data/c4", None

    sources = {"mix": Mixture((Documents(corpus(9, 9)), Documents(corpus(9, 9))), (0.25, 0.75))}
    sources["tokens"] = Documents(corpus(9, 9))
    sources["tokens"].tokenizer = {"spec": "llama.json", "fingerprint": "abc", "vocab_size": 300}
    monkeypatch.setattr(text.sources_lib, "make_source", lambda spec, split: sources[spec])
    kwargs = dict(seq_len=8, batch_size=2)
    assert text.make_data(source="mix", **kwargs).settings["weights"] == [0.25, 0.75]
    with pytest.raises(ValueError, match=r"of the tokenizer llama.json, not of tokenizer='bytes'"):
        text.make_data(source="tokens", **kwargs)


def test_no_device_is_touched():
    code = """
from jax._src import xla_bridge
from maxlp.data import text
next(iter(text.make_data(seq_len=32, batch_size=2)))
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
