"""Perplexity and bits per byte against sums by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.data.tokenizers import Tokenizer
from maxlp.families.llama.perplexity import make_perplexity


class Words(Tokenizer):
    """Token 0 is a special token."""

    bos_id, prefix_bytes = 0, 0
    byte_lengths = np.array([0, 1, 4, 2], np.int32)


def eval_step(state, batch):
    """The loss of a token is its id times ``state["nats"]``; ids below 2 are hits."""
    mask, targets = batch["loss_mask"], batch["targets"]
    return {
        "nll": jnp.sum(jnp.where(mask, targets * state["nats"], 0.0)),
        "correct": jnp.sum(mask & (targets < 2)),
        "tokens": jnp.sum(mask),
        "loss": jnp.nan,  # with z-loss: not what an evaluation reports
    }


def batch(targets, mask, tokens=(1, 1, 1)):
    tokens, targets = (np.array([each], np.int32) for each in (tokens, targets))
    return {"tokens": tokens, "targets": targets, "loss_mask": np.array([mask], bool)}


def test_sums_over_all_batches():
    batches = [batch([1, 2, 3], [1, 1, 0]), batch([0, 3, 2], [1, 1, 0]), batch([1, 1, 1], [0, 0, 0])]
    found = make_perplexity(eval_step, Words())({"nats": 0.5}, batches)
    nll, tokens, num_bytes = 0.5 * (1 + 2 + 0 + 3), 4, 1 + 4 + 0 + 2
    assert found == {
        "loss": pytest.approx(nll / tokens),
        "perplexity": pytest.approx(math.exp(nll / tokens)),
        "accuracy": 2 / 4,
        "bits_per_byte": pytest.approx(nll / math.log(2) / num_bytes),
        "tokens": tokens,
        "bytes": num_bytes,
    }


def test_the_space_that_a_tokenizer_puts_before_every_text_is_not_counted():
    """The second document is empty, and the third continues that of another row."""

    class Prefixed(Words):
        prefix_bytes = 1

    batches = [
        batch([2, 3, 0], [1, 1, 1], tokens=[0, 2, 3]),
        batch([0], [1], tokens=[0]),
        batch([3], [1], tokens=[2]),
    ]
    found = make_perplexity(eval_step, Prefixed())({"nats": 0.5}, batches)
    assert found["bytes"] == (4 - 1) + 2 + 0 + 0 + 2


def test_a_diverged_model_has_a_finite_perplexity():
    found = make_perplexity(eval_step, Words())({"nats": 1e4}, [batch([3], [1], [1])])
    assert found["loss"] == pytest.approx(3e4) and math.isfinite(found["perplexity"])


def test_batches_without_a_token_to_predict_are_refused():
    with pytest.raises(ValueError, match="the validation data has no token to predict"):
        make_perplexity(eval_step, Words())({"nats": 1.0}, [batch([1], [0], [1])])
