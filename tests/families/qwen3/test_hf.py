"""Qwen3's ``config.json``."""

import json

import pytest

from maxlp.families.llama import hf as llama_hf
from maxlp.families.qwen3 import hf
from tests.fixtures import llama_config

QWEN3_0_6B = dict(
    architectures=["Qwen3ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=151643,
    eos_token_id=151645,
    head_dim=128,
    hidden_act="silu",
    hidden_size=1024,
    initializer_range=0.02,
    intermediate_size=3072,
    max_position_embeddings=40960,
    max_window_layers=28,
    model_type="qwen3",
    num_attention_heads=16,
    num_hidden_layers=28,
    num_key_value_heads=8,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=None,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
    use_cache=True,
    use_sliding_window=False,
    vocab_size=151936,
)
CONFIG = llama_config(qk_norm=True, rope_theta=1e6, norm_eps=1e-6, tie_embeddings=True, init_std=0.02)


def test_config_of_qwen3_0_6b():
    assert hf.config_from_hf(QWEN3_0_6B) == dict(
        vocab_size=151936,
        embed_dim=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=3072,
        max_seq_len=40960,
        rope_theta=1e6,
        rope_scaling=None,
        norm_eps=1e-6,
        qk_norm=True,
        logit_soft_cap=None,
        tie_embeddings=True,
        init_std=0.02,
    )


def test_heads_have_128_dims_unless_the_file_gives_another_number():
    without = {key: value for key, value in QWEN3_0_6B.items() if key != "head_dim"}
    assert hf.config_from_hf(without) == hf.config_from_hf(QWEN3_0_6B)


def test_config_survives_the_round_trip():
    exported = json.loads(json.dumps(hf.config_to_hf(CONFIG)))
    run_keys = {"dtype", "param_dtype", "attention", "scan_layers", "remat", "pipeline", "qk_clip"}
    assert hf.config_from_hf(exported) == {k: v for k, v in vars(CONFIG).items() if k not in run_keys}


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(use_sliding_window=True), "config.json: use_sliding_window=True is not supported"),
        (dict(attention_bias=True), "config.json: attention_bias=True is not supported"),
        (
            dict(model_type="qwen3_moe"),
            "config.json: model_type='qwen3_moe' is not supported, only 'qwen3'",
        ),
        (dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "rope_type='yarn' is not supported"),
    ],
)
def test_other_architectures_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        hf.config_from_hf(QWEN3_0_6B | change)


def test_a_llama_with_norms_is_no_llama_elsewhere():
    with pytest.raises(ValueError, match=r"model.qk_norm=True has no counterpart in hf_llama.*hf_qwen3"):
        llama_hf.config_to_hf(CONFIG)
