"""CLIP configs of Hugging Face and of open_clip, in and out.

What an architecture of theirs has and `CLIP` has not is refused, never dropped.
"""

import math
from collections.abc import Mapping
from typing import Any

# --- configs of Hugging Face --------------------------------------------------------------------------

OPENAI_MEAN, OPENAI_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HF_ACTS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu"}
HF_DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {  # newer files hold only what differs from these
    "clip": {
        "vision_config": dict(
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
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
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_channels=3,
            image_size=224,
            patch_size=16,
            hidden_act="gelu_pytorch_tanh",
            layer_norm_eps=1e-6,
            vision_use_head=True,
        ),
        "text_config": dict(
            vocab_size=32000,
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            max_position_embeddings=64,
            hidden_act="gelu_pytorch_tanh",
            layer_norm_eps=1e-6,
            projection_size=None,
        ),
    },
}
_HF_SIZES = dict(
    width="hidden_size",
    num_layers="num_hidden_layers",
    num_heads="num_attention_heads",
    mlp_dim="intermediate_size",
)


def config_from_hf(hf: Mapping[str, Any], preprocessor: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The arguments of `CLIP` that ``config.json`` and ``preprocessor_config.json`` tell: all but how to
    run it (``dtype``, ``param_dtype``, ``attention``, ``scan_layers`` and ``remat`` are the caller's).

    Raises:
      ValueError: an architecture that `CLIP` is not.
    """
    kind = hf.get("model_type")
    if kind not in HF_DEFAULTS:
        raise ValueError(f"config.json: model_type={kind!r} is not supported, only clip and siglip")
    vision, text = (
        defaults | (hf.get(key) or {}) | (hf.get(f"{key}_dict") or {})
        for key, defaults in HF_DEFAULTS[kind].items()
    )
    of_clip = kind == "clip"
    for key, value in dict(num_channels=3, **({} if of_clip else {"vision_use_head": True})).items():
        if vision[key] != value:
            raise ValueError(
                f"config.json: vision_config.{key}={vision[key]!r} is not supported, only {value}"
            )
    act = _same("config.json", "hidden_act", vision_config=vision, text_config=text)
    if act not in HF_ACTS.values():
        raise ValueError(f"config.json: hidden_act={act!r} is not supported; {', '.join(HF_ACTS.values())}")
    # Files from before 2023 say 2 and mean the highest id; see transformers' CLIPTextModel.
    eos_id = text["eos_token_id"] if of_clip and text["eos_token_id"] != 2 else None
    text_pool = "last" if not of_clip else "argmax" if eos_id is None else "eos"
    statistics = preprocessor or {}
    return dict(
        embed_dim=hf.get("projection_dim", 512) if of_clip else vision["hidden_size"],
        visual=dict(
            {ours: vision[theirs] for ours, theirs in _HF_SIZES.items()},
            image_size=vision["image_size"],
            patch_size=vision["patch_size"],
            pool="cls" if of_clip else "map",
            pre_norm=of_clip,
            patch_bias=not of_clip,
            proj=of_clip,
            patch_dropout=0.0,
        ),
        text=dict(
            {ours: text[theirs] for ours, theirs in _HF_SIZES.items()},
            vocab_size=text["vocab_size"],
            max_len=text["max_position_embeddings"],
            causal=of_clip,
            pool=text_pool,
            eos_id=eos_id,
            proj_bias=not of_clip,
        ),
        act=next(ours for ours, theirs in HF_ACTS.items() if theirs == act),
        norm_eps=_same("config.json", "layer_norm_eps", vision_config=vision, text_config=text),
        layer_scale=None,
        qk_norm=False,
        init=kind,
        logit_scale=float(hf.get("logit_scale_init_value", 2.6592)) if of_clip else math.log(10),
        logit_bias=None if of_clip else -10.0,
        image_mean=tuple(statistics.get("image_mean", OPENAI_MEAN if of_clip else (0.5,) * 3)),
        image_std=tuple(statistics.get("image_std", OPENAI_STD if of_clip else (0.5,) * 3)),
    )


def config_to_hf(config: Mapping[str, Any], dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """``config.json`` and ``preprocessor_config.json`` for the arguments of `CLIP`.

    Raises:
      ValueError: what Hugging Face's CLIP and SigLIP cannot be.
    """
    visual, text = config["visual"], config["text"]
    of_clip = hf_layout(config) == "hf_clip"
    shared = dict(hidden_act=HF_ACTS[config["act"]], layer_norm_eps=config["norm_eps"])
    vision_config = shared | {theirs: visual[ours] for ours, theirs in _HF_SIZES.items()}
    vision_config |= dict(image_size=visual["image_size"], patch_size=visual["patch_size"], num_channels=3)
    text_config = shared | {theirs: text[ours] for ours, theirs in _HF_SIZES.items()}
    text_config |= dict(vocab_size=text["vocab_size"], max_position_embeddings=text["max_len"])
    if of_clip:
        text_config |= dict(eos_token_id=2 if text["pool"] == "argmax" else text["eos_id"])
        for tower in (vision_config, text_config):
            tower["projection_dim"] = config["embed_dim"]
    else:
        text_config["projection_size"] = config["embed_dim"]
    kind = "CLIP" if of_clip else "Siglip"
    size = visual["image_size"]
    exact = dict(height=size, width=size)
    config_json = dict(
        architectures=[f"{kind}Model"],
        model_type=kind.lower(),
        vision_config=dict(vision_config, model_type=f"{kind.lower()}_vision_model"),
        text_config=dict(text_config, model_type=f"{kind.lower()}_text_model"),
        torch_dtype=dtype,
    )
    if of_clip:
        config_json |= dict(
            projection_dim=config["embed_dim"], logit_scale_init_value=config["logit_scale"]
        )
    return config_json, dict(
        image_processor_type=f"{kind}ImageProcessor",
        do_resize=True,
        size=dict(shortest_edge=size) if of_clip else exact,
        resample=3,  # bicubic
        **(dict(do_center_crop=True, crop_size=exact, do_convert_rgb=True) if of_clip else {}),
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=list(config["image_mean"]),
        image_std=list(config["image_std"]),
    )


def hf_layout(config: Mapping[str, Any]) -> str:
    """Which of Hugging Face's models this is: a key of `LAYOUTS`.

    Raises:
      ValueError: none of them, with what makes it so.
    """
    visual, text = config["visual"], config["text"]
    layout = "hf_clip" if visual["pool"] == "cls" else "hf_siglip"
    of_clip = layout == "hf_clip"
    for name, value, allowed in (
        ("layer_scale", config["layer_scale"], (None,)),
        ("qk_norm", config["qk_norm"], (False,)),
        ("visual.pool", visual["pool"], ("cls", "map")),
        ("visual.pre_norm", visual["pre_norm"], (of_clip,)),
        ("visual.patch_bias", visual["patch_bias"], (not of_clip,)),
        ("visual.proj", visual["proj"], (of_clip,)),
        ("text.causal", text["causal"], (of_clip,)),
        ("text.pool", text["pool"], ("argmax", "eos") if of_clip else ("last",)),
        ("text.proj_bias", text["proj_bias"], (not of_clip,)),
        ("logit_bias", config["logit_bias"] is not None, (not of_clip,)),
    ):
        if value not in allowed:
            raise ValueError(
                f"model.{name}={value!r} has no counterpart in Hugging Face's "
                f"{'CLIP' if of_clip else 'SigLIP'}, which has {' or '.join(map(repr, allowed))}; "
                "open_clip's weights may have one"
            )
    return layout


def _same(file: str, key: str, **towers: Mapping[str, Any]) -> Any:
    """What both towers say."""
    (a_name, a), (b_name, b) = towers.items()
    if a[key] != b[key]:
        raise ValueError(
            f"{file}: {a_name}.{key}={a[key]!r} and {b_name}.{key}={b[key]!r} differ; "
            "here both towers share it"
        )
    return a[key]


# --- configs of open_clip -----------------------------------------------------------------------------

_OPEN_CLIP_VISION = dict(
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
_OPEN_CLIP_TEXT = dict(
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
_OPEN_CLIP_NO_MATTER = {  # keys that say nothing of the model, or only how a refused one would be
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
_OPEN_CLIP_ONLY = dict(pos_embed_type="learnable", proj_type="linear", block_type="default")


def config_from_open_clip(open_clip: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `CLIP` that an ``open_clip_config.json`` tells: all but how to run it.

    Raises:
      ValueError: an architecture that `CLIP` is not.
    """
    file = "open_clip_config.json"
    if "model_cfg" not in open_clip:
        raise ValueError(f"{file}: 'model_cfg' is missing")
    c, preprocess = open_clip["model_cfg"], open_clip.get("preprocess_cfg") or {}
    needed = ("embed_dim", "vision_cfg", "text_cfg")
    for key in set(c) - {*needed, "quick_gelu", "init_logit_scale", "init_logit_bias", "custom_text"}:
        if c[key]:
            raise ValueError(f"{file}: model_cfg.{key}={c[key]!r} is not supported")
    for key in needed:
        if key not in c:
            raise ValueError(f"{file}: model_cfg.{key} is missing")
    vision = _open_clip_tower(file, "vision_cfg", c["vision_cfg"], _OPEN_CLIP_VISION)
    text = _open_clip_tower(file, "text_cfg", c["text_cfg"], _OPEN_CLIP_TEXT)
    towers = dict(vision_cfg=vision, text_cfg=text)
    for name, tower, key, known in (
        ("vision_cfg", vision, "pool_type", ("tok",)),
        ("text_cfg", text, "pool_type", ("argmax", "eos", "last")),
        ("vision_cfg", vision, "act_kwargs", (None, {}, {"approximate": "tanh"})),
    ):
        if tower[key] not in known:
            raise ValueError(f"{file}: {name}.{key}={tower[key]!r} is not supported")
    act = "quick_gelu" if c.get("quick_gelu") else "gelu"
    if _same(file, "act_kwargs", **towers):
        act = "gelu_tanh"
    norm = _same(file, "norm_kwargs", **towers) or {}
    if set(norm) - {"eps"}:
        raise ValueError(f"{file}: norm_kwargs={norm!r} is not supported")
    bias = c.get("init_logit_bias")
    return dict(
        embed_dim=c["embed_dim"],
        visual=dict(
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
        text=dict(
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
        layer_scale=_same(file, "ls_init_value", **towers),
        qk_norm=False,
        init="clip",
        logit_scale=float(c.get("init_logit_scale") or math.log(1 / 0.07)),
        logit_bias=None if bias is None else float(bias),
        image_mean=tuple(preprocess.get("mean", OPENAI_MEAN)),
        image_std=tuple(preprocess.get("std", OPENAI_STD)),
    )


def _open_clip_tower(
    file: str, name: str, given: Mapping[str, Any], known: dict[str, Any]
) -> dict[str, Any]:
    for key, value in given.items():
        ok = key in known or key in _OPEN_CLIP_NO_MATTER or not value or _OPEN_CLIP_ONLY.get(key) == value
        if not ok:
            raise ValueError(f"{file}: {name}.{key}={value!r} is not supported")
    return known | {key: value for key, value in given.items() if key in known}


def config_to_open_clip(config: Mapping[str, Any]) -> dict[str, Any]:
    """An ``open_clip_config.json`` for the arguments of `CLIP`.

    Raises:
      ValueError: what open_clip's CLIP cannot be.
    """
    visual, text = config["visual"], config["text"]
    for name, value, only in (
        ("qk_norm", config["qk_norm"], False),
        ("visual.pool", visual["pool"], "cls"),
        ("visual.patch_bias", visual["patch_bias"], False),
        ("visual.proj", visual["proj"], True),
        ("text.proj_bias", text["proj_bias"], False),
    ):
        if value != only:
            raise ValueError(
                f"model.{name}={value!r} has no counterpart in open_clip's CLIP, only {only!r}"
            )
    shared = dict(ls_init_value=config["layer_scale"], norm_kwargs=dict(eps=config["norm_eps"]))
    if config["act"] == "gelu_tanh":
        shared["act_kwargs"] = dict(approximate="tanh")
    model_cfg = dict(
        embed_dim=config["embed_dim"],
        quick_gelu=config["act"] == "quick_gelu",
        init_logit_scale=config["logit_scale"],
        vision_cfg=dict(
            shared,
            image_size=visual["image_size"],
            patch_size=visual["patch_size"],
            width=visual["width"],
            layers=visual["num_layers"],
            head_width=visual["width"] // visual["num_heads"],
            mlp_ratio=_ratio(visual["width"], visual["mlp_dim"]),
            patch_dropout=visual["patch_dropout"],
            no_ln_pre=not visual["pre_norm"],
        ),
        text_cfg=dict(
            shared,
            context_length=text["max_len"],
            vocab_size=text["vocab_size"],
            width=text["width"],
            heads=text["num_heads"],
            layers=text["num_layers"],
            mlp_ratio=_ratio(text["width"], text["mlp_dim"]),
            no_causal_mask=not text["causal"],
            pool_type=text["pool"],
            **(dict(eos_id=text["eos_id"]) if text["pool"] == "eos" else {}),
        ),
    )
    if config["logit_bias"] is not None:
        model_cfg["init_logit_bias"] = config["logit_bias"]
    statistics = dict(mean=list(config["image_mean"]), std=list(config["image_std"]))
    return dict(model_cfg=model_cfg, preprocess_cfg=statistics)


def _ratio(width: int, mlp_dim: int) -> float:
    """A number r for which int(width · r) is ``mlp_dim``, in floating point too."""
    ratio = mlp_dim / width
    return ratio if int(width * ratio) == mlp_dim else math.nextafter(ratio, math.inf)
