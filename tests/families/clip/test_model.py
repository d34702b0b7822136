import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.clip import low_precision, open_clip
from maxlp.families.clip.encoder import ACTIVATIONS, Encoder, Mlp, gelu, join_rows
from maxlp.parallel import sharding
from maxlp.planning import hlo, topologies
from maxlp.run.settings import make_model, read, read_model
from tests.families.clip.fixtures import TINY, make_batch, make_clip, tiny_clip

encode_image = jax.jit(lambda model, image_BHWC: model.encode_image(image_BHWC))
encode_text = jax.jit(lambda model, text_BS: model.encode_text(text_BS))

# --- sizes ----------------------------------------------------------------------------------------------


def num_params(c) -> int:
    params = jax.eval_shape(lambda: nnx.state(make_model(*read_model(c))(nnx.Rngs(0)), nnx.Param))
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
def test_configs_have_the_number_of_parameters_in_their_docstring(name):
    module = importlib.import_module(f"configs.clip.{name}")
    assert f"{num_params(module.get_config()):,} parameters" in module.__doc__


def test_the_low_precision_runs_quantize_all_blocks_of_both_towers():
    c = low_precision.get_config("precision=fp8_switchback,size=l14,optimizer=adamw")
    c.data.source, c.data.tokenizer = "glyphs", "bytes"
    s = read(c)
    assert (s.optimizer.name, s.model.embed_dim, s.model.visual.patch_dropout) == ("adamw", 768, 0.5)
    quantized = {path for path, recipe in s.matmuls.items() if recipe == "fp8_switchback"}
    assert quantized == {path for path in s.matmuls if "/layers/" in path} and len(quantized) == 12
    with pytest.raises(ValueError, match="size='x14': one of s32, b32"):
        low_precision.get_config("size=x14")


# --- forward --------------------------------------------------------------------------------------------

# Features are float32 unit vectors: rounding changes them by less than 1e-6, other inputs by over 1e-3.


def test_pixels_are_normalized_and_floats_are_not():
    image, model = make_batch()["image"], make_clip()
    normalized = (np.asarray(image) / 255 - TINY["image_mean"]) / TINY["image_std"]
    features_BE = encode_image(model, image)
    np.testing.assert_allclose(features_BE, encode_image(model, jnp.float32(normalized)), atol=1e-6)
    np.testing.assert_allclose(jnp.linalg.norm(features_BE, axis=-1), 1, atol=1e-6)
    assert features_BE.dtype == jnp.float32


@pytest.mark.parametrize("pool", ["argmax", "eos", "last"])
def test_only_tokens_up_to_the_pooled_one_change_the_features(pool):
    """Attention is causal: tokens after the pooled one have no effect, and those before it do."""
    model = make_clip(text=dict(pool=pool, eos_id=60 if pool == "eos" else None))
    text_BS = np.asarray(make_batch(2)["text"]) % 50
    end = 11 if pool == "last" else 6
    text_BS[:, end] = 60
    before, after = text_BS.copy(), text_BS.copy()
    before[:, end - 1] = 51
    after[:, end + 1 :] = 52 if pool == "argmax" else 60
    features_BE = encode_text(model, jnp.asarray(text_BS))
    np.testing.assert_allclose(jnp.linalg.norm(features_BE, axis=-1), 1, atol=1e-6)
    np.testing.assert_allclose(encode_text(model, jnp.asarray(after)), features_BE, atol=1e-6)
    assert jnp.abs(encode_text(model, jnp.asarray(before)) - features_BE).max() > 1e-3
    if pool == "argmax":  # short texts need no padding
        short = encode_text(model, jnp.asarray(text_BS[:, : end + 1]))
        np.testing.assert_allclose(short, features_BE, atol=1e-6)


@pytest.mark.parametrize(
    ("pool", "expected"),
    [("argmax", [3, 1]), ("eos", [2, 4]), ("last", [5, 5])],
    ids=["argmax", "eos", "last"],
)
def test_the_pooled_token_is_the_highest_the_first_that_ends_a_text_or_the_last(pool, expected):
    text_BS = jnp.array([[1, 2, 40, 60, 40, 0], [1, 63, 2, 3, 40, 40]])
    tower = make_clip(text=dict(pool=pool, eos_id=40 if pool == "eos" else None)).text
    np.testing.assert_array_equal(tower.pool_index(text_BS), expected)


def test_a_layer_scale_of_zero_makes_the_blocks_the_identity():
    """The features of a text then depend on its pooled token and position alone."""
    text_BS = jnp.asarray([[1, 2, 60, 0], [5, 7, 60, 0], [1, 2, 3, 60]])
    features_BE = encode_text(make_clip(layer_scale=0.0), text_BS)
    np.testing.assert_allclose(features_BE[0], features_BE[1], atol=1e-6)
    assert jnp.abs(features_BE[0] - features_BE[2]).max() > 1e-3


def mlp(act):
    """The MLP of a b16 as a function of its parameters and 64 images, and the shapes of these."""
    config = tiny_clip(act=act, dtype="bfloat16", text=dict(width=768, mlp_dim=3072))
    made = nnx.eval_shape(lambda: Mlp(Encoder(model=config, tower="text"), nnx.Rngs(0)))
    graphdef, params = nnx.split(made)
    x_BSD = jax.ShapeDtypeStruct((64, 197, 768), jnp.bfloat16)
    return lambda params, x_BSD: nnx.merge(graphdef, params)(x_BSD), (params, x_BSD)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_the_mlp_saves_the_input_and_the_output_of_its_activation(act):
    f, shapes = mlp(act)
    _, pull = jax.eval_shape(lambda *args: jax.vjp(f, *args), *shapes)
    wide = [saved for saved in jax.tree.leaves(pull) if saved.shape == (64, 197, 3072)]
    assert [saved.dtype for saved in wide] == [jnp.bfloat16] * 2


@pytest.mark.aot("jax_cuda13_plugin")
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_an_activation_is_one_kernel_on_gpus(act):
    """Two kernels write an array of the MLP's width: the first product, and the bias and activation."""
    f, shapes = mlp(act)
    with jax.set_mesh(sharding.make_mesh(devices=topologies.devices(topologies.parse("h100:1x1")))):
        program, entry = hlo.computations(jax.jit(f).lower(*shapes).compile().as_text())
    kernels = [i for i in program[entry] if i.opcode in ("fusion", "custom-call", "copy")]
    wide = 2 * 64 * 197 * 3072
    assert sum(hlo.num_bytes(i.type) == wide for i in kernels) == 2


def test_gelu_is_rounded_once():
    """In bfloat16, its relative error is at most half a unit in the last place."""
    x = jnp.linspace(-5.5, 5.5, 2000).astype(jnp.bfloat16)
    exact = [v / 2 * math.erfc(-v / math.sqrt(2)) for v in np.asarray(x, np.float64)]
    # 2⁻¹² is ample for the error function in float32.
    np.testing.assert_allclose(np.asarray(gelu(x), np.float64), exact, rtol=2**-8 + 2**-12)


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_qk_norm_makes_attention_independent_of_the_scale_of_the_kernels(name):
    image = make_batch()["image"]
    model = make_clip(qk_norm=True, norm_eps=1e-12)
    features_BE = encode_image(model, image)
    getattr(model.visual.layers.attn, name).kernel[...] *= 100.0
    # The scaled products round differently, before a norm divides by their standard deviation.
    np.testing.assert_allclose(encode_image(model, image), features_BE, atol=1e-6)


