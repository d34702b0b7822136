"""Batches on the mesh: the rows that a process reads, and global device arrays made of them."""

import collections
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from maxlp.parallel.sharding import MESH_AXES, RULES, axis_names, batch_sharding, batch_shards

AHEAD = 2  # batches that wait on the devices; `run.intact_batches` counts on this number


class BatchIterator(Protocol):
    """This process's rows of each batch, as arrays by name, and the position in the data."""

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]: ...

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch that was drawn, which a checkpoint saves."""
        ...


def batch_part(mesh: Mesh) -> tuple[int, int]:
    """The part of the global batch that this process reads: (its index, the number of equal parts).

    Processes that hold the same rows (other stages, other parts of the sequence) read the same part.

    Raises:
      ValueError: processes whose rows partially overlap.
    """
    rows = np.indices(mesh.devices.shape)
    which = [MESH_AXES.index(axis) for axis in axis_names(RULES["batch"])]
    shard = np.ravel_multi_index([rows[i] for i in which], [mesh.devices.shape[i] for i in which])
    held: dict[int, set[int]] = {}
    for device, part in zip(mesh.devices.flat, shard.flat, strict=True):
        held.setdefault(device.process_index, set()).add(int(part))
    parts = sorted({tuple(sorted(one)) for one in held.values()})
    if sum(map(len, parts)) != batch_shards(mesh):
        raise ValueError(
            f"mesh {dict(mesh.shape)}: the rows of different processes partially overlap; choose "
            "mesh.context × mesh.tensor as a multiple or a divisor of the devices of a process"
        )
    return parts.index(tuple(sorted(held[jax.process_index()]))), len(parts)


def global_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Global device arrays from this process's rows of the batch (its `batch_part`)."""
    sharding = batch_sharding(mesh)
    return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}


def one_pass(data: Any, mesh: Mesh, limit: int | None = None) -> Iterator[dict]:
    """Global device batches of one pass over the data, whose iterator is closed at the end."""
    with contextlib.closing(iter(data)) as batches:
        yield from (batch for batch, _ in device_batches(batches, mesh, limit))


def device_batches(
    batches: BatchIterator, mesh: Mesh, limit: int | None = None
) -> Iterator[tuple[dict[str, jax.Array], dict]]:
    """Global device batches, transferred ahead of their use, each with the iterator's state after it.

    A checkpoint must save the state that came with the last batch trained on: the iterator itself is
    ahead by the batches that wait here.

    Args:
      limit: number of batches to take; None for all.
    """
    waiting: collections.deque = collections.deque()
    for batch in itertools.islice(batches, limit):
        waiting.append((global_batch(batch, mesh), batches.get_state()))
        if len(waiting) > AHEAD:
            yield waiting.popleft()
    yield from waiting
