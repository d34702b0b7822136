"""CLIP through the whole train step: over meshes and microbatches it is the one device's, one batch's."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from configs.common import clip
from maxlp import precision
from maxlp.core import gradients
from maxlp.core import train_step as step
from maxlp.families.clip.contrastive import contrastive
from maxlp.families.clip.model import CLIP
from maxlp.parallel import sharding
from maxlp.parallel.batches import global_batch

B, S = 32, 12
MESHES = {
    "data8": dict(data=8, fsdp=1),
    "data2_fsdp4": dict(data=2, fsdp=4),
    "fsdp4_tensor2": dict(fsdp=4, tensor=2),
}


def sizes(**changes) -> dict:
    c = clip(embed_dim=16, dtype="float32", remat="none")
    tower = dict(width=32, num_layers=2, num_heads=2, mlp_dim=64)
    c.model.visual.update(image_size=16, patch_size=4, **tower)
    c.model.text.update(vocab_size=64, max_len=S, **tower)
    c.model.update(changes)
    return {key: value for key, value in c.model.to_dict().items() if key != "name"}


def batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (B, 16, 16, 3), np.uint8),
        "text": rng.integers(0, 64, (B, S), np.int32),
    }


def train(
    *,
    steps=2,
    devices=1,
    mesh=None,
    microbatches=1,
    kind="softmax",
    method="tiled",
    recipe="bf16",
    **changes,
):
    """Losses, gradient norms and the last state of a few steps of gradient descent."""

    def make(rngs):
        model = CLIP(**sizes(**changes), rngs=rngs)
        precision.inject(model, precision.make_recipe(recipe))
        return model

    loss = functools.partial(contrastive, kind=kind, method=method, tile_size=5)
    mesh = sharding.make_mesh(**(mesh or {"fsdp": 1}), devices=jax.devices()[:devices])
    tx = optax.sgd(0.1)
    with jax.set_mesh(mesh):
        graphdef, abstract = step.abstract_state(make, tx, mesh)
        places = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        state = jax.jit(functools.partial(step.init_state, make, tx, 0), out_shardings=places)()
        train_step = step.jit_train_step(
            abstract,
            mesh,
            graphdef=graphdef,
            gradients=gradients.of_pairs(loss, microbatches=microbatches),
            tx=tx,
            schedule=optax.constant_schedule(0.1),
        )
        found = []
        for seed in range(steps):
            state, metrics = train_step(state, global_batch(batch(seed), mesh))
            found.append([float(metrics[key]) for key in ("loss", "grad_norm", "accuracy", "examples")])
    return np.array(found), jax.device_get(state)


def assert_same(got, want, atol=2e-6):
    # Sums in another order: a few units in the last place of float32, times the scale of the logits.
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4)
    for a, b in zip(jax.tree.leaves(got[1]["params"]), jax.tree.leaves(want[1]["params"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=atol)


@pytest.fixture(scope="module")
def one_device():
    return train(method="plain")


@pytest.mark.parametrize("mesh, microbatches", zip(MESHES, (1, 4, 2), strict=True))
def test_meshes_and_microbatches_change_nothing(one_device, mesh, microbatches):
    got = train(devices=8, mesh=MESHES[mesh], microbatches=microbatches)
    assert_same(got, one_device)
    assert got[0][0, 3] == B


def test_accumulation_is_the_big_batch_for_the_sigmoid_loss_too():
    bias = dict(kind="sigmoid", logit_bias=-10.0)
    assert_same(train(microbatches=4, **bias), train(**bias))


def test_fp8_state_of_microbatches_is_that_of_the_whole_batch():
    """The amax of a batch is the largest of its parts; the gradient's parts add to the whole's."""
    whole, split = (
        train(steps=1, microbatches=n, recipe="fp8_delayed", dtype="bfloat16")[1]["model_state"]
        for n in (1, 4)
    )
    flat = [nnx.traversals.flatten_mapping(state) for state in (whole, split)]
    assert flat[0].keys() == flat[1].keys() and flat[0]
    for path, history in flat[0].items():
        assert np.max(history) > 0
        # The forward pass sees the same rows. A row's output gradient comes from its features' own.
        rtol = 0.1 if "output_grad" in str(path) else 0.02
        np.testing.assert_allclose(flat[1][path], history, rtol=rtol)
