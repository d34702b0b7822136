import dataclasses
import json

import pytest

from maxlp.families.clip import hf
from maxlp.families.clip.export import FORMATS
from maxlp.families.weights import Section
from tests.families.clip import goldens


@pytest.mark.parametrize("name", ["clip_hf_quick_gelu", "clip_hf_gelu", "clip_hf_siglip"])
def test_configs_survive_the_round_trip(name):
    config = goldens.load(name).config
    files = json.loads(json.dumps(hf.config_to_hf(config)))
    assert files[1]["do_rescale"] and files[1]["rescale_factor"] == 1 / 255  # as `CLIP.encode_image`
    assert hf.config_from_hf(files[0], Section("", files[1])) == {
        key: value for key, value in vars(config).items() if key not in goldens.RUN
    }


def test_config_of_openai_b32():
    """Its file has few keys; the others take the defaults of the library that wrote it."""
    config = hf.config_from_hf(
        dict(
            model_type="clip",
            projection_dim=512,
            vision_config=dict(patch_size=32),
            text_config=dict(eos_token_id=2),
        )
    )
    visual, text = config["visual"], config["text"]
    sizes = (visual.width, visual.num_layers, visual.num_heads, visual.mlp_dim)
    assert sizes == (768, 12, 12, 3072)
    assert (text.width, text.num_layers, text.num_heads, text.mlp_dim) == (512, 12, 8, 2048)
    assert (text.vocab_size, text.max_len, text.pool) == (49408, 77, "argmax")
    assert (config["act"], config["norm_eps"]) == ("quick_gelu", 1e-5)
    assert config["image_mean"] == (0.48145466, 0.4578275, 0.40821073)
    assert config["image_std"] == (0.26862954, 0.26130258, 0.27577711)
    siglip = hf.config_from_hf(dict(model_type="siglip"))
    assert siglip["image_mean"] == siglip["image_std"] == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="align"), "model_type='align' is not supported, only clip and siglip"),
        (
            dict(text_config=dict(hidden_act="gelu")),
            "hidden_act='quick_gelu' and text_config.hidden_act='gelu' differ",
        ),
        (dict(vision_config=dict(num_channels=1)), "num_channels=1 is not supported, only 3"),
    ],
)
def test_other_architectures_are_refused(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        hf.config_from_hf(dict(model_type="clip") | changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("preprocessor", [dict(do_normalize=False), dict(rescale_factor=1 / 127.5)])
def test_pixels_of_another_range_are_refused(preprocessor):
    with pytest.raises(ValueError, match=r"preprocessor_config.json: .* not supported, only (True|1/255)"):
        hf.config_from_hf(dict(model_type="clip"), Section("preprocessor_config.json: ", preprocessor))


SQUARE = dict(height=32, width=32)


@pytest.mark.parametrize(
    ("kind", "preprocessor", "expected"),
    [
        ("clip", {}, ("shortest", "bicubic")),
        ("siglip", {}, ("squash", "bicubic")),
        ("clip", dict(size=32, crop_size=32, resample=3), ("shortest", "bicubic")),
        ("siglip", dict(size=SQUARE, resample=2), ("squash", "bilinear")),
        ("clip", dict(size=SQUARE, do_center_crop=False), ("squash", "bicubic")),
        ("siglip", dict(size=dict(shortest_edge=32), crop_size=SQUARE), ("shortest", "bicubic")),
    ],
)
def test_images_are_resized_as_the_image_processor_does(kind, preprocessor, expected):
    config = hf.config_from_hf(dict(model_type=kind), Section("", preprocessor))
    assert (config["image_resize"], config["image_interpolation"]) == expected


@pytest.mark.parametrize("name", ["clip_hf_gelu", "clip_hf_siglip"])
@pytest.mark.parametrize("how", [("shortest", "bilinear"), ("squash", "bicubic")])
def test_an_image_processor_is_exported(name, how):
    config = dataclasses.replace(goldens.load(name).config, image_resize=how[0], image_interpolation=how[1])
    hf_config, preprocessor = hf.config_to_hf(config)
    found = hf.config_from_hf(hf_config, Section("", preprocessor))
    assert (found["image_resize"], found["image_interpolation"]) == how


@pytest.mark.parametrize(
    ("preprocessor", "message"),
    [
        (dict(size=dict(shortest_edge=36), crop_size=SQUARE), "crop_size=.* only that of size, 36"),
        (dict(size=dict(shortest_edge=32), do_center_crop=False), "do_center_crop=False"),
        (
            dict(size=dict(longest_edge=32)),
            "size={'longest_edge': 32} is not supported, only short",
        ),
        (dict(size=dict(height=32, width=16)), "size={'height': 32, 'width': 16} is not supported"),
        (dict(resample=0), r"resample=0 is not supported, only 2 \(bilinear\) and 3 \(bicubic\)"),
    ],
)
def test_other_image_processors_are_refused(preprocessor, message):
    with pytest.raises(ValueError, match=f"preprocessor_config.json: {message}"):
        hf.config_from_hf(dict(model_type="clip"), Section("preprocessor_config.json: ", preprocessor))


def test_the_image_processor_of_transformers_5_is_read(tmp_path):
    """Its CLIPProcessor writes this file; an image processor alone, that of earlier versions."""
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="clip")))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(dict(image_std=[0.25] * 3)))
    assert FORMATS["hf_clip"].read_model(tmp_path, {})[0]["image_std"] == (0.25,) * 3
    processor = dict(image_processor=dict(image_mean=[0.1, 0.2, 0.3], size=SQUARE, do_center_crop=False))
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    config = FORMATS["hf_clip"].read_model(tmp_path, {})[0]
    assert (config["image_mean"], config["image_resize"]) == ((0.1, 0.2, 0.3), "squash")
    assert config["image_std"] == hf.OPENAI_STD


def test_models_without_a_counterpart_are_refused():
    config = goldens.load("clip_hf_gelu").config
    with pytest.raises(
        ValueError, match=r"model.layer_scale=0.1 has no counterpart in Hugging Face's CLIP"
    ):
        hf.config_to_hf(dataclasses.replace(config, layer_scale=0.1))
    siglip = goldens.load("clip_hf_siglip").config
    causal = dataclasses.replace(siglip, text=dataclasses.replace(siglip.text, causal=True))
    with pytest.raises(ValueError, match=r"model.text.causal=True has .* SigLIP, which has False"):
        hf.config_to_hf(causal)
    eos = dataclasses.replace(config, text=dataclasses.replace(config.text, pool="eos", eos_id=2))
    with pytest.raises(ValueError, match=r"model.text.eos_id=2 has no .* reads it as pool='argmax'"):
        hf.config_to_hf(eos)
