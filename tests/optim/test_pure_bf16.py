"""bfloat16 parameters: tiny updates are not lost, and updates are added exactly."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.optim import state_bytes
from maxlp.optim.config import BF16_ROUNDINGS
from maxlp.optim.pure_bf16 import _noise, pure_bf16
from maxlp.parallel import sharding
from tests.optim.common import (
    assert_trees_equal,
    jitted_step,
    make_optimizer,
    random_tree,
    run,
    run_on_mesh,
    saved_and_restored,
)

CLIPPED = dict(learning_rate=1e-3, clip_norm=1.0, weight_decay=0.1)
SHAPES = {"layers": {"mlp": {"up_proj": {"kernel": (2, 16, 32)}}}, "tok_embed": {"embedding": (32, 16)}}
every = pytest.mark.parametrize("method", BF16_ROUNDINGS)


def start():
    return optax.tree.cast(random_tree(SHAPES, 100), jnp.bfloat16)


@functools.cache
def adamw(method):
    return make_optimizer(param_rounding=method, **CLIPPED).tx


@functools.cache
def sums_of_tiny_updates(method):
    """After 4000 updates of 1e-5 to 1e-3 on parameters of 0.5 to 4: ours, exact, plain bfloat16, start."""
    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.uniform(0.5, 4.0, 1024), jnp.bfloat16)
    u = rng.uniform(1e-5, 1e-3, 1024).astype(np.float32) * rng.choice([-1, 1], 1024).astype(np.float32)
    tx = pure_bf16(optax.identity(), method=method, seed=3)

    def step(carry, _):
        (p, state), plain = carry
        updates, state = tx.update(jnp.asarray(u), state, p)
        return ((optax.apply_updates(p, updates), state), optax.apply_updates(plain, jnp.asarray(u))), None

    (ours, plain), _ = jax.jit(lambda c: jax.lax.scan(step, c, length=4000))(((p, tx.init(p)), p))
    ours, plain, p = (np.asarray(x, np.float64) for x in (ours[0], plain, p))
    return ours, p + 4000 * u.astype(np.float64), plain, p


def test_plain_bfloat16_stalls_and_kahan_sums_to_the_last_bits():
    """The sum of 4000 is off by about one bfloat16 step: half from its rounding, half from the rest's."""
    ours, exact, plain, p = sums_of_tiny_updates("kahan")
    ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 0.5))) - 7)
    error = np.abs(ours - exact) / ulp
    assert np.median(error) < 1 and np.max(error) < 4
    moves = np.abs(exact - p)
    assert np.median(np.abs(ours - exact) / moves) < 0.01
    assert np.mean(plain == p) > 0.9, "updates below half a step are rounded away"


def test_stochastic_rounding_sums_exactly_on_average():
    """Each step rounds with a variance of f(1-f) ulp², f = |u| / ulp where the sum starts on the grid."""
    ours, exact, _, p = sums_of_tiny_updates("stochastic")
    least, most = np.minimum(p, exact), np.maximum(np.abs(p), np.abs(exact))
    ulp = 2.0 ** (np.floor(np.log2(most)) - 7)
    far = least > 0.25  # not through zero, where steps are small and many
    deviation = np.sqrt(np.abs(exact - p) * ulp)  # at most: a random walk of |sum| / ulp steps of one ulp
    z = (ours - exact)[far] / deviation[far]
    assert far.sum() > 400 and np.max(np.abs(z)) < 5
    assert np.abs(np.mean(z)) < 4 / np.sqrt(far.sum()), "unbiased"


def test_stochastic_rounding_takes_a_neighbour_with_probability_proportional_to_proximity():
    p = jnp.ones(1 << 16, jnp.bfloat16)
    tx = pure_bf16(optax.identity(), method="stochastic")
    for fraction in (0.0, 0.01, 0.3, 1.0):
        u = jnp.full(p.shape, fraction * 2.0**-7, jnp.float32)
        new = optax.apply_updates(p, jax.jit(tx.update)(u, tx.init(p), p)[0])
        assert new.dtype == jnp.bfloat16 and set(np.unique(np.asarray(new, np.float64))) <= {1.0, 1 + 2**-7}
        ups = float(jnp.mean(new > 1))
        # Four standard deviations of the share.
        assert ups == pytest.approx(fraction, abs=4 * np.sqrt(fraction * (1 - fraction) / p.size))
    new = optax.apply_updates(p, tx.update(jnp.full(p.shape, jnp.nan), tx.init(p), p)[0])
    assert bool(jnp.all(jnp.isnan(new)))


