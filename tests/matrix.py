"""A row of the composition table, executed: a training run with many features on simulated devices.

A row of `tests.composition.rows` switches many features on at once. It must train like the same row on one
device without its neutral features (mesh, microbatches, remat, released gradients, guards), and resume bit
for bit.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from maxlp.core import replicas
from maxlp.core.train_step import jit_step
from maxlp.parallel.batches import global_batch
from maxlp.run.experiment import resolve_settings
from maxlp.runtime.checkpoint import Checkpointer
from tests import composition

STEPS = 3
# Relative error of losses and gradient norms: sums in another order, in the dtype of the activations.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
# A value near a rounding boundary may be rounded the other way, which in E4M3 changes it by up to 2^-3 of
# itself. In E2M1 that is four times as much, and in QuEST's uniform grid eight times (1 or 3). In nvfp4 the
# scale of a tensor comes from its microbatch, so that all values are rounded differently, not only those
# near a boundary.
QUANTIZED_TOLERANCE = 5e-3
# The inputs of a quantized block after a block in 16 bits differ between layouts by 2^-11 of a value or
# more, not by 2^-24, so that many more values may be rounded the other way.
AFTER_16_BITS_TOLERANCE = 4 * QUANTIZED_TOLERANCE
# If the last bit of an input differs, other tokens are sampled: with `keep=0.9` the noise in the gradients
# of kernels is up to a third of them, and their norms differ by a few percent.
OTHER_TOLERANCE = {
    "nvfp4": 4 * QUANTIZED_TOLERANCE,
    "quest": 8 * QUANTIZED_TOLERANCE,
    "wta_crs": 20 * QUANTIZED_TOLERANCE,
}
# The sharding of a gradient decides which of its elements share a scale when it is sent in int8. Each is
# rounded by up to half a step of 1/127, or stochastically by up to a step.
EXCHANGE_TOLERANCE = 2.0**-8
# Factor on the tolerance once the features of images and texts differ by rounding. With random data these
# features are nearly equal, and the contrastive loss depends only on their differences. They are rounded
# differently from the second step on, when parameters differ, and in 4 bits from the first: in nvfp4
# because of the microbatches' scales; in QuEST's grid rounding errors of the inputs change so many values
# that the norm of the first gradients changes by 7 %, and that of the third, which is not compared, by a
# third.
GROWTH = {"llama": 1, "clip": 8}
# Adapters have a twelfth as many gradients that are not zero (those of the other half begin at zero), so
# that fewer rounding errors average out in the norm: √12, rounded up to a power of two.
FEW_GRADIENTS = 4
# An amax is one element, not a sum. That of an output's gradient is computed from operands in E5M2, where
# an operand near a rounding boundary may differ by 2^-2 of itself.
AMAX_TOLERANCE = 2.0**-2
# XLA may keep float32 between fused 16-bit operations; which ones are fused differs between layouts.
OPTIONS = {"xla_allow_excess_precision": False}


def batch(run, seed: int) -> dict[str, np.ndarray]:
    """Random values of the shapes that the family trains on; texts end in a token that every pool finds."""
    rng = np.random.default_rng(seed)
    data, model = run.settings.data, run.settings.model
    arrays = {}
    for name, shape in run.family.batch_shapes(data).items():
        high = {"image": 256, "segment_ids": 1, "positions": 1, "loss_mask": 2}.get(name, 63)
        arrays[name] = rng.integers(0, high, shape.shape).astype(shape.dtype)
    if "positions" in arrays:
        arrays["positions"] += np.arange(data.seq_len, dtype=np.int32)
        arrays["segment_ids"] += 1
    else:
        eos_id = model.text.eos_id
        arrays["text"][:, -1] = model.text.vocab_size - 1 if eos_id is None else eos_id
    return arrays


class Run:
    """A few steps of a row, compiled for the first devices."""

    def __init__(self, family: str, row: composition.Row):
        devices = jax.devices()[: composition.num_devices(row)]
        run = resolve_settings(composition.settings(family, row), devices)
        train = dataclasses.replace(run.settings.train, init_from="")  # random weights, also under adapters
        self.run = dataclasses.replace(run, settings=dataclasses.replace(run.settings, train=train))
        with jax.set_mesh(self.run.mesh):
            graphdef, self.abstract = self.run.abstract_state()
            step = jit_step(self.run.step, graphdef, self.abstract, self.run.mesh)
            lowered = step.lower(self.abstract, self.run.abstract_batch())
            self.step = lowered.compile(compiler_options=OPTIONS)

    def initial_state(self):
        with jax.set_mesh(self.run.mesh):
            return self.run.initial_state(self.abstract)

    def steps(self, state, seeds):
        """The state after a step for each seed, and the metrics of the steps."""
        found = []
        for seed in seeds:
            with jax.set_mesh(self.run.mesh):
                state, metrics = self.step(state, global_batch(batch(self.run, seed), self.run.mesh))
            found.append(jax.device_get(metrics))
        return state, found


@functools.cache
def expected(family: str, row: composition.Row):
    """Metrics and the model's own state of a row on one device."""
    reference = Run(family, row)
    state, metrics = reference.steps(reference.initial_state(), range(STEPS))
    return metrics, jax.device_get(state["model_state"])


