"""Generation with a cache equals the model without one; sampling has the intended distribution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.nn import decoding
from maxlp.nn.decoding import Sampling, generate, padded_length, sample
from tests.fixtures import LLAMA, make_llama, precision_config

V = LLAMA["vocab_size"]
PROMPTS = [[1], [5, 9, 2, 7, 7, 3, 1, 40] * 4, [8, 8, 1]]  # the second one has the padded length
NEW = 12
greedy = functools.partial(generate, max_new_tokens=NEW, sampling=Sampling(0.0))


@pytest.fixture(scope="module")
def model():
    return make_llama(init_std=0.3)(nnx.Rngs(0))


@pytest.fixture(scope="module")
def expected(model):
    """Greedy tokens by their definition: for each token, the model reads the whole text again."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def most_likely(tokens_BS, lengths_B):
        logits_BSV = nnx.merge(graphdef, state)(tokens_BS)  # the padding after a prompt has no effect
        return jnp.argmax(logits_BSV[jnp.arange(len(lengths_B)), lengths_B - 1], axis=-1)

    lengths_B = np.array([len(prompt) for prompt in PROMPTS])
    tokens_BS = np.zeros((len(PROMPTS), lengths_B.max() + NEW), np.int32)
    for row, prompt in zip(tokens_BS, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    for i in range(NEW):
        tokens_BS[np.arange(len(PROMPTS)), lengths_B + i] = most_likely(tokens_BS, lengths_B + i)
    return [row[n : n + NEW].tolist() for row, n in zip(tokens_BS, lengths_B, strict=True)]


def test_greedy_batch_equals_the_model_without_a_cache(model, expected):
    assert len({tuple(row) for row in expected}) == len(PROMPTS)
    assert greedy(model, PROMPTS) == expected


def test_stops_at_the_end_token_of_each_row(model, expected):
    eos = expected[1][3]
    stopped = [row[: row.index(eos)] if eos in row else row for row in expected]
    assert greedy(model, PROMPTS, eos_id=eos) == stopped


def test_nothing_is_generated_after_the_end_of_a_row(model, expected, monkeypatch):
    """So that a batch is done when its last row is."""
    filled, real = [], decoding._generate
    monkeypatch.setattr(decoding, "_generate", lambda *a, **k: filled.append(real(*a, **k)) or filled[-1])
    rows = greedy(model, PROMPTS, eos_id=expected[1][3])
    assert any(0 < len(row) < NEW - 1 for row in rows)
    for row, all_N in zip(rows, np.asarray(filled[0]).tolist(), strict=True):
        assert all_N == row + [expected[1][3]] * (NEW - len(row))


@pytest.mark.full
def test_generation_does_not_change_a_model_with_delayed_scaling():
    """Prompts neither change the scales nor, through them, each other."""
    model = make_llama(precision_config("fp8_delayed", history=4), init_std=0.3)(nnx.Rngs(0))
    before = jax.device_get(nnx.to_pure_dict(nnx.state(model)))
    together = greedy(model, PROMPTS)
    assert together == [greedy(model, [prompt])[0] for prompt in PROMPTS]
    assert len({tuple(row) for row in together}) == len(PROMPTS)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(nnx.to_pure_dict(nnx.state(model))), before)


def test_the_text_of_a_row_depends_on_the_seed_and_not_on_other_rows(model):
    def texts(prompts, seed):
        return generate(model, prompts, max_new_tokens=20, sampling=Sampling(1.0), seed=seed)

    assert texts(PROMPTS, 1) == texts(PROMPTS, 1)
    assert texts(PROMPTS, 1) != texts(PROMPTS, 2)
    assert texts(PROMPTS[:1], 1) == texts(PROMPTS, 1)[:1]
    assert texts(PROMPTS, 2**32 - 1) != texts(PROMPTS, 2**31)
    assert texts(PROMPTS, 2**32 + 1) == texts(PROMPTS, 1)
    same = texts([[5]] * 3, 1)
    assert same[0] != same[1] != same[2], "rows with equal prompts get different texts"


# --- sampling -------------------------------------------------------------------------------------------

PROBS = np.array([0.05, 0.4, 0.25, 0.1, 0.2])


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), PROBS),
        (Sampling(0.5), PROBS**2 / np.sum(PROBS**2)),
        (Sampling(1.0, top_k=2), np.array([0, 0.4, 0.25, 0, 0]) / 0.65),
        (Sampling(1.0, top_k=4), np.array([0, 0.4, 0.25, 0.1, 0.2]) / 0.95),
        (Sampling(1.0, top_k=9), PROBS),
        (Sampling(1.0, top_p=0.6), np.array([0, 0.4, 0.25, 0, 0]) / 0.65),
        (Sampling(1.0, top_p=0.3), np.array([0, 1, 0, 0, 0])),
        (Sampling(1.0, top_k=3, top_p=0.5), np.array([0, 0.4, 0.25, 0, 0]) / 0.65),
        (Sampling(0.0), np.array([0, 1, 0, 0, 0])),
    ],
)
def test_sampling_distribution(sampling, expected):
    logits, n = np.log(PROBS).astype(np.float32), 20_000
    keys = jax.random.split(jax.random.key(0), n)
    ids = jax.vmap(lambda key: sample(key, logits, sampling))(keys)
    # Three standard deviations of a frequency over 20,000 draws are at most 0.011.
    np.testing.assert_allclose(np.bincount(ids, minlength=len(PROBS)) / n, expected, atol=0.011)


def test_each_token_of_a_row_is_drawn_anew(model):
    """From an almost flat distribution, equal random numbers would draw equal tokens."""
    (row,) = generate(model, [[5]], max_new_tokens=20, sampling=Sampling(1e4))
    assert len(set(row)) > 5


def test_lengths_are_padded_to_few_others_and_not_by_much():
    lengths = range(1, 4097)
    padded = [padded_length(n) for n in lengths]
    assert all(
        n <= p and p % 32 == 0 and (p - n < 32 or p < 1.25 * n)
        for n, p in zip(lengths, padded, strict=True)
    )
    assert len({*padded}) == 24
