"""Loss, perplexity and bits per byte of a language model on validation text.

Shape letters: B batch · S length · V vocab.
"""

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from maxlp.data.tokenizers import Tokenizer

Sums = dict[str, jax.Array]


def make_perplexity(
    eval_step: Callable[[dict, dict], Sums], tokenizer: Tokenizer
) -> Callable[[dict, Iterable[dict]], dict[str, float]]:
    """A function of (state, batches) that averages over every unmasked token of the batches.

    Args:
      eval_step: (state, batch) to the sums ``nll`` (nats), ``correct`` and ``tokens``.
      tokenizer: of the batches, to count the bytes of text. Predicting special tokens costs bits and adds
        no bytes, so bits per byte are those of a complete code for the text.

    Returns:
      the function; its results are loss (nats per token), perplexity, accuracy, bits_per_byte, tokens and
      bytes. It raises a ValueError for batches without a token to predict.
    """
    byte_lengths_V = tokenizer.byte_lengths

    @jax.jit
    def count(state: dict, batch: dict) -> Sums:
        sums = eval_step(state, batch)
        length_BS = jnp.asarray(byte_lengths_V)[batch["targets"]]
        # The space that some tokenizers put before every text is not part of it.
        begins_BS = (batch["tokens"] == tokenizer.bos_id) & (length_BS > 0)
        length_BS -= begins_BS * tokenizer.prefix_bytes
        num_bytes = jnp.sum(length_BS * batch["loss_mask"])
        return {key: sums[key] for key in ("nll", "correct", "tokens")} | {"bytes": num_bytes}

    def perplexity(state: dict, batches: Iterable[dict]) -> dict[str, float]:
        # Fetch the sums of one batch before the next one starts: batches do not depend on each other, and
        # on CPUs nothing else keeps the collectives of two batches in the same order in all processes. On
        # the host the sums are float64, which is accurate enough for any number of batches.
        total = dict.fromkeys(("nll", "correct", "tokens", "bytes"), 0.0)
        for batch in batches:
            for key, value in jax.device_get(count(state, batch)).items():
                total[key] += float(value)
        if not total["tokens"]:
            raise ValueError("the validation data has no token to predict")
        loss = total["nll"] / total["tokens"]
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),  # exp(710) overflows float64
            "accuracy": total["correct"] / total["tokens"],
            "bits_per_byte": total["nll"] / math.log(2) / max(total["bytes"], 1.0),
            "tokens": total["tokens"],
            "bytes": total["bytes"],
        }

    return perplexity
