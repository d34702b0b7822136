"""AdaGC by the equations of its paper, in NumPy and float64."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.optim import AdaGCConfig
from maxlp.optim.adagc import clip_by_own_norms
from tests.optim.common import (
    LAYERS_AND_HEAD,
    each_step,
    jitted_step,
    make_optimizer,
    random_tree,
    run,
    tensors_of,
)

RATIO, DECAY, WARMUP, CLIP_NORM = 1.05, 0.9, 3, 2.0
CONFIG = AdaGCConfig(ratio=RATIO, decay=DECAY, warmup_steps=WARMUP)
SCALES = (1.0, 0.2, 3.0, 0.5, 20.0, 0.1, 4.0)


def adagc(grads, global_norms):
    """The clipped gradients of one tensor."""
    average, clipped = np.inf, []
    for t, (g, of_all) in enumerate(zip(grads, global_norms, strict=True)):
        norm = np.linalg.norm(g)
        if t < WARMUP:
            g = g * min(1.0, CLIP_NORM / of_all)
            average = min(average, np.linalg.norm(g))
        else:
            g = g * min(1.0, RATIO * average / norm)
            average = DECAY * average + (1 - DECAY) * np.linalg.norm(g)
        clipped.append(g)
    return clipped


def test_updates_equal_the_paper_s_for_each_tensor_of_each_layer():
    """Through the warm-up, spikes of one tensor and quiet steps."""
    grads = [random_tree(LAYERS_AND_HEAD, seed, scale) for seed, scale in enumerate(SCALES)]
    global_norms = [float(optax.tree.norm(g)) for g in grads]
    tx = optax.chain(clip_by_own_norms(CONFIG, CLIP_NORM), optax.scale(-1.0))
    params = optax.tree.zeros_like(grads[0])
    got, _ = run(tx, params, grads)
    for ours, *of_steps in zip(*map(tensors_of, (got, *grads)), strict=True):
        want = -sum(adagc(map(np.float64, of_steps), global_norms))
        # Seven sums in float32, of entries up to 6.
        np.testing.assert_allclose(ours, want, atol=2e-6)


def test_a_spike_in_one_tensor_leaves_the_others_as_they_are():
    """The global norm would shorten all of them to almost nothing."""
    quiet = {"a": jnp.full(8, 0.01), "b": jnp.full(8, 0.01)}
    spike = quiet | {"b": jnp.full(8, 1e6)}
    tx = clip_by_own_norms(CONFIG, CLIP_NORM)
    *_, (clipped, _, _) = each_step(tx, quiet, [quiet] * WARMUP + [spike])
    np.testing.assert_array_equal(clipped["a"], quiet["a"])
    # A norm of 8 numbers in float32.
    np.testing.assert_allclose(clipped["b"], RATIO * quiet["b"], rtol=1e-6)


@pytest.mark.parametrize("zeros", [1, WARMUP + 2])
def test_a_tensor_without_gradient_can_move_later(zeros):
    tx, one = clip_by_own_norms(CONFIG), {"a": jnp.ones(4)}
    step = jitted_step(tx)
    params, state = one, tx.init(one)
    for _ in range(zeros):
        params, state = step({"a": jnp.zeros(4)}, state, params)
    got, _ = step(one, state, params)
    np.testing.assert_array_equal(got["a"], 2.0)


@pytest.mark.parametrize("clip_norm, quiet", [(CLIP_NORM, 1), (0.0, WARMUP)])
def test_a_spike_whose_squares_overflow_takes_no_step(clip_norm, quiet):
    """In the warm-up and after it; later gradients have the average of those before the spike."""
    tx, one, spike = clip_by_own_norms(CONFIG, clip_norm), {"a": jnp.ones(4)}, {"a": jnp.full(4, 1e20)}
    steps = each_step(tx, one, [one] * quiet + [spike, one])
    *_, (before, _, old), (skipped, _, new), (after, _, _) = steps
    np.testing.assert_array_equal(skipped["a"], 0.0)
    np.testing.assert_array_equal(new.norms["a"], old.norms["a"])
    np.testing.assert_array_equal(after["a"], before["a"])


def test_it_takes_the_place_of_the_global_norm_in_the_chain():
    """After the warm-up, gradients that do not grow are not clipped, however large they are."""
    common = dict(name="sgd", learning_rate=1.0, b1=0.0, clip_norm=0.5)
    grads = [{"a": jnp.full(4, 1.0)}] * 3
    ours, plain = (
        run(make_optimizer(**common, **more).tx, grads[0], grads)[0]["a"][0]
        for more in (dict(adagc=dict(ratio=100.0, warmup_steps=1)), {})
    )
    assert float(plain) == pytest.approx(1 - 3 * 0.25) and float(ours) == pytest.approx(1 - 0.25 - 2)
