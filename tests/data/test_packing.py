"""Packing against slow references."""

import collections
import itertools
import math

import numpy as np
import pytest

from maxlp.data import text
from maxlp.data.estimates import concat_windows, count_windows
from tests.data.windows import BOS, EOS, PAD, assert_equal, corpus, make, take, with_specials


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


def slow_concat(documents, seq_len, most):
    stream = [(token, i) for i, document in enumerate(documents) for token in document]
    windows, previous = [[]], None
    for at, (token, owner) in enumerate(stream):
        held = {owner for _, _, owner, _, _ in windows[-1]}
        if len(windows[-1]) < seq_len and len(held) == most and owner != previous:
            windows[-1][-1] = (windows[-1][-1][0], PAD, *windows[-1][-1][2:])
            windows[-1] += [(PAD, PAD, None, 0, False)] * (seq_len - len(windows[-1]))
        if len(windows[-1]) == seq_len:
            windows.append([])
            previous = None
        target, next_owner = stream[at + 1] if at + 1 < len(stream) else (PAD, None)
        position = position + 1 if owner == previous else 0  # noqa: F821 (set where it restarts)
        windows[-1].append((token, target, owner, position, owner == next_owner))
        previous = owner
    return windows


def slow_first_fit(documents, seq_len, most, windows_per_block):
    done, block = [], [[] for _ in range(windows_per_block)]
    for number, document in enumerate(documents):
        pairs = list(itertools.pairwise(document))
        for begin in range(0, len(pairs), seq_len):
            piece = [
                (token, target, number, position, True)
                for position, (token, target) in enumerate(pairs[begin : begin + seq_len])
            ]
            fitting = [
                window
                for window in block
                if len(window) + len(piece) <= seq_len and len({entry[2] for entry in window}) != most
            ]
            if not fitting:
                done += block
                block = [[] for _ in range(windows_per_block)]
                fitting = block
            fitting[0].extend(piece)
    return done + [window for window in block if window]


@pytest.mark.parametrize(("longest", "seq_len"), [(7, 8), (60, 8), (60, 33), (7, 2)])
@pytest.mark.parametrize("most", [None, 1, 3])
@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_packing_equals_slow_reference(longest, seq_len, packing, most):
    documents = corpus(40, longest)
    config = dict(seq_len=seq_len, packing=packing, max_documents=most, shuffle=False, num_epochs=1)
    dataset = make([documents], **config)
    marked = [with_specials(document) for document in documents]
    if packing == "concat":
        windows = slow_concat(marked, seq_len, most)
    else:
        windows = slow_first_fit(marked, seq_len, most, text.FIRST_FIT_WINDOWS)
    assert_equal(take(iter(dataset)), slow_windows(windows, seq_len, 4))


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_shuffled_epochs_contain_each_token_once(packing):
    documents = [document for document in corpus(60, 50) if len(document["tokens"])]
    batches = take(iter(make([documents], packing=packing, num_epochs=2)))
    successor = {}
    for document in documents:
        marked = with_specials(document)
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


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
@pytest.mark.parametrize("most", [None, 1, 3])
def test_windows_are_counted_as_they_are_filled(most, packing):
    rng = np.random.default_rng(0)
    documents = [{"tokens": np.arange(n, dtype=np.uint32)} for n in rng.integers(0, 40, 300)]
    lengths = np.array([len(with_specials(document)) for document in documents])
    how = dict(packing=packing, max_documents=most, shuffle=False, num_epochs=1, seq_len=16)
    batches = take(iter(make([documents], batch_size=1, shuffle_tokens=0, **how)))
    blocks = int((batches["segment_ids"][..., 0] > 0).sum())
    if packing == "concat":
        assert math.ceil(concat_windows(lengths, 16, most)) == blocks
        return
    found = count_windows(lengths, 16, most)
    assert 0.95 * blocks <= found <= blocks  # blocks of 32 windows are closed with room left


@pytest.mark.parametrize(("mean", "digits", "expected"), [(1000, 3, 0.001), (500, 2, 0.13)])
def test_a_bound_on_documents_costs_the_padding_that_the_docs_state(mean, digits, expected):
    """Rows of 8,192 tokens with at most 16 documents of log-normal lengths, as in docs/performance.md."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(math.log(mean) - 0.5, 1, 200_000).round()).astype(int)
    padding = 1 - lengths.sum() / (8192 * concat_windows(lengths, 8192, 16))
    assert round(padding, digits) == expected
