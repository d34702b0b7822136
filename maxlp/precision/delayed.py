"""Delayed scaling: the scale of a tensor comes from the largest magnitudes of the last steps.

The scale of a step is then known before its data, so that amax and quantization are one pass. State
is a history per tensor, newest first; the scale is a function of it and not stored. As in
Transformer Engine and Flax's ``fp8_ops``, the current amax enters the history after the scale was
taken.

Three rules that other implementations break:

* Until a nonzero amax was recorded, the scale is the current one. (A fixed first scale of 1 rounds
  all gradients below 1.5e-5 to zero, and they become nonzero one layer per step.)
* A non-finite amax never enters. (One infinity would freeze the scale for the whole window.)
* Several observations of one step (microbatches, devices) are combined by maximum, which gives
  exactly the history of the whole batch. A sum or a mean is wrong.
"""

import jax
import jax.numpy as jnp
from flax import nnx


class AmaxHistory(nnx.Variable):
    """float32 (…, history), written by the forward pass."""


class OverwriteWithGradient(nnx.Variable):
    """State of the backward pass: the "gradient" of such a variable is its new value.

    Only the backward pass has access to the gradient of an output, and only cotangents leave it.
    Code that differentiates must ask for these variables by their tag and store the result;
    clipping, norms, decay, averages and optimizers must not include them.
    """

    tag = "overwrite_with_gradient"


def push(history: jax.Array, amax: jax.Array) -> jax.Array:
    """The history (H,) with a new observation (scalar) at 0 and the oldest dropped; 0 if not finite."""
    newest = jnp.where(jnp.isfinite(amax), amax, 0.0)
    return jnp.concatenate([newest[None], history[:-1]])


def delayed_amax(history: jax.Array, amax: jax.Array, cold_start: bool) -> jax.Array:
    """The amax (scalar) that this step's scale comes from: the largest of the history (H,).

    Args:
      amax: of this step's data, taken while the history is empty.
      cold_start: False: the result is 0 while the history is empty (a scale of 1), and quantization
        never waits for the amax of its own data.
    """
    largest = jnp.max(history)
    return jnp.where(largest > 0, largest, amax) if cold_start else largest
