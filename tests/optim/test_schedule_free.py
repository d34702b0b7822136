"""Schedule-free AdamW is evaluated at its average, and evaluation restores only what that needs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp import optim
from maxlp.optim.pure_bf16 import PureBf16State
from maxlp.optim.schedule_free import eval_part, scale_by_debiased_rms
from tests.optim.common import (
    assert_trees_equal,
    each_step,
    make_optimizer,
    random_tree,
    run,
    saved_and_restored,
)

SHAPES = {"layers": {"kernel": (2, 8, 4)}, "norm": {"scale": (8,)}}


def test_evaluation_uses_the_weighted_average_of_the_iterates():
    """z weighted by the square of the largest rate so far (Defazio et al. 2024, section 4)."""
    optimizer = make_optimizer(name="schedule_free_adamw", warmup_steps=3)
    params = grads = {"kernel": jnp.ones((2, 2))}
    found = list(each_step(optimizer.tx, params, [grads] * 4))
    iterates, (_, trained, state) = [after.z["kernel"] for *_, after in found], found[-1]
    rates = np.maximum.accumulate([optimizer.schedule(i) for i in range(4)]) ** 2
    want = sum(w * z for w, z in zip(rates / rates.sum(), iterates, strict=True))
    # Four steps in float32.
    np.testing.assert_allclose(optim.eval_params(state, trained)["kernel"], want, rtol=1e-6)


@pytest.mark.parametrize("wrapped", [0, 1, 2])
def test_the_part_that_evaluation_needs_is_restored_alone(tmp_path, wrapped):
    tx = make_optimizer(name="schedule_free_adamw", warmup_steps=3).tx
    params, opt_state = run(tx, random_tree(SHAPES, 9), [random_tree(SHAPES, i) for i in range(5)])
    want = optax.contrib.schedule_free_eval_params(opt_state, params)
    state = optax.MultiTransformState({"group": opt_state}) if wrapped == 2 else opt_state
    state = PureBf16State(opt_state.z["norm"]["scale"], state, None) if wrapped else state
    wanted = {"params": params, "opt_state": eval_part(state)}
    assert len(jax.tree.leaves(wanted["opt_state"])) == 3
    part = saved_and_restored(tmp_path, {"params": params, "opt_state": state}, wanted)
    assert_trees_equal(optim.eval_params(part["opt_state"], part["params"]), want)
    assert_trees_equal(optim.eval_params(state, params), want)
    assert not np.array_equal(want["norm"]["scale"], params["norm"]["scale"])


@pytest.mark.parametrize("name", [name for name in optim.OPTIMIZERS if name != "schedule_free_adamw"])
def test_all_others_are_evaluated_at_their_trained_parameters(name):
    params = {"layers": {"attn": {"kernel": jnp.ones((2, 8, 4))}}}
    state = jax.eval_shape(make_optimizer(name=name, warmup_steps=3).tx.init, params)
    assert optim.eval_params(state, params) is params
    assert optim.eval_params({}, params) is params


def test_the_rescaling_is_adams_without_a_first_moment():
    """g / (√v̂ + eps), with an eps that shows."""
    b2, eps, v = 0.9, 0.1, np.zeros(4)
    tx = scale_by_debiased_rms(b2, eps)
    state = tx.init({"w": jnp.zeros(4)})
    for t, g in enumerate(np.random.default_rng(0).normal(size=(3, 4)), 1):
        updates, state = tx.update({"w": jnp.asarray(g, jnp.float32)}, state)
        v = b2 * v + (1 - b2) * g**2
        # A few roundings to float32.
        np.testing.assert_allclose(updates["w"], g / (np.sqrt(v / (1 - b2**t)) + eps), rtol=1e-6)
