import math

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from maxlp.parallel import sharding
from maxlp.parallel.batches import batch_part, device_batches


def test_one_axis_takes_what_is_left():
    sizes = lambda **axes: tuple(sharding.make_mesh(**axes).shape.values())  # noqa: E731
    assert sizes(data=2, fsdp=-1, tensor=2) == (1, 2, 2, 1, 2)
    assert sizes(data=-1, fsdp=1) == (1, 8, 1, 1, 1)
    assert sizes(stage=2, context=2) == (2, 1, 2, 2, 1)


@pytest.mark.parametrize(
    "sizes", [dict(data=3), dict(data=-1), dict(fsdp=0), dict(fsdp=16), dict(fsdp=4), dict(dcn_data=3)]
)
def test_impossible_sizes_are_named(sizes):
    with pytest.raises(ValueError, match=rf"mesh.{next(iter(sizes))}={next(iter(sizes.values()))}"):
        sharding.make_mesh(**sizes)


def test_kernel_is_split_by_its_names_and_a_misfit_is_named():
    mesh = sharding.make_mesh(fsdp=4, tensor=2)

    def shardings(shape):
        kernel = nnx.Param(
            jax.ShapeDtypeStruct(shape, "float32"), out_sharding=("embed", "mlp"), eager_sharding=False
        )
        return sharding.param_shardings(nnx.State({"mlp": {"kernel": kernel}}), mesh)

    assert shardings((8, 6))["mlp"]["kernel"].spec == P(("fsdp", "context"), "tensor")
    with pytest.raises(ValueError, match=r"mlp/kernel: axis 'mlp' of size 7 .* by mesh\.tensor=2"):
        shardings((8, 7))


def test_processes_read_different_rows_only_where_they_hold_different_rows(monkeypatch):
    class Device:
        def __init__(self, process_index):
            self.process_index = process_index

    def parts(processes, **sizes):
        shape = tuple(sharding.resolve_axes(8, **{"fsdp": 1} | sizes).values())
        devices = np.array([Device(i * processes // 8) for i in range(8)]).reshape(shape)
        mesh = type("Mesh", (), {"devices": devices, "empty": False, "shape": sizes})()
        monkeypatch.setattr(
            sharding, "batch_shards", lambda mesh: math.prod(sizes.get(a, 1) for a in ("data", "fsdp"))
        )
        found = []
        for process in range(processes):
            monkeypatch.setattr(jax, "process_index", lambda process=process: process)
            found.append(batch_part(mesh))
        return found

    assert parts(4, data=2, fsdp=4) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert parts(4, fsdp=2, context=4) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert parts(4, stage=2, fsdp=2, tensor=2) == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert parts(2, stage=2, fsdp=4) == [(0, 1), (0, 1)]


def test_batches_run_ahead_but_keep_their_own_state():
    """A checkpoint must hold the state of the last batch used, not of the last one fetched."""

    class Batches:
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

    mesh, source = sharding.make_mesh(), Batches()
    seen = []
    for batch, state in device_batches(source, mesh, ahead=2):
        assert batch["tokens"].sharding.is_equivalent_to(sharding.batch_sharding(mesh), 2)
        seen.append((int(batch["tokens"][0, 0]), state["taken"]))
        if len(seen) == 3:
            assert source.taken >= 5, "nothing was prepared ahead"
    assert seen == [(i, i) for i in range(1, 8)]
    source.taken = 0
    assert len(list(device_batches(source, mesh, limit=3))) == 3
    assert source.taken == 3
