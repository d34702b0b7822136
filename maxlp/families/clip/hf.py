"""CLIP and SigLIP in Hugging Face's format: ``config.json`` and ``preprocessor_config.json``.

An architecture that `CLIP` does not implement is refused, never approximated.
"""

import math
from collections.abc import Mapping
from typing import Any

from maxlp import schema
from maxlp.families.clip.model import CLIPConfig, TextConfig
from maxlp.families.clip.vit import VisualConfig
from maxlp.families.weights import Section
from maxlp.schema import Count, CountOrZero, Positive

OPENAI_MEAN, OPENAI_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
MEAN, STD, RESIZE = (schema.annotations(CLIPConfig)[f"image_{key}"] for key in ("mean", "std", "resize"))
NO_SETTINGS = Section("", {})
RESAMPLE = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers
ACTS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu"}
_BASE = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
# Newer files contain only the values that differ from these.
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "clip": {
        "vision_config": dict(
            _BASE,
            num_channels=3,
            image_size=224,
            patch_size=32,
            hidden_act="quick_gelu",
            layer_norm_eps=1e-5,
        ),
        "text_config": dict(
            vocab_size=49408,
            hidden_size=512,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=8,
            max_position_embeddings=77,
            hidden_act="quick_gelu",
            layer_norm_eps=1e-5,
            eos_token_id=49407,
        ),
    },
    "siglip": {
        "vision_config": dict(
            _BASE,
            num_channels=3,
            image_size=224,
            patch_size=16,
            hidden_act="gelu_pytorch_tanh",
            layer_norm_eps=1e-6,
            vision_use_head=True,
        ),
        "text_config": dict(
            _BASE,
            vocab_size=32000,
            max_position_embeddings=64,
            hidden_act="gelu_pytorch_tanh",
            layer_norm_eps=1e-6,
            projection_size=None,
        ),
    },
}
_SIZES = dict(
    width="hidden_size",
    num_layers="num_hidden_layers",
    num_heads="num_attention_heads",
    mlp_dim="intermediate_size",
)


def config_from_hf(hf: Mapping[str, Any], preprocessor: Section = NO_SETTINGS) -> dict[str, Any]:
    """The keywords of `CLIPConfig` that the JSON files determine.

    (``dtype``, ``param_dtype``, ``attention``, ``scan_layers`` and ``remat`` are the caller's choice.)

    Args:
      hf: content of ``config.json``.
      preprocessor: settings of the image processor; those that are missing are the library's.

    Raises:
      ValueError: an architecture that `CLIP` does not implement, a missing key or an invalid value.
    """
    c = Section("config.json: ", hf)
    kind = c.values.get("model_type")
    if kind not in tuple(DEFAULTS):
        raise c.refusal("model_type", "clip and siglip")
    vision, text = (_tower(c, key, defaults) for key, defaults in DEFAULTS[kind].items())
    is_clip = kind == "clip"
    required = {"num_channels": 3} if is_clip else {"num_channels": 3, "vision_use_head": True}
    for key, value in required.items():
        if vision.values.get(key) is not value:
            raise vision.refusal(key, repr(value))
    act = shared_value("hidden_act", vision, text)
    if act not in ACTS.values():
        raise vision.refusal("hidden_act", ", ".join(ACTS.values()))
    shared_value("layer_norm_eps", vision, text)
    width = vision.read("hidden_size", Count)
    if preprocessor.values.get("do_normalize", True) is not True:
        raise preprocessor.refusal("do_normalize", "True")
    if not math.isclose(preprocessor.values.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-3):
        raise preprocessor.refusal("rescale_factor", "1/255")
    resample = preprocessor.read("resample", int, RESAMPLE["bicubic"])
    if resample not in RESAMPLE.values():
        raise preprocessor.refusal("resample", "2 (bilinear) and 3 (bicubic)")
    return dict(
        embed_dim=c.read("projection_dim", Count, 512) if is_clip else width,
        visual=VisualConfig(
            **{key: vision.read(hf_key, Count) for key, hf_key in _SIZES.items()},
            image_size=vision.read("image_size", Count),
            patch_size=vision.read("patch_size", Count),
            pool="cls" if is_clip else "map",
            pre_norm=is_clip,
            patch_bias=not is_clip,
            proj=is_clip,
            patch_dropout=0.0,
        ),
        text=_text_config(text, is_clip),
        act=next(key for key, hf_act in ACTS.items() if hf_act == act),
        norm_eps=vision.read("layer_norm_eps", Positive),
        layer_scale=None,
        qk_norm=False,
        init=kind,
        logit_scale=float(c.read("logit_scale_init_value", float, 2.6592)) if is_clip else math.log(10),
        logit_bias=None if is_clip else -10.0,
        image_mean=preprocessor.read("image_mean", MEAN, OPENAI_MEAN if is_clip else (0.5,) * 3),
        image_std=preprocessor.read("image_std", STD, OPENAI_STD if is_clip else (0.5,) * 3),
        image_resize=_resize_mode(preprocessor, is_clip),
        image_interpolation=next(name for name, number in RESAMPLE.items() if number == resample),
    )


def _resize_mode(preprocessor: Section, is_clip: bool) -> str:
    """How the image processor makes an image square.

    Raises:
      ValueError: it makes none, or crops another size than it resizes to.
    """
    values = preprocessor.values
    size, crop = values.get("size"), values.get("crop_size")
    if size is None or isinstance(size, int):
        return "shortest" if is_clip else "squash"
    if set(size) == {"height", "width"} and size["height"] == size["width"]:
        return "squash"
    if set(size) != {"shortest_edge"}:
        raise preprocessor.refusal("size", "shortest_edge, or the same height and width")
    if values.get("do_center_crop", True) is not True:
        raise preprocessor.refusal("do_center_crop", "True after a resize of the shortest edge")
    short = size["shortest_edge"]
    if crop not in (None, short, {"height": short, "width": short}):
        raise preprocessor.refusal("crop_size", f"that of size, {short}")
    return "shortest"


