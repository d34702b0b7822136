"""A tiny random Llama as a folder that Hugging Face's libraries read, with its tokenizer."""

import json
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from maxlp.data.tokenizers.training import train_bpe
from maxlp.families import weights
from maxlp.families.llama import hf
from maxlp.families.llama.model import Llama
from maxlp.runtime.safetensors import write_tensors
from tests.fixtures import llama_config

TEXTS = ["to be or not to be, that is the question"] * 10
TOKENS = 270


def write_llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes the folder, and returns it. The model has the sizes of `fixtures.LLAMA` with these changes.

    Args:
      seed: of the weights.
    """
    config = llama_config(**dict(vocab_size=TOKENS, tie_embeddings=True) | changes)
    params = jax.device_get(nnx.to_pure_dict(nnx.state(Llama(config, rngs=nnx.Rngs(seed)), nnx.Param)))
    write_tensors(folder, weights.to_other(params, hf.LAYOUT), dtype=config.param_dtype)
    (folder / "config.json").write_text(json.dumps(hf.config_to_hf(config)))
    (folder / "tokenizer.json").write_bytes(train_bpe(TEXTS, TOKENS).files["tokenizer.json"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder
