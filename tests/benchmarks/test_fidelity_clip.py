"""The sizes that the layer-scale experiments record."""

import importlib
from types import SimpleNamespace

import numpy as np
from flax import nnx

from maxlp.precision import magnitudes
from tests.families.clip.fixtures import make_batch, make_clip


def test_blocks_have_the_sizes_that_a_run_measures():
    fidelity = importlib.import_module("fidelity_clip")
    model, images = make_clip(), make_batch(4)["image"]
    graphdef, params, model_state = nnx.split(model, nnx.Param, ...)
    state = {"params": nnx.to_pure_dict(params), "model_state": nnx.to_pure_dict(model_state)}
    found = fidelity.block_sizes(SimpleNamespace(graphdef=graphdef), state, images)
    expected = magnitudes.of_blocks(model, lambda: model.visual(np.float32(images) / 127.5 - 1))
    np.testing.assert_allclose(found["mean"], expected["visual/layers"], rtol=1e-6)  # float32 means
