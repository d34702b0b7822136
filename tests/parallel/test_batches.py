"""The rows that each process reads, and batches that are transferred ahead of their use."""

import types

import jax
import numpy as np
import pytest

from maxlp.parallel import sharding
from maxlp.parallel.batches import AHEAD, batch_part, device_batches, global_batch


def parts(monkeypatch, processes: int, **sizes: int) -> list[tuple[int, int]]:
    """`batch_part` of every process, for eight devices spread over the processes in order."""
    shape = sharding.resolve_axes(8, **{"fsdp": 1} | sizes)
    devices = [types.SimpleNamespace(process_index=i * processes // 8) for i in range(8)]
    grid = np.array(devices).reshape(tuple(shape.values()))
    mesh = types.SimpleNamespace(devices=grid, shape=shape)
    found = []
    for process in range(processes):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        found.append(batch_part(mesh))
    return found


@pytest.mark.parametrize(
    ("processes", "sizes", "expected"),
    [
        (4, dict(data=2, fsdp=4), [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (4, dict(fsdp=2, context=4), [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (4, dict(stage=2, fsdp=2, tensor=2), [(0, 2), (1, 2), (0, 2), (1, 2)]),
        (2, dict(stage=2, fsdp=4), [(0, 1), (0, 1)]),
    ],
)
def test_processes_read_different_rows_only_if_they_hold_different_rows(
    processes, sizes, expected, monkeypatch
):
    assert parts(monkeypatch, processes, **sizes) == expected


def test_each_device_holds_only_the_rows_of_its_part_of_the_batch():
    tokens = np.arange(8 * 3).reshape(8, 3)
    batch = global_batch({"tokens": tokens}, sharding.make_mesh(data=2, fsdp=2, tensor=2))
    np.testing.assert_array_equal(batch["tokens"], tokens)
    assert {shard.data.shape for shard in batch["tokens"].addressable_shards} == {(2, 3)}


def test_processes_whose_rows_overlap_in_part_are_refused():
    devices = [types.SimpleNamespace(process_index=i) for i in (0, 0, 0, 1, 1, 1, 2, 2)]
    shape = sharding.resolve_axes(8, fsdp=4, tensor=2)
    mesh = types.SimpleNamespace(devices=np.array(devices).reshape(tuple(shape.values())), shape=shape)
    with pytest.raises(ValueError, match="the rows of different processes partially overlap"):
        batch_part(mesh)


class Batches:
    """Seven batches, and a state that counts those taken."""

    taken = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.taken == 7:
            raise StopIteration
        self.taken += 1
        return {"tokens": np.full((8, 2), self.taken, np.int32)}

    def get_state(self):
        return {"taken": self.taken}


def test_batches_are_transferred_ahead_and_keep_their_own_state():
    """A checkpoint must hold the state of the last batch used, not of the last one fetched."""
    mesh, source = sharding.make_mesh(), Batches()
    found = []
    for batch, state in device_batches(source, mesh):
        assert batch["tokens"].sharding.is_equivalent_to(sharding.batch_sharding(mesh), 2)
        found.append((int(batch["tokens"][0, 0]), state["taken"]))
        assert source.taken == min(len(found) + AHEAD, 7), "host memory holds no more than these"
    assert found == [(i, i) for i in range(1, 8)]


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_no_batch_is_taken_beyond_the_limit(limit):
    source = Batches()
    assert len(list(device_batches(source, sharding.make_mesh(), limit=limit))) == limit
    assert source.taken == limit
