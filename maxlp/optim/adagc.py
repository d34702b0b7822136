"""AdaGC: clips each tensor's gradient by its average past norm (Wang et al. 2025, arXiv:2502.11034).

    ‖g‖ of one tensor, γ the average norm of its clipped gradients
    warm-up   ĝ = g · min(1, clip_norm / global norm)       γ ← min(γ, ‖ĝ‖)
    after it  ĝ = g · min(1, ratio · γ / ‖g‖)               γ ← decay · γ + (1 − decay) · ‖ĝ‖

A spike in one tensor then neither enters the moments of that tensor nor shortens the steps of all others,
as it does with clipping by the global norm.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxlp.optim.config import AdaGCConfig
from maxlp.optim.tree_utils import clip_factor, over_tensor, per_tensor, tensor_norm, widened


class AdaGCState(NamedTuple):
    """The number of updates, and γ of each parameter, float32 (*layers); infinite at first."""

    count: jax.typing.ArrayLike
    norms: optax.Updates


def clip_by_own_norms(config: AdaGCConfig, clip_norm: float = 0.0) -> optax.GradientTransformation:
    """AdaGC, for the beginning of a chain.

    A gradient of zeros, as of an adapter in the first step, says nothing about later ones: it leaves γ as
    it is. (By the equations γ would become 0, and the tensor would never move.) So does a gradient whose
    norm is not finite; if its entries are, and their squares overflow, it is clipped to zeros.

    Args:
      config: ratio, decay, warm-up.
      clip_norm: the bound of the global norm in the warm-up; 0 does not clip there.
    """

    def init(params: optax.Params) -> AdaGCState:
        return AdaGCState(jnp.zeros([], jnp.int32), per_tensor(params, jnp.inf))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        del params
        warming = state.count < config.warmup_steps
        first = clip_factor(updates, clip_norm) if clip_norm else jnp.float32(1.0)

        def factor(norm: jax.Array, average: jax.Array) -> jax.Array:
            own = jnp.minimum(1.0, config.ratio * average / jnp.where(norm > 0, norm, 1.0))
            return jnp.where(warming, first, own)

        def next_average(norm: jax.Array, factor: jax.Array, average: jax.Array) -> jax.Array:
            clipped = factor * norm
            mixed = config.decay * average + (1 - config.decay) * clipped
            new = jnp.where(warming | jnp.isinf(average), jnp.minimum(average, clipped), mixed)
            return jnp.where((norm > 0) & (norm < jnp.inf), new, average)

        norms = jax.tree.map_with_path(tensor_norm, widened(updates))
        factors = jax.tree.map(factor, norms, state.norms)
        averages = jax.tree.map(next_average, norms, factors, state.norms)
        clipped = jax.tree.map(lambda g, f: (g * over_tensor(f, g)).astype(g.dtype), updates, factors)
        return clipped, AdaGCState(optax.safe_increment(state.count), averages)

    return optax.GradientTransformation(init, update)
