"""AdamP against the authors' algorithm, rewritten in numpy with torch's layout: rows are channels."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.optim.adamp import scale_by_adamp
from tests.optim.common import each_step, make_optimizer

LR, B1, B2, EPS, DECAY = 0.02, 0.9, 0.99, 1e-8, 0.1


def reference(p, grads, decay=DECAY, delta=0.1, wd_ratio=0.1):
    """Parameters after each step, and which branch each step took: "channel", "layer" or "none"."""
    m, v = np.zeros_like(p), np.zeros_like(p)
    out, branches = [], []
    for t, g in enumerate(grads, 1):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        perturb = m / (np.sqrt(v) / np.sqrt(1 - B2**t) + EPS)
        ratio, branch = 1.0, "none"
        views = {"channel": (len(p), -1), "layer": (1, -1)} if p.ndim > 1 else {}
        for name, shape in views.items():
            x, y = g.reshape(shape), p.reshape(shape)
            cosine = np.abs((x * y).sum(1)) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))
            if cosine.max() < delta / np.sqrt(y.shape[1]):
                unit = y / (np.linalg.norm(y, axis=1, keepdims=True) + EPS)
                flat = perturb.reshape(shape)
                perturb = (flat - unit * (unit * flat).sum(1, keepdims=True)).reshape(p.shape)
                ratio, branch = wd_ratio, name
                break
        p = p * (1 - LR * decay * ratio) - LR / (1 - B1**t) * perturb
        out.append(p)
        branches.append(branch)
    return out, branches


def gradients(params, rng, kind):
    """Orthogonal to every row of the weight, to the weight as a whole, or to nothing."""
    g = rng.normal(size=params.shape)
    if kind == "channel":
        g -= params * (g * params).sum(1, keepdims=True) / (params**2).sum(1, keepdims=True)
    if kind == "layer":
        g -= params * (g * params).sum() / (params**2).sum()
    return g


def run(tree, grads):
    tx = make_optimizer(name="adamp", learning_rate=LR, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY).tx
    return [jax.device_get(params) for _, params, _ in each_step(tx, tree, grads)]


@pytest.mark.parametrize("name", ["kernel", "embedding"])
def test_thirty_steps_of_all_branches_equal_the_authors(name):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        p = rng.normal(size=(6, 10))  # rows are channels, as in torch
        grads, kinds, q = [], ["channel", "layer", "none", "channel", "none", "layer"] * 5, p
        for kind in kinds:  # each gradient is made for the weight of its step
            grads.append(gradients(q, rng, kind))
            q = reference(p, grads, decay=DECAY if name == "kernel" else 0.0)[0][-1]
        want, branches = reference(p, grads, decay=DECAY if name == "kernel" else 0.0)
        assert branches == kinds
        axes = (1, 0) if name == "kernel" else (0, 1)  # kernels are (in, out)
        got = run({name: jnp.asarray(p.transpose(axes))}, [{name: g.transpose(axes)} for g in grads])
    np.testing.assert_allclose([x[name].transpose(axes) for x in got], want, atol=1e-12)


def test_vectors_are_adamw_and_layers_of_a_stack_are_tensors_of_their_own():
    rng = np.random.default_rng(1)
    p = rng.normal(size=(2, 10, 6)).astype(np.float32)
    bias = rng.normal(size=(2, 6)).astype(np.float32)
    grads = []
    for _ in range(3):
        # Layer 0 is scale-invariant by channel, layer 1 is not.
        free = gradients(p[0].T, rng, "channel").T
        grads.append({"layers": {"kernel": np.stack([free, p[1] + 0.1 * free]), "bias": p[:, 0]}})
    got = run({"layers": {"kernel": jnp.asarray(p), "bias": jnp.asarray(bias)}}, grads)[-1]["layers"]
    branches = set()
    for i in range(2):
        want, taken = reference(p[i].T.astype(np.float64), [g["layers"]["kernel"][i].T for g in grads])
        # Three steps, and decay in each, round parameters of up to 4, by up to 1.2e-7.
        np.testing.assert_allclose(got["kernel"][i], want[-1].T, atol=2e-6)
        branches.add(taken[0])
        want, _ = reference(bias[i].astype(np.float64), [g["layers"]["bias"][i] for g in grads], decay=0.0)
        np.testing.assert_allclose(got["bias"][i], want[-1], atol=2e-6)
    assert branches == {"channel", "none"}


def test_a_scale_invariant_weight_does_not_grow():
    """The loss depends only on the weight's direction; momentum lengthens Adam's weight."""
    target = jnp.asarray(np.random.default_rng(2).normal(size=(32, 1)), jnp.float32)

    def length(tx):
        def loss(p):
            return -jnp.sum(p["kernel"] * target) / jnp.linalg.norm(p["kernel"])

        def step(carry, _):
            params, state = carry
            updates, state = tx.update(jax.grad(loss)(params), state, params)
            return (optax.apply_updates(params, jax.tree.map(lambda u: -0.05 * u, updates)), state), None

        params = {"kernel": jnp.asarray(np.random.default_rng(3).normal(size=(32, 1)), jnp.float32)}
        (params, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, length=100))((params, tx.init(params)))
        return float(jnp.linalg.norm(params["kernel"]))

    adam, adamp = length(optax.scale_by_adam(B1, B2)), length(scale_by_adamp(B1, B2))
    start = float(np.linalg.norm(np.random.default_rng(3).normal(size=32)))
    assert adamp - start < 0.5 * (adam - start)
