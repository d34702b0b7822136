"""bfloat16 parameters: tiny updates are not lost, and what is added is exactly what is meant."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from maxlp import optim
from maxlp.optim.pure_bf16 import METHODS, pure_bf16
from maxlp.parallel import sharding
from maxlp.parallel.opt_state import opt_state_shardings
from maxlp.runtime.checkpoint import Checkpointer, restore
from tests.optim.common import assert_trees_equal, jitted_step, random_tree, run

BASE = dict(
    learning_rate=1e-3,
    schedule="constant",
    warmup_steps=0,
    total_steps=10,
    final_lr_fraction=0.0,
    clip_norm=1.0,
    weight_decay=0.1,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
)
SHAPES = {"layers": {"mlp": {"up_proj": {"kernel": (2, 16, 32)}}}, "tok_embed": {"embedding": (32, 16)}}
both = pytest.mark.parametrize("method", METHODS)


def start():
    return optax.tree.cast(random_tree(SHAPES, 100), jnp.bfloat16)


@functools.cache
def adamw(method):
    return optim.make_tx(param_rounding=method, **BASE)[0]


@functools.cache
def sums_of_tiny_updates(method, steps=4000):
    """4000 updates of 1e-5 to 1e-3 on parameters of 0.5 to 4; theirs, in float64, and plain bfloat16's."""
    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.uniform(0.5, 4.0, 1024), jnp.bfloat16)
    u = rng.uniform(1e-5, 1e-3, 1024).astype(np.float32) * rng.choice([-1, 1], 1024).astype(np.float32)
    tx = pure_bf16(optax.identity(), method=method, seed=3)

    def step(carry, _):
        (p, state), plain = carry
        updates, state = tx.update(jnp.asarray(u), state, p)
        return ((optax.apply_updates(p, updates), state), optax.apply_updates(plain, jnp.asarray(u))), None

    (ours, plain), _ = jax.jit(lambda c: jax.lax.scan(step, c, length=steps))(((p, tx.init(p)), p))
    as_64 = lambda x: np.asarray(x, np.float64)  # noqa: E731
    return as_64(ours[0]), as_64(p) + steps * u.astype(np.float64), as_64(plain), as_64(p)


def test_plain_bfloat16_stalls_and_kahan_sums_to_the_last_bits():
    """The sum of 4000 is off by a bfloat16 step: half of one, and what 8 bits of compensation lost."""
    ours, exact, plain, p = sums_of_tiny_updates("kahan")
    ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 0.5))) - 7)
    error = np.abs(ours - exact) / ulp
    assert np.median(error) < 1 and np.max(error) < 4
    moves = np.abs(exact - p)
    assert np.median(np.abs(ours - exact) / moves) < 0.01
    assert np.mean(plain == p) > 0.9, "updates below half a step are rounded away"


def test_stochastic_rounding_sums_to_the_truth_on_average():
    """Each step rounds with a variance of f(1-f) ulp², f = |u| / ulp where the sum starts on the grid."""
    ours, exact, _, p = sums_of_tiny_updates("stochastic")
    least, most = np.minimum(p, exact), np.maximum(np.abs(p), np.abs(exact))
    ulp = 2.0 ** (np.floor(np.log2(most)) - 7)
    far = least > 0.25  # not through zero, where steps are small and many
    deviation = np.sqrt(np.abs(exact - p) * ulp)  # at most: a random walk of |sum| / ulp steps of one ulp
    z = (ours - exact)[far] / deviation[far]
    assert far.sum() > 400 and np.max(np.abs(z)) < 5
    assert np.abs(np.mean(z)) < 4 / np.sqrt(far.sum()), "unbiased"


def test_stochastic_rounding_takes_either_neighbour_with_the_probability_of_its_nearness():
    p = jnp.ones(1 << 16, jnp.bfloat16)
    tx = pure_bf16(optax.identity(), method="stochastic")
    for fraction in (0.0, 0.01, 0.3, 1.0):
        u = jnp.full(p.shape, fraction * 2.0**-7, jnp.float32)
        new = optax.apply_updates(p, jax.jit(tx.update)(u, tx.init(p), p)[0])
        assert new.dtype == jnp.bfloat16 and set(np.unique(np.asarray(new, np.float64))) <= {1.0, 1 + 2**-7}
        ups = float(jnp.mean(new > 1))
        assert ups == pytest.approx(fraction, abs=4 * np.sqrt(fraction * (1 - fraction) / p.size))
    new = optax.apply_updates(p, tx.update(jnp.full(p.shape, jnp.nan), tx.init(p), p)[0])
    assert bool(jnp.all(jnp.isnan(new)))


