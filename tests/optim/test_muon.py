"""Muon by its definition, for the matrices of the layers; Adam for the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxlp.optim.muon import scale_by_muon
from tests.optim.common import random_tree, run

B1, B2, BETA, RMS = 0.5, 0.9, 0.8, 0.3
SHAPES = {
    "layers": {"attn": {"q_proj": {"kernel": (3, 8, 24)}}, "mlp": {"down_proj": {"kernel": (3, 24, 8)}}},
    "lm_head": {"kernel": (8, 16)},
}


def newton_schulz(x, steps):
    """Five steps of the quintic iteration with Jordan's coefficients, in float64."""
    x = x / np.linalg.norm(x)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def muon(grads):
    """The step for one matrix after these gradients: Nesterov's momentum, debiased as in NAdam."""
    m = np.zeros_like(grads[0])
    for g in grads:
        m = BETA * m + (1 - BETA) * g
    t = len(grads)
    ahead = BETA * m / (1 - BETA ** (t + 1)) + (1 - BETA) * grads[-1] / (1 - BETA**t)
    rows, columns = ahead.shape
    step = newton_schulz(ahead if rows <= columns else ahead.T, 5)
    return RMS * max(rows, columns) ** 0.5 * (step if rows <= columns else step.T)


def test_three_steps_equal_the_definition_for_each_layer():
    params, grads = random_tree(SHAPES, 0), [random_tree(SHAPES, seed) for seed in (1, 2, 3)]
    tx = scale_by_muon(B1, B2, 1e-8, beta=BETA, rms=RMS)
    state = tx.init(params)
    for g in grads:
        updates, state = jax.jit(tx.update)(g, state, params)
    for path in (("attn", "q_proj"), ("mlp", "down_proj")):
        ours = updates["layers"][path[0]][path[1]]["kernel"]
        of_path = [np.asarray(g["layers"][path[0]][path[1]]["kernel"], np.float64) for g in grads]
        for layer in range(3):
            expected = muon([g[layer] for g in of_path])
            # Five iterations in float32 multiply rounding errors by up to 3.4 each.
            np.testing.assert_allclose(ours[layer], expected, atol=3.4**5 * 2.0**-22)
            assert 0.6 * RMS < np.sqrt(np.mean(np.square(ours[layer]))) < 1.3 * RMS
    head = {"kernel": params["lm_head"]["kernel"]}
    adam, adam_state = optax.scale_by_adam(B1, B2, 1e-8), None
    for g in grads:
        adam_state = adam.init(head) if adam_state is None else adam_state
        expected, adam_state = adam.update({"kernel": g["lm_head"]["kernel"]}, adam_state)
    np.testing.assert_allclose(updates["lm_head"]["kernel"], expected["kernel"], rtol=1e-5, atol=1e-7)


def test_momentum_keeps_its_dtype():
    tx = scale_by_muon(mu_dtype="bfloat16")
    _, state = run(tx, random_tree(SHAPES, 0), [random_tree(SHAPES, 1)])
    moments = [mu for _, mu in optax.tree.get_all_with_path(state, "mu")]
    assert {leaf.dtype for leaf in jax.tree.leaves(moments)} == {jnp.dtype(jnp.bfloat16)}
