"""The training state is initialized in its shards, and its abstract form describes it."""

import jax
import numpy as np
import optax
import pytest

from maxlp.core.train_state import abstract_state, init_state, num_params, shardings
from maxlp.precision import DynamicLossScale
from tests.fixtures import make_llama, make_mesh, precision_config

TX = optax.adamw(1e-3)
GATES = {"loss_scale": DynamicLossScale()}


def sharded_init(mesh, **model) -> jax.stages.Compiled:
    make_model = make_llama(**model)
    _, abstract = abstract_state(make_model, TX, mesh)
    init = jax.jit(lambda: init_state(make_model, TX, 0), out_shardings=shardings(abstract))
    return init.lower().compile()


@pytest.mark.full
def test_each_device_computes_only_its_shards():
    """Each of 8 devices holds an eighth of the state, and at no time the whole."""
    sizes = dict(embed_dim=256, mlp_dim=1024, vocab_size=4096)
    whole = sharded_init(make_mesh(), **sizes).memory_analysis()
    shard = sharded_init(make_mesh(fsdp=8), **sizes).memory_analysis()
    assert shard.output_size_in_bytes < whole.output_size_in_bytes / 8 * 1.05
    assert shard.temp_size_in_bytes < whole.output_size_in_bytes / 8


def test_the_mesh_does_not_change_the_initial_state():
    expected = sharded_init(make_mesh())()
    state = sharded_init(make_mesh(fsdp=4, tensor=2))()
    kernel = state["params"]["layers"]["mlp"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 8
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(expected))


def test_the_abstract_state_has_the_structure_shapes_and_dtypes_of_the_state():
    make_model = make_llama(precision_config("fp8_delayed", history=4), param_dtype="bfloat16")
    mesh = make_mesh(fsdp=4, tensor=2)
    _, abstract = abstract_state(make_model, TX, mesh, GATES)
    state = jax.eval_shape(lambda: init_state(make_model, TX, 0, GATES))
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for described, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (described.shape, described.dtype) == (leaf.shape, leaf.dtype)
    assert {place.mesh for place in jax.tree.leaves(shardings(abstract))} == {mesh}
    assert set(state) == {"params", "model_state", "opt_state", "step", "loss_scale"}
    assert len(jax.tree.leaves(state["model_state"])) == 7 * 3, (
        "one history for each operand of each matmul"
    )


def test_a_parameter_that_the_mesh_does_not_divide_is_named():
    message = r"^mesh\.tensor=2 does not divide the axis 'mlp' of size 97 of layers/mlp/\w+/kernel; 1 "
    with pytest.raises(ValueError, match=message):
        abstract_state(make_llama(mlp_dim=97), TX, make_mesh(tensor=2))


def test_the_number_of_parameters_counts_scalars():
    shapes = {
        "a": jax.ShapeDtypeStruct((2, 3), "float32"),
        "b": {"c": jax.ShapeDtypeStruct((), "bfloat16")},
    }
    assert num_params(shapes) == 7
