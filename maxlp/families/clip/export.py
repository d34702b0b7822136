"""Weight formats of CLIP: Hugging Face's (CLIP and SigLIP) and open_clip's."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from absl import logging

from maxlp.data.tokenizers import Tokenizer
from maxlp.families import hf_tokenizer
from maxlp.families.clip import hf, open_clip, weights
from maxlp.families.clip.model import CLIPConfig
from maxlp.families.weights import Layout, Section, WeightFormat, read_config
from maxlp.nn.layers import DTYPES
from maxlp.runtime import safetensors

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"


def _read_hf(source: Path, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    return hf.config_from_hf(read_config(source / "config.json"), _preprocessor(source)), _dtype(tensors)


def _preprocessor(source: Path) -> Section:
    """The image processor's settings, from the file of transformers 5 if it has any, else the older one."""
    if (source / PROCESSOR).exists():
        processor = Section(f"{PROCESSOR}: ", read_config(source / PROCESSOR))
        if (found := processor.section("image_processor", None)).values:
            return found
    path = source / PREPROCESSOR
    return Section(f"{PREPROCESSOR}: ", read_config(path) if path.exists() else {})


def _read_open_clip(source: Path, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    return open_clip.config_from_open_clip(read_config(source / open_clip.CONFIG)), _dtype(tensors)


def _dtype(tensors: Mapping[str, Any]) -> str:
    """The dtype of the tensors, because config files do not always record it."""
    ignored = ("logit_scale", "logit_bias", "position_ids")
    name = next((name for name in tensors if not name.endswith(ignored)), None)
    dtype = "float32" if name is None else str(tensors[name].dtype)
    return dtype if dtype in DTYPES else "float32"  # float64


def _hf_config_files(config: CLIPConfig) -> dict[str, dict[str, Any]]:
    config_json, preprocessor = hf.config_to_hf(config)
    return {"config.json": config_json, PREPROCESSOR: preprocessor}


def _open_clip_config_files(config: CLIPConfig) -> dict[str, dict[str, Any]]:
    return {open_clip.CONFIG: open_clip.config_to_open_clip(config)}


CONFIG_FILES = {"hf_clip": _hf_config_files, "open_clip": _open_clip_config_files}


def _config_files(name: str, config: CLIPConfig) -> dict[str, dict[str, Any]]:
    """The config files of a format.

    Raises:
      ValueError: the format cannot hold this model; the message tells whether the other one can.
    """
    try:
        return CONFIG_FILES[name](config)
    except ValueError as error:
        (other,) = CONFIG_FILES.keys() - {name}
        raise ValueError(f"{error}; {_advice(other, config)}") from error


def _advice(other: str, config: CLIPConfig) -> str:
    try:
        CONFIG_FILES[other](config)
    except ValueError:
        return f"nor can --format={other} hold this model: to export one, train it with another value"
    return f"try --format={other}"


def _as_trained(config: CLIPConfig, data: Mapping[str, Any]) -> CLIPConfig:
    """The model to export: if padding changes the features of a text, its ``max_len`` is that of training.

    Other libraries pad texts to ``max_len``.
    """
    text, text_len = config.text, data.get("text_len", config.text.max_len)
    if text_len == text.max_len:
        return config
    if text.causal and text.pool != "last":  # shorter texts do not depend on the later positions
        what = "texts longer than data.text_len=%d were not trained; model.text.max_len=%d is exported"
        logging.warning(what, text_len, text.max_len)
        return config
    return dataclasses.replace(config, text=dataclasses.replace(text, max_len=text_len))


def _hf_layout(config: CLIPConfig) -> Layout:
    _config_files("hf_clip", config)  # refuses what the format cannot hold
    layout = {"clip": weights.HF_CLIP, "siglip": weights.HF_SIGLIP}[hf.kind_in_hf(config)]
    return weights.of_model(layout, config)


def _hf_files(
    config: CLIPConfig, make_tokenizer: Callable[[], Tokenizer | None]
) -> dict[str, dict[str, Any]]:
    files = _config_files("hf_clip", config)
    if (tokenizer := make_tokenizer()) is None:
        return files
    ids = dict(bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id)
    text = files["config.json"]["text_config"]
    for key, value in ids.items():
        text.setdefault(key, value)  # an eos_token_id of 2 stands for pooling at the highest id
    return files | hf_tokenizer.config_files(tokenizer, model_max_length=config.text.max_len)


def _open_clip_files(
    config: CLIPConfig, make_tokenizer: Callable[[], Tokenizer | None]
) -> dict[str, dict[str, Any]]:
    files = _config_files("open_clip", config)
    tokenizer = make_tokenizer()
    tokenizer_files = {} if tokenizer is None else hf_tokenizer.config_files(tokenizer)
    if not tokenizer_files:
        return files
    # With any name open_clip loads the tokenizer of the folder, without one its own.
    files[open_clip.CONFIG]["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = "tokenizer.json"
    return files | tokenizer_files


FORMATS = {
    "hf_clip": WeightFormat(
        config_file="config.json",
        model_types=tuple(hf.DEFAULTS),
        read_model=_read_hf,
        layout=_hf_layout,
        config_files=_hf_files,
        weights_file=safetensors.WEIGHTS,
        max_shard_bytes=safetensors.SHARD_BYTES,
        resize=weights.resize,
        as_trained=_as_trained,
    ),
    "open_clip": WeightFormat(
        config_file=open_clip.CONFIG,
        weights_file="open_clip_model.safetensors",
        max_shard_bytes=sys.maxsize,  # open_clip does not read shards
        read_model=_read_open_clip,
        layout=lambda config: weights.of_model(weights.OPEN_CLIP, config),
        config_files=_open_clip_files,
        resize=weights.resize,
        as_trained=_as_trained,
    ),
}
