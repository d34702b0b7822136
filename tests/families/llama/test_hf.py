import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.core.train_state import abstract_model
from maxlp.data.tokenizers import make_tokenizer
from maxlp.families import weights
from maxlp.families.llama import hf
from maxlp.families.llama.export import config_files
from maxlp.families.llama.model import Llama, LlamaConfig, RopeScaling
from maxlp.parallel import sharding
from tests.data.chats import CHATML, write_tokenizer
from tests.fixtures import llama_config

CONFIG = llama_config(
    vocab_size=40,
    embed_dim=16,
    num_layers=3,
    head_dim=8,
    mlp_dim=24,
    max_seq_len=256,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=32
    ),
    init_std=0.02,
)
TIED = dataclasses.replace(CONFIG, tie_embeddings=True)


def abstract_params(config: LlamaConfig) -> dict:
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    return abstract_model(lambda rngs: Llama(config, rngs=rngs), mesh)[1]["params"]


def make_params(config: LlamaConfig = CONFIG) -> dict:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), abstract_params(config))


def to_maxlp(tensors: dict, config: LlamaConfig = CONFIG) -> dict:
    return weights.to_maxlp(tensors, abstract_params(config), hf.LAYOUT)


def to_hf(params: dict) -> dict:
    return weights.to_other(params, hf.LAYOUT)


def assert_equal(a: dict, b: dict) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), a, b)


# --- tensors --------------------------------------------------------------------------------------------


def test_each_tensor_is_the_transposed_kernel_of_a_layer():
    params = make_params()
    tensors = to_hf(params)
    assert len(tensors) == 3 + 9 * CONFIG.num_layers
    up = params["layers"]["mlp"]["up_proj"]["kernel"]
    np.testing.assert_array_equal(tensors["model.layers.2.mlp.up_proj.weight"], up[2].T)
    np.testing.assert_array_equal(
        tensors["model.layers.1.input_layernorm.weight"], params["layers"]["attn_norm"]["scale"][1]
    )
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], params["tok_embed"]["embedding"])


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_params_survive_the_round_trip_to_the_bit(config):
    params = make_params(config)
    assert_equal(to_maxlp(to_hf(params), config), params)


def test_import_rounds_to_param_dtype():
    tensors = to_hf(make_params())
    params = to_maxlp(tensors, dataclasses.replace(CONFIG, param_dtype="bfloat16"))
    kernel = params["layers"]["mlp"]["up_proj"]["kernel"]
    expected = tensors["model.layers.0.mlp.up_proj.weight"].T.astype(jnp.bfloat16)
    np.testing.assert_array_equal(kernel[0], expected, strict=True)


def without(tensors: dict, name: str) -> dict:
    return {k: v for k, v in tensors.items() if k != name}


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: without(t, Q_PROJ), f"tensor '{Q_PROJ}' is missing"),
        (lambda t: without(t, "lm_head.weight"), "tensor 'lm_head.weight' is missing"),
        (lambda t: t | {"model.norm.bias": np.zeros(16)}, "tensor 'model.norm.bias' has no place"),
        (
            lambda t: t | {"model.layers.3.mlp.up_proj.weight": np.zeros((24, 16))},
            "tensor 'model.layers.3.mlp.up_proj.weight' has no place in the model",
        ),
        (
            lambda t: t | {Q_PROJ: t[Q_PROJ].T},
            rf"tensor '{Q_PROJ}' of shape \(16, 32\) does not fit layers/attn/q_proj/kernel",
        ),
        (
            lambda t: t | {"model.norm.weight": np.ones(1)},  # NumPy would broadcast it
            r"tensor 'model.norm.weight' of shape \(1,\) does not fit final_norm/scale of shape \(16,\)",
        ),
    ],
    ids=["missing", "missing head", "unknown", "unknown layer", "shape", "broadcast"],
)
def test_tensors_that_do_not_fit_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        to_maxlp(change(to_hf(make_params())))


def test_redundant_tensors_are_ignored():
    tensors = to_hf(make_params(TIED))
    expected = to_maxlp(tensors, TIED)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert_equal(to_maxlp(tensors, TIED), expected)
    tensors["lm_head.weight"][3, 5] += 1
    with pytest.raises(ValueError, match=r"'lm_head.weight' differs from .* \(tie_word_embeddings=false\)"):
        to_maxlp(tensors, TIED)


def test_params_of_another_model_are_refused():
    params = make_params()
    params["layers"]["attn"]["q_norm"] = dict(scale=np.ones((3, 8)))
    with pytest.raises(ValueError, match="parameter 'layers/attn/q_norm/scale' has no counterpart"):
        to_hf(params)


# --- config.json ----------------------------------------------------------------------------------------

