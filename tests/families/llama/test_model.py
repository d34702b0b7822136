"""What the Llama's forward pass promises beyond its numbers, which are compared with Hugging Face's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.families.llama import losses
from maxlp.families.llama.model import Llama, RopeScaling, rope_table
from maxlp.families.llama.task import NextTokenConfig, next_token_sums
from maxlp.nn.lora import add_adapters
from maxlp.precision import RECIPES, inject
from tests.fixtures import Trainer, batch, llama_config, matmul_types

CONFIG = llama_config(
    embed_dim=32, head_dim=8, mlp_dim=48, max_seq_len=64, tie_embeddings=True, init_std=0.3
)


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(CONFIG, rngs=nnx.Rngs(0))


@jax.jit
def logits(model, *batch):
    return model(*batch)


@pytest.mark.parametrize("tied", [True, False])
def test_capped_logits_are_those_of_gemma_2(tied):
    """In NumPy, and in the head that a loss in chunks calls; with a cap that bends them."""
    plain, capped = (
        Llama(dataclasses.replace(CONFIG, tie_embeddings=tied, logit_soft_cap=cap), rngs=nnx.Rngs(0))
        for cap in (None, 2.0)
    )
    x_BSD = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 32)), jnp.float32)
    want = 2 * np.tanh(np.float64(plain.logits(x_BSD)) / 2)
    assert np.abs(want).max() > 1 and np.abs(want).max() < 2
    product, weights = capped.head()
    for got in (capped.logits(x_BSD), capped.cap(product(weights, x_BSD))):
        np.testing.assert_allclose(got, want, atol=2e-6)  # sums of 32 products, and a tanh, in float32


@pytest.mark.parametrize("tied", [True, False])
def test_one_chunk_has_the_loss_and_gradients_of_all_logits(tied):
    """Of capped logits with a z-loss; the sums are added in another order."""
    config = dataclasses.replace(CONFIG, tie_embeddings=tied, logit_soft_cap=2.0)
    model = Llama(config, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(64, size=(2, 17))
    rows = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": tokens[:, 1:] > 5}
    rows |= {"positions": np.broadcast_to(np.arange(16), (2, 16)), "segment_ids": np.ones((2, 16), int)}

    def of_one_chunk(model):
        sums = next_token_sums(model, rows, NextTokenConfig(z_loss=1e-2))
        return sums["loss"], sums

    def of_all_logits(model):
        x_BSD, _ = model.hidden(rows["tokens"], rows["positions"], rows["segment_ids"])
        sums = losses.next_token(model.logits(x_BSD), rows["targets"], rows["loss_mask"], z_loss=1e-2)
        return sums["loss"], sums

    assert model.has_plain_head
    found, expected = (
        nnx.jit(nnx.value_and_grad(f, has_aux=True))(model) for f in (of_one_chunk, of_all_logits)
    )
    # Gradients are sums of float32 terms that cancel.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    assert found[0][1]["correct"] == expected[0][1]["correct"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Smoothed(NextTokenConfig):
    smoothing: float = 0.25


@pytest.mark.parametrize(("dtype", "num_chunks"), [("float32", 1), ("float32", 2), ("float16", 1)])
def test_a_new_term_of_the_loss_is_a_key_and_an_argument(dtype, num_chunks, monkeypatch):
    """However the logits are computed."""
    given, without = [], losses.next_token

    def with_smoothing(*arrays, smoothing, **others):
        given.append(smoothing)
        return without(*arrays, **others)

    monkeypatch.setattr(losses, "next_token", with_smoothing)
    model = nnx.eval_shape(lambda: Llama(dataclasses.replace(CONFIG, dtype=dtype), rngs=nnx.Rngs(0)))
    rows = jax.tree.map(jnp.asarray, batch(0))
    nnx.eval_shape(lambda m: next_token_sums(m, rows, Smoothed(num_chunks=num_chunks))["loss"], model)
    assert set(given) == {0.25}


def test_heads_that_are_not_plain():
    """Float16, frozen weights, and a recipe, which may have state."""
    assert not Llama(dataclasses.replace(CONFIG, dtype="float16"), rngs=nnx.Rngs(0)).has_plain_head
    for tied in (True, False):
        model = Llama(dataclasses.replace(CONFIG, tie_embeddings=tied), rngs=nnx.Rngs(0))
        assert model.has_plain_head
        add_adapters(model, nnx.Rngs(0), rank=2, scale=1.0)
        assert not model.has_plain_head
    model = Llama(dataclasses.replace(CONFIG, tie_embeddings=False), rngs=nnx.Rngs(0))
    inject(model, RECIPES["bf16"], rules=(("lm_head", RECIPES["fp8_delayed"]),))
    assert not model.has_plain_head


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_float32_weights_of_the_head_is_not_rounded_to_16_bits(tied):
    """Row 0 of the hidden states is 1 and row 1 is 2^-8, whose sum needs 9 significant bits."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16", tie_embeddings=tied)
    product, weights = Llama(config, rngs=nnx.Rngs(0)).head()
    weights = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
    x_TD = jnp.ones((2, config.embed_dim), jnp.bfloat16) * jnp.array([[1.0], [2.0**-8]], jnp.bfloat16)
    [grad] = jax.tree.leaves(jax.grad(lambda w: product(w, x_TD).sum())(weights))
    np.testing.assert_array_equal(grad, np.full(grad.shape, 1 + 2.0**-8, np.float32))


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
    # Float32 logits of up to about 8, after dozens of roundings of up to 2.4e-7 each.
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
        # As above.
        np.testing.assert_allclose(found[row, :length], expected[row, :length], atol=3e-5, rtol=0)
    for i in range(more):
        at = prompt + i
        found, cache = step(model, rows[[0, 1], at][:, None], at[:, None], cache)
        np.testing.assert_allclose(found[:, 0], expected[[0, 1], at], atol=3e-5, rtol=0)


SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)


def exact_frequencies(head_dim, theta, scaling):
    """Of each pair, in Python's float64, from the published rule for Llama 3.1."""
    found = []
    for i in range(0, head_dim, 2):
        freq = theta ** (-i / head_dim)
        wavelength = 2 * np.pi / freq
        if scaling is not None and wavelength > scaling.original_max_seq_len / scaling.low_freq_factor:
            freq /= scaling.factor
        elif scaling is not None and wavelength > scaling.original_max_seq_len / scaling.high_freq_factor:
            smooth = scaling.original_max_seq_len / wavelength - scaling.low_freq_factor
            smooth /= scaling.high_freq_factor - scaling.low_freq_factor
            freq = (1 - smooth) * freq / scaling.factor + smooth * freq
        found.append(freq)
    return np.array(found)


@pytest.mark.parametrize(
    ("head_dim", "theta", "scaling"), [(64, 1e4, None), (128, 5e5, None), (128, 5e5, SCALING)]
)
def test_rotary_angles_are_exact_at_position_131071(head_dim, theta, scaling):
    """An angle of at most π has 4 roundings of 2^-24 (parts, sum, constant, product), a cosine one."""
    random = np.random.default_rng(0).integers(0, 131_072, 500)
    positions = np.concatenate([np.arange(40), random, [65_535, 65_536, 131_071]])
    table = jax.jit(rope_table, static_argnums=(1, 2, 3))
    cos, sin = table(jnp.asarray(positions[None], jnp.int32), head_dim, theta, scaling)
    angles = positions[:, None] * exact_frequencies(head_dim, theta, scaling)  # 2e-11 at most off
    for actual, exact in ((cos, np.cos(angles)), (sin, np.sin(angles))):
        np.testing.assert_allclose(actual[0, :, 0], exact, rtol=0, atol=(4 * np.pi + 1) * 2.0**-24)


def test_no_device_computes_rotary_frequencies():
    table = jax.make_jaxpr(lambda positions: rope_table(positions, 128, 5e5, SCALING))
    used = {str(e.primitive) for e in table(jnp.zeros((1, 4), jnp.int32)).eqns}
    assert {"cos", "sin"} <= used and not used & {"pow", "integer_pow", "exp", "exp2", "log", "div"}


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_compiled_step_computes_rotary_cosines_once(scan_layers):
    compiled = Trainer(scan_layers=scan_layers).lower(batch(0)).compile()
    assert compiled.as_text().count(" cosine(") == 1


@pytest.mark.parametrize(("attention", "tied", "num_chunks"), [("xla", False, 4), ("ring", True, 1)])
def test_a_train_step_in_bfloat16_multiplies_only_bfloat16(attention, tied, num_chunks):
    loss = NextTokenConfig(num_chunks=num_chunks)
    trainer = Trainer(loss=loss, dtype="bfloat16", attention=attention, tie_embeddings=tied)
    types = matmul_types(trainer.lower(batch(0)))
    assert types and {operand for *operands, _ in types for operand in operands} == {"bf16"}


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
    # As above.
    np.testing.assert_allclose(np.std(fixed["tok_embed"]["embedding"]), 0.5, rtol=0.07)
    np.testing.assert_allclose(
        np.std(fixed["layers"]["mlp"]["down_proj"]["kernel"]), 0.5 * residual, rtol=0.07
    )


def test_a_cache_has_the_dtype_of_the_activations():
    c = dataclasses.replace(CONFIG, dtype="bfloat16")
    cache = jax.eval_shape(lambda: Llama(c, rngs=nnx.Rngs(0)).init_cache(3, 5))
    assert {leaf.dtype for leaf in cache} == {jax.numpy.dtype("bfloat16")}
    assert {leaf.shape for leaf in cache} == {(2, 3, 5, 2, 8)}
