"""Results of Hugging Face's and open_clip's CLIP; tools/make_clip_goldens.py makes the files."""

from typing import NamedTuple

import numpy as np

from maxlp.families.clip import hf, open_clip, weights
from maxlp.families.clip.model import CLIPConfig
from maxlp.families.weights import Layout
from tests.families.goldens import read_golden

LAYOUTS = {
    "clip_hf_quick_gelu": weights.HF_CLIP,
    "clip_hf_gelu": weights.HF_CLIP,
    "clip_hf_siglip": weights.HF_SIGLIP,
    "clip_open_clip": weights.OPEN_CLIP,
    "clip_open_clip_quick_gelu": weights.OPEN_CLIP,
}
NAMES = tuple(LAYOUTS)
RUN = dict(dtype="float32", param_dtype="float32", attention="xla", scan_layers=True, remat="none")


class Golden(NamedTuple):
    """A golden: its config, the weights and some gradients by name, and other arrays."""

    config: CLIPConfig
    layout: Layout
    weights: dict[str, np.ndarray]
    grads: dict[str, np.ndarray]
    arrays: dict[str, np.ndarray]


def load(name: str) -> Golden:
    config, groups = read_golden(name)
    read = open_clip.config_from_open_clip if "model_cfg" in config else hf.config_from_hf
    config = CLIPConfig(**read(config), **RUN)
    return Golden(config, LAYOUTS[name], groups["weights"], groups["grads"], groups[""])
