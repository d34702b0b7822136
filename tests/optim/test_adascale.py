"""AdaScale: the gain follows from the variance of gradients, and the schedule counts small batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.optim.adascale import metrics_of, scale_by_adascale, update_arguments
from tests.optim.common import make_optimizer

ROUNDING = 1e-6  # variances are differences of float32 sums of 56 squares, which lose less than a digit


def sample_statistics(grads):
    """The mean of n gradients, (n, …) each, and the keywords of the update."""
    mean = jax.tree.map(lambda g: jnp.mean(g, axis=0), grads)
    squares = optax.tree.norm(grads, squared=True) / len(jax.tree.leaves(grads)[0])
    return mean, update_arguments(mean, {"microbatch_grad_norm": jnp.sqrt(squares)})


def reference(grads_of_step, scale, schedule):
    """Algorithm 1 in numpy: gains and rates of steps with gradients (n, D)."""
    tau = variance = squared = 0.0
    gains, rates = [], []
    for g in grads_of_step:
        n, mean = len(g), g.mean(0)
        smoothing = 1 - n / 1000
        var = scale * ((g - mean) ** 2).sum() / (n - 1) / n
        sqr = max((mean**2).sum() - var / scale, 0.0)
        variance = smoothing * variance + (1 - smoothing) * var
        squared = smoothing * squared + (1 - smoothing) * sqr
        gains.append(np.clip((variance + squared) / (variance / scale + squared), 1, scale))
        rates.append(gains[-1] * schedule(tau))
        tau += gains[-1]
    return gains, rates


def run(tx, grads_of_step):
    params = {"a": jnp.zeros(3), "b": jnp.zeros(4)}
    state, gains, updates = tx.init(params), [], []
    for g in grads_of_step:
        tree = {"a": jnp.asarray(g[:, :3], jnp.float32), "b": jnp.asarray(g[:, 3:], jnp.float32)}
        mean, statistics = sample_statistics(tree)
        update, state = jax.jit(tx.update)(mean, state, **statistics)
        gains.append(float(state.gain))
        updates.append(np.concatenate([update["a"], update["b"]]))
    return gains, updates, state


@pytest.mark.parametrize(("scale", "samples"), [(4.0, 4), (8.0, 4), (2.0, 4)])
def test_twenty_steps_equal_the_algorithm(scale, samples):
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=(samples, 7)) + 0.1 * i for i in range(20)]
    schedule = optax.linear_schedule(1.0, 0.0, 60)
    gains, rates = reference(grads, scale, lambda t: max(1 - t / 60, 0))
    tx = scale_by_adascale(schedule, scale=scale, samples=samples)
    got, updates, state = run(tx, grads)
    np.testing.assert_allclose(got, gains, rtol=ROUNDING)
    want = [-r * g.mean(0) for r, g in zip(rates, grads, strict=True)]
    np.testing.assert_allclose(updates, want, rtol=2 * ROUNDING, atol=1e-6)  # of means near 0 too
    assert float(state.tau) == pytest.approx(sum(gains), rel=ROUNDING)
    assert sum(1 < g < scale for g in gains) > 15, "gains at the limits compare nothing"


def test_equal_gradients_gain_1_and_pure_noise_gains_the_scale():
    tx = scale_by_adascale(optax.constant_schedule(0.1), scale=8.0, samples=8)
    ones = np.ones((8, 7))
    assert run(tx, [ones] * 3)[0] == pytest.approx([1.0] * 3, rel=ROUNDING)
    noise = np.concatenate([ones[:4], -ones[:4]])
    assert run(tx, [noise] * 3)[0] == pytest.approx([8.0] * 3, rel=ROUNDING)


def test_independent_noise_gains_nearly_the_scale():
    """σ² is known to √(2 / (7 · 7000)) of itself, and μ² is at most about √(2 / 7000) of σ²/8."""
    tx = scale_by_adascale(optax.constant_schedule(0.1), scale=8.0, samples=8)
    noise = np.random.default_rng(0).normal(size=(8, 7000))
    mean, statistics = sample_statistics({"a": jnp.asarray(noise, jnp.float32)})
    _, state = jax.jit(tx.update)(mean, tx.init(mean), **statistics)
    assert 8 / (1 + 3 * np.sqrt(2 / 7000)) < float(state.gain) <= 8


def test_the_gain_does_not_depend_on_the_unit_of_the_loss():
    tx = scale_by_adascale(optax.constant_schedule(0.1), scale=4.0, samples=4)
    grads = [np.random.default_rng(i).normal(size=(4, 7)) + 0.3 for i in range(3)]
    tiny = [1e-6 * g for g in grads]  # squares far below 1e-6, and above float32's smallest number
    np.testing.assert_allclose(run(tx, tiny)[0], run(tx, grads)[0], rtol=ROUNDING)
    assert run(tx, [np.zeros((4, 7))])[0] == [1.0]


@pytest.mark.parametrize("scale", [2.0, 4.0, 16.0])
def test_the_noise_scale_tells_the_gain(scale):
    """(B + 1) / (B / S + 1), so half of the most, B + 1, at S = B."""
    tx = scale_by_adascale(optax.constant_schedule(0.1), scale=scale, samples=4)
    gains, _, state = run(tx, [np.random.default_rng(i).normal(size=(4, 7)) + 0.7 for i in range(20)])
    noise = float(metrics_of(state)["noise_scale"])
    assert noise > 1 and gains[-1] == pytest.approx((noise + 1) / (noise / scale + 1), rel=ROUNDING)


def test_the_noise_scale_of_equal_gradients_and_of_nothing_but_noise():
    tx = scale_by_adascale(optax.constant_schedule(0.1), scale=8.0, samples=8)
    ones = np.ones((8, 7))
    signs = np.array([1, -1] * 4)[:, None]
    for grads, expected in ((0 * ones, 0.0), (ones, 0.0), (signs * ones, 1e6)):
        noise_scale = float(metrics_of(run(tx, [grads])[2])["noise_scale"])
        # Between gradients that are equal, there is a difference of rounding.
        assert noise_scale == pytest.approx(expected, rel=ROUNDING, abs=10 * ROUNDING)


def test_the_chain_of_a_config_multiplies_momentum_and_decay_by_gain_and_rate():
    """Gradients are clipped after they are measured; decay shrinks with the same factor as the step."""
    config = dict(name="sgd", schedule="linear", learning_rate=0.1, clip_norm=0.5, weight_decay=0.01)
    tx = make_optimizer(**config, adascale=4.0, total_steps=60, microbatches=4).tx
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=(4, 7)) + 0.5 for _ in range(5)]
    _, rates = reference(grads, 4.0, lambda t: 0.1 * (1 - t / 60))
    want, momentum = np.ones(7), np.zeros(7)
    params = {"kernel": jnp.ones(7)}
    state = tx.init(params)
    for g, rate in zip(grads, rates, strict=True):
        mean, statistics = sample_statistics({"kernel": jnp.asarray(g, jnp.float32)})
        updates, state = tx.update(mean, state, params, **statistics)
        params = optax.apply_updates(params, updates)
        assert float(metrics_of(state)["learning_rate"]) == pytest.approx(rate, rel=ROUNDING)
        clipped = g.mean(0) * min(1, 0.5 / np.linalg.norm(g.mean(0)))
        momentum = 0.9 * momentum + clipped
        want -= rate * (momentum + 0.01 * want)
    np.testing.assert_allclose(params["kernel"], want, rtol=ROUNDING)


def test_gradients_in_float16_keep_their_dtype_and_are_measured_in_float32():
    """The square of 300, the norm, is not in float16."""
    grads = [jnp.full((100,), 30.0, jnp.float16), jnp.full((100,), 2.0**-12, jnp.float16)]
    for g, norm in zip(grads, (300.0, 10 * 2.0**-12), strict=True):
        arguments = update_arguments({"kernel": g}, {"microbatch_grad_norm": jnp.float32(norm)})
        assert float(arguments["square_of_mean"]) == pytest.approx(norm**2, rel=ROUNDING)
        tx = scale_by_adascale(lambda _: 1.0, scale=4.0, samples=4)
        update, _ = tx.update({"kernel": g}, tx.init({"kernel": g}), **arguments)
        assert update["kernel"].dtype == jnp.float16


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


def test_tau_counts_gains_as_exactly_after_many_steps_as_at_first():
    """In float32, τ = 2^24 + 1 would not exist, and a gain of 1 would add nothing to 2^24."""
    tx = scale_by_adascale(optax.constant_schedule(0.1), scale=2.0, samples=2)
    zeros = {"w": jnp.zeros(1)}
    state, total = tx.init(zeros)._replace(whole_steps=jnp.int32(2**24)), 0.0
    for noise in (0.0, 0.3, 0.6, 0.9):
        statistics = {"mean_of_squares": jnp.float32(1 + noise), "square_of_mean": jnp.float32(1)}
        _, state = tx.update(zeros, state, **statistics)
        total += float(state.gain)
        counted = int(state.whole_steps) - 2**24 + float(state.part_of_step)
        assert counted == pytest.approx(total, rel=ROUNDING) and 0 <= state.part_of_step < 1


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match="samples=1 must be at least 2"):
        scale_by_adascale(optax.constant_schedule(0.1), scale=2.0, samples=1)
    with pytest.raises(ValueError, match=r"scale=0.5 must be at least 1"):
        scale_by_adascale(optax.constant_schedule(0.1), scale=0.5, samples=2)
