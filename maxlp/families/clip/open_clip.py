"""CLIP in open_clip's format: ``open_clip_config.json``.

An architecture that `CLIP` does not implement is refused, never approximated.
"""

import math
from collections.abc import Mapping
from typing import Any

from maxlp.families.clip.hf import OPENAI_MEAN, OPENAI_STD, shared_value
from maxlp.families.clip.model import CLIPConfig, TextConfig
from maxlp.families.clip.vit import VisualConfig

CONFIG = "open_clip_config.json"

_VISION_DEFAULTS = dict(
    layers=12,
    width=768,
    head_width=64,
    mlp_ratio=4.0,
    patch_size=16,
    image_size=224,
    ls_init_value=None,
    patch_dropout=0.0,
    pool_type="tok",
    norm_kwargs=None,
    act_kwargs=None,
    no_ln_pre=False,
)
_TEXT_DEFAULTS = dict(
    context_length=77,
    vocab_size=49408,
    width=512,
    heads=8,
    layers=12,
    mlp_ratio=4.0,
    ls_init_value=None,
    pool_type="argmax",
    eos_id=2,
    norm_kwargs=None,
    act_kwargs=None,
    no_causal_mask=False,
)
_IGNORED = {  # keys without effect on the models that are supported
    "attn_pooler_heads",
    "attn_pooler_queries",
    "hf_model_pretrained",
    "hf_pooler_type",
    "hf_proj_type",
    "hf_tokenizer_name",
    "output_tokens",
    "pad_id",
    "timm_pool",
    "timm_proj",
    "tokenizer_kwargs",
    "tokenizer_mode",
}
_ONLY = dict(pos_embed_type="learnable", proj_type="linear", block_type="default")


