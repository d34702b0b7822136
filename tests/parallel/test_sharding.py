"""The mesh and the table from logical axes to mesh axes."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from maxlp.nn import layers
from maxlp.parallel import sharding

# --- the mesh -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        (dict(data=2, fsdp=-1, tensor=2), (1, 2, 2, 1, 2)),
        (dict(data=-1, fsdp=1), (1, 8, 1, 1, 1)),
        (dict(stage=2, context=2), (2, 1, 2, 2, 1)),
        (dict(dcn_data=2, data=2, fsdp=2), (1, 4, 2, 1, 1)),
    ],
)
def test_one_axis_takes_the_remaining_devices(axes, sizes):
    assert tuple(sharding.resolve_axes(8, **{"fsdp": -1} | axes).values()) == sizes
    if "dcn_data" not in axes:  # which needs several processes or slices
        assert tuple(sharding.make_mesh(**axes).shape.values()) == sizes


def test_dcn_data_can_be_the_number_of_slices_or_hosts():
    def devices(platform, hosts, slices=1):
        return [
            types.SimpleNamespace(platform=platform, process_index=h, slice_index=i)
            for i in range(slices)
            for h in range(hosts)
            for _ in range(4)
        ]

    assert set(sharding.dcn_sizes(jax.devices())) == {1}
    assert set(sharding.dcn_sizes(devices("gpu", hosts=4))) == {1, 4}
    assert set(sharding.dcn_sizes(devices("tpu", hosts=4))) == {1}
    assert set(sharding.dcn_sizes(devices("tpu", hosts=4, slices=2))) == {2}  # no other axis spans slices


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (dict(data=3), "the number of devices, 8, is not a multiple of 3"),
        (dict(fsdp=4), "the number of devices, 8, is not 4"),
        (dict(fsdp=16), "the number of devices, 8, is not 16"),
        (dict(data=-1), "at most one of stage, data, fsdp, context, tensor may be -1"),
        (dict(fsdp=0), "sizes must be positive"),
        (dict(dcn_data=3), "is not a multiple of 3"),
        (dict(dcn_data=0), "sizes must be positive"),
    ],
)
def test_impossible_sizes_are_named(axes, message):
    [(key, size)] = axes.items()
    with pytest.raises(ValueError, match=rf"mesh\.{key}={size}\b.*{message}"):
        sharding.make_mesh(**axes)


def test_a_mesh_of_a_single_device_does_not_fit_more():
    with pytest.raises(ValueError, match=r"^mesh has one device: the number of devices, 8, is not 1;"):
        sharding.resolve_axes(8)


def test_a_mesh_is_described_in_words():
    assert sharding.describe(dict(stage=1, data=1, fsdp=4, context=1, tensor=2)) == "fsdp 4 × tensor 2"
    assert sharding.describe(dict(fsdp=1)) == "one device"


# --- parameters -----------------------------------------------------------------------------------------


def test_kernels_are_split_by_their_logical_axes_and_a_misfit_is_named():
    mesh = sharding.make_mesh(fsdp=4, tensor=2)

    def shardings(shape):
        kernel = nnx.Param(
            jax.ShapeDtypeStruct(shape, "float32"), out_sharding=("embed", "mlp"), eager_sharding=False
        )
        return sharding.param_shardings(nnx.State({"mlp": {"kernel": kernel}}), mesh)

    assert shardings((8, 6))["mlp"]["kernel"].spec == P(("fsdp", "context"), "tensor")
    with pytest.raises(ValueError, match=r"^mesh\.tensor=2 .* axis 'mlp' of size 7 of .*mlp/kernel"):
        shardings((8, 7))


def test_the_size_in_the_message_of_a_misfit_divides_every_parameter():
    """The towers of a CLIP have different widths."""

    def kernel(dim):
        shape = jax.ShapeDtypeStruct((dim, 3), "float32")
        return nnx.Param(shape, out_sharding=("embed", None), eager_sharding=False)

    variables = nnx.State({"text": kernel(12), "visual": kernel(10)})
    with pytest.raises(ValueError, match=r"^mesh\.fsdp=8 does .* of size 12 of text; 2 divides all of"):
        sharding.param_shardings(variables, sharding.abstract_mesh({"fsdp": 8}))
    sharding.param_shardings(variables, sharding.abstract_mesh({"fsdp": 2, "data": 4}))


@pytest.mark.parametrize("V", [4, 130], ids=["round", "padded to be scattered"])
def test_gathered_params_are_whole_and_their_gradient_is_the_sum_over_the_copies(V):
    """One copy for each part of batch and sequence; only the tensor axis splits a copy."""
    mesh = sharding.make_mesh(fsdp=2, context=2, tensor=2)
    kernel = jnp.arange(8.0 * V).reshape(8, V)

    @jax.jit
    def gather(kernel, g_P):
        variables = nnx.State({"kernel": layers.param(kernel, ("embed", "vocab"))})
        copies, vjp = jax.vjp(sharding.all_gather_params, variables)
        gradient = vjp(nnx.State({"kernel": copies["kernel"].replace(g_P)}))[0]
        return copies["kernel"][...], gradient["kernel"][...]

    g_P = jnp.arange(4.0)[:, None, None] + jnp.broadcast_to(jnp.arange(1.0, V + 1), (4, 8, V))
    with jax.set_mesh(mesh):
        kernel = jax.device_put(kernel, jax.P(("fsdp", "context"), "tensor"))
        copies, gradient = gather(kernel, jax.device_put(g_P, jax.P(("fsdp", "context"), None, "tensor")))
    np.testing.assert_array_equal(copies, np.broadcast_to(kernel, (4, 8, V)))
    assert copies.addressable_shards[0].data.shape == (1, 8, V // 2)
    of_row = 0 + 1 + 2 + 3 + 4 * np.arange(1.0, V + 1)
    np.testing.assert_array_equal(gradient, np.broadcast_to(of_row, (8, V)))
    assert gradient.addressable_shards[0].data.shape == (2, V // 2)


# --- activations ----------------------------------------------------------------------------------------


def test_a_constraint_leaves_dims_whole_that_do_not_divide():
    x = jnp.ones((4, 6, 8))
    assert sharding.constrain(x, "batch", "act_seq", "act_embed") is x  # without a mesh
    with jax.set_mesh(sharding.make_mesh(fsdp=2, tensor=4)):
        y = jax.jit(lambda x: sharding.constrain(x, "batch", "act_seq", "act_mlp"))(x)
    assert y.addressable_shards[0].data.shape == (2, 6, 2)


def test_chunks_take_a_part_of_every_device():
    """Each chunk holds tokens of all parts of batch and sequence, so that splitting moves nothing."""
    B, S, n = 4, 16, 2
    positions = jnp.arange(B * S).reshape(B, S)
    with jax.set_mesh(sharding.make_mesh(fsdp=2, context=2, tensor=2)):
        chunks = jax.jit(lambda x: sharding.split_chunks(x, n))(positions)
    expected = np.arange(B * S).reshape(2, B // 2, 2, n, S // (2 * n)).transpose(3, 0, 2, 1, 4)
    np.testing.assert_array_equal(chunks, expected.reshape(n, 4, B // 2, S // (2 * n)))
    assert chunks.addressable_shards[0].data.shape == (n, 1, B // 2, S // (2 * n))


def test_the_number_of_chunks_is_lowered_until_it_divides_the_sequence():
    """Of 4 and 6, the largest common divisor is 2."""
    assert sharding.split_chunks(jnp.zeros((2, 6, 5)), 4).shape == (2, 1, 2, 3, 5)


def test_gradients_are_padded_to_round_sizes_by_at_most_a_32nd():
    for n in range(1, 5000):
        size = sharding._round_size(n)
        assert n <= size <= n * 33 / 32
        assert size.bit_length() - (size & -size).bit_length() <= 6, "at most 7 significant bits"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replicas_look_up_rows_of_a_table_that_is_split_both_ways(dtype):
    """Also the gradient; in bfloat16 XLA for CPUs aborted, see `sharding.lookup`."""
    table_VD = jnp.arange(64.0).reshape(8, 8).astype(dtype)
    ids_BS = jnp.array([[0, 7], [3, 4]])
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)

    def of_replica(table_VD, ids_BS):
        found_BSD, vjp = jax.vjp(lambda table: sharding.lookup(table, ids_BS), table_VD)
        return found_BSD, vjp(2 * found_BSD)[0][None]

    with jax.set_mesh(mesh):
        share = jax.shard_map(
            of_replica,
            in_specs=(P(), P("data")),
            out_specs=(P("data"), P("data")),
            axis_names={"data"},
            check_vma=False,
        )
        table = jax.device_put(table_VD, jax.NamedSharding(mesh, P("tensor", "fsdp")))
        found_BSD, grads = jax.jit(share)(table, ids_BS)
    np.testing.assert_array_equal(found_BSD, table_VD[ids_BS])
    expected = jnp.zeros_like(table_VD).at[ids_BS].add(2 * table_VD[ids_BS])
    np.testing.assert_array_equal(jnp.sum(grads, axis=0), expected)
