import functools
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.clip import low_precision, open_clip
from maxlp import precision
from maxlp.core import train_step as step
from maxlp.families.clip import vit
from maxlp.families.clip.model import CLIP
from maxlp.parallel import sharding
from maxlp.run import build

VISUAL = dict(
    image_size=16,
    patch_size=4,
    width=32,
    num_layers=3,
    num_heads=2,
    mlp_dim=64,
    pool="cls",
    pre_norm=True,
    patch_bias=False,
    proj=True,
    patch_dropout=0.5,
)
TEXT = dict(
    vocab_size=64,
    max_len=12,
    width=32,
    num_layers=3,
    num_heads=2,
    mlp_dim=64,
    causal=True,
    pool="argmax",
    eos_id=None,
    proj_bias=False,
)
TINY = dict(
    embed_dim=16,
    act="gelu",
    norm_eps=1e-5,
    layer_scale=None,
    qk_norm=False,
    init="clip",
    logit_scale=math.log(1 / 0.07),
    logit_bias=None,
    image_mean=(0.5, 0.4, 0.3),
    image_std=(0.2, 0.3, 0.4),
    dtype="float32",
    param_dtype="float32",
    attention="xla",
    scan_layers=True,
    remat="none",
)
SIGLIP = dict(
    embed_dim=32,
    act="gelu_tanh",
    norm_eps=1e-6,
    init="siglip",
    logit_bias=-10.0,
    visual=dict(VISUAL, pool="map", pre_norm=False, patch_bias=True, proj=False),
    text=dict(TEXT, causal=False, pool="last", proj_bias=True),
)


def make(seed=0, **changes) -> CLIP:
    return CLIP(**dict(TINY, visual=VISUAL, text=TEXT) | changes, rngs=nnx.Rngs(seed))


def batch(rows=8) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (rows, 16, 16, 3)).astype(np.uint8)
    return jnp.asarray(image), jnp.asarray(rng.integers(0, 64, (rows, 12)), jnp.int32)


def loss_of(model: CLIP, image, text, dropout_key=None) -> jax.Array:
    """Softmax of the whole batch, images to texts, in the plainest form."""
    image_BE, text_BE = model.encode_image(image, dropout_key), model.encode_text(text)
    scale, bias = model.temperature()
    logits_BB = scale * image_BE @ text_BE.T + bias
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits_BB)))


def run(model: CLIP, mesh=None):
    """(loss, gradients) with dropped patches, on one device or with the parameters spread over a mesh."""
    graphdef, params, state = nnx.split(model, nnx.Param, ...)

    def loss(params, *args):
        return loss_of(nnx.merge(graphdef, params, state), *args)

    compute = jax.jit(jax.value_and_grad(loss))
    pairs, key = batch(), jax.random.key(5)
    if mesh is None:
        return compute(params, *pairs, key)
    shardings = sharding.param_shardings(params, mesh)
    nnx.replace_by_pure_dict(params, jax.device_put(nnx.to_pure_dict(params), shardings))
    pairs = jax.device_put(pairs, sharding.batch_sharding(mesh))
    with jax.set_mesh(mesh):
        return compute(params, *pairs, jax.device_put(key, sharding.replicated(mesh)))


VARIANTS = {"plain": {}, "all": dict(layer_scale=0.1, qk_norm=True), "siglip": SIGLIP}


@functools.cache
def on_one_device(variant: str):
    return run(make(**VARIANTS[variant]))


encode_image = jax.jit(lambda model, *args: model.encode_image(*args))
encode_text = jax.jit(lambda model, text_BS: model.encode_text(text_BS))


def assert_same_gradients(got, expected, rtol) -> None:
    expected = dict(nnx.to_flat_state(expected))
    for path, leaf in nnx.to_flat_state(got):
        if path[-2:] == ("k_norm", "bias"):  # a shift of all keys changes no softmax: 0 but for rounding
            np.testing.assert_allclose([leaf[...], expected[path][...]], 0, atol=5e-7, err_msg=str(path))
            continue
        largest = float(jnp.abs(expected[path][...]).max())
        np.testing.assert_allclose(
            leaf[...], expected[path][...], atol=rtol * largest + 1e-7, rtol=0, err_msg=str(path)
        )


# --- sizes --------------------------------------------------------------------------------------------


def num_params(c) -> int:
    params = jax.eval_shape(lambda: nnx.state(build.model(c)(nnx.Rngs(0)), nnx.Param))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "size, expected",
    [
        ("s32", 63_085_825),
        ("b32", 151_277_313),
        ("b16", 149_620_737),
        ("l14", 427_616_513),
        ("h14", 986_109_441),
        ("g14", 1_366_678_273),
        ("bigG14", 2_539_567_105),
    ],
)
def test_sizes_of_open_clip(size, expected):
    assert num_params(open_clip.get_config(f"size={size}")) == expected