def test_the_temperature_of_a_clip_is_capped_at_100_and_can_decrease_again():
    model = make_clip()
    model.logit_scale[...] = jnp.asarray(math.log(100) + 0.1)
    # A logarithm of 4.6, rounded to float32, is off by up to 2.4e-7, and so is the scale, relatively.
    np.testing.assert_allclose(model.scale_and_bias(), [100, 0], rtol=1e-6)
    graphdef, params = nnx.split(model)

    def gradient(sign):
        grads = jax.grad(lambda params: sign * nnx.merge(graphdef, params).scale_and_bias()[0])(params)
        return grads["logit_scale"][...]

    np.testing.assert_allclose([gradient(-1), gradient(1)], [0, 100], rtol=1e-6)


def test_the_temperature_of_a_siglip_is_not_capped():
    """Google's So400m for 384 pixels has a logit_scale of 4.7215."""
    model = make_clip(logit_bias=-3.0)
    model.logit_scale[...] = jnp.asarray(4.7215)
    np.testing.assert_allclose(model.scale_and_bias(), [112.337, -3], rtol=1e-5)  # six digits


def test_texts_that_are_too_long_are_refused():
    with pytest.raises(ValueError, match=r"texts of 13 tokens are longer than model.text.max_len=12"):
        encode_text(make_clip(), jnp.zeros((2, 13), jnp.int32))


# --- the config -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(act="relu"), "act='relu' is unknown; one of gelu"),
        (dict(init="xavier"), "init='xavier' is unknown; one of clip, siglip"),
        (dict(embed_dim=0), "embed_dim=0 must be at least 1"),
        (dict(visual=dict(pool="tok")), "pool='tok' is unknown; one of cls, gap, map"),
        (dict(visual=dict(num_heads=3)), "num_heads=3 does not divide width=32"),
        (dict(visual=dict(num_layers=0)), "num_layers=0 must be at least 1"),
        (dict(visual=dict(image_size=18)), "image_size=18 is not a multiple of patch_size=4"),
        (dict(visual=dict(patch_dropout=1.0)), r"patch_dropout=1.0 must be at least 0 and below 1"),
        (dict(visual=dict(proj=False)), "visual.proj=False needs visual.width=32 to equal embed_dim=16"),
        (dict(text=dict(pool="first")), "pool='first' is unknown; one of argmax, eos, last"),
        (dict(text=dict(pool="eos")), "pool='eos' needs eos_id"),
        (dict(text=dict(max_len=0)), "max_len=0 must be at least 1"),
    ],
)
def test_invalid_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_clip(**changes)


# --- initial values -------------------------------------------------------------------------------------


def test_initial_values_are_those_of_open_clip():
    """Bounds and standard deviations as in open_clip's code; every layer of a stack draws separately.

    The smallest sample has 128 uniform values, whose standard deviation has a standard error of 4 %.
    """
    model = make_clip(visual=dict(width=64), text=dict(width=64))
    params = nnx.to_pure_dict(nnx.state(model))
    D, F, L = 64, 64, 2
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
    first, second = text["layers"]["attn"]["q_proj"]["kernel"]
    assert jnp.abs(first - second).max() > 0.1


@pytest.mark.parametrize(
    ("shape", "joined"),
    [
        ((8, 7, 2), (2, 28, 2)),
        ((8, 6, 2), (4, 12, 2)),  # 2 rows of 6 are enough for 4 devices
        ((8, 4, 2), (8, 4, 2)),
        ((4, 7, 2), (4, 7, 2)),  # a device has 2 rows, and would need 4
    ],
)
def test_rows_are_joined_until_the_tensor_axis_splits_the_positions(shape, joined):
    x = jnp.arange(float(np.prod(shape))).reshape(shape)
    assert join_rows(x) is x  # without a mesh
    with jax.set_mesh(sharding.make_mesh(fsdp=2, tensor=4)):
        y = jax.jit(lambda x: sharding.split_sequence(join_rows(x)))(x)
    np.testing.assert_array_equal(y, x.reshape(joined))
    parts = 4 if joined[1] % 4 == 0 else 1
    assert y.addressable_shards[0].data.shape == (joined[0] // 2, joined[1] // parts, 2)
