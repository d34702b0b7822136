"""AdaScale: the gain follows from the variance of gradients, and the schedule counts small batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.optim.adascale import gain_of, sample_statistics, scale_by_adascale


def reference(grads_of_step, scale, smoothing, schedule):
    """Algorithm 1 in numpy: gains and rates of steps with gradients (n, D)."""
    tau = weight = variance = squared = 0.0
    gains, rates = [], []
    for g in grads_of_step:
        n, mean = len(g), g.mean(0)
        var = max(scale * ((g - mean) ** 2).sum() / (n - 1) / n, 1e-6)
        sqr = max((mean**2).sum() - var / scale, 0.0)
        weight = smoothing * weight + 1 - smoothing
        variance = smoothing * variance + (1 - smoothing) * var
        squared = smoothing * squared + (1 - smoothing) * sqr
        v, s = variance / weight, squared / weight
        gains.append(np.clip((v + s) / (v / scale + s), 1, scale))
        rates.append(gains[-1] * schedule(tau))
        tau += gains[-1]
    return gains, rates


def run(tx, grads_of_step, scale):
    params = {"a": jnp.zeros(3), "b": jnp.zeros(4)}
    state, gains, updates = tx.init(params), [], []
    for g in grads_of_step:
        tree = {"a": jnp.asarray(g[:, :3], jnp.float32), "b": jnp.asarray(g[:, 3:], jnp.float32)}
        mean, statistics = sample_statistics(tree)
        update, state = jax.jit(tx.update)(mean, state, **statistics)
        gains.append(float(gain_of(state, scale)))
        updates.append(np.concatenate([update["a"], update["b"]]))
    return gains, updates, state


@pytest.mark.parametrize(("scale", "samples"), [(4.0, 4), (8.0, 4), (2.0, 4)])
def test_twenty_steps_equal_the_algorithm(scale, samples):
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=(samples, 7)) + 0.1 * i for i in range(20)]
    schedule = optax.linear_schedule(1.0, 0.0, 60)
    gains, rates = reference(grads, scale, 0.9, lambda t: max(1 - t / 60, 0))
    got, updates, state = run(
        scale_by_adascale(schedule, scale=scale, samples=samples, smoothing=0.9), grads, scale
    )
    np.testing.assert_allclose(got, gains, rtol=1e-5)
    want = [-r * g.mean(0) for r, g in zip(rates, grads, strict=True)]
    np.testing.assert_allclose(updates, want, rtol=2e-4, atol=1e-6)
    assert float(state.tau) == pytest.approx(sum(gains), rel=1e-5)
    assert sum(1 < g < scale for g in gains) > 15, "gains at the limits compare nothing"


def test_equal_gradients_gain_1_and_pure_noise_gains_the_scale():
    tx = scale_by_adascale(optax.constant_schedule(0.1), scale=8.0, samples=8)
    ones = np.ones((8, 7))
    assert run(tx, [ones] * 3, 8.0)[0] == pytest.approx([1.0] * 3, rel=1e-4)
    noise = np.concatenate([ones[:4], -ones[:4]])
    assert run(tx, [noise] * 3, 8.0)[0] == pytest.approx([8.0] * 3, rel=1e-4)


def test_a_noisy_quadratic_needs_fewer_steps_and_ends_where_the_small_batch_does():
    """S = 8: steps of 8 samples, until as many small steps are counted as the small batch takes."""
    rng = np.random.default_rng(1)
    scale, total = 8, 400
    schedule = optax.linear_schedule(0.2, 0.0, total)
    tx = optax.chain(optax.trace(0.0), scale_by_adascale(schedule, scale=float(scale), samples=scale))
    update = jax.jit(tx.update)
    params, steps = {"w": jnp.full(50, 2.0)}, 0
    state = tx.init(params)
    while state[1].tau < total:
        samples = params["w"][None] + jnp.asarray(rng.normal(size=(scale, 50)), jnp.float32)
        mean, statistics = sample_statistics({"w": samples})
        updates, state = update(mean, state, **statistics)
        params, steps = optax.apply_updates(params, updates), steps + 1
    small = np.full(50, 2.0)
    for t in range(total):
        small -= float(0.2 * (1 - t / total)) * (small + rng.normal(size=50))
    assert steps < total / 3
    assert float(jnp.mean(params["w"] ** 2)) < 2 * np.mean(small**2)


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match="samples=1 must be at least 2"):
        scale_by_adascale(optax.constant_schedule(0.1), scale=2.0, samples=1)
    with pytest.raises(ValueError, match=r"scale=0.5 must be at least 1"):
        scale_by_adascale(optax.constant_schedule(0.1), scale=0.5, samples=2)