def _tower(c: Section, key: str, defaults: dict[str, Any]) -> Section:
    """A tower's section with its defaults; some files have the section under two names."""
    sections = (c.section(key, None), c.section(f"{key}_dict", None))
    return Section(sections[0].place, defaults | dict(sections[0].values) | dict(sections[1].values))


def _text_config(text: Section, is_clip: bool) -> TextConfig:
    eos_id = text.read("eos_token_id", CountOrZero) if is_clip else None
    vocab_size = text.read("vocab_size", Count)
    if eos_id == 2:  # files from before 2023 mean the highest id; see transformers' CLIPTextModel
        eos_id = None
    elif eos_id is not None and eos_id >= vocab_size:
        raise text.refusal("eos_token_id", f"an id below vocab_size={vocab_size}")
    pool_of_clip = "argmax" if eos_id is None else "eos"
    return TextConfig(
        **{key: text.read(hf_key, Count) for key, hf_key in _SIZES.items()},
        vocab_size=vocab_size,
        max_len=text.read("max_position_embeddings", Count),
        causal=is_clip,
        pool=pool_of_clip if is_clip else "last",
        eos_id=eos_id,
        proj_bias=not is_clip,
    )


def config_to_hf(config: CLIPConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """``config.json``, for tensors in the config's ``param_dtype``, and ``preprocessor_config.json``.

    Raises:
      ValueError: a model that neither CLIP nor SigLIP of Hugging Face implements.
    """
    visual, text = config.visual, config.text
    is_clip = kind_in_hf(config) == "clip"
    shared = dict(hidden_act=ACTS[config.act], layer_norm_eps=config.norm_eps)
    vision_config = shared | {hf_key: getattr(visual, key) for key, hf_key in _SIZES.items()}
    vision_config |= dict(image_size=visual.image_size, patch_size=visual.patch_size, num_channels=3)
    text_config = shared | {hf_key: getattr(text, key) for key, hf_key in _SIZES.items()}
    text_config |= dict(vocab_size=text.vocab_size, max_position_embeddings=text.max_len)
    if is_clip:
        text_config |= dict(eos_token_id=2 if text.pool == "argmax" else text.eos_id)
        for tower in (vision_config, text_config):
            tower["projection_dim"] = config.embed_dim
    else:
        text_config["projection_size"] = config.embed_dim
    kind = "CLIP" if is_clip else "Siglip"
    config_json = dict(
        architectures=[f"{kind}Model"],
        model_type=kind.lower(),
        vision_config=dict(vision_config, model_type=f"{kind.lower()}_vision_model"),
        text_config=dict(text_config, model_type=f"{kind.lower()}_text_model"),
        torch_dtype=config.param_dtype,
    )
    if is_clip:
        config_json |= dict(projection_dim=config.embed_dim, logit_scale_init_value=config.logit_scale)
    return config_json, _preprocessor(config, kind)


def _preprocessor(config: CLIPConfig, kind: str) -> dict[str, Any]:
    size, crops = config.visual.image_size, config.image_resize == "shortest"
    exact = dict(height=size, width=size)
    processor = "CLIP" if crops else kind  # SigLIP's only squashes
    return dict(
        image_processor_type=f"{processor}ImageProcessor",
        do_resize=True,
        size=dict(shortest_edge=size) if crops else exact,
        resample=RESAMPLE[config.image_interpolation],
        do_center_crop=crops,
        crop_size=exact,
        do_convert_rgb=True,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=list(config.image_mean),
        image_std=list(config.image_std),
    )


def kind_in_hf(config: CLIPConfig) -> str:
    """Which of Hugging Face's models this is: "clip" or "siglip".

    Raises:
      ValueError: neither; the message names the key that has no counterpart.
    """
    visual, text = config.visual, config.text
    kind = "clip" if visual.pool == "cls" else "siglip"
    is_clip = kind == "clip"
    for name, value, allowed in (
        ("layer_scale", config.layer_scale, (None,)),
        ("qk_norm", config.qk_norm, (False,)),
        ("visual.pool", visual.pool, ("cls", "map")),
        ("visual.pre_norm", visual.pre_norm, (is_clip,)),
        ("visual.patch_bias", visual.patch_bias, (not is_clip,)),
        ("visual.proj", visual.proj, (is_clip,)),
        ("text.causal", text.causal, (is_clip,)),
        ("text.pool", text.pool, ("argmax", "eos") if is_clip else ("last",)),
        ("text.proj_bias", text.proj_bias, (not is_clip,)),
        ("logit_bias", config.logit_bias is not None, (not is_clip,)),
    ):
        if value not in allowed:
            model = "CLIP" if is_clip else "SigLIP"
            raise ValueError(
                f"model.{name}={value!r} has no counterpart in Hugging Face's {model}, which has "
                f"{' or '.join(map(repr, allowed))}"
            )
    if text.pool == "eos" and text.eos_id == 2:
        raise ValueError(
            "model.text.eos_id=2 has no counterpart in Hugging Face's CLIP, which reads it as pool='argmax'"
        )
    return kind


def shared_value(key: str, a: Section, b: Section) -> Any:
    """The value of a key that both towers have to share.

    Raises:
      ValueError: the values differ.
    """
    one, other = a.values.get(key), b.values.get(key)
    if repr(one) != repr(other):  # a NaN is unequal to itself
        raise ValueError(
            f"{a.place}{key}={one!r} and {b.place.rpartition(' ')[2]}{key}={other!r} differ; "
            "maxlp supports one value for both towers"
        )
    return one
