"""What the Llama's forward pass promises beyond its numbers, which are compared with Hugging Face's."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from maxlp.families.llama.model import Llama, LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=64,
    embed_dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=48,
    max_seq_len=64,
    rope_theta=10_000.0,
    rope_scaling=None,
    norm_eps=1e-5,
    tie_embeddings=True,
    init_std=0.3,
    dtype="float32",
    param_dtype="float32",
    attention="xla",
    scan_layers=True,
    remat="none",
)


@pytest.fixture(scope="module")
def model() -> Llama:
    return jax.jit(lambda: Llama(CONFIG, rngs=nnx.Rngs(0)))()


@jax.jit
def logits(model, *batch):
    return model(*batch)


def test_packed_documents_do_not_attend_to_each_other(model):
    """All documents in rows of 40 tokens, so that one program runs them all."""
    rng = np.random.default_rng(0)
    first, second = rng.integers(64, size=23), rng.integers(64, size=17)

    def row(*parts):
        return np.pad(np.concatenate(parts), (0, 40 - sum(map(len, parts))))[None]

    tokens, positions = row(first, second), row(np.arange(23), np.arange(17))
    segments = row(np.full(23, 1), np.full(17, 2))
    alone = [
        logits(model, row(x), row(np.arange(len(x))), row(np.ones(len(x), int))) for x in (first, second)
    ]
    packed = logits(model, tokens, positions, segments)
    np.testing.assert_allclose(packed[0, :23], alone[0][0, :23], atol=3e-5, rtol=0)
    np.testing.assert_allclose(packed[0, 23:], alone[1][0, :17], atol=3e-5, rtol=0)
    # Without segment ids they do.
    mixed = logits(model, tokens, positions, np.ones_like(segments))
    assert np.abs(mixed - packed)[0, 23:].max() > 0.1


def test_a_cache_changes_nothing_for_rows_of_different_lengths(model):
    """Prompts of 9 and 4 tokens at once (the short one padded), then five more of each, one by one."""
    rng = np.random.default_rng(0)
    rows, prompt, more = rng.integers(64, size=(2, 14)), np.array([9, 4]), 5
    expected = logits(model, rows)

    @jax.jit
    def step(model, tokens, positions, cache):
        x_BSD, cache = model.hidden(tokens, positions, cache=cache)
        return model.logits(x_BSD), cache

    tokens = np.where(np.arange(9) < prompt[:, None], rows[:, :9], 0)
    positions = np.broadcast_to(np.arange(9), (2, 9))
    found, cache = step(model, tokens, positions, model.init_cache(2, 14))
    for row in (0, 1):
        length = prompt[row]
        np.testing.assert_allclose(found[row, :length], expected[row, :length], atol=3e-5, rtol=0)
    for i in range(more):
        at = prompt + i
        found, cache = step(model, rows[[0, 1], at][:, None], at[:, None], cache)
        np.testing.assert_allclose(found[:, 0], expected[[0, 1], at], atol=3e-5, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_initial_values_have_the_documented_standard_deviations(tied):
    """Those of GPT-2: by the number of inputs, and less in front of the residual stream."""
    c = dataclasses.replace(
        CONFIG, init_std=None, tie_embeddings=tied, num_heads=8, mlp_dim=96, vocab_size=512
    )
    params = nnx.to_pure_dict(nnx.state(Llama(c, rngs=nnx.Rngs(0)), nnx.Param))
    layers, residual = params["layers"], (2 * c.num_layers) ** -0.5
    expected = {name: c.embed_dim**-0.5 for name in ("attn/q_proj", "attn/k_proj", "attn/v_proj")}
    expected |= {name: c.embed_dim**-0.5 for name in ("mlp/gate_proj", "mlp/up_proj")}
    expected |= {"attn/o_proj": c.q_dim**-0.5 * residual, "mlp/down_proj": c.mlp_dim**-0.5 * residual}
    found = {
        f"{part}/{name}": layers[part][name]["kernel"]
        for part, name in (key.split("/") for key in expected)
    }
    expected["tok_embed"], found["tok_embed"] = (
        (c.embed_dim**-0.5 if tied else 1.0),
        params["tok_embed"]["embedding"],
    )
    if not tied:
        expected["lm_head"], found["lm_head"] = c.embed_dim**-0.5, params["lm_head"]["kernel"]
    for name, std in expected.items():
        # At least 2,048 draws: the standard deviation of theirs is below 1.6 %. A normal distribution
        # that is truncated at three standard deviations has 0.987 of its own.
        np.testing.assert_allclose(np.std(found[name]), std, rtol=0.07, err_msg=name)
    assert ("lm_head" in params) != tied
    assert not np.array_equal(*found["mlp/up_proj"]), "every layer draws its own"
    fixed = nnx.to_pure_dict(
        nnx.state(Llama(dataclasses.replace(c, init_std=0.5), rngs=nnx.Rngs(0)), nnx.Param)
    )
    np.testing.assert_allclose(np.std(fixed["tok_embed"]["embedding"]), 0.5, rtol=0.07)
    np.testing.assert_allclose(
        np.std(fixed["layers"]["mlp"]["down_proj"]["kernel"]), 0.5 * residual, rtol=0.07
    )


def test_a_cache_has_the_dtype_of_the_activations():
    c = dataclasses.replace(CONFIG, dtype="bfloat16")
    cache = jax.eval_shape(lambda: Llama(c, rngs=nnx.Rngs(0)).init_cache(3, 5))
    assert {leaf.dtype for leaf in cache} == {jax.numpy.dtype("bfloat16")}
    assert {leaf.shape for leaf in cache} == {(2, 3, 5, 2, 8)}
