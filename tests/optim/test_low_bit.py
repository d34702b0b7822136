import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxlp.numerics.blockwise import FORMATS
from maxlp.optim.galore import galore
from maxlp.optim.low_bit import bytes_per_parameter, low_bit, state_bytes
from maxlp.optim.stable_adamw import scale_by_stable_adam
from maxlp.parallel import sharding
from maxlp.parallel.opt_state import opt_state_shardings
from tests.optim.common import assert_trees_close, assert_trees_equal, random_tree, run

ADAM = optax.scale_by_adam(0.9, 0.98, 1e-8)
SHAPES = {"layers": {"attn": {"kernel": (2, 16, 32)}, "norm": {"scale": (2, 16)}}}
EVERY = {
    "fp8": dict(mu="float8_e4m3fn", nu="float8_e5m2"),
    "fp8_blocks": dict(mu="float8_e4m3fn", nu="float8_e5m2", block_size=16),
    "dynamic8": dict(mu="dynamic8", nu="dynamic8", block_size=16),
    "float16": dict(mu="float16", nu="float16"),
    "bfloat16": dict(mu="bfloat16", nu="bfloat16"),
}


def gradients(steps):
    return [random_tree(SHAPES, i) for i in range(steps)]


@pytest.mark.parametrize(("name", "worst"), zip(EVERY, [0.12, 0.12, 0.05, 0.002, 0.02], strict=True))
def test_thirty_steps_stay_near_those_of_float32(name, worst):
    params, grads = random_tree(SHAPES, 99), gradients(30)
    got, _ = run(low_bit(ADAM, **EVERY[name], min_size=64), params, grads)
    want, _ = run(ADAM, params, grads)
    moved = lambda tree: tree["layers"]["attn"]["kernel"] - params["layers"]["attn"]["kernel"]  # noqa: E731
    error = jnp.linalg.norm(moved(got) - moved(want)) / jnp.linalg.norm(moved(want))
    assert 0 < error < worst
    assert_trees_equal(got["layers"]["norm"], want["layers"]["norm"])


def test_float32_is_the_inner_transformation_to_the_bit():
    params, grads = random_tree(SHAPES, 99), gradients(5)
    got, _ = run(low_bit(ADAM, mu="float32", nu="float32", min_size=0), params, grads)
    assert_trees_equal(got, run(ADAM, params, grads)[0])