def rows(family: str) -> list:
    """The parameters of a test: the rows of a family, each marked with its tier."""
    return [
        pytest.param(row, marks=getattr(pytest.mark, tier), id="+".join(row))
        for of, tier, row in composition.rows_on_page()
        if of == family
    ]


def check_row(family: str, row: composition.Row, folder: Path) -> None:
    """Asserts that a row trains like its reference on one device, and resumes bit for bit."""
    got = Run(family, row)
    state, metrics = got.steps(got.initial_state(), range(STEPS - 1))
    with Checkpointer(folder, every_steps=1) as checkpoints:
        checkpoints.save(STEPS - 1, state, {})
        checkpoints.wait()
        restored = checkpoints.restore_latest(got.abstract)
    straight, last = got.steps(state, [STEPS - 1])
    resumed, again = got.steps(restored.state, [STEPS - 1])
    jax.tree.map(np.testing.assert_array_equal, again, last)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(jax.device_get(a), jax.device_get(b)), resumed, straight
    )

    want, model_state = expected(family, composition.reference(row))
    s = got.run.settings
    quantized = OTHER_TOLERANCE.get(s.precision.recipe, QUANTIZED_TOLERANCE)
    if s.model.dtype != "float32" and s.precision.first_blocks:
        quantized = max(quantized, AFTER_16_BITS_TOLERANCE)
    rounding = TOLERANCE[s.model.dtype] + quantized * s.is_quantized
    rounding += EXCHANGE_TOLERANCE * ((s.precision.exchange != "none") + (s.precision.scatter != "none"))
    compared = 2 if (family, s.precision.recipe) == ("clip", "quest") else STEPS
    for i, (ours, theirs) in enumerate(list(zip([*metrics, *last], want, strict=True))[:compared]):
        tolerance = rounding * (GROWTH[family] if i or s.precision.recipe in ("nvfp4", "quest") else 1)
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=tolerance, err_msg="loss")
        tolerance *= FEW_GRADIENTS if s.train.lora else 1
        np.testing.assert_allclose(ours["grad_norm"], theirs["grad_norm"], rtol=tolerance, err_msg="norm")
        if "gain" in ours:  # a ratio of differences of squared norms
            np.testing.assert_allclose(ours["gain"], theirs["gain"], rtol=10 * tolerance, err_msg="gain")
        for name, norms in ours.get("grad_norms", {}).items():
            floor = tolerance * float(theirs["grad_norm"])  # of gradients that are zero except for rounding
            np.testing.assert_allclose(
                norms, theirs["grad_norms"][name], rtol=5 * tolerance, atol=floor, err_msg=name
            )
        assert not ours.get("skipped", 0)
    ours = jax.device_get(straight["model_state"])
    for errors in (ours, model_state):
        errors.pop(replicas.ERRORS, None)  # rounding errors: anything up to a step, so not comparable
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=max(20 * rounding, AMAX_TOLERANCE), atol=1e-6),
        ours,
        model_state,
    )