def test_each_step_has_its_own_noise_and_each_seed():
    p, u = jnp.ones(256, jnp.bfloat16), jnp.full(256, 2.0**-8, jnp.float32)

    def draw(count, seed):
        tx = pure_bf16(optax.identity(), method="stochastic", seed=seed)
        return np.asarray(tx.update(u, tx.init(p)._replace(count=jnp.int32(count)), p)[0])

    assert np.array_equal(draw(5, 0), draw(5, 0))
    assert not np.array_equal(draw(5, 0), draw(6, 0)) and not np.array_equal(draw(5, 0), draw(5, 1))


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


@both
def test_adamw_follows_float32(method):
    """Fifty steps of AdamW with clipping and decay, beside the same in float32."""
    f32 = optax.tree.cast(start(), jnp.float32)
    grads = [random_tree(SHAPES, i) for i in range(5)] * 10
    want, _ = run(adamw(None), f32, grads)
    got, state = run(adamw(method), start(), grads)
    plain, _ = run(adamw(None), start(), [optax.tree.cast(g, jnp.bfloat16) for g in grads])

    def error(tree):
        difference = optax.tree.sub(optax.tree.cast(tree, jnp.float32), want)
        return float(optax.tree.norm(difference) / optax.tree.norm(optax.tree.sub(want, f32)))

    assert error(got) < (0.12 if method == "kahan" else 0.5)
    assert error(plain) > 0.7
    assert {x.dtype for x in jax.tree.leaves(optax.tree.get(state, "mu"))} == {jnp.dtype(jnp.float32)}


@both
def test_sharded_equals_one_device_and_the_compensation_lies_like_its_parameter(method):
    mesh, tx = sharding.make_mesh(fsdp=4, tensor=2), adamw(method)
    names = {
        "layers": {"mlp": {"up_proj": {"kernel": ("layers", "embed", "mlp")}}},
        "tok_embed": {"embedding": ("vocab", "embed")},
    }
    place = lambda names: NamedSharding(mesh, sharding.spec(*names))  # noqa: E731
    places = jax.tree.map(place, names, is_leaf=lambda x: isinstance(x, tuple))
    with jax.set_mesh(mesh):
        params = jax.device_put(start(), places)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
        )
        where = opt_state_shardings(tx, abstract, mesh)
        state = jax.jit(tx.init, out_shardings=where)(params)
        step = jax.jit(jitted_step(tx), out_shardings=(places, where))
        for i in range(3):
            params, state = step(jax.device_put(random_tree(SHAPES, i), places), state, params)
    if method == "kahan":
        assert jax.tree.map(lambda x: x.sharding, state.lost) == places
    want, _ = run(tx, start(), [random_tree(SHAPES, i) for i in range(3)])
    ours, theirs = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (params, want))
    # The clip's norm is summed in another order: a tie may fall to the other side, no more.
    assert np.mean(ours == theirs) > 0.999
    np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), rtol=2.0**-7)


@both
def test_restored_state_goes_on_to_the_bit(method, tmp_path):
    tx, grads = adamw(method), [random_tree(SHAPES, i) for i in range(4)]
    params, state = run(tx, start(), grads[:2])
    saved = {"params": params, "opt_state": state}
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        checkpointer.save(2, saved, {})
        checkpointer.wait()
    place = sharding.replicated(sharding.make_mesh(fsdp=1, data=1, devices=jax.devices()[:1]))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), saved)
    restored = restore(tmp_path, abstract).state
    params, state = restored["params"], restored["opt_state"]
    for g in grads[2:]:
        params, state = jitted_step(tx)(g, state, params)
    assert_trees_equal((params, state), run(tx, start(), grads))


def test_settings_that_cannot_work():
    for call, message in (
        (lambda: optim.make_tx(param_rounding="nearest", **BASE), "param_rounding='nearest' is unknown"),
        (lambda: adamw("kahan").init(random_tree(SHAPES, 0)), "layers/mlp/up_proj/kernel is float32; set"),
        (
            lambda: optim.make_tx("schedule_free_adamw", param_rounding="kahan", **BASE),
            "param_rounding='kahan' does not go with schedule_free_adamw",
        ),
    ):
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
