"""A CLIP's train step with released gradients equals the ordinary one."""

import functools
import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from maxlp.core import fused_backward, train_step
from maxlp.core.train_state import abstract_state, init_state, shardings
from maxlp.families.clip.contrastive import ContrastiveConfig
from maxlp.families.clip.gradients import batch_loss, loss_gradients
from maxlp.parallel import sharding
from maxlp.parallel.batches import global_batch
from tests.families.clip.fixtures import make_batch, make_mixed_clip, tiny_clip

# Dropped patches: both steps draw the same ones.
CONFIG = tiny_clip(layer_scale=0.1)
LOSS = ContrastiveConfig(kind="softmax", method="plain")


def make(rngs: nnx.Rngs) -> nnx.Module:
    # The patch embedding, too: what leads to the stacks has histories of its own.
    rules = ("*/layers/*", "fp8_delayed"), ("visual/patch_embed", "fp8_delayed")
    return make_mixed_clip(CONFIG, rngs, rules=rules)


def train(released: bool, axes: dict[str, int]):
    """(state, metrics of each step) after two steps of a CLIP in FP8."""
    tx = optax.sgd(0.1, momentum=0.9)
    common = dict(tx=tx)
    step = (
        functools.partial(fused_backward.train_step, loss=batch_loss(LOSS), **common)
        if released
        else functools.partial(train_step.train_step, gradients=loss_gradients(LOSS), **common)
    )
    mesh = sharding.make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    state = jax.device_get(init_state(make, tx, 0))
    with jax.set_mesh(mesh):
        graphdef, abstract = abstract_state(make, tx, mesh)
        state = jax.device_put(state, shardings(abstract))
        compiled = train_step.jit_step(step, graphdef, abstract, mesh)
        found = []
        for seed in range(2):
            state, metrics = compiled(state, global_batch(make_batch(16, seed), mesh))
            found.append({key: float(value) for key, value in metrics.items()})
    return jax.device_get(state), found


@pytest.mark.slow
def test_released_gradients_on_a_mesh_equal_ordinary_ones_on_one_device():
    want, want_metrics = train(released=False, axes=dict(fsdp=1))
    got, metrics = train(released=True, axes=dict(data=2, fsdp=2, tensor=2))
    for a, b in zip(metrics, want_metrics, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            # Sums in another order, and a few quantized values that round to their other neighbour.
            assert a[key] == pytest.approx(b[key], rel=1e-4), key
    assert jax.tree.structure(got) == jax.tree.structure(want), "checkpoints of one resume the other"
    initial = jax.device_get(init_state(make, optax.sgd(0.1), 0))
    for path, param in nnx.traversals.flatten_mapping(want["params"]).items():
        before, after = (nnx.traversals.flatten_mapping(x["params"])[path] for x in (initial, got))
        # Values of a quantized tensor may round to their other neighbour.
        atol = 0.01 * np.abs(param - before).max() + 1e-6
        np.testing.assert_allclose(after, param, atol=atol, rtol=0, err_msg="/".join(path))
    # An amax may follow from such values, by less.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), got["model_state"], want["model_state"]
    )
