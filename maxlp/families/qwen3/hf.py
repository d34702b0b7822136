"""Qwen3 in Hugging Face's format: the names of its tensors and its ``config.json``."""

from collections.abc import Mapping
from typing import Any

from maxlp.families.llama import hf as llama
from maxlp.families.llama.model import LlamaConfig

LAYOUT = llama.LAYOUT._replace(
    modules={
        **llama.LAYOUT.modules,
        "layers/attn/q_norm": "model.layers.{}.self_attn.q_norm",
        "layers/attn/k_norm": "model.layers.{}.self_attn.k_norm",
    }
)
FIXED = dict(model_type="qwen3", attention_bias=False, use_sliding_window=False)
HEAD_DIM = 128  # of a config.json without the key


def config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `LlamaConfig` that a Hugging Face ``config.json`` determines.

    Raises:
      ValueError: an architecture that is not implemented, a missing key or an invalid value.
    """
    return llama.decoder_from_hf({"head_dim": HEAD_DIM, **hf}, FIXED) | dict(qk_norm=True)


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """A Hugging Face ``config.json`` for tensors in the config's ``param_dtype``."""
    return llama.decoder_to_hf(config) | FIXED | dict(architectures=["Qwen3ForCausalLM"])
