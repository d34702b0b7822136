"""Sharpness in the logits, against a search of the box in float64."""

import itertools

import jax
import numpy as np
import pytest
from flax import nnx

from maxlp.families.llama import sharpness
from tests.fixtures import Trainer, batch


def loss(logits, target):
    """Cross-entropy in float64."""
    return (
        np.log(np.sum(np.exp(logits - logits.max(-1, keepdims=True)), -1))
        + logits.max(-1)
        - logits[..., target]
    )


def reference(logits, targets):
    """The definition: f is the mean over rows, and the maximum that of all corners of the box."""
    losses, highest = [], []
    for row, target in zip(np.asarray(logits, np.float64), targets, strict=True):
        corners = np.array(list(itertools.product((-1, 1), repeat=len(row))))
        box = sharpness.EPSILON * (np.abs(row) + 1)
        at_corners = loss(row + corners * box, target)
        inside = np.random.default_rng(0).uniform(-1, 1, (200, len(row)))
        assert at_corners.max() >= loss(row + inside * box, target).max(), "a convex function"
        losses.append(loss(row, target))
        highest.append(at_corners.max())
    return 100 * (np.mean(highest) - np.mean(losses)) / (1 + np.mean(losses))


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_the_closed_form_is_the_maximum_over_the_box(scale):
    logits = scale * np.random.default_rng(1).normal(size=(4, 7)).astype(np.float32)
    targets = np.array([0, 3, 6, 3])
    ours = sharpness.sharpness(logits, targets, np.array([True] * 4))
    # float32 sums of 7 terms, of which expm1 and log1p keep the relative precision.
    assert float(ours) == pytest.approx(reference(logits, targets), rel=2e-5)
    some = np.array([True, False, True, False])
    ours = sharpness.sharpness(logits, targets, some)
    assert float(ours) == pytest.approx(reference(logits[some], targets[some]), rel=2e-5)


@pytest.mark.full
def test_it_is_of_the_last_target_of_each_row():
    trainer = Trainer(num_layers=1)
    state, data = trainer.init(), batch(0, rows=4, length=16)
    data["loss_mask"][0], data["loss_mask"][1, 5:] = False, False
    data["loss_mask"][1, 4] = True
    with jax.set_mesh(trainer.mesh):
        model = nnx.merge(trainer.graphdef, state["params"], state["model_state"])
        logits, targets, counts = jax.device_get(sharpness.last_token(model, data))
        every = jax.device_get(model(data["tokens"], data["positions"], data["segment_ids"]))
        measured = sharpness.measure(state, data, graphdef=trainer.graphdef)
    np.testing.assert_array_equal(counts, [False, True, True, True])
    last = [max(np.flatnonzero(row)) for row in data["loss_mask"][1:]]
    assert last[0] == 4
    np.testing.assert_array_equal(targets[1:], data["targets"][[1, 2, 3], last])
    np.testing.assert_allclose(
        logits[1:], every[[1, 2, 3], last], rtol=1e-5, atol=1e-5
    )  # other matmul shapes
    expected = sharpness.sharpness(logits, targets, counts)
    assert float(measured) == pytest.approx(float(expected), rel=1e-4)
