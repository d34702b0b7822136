import dataclasses
import json
import math

import pytest

from maxlp.families.clip.model import CLIPConfig
from maxlp.families.clip.open_clip import _ratio, config_from_open_clip, config_to_open_clip
from tests.families.clip import goldens


@pytest.mark.parametrize("name", ["clip_open_clip", "clip_open_clip_quick_gelu"])
def test_configs_survive_the_round_trip(name):
    config = goldens.load(name).config
    back = config_from_open_clip(json.loads(json.dumps(config_to_open_clip(config))))
    assert back == {key: value for key, value in vars(config).items() if key not in goldens.RUN}


@pytest.mark.parametrize(
    "changes",
    [
        *(dict(act=act) for act in ("gelu", "quick_gelu", "gelu_tanh")),
        *(dict(layer_scale=scale) for scale in (None, 0.2)),
        *(dict(logit_scale=1.5, logit_bias=bias) for bias in (None, 0.0, -10.0)),
        dict(norm_eps=1e-6, image_mean=(0.1, 0.2, 0.3), image_std=(0.4, 0.5, 0.6)),
        dict(visual=dict(patch_dropout=0.25, pre_norm=False)),
        dict(text=dict(causal=False)),
    ],
)
def test_every_field_is_written_and_read(changes):
    config = goldens.load("clip_open_clip").config
    towers = {
        tower: dataclasses.replace(getattr(config, tower), **changes[tower])
        for tower in changes.keys() & {"visual", "text"}
    }
    changes = changes | towers
    back = config_from_open_clip(config_to_open_clip(dataclasses.replace(config, **changes)))
    assert {key: back[key] for key in changes} == changes


def test_what_a_file_leaves_out_is_open_clips_default():
    def read(**text_cfg):
        file = dict(model_cfg=dict(embed_dim=512, vision_cfg={}, text_cfg=text_cfg))
        return CLIPConfig(**config_from_open_clip(file), **goldens.RUN)

    config = read()
    visual, text = config.visual, config.text
    assert (visual.image_size, visual.patch_size, visual.width, visual.num_layers) == (224, 16, 768, 12)
    assert (visual.num_heads, visual.mlp_dim, visual.pre_norm) == (12, 3072, True)
    assert (text.max_len, text.vocab_size, text.width, text.num_layers) == (77, 49408, 512, 12)
    assert (text.num_heads, text.mlp_dim, text.pool, text.causal) == (8, 2048, "argmax", True)
    assert config.image_mean == (0.48145466, 0.4578275, 0.40821073)
    assert config.image_std == (0.26862954, 0.26130258, 0.27577711)
    assert read(pool_type="eos").text.eos_id == 2


def test_at_most_one_option_names_the_activation():
    """open_clip passes `act_kwargs` to what `quick_gelu` selects."""
    config = dataclasses.replace(goldens.load("clip_open_clip").config, act="gelu_tanh")
    assert not config_to_open_clip(config)["model_cfg"]["quick_gelu"]


def test_config_of_g14():
    """Its mlp_ratio is rounded: int(width · ratio) is the MLP's width, in floating point."""
    vision = dict(image_size=224, layers=40, width=1408, head_width=88, mlp_ratio=4.3637, patch_size=14)
    text = dict(context_length=77, vocab_size=49408, width=1024, heads=16, layers=24)
    g14 = dict(model_cfg=dict(embed_dim=1024, vision_cfg=vision, text_cfg=text), preprocess_cfg=dict())
    config = config_from_open_clip(g14)
    assert (config["visual"].mlp_dim, config["visual"].num_heads) == (6144, 16)
    again = config_to_open_clip(CLIPConfig(**config, **goldens.RUN))
    vision_cfg = again["model_cfg"]["vision_cfg"]
    assert int(vision_cfg["width"] * vision_cfg["mlp_ratio"]) == 6144
    assert config_from_open_clip(again) == config


