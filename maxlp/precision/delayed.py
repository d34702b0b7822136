"""Delayed scaling: the scale of a tensor comes from its amax in the last steps.

The scale is then known before the data is, so that one pass both quantizes the data and computes its
amax. The state is an amax history per tensor, newest first; the scale is a function of it and not
stored. As in Transformer Engine and Flax's ``fp8_ops``, the current amax enters the history after the
scale was taken.

Three rules that other implementations break:

* Until a nonzero amax was recorded, the current amax gives the scale. (A fixed first scale of 1 would
  flush all E5M2 gradients below 7.6e-6 to zero, and gradients would become nonzero one layer per step.)
* A non-finite amax never enters the history. (One infinity would be its maximum for all its steps.)
* The amaxes of one step (of microbatches, of devices) are combined by maximum, which gives exactly the
  history of the whole batch. A sum or a mean would not.
"""

import jax
import jax.numpy as jnp
from flax import nnx


class AmaxHistory(nnx.Variable):
    """float32 (…, history), written by the forward pass."""


class OverwriteWithGradient(nnx.Variable):
    """State that the backward pass updates: the "gradient" of such a variable is its new value.

    What is computed from an output gradient exists only in the backward pass, which can return nothing but
    cotangents. So a custom VJP takes the variable as an input, and returns its new value as the cotangent.
    Code that differentiates must also differentiate by the variables with this tag, and overwrite them with
    their gradients; clipping, norms, weight decay, averages and optimizers must leave them out.
    """

    tag = "overwrite_with_gradient"


def push(history: jax.Array, amax: jax.Array) -> jax.Array:
    """The history (H,) with a new amax (scalar) in front, 0 if it is not finite, and without the oldest."""
    newest = jnp.where(jnp.isfinite(amax), amax, 0.0)
    return jnp.concatenate([newest[None], history[:-1]])


def delayed_amax(history: jax.Array, amax: jax.Array, cold_start: bool) -> jax.Array:
    """The amax (float32 scalar) that gives this step's scale: the largest of the history (H,).

    Args:
      amax: of this step's data.
      cold_start: whether ``amax`` is used while the history is all zeros. If not, the result is 0 then,
        which stands for a scale of 1, and quantization never waits for the amax of its own data.
    """
    largest = jnp.max(history)
    return jnp.where(largest > 0, largest, amax) if cold_start else largest
