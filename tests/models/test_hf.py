import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.families.llama import hf
from maxlp.families.llama import model as llama

CONFIG = dict(
    vocab_size=40,
    embed_dim=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=24,
    max_seq_len=256,
    rope_theta=500_000.0,
    rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=32),
    norm_eps=1e-5,
    tie_embeddings=False,
    init_std=0.02,
    dtype="float32",
    param_dtype="float32",
    attention="xla",
    scan_layers=True,
    remat="none",
)
RUN_KEYS = {"dtype", "param_dtype", "attention", "scan_layers", "remat"}
ARCHITECTURE = {k: v for k, v in CONFIG.items() if k not in RUN_KEYS}


def make_params(**changes) -> dict:
    """Random parameters of the model with these changes to CONFIG."""

    def init() -> dict:
        model = llama.Llama(**CONFIG | changes, rngs=nnx.Rngs(0))
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    rng = np.random.default_rng(0)
    random = lambda leaf: rng.standard_normal(leaf.shape, np.float32)  # noqa: E731
    return jax.tree.map(random, jax.eval_shape(init))


def assert_equal(a: dict, b: dict) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), a, b)


# --- tensors ------------------------------------------------------------------------------------------


def test_each_tensor_is_the_layers_kernel_transposed():
    params = make_params()
    tensors = hf.to_hf(params)
    assert len(tensors) == 3 + 9 * CONFIG["num_layers"]
    up = params["layers"]["mlp"]["up_proj"]["kernel"]
    np.testing.assert_array_equal(tensors["model.layers.2.mlp.up_proj.weight"], up[2].T)
    np.testing.assert_array_equal(
        tensors["model.layers.1.input_layernorm.weight"], params["layers"]["attn_norm"]["scale"][1]
    )
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], params["tok_embed"]["embedding"])


@pytest.mark.parametrize("tied", [False, True])
def test_params_survive_the_round_trip_bit_for_bit(tied):
    params = make_params(tie_embeddings=tied)
    back = hf.to_maxlp(hf.to_hf(params), CONFIG | dict(tie_embeddings=tied))
    assert_equal(back, params)


def test_import_rounds_to_param_dtype():
    tensors = hf.to_hf(make_params())
    params = hf.to_maxlp(tensors, CONFIG | dict(param_dtype="bfloat16"))
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
            "tensor 'model.layers.3.mlp.up_proj.weight' has no place in a Llama with 3 layers",
        ),
        (
            lambda t: t | {Q_PROJ: t[Q_PROJ].T},
            rf"tensor '{Q_PROJ}' has shape \(16, 32\), the config wants \(32, 16\)",
        ),
        (  # a shape that NumPy would broadcast
            lambda t: t | {"model.norm.weight": np.ones(1)},
            r"tensor 'model.norm.weight' has shape \(1,\), the config wants \(16,\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        hf.to_maxlp(change(hf.to_hf(make_params())), CONFIG)


def test_copies_of_what_is_known_are_ignored():
    tensors = hf.to_hf(make_params(tie_embeddings=True))
    tied = CONFIG | dict(tie_embeddings=True)
    expected = hf.to_maxlp(tensors, tied)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert_equal(hf.to_maxlp(tensors, tied), expected)
    tensors["lm_head.weight"][3, 5] += 1
    with pytest.raises(ValueError, match=r"lm_head.weight.*tie_embeddings=True"):
        hf.to_maxlp(tensors, tied)


def test_params_of_another_model_are_refused():
    params = make_params()
    params["layers"]["attn"]["q_norm"] = dict(scale=np.ones((3, 8)))
    with pytest.raises(ValueError, match="parameter 'layers/attn/q_norm/scale' is not one of a Llama"):
        hf.to_hf(params)
    del params["layers"]["attn"]
    with pytest.raises(ValueError, match="parameter 'layers/attn/k_proj/kernel' is missing"):
        hf.to_hf(params)


# --- config.json --------------------------------------------------------------------------------------

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
        rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192),
        norm_eps=1e-5,
        tie_embeddings=False,
        init_std=0.02,
    )


