"""CLIP against Hugging Face's and open_clip's: features, gradients and tensors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.core.train_state import abstract_model
from maxlp.data.tokenizers.training import train_bpe
from maxlp.families import weights
from maxlp.families.clip import export
from maxlp.families.clip.model import CLIP, CLIPConfig
from maxlp.families.clip.weights import OPEN_CLIP, resize
from maxlp.parallel import sharding
from tests.families.clip import goldens


@functools.lru_cache
def abstract(config: CLIPConfig) -> tuple[nnx.GraphDef, dict]:
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    graphdef, state = abstract_model(lambda rngs: CLIP(config, rngs=rngs), mesh)
    return graphdef, state["params"]


def to_maxlp(golden: goldens.Golden, tensors: dict | None = None) -> dict:
    tensors = golden.weights if tensors is None else tensors
    return weights.to_maxlp(tensors, abstract(golden.config)[1], golden.layout)


def features(params: dict, config: CLIPConfig, image, text) -> tuple[jax.Array, jax.Array]:
    model = nnx.merge(abstract(config)[0], params)
    return model.encode_image(image), model.encode_text(text)


QUICK = "clip_open_clip"


@pytest.mark.parametrize(
    "name",
    [name if name == QUICK else pytest.param(name, marks=pytest.mark.full) for name in goldens.NAMES],
)
def test_features_and_gradients_equal_the_other_library(name):
    golden = goldens.load(name)
    arrays = golden.arrays

    def loss(params, image, text):
        image_BE, text_BE = features(params, golden.config, image, text)
        return jnp.sum(arrays["weight"] * (image_BE @ text_BE.T)), (image_BE, text_BE)

    compute = jax.jit(jax.grad(loss, has_aux=True))
    grads, (image_BE, text_BE) = compute(to_maxlp(golden), np.float32(arrays["image"]), arrays["text"])
    # Unit vectors after some 50 float32 roundings of 6e-8 along the way of each value.
    np.testing.assert_allclose(image_BE, arrays["image_features"], atol=3e-6, rtol=0)
    np.testing.assert_allclose(text_BE, arrays["text_features"], atol=3e-6, rtol=0)
    grads = weights.to_other(grads, golden.layout)
    assert len(golden.grads) >= 3
    for key, expected in golden.grads.items():
        atol = 1e-5 * np.abs(expected).max()  # the same through the backward pass, twice as long
        np.testing.assert_allclose(grads[key], expected, atol=atol, rtol=0, err_msg=key)


@pytest.mark.parametrize("name", goldens.NAMES)
def test_tensors_survive_the_round_trip_to_the_bit(name):
    """Every parameter has its own tensor: if two shared a name, one would be lost."""
    golden = goldens.load(name)
    params = to_maxlp(golden)
    assert sum(x.size for x in jax.tree.leaves(params)) == sum(x.size for x in golden.weights.values())
    back = weights.to_other(params, golden.layout)
    assert set(back) == set(golden.weights)
    for key, tensor in golden.weights.items():
        np.testing.assert_array_equal(back[key], tensor, strict=True, err_msg=key)


@pytest.mark.parametrize(
    "name, format_name, scale",
    [
        ("clip_hf_gelu", "hf_clip", 100),
        ("clip_hf_siglip", "hf_clip", 150),
        ("clip_open_clip", "open_clip", 100),
    ],
)
def test_the_written_scale_of_logits_is_that_of_the_model(name, format_name, scale):
    """Other libraries do not cap it; momentum carries the parameter beyond the cap."""
    golden = goldens.load(name)
    params = to_maxlp(golden) | {"logit_scale": np.log(np.float32(150))}
    layout = export.FORMATS[format_name].layout(golden.config)
    written = np.exp(weights.to_other(params, layout)["logit_scale"])
    # A logarithm of 5, rounded to float32, is off by up to 2.4e-7, and so is the scale, relatively.
    np.testing.assert_allclose(written.item(), scale, rtol=1e-6)
    model = nnx.merge(abstract(golden.config)[0], params)
    np.testing.assert_allclose(model.scale_and_bias()[0], scale, rtol=1e-6)


@pytest.mark.parametrize(
    "name, change",
    [
        ("clip_hf_quick_gelu", lambda c: dataclasses.replace(c, act="gelu")),
        ("clip_hf_siglip", lambda c: dataclasses.replace(c, act="gelu")),
        (
            "clip_hf_gelu",
            lambda c: dataclasses.replace(c, text=dataclasses.replace(c.text, pool="argmax", eos_id=None)),
        ),
    ],
    ids=["quick_gelu", "gelu_tanh", "pool"],
)
def test_the_goldens_distinguish_activations_and_pools(name, change):
    golden = goldens.load(name)
    config = change(golden.config)
    image_BE, text_BE = jax.jit(lambda params, *x: features(params, config, *x))(
        to_maxlp(golden), np.float32(golden.arrays["image"]), golden.arrays["text"]
    )
    differences = image_BE - golden.arrays["image_features"], text_BE - golden.arrays["text_features"]
    # More than ten times the tolerance of the test above.
    assert max(np.abs(x).max() for x in differences) > 5e-5


def test_resized_position_embeddings_equal_open_clip():
    golden = goldens.load("clip_open_clip")
    params = to_maxlp(golden)
    larger, config = resize(params, golden.config, image_size=40)
    # Means of up to 16 neighbours with float32 weights.
    np.testing.assert_allclose(larger["visual"]["pos_embed"], golden.arrays["resized"], atol=1e-6, rtol=0)
    assert (config.visual.image_size, golden.config.visual.image_size) == (40, 20)
    assert len(params["visual"]["pos_embed"]) == 17, "the argument is unchanged"


def test_text_towers_of_open_clip_may_have_a_prefix():
    golden = goldens.load("clip_open_clip")
    prefixed = {
        name if name.startswith(("visual.", "logit_")) else f"text.{name}": tensor
        for name, tensor in golden.weights.items()
    }
    prefixed["text.attn_mask"] = np.zeros((12, 12))
    assert golden.layout is OPEN_CLIP
    jax.tree.map(np.testing.assert_array_equal, to_maxlp(golden, prefixed), to_maxlp(golden))


CONV = "vision_model.embeddings.patch_embedding.weight"
K_PROJ = "text_model.encoder.layers.1.self_attn.k_proj.weight"
JOINT = "transformer.resblocks.0.attn.in_proj_weight"


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("clip_hf_gelu", lambda t: t.pop(K_PROJ), f"tensor '{K_PROJ}' is missing"),
        ("clip_hf_gelu", lambda t: t.update({"x.y": t[K_PROJ]}), "tensor 'x.y' has no place in the model"),
        (
            "clip_hf_gelu",
            lambda t: t.update({K_PROJ: t[K_PROJ][:5]}),
            rf"'{K_PROJ}' of shape \(5, 24\) does not fit",
        ),
        (
            "clip_hf_gelu",
            lambda t: t.update({CONV: t[CONV][0]}),
            r"patch_embedding.weight' of shape \(3, 5, 5\)",
        ),
        ("clip_open_clip", lambda t: t.update({JOINT: t[JOINT][:70]}), rf"'{JOINT}' of shape \(70, 24\)"),
        ("clip_open_clip", lambda t: t.update({JOINT: t[JOINT][:, :1]}), rf"'{JOINT}' of shape \(72, 1\)"),
        ("clip_open_clip", lambda t: t.pop(JOINT), f"tensor '{JOINT}' is missing"),
        (
            "clip_open_clip",
            lambda t: t.update(logit_scale=t["logit_scale"].reshape(1, 1)),
            r"'logit_scale' of shape \(1, 1\) does not fit",
        ),
    ],
    ids=[
        "missing",
        "unknown",
        "shape",
        "rank",
        "rows of qkv",
        "columns of qkv",
        "missing qkv",
        "rank of a scalar",
    ],
)
def test_tensors_that_do_not_fit_are_named(name, change, message):
    golden = goldens.load(name)
    change(golden.weights)
    with pytest.raises(ValueError, match=message):
        to_maxlp(golden)


@pytest.mark.parametrize("name", export.FORMATS)
def test_a_model_that_no_format_can_hold_is_refused_without_pointing_from_one_to_the_other(name):
    """The released formats pool a class token or by attention; they have no mean over all positions."""
    config = goldens.load("clip_hf_gelu").config
    config = dataclasses.replace(config, visual=dataclasses.replace(config.visual, pool="gap"))
    with pytest.raises(ValueError, match=r"^model.visual.pool='gap' has .*train it with another") as error:
        export.FORMATS[name].config_files(config, lambda: None)
    assert "try --format" not in str(error.value)


FORMS = [("hf_clip", "eos"), ("hf_clip", "argmax"), ("open_clip", "eos")]


@pytest.mark.parametrize(("name", "pool"), FORMS)
def test_other_libraries_load_the_tokenizer_of_the_run(name, pool):
    """Without these files they take CLIP's own tokenizer, whose ids are above this vocabulary."""
    config = goldens.load("clip_hf_gelu").config
    eos_id = 1 if pool == "eos" else None
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, pool=pool, eos_id=eos_id))
    files = export.FORMATS[name].config_files(config, lambda: train_bpe(["a b"], 259, ends=True))
    special = files["tokenizer_config.json"]
    assert (special["bos_token"], special["eos_token"]) == ("<|begin_of_text|>", "<|end_of_text|>")
    if name == "open_clip":
        assert files["open_clip_config.json"]["model_cfg"]["text_cfg"]["hf_tokenizer_name"]
        return
    text = files["config.json"]["text_config"]
    ids = text["bos_token_id"], text["eos_token_id"], text["pad_token_id"]
    assert ids == (0, 1 if pool == "eos" else 2, 2) and special["model_max_length"] == config.text.max_len
