"""Documents of distinct tokens, and batches as stacked arrays."""

import dataclasses
import json
import sys

import numpy as np

from maxlp.data import merge_states, text

BOS, EOS, PAD = 1, 2, 0
KEYS = ("tokens", "targets", "segment_ids", "positions", "loss_mask")


@dataclasses.dataclass
class Specials:
    bos_id: int = BOS
    eos_id: int = EOS
    pad_id: int = PAD
    fingerprint: str = "specials"

    def encode(self, text):
        return np.array([int(word) for word in text.split()], np.int32)


def corpus(num_documents, longest, seed=0, first=0):
    """Documents whose tokens are all different, so that each identifies its document."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest, num_documents)
    return [
        {"tokens": 10 + (first + i) * longest + np.arange(length, dtype=np.uint32)}
        for i, length in enumerate(lengths)
    ]


def with_specials(document):
    return [BOS, *document["tokens"].tolist(), EOS] if len(document["tokens"]) else []


def make(sources, weights=None, tokenizer=None, seed=0, process_index=0, process_count=1, **config):
    """A dataset of small windows."""
    return text.make_dataset(
        sources,
        weights or [1.0] * len(sources),
        tokenizer or Specials(),
        text.TextDataConfig(
            **(
                dict(source="unread", tokenizer="unread", seq_len=8, batch_size=4, shuffle_tokens=96)
                | config
            )
        ),
        seed=seed,
        process_index=process_index,
        process_count=process_count,
    )


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


def assert_resumes(make_dataset, expected, stop, before, counts):
    """From the states of some processes after ``stop`` steps, any number of processes continues exactly.

    Args:
      make_dataset: takes ``process_index`` and ``process_count``.
      expected: the batches of one process, from the start.
      before: the number of processes that save.
      counts: the numbers of processes that continue.
    """
    states = []
    for i in range(before):
        iterator = iter(make_dataset(process_index=i, process_count=before))
        if stop:
            take(iterator, stop)
        states.append(iterator.get_state())
    merged = json.loads(json.dumps(merge_states(states)))
    rest = {key: array[stop:] for key, array in expected.items()}
    for count in counts:
        parts = []
        for i in range(count):
            iterator = iter(make_dataset(process_index=i, process_count=count))
            next(iterator)  # the state replaces the position
            iterator.set_state(merged)
            assert iterator.get_state()["step"] == stop
            parts.append(take(iterator, len(rest["tokens"])))
        assert_equal(join(parts), rest, stop=stop, process_count=count)