@pytest.mark.parametrize("name", ["b32", "b16", "l14", "h14", "siglip_b16"])
def test_configs_have_as_many_parameters_as_they_say(name):
    module = importlib.import_module(f"configs.clip.{name}")
    c = module.get_config()
    assert f"{num_params(c):,} parameters" in module.__doc__
    build.tx(c)


def test_the_low_precision_runs():
    c = low_precision.get_config("precision=fp8_switchback,size=l14,optimizer=adamw")
    assert (c.precision.recipe, c.optimizer.name, c.model.embed_dim) == ("fp8_switchback", "adamw", 768)
    table = build.precision_table(c)
    low = {path for path, recipe in table.items() if recipe == "fp8_switchback"}
    assert low == {path for path in table if "/layers/" in path} and len(low) == 12
    with pytest.raises(ValueError, match="size='x14': one of s32, b32"):
        low_precision.get_config("size=x14")


# --- forward ------------------------------------------------------------------------------------------


def test_patches_are_what_a_strided_convolution_sees():
    rng = np.random.default_rng(0)
    image_BHWC = rng.standard_normal((2, 8, 12, 3), np.float32)
    kernel_HWIO = rng.standard_normal((4, 4, 3, 5), np.float32)
    expected = jax.lax.conv_general_dilated(
        image_BHWC, kernel_HWIO, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    got = vit.patches(jnp.asarray(image_BHWC), 4) @ kernel_HWIO.reshape(-1, 5)
    np.testing.assert_allclose(got, expected.reshape(2, 6, 5), atol=1e-4)


def test_pixels_are_normalised_and_floats_are_taken_as_they_are():
    image, _ = batch()
    model = make()
    normalised = (np.asarray(image) / 255 - TINY["image_mean"]) / TINY["image_std"]
    features_BE = encode_image(model, image)
    np.testing.assert_allclose(features_BE, encode_image(model, jnp.float32(normalised)), atol=1e-6)
    np.testing.assert_allclose(jnp.linalg.norm(features_BE, axis=-1), 1, atol=1e-6)
    assert features_BE.dtype == jnp.float32


@pytest.mark.parametrize("pool", ["argmax", "eos", "last"])
def test_a_text_is_what_stands_before_its_pooled_token(pool):
    """Causal: nothing behind the pooled token counts, and everything before it does."""
    model = make(text=dict(TEXT, pool=pool, eos_id=60 if pool == "eos" else None))
    text_BS = np.asarray(batch(2)[1]) % 50
    end = 11 if pool == "last" else 6
    text_BS[:, end] = 60
    before, behind = text_BS.copy(), text_BS.copy()
    before[:, end - 1] = 51
    behind[:, end + 1 :] = 52 if pool == "argmax" else 60
    features_BE = encode_text(model, jnp.asarray(text_BS))
    np.testing.assert_allclose(encode_text(model, jnp.asarray(behind)), features_BE, atol=1e-6)
    assert jnp.abs(encode_text(model, jnp.asarray(before)) - features_BE).max() > 1e-3
    if pool != "last":  # short texts need no padding
        np.testing.assert_allclose(
            encode_text(model, jnp.asarray(text_BS[:, : end + 1])), features_BE, atol=1e-6
        )


def test_zero_layer_scale_starts_at_the_identity():
    """Then the text's features are those of its pooled token and position alone."""
    model = make(layer_scale=0.0)
    text_BS = jnp.asarray([[1, 2, 60, 0], [5, 7, 60, 0], [1, 2, 3, 60]])
    features_BE = encode_text(model, text_BS)
    np.testing.assert_allclose(features_BE[0], features_BE[1], atol=1e-6)
    assert jnp.abs(features_BE[0] - features_BE[2]).max() > 1e-3
    _, grads = run(model)
    assert jnp.abs(grads["visual"]["layers"]["mlp_scale"]["scale"][...]).max() > 0


def test_dropped_patches():
    rng = np.random.default_rng(0)
    x_BSD = jnp.asarray(rng.standard_normal((64, 17, 2)), jnp.float32)
    kept = vit.drop_patches(x_BSD, 0.5, jax.random.key(1), first=1)
    assert kept.shape == (64, 9, 2)
    np.testing.assert_array_equal(kept[:, 0], x_BSD[:, 0])
    came_from = (kept[:, 1:, None] == x_BSD[:, None, 1:]).all(-1)
    assert (came_from.sum(-1) == 1).all() and (came_from.sum(1) <= 1).all(), "patches, none twice"
    share = came_from.sum(1).mean(0)
    assert (abs(share - 0.5) < 0.25).all(), "all positions are kept equally often"
    assert vit.drop_patches(x_BSD, 0.99, jax.random.key(1), first=0).shape == (64, 1, 2)


def test_patch_dropout_is_for_training():
    image, _ = batch()
    without = make(visual=dict(VISUAL, patch_dropout=0.0))
    model = make()
    np.testing.assert_array_equal(encode_image(model, image), encode_image(without, image))
    np.testing.assert_array_equal(
        encode_image(without, image, jax.random.key(0)), encode_image(model, image)
    )
    assert jnp.abs(encode_image(model, image, jax.random.key(0)) - encode_image(model, image)).max() > 1e-3


def test_qk_norm_bounds_the_logits():
    """With normed queries and keys, attention does not see how large their kernels are."""
    image, _ = batch()
    model = make(qk_norm=True, norm_eps=1e-12)
    features_BE = encode_image(model, image)
    model.visual.layers.attn.q_proj.kernel[...] *= 100.0
    np.testing.assert_allclose(encode_image(model, image), features_BE, atol=1e-5)


def test_resized_positions():
    """A smooth field stays itself at twice the size; the class token's position stays as it is."""
    rows, columns = np.meshgrid(np.arange(8) + 0.5, np.arange(8) + 0.5, indexing="ij")
    field = lambda r, c, n: np.stack([r / n, np.sin(c / n)], -1).reshape(-1, 2)  # noqa: E731
    pos_SD = np.concatenate([[[7.0, 7.0]], field(rows, columns, 8)]).astype(np.float32)
    rows, columns = np.meshgrid(np.arange(16) + 0.5, np.arange(16) + 0.5, indexing="ij")
    resized = vit.resize_pos_embed(jnp.asarray(pos_SD), 256, first=1)
    expected = field(rows, columns, 16).reshape(16, 16, 2)
    np.testing.assert_array_equal(resized[0], pos_SD[0])
    inner = np.asarray(resized[1:]).reshape(16, 16, 2)[4:-4, 4:-4]
    np.testing.assert_allclose(inner, expected[4:-4, 4:-4], atol=1e-3)
    np.testing.assert_allclose(vit.resize_pos_embed(jnp.asarray(pos_SD), 64, first=1), pos_SD, atol=1e-6)


def test_temperature_stops_at_100_and_comes_back():
    model = make(logit_bias=-3.0)
    model.logit_scale[...] = jnp.asarray(math.log(100) + 0.1)
    scale, bias = model.temperature()
    np.testing.assert_allclose([scale, bias], [100, -3], rtol=1e-6)

    def gradient(sign):
        graphdef, params = nnx.split(model)
        grads = jax.grad(lambda params: sign * nnx.merge(graphdef, params).temperature()[0])(params)
        return grads["logit_scale"][...]

    np.testing.assert_allclose([gradient(-1), gradient(1)], [0, 100], rtol=1e-6)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(act="relu"), "model.act='relu' is unknown; one of gelu"),
        (dict(visual=dict(VISUAL, pool="tok")), "model.visual.pool='tok' is unknown"),
        (dict(visual=dict(VISUAL, num_heads=3)), "model.visual.num_heads=3 does not divide"),
        (dict(visual=dict(VISUAL, image_size=18)), "image_size=18 is not a multiple"),
        (dict(visual=dict(VISUAL, widht=3)), "model.visual.widht is unknown; keys: image_size"),
        (dict(text={k: v for k, v in TEXT.items() if k != "width"}), "model.text.width is missing"),
        (dict(text=dict(TEXT, pool="eos")), "model.text.eos_id is not set"),
        (dict(visual=dict(VISUAL, proj=False)), "model.visual.proj=False needs"),
    ],
)
def test_models_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: nnx.state(make(**changes)))


