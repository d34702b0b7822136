import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from maxlp import sharding


def test_one_axis_takes_what_is_left():
    assert dict(sharding.make_mesh(data=2, fsdp=-1, tensor=2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert dict(sharding.make_mesh(data=-1, fsdp=1).shape) == {"data": 8, "fsdp": 1, "tensor": 1}


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

    assert shardings((8, 6))["mlp"]["kernel"].spec == P("fsdp", "tensor")
    with pytest.raises(ValueError, match=r"mlp/kernel: axis 'mlp' of size 7 .* 'tensor' of size 2"):
        shardings((8, 7))


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
    for batch, state in sharding.device_batches(source, mesh, ahead=2):
        assert batch["tokens"].sharding.is_equivalent_to(sharding.batch_sharding(mesh), 2)
        seen.append((int(batch["tokens"][0, 0]), state["taken"]))
        if len(seen) == 3:
            assert source.taken >= 5, "nothing was prepared ahead"
    assert seen == [(i, i) for i in range(1, 8)]
    source.taken = 0
    assert len(list(sharding.device_batches(source, mesh, limit=3))) == 3
    assert source.taken == 3
