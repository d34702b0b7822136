"""CLIP against Hugging Face's and open_clip's. tools/make_clip_goldens.py made the goldens."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.families.clip import hf as clip_configs
from maxlp.families.clip import weights as clip_weights
from maxlp.families.clip.model import CLIP

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
LAYOUT_OF = {
    "clip_hf_quick_gelu": "hf_clip",
    "clip_hf_gelu": "hf_clip",
    "clip_hf_siglip": "hf_siglip",
    "clip_open_clip": "open_clip",
    "clip_open_clip_quick_gelu": "open_clip",
}
RUN = dict(dtype="float32", param_dtype="float32", attention="xla", scan_layers=True, remat="none")
COMPILE = {"xla_backend_optimization_level": 0}  # half of the time


def load(name: str) -> dict:
    """A golden with its config as `CLIP` arguments, and weights and grads as dicts by name."""
    with np.load(GOLDENS / f"{name}.npz") as file:
        flat = dict(file)
    theirs = json.loads(str(flat.pop("config")))
    read = clip_configs.config_from_open_clip if "model_cfg" in theirs else clip_configs.config_from_hf
    golden = dict(config=read(theirs) | RUN, theirs=theirs)
    for key, value in flat.items():
        group, _, tensor = key.partition("/")
        if tensor:
            golden.setdefault(group, {})[tensor] = value.astype(np.float32)
        else:
            golden[group] = value
    return golden


def features(params: dict, config: dict, image, text) -> tuple[jax.Array, jax.Array]:
    model = CLIP(**config, rngs=nnx.Rngs(0))
    nnx.update(model, params)
    return model.encode_image(image), model.encode_text(text)


@pytest.mark.parametrize("name", LAYOUT_OF)
def test_features_and_gradients_equal_theirs(name):
    golden = load(name)
    layout = LAYOUT_OF[name]
    params = clip_weights.to_maxlp(golden["weights"], golden["config"], layout)

    def loss(params, image, text):
        image_BE, text_BE = features(params, golden["config"], image, text)
        return jnp.sum(golden["weight"] * (image_BE @ text_BE.T)), (image_BE, text_BE)

    compute = jax.jit(jax.grad(loss, has_aux=True), compiler_options=COMPILE)
    grads, (image_BE, text_BE) = compute(params, np.float32(golden["image"]), golden["text"])
    np.testing.assert_allclose(image_BE, golden["image_features"], atol=3e-6, rtol=0)
    np.testing.assert_allclose(text_BE, golden["text_features"], atol=3e-6, rtol=0)
    grads = clip_weights.to_theirs(grads, layout)
    assert len(golden["grads"]) >= 3
    for key, expected in golden["grads"].items():
        atol = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(grads[key], expected, atol=atol, rtol=0, err_msg=key)


@pytest.mark.parametrize("name", LAYOUT_OF)
def test_weights_survive_the_round_trip_bit_for_bit(name):
    golden = load(name)
    params = clip_weights.to_maxlp(golden["weights"], golden["config"], LAYOUT_OF[name])
    back = clip_weights.to_theirs(params, LAYOUT_OF[name])
    assert set(back) == set(golden["weights"])
    for key, weight in golden["weights"].items():
        np.testing.assert_array_equal(back[key], weight, strict=True, err_msg=key)


def test_the_goldens_see_what_sets_the_models_apart():
    """With another activation or another pool, the features are far off."""
    for name, change in (
        ("clip_hf_quick_gelu", dict(act="gelu")),
        ("clip_hf_siglip", dict(act="gelu")),
        ("clip_hf_gelu", dict(text=dict(pool="argmax", eos_id=None))),
    ):
        golden = load(name)
        config = dict(golden["config"])
        for key, value in change.items():
            config[key] = config[key] | value if isinstance(value, dict) else value
        params = clip_weights.to_maxlp(golden["weights"], golden["config"], LAYOUT_OF[name])
        compute = jax.jit(lambda p, *x, c=config: features(p, c, *x), compiler_options=COMPILE)
        found = compute(params, np.float32(golden["image"]), golden["text"])
        wanted = golden["image_features"], golden["text_features"]
        assert max(np.abs(a - b).max() for a, b in zip(found, wanted, strict=True)) > 5e-5, (name, change)


def test_resized_positions_are_those_of_open_clip():
    golden = load("clip_open_clip")
    params = clip_weights.to_maxlp(golden["weights"], golden["config"], "open_clip")
    larger, config = clip_weights.resized(params, golden["config"], image_size=40)
    np.testing.assert_allclose(larger["visual"]["pos_embed"], golden["resized"], atol=1e-6, rtol=0)
    assert config["visual"]["image_size"] == 40
    assert golden["config"]["visual"]["image_size"] == 20
    assert len(params["visual"]["pos_embed"]) == 17


def test_custom_text_towers_of_open_clip_have_a_prefix():
    golden = load("clip_open_clip")
    prefixed = {
        name if name.startswith(("visual.", "logit_")) else f"text.{name}": tensor
        for name, tensor in golden["weights"].items()
    }
    prefixed["text.attn_mask"] = np.zeros((12, 12))
    params, expected = (
        clip_weights.to_maxlp(tensors, golden["config"], "open_clip")
        for tensors in (prefixed, golden["weights"])
    )
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_the_layouts_hold_every_parameter_of_the_published_models():
    """A path without a name would be an error; two paths with one name would lose a tensor."""
    for name, layout in LAYOUT_OF.items():
        golden = load(name)
        params = clip_weights.to_maxlp(golden["weights"], golden["config"], layout)
        sizes = [
            sum(leaf.size for leaf in jax.tree.leaves(tree))
            for tree in (params, clip_weights.to_theirs(params, layout))
        ]
        assert sizes[0] == sizes[1] == sum(weight.size for weight in golden["weights"].values())


CONV = "vision_model.embeddings.patch_embedding.weight"
K_PROJ = "text_model.encoder.layers.1.self_attn.k_proj.weight"
JOINT = "transformer.resblocks.0.attn.in_proj_weight"


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("clip_hf_gelu", lambda t: t.pop(K_PROJ), f"tensor '{K_PROJ}' is missing"),
        (
            "clip_hf_gelu",
            lambda t: t.update({"x.y": t[K_PROJ]}),
            r"tensor 'x.y' has no place in this model",
        ),
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
    ],
)
def test_tensors_that_do_not_fit_are_named(name, change, message):
    golden = load(name)
    change(golden["weights"])
    with pytest.raises(ValueError, match=message):
        clip_weights.to_maxlp(golden["weights"], golden["config"], LAYOUT_OF[name])


# --- configs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUT_OF)
def test_configs_survive_the_round_trip(name):
    config = load(name)["config"]
    if LAYOUT_OF[name] == "open_clip":
        back = clip_configs.config_from_open_clip(clip_configs.config_to_open_clip(config))
    else:
        theirs, preprocessor = json.loads(json.dumps(clip_configs.config_to_hf(config, "float32")))
        back = clip_configs.config_from_hf(theirs, preprocessor)
    assert back == {key: value for key, value in config.items() if key not in RUN}


def test_config_of_openai_b32():
    """Its file says little: the rest are the defaults of the library that wrote it."""
    config = clip_configs.config_from_hf(
        dict(
            model_type="clip",
            projection_dim=512,
            vision_config=dict(patch_size=32),
            text_config=dict(eos_token_id=2),
        )
    )
    visual, text = config["visual"], config["text"]
    assert (visual["width"], visual["num_layers"], visual["num_heads"], visual["mlp_dim"]) == (
        768,
        12,
        12,
        3072,
    )
    assert (text["width"], text["num_layers"], text["num_heads"], text["mlp_dim"]) == (512, 12, 8, 2048)
    assert (text["vocab_size"], text["max_len"], text["pool"]) == (49408, 77, "argmax")
    assert (config["act"], config["norm_eps"]) == ("quick_gelu", 1e-5)


def test_config_of_open_clip_g14():
    vision = dict(image_size=224, layers=40, width=1408, head_width=88, mlp_ratio=4.3637, patch_size=14)
    text = dict(context_length=77, vocab_size=49408, width=1024, heads=16, layers=24)
    theirs = dict(model_cfg=dict(embed_dim=1024, vision_cfg=vision, text_cfg=text), preprocess_cfg=dict())
    config = clip_configs.config_from_open_clip(theirs)
    assert (config["visual"]["mlp_dim"], config["visual"]["num_heads"]) == (6144, 16)
    again = clip_configs.config_to_open_clip(config)
    vision_cfg = again["model_cfg"]["vision_cfg"]
    assert int(vision_cfg["width"] * vision_cfg["mlp_ratio"]) == 6144, "as open_clip computes it"
    assert clip_configs.config_from_open_clip(again) == config


def hf(**changes):
    return clip_configs.config_from_hf(dict(model_type="clip") | changes)


def of_open_clip(tower="vision_cfg", top=None, **changes):
    model_cfg = dict(embed_dim=16, vision_cfg={}, text_cfg={}, **(top or {}))
    model_cfg[tower] = changes
    return clip_configs.config_from_open_clip(dict(model_cfg=model_cfg))


@pytest.mark.parametrize(
    "read, message",
    [
        (lambda: hf(model_type="align"), "model_type='align' is not supported, only clip and siglip"),
        (lambda: hf(text_config=dict(hidden_act="gelu")), "hidden_act='quick_gelu' and text_config.hid"),
        (
            lambda: hf(vision_config=dict(num_channels=1)),
            "vision_config.num_channels=1 is not supported, only 3",
        ),
        (lambda: of_open_clip(timm_model_name="vit"), "vision_cfg.timm_model_name='vit' is not supported"),
        (lambda: of_open_clip(qk_norm=True), "vision_cfg.qk_norm=True is not supported"),
        (lambda: of_open_clip(pool_type="avg"), "vision_cfg.pool_type='avg' is not supported"),
        (lambda: of_open_clip("text_cfg", hf_model_name="bert"), "text_cfg.hf_model_name='bert' is not"),
        (
            lambda: of_open_clip(ls_init_value=0.0),
            "vision_cfg.ls_init_value=0.0 and text_cfg.ls_init_value",
        ),
        (lambda: of_open_clip(top=dict(multimodal_cfg=dict(a=1))), "model_cfg.multimodal_cfg="),
        (lambda: clip_configs.config_from_open_clip({}), "'model_cfg' is missing"),
    ],
)
def test_foreign_architectures_are_refused(read, message):
    with pytest.raises(ValueError, match=message) as error:
        read()
    assert "\n" not in str(error.value)


def test_models_without_a_counterpart_are_refused():
    config = load("clip_open_clip")["config"]
    with pytest.raises(ValueError, match=r"model.layer_scale=0.1 has no counterpart in Hugging"):
        clip_configs.config_to_hf(config, "float32")
    with pytest.raises(ValueError, match=r"model.qk_norm=True has no counterpart in open_clip"):
        clip_configs.config_to_open_clip(config | dict(qk_norm=True))
    with pytest.raises(ValueError, match=r"model.visual.pool='map' has no counterpart in open_clip"):
        clip_configs.config_to_open_clip(load("clip_hf_siglip")["config"])
