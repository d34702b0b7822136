"""What the pipelines of text and of images with text share: checks, orders, states, worker processes.

The state of an iterator is a dict that JSON can hold:

  {"step": batches yielded so far,
   "streams": {name: where that part of the data stands},
   "settings": what the order of the data depends on}
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags
from grain.experimental import index_shuffle

Batch = dict[str, np.ndarray]
Seeds = tuple[int, ...]


# --- values of a config ---------------------------------------------------------------------------


def check(claims: Mapping[str, bool]) -> None:
    """Raises a `ValueError` with the first message that does not hold."""
    for message, holds in claims.items():
        if not holds:
            raise ValueError(message)


def claims(
    batch_size: int,
    num_epochs: int | None,
    num_workers: int,
    seed: int,
    process_index: int,
    process_count: int,
) -> dict[str, bool]:
    """What every pipeline asks of the values that all of them take, for `check`."""
    return {
        f"process_index={process_index} must be in 0 … process_count-1={process_count - 1}": (
            0 <= process_index < process_count
        ),
        f"batch_size={batch_size} must be a positive multiple of the {process_count} processes": (
            batch_size > 0 and batch_size % process_count == 0
        ),
        f"num_epochs={num_epochs} must be positive, or None for no end": (
            num_epochs is None or num_epochs > 0
        ),
        f"num_workers={num_workers} must not be negative": num_workers >= 0,
        f"seed={seed} must be in 0 … 2**32-1": 0 <= seed < 2**32,
    }


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`; 0 for limit 0."""
    return max((d for d in range(1, min(number, limit) + 1) if number % d == 0), default=0)


# --- orders ---------------------------------------------------------------------------------------


def shuffled(index: int, size: int, seeds: Seeds) -> int:
    """The `index`-th element of a random permutation of `size` numbers."""
    if size <= 2**16:  # there Grain's, which needs no memory, takes up to 25 ms
        return int(_cached_permutation(size, seeds)[index])
    return index_shuffle(index, max_index=size - 1, seed=_one_seed(seeds), rounds=4)


def permutation(size: int, seeds: Seeds) -> np.ndarray:
    """A random permutation int64 [size]."""
    # From raw bits, because NumPy may change what `Generator.permutation` makes of them.
    return np.argsort(np.random.PCG64(seeds).random_raw(size), kind="stable")


_cached_permutation = functools.lru_cache(maxsize=16)(permutation)


@functools.lru_cache(maxsize=16)
def _one_seed(seeds: Seeds) -> int:
    return int(np.random.SeedSequence(seeds).generate_state(1)[0])


# --- states ---------------------------------------------------------------------------------------


def check_settings(saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raises a `ValueError` where a state was saved with other settings than these."""
    for key, value in settings.items():
        if saved.get(key) != value:
            raise ValueError(
                f"data state was saved with {key}={saved.get(key)}, now {key}={value};"
                " resume with what it was, or start the run in a new workdir"
            )


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The states of all processes at one step → the state that any number of processes can take.

    Raises:
      ValueError: the states are of different steps or settings.
    """
    for state in states:
        for key in ("step", "settings"):
            if state[key] != states[0][key]:
                raise ValueError(
                    f"data states of different {key}: {states[0][key]} and {state[key]};"
                    " merge those of one checkpoint"
                )
    streams = {name: part for state in states for name, part in state["streams"].items()}
    return {**states[0], "streams": streams}


# --- worker processes -----------------------------------------------------------------------------


def in_workers(dataset: grain.IterDataset, options: grain.MultiprocessingOptions) -> grain.IterDataset:
    """The same elements, made by other processes."""
    if not flags.FLAGS.is_parsed():  # Grain reads them; only absl programs parse them
        flags.FLAGS.mark_as_parsed()
    # Through pipes: the shared memory of a container is often smaller than a few elements.
    pipes = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
    return grain.experimental.WithOptionsIterDataset(dataset, pipes).mp_prefetch(options)
