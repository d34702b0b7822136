"""Results of Hugging Face's and open_clip's CLIP; tools/make_clip_goldens.py makes the files."""

import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from maxlp.families.clip import hf, open_clip, weights
from maxlp.families.clip.model import CLIPConfig
from maxlp.families.weights import Layout

DIRECTORY = pathlib.Path(__file__).parents[2] / "goldens"
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
    with np.load(DIRECTORY / f"{name}.npz") as file:
        flat: dict[str, Any] = dict(file)
    json_config = json.loads(str(flat.pop("config")))
    read = open_clip.config_from_open_clip if "model_cfg" in json_config else hf.config_from_hf
    groups: dict[str, dict[str, np.ndarray]] = {"weights": {}, "grads": {}, "": {}}
    for key, value in flat.items():
        group, _, tensor = key.rpartition("/") if key.startswith(("weights/", "grads/")) else ("", "", key)
        groups[group][tensor] = value.astype(np.float32) if group else value
    config = CLIPConfig(**read(json_config), **RUN)
    return Golden(config, LAYOUTS[name], groups["weights"], groups["grads"], groups[""])
