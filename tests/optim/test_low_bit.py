import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxlp.optim import GaloreConfig, LowBitConfig, state_bytes
from maxlp.optim.galore import galore
from maxlp.optim.low_bit import low_bit, warnings
from maxlp.optim.stable_adamw import scale_by_stable_adam
from maxlp.parallel import sharding
from maxlp.parallel.opt_state import opt_state_shardings
from tests.optim.common import assert_trees_close, assert_trees_equal, random_tree, run

ADAM = optax.scale_by_adam(0.9, 0.98, 1e-8)
SHAPES = {"layers": {"attn": {"kernel": (2, 16, 32)}, "norm": {"scale": (2, 16)}}}
FP8 = dict(mu="float8_e4m3fn", nu="float8_e5m2")
EVERY = {
    "fp8": FP8,
    "fp8_blocks": dict(mu="float8_e4m3fn", nu="float8_e5m2", block_size=16),
    "dynamic8": dict(mu="dynamic8", nu="dynamic8", block_size=16),
    "companded8": dict(mu="companded8", nu="companded8", block_size=32),
    "float16": dict(mu="float16", nu="float16"),
    "bfloat16": dict(mu="bfloat16", nu="bfloat16"),
}


def gradients(steps):
    return [random_tree(SHAPES, i) for i in range(steps)]


# 1.7 times the measured errors: one bit less in a format would double its error.
@pytest.mark.parametrize(("name", "worst"), zip(EVERY, [0.1, 0.1, 0.026, 0.02, 6e-4, 6.4e-3], strict=True))
def test_thirty_steps_stay_near_those_of_float32(name, worst):
    params, grads = random_tree(SHAPES, 99), gradients(30)
    got, _ = run(low_bit(ADAM, LowBitConfig(**EVERY[name], min_size=64)), params, grads)
    want, _ = run(ADAM, params, grads)
    first, ours, theirs = (tree["layers"]["attn"]["kernel"] for tree in (params, got, want))
    error = jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs - first)
    assert 0 < error < worst
    assert_trees_equal(got["layers"]["norm"], want["layers"]["norm"])


def test_float32_is_the_inner_transformation_to_the_bit():
    params, grads = random_tree(SHAPES, 99), gradients(5)
    got, _ = run(low_bit(ADAM, LowBitConfig(mu="float32", nu="float32", min_size=0)), params, grads)
    assert_trees_equal(got, run(ADAM, params, grads)[0])


@pytest.mark.parametrize(("min_size", "warns"), [(16 * 32, False), (16 * 32 + 1, True)])
@pytest.mark.parametrize("name", EVERY)
def test_a_min_size_above_all_moments_is_said(name, min_size, warns):
    """A layer of the largest tensor has 16 × 32 entries; the projector of GaLore is no moment."""
    config = LowBitConfig(**EVERY[name], min_size=min_size)
    state = jax.eval_shape(low_bit(ADAM, config).init, random_tree(SHAPES, 0))
    assert len(warnings(state, config)) == warns
    projected = galore(ADAM, GaloreConfig(rank=4, projector="int8", targets=("kernel",)))
    state = jax.eval_shape(low_bit(projected, config).init, random_tree(SHAPES, 0))
    assert warnings(state, config)