def test_inputs_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"images of 20 × 16 × 3 are not of model.visual.image_size=16"):
        encode_image(make(), jnp.zeros((2, 20, 16, 3)))
    with pytest.raises(ValueError, match=r"texts of 13 tokens are longer than model.text.max_len=12"):
        encode_text(make(), jnp.zeros((2, 13), jnp.int32))


# --- initialisation -----------------------------------------------------------------------------------


def test_initialisation_of_clip():
    """Bounds and deviations that open_clip's code spells out; a stack of blocks has draws of its own."""
    params = nnx.to_pure_dict(nnx.state(make(visual=dict(VISUAL, width=64), text=dict(TEXT, width=64))))
    D, F, L = 64, 64, 3
    visual, text = params["visual"], params["text"]

    def assert_uniform(x, bound):
        assert bound * 0.95 < jnp.abs(x).max() <= bound
        np.testing.assert_allclose(jnp.std(x), bound / 3**0.5, rtol=0.1)

    assert_uniform(visual["layers"]["attn"]["k_proj"]["kernel"], (6 / (4 * D)) ** 0.5)
    assert_uniform(visual["layers"]["attn"]["o_proj"]["kernel"], D**-0.5)
    assert_uniform(visual["layers"]["mlp"]["down_proj"]["kernel"], F**-0.5)
    assert_uniform(visual["layers"]["mlp"]["up_proj"]["bias"], D**-0.5)
    assert_uniform(visual["patch_embed"]["kernel"], 48**-0.5)
    for x, std in (
        (visual["pos_embed"], D**-0.5),
        (visual["proj"]["kernel"], D**-0.5),
        (text["tok_embed"]["embedding"], 0.02),
        (text["pos_embed"], 0.01),
        (text["layers"]["attn"]["q_proj"]["kernel"], D**-0.5),
        (text["layers"]["attn"]["o_proj"]["kernel"], D**-0.5 * (2 * L) ** -0.5),
        (text["layers"]["mlp"]["up_proj"]["kernel"], (2 * D) ** -0.5),
        (text["layers"]["mlp"]["down_proj"]["kernel"], D**-0.5 * (2 * L) ** -0.5),
    ):
        np.testing.assert_allclose(jnp.std(x), std, rtol=0.1)
    assert not np.any(visual["layers"]["attn"]["q_proj"]["bias"])
    first, second, _ = text["layers"]["attn"]["q_proj"]["kernel"]
    assert jnp.abs(first - second).max() > 0.1