def test_each_step_and_each_seed_has_its_own_noise():
    p, u = jnp.ones(256, jnp.bfloat16), jnp.full(256, 2.0**-8, jnp.float32)

    def draw(count, seed):
        tx = pure_bf16(optax.identity(), method="stochastic", seed=seed)
        return np.asarray(tx.update(u, tx.init(p)._replace(count=jnp.int32(count)), p)[0])

    assert np.array_equal(draw(5, 0), draw(5, 0))
    assert not np.array_equal(draw(5, 0), draw(6, 0)) and not np.array_equal(draw(5, 0), draw(5, 1))


def test_each_tensor_has_its_own_noise_also_when_it_is_updated_alone():
    params = {name: jnp.ones(256, jnp.bfloat16) for name in "ab"}
    tx = pure_bf16(optax.identity(), method="stochastic")

    def updates(params):
        half = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-8), params)
        return tx.update(half, tx.init(params), params)[0]

    together = updates(params)
    assert not np.array_equal(together["a"], together["b"])
    for name in params:
        np.testing.assert_array_equal(updates({name: params[name]})[name], together[name])


@pytest.mark.parametrize("shape", [(2**16,), (2**8, 2**8), (2**4, 2**5, 2**7)])
def test_each_number_of_an_array_has_its_own_noise(shape):
    """2^16 draws hit 1 - 1/e of 2^16 values (standard deviation 0.2 %); equal rows or columns hit fewer."""
    noise = _noise(jax.random.key(0), shape)
    assert noise.shape == shape and noise.dtype == jnp.uint16
    assert np.unique(noise).size == pytest.approx((1 - math.exp(-1)) * 2**16, rel=0.01)


def test_a_single_number_is_rounded_stochastically():
    """An update of half the distance to the next number rounds up with some seeds, and down with others."""
    p, u = jnp.bfloat16(1), jnp.float32(2.0**-8)

    def new(seed):
        tx = pure_bf16(optax.identity(), method="stochastic", seed=seed)
        return optax.apply_updates(p, tx.update(u, tx.init(p), p)[0])

    assert new(0).shape == () and {float(new(seed)) for seed in range(8)} == {1, 1 + 2**-7}


def test_kahan_loses_nothing_from_one_step_to_the_next():
    """Parameter and compensation together hold the exact sum to 2^-8 of the compensation."""
    rng = np.random.default_rng(2)
    p = jnp.asarray(rng.normal(size=4096), jnp.bfloat16)
    u = jnp.asarray(rng.normal(size=4096) * 10.0 ** rng.uniform(-6, 1, 4096), jnp.float32)
    tx = pure_bf16(optax.identity(), method="kahan")
    updates, state = jax.jit(tx.update)(u, tx.init(p), p)
    new = optax.apply_updates(p, updates)
    exact = np.asarray(p, np.float64) + np.asarray(u, np.float64)
    np.testing.assert_array_equal(new, jnp.asarray(exact.astype(np.float32)).astype(jnp.bfloat16))
    rest = exact - np.asarray(new, np.float64)
    # The update itself is float32, and so is the sum that is rounded.
    bound = 2.0**-8 * np.abs(rest) + 2.0**-23 * np.maximum(np.abs(exact), np.abs(u))
    assert np.all(np.abs(np.asarray(state.lost, np.float64) - rest) <= bound)


def exact(params, state):
    """The parameters with their residuals, in float64: FlashOptim's equation, by hand."""
    p, residual = np.asarray(params, np.float64), np.asarray(state.lost, np.float64)
    return p + residual / 127 * spacing(p) / 2


def spacing(p):
    """The distance of bfloat16 numbers at p, down to 2^-100."""
    return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(p), 2.0**-100))) - 7)


def test_residuals_sum_updates_to_half_a_unit_a_step():
    """Without an optimizer inside: parameter and residual follow the exact sums."""
    rng = np.random.default_rng(2)
    p = jnp.asarray(rng.normal(size=4096), jnp.bfloat16)
    tx, want = pure_bf16(optax.identity(), method="residual"), np.asarray(p, np.float64)
    state, step, bound = tx.init(p), jitted_step(tx), np.zeros(4096)
    assert state.lost.dtype == jnp.int8
    for _ in range(30):
        u = jnp.asarray(rng.normal(size=4096) * 10.0 ** rng.uniform(-6, 1, 4096), jnp.float32)
        p, state = step(u, state, p)
        want += np.asarray(u, np.float64)
        # The residual is rounded to 1/254 of the spacing; the sum itself, and what it is of, are float32.
        bound += 0.5001 * spacing(np.asarray(p, np.float64)) / 254
        bound += 2.0**-23 * (np.abs(want) + np.abs(np.asarray(u)))
        assert p.dtype == jnp.bfloat16 and (np.abs(exact(p, state) - want) <= bound).all()
        rest = exact(p, state) - np.asarray(p, np.float64)
        assert (np.abs(rest) <= spacing(np.asarray(p, np.float64)) / 2).all()


