"""Stable-SPAM by the algorithm of its paper, in NumPy and float64."""

import jax.numpy as jnp
import numpy as np
import optax

from maxlp.optim.stable_spam import scale_by_stable_spam
from tests.optim.common import LAYERS_AND_HEAD, random_tree, run, tensors_of

B1, B2, EPS, G1, G2, G3, RESET = 0.8, 0.9, 1e-8, 0.7, 0.9, 0.95, 4
OPTIONS = dict(norm_decay=G1, squared_norm_decay=G2, largest_decay=G3, reset_every=RESET)


def stable_spam(grads):
    """The steps of one tensor."""
    largest = norm = square = m = v = 0.0
    since, steps = 0, []
    for t, g in enumerate(grads, 1):
        top = np.abs(g).max()
        largest = G3 * largest + (1 - G3) * top
        bound = largest / (1 - G3**t)
        g = np.where(np.abs(g) > bound, g / top * bound, g)
        size = np.linalg.norm(g)
        norm, square = G1 * norm + (1 - G1) * size, G2 * square + (1 - G2) * size**2
        g = g / size * (norm / (1 - G1**t)) / (np.sqrt(square / (1 - G2**t)) + EPS)
        if t % RESET == 0:
            m = v = since = 0
        since += 1
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        steps.append(m / (1 - B1**since) / (np.sqrt(v / (1 - B2**since)) + EPS))
    return steps


def test_ten_steps_equal_the_paper_s_for_each_tensor_of_each_layer():
    """Through two resets, with gradients that grow and shrink, one of them with a spike."""
    scales = (1.0, 0.2, 30.0, 0.5, 2.0, 0.1, 4.0, 1.0, 1.0, 1.0)
    grads = [random_tree(LAYERS_AND_HEAD, seed, scale) for seed, scale in enumerate(scales)]
    grads[5]["lm_head"]["kernel"] = grads[5]["lm_head"]["kernel"].at[1, 2].set(1e4)
    tx = optax.chain(scale_by_stable_spam(B1, B2, EPS, **OPTIONS), optax.scale(-1.0))
    got, _ = run(tx, optax.tree.zeros_like(grads[0]), grads)
    for ours, *of_steps in zip(*map(tensors_of, (got, *grads)), strict=True):
        # Ten float32 steps of about 1.
        np.testing.assert_allclose(ours, -sum(stable_spam(map(np.float64, of_steps))), atol=2e-5)


def test_a_spike_moves_neither_the_parameter_nor_the_moments_far():
    """Adam's second moment would remember a spike of 10^6 for hundreds of steps."""
    quiet = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)}
    spike = {"kernel": quiet["kernel"].at[0, 0].set(1e6)}
    tx = scale_by_stable_spam(reset_every=0, b2=0.999)
    _, before = run(tx, quiet, [quiet] * 20)
    _, after = run(tx, quiet, [quiet] * 20 + [spike])
    ratio = after.adam.nu["kernel"] / before.adam.nu["kernel"]
    # The gradient keeps its norm, and b2 = 0.999: at most 64 entries in one, ten times over. Adam: 10^9.
    assert float(jnp.max(ratio)) < 640
    assert np.isfinite(after.adam.mu["kernel"]).all()


def test_gradients_of_zeros_are_no_steps():
    zeros = {"kernel": jnp.zeros((4, 4))}
    got, _ = run(scale_by_stable_spam(), zeros, [zeros] * 2)
    np.testing.assert_array_equal(got["kernel"], 0.0)
