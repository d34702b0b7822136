"""The step of a resolved config: its optimizer gets what it needs from the gradients."""

import functools

import jax
import numpy as np
import pytest

from maxlp.core.train_step import jit_step
from maxlp.optim.adascale import AdascaleState
from maxlp.optim.tree_utils import find_states
from maxlp.parallel.batches import global_batch
from maxlp.run.experiment import resolve_settings
from tests import composition, fixtures

ADASCALE = ("adascale",)  # S = 2, two microbatches
pytestmark = pytest.mark.full


class Stepper:
    """The compiled step of a row of `tests.composition` on one device."""

    def __init__(self, row):
        self.run = resolve_settings(composition.settings("llama", row), jax.devices()[:1])
        with jax.set_mesh(self.run.mesh):
            self.graphdef, self.abstract = self.run.abstract_state()
            self.step = jit_step(self.run.step, self.graphdef, self.abstract, self.run.mesh)
            gradients = self.run.family.gradients(self.run.settings.loss, 0, 1, False)
        self.gradients = jax.jit(functools.partial(gradients, self.graphdef, loss_scale=None))

    def state(self):
        with jax.set_mesh(self.run.mesh):
            return self.run.initial_state(self.abstract)

    def __call__(self, state, batch):
        with jax.set_mesh(self.run.mesh):
            state, metrics = self.step(state, global_batch(batch, self.run.mesh))
        return state, jax.device_get(metrics)

    def gradient(self, state, batch):
        """The flat gradient of a batch, float64."""
        with jax.set_mesh(self.run.mesh):
            grads, *_ = self.gradients(state, global_batch(batch, self.run.mesh))
        return np.concatenate([np.ravel(g).astype(np.float64) for g in jax.tree.leaves(grads)])


@pytest.fixture(scope="module")
def stepper():
    return Stepper(ADASCALE)


def full_batch(seed):
    """Every token is predicted, so that all microbatches weigh the same."""
    batch = fixtures.batch(seed)
    return batch | {"loss_mask": np.ones_like(batch["loss_mask"])}


@pytest.mark.default_emitters
def test_three_gains_are_the_papers_of_the_gradients_of_both_microbatches(stepper):
    """In float64 from float32 gradients; the difference of their squares loses some digits."""
    state, variance, squared, tau = stepper.state(), 0.0, 0.0, 0.0
    keep = 1 - 2 / 1000
    for seed in range(3):
        batch = full_batch(seed)
        parts = [{k: v[i::2] for k, v in batch.items()} for i in range(2)]
        g = np.stack([stepper.gradient(state, part) for part in parts])
        sigma2 = np.sum((g - g.mean(0)) ** 2)  # S / n / (n - 1) = 1
        variance = keep * variance + (1 - keep) * sigma2
        squared = keep * squared + (1 - keep) * max(np.sum(g.mean(0) ** 2) - sigma2 / 2, 0)
        gain = (variance + squared) / (variance / 2 + squared)
        state, metrics = stepper(state, batch)
        assert 1.01 < gain < 1.99
        assert metrics["gain"] == pytest.approx(gain, rel=1e-4)
        rate = gain * float(stepper.run.schedule(tau))
        assert metrics["learning_rate"] == pytest.approx(rate, rel=1e-4)
        tau += gain
        assert metrics["tau"] == pytest.approx(tau, rel=1e-4)
        assert stepper.run.progress(state, seed + 1).done == metrics["tau"]


def test_equal_microbatches_gain_1_and_step_like_sgd(stepper):
    batch = {k: np.repeat(v[:4], 2, axis=0) for k, v in full_batch(0).items()}
    sgd = Stepper(("sgd", "microbatches"))
    state, metrics = stepper(stepper.state(), batch)
    want, _ = sgd(sgd.state(), batch)
    # The squares of equal gradients differ by rounding in float32.
    assert metrics["gain"] == pytest.approx(1.0, abs=1e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (state["params"], want["params"])), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)  # float32, in two programs


@pytest.mark.parametrize("row", [("fp16", "adascale"), ("adascale", "guard=skip")], ids="+".join)
def test_a_rejected_step_does_not_count(row):
    """A gradient that is not finite leaves τ and the measured noise as they were, bit for bit."""
    stepper = Stepper(row)
    state, before = stepper(stepper.state(), full_batch(0))
    [(_, measured)] = jax.device_get(find_states(state["opt_state"], AdascaleState))
    embedding = state["params"]["tok_embed"]["embedding"]
    state["params"]["tok_embed"]["embedding"] = embedding.at[:].set(np.nan)
    state, after = stepper(state, full_batch(1))
    assert after["skipped"] == 1 and after["tau"] == before["tau"]
    [(_, unchanged)] = jax.device_get(find_states(state["opt_state"], AdascaleState))
    assert unchanged == measured


def test_the_recorded_learning_rate_is_the_one_used_after_skipped_steps():
    """Also once the guard that skipped them is gone."""
    stepper = Stepper(("sgd", "microbatches"))
    _, metrics = stepper(stepper.state() | {"step": jax.numpy.int32(3)}, full_batch(0))
    used, ahead = map(float, map(stepper.run.schedule, (0, 3)))
    assert metrics["learning_rate"] == np.float32(used) != np.float32(ahead)
