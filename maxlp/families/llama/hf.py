"""Llama in Hugging Face's format: the names of its tensors and its ``config.json``.

Both sides rotate the pairs (i, i + H/2) in the rotary embedding, so no weight is permuted.
"""

from collections.abc import Mapping
from typing import Any

from maxlp.families.llama.model import LlamaConfig, RopeScaling
from maxlp.families.weights import Layout

LAYOUT = Layout(
    modules={
        "tok_embed": "model.embed_tokens",
        "layers/attn_norm": "model.layers.{}.input_layernorm",
        "layers/attn/q_proj": "model.layers.{}.self_attn.q_proj",
        "layers/attn/k_proj": "model.layers.{}.self_attn.k_proj",
        "layers/attn/v_proj": "model.layers.{}.self_attn.v_proj",
        "layers/attn/o_proj": "model.layers.{}.self_attn.o_proj",
        "layers/mlp_norm": "model.layers.{}.post_attention_layernorm",
        "layers/mlp/gate_proj": "model.layers.{}.mlp.gate_proj",
        "layers/mlp/up_proj": "model.layers.{}.mlp.up_proj",
        "layers/mlp/down_proj": "model.layers.{}.mlp.down_proj",
        "final_norm": "model.norm",
        "lm_head": "lm_head",  # absent if the embeddings are tied
    },
    leaves={},
    ignored=("*.rotary_emb.inv_freq",),
    copies={"lm_head.weight": "model.embed_tokens.weight"},  # some files of tied models have it
)


def config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `LlamaConfig` that a Hugging Face ``config.json`` determines.

    (``dtype``, ``param_dtype``, ``attention``, ``scan_layers`` and ``remat`` are the caller's choice.)

    Raises:
      ValueError: an architecture that `Llama` does not implement.
    """
    supported = dict(model_type="llama", hidden_act="silu", attention_bias=False, mlp_bias=False)
    for key, value in supported.items():
        if hf.get(key, value) != value:
            raise ValueError(f"config.json: {key}={hf[key]!r} is not supported, only {value!r}")
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    for key in (*sizes, "intermediate_size", "max_position_embeddings", "rms_norm_eps"):
        if key not in hf:
            raise ValueError(f"config.json: {key!r} is missing")
    num_heads = hf["num_attention_heads"]
    # Files written since transformers 5 hold rope_theta and the scaling in one dict.
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    return dict(
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=hf.get("num_key_value_heads") or num_heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // num_heads,
        mlp_dim=hf["intermediate_size"],
        max_seq_len=hf["max_position_embeddings"],
        rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10_000.0),
        rope_scaling=_rope_scaling(rope),
        norm_eps=hf["rms_norm_eps"],
        tie_embeddings=hf.get("tie_word_embeddings", False),
        init_std=hf.get("initializer_range", 0.02),
    )


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type == "default":
        return None
    if rope_type != "llama3":
        raise ValueError(f"config.json: rope_type={rope_type!r} is not supported, only 'llama3'")
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_seq_len=rope["original_max_position_embeddings"],
    )


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """A Hugging Face ``config.json`` for tensors in the config's ``param_dtype``.

    The ids of the tokens that begin and end a text are null: they belong to the tokenizer.
    """
    scaling = config.rope_scaling
    return dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_act="silu",
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.mlp_dim,
        max_position_embeddings=config.max_seq_len,
        rope_theta=config.rope_theta,
        rope_scaling=scaling
        and dict(
            rope_type="llama3",
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_max_seq_len,
        ),
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        initializer_range=config.init_std or 0.02,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=None,
        eos_token_id=None,
        torch_dtype=config.param_dtype,
    )