def test_a_residual_moves_a_parameter_that_nearest_rounding_would_leave():
    """Steps of 2^-14 of a parameter, 1/64 of what bfloat16 can represent: 128 of them are two spacings."""
    p, u = jnp.ones(8, jnp.bfloat16), jnp.full(8, 2.0**-14)
    got, _ = run(pure_bf16(optax.identity(), method="residual"), p, [u] * 256)
    assert (got == 1 + 2.0**-6).all() and (optax.apply_updates(p, u) == 1).all()


def test_a_float16_master_follows_exact_sums_to_half_a_unit_a_step():
    """Numbers of at least 2^-14 scales have 11 bits: their spacing from 2^e to 2^(e+1) is 2^(e-10).

    Smaller ones have the spacing of 2^-14 scales. A scale is at most 1/32752 of the largest number.
    """
    rng = np.random.default_rng(2)
    sizes = 10.0 ** rng.uniform(-12, 0, 4096)
    p = jnp.asarray(rng.normal(size=4096) * sizes, jnp.bfloat16)
    tx, want = pure_bf16(optax.identity(), method="float16_master"), np.asarray(p, np.float64)
    state, step = tx.init(p), jitted_step(tx)
    kept, spacing = of_master(state)
    bound = spacing / 2
    assert (np.abs(kept - want) <= bound).all()
    for _ in range(30):
        u = jnp.asarray(rng.normal(size=4096) * sizes, jnp.float32)
        p, state = step(u, state, p)
        want += np.asarray(u, np.float64)
        kept, spacing = of_master(state)
        bound += spacing / 2 + 2.0**-24 * (np.abs(want) + bound)  # the sum itself is in float32
        assert state.master.codes.dtype == jnp.float16 and p.dtype == jnp.bfloat16
        assert (np.abs(kept - want) <= bound).all()
        # The parameter is 8 bits of the same sum, the master 11: half of each spacing.
        assert (np.abs(np.asarray(p, np.float64) - kept) <= (8 + 1) / 2 * spacing).all()
    assert float(state.master.scale[0]) <= np.abs(kept).max() / 32752
    assert np.min(np.abs(kept)) < 2.0**-14 * float(state.master.scale[0]), "some are subnormal"


def of_master(state):
    """The values of a master copy in float64, and upper bounds of the spacing of numbers around them."""
    scale = np.asarray(state.master.scale, np.float64)
    kept = np.asarray(state.master.codes, np.float64) * scale
    return kept, 2.0 ** (np.floor(np.log2(np.maximum(np.abs(kept), 2.0**-14 * scale))) - 10)


def test_float16_masters_equal_numpy_for_ten_steps():
    """Each layer of a stack has a scale of its own, a power of two."""
    params, tx = start(), pure_bf16(optax.identity(), method="float16_master")
    scales = jnp.asarray([1e-3, 40.0])[:, None, None]
    params["layers"] = jax.tree.map(lambda p: (p * scales).astype(jnp.bfloat16), params["layers"])
    updates = [random_tree(SHAPES, i, scale=0.1) for i in range(10)]
    got, state = run(tx, params, updates)
    tensors = (
        (("layers", "mlp", "up_proj", "kernel"), (1, 2)),
        (("tok_embed", "embedding"), (0, 1)),
    )
    for path, axes in tensors:
        p, p_got, kept, us = (at(tree, path) for tree in (params, got, state.master, updates))
        master, scale = rounded(np.asarray(p, np.float32), axes)
        for u in us:
            exact = master + np.asarray(u)
            master, scale = rounded(exact, axes)
        np.testing.assert_array_equal(kept.scale, scale)
        np.testing.assert_array_equal(np.asarray(kept.codes, np.float32) * scale, master)
        np.testing.assert_array_equal(p_got, exact.astype(jnp.bfloat16))


def at(tree, path):
    """The leaf at a path of a tree, or of each tree of a list."""
    if isinstance(tree, list):
        return [at(one, path) for one in tree]
    return functools.reduce(lambda node, key: node[key], path, tree)


