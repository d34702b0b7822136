"""Tiny CLIPs and batches for them."""

import math
from typing import Any

import numpy as np
from flax import nnx

from maxlp import precision
from maxlp.families.clip.model import CLIP, CLIPConfig, TextConfig
from maxlp.families.clip.vit import VisualConfig

VISUAL = dict(
    image_size=16,
    patch_size=4,
    width=32,
    num_layers=2,
    num_heads=2,
    mlp_dim=64,
    pool="cls",
    pre_norm=True,
    patch_bias=False,
    proj=True,
    patch_dropout=0.5,
)
TEXT = dict(
    vocab_size=64,
    max_len=12,
    width=32,
    num_layers=2,
    num_heads=2,
    mlp_dim=64,
    causal=True,
    pool="argmax",
    eos_id=None,
    proj_bias=False,
)
TINY = dict(
    embed_dim=16,
    act="gelu",
    norm_eps=1e-5,
    layer_scale=None,
    qk_norm=False,
    init="clip",
    logit_scale=math.log(1 / 0.07),
    logit_bias=None,
    image_mean=(0.5, 0.4, 0.3),
    image_std=(0.2, 0.3, 0.4),
    dtype="float32",
    param_dtype="float32",
    attention="xla",
    scan_layers=True,
    remat="none",
)
SIGLIP = dict(
    embed_dim=32,
    act="gelu_tanh",
    norm_eps=1e-6,
    init="siglip",
    logit_bias=-10.0,
    visual=dict(pool="map", pre_norm=False, patch_bias=True, proj=False),
    text=dict(causal=False, pool="last", proj_bias=True),
)

# Rules of precision that use several recipes in each tower.
MIXED = (
    ("visual/layers/attn/*", "fp8_delayed"),
    ("visual/layers/mlp/up_proj", "mxfp8"),
    ("visual/layers/mlp/down_proj", "int8_switchback"),
    ("text/layers/attn/[qk]_proj", "mxfp8"),
    ("text/layers/attn/[vo]_proj", "int8_switchback"),
    ("text/layers/mlp/*", "fp8_delayed"),
)


def tiny_clip(visual: dict | None = None, text: dict | None = None, **changes: Any) -> CLIPConfig:
    """Two towers of two blocks, with half of the patches dropped in training.

    Args:
      visual, text: changes of the towers.
      changes: of all other fields.
    """
    towers = dict(visual=VisualConfig(**VISUAL | (visual or {})), text=TextConfig(**TEXT | (text or {})))
    return CLIPConfig(**TINY | towers | changes)


def make_clip(seed: int = 0, **changes: Any) -> CLIP:
    """The model of `tiny_clip`."""
    return CLIP(tiny_clip(**changes), rngs=nnx.Rngs(seed))


def make_mixed_clip(config: CLIPConfig, rngs: nnx.Rngs, rules: tuple) -> CLIP:
    """A model with a precision recipe for each (pattern, recipe) rule."""
    model = CLIP(config, rngs=rngs)
    recipes = tuple((pattern, precision.make_recipe(name)) for pattern, name in rules)
    precision.inject(model, precision.make_recipe("bf16"), rules=recipes)
    return model


def make_batch(rows: int = 8, seed: int = 0) -> dict[str, np.ndarray]:
    """Random images and texts for `tiny_clip`."""
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (rows, 16, 16, 3)).astype(np.uint8),
        "text": rng.integers(0, 64, (rows, 12)).astype(np.int32),
    }
