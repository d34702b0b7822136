import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp import losses

B, S, D, V = 3, 8, 16, 50


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(B, S, D)).astype(np.float32),
        "w": rng.normal(size=(D, V)).astype(np.float32),
        "targets": rng.integers(0, V, (B, S)).astype(np.int32),
        "mask": rng.random((B, S)) < 0.7,
    }


def total(p, w, x, num_chunks, z_loss):
    sums = losses.next_token(
        lambda x: x @ w, x, p["targets"], p["mask"], num_chunks=num_chunks, z_loss=z_loss
    )
    return sums["loss"], sums


@pytest.mark.parametrize("num_chunks", [1, 2, 8])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_equals_optax_with_gradients(problem, num_chunks, z_loss):
    p = problem

    def reference(w, x):
        logits = x @ w
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, p["targets"])
        nll += z_loss * jax.nn.logsumexp(logits, -1) ** 2
        return jnp.sum(nll * p["mask"])

    ours = jax.value_and_grad(lambda w, x: total(p, w, x, num_chunks, z_loss)[0], argnums=(0, 1))
    (loss, grads), (want, want_grads) = (
        f(p["w"], p["x"]) for f in (ours, jax.value_and_grad(reference, (0, 1)))
    )
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, want_grads)


def test_counts(problem):
    p = problem
    sums = total(p, p["w"], p["x"], 2, 0.0)[1]
    hits = (np.argmax(p["x"] @ p["w"], -1) == p["targets"]) & p["mask"]
    assert sums["tokens"] == p["mask"].sum()
    assert sums["correct"] == hits.sum()


def test_chunks_never_hold_all_logits():
    """Peak temporary memory of loss and gradient falls with the number of chunks, well below all logits."""
    B, S, D, V = 4, 256, 32, 4096
    shapes = [jax.ShapeDtypeStruct(s, t) for s, t in (((D, V), "float32"), ((B, S, D), "float32"))]

    def temp(num_chunks):
        def loss(w, x):
            targets, mask = jnp.zeros((B, S), jnp.int32), jnp.ones((B, S), bool)
            return losses.next_token(lambda x: x @ w, x, targets, mask, num_chunks=num_chunks, z_loss=0.0)[
                "loss"
            ]

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    all_logits = B * S * V * 4
    assert temp(1) > all_logits
    assert temp(16) < all_logits / 4