def test_config_with_rope_parameters_of_transformers_5():
    new = {k: v for k, v in LLAMA_3_1_8B.items() if not k.startswith("rope_")}
    new["rope_parameters"] = LLAMA_3_1_8B["rope_scaling"] | dict(rope_theta=500000.0)
    assert hf.config_from_hf(new) == hf.config_from_hf(LLAMA_3_1_8B)


def test_config_of_the_first_llama_2_files():
    """They have no rope_theta, no head_dim, and MHA may go without num_key_value_heads."""
    old = {k: v for k, v in LLAMA_3_1_8B.items() if k not in ("rope_theta", "num_key_value_heads")}
    config = hf.config_from_hf(old | dict(rope_scaling=None))
    assert config["rope_theta"] == 10_000.0
    assert config["rope_scaling"] is None
    assert config["num_kv_heads"] == 32


def test_config_survives_the_round_trip():
    exported = json.loads(json.dumps(hf.config_to_hf(CONFIG, "bfloat16")))
    assert hf.config_from_hf(exported) == ARCHITECTURE
    plain = CONFIG | dict(rope_scaling=None, tie_embeddings=True)
    assert hf.config_from_hf(hf.config_to_hf(plain, "float32")) == ARCHITECTURE | dict(
        rope_scaling=None, tie_embeddings=True
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "rope_type='yarn' is not supported"),
        (dict(rope_scaling=dict(type="linear", factor=4.0)), "rope_type='linear' is not supported"),
        (dict(model_type="mistral"), "model_type='mistral' is not supported"),
        (dict(attention_bias=True), "attention_bias=True is not supported"),
        (dict(hidden_act="gelu"), "hidden_act='gelu' is not supported"),
    ],
)
def test_configs_of_other_architectures_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        hf.config_from_hf(LLAMA_3_1_8B | change)


def test_config_without_a_size_is_refused():
    with pytest.raises(ValueError, match="'hidden_size' is missing"):
        hf.config_from_hf(without(LLAMA_3_1_8B, "hidden_size"))


# --- files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes, num_files", [(10**9, 1), (6000, 7)])
def test_files_give_back_the_tensors(tmp_path, dtype, max_shard_bytes, num_files):
    """Transposed views included: safetensors writes memory as it lies."""
    tensors = hf.to_hf(make_params())
    hf.write_tensors(tmp_path, tensors, dtype=dtype, max_shard_bytes=max_shard_bytes)
    back = hf.Tensors(tmp_path)
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor.astype(jnp.dtype(dtype)), strict=True)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (num_files > 1)
    if num_files > 1:
        index = json.loads((tmp_path / hf.INDEX).read_text())
        itemsize = jnp.dtype(dtype).itemsize
        assert index["metadata"]["total_size"] == itemsize * sum(t.size for t in tensors.values())
        assert set(index["weight_map"].values()) == {f.name for f in files}
        largest = itemsize * max(t.size for t in tensors.values())
        overhead = 8192  # the header
        assert all(f.stat().st_size <= max(max_shard_bytes, largest) + overhead for f in files)


def test_damaged_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"neither model.safetensors nor model.safetensors.index"):
        hf.Tensors(tmp_path)
    hf.write_tensors(tmp_path, hf.to_hf(make_params()), dtype="float32", max_shard_bytes=6000)
    damaged = tmp_path / hf.Tensors(tmp_path).file_of["model.norm.weight"]
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=damaged.name):
        hf.to_maxlp(hf.Tensors(tmp_path), CONFIG)
    damaged.unlink()
    with pytest.raises(ValueError, match=damaged.name):
        hf.to_maxlp(hf.Tensors(tmp_path), CONFIG)


def test_one_copy_of_the_model_is_enough(tmp_path):
    big = dict(num_layers=8, embed_dim=128, mlp_dim=512)
    params = make_params(**big)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    def peak(f) -> int:
        """Bytes that were allocated at once while f ran."""
        tracemalloc.start()
        f()
        try:
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def export():
        hf.write_tensors(tmp_path, hf.to_hf(params), dtype="float32", max_shard_bytes=2**20)

    assert peak(export) < size / 4
    assert peak(lambda: hf.to_maxlp(hf.Tensors(tmp_path), CONFIG | big)) < 1.25 * size
