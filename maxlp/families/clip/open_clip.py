"""CLIP in open_clip's format: ``open_clip_config.json``.

An architecture that `CLIP` does not implement is refused, never approximated.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from maxlp.data import images
from maxlp.families.clip.hf import MEAN, OPENAI_MEAN, OPENAI_STD, RESIZE, STD, shared_value
from maxlp.families.clip.model import CLIPConfig, TextConfig
from maxlp.families.clip.vit import VisualConfig
from maxlp.families.weights import Section
from maxlp.schema import Count, CountOrZero, OneOf, Positive

CONFIG = "open_clip_config.json"
INTERPOLATION = Annotated[str, OneOf((*images.INTERPOLATIONS, "random"))]  # random in training alone

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
    file = Section(f"{CONFIG}: ", open_clip)
    c, vision, text = _read_towers(file)
    preprocess = file.section("preprocess_cfg", None)
    interpolation = preprocess.read("interpolation", INTERPOLATION, "bicubic")
    act = "quick_gelu" if c.read("quick_gelu", bool, False) else "gelu"
    if shared_value("act_kwargs", vision, text):
        act = "gelu_tanh"
    for key in ("norm_kwargs", "ls_init_value"):
        shared_value(key, vision, text)
    norm = vision.section("norm_kwargs", None)
    if set(norm.values) - {"eps"}:
        raise vision.refusal("norm_kwargs", "eps")
    width, text_width = vision.read("width", Count), text.read("width", Count)
    pool = text.read("pool_type", str)
    logit_scale = c.read("init_logit_scale", float, None)
    return dict(
        embed_dim=c.read("embed_dim", Count),
        visual=VisualConfig(
            image_size=vision.read("image_size", Count),
            patch_size=vision.read("patch_size", Count),
            width=width,
            num_layers=vision.read("layers", Count),
            num_heads=width // vision.read("head_width", Count),
            mlp_dim=int(width * vision.read("mlp_ratio", Positive)),
            pool="cls",
            pre_norm=not vision.read("no_ln_pre", bool),
            patch_bias=False,
            proj=True,
            patch_dropout=vision.read("patch_dropout", float),
        ),
        text=TextConfig(
            vocab_size=text.read("vocab_size", Count),
            max_len=text.read("context_length", Count),
            width=text_width,
            num_layers=text.read("layers", Count),
            num_heads=text.read("heads", Count),
            mlp_dim=int(text_width * text.read("mlp_ratio", Positive)),
            causal=not text.read("no_causal_mask", bool),
            pool=pool,
            eos_id=text.read("eos_id", CountOrZero) if pool == "eos" else None,
            proj_bias=False,
        ),
        act=act,
        norm_eps=norm.read("eps", Positive, 1e-5),
        layer_scale=vision.read("ls_init_value", float, None),
        qk_norm=False,
        init="clip",
        logit_scale=math.log(1 / 0.07) if logit_scale is None else logit_scale,
        logit_bias=c.read("init_logit_bias", float, None),
        image_mean=preprocess.read("mean", MEAN, OPENAI_MEAN),
        image_std=preprocess.read("std", STD, OPENAI_STD),
        image_resize=preprocess.read("resize_mode", RESIZE, "shortest"),
        image_interpolation="bicubic" if interpolation == "random" else interpolation,
    )


def _read_towers(open_clip: Section) -> tuple[Section, Section, Section]:
    """The model, its image tower and its text tower with their defaults, after a check of all keys."""
    c = open_clip.section("model_cfg")
    towers = ("embed_dim", "vision_cfg", "text_cfg")
    options = ("quick_gelu", "init_logit_scale", "init_logit_bias", "custom_text")
    for key, value in c.values.items():
        if value and key not in towers + options:
            raise ValueError(f"{c.place}{key}={value!r} is not supported")
    vision = _read_tower(c, "vision_cfg", _VISION_DEFAULTS)
    text = _read_tower(c, "text_cfg", _TEXT_DEFAULTS)
    for tower, key, supported in (
        (vision, "pool_type", ("tok",)),
        (text, "pool_type", ("argmax", "eos", "last")),
        (vision, "act_kwargs", (None, {}, {"approximate": "tanh"})),
    ):
        if tower.values.get(key) not in supported:
            raise tower.refusal(key, " or ".join(map(repr, supported)))
    return c, vision, text


def _read_tower(c: Section, name: str, defaults: dict[str, Any]) -> Section:
    tower = c.section(name)
    for key, value in tower.values.items():
        supported = key in defaults or key in _IGNORED or not value or _ONLY.get(key) == value
        if not supported:
            raise ValueError(f"{tower.place}{key}={value!r} is not supported")
    known = {key: value for key, value in tower.values.items() if key in defaults}
    return Section(tower.place, defaults | known)


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
                f"model.{name}={value!r} has no counterpart in open_clip's CLIP, which has {only!r}"
            )
    shared: dict[str, Any] = dict(ls_init_value=config.layer_scale, norm_kwargs=dict(eps=config.norm_eps))
    if config.act == "gelu_tanh":
        shared["act_kwargs"] = dict(approximate="tanh")
    text_cfg = dict(
        shared,
        context_length=text.max_len,
        vocab_size=text.vocab_size,
        width=text.width,
        heads=text.num_heads,
        layers=text.num_layers,
        mlp_ratio=_ratio(text.width, text.mlp_dim),
        no_causal_mask=not text.causal,
        pool_type=text.pool,
    )
    if text.pool == "eos":
        text_cfg["eos_id"] = text.eos_id
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
        text_cfg=text_cfg,
    )
    if config.logit_bias is not None:
        model_cfg["init_logit_bias"] = config.logit_bias
    preprocess = dict(
        mean=list(config.image_mean),
        std=list(config.image_std),
        interpolation=config.image_interpolation,
        resize_mode=config.image_resize,
    )
    return dict(model_cfg=model_cfg, preprocess_cfg=preprocess)


def _ratio(width: int, mlp_dim: int) -> float:
    """A number r for which int(width · r), computed in floating point, is ``mlp_dim``."""
    ratio = mlp_dim / width
    return ratio if int(width * ratio) == mlp_dim else math.nextafter(ratio, math.inf)
