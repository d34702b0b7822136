"""How well a language model predicts held-out text: loss, perplexity, bits per byte."""

import math
from collections.abc import Callable, Iterable

import jax
import numpy as np


def perplexity(
    eval_step: Callable[[dict, dict], dict[str, jax.Array]],
    state: dict,
    batches: Iterable[dict[str, jax.Array]],
    byte_lengths_V: np.ndarray,
) -> dict[str, float]:
    """Averages over every unmasked token of the batches.

    Args:
      eval_step: (state, batch) to the sums ``nll`` (nats), ``correct`` and ``tokens``.
      batches: global batches.
      byte_lengths_V: bytes of text that each token stands for; 0 for special tokens. Predicting those
        costs bits and adds no bytes, so bits per byte are those of a complete code for the text.

    Returns:
      loss (nats a token), perplexity, accuracy, bits_per_byte, and the counts tokens and bytes.
    """
    lengths_V = jax.numpy.asarray(byte_lengths_V)
    count_bytes = jax.jit(lambda targets, mask: jax.numpy.sum(lengths_V[targets] * mask))
    sums = []
    for batch in batches:
        out = eval_step(state, batch)
        sums.append(
            {
                "nll": out["nll"],
                "correct": out["correct"],
                "tokens": out["tokens"],
                "bytes": count_bytes(batch["targets"], batch["loss_mask"]),
            }
        )
    if not sums:
        raise ValueError("the held-out data has no batch")
    # Sums of float32 batch sums are taken in float64 on the host: the whole is not bounded by a batch.
    host = jax.device_get(sums)
    total = {k: float(np.sum([s[k] for s in host], dtype=np.float64)) for k in host[0]}
    loss = total["nll"] / total["tokens"]
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "accuracy": total["correct"] / total["tokens"],
        "bits_per_byte": total["nll"] / math.log(2) / max(total["bytes"], 1.0),
        "tokens": total["tokens"],
        "bytes": total["bytes"],
    }
