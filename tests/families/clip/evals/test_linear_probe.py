"""The linear probe against Newton's method in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.families.clip.evals.linear_probe import linear_probe
from maxlp.parallel import sharding
from maxlp.parallel.batches import global_batch

N, E, C = 60, 4, 3
L2 = 0.01


def problem(n, seed):
    """Overlapping clusters around the unit vectors."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, C, n).astype(np.int32)
    x = 1.2 * np.eye(E)[label] + rng.normal(size=(n, E))
    return x.astype(np.float32), label


def batches(x, label, mask=None, size=16):
    mask = np.ones(len(x), bool) if mask is None else mask
    for i in range(0, len(x), size):
        part = {"image": x, "label": label, "mask": mask}
        yield {key: value[i : i + size] for key, value in part.items()}


def newton(x, label):
    """The minimum: weights (E, C) and bias (C,) as one array (E + 1, C)."""
    x = np.c_[x, np.ones(len(x))].astype(np.float64)
    penalty = L2 * np.diag(np.r_[np.ones(E), 0.0])
    w = np.zeros((E + 1, C))
    for _ in range(30):
        p = np.exp(x @ w)
        p /= p.sum(1, keepdims=True)
        grad = x.T @ (p - np.eye(C)[label]) / len(x) + penalty @ w
        hessian = np.einsum("ni,nj,nac->iajc", x, x, p[:, :, None] * (np.eye(C) - p[:, None, :])) / len(x)
        hessian += np.einsum("ij,ac->iajc", penalty, np.eye(C))
        size = (E + 1) * C
        w -= np.linalg.lstsq(hessian.reshape(size, size), grad.reshape(size), rcond=None)[0].reshape(
            w.shape
        )
    assert np.abs(grad).max() < 1e-12
    return w


def measure(w, x, label):
    logits = np.c_[x, np.ones(len(x))] @ w
    nll = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(x)), label]
    return nll.mean(), np.mean(logits.argmax(1) == label)


def check(results, train, test, w):
    for name, data in (("train", train), ("test", test)):
        loss, accuracy = measure(w, *data)
        # The optimization ends where the loss is flat to a rounding, 6e-8. A loss is quadratic near its
        # minimum, so the weights are within about 1e-3 of it and other losses within 1e-4.
        np.testing.assert_allclose(results[f"{name}_loss"], loss, atol=1e-4)
        assert results[f"{name}_accuracy"] == pytest.approx(accuracy, abs=1e-6)
        assert results[f"{name}_examples"] == len(data[0])


@pytest.mark.full
def test_equals_newton_on_one_device_and_on_a_mesh():
    train, test = problem(N, seed=0), problem(48, seed=1)
    w = newton(*train)
    assert 0.5 < measure(w, *test)[1] < 1
    probe = {"num_classes": C, "l2": L2}
    check(linear_probe(jnp.asarray, batches(*train), batches(*test), **probe), train, test, w)
    # Rows with a false mask or without a label do not count.
    x, label = (np.concatenate([a, a[:4]]) for a in train)
    label[-4:-2] = -1
    mask = np.arange(N + 4) < N + 2
    with jax.set_mesh(mesh := sharding.make_mesh(data=2, fsdp=4)):
        placed = (global_batch(b, mesh) for b in batches(x, label, mask))
        tests = (global_batch(b, mesh) for b in batches(*test))
        check(linear_probe(jnp.asarray, placed, tests, **probe), train, test, w)


def test_max_steps_ends_the_optimization():
    x, label = problem(N, seed=0)
    results = linear_probe(
        jnp.asarray, batches(x, label), batches(x, label), num_classes=C, l2=L2, max_steps=2
    )
    assert results["steps"] == 2
    assert results["train_loss"] < np.log(C)


def test_labels_must_be_below_the_number_of_classes():
    x, label = problem(N, seed=0)
    with pytest.raises(ValueError, match="an image has the label 2, of 2 classes; list all of them in"):
        linear_probe(jnp.asarray, batches(x, label), batches(x, label), num_classes=2, l2=L2)
