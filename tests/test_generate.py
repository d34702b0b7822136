import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp import precision
from maxlp.families.llama.model import Llama
from maxlp.generate import Sampling, generate, heal, sample

V = 64


def make_model():
    return Llama(
        vocab_size=V,
        embed_dim=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=64,
        max_seq_len=128,
        rope_theta=10000.0,
        rope_scaling=None,
        norm_eps=1e-5,
        tie_embeddings=False,
        init_std=0.3,
        dtype="float32",
        param_dtype="float32",
        attention="xla",
        scan_layers=True,
        remat="none",
        rngs=nnx.Rngs(0),
    )


@pytest.fixture(scope="module")
def model():
    return make_model()


PROMPTS = [[1], [5, 9, 2, 7, 7, 3, 1, 40], [8, 8, 1]]


def greedy_without_cache(model, prompt, n):
    """The definition: the whole text anew for every token."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(jnp.argmax(model(jnp.asarray([tokens]))[0, -1])))
    return tokens[len(prompt) :]


def test_greedy_batch_equals_uncached(model):
    got = generate(model, PROMPTS, max_new_tokens=12, sampling=Sampling(0.0))
    assert got == [greedy_without_cache(model, p, 12) for p in PROMPTS]


def test_stops_at_the_end_token_of_each_row(model):
    free = [greedy_without_cache(model, p, 12) for p in PROMPTS]
    eos = free[1][3]
    got = generate(model, PROMPTS, max_new_tokens=12, sampling=Sampling(0.0), eos_id=eos)
    assert got == [row[: row.index(eos)] if eos in row else row for row in free]


def test_a_model_with_remembered_scales_is_left_as_it_is():
    """With delayed scaling the prompts neither change the scales nor, by them, each other."""
    model = make_model()
    precision.inject(model, precision.make_recipe("fp8_delayed"))
    before = jax.device_get(nnx.to_pure_dict(nnx.state(model)))
    run = lambda prompts: generate(model, prompts, max_new_tokens=12, sampling=Sampling(0.0))  # noqa: E731
    together = run(PROMPTS)
    assert together == [run([prompt])[0] for prompt in PROMPTS]
    assert len({tuple(row) for row in together}) == len(PROMPTS)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(nnx.to_pure_dict(nnx.state(model))), before)


def test_a_prompt_that_ends_inside_a_token_is_healed(model):
    """ "ab" ends in the token "b"; "bc" continues it, so it may come instead of "b" and something else."""

    class Letters:
        pieces = ("", "a", "b", "bc", "c", "bcd")
        vocab_size = len(pieces)

        def decode(self, ids):
            return "".join(self.pieces[i] for i in ids)

    (prompt, allowed_V), (empty, all_V) = heal(Letters(), [[0, 1, 2], [0]], V)
    assert prompt == [0, 1] and np.flatnonzero(allowed_V).tolist() == [2, 3, 5]
    assert empty == [0] and all_V.all()
    first = np.stack([allowed_V, all_V])
    rows = [
        generate(model, [prompt, empty], max_new_tokens=2, sampling=Sampling(1.0), seed=seed, first=first)
        for seed in range(20)
    ]
    assert {row[0][0] for row in rows} <= {2, 3, 5} and len({row[0][0] for row in rows}) > 1
    assert {row[1][0] for row in rows} - {2, 3, 5}


def test_seed_decides_and_rows_do_not_disturb_each_other(model):
    draw = lambda prompts, seed: generate(  # noqa: E731
        model, prompts, max_new_tokens=20, sampling=Sampling(1.0), seed=seed
    )
    assert draw(PROMPTS, 1) == draw(PROMPTS, 1)
    assert draw(PROMPTS, 1) != draw(PROMPTS, 2)
    assert draw(PROMPTS[:1], 1) == draw(PROMPTS, 1)[:1]
    same = draw([[5]] * 3, 1)
    assert same[0] != same[1] != same[2], "rows with one prompt draw different texts"


def frequencies(logits, sampling, n=20_000):
    keys = jax.random.split(jax.random.key(0), n)
    ids = jax.vmap(lambda key: sample(key, jnp.asarray(logits, jnp.float32), sampling))(keys)
    return np.bincount(ids, minlength=len(logits)) / n


PROBS = np.array([0.05, 0.4, 0.25, 0.1, 0.2])


@pytest.mark.parametrize(
    ("sampling", "want"),
    [
        (Sampling(1.0), PROBS),
        (Sampling(0.5), PROBS**2 / np.sum(PROBS**2)),
        (Sampling(1.0, top_k=2), np.array([0, 0.4, 0.25, 0, 0]) / 0.65),
        (Sampling(1.0, top_p=0.6), np.array([0, 0.4, 0.25, 0, 0]) / 0.65),
        (Sampling(1.0, top_p=0.3), np.array([0, 1, 0, 0, 0])),
        (Sampling(1.0, top_k=3, top_p=0.5), np.array([0, 0.4, 0.25, 0, 0]) / 0.65),
        (Sampling(0.0), np.array([0, 1, 0, 0, 0])),
    ],
)
def test_sampling_distribution(sampling, want):
    # Three standard deviations of a frequency over 20,000 draws are at most 0.011.
    np.testing.assert_allclose(frequencies(np.log(PROBS), sampling), want, atol=0.011)