@pytest.mark.parametrize(("given", "expected"), [(None, math.log(1 / 0.07)), (0.0, 0.0), (2.5, 2.5)])
def test_the_logit_scale_may_be_zero_and_null_means_the_default(given, expected):
    open_clip = config_to_open_clip(goldens.load("clip_open_clip").config)
    open_clip["model_cfg"]["init_logit_scale"] = given
    assert config_from_open_clip(open_clip)["logit_scale"] == expected


@pytest.mark.parametrize(
    ("preprocess", "expected"),
    [
        ({}, ("shortest", "bicubic")),
        (dict(resize_mode="squash", interpolation="bilinear"), ("squash", "bilinear")),
        (dict(resize_mode="shortest", interpolation="random"), ("shortest", "bicubic")),
    ],
)
def test_images_are_resized_as_in_open_clip(preprocess, expected):
    config = goldens.load("clip_open_clip").config
    file = config_to_open_clip(config) | dict(preprocess_cfg=preprocess)
    found = config_from_open_clip(file)
    assert (found["image_resize"], found["image_interpolation"]) == expected
    again = config_from_open_clip(config_to_open_clip(CLIPConfig(**found, **goldens.RUN)))
    assert again == found
    with pytest.raises(ValueError, match=r"preprocess_cfg\.resize_mode='longest' is unknown; one of sh"):
        config_from_open_clip(file | dict(preprocess_cfg=dict(resize_mode="longest")))


@pytest.mark.parametrize(("pool", "eos_id"), [("argmax", None), ("eos", 5), ("last", None)])
def test_texts_are_pooled_as_in_open_clip(pool, eos_id):
    config = goldens.load("clip_open_clip").config
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, pool=pool, eos_id=eos_id))
    assert config_from_open_clip(config_to_open_clip(config))["text"] == config.text


def read(tower="vision_cfg", top=None, **changes):
    model_cfg = dict(embed_dim=16, vision_cfg={}, text_cfg={}, **(top or {}))
    model_cfg[tower] = changes
    return config_from_open_clip(dict(model_cfg=model_cfg))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(timm_model_name="vit"), "vision_cfg.timm_model_name='vit' is not supported"),
        (dict(qk_norm=True), "vision_cfg.qk_norm=True is not supported"),
        (dict(pool_type="avg"), "vision_cfg.pool_type='avg' is not supported"),
        (dict(tower="text_cfg", hf_model_name="bert"), "text_cfg.hf_model_name='bert' is not supported"),
        (
            dict(ls_init_value=0.0),
            "vision_cfg.ls_init_value=0.0 and model_cfg.text_cfg.ls_init_value=None differ",
        ),
        (dict(top=dict(multimodal_cfg=dict(a=1))), "model_cfg.multimodal_cfg="),
    ],
)
def test_other_architectures_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        read(**arguments)
    assert "\n" not in str(error.value)


def test_other_options_of_norms_than_epsilon_are_refused():
    tower = dict(norm_kwargs=dict(eps=1e-6, bias=False))
    with pytest.raises(ValueError, match=r"vision_cfg\.norm_kwargs=.*'bias': False"):
        config_from_open_clip(dict(model_cfg=dict(embed_dim=16, vision_cfg=tower, text_cfg=tower)))


def test_a_config_without_a_model_is_refused():
    with pytest.raises(ValueError, match="model_cfg is missing"):
        config_from_open_clip({})


def test_models_without_a_counterpart_are_refused():
    config = dataclasses.replace(goldens.load("clip_open_clip").config, qk_norm=True)
    with pytest.raises(ValueError, match=r"model.qk_norm=True has no counterpart in open_clip"):
        config_to_open_clip(config)
    with pytest.raises(ValueError, match=r"model.visual.pool='map' has no counterpart in open_clip"):
        config_to_open_clip(goldens.load("clip_hf_siglip").config)


@pytest.mark.parametrize(("width", "mlp_dim"), [(1152, 4304), (88, 120), (768, 3072)])
def test_the_ratio_gives_the_width_of_the_mlp_in_open_clips_arithmetic(width, mlp_dim):
    """``int(width * ratio)``, where 88 * (120 / 88) is 119.99…"""
    assert int(width * _ratio(width, mlp_dim)) == mlp_dim
