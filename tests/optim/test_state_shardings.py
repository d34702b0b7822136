"""How `opt_state_shardings` shards the state of each kind of transformation."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxlp.numerics.formats import Quantized
from maxlp.parallel import sharding
from maxlp.parallel.opt_state import PerReplica, opt_state_shardings, places
from tests.optim.common import make_optimizer

SPECS = {"kernel": P("fsdp", "tensor"), "scale": P("fsdp")}


def abstract_params():
    """Parameters as shapes on a mesh of 4 × 2, and the mesh."""
    mesh = sharding.make_mesh(fsdp=4, tensor=2)
    shapes = {"kernel": (8, 4), "scale": (8,)}
    return {
        k: jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, SPECS[k]))
        for k, s in shapes.items()
    }, mesh


def initialized(tx, abstract, mesh):
    """The state, initialized already sharded."""
    shardings = opt_state_shardings(tx, abstract, mesh)
    params = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), abstract)
    return jax.jit(tx.init, out_shardings=shardings)(params)


def test_moments_are_sharded_like_their_parameter():
    abstract, mesh = abstract_params()
    adam = initialized(make_optimizer(clip_norm=1.0).tx, abstract, mesh)[1]
    for moment in (adam.mu, adam.nu):
        assert {k: v.sharding.spec for k, v in moment.items()} == SPECS
        assert moment["kernel"].addressable_shards[0].data.shape == (2, 2)
    assert adam.count.sharding.is_fully_replicated


def test_masked_parts_and_factored_moments():
    abstract, mesh = abstract_params()
    tx = optax.partition(
        {
            "factored": optax.scale_by_factored_rms(min_dim_size_to_factor=2),
            "adam": optax.scale_by_adam(),
        },
        {"kernel": "factored", "scale": "adam"},
    )
    state = initialized(tx, abstract, mesh)
    factored = state.inner_states["factored"].inner_state
    assert factored.v_row["kernel"].sharding.is_fully_replicated
    adam = state.inner_states["adam"].inner_state
    assert adam.mu["scale"].sharding.spec == SPECS["scale"]


def test_scales_are_split_like_their_codes_where_the_mesh_divides_them():
    abstract, mesh = abstract_params()
    codes = jax.ShapeDtypeStruct((8, 4), jnp.int8)
    for scales, spec in (((8, 2), P("fsdp", "tensor")), ((8, 1), P("fsdp", None)), ((1, 1), P(None, None))):
        moment = Quantized(codes, jax.ShapeDtypeStruct(scales, jnp.float32))
        placed = places({"kernel": moment}, abstract, mesh)["kernel"]
        assert (placed.codes.spec, placed.scale.spec) == (SPECS["kernel"], spec)


def test_axes_of_a_shorter_dim_are_dropped_where_they_divide_no_other():
    """Of a rank of 3 on 4 × 2 devices: fsdp and tensor together do not divide the other dim of 4."""
    abstract, mesh = abstract_params()
    placed = places({"kernel": jax.ShapeDtypeStruct((3, 4), jnp.float32)}, abstract, mesh)
    assert placed["kernel"].spec == P(None, "tensor")


def test_one_rms_per_tensor_is_replicated():
    abstract, mesh = abstract_params()
    state = initialized(make_optimizer(name="stable_adamw").tx, abstract, mesh)
    assert optax.tree.get(state, "nu")["kernel"].sharding.spec == SPECS["kernel"]
    assert optax.tree.get(state, "rms")["kernel"].sharding.is_fully_replicated


def test_the_axes_of_a_shorter_dim_go_to_the_largest_one_that_it_shares():
    """So that a device holds as small a fraction of low-rank moments as of their kernel."""
    mesh = sharding.make_mesh(fsdp=4, tensor=2)
    place = NamedSharding(mesh, P(None, None, "fsdp"))
    params = {"layers": {"kernel": jax.ShapeDtypeStruct((2, 16, 8), jnp.float32, sharding=place)}}

    def low_rank(params):
        return {"mu": jax.tree.map(lambda p: jnp.zeros((2, 16, 4)), params)}

    found = opt_state_shardings(
        optax.GradientTransformation(low_rank, lambda u, s, p=None: (u, s)), params, mesh
    )
    assert found["mu"]["layers"]["kernel"].spec == P(None, "fsdp", None), "2 layers do not divide by 4"
    params["layers"]["kernel"] = jax.ShapeDtypeStruct((8, 16, 8), jnp.float32, sharding=place)

    def of_eight(params):
        return {"mu": jax.tree.map(lambda p: jnp.zeros((8, 16, 4)), params)}

    found = opt_state_shardings(
        optax.GradientTransformation(of_eight, lambda u, s, p=None: (u, s)), params, mesh
    )
    assert found["mu"]["layers"]["kernel"].spec == P(None, "fsdp", None), "16 is larger than 8"


def test_what_replicas_have_for_themselves_is_split_over_data():
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    place = NamedSharding(mesh, SPECS["kernel"])
    params = {"kernel": jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=place)}
    moments = dict(mu="dynamic8", nu="dynamic8", block_size=16, min_size=0)
    low_bit = make_optimizer(low_bit=moments).tx

    def init(params):
        return PerReplica(jax.tree.map(lambda x: jnp.stack([x, x]), (low_bit.init(params), params)))

    tx = optax.GradientTransformation(init, low_bit.update)
    found = opt_state_shardings(tx, params, mesh).state
    alone = opt_state_shardings(low_bit, params, mesh), {"kernel": place}
    for mine, whole in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        assert mine.spec == P("data", *whole.spec)
