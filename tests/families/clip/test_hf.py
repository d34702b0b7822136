import dataclasses
import json

import pytest

from maxlp.families.clip import hf
from tests.families.clip import goldens


@pytest.mark.parametrize("name", ["clip_hf_quick_gelu", "clip_hf_gelu", "clip_hf_siglip"])
def test_configs_survive_the_round_trip(name):
    config = goldens.load(name).config
    files = json.loads(json.dumps(hf.config_to_hf(config)))
    assert files[1]["do_rescale"] and files[1]["rescale_factor"] == 1 / 255  # as `CLIP.encode_image`
    assert hf.config_from_hf(*files) == {
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
        hf.config_from_hf(dict(model_type="clip"), preprocessor)


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
