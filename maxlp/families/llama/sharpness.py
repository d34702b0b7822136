"""Sharpness of the loss in the logits of the last token of each row, as a metric of training.

Keskar et al. 2017 (arXiv:1609.04836, metric 2.1) define the sharpness of a loss f at x as::

    100 · (max f(x + d) - f(x)) / (1 + f(x))   over   |d_i| <= ε (|x_i| + 1)

where x are the weights. Lee et al. 2024 (arXiv:2405.18710) take for x the logits of the last token. Here f
is the mean cross-entropy of these tokens (the last one of each row that has a target), as a function of
their logits. It falls in the logit of the target and rises in all others, so the maximum is at one known
corner of the box, and no search is needed: one forward pass, whose head runs on one token of a row.

ε is 1e-3, one of the two values of Keskar et al. That of Lee et al. is not known here, so results can only
be compared with others of this program.

Shape letters: B batch · S length · D embed · V vocab.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

EPSILON = 1e-3


def measure(state: Any, batch: Any, *, graphdef: nnx.GraphDef) -> jax.Array:
    """The sharpness on a batch; call it in a jitted function, as `run.measurements` does."""
    model = nnx.merge(graphdef, state["params"], state["model_state"])
    return sharpness(*last_token(model, batch))


def last_token(model: nnx.Module, batch: dict) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float32 logits_BV and targets_B of the last target of each row, and whether the row has one."""
    x_BSD, _ = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])
    mask_BS = batch["loss_mask"]
    last_B1 = (mask_BS.shape[1] - 1 - jnp.argmax(mask_BS[:, ::-1], axis=1))[:, None]
    x_B1D = jnp.take_along_axis(x_BSD, last_B1[..., None], axis=1)
    targets_B = jnp.take_along_axis(batch["targets"], last_B1, axis=1)[:, 0]
    return model.logits(x_B1D)[:, 0], targets_B, jnp.any(mask_BS, axis=1)


def sharpness(logits_BV: jax.Array, targets_B: jax.Array, counts_B: jax.Array) -> jax.Array:
    """The sharpness defined above, in per cent: a float32 scalar.

    Args:
      counts_B: the rows that count; NaN if there is none.
    """
    is_target_BV = jnp.arange(logits_BV.shape[-1])[None] == targets_B[:, None]
    box_BV = EPSILON * (jnp.abs(logits_BV) + 1)
    step_BV = jnp.where(is_target_BV, -box_BV, box_BV)
    log_p_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32), axis=-1)

    def of_target(x_BV: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_target_BV, x_BV, 0.0), axis=-1)

    # log Σ exp(x + d) - log Σ exp(x), without the difference of two large numbers.
    rise_B = jnp.log1p(jnp.sum(jnp.exp(log_p_BV) * jnp.expm1(step_BV), axis=-1)) - of_target(step_BV)
    loss_B = -of_target(log_p_BV)
    loss, rise = (jnp.mean(x_B, where=counts_B) for x_B in (loss_B, rise_B))
    return 100 * rise / (1 + loss)
