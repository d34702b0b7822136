"""Gradients of a CLIP: any mesh and any number of microbatches equal one device and one batch."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp import precision
from maxlp.core.train_state import abstract_model, shardings
from maxlp.families.clip.contrastive import ContrastiveConfig
from maxlp.families.clip.gradients import batch_loss, loss_gradients
from maxlp.families.clip.model import CLIPConfig
from maxlp.nn.stack import Part
from maxlp.parallel import sharding
from tests.families.clip.fixtures import MIXED, SIGLIP, make_batch, make_clip, make_mixed_clip, tiny_clip

ALL_AXES = dict(data=2, fsdp=2, tensor=2)
ROWS, POSITIONS = 16, 17
# Float32 sums in another order: a gradient sums over rows and positions, and each term is rounded.
RTOL = ROWS * POSITIONS * float(np.finfo(np.float32).eps)

NO_DROPOUT = dict(patch_dropout=0.0)
FULL = tiny_clip(visual=NO_DROPOUT, layer_scale=0.1, qk_norm=True)
TINY_SIGLIP = tiny_clip(**SIGLIP | dict(visual=SIGLIP["visual"] | NO_DROPOUT))


def run(
    config: CLIPConfig,
    *,
    axes=None,
    microbatches=1,
    kind="softmax",
    method="plain",
    rules=(),
    loss_scale=None,
):
    """(gradients, model state, metrics) of the second of two passes over a batch.

    The second pass uses the precision state that the first one left.
    """

    def make(rngs):
        return make_mixed_clip(config, rngs, rules)

    axes = axes or dict(fsdp=1)
    mesh = sharding.make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    gradients = loss_gradients(ContrastiveConfig(kind=kind, method=method, tile_size=5), 0, microbatches)
    # Initialized outside of the mesh, because initializing on each mesh would compile many programs.
    _, params, model_state = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)
    state = {"params": nnx.to_pure_dict(params), "model_state": nnx.to_pure_dict(model_state)}
    with jax.set_mesh(mesh):
        graphdef, abstract = abstract_model(make, mesh)
        places = shardings(abstract)
        state = jax.device_put(jax.device_get(state), places) | {"step": 0}
        batch = jax.device_put(make_batch(ROWS), sharding.batch_sharding(mesh))
        out = (places["params"], places["model_state"], sharding.replicated(mesh))
        compute = jax.jit(functools.partial(gradients, graphdef), out_shardings=out)
        for _ in range(2):
            grads, state["model_state"], metrics = compute(state, batch, loss_scale)
    return jax.device_get((grads, state["model_state"], metrics))


def assert_same(got, want) -> None:
    """The metrics and gradients of two runs are equal up to the order of sums.

    Each gradient is compared with the largest one of its module. The gradients of a module are sums of the
    same terms with different factors near 1; where the terms cancel, rounding errors remain. For example, a
    shift of all keys does not change a softmax, so the gradient of k_proj's bias is zero.
    """
    for key, value in want[2].items():
        np.testing.assert_allclose(got[2][key], value, rtol=1e-6, err_msg=key)  # means of 16 rows
    want = nnx.traversals.flatten_mapping(want[0])
    for path, grad in nnx.traversals.flatten_mapping(got[0]).items():
        scale = max(np.abs(g).max() for other, g in want.items() if other[:-1] == path[:-1])
        np.testing.assert_allclose(grad, want[path], atol=RTOL * scale, rtol=0, err_msg="/".join(path))


@functools.cache
def on_one_device(config: CLIPConfig = FULL):
    return run(config)


@pytest.mark.full
def test_unrolled_and_recomputed_equal_scanned():
    unrolled = tiny_clip(visual=NO_DROPOUT, layer_scale=0.1, qk_norm=True, scan_layers=False, remat="dots")
    assert_same(run(unrolled), on_one_device())


def test_microbatches_equal_the_batch():
    got = run(FULL, microbatches=4, method="tiled")
    assert_same(got, on_one_device())
    assert got[2]["examples"] == ROWS
    assert got[2]["logit_scale"] == pytest.approx(math.exp(FULL.logit_scale))


@pytest.mark.full
def test_a_mesh_equals_one_device():
    assert_same(run(FULL, axes=ALL_AXES, method="sharded"), on_one_device())


@pytest.mark.full
def test_siglip_in_scaled_microbatches_on_a_mesh_equals_one_device():
    got = run(
        TINY_SIGLIP,
        axes=dict(fsdp=4, tensor=2),
        microbatches=2,
        kind="sigmoid",
        method="tiled",
        loss_scale=1024.0,
    )
    assert_same(got, run(TINY_SIGLIP, kind="sigmoid"))


def test_patches_to_drop_depend_on_the_step_and_the_seed():
    config = ContrastiveConfig(kind="softmax", method="plain")
    graphdef, state = nnx.split(make_clip())

    @jax.jit
    def losses(step):
        return [
            batch_loss(config, seed)(nnx.merge(graphdef, state), make_batch(), step)[0] for seed in (0, 1)
        ]

    values = [float(loss) for step in (0, 1) for loss in losses(step)]
    assert len(set(values)) == 4
    assert losses(1)[1] == values[-1]


def test_each_image_drops_patches_of_its_own():
    """The loss of equal pairs is log B exactly if the same patches are dropped."""
    config, model = ContrastiveConfig(kind="softmax", method="plain"), make_clip()
    equal = {key: np.repeat(value[:1], ROWS, axis=0) for key, value in make_batch(ROWS).items()}
    assert abs(batch_loss(config)(model, equal, jnp.int32(0))[0] - math.log(ROWS)) > 1e-3


@pytest.mark.parametrize("axes", [dict(fsdp=1), ALL_AXES])
def test_microbatches_drop_the_patches_of_the_whole_batch(axes):
    config = tiny_clip()
    assert config.visual.patch_dropout
    assert_same(run(config, axes=axes, microbatches=2), on_one_device(config))


# --- low precision --------------------------------------------------------------------------------------


def vector(tree: dict) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


@pytest.mark.full
def test_a_recipe_quantizes_the_blocks_between_the_first_and_last_ones_of_both_towers():
    model = make_clip(visual=dict(num_layers=3), text=dict(num_layers=4))
    recipe = precision.make_recipe("int8_switchback")
    table = precision.inject(model, recipe, first_blocks=1, last_blocks=1)
    matmuls = ("attn/q_proj", "attn/k_proj", "attn/v_proj", "attn/o_proj", "mlp/up_proj", "mlp/down_proj")
    quantized = {path for path, name in table.items() if name == "int8_switchback"}
    assert quantized == {f"{tower}/layers/{name}" for tower in ("visual", "text") for name in matmuls}
    assert set(table) - quantized == {"visual/patch_embed", "visual/proj", "text/proj"}
    plain = frozenset(matmuls)
    assert model.visual.layers.parts == (Part(0, 1, plain), Part(1, 2), Part(2, 3, plain))
    assert model.text.layers.parts == (Part(0, 1, plain), Part(1, 3), Part(3, 4, plain))


@pytest.mark.slow
def test_low_precision_in_microbatches_on_a_mesh_equals_one_device():
    """Scales and amax histories are those of the whole batch, however it is split."""
    want, got = run(FULL, rules=MIXED), run(FULL, rules=MIXED, axes=ALL_AXES, microbatches=2)
    quantization = np.linalg.norm(vector(want[0]) - vector(on_one_device()[0]))
    # A value may be rounded to its other neighbour; a wrong scale would change all values.
    assert np.linalg.norm(vector(got[0]) - vector(want[0])) < 0.01 * quantization
    assert 0 < abs(want[2]["loss"] - on_one_device()[2]["loss"]) < 0.05 * want[2]["loss"]
    histories = nnx.traversals.flatten_mapping(want[1])
    assert any(path[0] == "visual" for path in histories) and any(path[0] == "text" for path in histories)
    for path, history in nnx.traversals.flatten_mapping(got[1]).items():
        assert np.max(history) > 0, path
        # Where a value is rounded to its other neighbour, a later amax changes little.
        np.testing.assert_allclose(history, histories[path], rtol=1e-3, err_msg="/".join(path))