LLAMA_3_1_8B = dict(
    architectures=["LlamaForCausalLM"],
    attention_bias=False,
    bos_token_id=128000,
    hidden_act="silu",
    hidden_size=4096,
    initializer_range=0.02,
    intermediate_size=14336,
    max_position_embeddings=131072,
    mlp_bias=False,
    model_type="llama",
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=8,
    rms_norm_eps=1e-05,
    rope_scaling=dict(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
        rope_type="llama3",
    ),
    rope_theta=500000.0,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    vocab_size=128256,
)


def test_config_of_llama_3_1_8b():
    assert hf.config_from_hf(LLAMA_3_1_8B) == dict(
        vocab_size=128256,
        embed_dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=14336,
        max_seq_len=131072,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192
        ),
        norm_eps=1e-5,
        qk_norm=False,
        logit_soft_cap=None,
        tie_embeddings=False,
        init_std=0.02,
    )


def test_config_with_rope_parameters_of_transformers_5():
    new = {k: v for k, v in LLAMA_3_1_8B.items() if not k.startswith("rope_")}
    new["rope_parameters"] = LLAMA_3_1_8B["rope_scaling"] | dict(rope_theta=500000.0)
    assert hf.config_from_hf(new) == hf.config_from_hf(LLAMA_3_1_8B)


def test_config_of_the_first_llama_2_files():
    """They have no rope_theta and no head_dim, and with MHA no num_key_value_heads."""
    lacking = ("rope_theta", "num_key_value_heads", "tie_word_embeddings")
    old = {k: v for k, v in LLAMA_3_1_8B.items() if k not in lacking}
    config = hf.config_from_hf(old | dict(rope_scaling=None))
    assert config["rope_theta"] == 10_000.0 and config["tie_embeddings"] is False
    assert config["rope_scaling"] is None
    assert config["num_kv_heads"] == 32


@pytest.mark.parametrize(
    "config",
    [CONFIG, dataclasses.replace(TIED, rope_scaling=None, norm_eps=1e-6)],
    ids=["scaled", "unscaled and tied"],
)
def test_config_survives_the_round_trip(config):
    exported = json.loads(json.dumps(hf.config_to_hf(config)))
    run_keys = {"dtype", "param_dtype", "attention", "scan_layers", "remat", "pipeline", "qk_clip"}
    assert hf.config_from_hf(exported) == {k: v for k, v in vars(config).items() if k not in run_keys}
    assert exported["torch_dtype"] == "float32"


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "rope_type='yarn' is not supported"),
        (dict(rope_scaling=dict(type="linear", factor=4.0)), "rope_scaling.type='linear' is not supported"),
        (dict(model_type="mistral"), "model_type='mistral' is not supported"),
        (dict(attention_bias=True), "attention_bias=True is not supported"),
        (dict(hidden_act="gelu"), "hidden_act='gelu' is not supported"),
    ],
)
def test_configs_of_other_architectures_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        hf.config_from_hf(LLAMA_3_1_8B | change)


def test_another_family_may_have_another_activation():
    """The only value of a key is that which the family supports, also where Llama has one of its own."""
    supported = dict(model_type="gemma", hidden_act="gelu_pytorch_tanh")
    assert hf.decoder_from_hf(LLAMA_3_1_8B | supported, supported)["embed_dim"] == 4096
    with pytest.raises(ValueError, match="hidden_act='silu' is not supported, only 'gelu_pytorch_tanh'"):
        hf.decoder_from_hf(LLAMA_3_1_8B | dict(model_type="gemma"), supported)


def test_capped_logits_are_refused():
    with pytest.raises(ValueError, match=r"model.logit_soft_cap=30.0 has no counterpart in transformers'"):
        hf.config_to_hf(dataclasses.replace(CONFIG, logit_soft_cap=30.0))


def test_config_without_a_size_is_refused():
    with pytest.raises(ValueError, match="hidden_size is missing"):
        hf.config_from_hf(without(LLAMA_3_1_8B, "hidden_size"))


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, ["<|end_of_text|>", "<|im_end|>"]),
        ("{% for m in messages %}{{ m.content + '<|end_of_text|>' }}{% endfor %}", "<|end_of_text|>"),
        ("{{ messages }}", "<|end_of_text|>"),  # not a usable one
        (None, "<|end_of_text|>"),
    ],
)
def test_an_exported_model_stops_at_the_end_of_a_turn_too(tmp_path, template, ends):
    tokenizer = make_tokenizer(write_tokenizer(tmp_path, template))
    found = config_files({}, lambda: tokenizer)["config.json"]["eos_token_id"]
    names = {i: name for name, i in tokenizer.specials.items()}
    assert ([names[i] for i in found] if isinstance(found, list) else names[found]) == ends
