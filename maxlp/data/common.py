"""What the two pipelines share: range checks, permutations, iterators, checks of states."""

import functools
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self

import grain
import numpy as np
from absl import logging
from grain.experimental import index_shuffle

from maxlp.schema import Range

Batch = dict[str, np.ndarray]
Seeds = tuple[int, ...]
Workers = Annotated[int, Range(at_least=0, at_most=1024)]

CACHED = 2**16  # up to this size permutations are kept in memory: Grain's shuffle may take 25 ms per number
ROUNDS = 16  # of Grain's shuffle; after 4, its default, neighbours stay near each other at many sizes
# In the settings of a state:
SHUFFLE_ROUNDS = "shuffle_rounds"
FINGERPRINTS = "fingerprints"  # those of the sources, see `data.fingerprint`
CHAT_FINGERPRINT = "chat_template"  # that of the chat template, if there are conversations
NAMES = {  # in messages, of settings that are not keys of the section data
    "seed": "train.seed",
    "tokenizer": "fingerprint of data.tokenizer",
    CHAT_FINGERPRINT: "fingerprint of the chat template of data.tokenizer",
    **{key: f"{key} of data.source" for key in ("documents", "examples", "weights")},
}


def check_process(batch_size: int, seed: int, process_index: int, process_count: int) -> None:
    """Raises a `ValueError` for an invalid argument among those that both pipelines take."""
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index={process_index} must be in 0 … process_count-1={process_count - 1}"
        )
    if batch_size % process_count:
        raise ValueError(f"batch_size={batch_size} must be a multiple of the {process_count} processes")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must be in 0 … 2**32-1")


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return max(d for d in range(1, min(number, limit) + 1) if number % d == 0)


def shuffled(index: int, size: int, seeds: Seeds) -> int:
    """Element `index` of a random permutation of the numbers below `size`."""
    if size <= CACHED:
        return int(_cached_permutation(size, seeds)[index])
    # The largest number is odd: where it is a power of 4, Grain never gives it, and another number twice.
    while (index := index_shuffle(index, (size - 1) | 1, _single_seed(seeds), ROUNDS)) >= size:
        pass
    return index


def shuffle_settings(sizes: Iterable[int]) -> dict[str, int]:
    """What a state records about `shuffled` orders of these sizes."""
    return {SHUFFLE_ROUNDS: ROUNDS} if max(sizes) > CACHED else {}


def permutation(size: int, seeds: Seeds) -> np.ndarray:
    """A random permutation, int64 [size]."""
    # Made from raw bits, because `Generator.permutation` may change between versions of NumPy.
    return np.argsort(np.random.PCG64(seeds).random_raw(size), kind="stable")


_cached_permutation = functools.lru_cache(maxsize=16)(permutation)


@functools.lru_cache(maxsize=16)
def _single_seed(seeds: Seeds) -> int:
    return int(np.random.SeedSequence(seeds).generate_state(1)[0])


class PrefetchingIterator:
    """The iterator of a pipeline, which makes batches of what Grain computes ahead."""

    _prefetched: grain.DatasetIterator | None = None

    def __iter__(self) -> Self:
        return self

    def _open(self) -> grain.DatasetIterator:
        """Opens what batches are made of, at the current position."""
        raise NotImplementedError

    def start_prefetch(self) -> grain.DatasetIterator:
        """Starts making the first batches, so that the first `next` waits less."""
        if self._prefetched is None:
            self._prefetched = self._open()
            self._prefetched.start_prefetch()
        return self._prefetched

    def close(self) -> None:
        """Ends threads and workers; the iterator can be used again, from its current position."""
        if self._prefetched is not None:
            self._prefetched.close()
        self._prefetched = None


def check_settings(saved: Mapping[str, Any], settings: Mapping[str, Any], allow_change: bool) -> set[str]:
    """Compares the settings under which a state was saved with the current ones; returns changed keys.

    Raises:
      ValueError: there is a change, and it is not allowed.
    """
    changed = {key: value for key, value in settings.items() if saved.get(key) != value}
    if FINGERPRINTS not in saved:  # by an earlier version
        changed.pop(FINGERPRINTS, None)
    if changed.pop(SHUFFLE_ROUNDS, None):
        logging.warning(
            "the version that saved the run shuffled more than %s documents or examples less well: the rest"
            " of the epoch comes in another order, so that some come twice and some never",
            f"{CACHED:,}",
        )
    if changed and not allow_change:
        key = next(iter(changed))
        raise ValueError(
            f"{_described(key, saved.get(key), changed[key])}; restore what the run was trained on, use a"
            " new workdir, or add --allow_change"
        )
    for key, value in changed.items():
        logging.warning("%s; allowed by --allow_change", _described(key, saved.get(key), value))
    return set(changed)


def _described(key: str, old: Any, new: Any) -> str:
    if key == FINGERPRINTS:
        old, new = (" + ".join(value) for value in (old, new))
        return (
            f"the files of data.source have changed since the run was saved: fingerprint {old}, now {new}"
        )
    return f"{NAMES.get(key, f'data.{key}')}: {old} when the run was saved, now {new}"