# --- scan, remat, meshes, precision ------------------------------------------------------------------


def test_unrolled_and_recomputed_equal_scanned():
    loss, grads = run(make(scan_layers=False, remat="dots"))
    expected, expected_grads = on_one_device("plain")
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_same_gradients(grads, expected_grads, 1e-5)


@pytest.mark.parametrize(
    "axes, variant",
    [(dict(data=2, fsdp=4), "all"), (dict(fsdp=4, tensor=2), "all"), (dict(fsdp=4, tensor=2), "siglip")],
    ids=["data2_fsdp4", "fsdp4_tensor2", "siglip_fsdp4_tensor2"],
)
def test_eight_devices_equal_one(axes, variant):
    """The patches that are dropped too."""
    loss, grads = run(make(**VARIANTS[variant]), mesh=sharding.make_mesh(**axes))
    expected, expected_grads = on_one_device(variant)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_same_gradients(grads, expected_grads, 2e-5)


@pytest.mark.parametrize("recipe", ["fp8_current", "int8_switchback"])
def test_low_precision(recipe):
    """Only the middle block of each tower computes in it; the loss stays close, and it is not the same."""
    expected, expected_grads = on_one_device("plain")
    model = make()
    table = precision.inject(model, precision.make_recipe(recipe), first_blocks=1, last_blocks=1)
    low = {path for path, name in table.items() if name != precision.HIGH_PRECISION}
    matmuls = ("attn/q_proj", "attn/k_proj", "attn/v_proj", "attn/o_proj", "mlp/up_proj", "mlp/down_proj")
    assert low == {f"{tower}/layers/{name}" for tower in ("visual", "text") for name in matmuls}
    assert set(table) - low == {"visual/patch_embed", "visual/proj", "text/proj"}
    loss, grads = run(model)
    assert 0 < abs(loss - expected) < 0.02 * expected
    for path, leaf in nnx.to_flat_state(grads):
        assert np.isfinite(leaf[...]).all(), path
    flat = [
        jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(g)]) for g in (grads, expected_grads)
    ]
    cosine = jnp.vdot(*flat) / (jnp.linalg.norm(flat[0]) * jnp.linalg.norm(flat[1]))
    assert cosine > 0.98


def test_fp8_state_of_both_towers_is_kept():
    """Delayed scaling: the histories of both stacks are written by a forward pass."""
    model = make()
    precision.inject(model, precision.make_recipe("fp8_delayed"))
    _, _, before = step.split(model)

    def forward(model, image, text):
        model.encode_image(image), model.encode_text(text)
        return step.split(model)[2]

    after = jax.jit(forward)(model, *batch())
    for tower in ("visual", "text"):
        history = after[tower]["layers"]["mlp"]["up_proj"]["dot_general"]["input_amax_history"]
        assert (history.max(axis=-1) > 0).all()
        assert not np.any(before[tower]["layers"]["mlp"]["up_proj"]["dot_general"]["input_amax_history"])