def rounded(x, axes):
    """float32 to scaled float16, and the smallest power of two that leaves no number above 65504."""
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max(axis=axes, keepdims=True).astype(np.float64) / 65504))
    scale = scale.astype(np.float32)
    return (x / scale).astype(np.float16).astype(np.float32) * scale, scale


def test_a_float16_master_takes_two_bytes_a_parameter_and_a_scale_a_layer():
    tx = pure_bf16(optax.identity(), method="float16_master")
    state = jax.eval_shape(tx.init, start())
    parameters = sum(p.size for p in jax.tree.leaves(start()))
    assert state_bytes(state.master) == 2 * parameters + 4 * (2 + 1)


def test_flash_states_take_7_bytes_a_parameter_with_its_gradient():
    """bfloat16 parameter and gradient, int8 residual, two codes; and a float32 scale for 32 codes."""
    low_bit = dict(mu="companded8", nu="companded8", block_size=32)
    tx = make_optimizer(param_rounding="residual", low_bit=low_bit, **CLIPPED).tx
    params = {"kernel": jnp.zeros((256, 512), jnp.bfloat16)}
    taken = state_bytes((params, jax.eval_shape(tx.init, params)))
    counters = 4 * 4
    assert taken == (2 + 1 + 2 + 2 * 4 / 32) * params["kernel"].size + counters
    gradient = jax.eval_shape(jax.grad(lambda p: p["kernel"].sum().astype(jnp.float32)), params)
    assert state_bytes(gradient) == 2 * params["kernel"].size


@every
def test_adamw_follows_float32(method):
    """Fifty steps of AdamW with clipping and decay, compared with float32 parameters.

    A step of 1e-3 is about the distance of two float16 numbers above 1.
    """
    f32 = optax.tree.cast(start(), jnp.float32)
    grads = [random_tree(SHAPES, i) for i in range(5)] * 10
    want, _ = run(adamw(None), f32, grads)
    got, state = run(adamw(method), start(), grads)
    plain, _ = run(adamw(None), start(), [optax.tree.cast(g, jnp.bfloat16) for g in grads])

    def error(tree):
        difference = optax.tree.sub(optax.tree.cast(tree, jnp.float32), want)
        return float(optax.tree.norm(difference) / optax.tree.norm(optax.tree.sub(want, f32)))

    assert error(got) < {"stochastic": 0.5, "float16_master": 0.4}.get(method, 0.12)
    assert error(plain) > 0.7
    assert {x.dtype for x in jax.tree.leaves(optax.tree.get(state, "mu"))} == {jnp.dtype(jnp.float32)}


@every
def test_sharded_equals_one_device_and_what_is_kept_is_sharded_like_its_parameter(method):
    mesh, tx = sharding.make_mesh(fsdp=4, tensor=2), adamw(method)
    axes = {
        "layers": {"mlp": {"up_proj": {"kernel": ("layers", "embed", "mlp")}}},
        "tok_embed": {"embedding": ("vocab", "embed")},
    }
    grads = [random_tree(SHAPES, i) for i in range(3)]
    params, state, _ = run_on_mesh(tx, mesh, axes, start(), grads)
    kept = jax.tree.map(lambda _, m: m.codes, params, state.master) if state.master else state.lost
    if method != "stochastic":
        places = [jax.tree.map(lambda x: x.sharding, tree) for tree in (kept, params)]
        assert places[0] == places[1]
    want, _ = run(tx, start(), grads)
    ours, theirs = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (params, want))
    # The norm for clipping is summed in another order, which may break a tie differently.
    assert np.mean(ours == theirs) > 0.999
    np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), rtol=2.0**-7)


@every
def test_restored_state_continues_to_the_bit(method, tmp_path):
    tx, grads = adamw(method), [random_tree(SHAPES, i) for i in range(4)]
    params, state = run(tx, start(), grads[:2])
    restored = saved_and_restored(tmp_path, {"params": params, "opt_state": state})
    params, state = restored["params"], restored["opt_state"]
    for g in grads[2:]:
        params, state = jitted_step(tx)(g, state, params)
    assert_trees_equal((params, state), run(tx, start(), grads))


def test_float32_parameters_are_refused():
    message = "layers/mlp/up_proj/kernel is float32; set model.param_dtype='bfloat16'"
    with pytest.raises(ValueError, match=message) as error:
        adamw("kahan").init(random_tree(SHAPES, 0))
    assert "\n" not in str(error.value)