def test_bytes_are_those_of_the_codes_and_scales():
    params = random_tree({"layers": {"kernel": (2, 64, 128)}}, 0)
    n = 2 * 64 * 128
    counts = 8  # of the two step counters
    for name, options, expected in [
        ("fp8", EVERY["fp8"], 2 * n + 2 * 2 * 4),
        ("dynamic8", EVERY["dynamic8"] | {"block_size": 64}, 2 * n + 2 * n // 64 * 4),
        ("float16", EVERY["float16"], 4 * n + 2 * 2 * 4),
    ]:
        init = low_bit(ADAM, LowBitConfig(**options)).init
        assert state_bytes(jax.eval_shape(init, params)) == expected + counts, name
    state = jax.jit(init)(params)
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == state_bytes(state) == expected + counts
    assert state_bytes(ADAM.init(params)) == 8 * n + counts // 2


def test_small_tensors_of_a_layer_are_left_alone():
    params = random_tree({"layers": {"kernel": (64, 8, 8), "big": (2, 64, 64)}}, 0)
    mu = jax.eval_shape(low_bit(ADAM, LowBitConfig(**FP8)).init, params).inner.mu["layers"]
    assert mu["kernel"].dtype == jnp.float32, "4096 entries, but only 64 per layer"
    assert mu["big"].codes.dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize("name", ["fp8", "dynamic8"])
def test_single_numbers_are_left_alone(name):
    """CLIP's logit scale is one."""
    params, grads = {"logit_scale": jnp.float32(3.0)}, [{"logit_scale": jnp.float32(0.1)}] * 3
    got, _ = run(low_bit(ADAM, LowBitConfig(**EVERY[name], min_size=0)), params, grads)
    assert_trees_equal(got, run(ADAM, params, grads)[0])


def test_a_second_moment_that_underflows_does_not_blow_up_the_step():
    """One gradient is large; v of the others is 10^-16 of its v, which underflows in e5m2."""
    params = {"kernel": jnp.zeros((8, 16))}
    grads = {"kernel": jnp.full((8, 16), 1e-8).at[0, 0].set(1.0)}
    tx = low_bit(optax.scale_by_adam(0.9, 0.98, 1e-16), LowBitConfig(**FP8, min_size=0))
    got, state = run(tx, params, [grads] * 10)
    assert (jnp.abs(got["kernel"]) < 20).all()
    assert (state.inner.nu["kernel"].codes.astype(jnp.float32) > 0).all()


def test_stochastic_rounding_keeps_what_rounding_to_nearest_loses():
    """With b2 = 0.999, rounding to nearest freezes a bfloat16 moment: a step changes it by 1/1000."""
    params = {"kernel": jnp.zeros((64, 64))}
    grads = [{"kernel": jnp.ones((64, 64))}] * 20 + [{"kernel": jnp.full((64, 64), 0.5)}] * 300
    adam = optax.scale_by_adam(0.9, 0.999)
    _, state = run(low_bit(adam, LowBitConfig(mu="float32", nu="bfloat16")), params, grads)
    _, exact = run(adam, params, grads)
    want = float(exact.nu["kernel"][0, 0])
    # 320 roundings give each of 4,096 numbers a standard deviation of up to 5 %: 5 σ of 0.05 / 64.
    mean = float(state.inner.nu["kernel"].codes.astype(jnp.float32).mean())
    assert mean == pytest.approx(want, rel=0.004)
    nearest = jnp.bfloat16(0.0)
    for g in grads:
        nearest = (0.999 * nearest.astype(jnp.float32) + 0.001 * g["kernel"][0, 0] ** 2).astype(
            jnp.bfloat16
        )
    assert abs(float(nearest) / want - 1) > 0.05


def test_each_moment_has_its_own_noise_also_when_it_is_encoded_alone():
    """All numbers are in the middle between two of bfloat16."""

    def both(params):
        return optax.ScaleByAdamState(jnp.int32(0), params, params)

    inner = optax.GradientTransformation(both, ADAM.update)
    tx = low_bit(inner, LowBitConfig(**EVERY["bfloat16"], min_size=0))
    params = {name: jnp.full((8, 16), 1 + 2.0**-8) for name in "ab"}

    def codes(params):
        state = tx.init(params).inner
        return {(m, name): getattr(state, m)[name].codes for m in ("mu", "nu") for name in params}

    together = codes(params)
    assert all((x != y).any() for x, y in itertools.combinations(together.values(), 2))
    for name in params:
        assert_trees_equal(alone := codes({name: params[name]}), {key: together[key] for key in alone})


@pytest.mark.parametrize("name", ["fp8", "dynamic8"])
def test_low_bit_moments_around_stable_adam_and_galore(name):
    shapes = {"layers": {"attn": {"q_proj": {"kernel": (2, 16, 64)}}}}
    params, grads = random_tree(shapes, 9), [random_tree(shapes, i) for i in range(6)]
    inner = galore(scale_by_stable_adam(), GaloreConfig(rank=4, update_proj_gap=3, moments="reproject"))
    got, state = run(low_bit(inner, LowBitConfig(**EVERY[name], min_size=0)), params, grads)
    want, _ = run(inner, params, grads)
    assert optax.tree.get(state, "rms")["layers"]["attn"]["q_proj"]["kernel"].shape == (2,)
    assert state.inner.inner.nu["layers"]["attn"]["q_proj"]["kernel"].codes.shape == (2, 4, 64)
    assert state.inner.subspaces["layers"]["attn"]["q_proj"]["kernel"].projector.dtype == jnp.float32
    assert_trees_close(got, want, atol=0.08)  # twice the error of FP8; the parameters move by 1


def test_codes_and_scales_are_sharded_like_their_parameter():
    mesh = sharding.make_mesh(fsdp=4, tensor=2)
    where = NamedSharding(mesh, P(None, "fsdp", "tensor"))
    abstract = {"layers": {"kernel": jax.ShapeDtypeStruct((2, 64, 128), jnp.float32, sharding=where)}}
    for options, scale_spec in ((dict(block_size=16), where.spec), ({}, P(None, None, None))):
        tx = low_bit(ADAM, LowBitConfig(**FP8, **options))
        shardings = opt_state_shardings(tx, abstract, mesh)
        state = jax.jit(tx.init, out_shardings=shardings)({"layers": {"kernel": jnp.ones((2, 64, 128))}})
        nu = state.inner.nu["layers"]["kernel"]
        assert nu.codes.sharding == where
        assert nu.scale.sharding.is_equivalent_to(NamedSharding(mesh, scale_spec), 3)


def test_a_state_without_moments_is_an_error():
    tx = low_bit(optax.scale_by_factored_rms(), LowBitConfig(**FP8))
    with pytest.raises(AssertionError, match="no moments"):
        jax.eval_shape(tx.init, random_tree(SHAPES, 0))