def config_from_open_clip(open_clip: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `CLIPConfig` that an ``open_clip_config.json`` determines.

    (``dtype``, ``param_dtype``, ``attention``, ``scan_layers`` and ``remat`` are the caller's choice.)

    Raises:
      ValueError: an architecture that `CLIP` does not implement.
    """
    vision, text = _read_towers(open_clip)
    c, preprocess = open_clip["model_cfg"], open_clip.get("preprocess_cfg") or {}
    towers = dict(vision_cfg=vision, text_cfg=text)
    act = "quick_gelu" if c.get("quick_gelu") else "gelu"
    if shared_value(CONFIG, "act_kwargs", **towers):
        act = "gelu_tanh"
    norm = shared_value(CONFIG, "norm_kwargs", **towers) or {}
    if set(norm) - {"eps"}:
        raise ValueError(f"{CONFIG}: norm_kwargs={norm!r} is not supported")
    bias = c.get("init_logit_bias")
    return dict(
        embed_dim=c["embed_dim"],
        visual=VisualConfig(
            image_size=vision["image_size"],
            patch_size=vision["patch_size"],
            width=vision["width"],
            num_layers=vision["layers"],
            num_heads=vision["width"] // vision["head_width"],
            mlp_dim=int(vision["width"] * vision["mlp_ratio"]),
            pool="cls",
            pre_norm=not vision["no_ln_pre"],
            patch_bias=False,
            proj=True,
            patch_dropout=float(vision["patch_dropout"]),
        ),
        text=TextConfig(
            vocab_size=text["vocab_size"],
            max_len=text["context_length"],
            width=text["width"],
            num_layers=text["layers"],
            num_heads=text["heads"],
            mlp_dim=int(text["width"] * text["mlp_ratio"]),
            causal=not text["no_causal_mask"],
            pool=text["pool_type"],
            eos_id=text["eos_id"] if text["pool_type"] == "eos" else None,
            proj_bias=False,
        ),
        act=act,
        norm_eps=norm.get("eps", 1e-5),
        layer_scale=shared_value(CONFIG, "ls_init_value", **towers),
        qk_norm=False,
        init="clip",
        logit_scale=float(c.get("init_logit_scale") or math.log(1 / 0.07)),
        logit_bias=None if bias is None else float(bias),
        image_mean=tuple(preprocess.get("mean", OPENAI_MEAN)),
        image_std=tuple(preprocess.get("std", OPENAI_STD)),
    )


def _read_towers(open_clip: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The image and the text tower with their defaults, after a check of all keys."""
    if "model_cfg" not in open_clip:
        raise ValueError(f"{CONFIG}: 'model_cfg' is missing")
    c = open_clip["model_cfg"]
    required = ("embed_dim", "vision_cfg", "text_cfg")
    for key in set(c) - {*required, "quick_gelu", "init_logit_scale", "init_logit_bias", "custom_text"}:
        if c[key]:
            raise ValueError(f"{CONFIG}: model_cfg.{key}={c[key]!r} is not supported")
    for key in required:
        if key not in c:
            raise ValueError(f"{CONFIG}: model_cfg.{key} is missing")
    vision = _read_tower("vision_cfg", c["vision_cfg"], _VISION_DEFAULTS)
    text = _read_tower("text_cfg", c["text_cfg"], _TEXT_DEFAULTS)
    for name, tower, key, supported in (
        ("vision_cfg", vision, "pool_type", ("tok",)),
        ("text_cfg", text, "pool_type", ("argmax", "eos", "last")),
        ("vision_cfg", vision, "act_kwargs", (None, {}, {"approximate": "tanh"})),
    ):
        if tower[key] not in supported:
            raise ValueError(f"{CONFIG}: {name}.{key}={tower[key]!r} is not supported")
    return vision, text


def _read_tower(name: str, tower: Mapping[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    for key, value in tower.items():
        supported = key in defaults or key in _IGNORED or not value or _ONLY.get(key) == value
        if not supported:
            raise ValueError(f"{CONFIG}: {name}.{key}={value!r} is not supported")
    return defaults | {key: value for key, value in tower.items() if key in defaults}


def config_to_open_clip(config: CLIPConfig) -> dict[str, Any]:
    """An ``open_clip_config.json``.

    Raises:
      ValueError: a model that open_clip's CLIP does not implement.
    """
    visual, text = config.visual, config.text
    for name, value, only in (
        ("qk_norm", config.qk_norm, False),
        ("visual.pool", visual.pool, "cls"),
        ("visual.patch_bias", visual.patch_bias, False),
        ("visual.proj", visual.proj, True),
        ("text.proj_bias", text.proj_bias, False),
    ):
        if value != only:
            raise ValueError(
                f"model.{name}={value!r} has no counterpart in open_clip's CLIP, which has {only!r}; "
                "try --format=hf_clip"
            )
    shared: dict[str, Any] = dict(ls_init_value=config.layer_scale, norm_kwargs=dict(eps=config.norm_eps))
    if config.act == "gelu_tanh":
        shared["act_kwargs"] = dict(approximate="tanh")
    model_cfg = dict(
        embed_dim=config.embed_dim,
        quick_gelu=config.act == "quick_gelu",
        init_logit_scale=config.logit_scale,
        vision_cfg=dict(
            shared,
            image_size=visual.image_size,
            patch_size=visual.patch_size,
            width=visual.width,
            layers=visual.num_layers,
            head_width=visual.width // visual.num_heads,
            mlp_ratio=_ratio(visual.width, visual.mlp_dim),
            patch_dropout=visual.patch_dropout,
            no_ln_pre=not visual.pre_norm,
        ),
        text_cfg=dict(
            shared,
            context_length=text.max_len,
            vocab_size=text.vocab_size,
            width=text.width,
            heads=text.num_heads,
            layers=text.num_layers,
            mlp_ratio=_ratio(text.width, text.mlp_dim),
            no_causal_mask=not text.causal,
            pool_type=text.pool,
            **(dict(eos_id=text.eos_id) if text.pool == "eos" else {}),
        ),
    )
    if config.logit_bias is not None:
        model_cfg["init_logit_bias"] = config.logit_bias
    statistics = dict(mean=list(config.image_mean), std=list(config.image_std))
    return dict(model_cfg=model_cfg, preprocess_cfg=statistics)


def _ratio(width: int, mlp_dim: int) -> float:
    """A number r for which int(width · r), computed in floating point, is ``mlp_dim``."""
    ratio = mlp_dim / width
    return ratio if int(width * ratio) == mlp_dim else math.nextafter(ratio, math.inf)
