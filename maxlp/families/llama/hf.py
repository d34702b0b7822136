"""Llama in Hugging Face's format: the names of its tensors and its ``config.json``.

`decoder_from_hf` and `decoder_to_hf` are for families that differ from Llama in a few keys.

Both sides rotate the pairs (i, i + H/2) in the rotary embedding, so no weight is permuted.
"""

from collections.abc import Mapping
from typing import Any

from maxlp.families.llama.model import LlamaConfig, RopeScaling
from maxlp.families.weights import Layout, Section
from maxlp.nn.layers import DTYPES
from maxlp.schema import Count, Positive

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


_SIZES = dict(
    embed_dim="hidden_size",
    num_heads="num_attention_heads",
    vocab_size="vocab_size",
    num_layers="num_hidden_layers",
    mlp_dim="intermediate_size",
    max_seq_len="max_position_embeddings",
)


def config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `LlamaConfig` that a Hugging Face ``config.json`` determines.

    (``dtype``, ``param_dtype``, ``attention``, ``scan_layers`` and ``remat`` are the caller's choice.)

    Raises:
      ValueError: an architecture that `Llama` does not implement, a missing key or an invalid value.
    """
    supported = dict(model_type="llama", attention_bias=False, mlp_bias=False)
    return decoder_from_hf(hf, supported) | dict(qk_norm=False)


def decoder_from_hf(hf: Mapping[str, Any], supported: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `LlamaConfig` that follow from keys which many kinds of models share.

    Args:
      supported: keys, and the only value that each may have if it is there; hidden_act="silu" unless named.

    Raises:
      ValueError: another value, a missing key or an invalid value.
    """
    c = Section("config.json: ", hf)
    for key, value in {"hidden_act": "silu", **supported}.items():
        if c.values.get(key, value) != value:
            raise c.refusal(key, repr(value))
    sizes, rope = {key: c.read(hf_key, Count) for key, hf_key in _SIZES.items()}, _rope(c)
    return sizes | dict(
        logit_soft_cap=None,
        num_kv_heads=c.read("num_key_value_heads", Count, None) or sizes["num_heads"],
        head_dim=c.read("head_dim", Count, None) or sizes["embed_dim"] // sizes["num_heads"],
        rope_theta=float(rope.read("rope_theta", Positive, 10_000.0)),
        rope_scaling=_rope_scaling(rope),
        norm_eps=c.read("rms_norm_eps", Positive),
        tie_embeddings=c.read("tie_word_embeddings", bool, False),
        init_std=c.read("initializer_range", Positive, 0.02),
    )


def dtype_from_hf(hf: Mapping[str, Any]) -> str:
    """The dtype of the weights according to ``config.json``.

    Raises:
      ValueError: a dtype that models do not have.
    """
    key = "dtype" if hf.get("dtype") else "torch_dtype"
    if (dtype := hf.get(key) or "float32") not in DTYPES:
        raise Section("config.json: ", hf).refusal(key, ", ".join(DTYPES))
    return dtype


def _rope(c: Section) -> Section:
    """The base and the scaling of the rotary wavelengths.

    Files written since transformers 5 have them in ``rope_parameters``, older ones have ``rope_theta`` and
    ``rope_scaling``; some have both.
    """
    old, new = c.section("rope_scaling", None), c.section("rope_parameters", None)
    theta = {} if c.values.get("rope_theta") is None else {"rope_theta": c.read("rope_theta", Positive)}
    before = theta | dict(old.values)
    if not new.values:
        return Section(old.place, before)
    for key, value in before.items():
        if new.values.get(key) != value:
            raise ValueError(
                f"{new.place}{key}={new.values.get(key)!r} differs from {key}={value!r} in "
                f"{'rope_scaling' if key in old.values else 'the top level'}; remove one of them"
            )
    return new


def _rope_scaling(rope: Section) -> RopeScaling | None:
    key = "rope_type" if rope.values.get("rope_type") else "type"
    if rope.values.get(key, "default") == "default":
        return None
    if rope.values.get(key) != "llama3":
        raise rope.refusal(key, "'llama3'")
    return RopeScaling(
        factor=rope.read("factor", Positive),
        low_freq_factor=rope.read("low_freq_factor", Positive),
        high_freq_factor=rope.read("high_freq_factor", Positive),
        original_max_seq_len=rope.read("original_max_position_embeddings", Count),
    )


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """A Hugging Face ``config.json`` for tensors in the config's ``param_dtype``.

    Raises:
      ValueError: a model that transformers' Llama does not implement.
    """
    if config.qk_norm:
        raise ValueError(
            "model.qk_norm=True has no counterpart in hf_llama; such a model is a Qwen3: train it with "
            "model.name=qwen3, and export it as hf_qwen3"
        )
    return decoder_to_hf(config) | dict(
        architectures=["LlamaForCausalLM"], model_type="llama", mlp_bias=False
    )


def decoder_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The keys of a ``config.json`` that many kinds of models share.

    The ids of the tokens that begin and end a text are null: they belong to the tokenizer.

    Raises:
      ValueError: logits that transformers does not cap.
    """
    if config.logit_soft_cap is not None:
        raise ValueError(
            f"model.logit_soft_cap={config.logit_soft_cap} has no counterpart in transformers' Llama and "
            "Qwen3; unset it in training"
        )
    scaling = config.rope_scaling
    return dict(
        **{hf_key: getattr(config, key) for key, hf_key in _SIZES.items()},
        hidden_act="silu",
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
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
        bos_token_id=None,
        eos_token_id=None,
        torch_dtype=config.param_dtype,
    )