def test_bytes_are_those_of_the_codes_and_scales():
    params = random_tree({"layers": {"kernel": (2, 64, 128)}}, 0)
    n = 2 * 64 * 128
    counts = 8  # the two counters
    for name, options, expected in [
        ("fp8", EVERY["fp8"], 2 * n + 2 * 2 * 4),
        ("dynamic8", EVERY["dynamic8"] | {"block_size": 64}, 2 * n + 2 * n // 64 * 4),
        ("float16", EVERY["float16"], 4 * n + 2 * 2 * 4),
    ]:
        state = low_bit(ADAM, **options).init(params)
        assert state_bytes(state) == expected + counts, name
        measured = sum(x.nbytes for x in jax.tree.leaves(state))
        assert measured == state_bytes(state) == state_bytes(jax.eval_shape(lambda s: s, state))
    assert bytes_per_parameter(ADAM.init(params), params) == pytest.approx(8, rel=1e-3)
    assert bytes_per_parameter(low_bit(ADAM).init(params), params) == pytest.approx(2, rel=2e-3)


def test_small_tensors_of_a_layer_are_left_alone():
    params = random_tree({"layers": {"kernel": (64, 8, 8), "big": (2, 64, 64)}}, 0)
    mu = low_bit(ADAM).init(params).inner.mu["layers"]
    assert mu["kernel"].dtype == jnp.float32, "4096 entries, but 64 in a layer"
    assert mu["big"].codes.dtype == jnp.float8_e4m3fn


def test_a_second_moment_that_underflows_does_not_blow_up_the_step():
    """One large gradient in the tensor; the others' v is 10^-16 of its, below the least of e5m2."""
    params = {"kernel": jnp.zeros((8, 16))}
    grads = {"kernel": jnp.full((8, 16), 1e-8).at[0, 0].set(1.0)}
    tx = low_bit(optax.scale_by_adam(0.9, 0.98, 1e-16), min_size=0)
    got, state = run(tx, params, [grads] * 10)
    assert (jnp.abs(got["kernel"]) < 20).all()
    assert (state.inner.nu["kernel"].codes.astype(jnp.float32) > 0).all()


def test_stochastic_rounding_keeps_what_rounding_to_nearest_loses():
    """With b2 = 0.999 a bfloat16 moment cannot move by 1/1000 of itself; its average can."""
    params = {"kernel": jnp.zeros((64, 64))}
    grads = [{"kernel": jnp.ones((64, 64))}] * 20 + [{"kernel": jnp.full((64, 64), 0.5)}] * 300
    adam = optax.scale_by_adam(0.9, 0.999)
    _, state = run(low_bit(adam, mu="float32", nu="bfloat16"), params, grads)
    _, exact = run(adam, params, grads)
    want = float(exact.nu["kernel"][0, 0])
    assert float(state.inner.nu["kernel"].codes.astype(jnp.float32).mean()) == pytest.approx(want, rel=0.01)
    nearest = jnp.bfloat16(0.0)
    for g in grads:
        nearest = (0.999 * nearest.astype(jnp.float32) + 0.001 * g["kernel"][0, 0] ** 2).astype(
            jnp.bfloat16
        )
    assert abs(float(nearest) / want - 1) > 0.05


@pytest.mark.parametrize("name", ["fp8", "dynamic8"])
def test_around_stable_adam_and_galore(name):
    shapes = {"layers": {"attn": {"q_proj": {"kernel": (2, 16, 64)}}}}
    params, grads = random_tree(shapes, 9), [random_tree(shapes, i) for i in range(6)]
    inner = galore(scale_by_stable_adam(), rank=4, update_proj_gap=3, moments="reproject")
    got, state = run(low_bit(inner, **EVERY[name], min_size=0), params, grads)
    want, _ = run(inner, params, grads)
    assert optax.tree.get(state, "rms")["layers"]["attn"]["q_proj"]["kernel"].shape == (2,)
    assert state.inner.inner.nu["layers"]["attn"]["q_proj"]["kernel"].codes.shape == (2, 4, 64)
    assert state.inner.subspaces["layers"]["attn"]["q_proj"]["kernel"].projector.dtype == jnp.float32
    assert_trees_close(got, want, atol=0.3)


def test_codes_and_scales_lie_like_their_parameter():
    mesh = sharding.make_mesh(fsdp=4, tensor=2)
    where = NamedSharding(mesh, P(None, "fsdp", "tensor"))
    abstract = {"layers": {"kernel": jax.ShapeDtypeStruct((2, 64, 128), jnp.float32, sharding=where)}}
    for options, scale_spec in ((dict(block_size=16), where.spec), ({}, P(None, None, None))):
        tx = low_bit(ADAM, **options)
        shardings = opt_state_shardings(tx, abstract, mesh)
        state = jax.jit(tx.init, out_shardings=shardings)({"layers": {"kernel": jnp.ones((2, 64, 128))}})
        nu = state.inner.nu["layers"]["kernel"]
        assert nu.codes.sharding == where
        assert nu.scale.sharding.is_equivalent_to(NamedSharding(mesh, scale_spec), 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mu": "fp8"}, r"mu='fp8' is unknown, choose one of: float32, float8_e4m3fn, "),
        ({"nu": "int4"}, r"nu='int4' is unknown"),
        ({"block_size": -1}, r"block_size=-1"),
        ({"inner": optax.scale_by_factored_rms()}, r"mu and nu, which this optimizer's state has not"),
    ],
)
def test_errors_are_one_line_with_key_and_value(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        low_bit(**({"inner": ADAM} | changes)).init(random_tree(SHAPES, 0))
    assert "\n" not in str(error.value)


def test_every_format_is_documented():
    import maxlp.numerics.blockwise as module

    assert all(name in module.__doc__ for name in FORMATS)
