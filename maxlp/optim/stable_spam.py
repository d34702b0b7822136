"""Stable-SPAM: Adam with spike-aware clipping, normalized gradients and momentum resets.

Huang et al. 2025 (arXiv:2502.17055). For each tensor, with bias-corrected averages of decay rates g1, g2
and g3, in this order:

    spike-aware clipping   T = average of max|g| (g3);  gᵢ ← gᵢ · T / max|g|   where |gᵢ| > T
    adaptive norm          g ← g / ‖g‖ · m / √v,   m, v = averages of ‖g‖ (g1) and ‖g‖² (g2)
    momentum reset         every `reset_every` updates Adam's moments and its count become 0

Gradients then have norms near 1, so that `clip_norm` and `eps` mean something else than in AdamW.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxlp.optim.config import Conflict, OptimizerConfig, OptimizerKind
from maxlp.optim.tree_utils import over_tensor, per_tensor, tensor_axes, widened, zero_unless
from maxlp.schema import CountOrZero, DecayRate


class StableSpamState(NamedTuple):
    """The number of updates, three averages, float32 (*layers) for each parameter, and Adam's state."""

    count: jax.typing.ArrayLike
    largest: optax.Updates
    norm: optax.Updates
    squared_norm: optax.Updates
    adam: optax.OptState


def scale_by_stable_spam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    mu_dtype: Any = None,
    *,
    norm_decay: DecayRate = 0.7,
    squared_norm_decay: DecayRate = 0.9,
    largest_decay: DecayRate = 0.999,
    reset_every: CountOrZero = 1000,
) -> optax.GradientTransformation:
    """Adam's step of gradients that are clipped and normalized as above.

    The averages continue over a reset. (In the authors' code their bias correction begins anew with Adam's,
    which makes them too large for a while.)

    Args:
      b1, b2, eps, mu_dtype: as in `optax.scale_by_adam`.
      norm_decay, squared_norm_decay, largest_decay: g1, g2 and g3 above; the authors' γ₁, γ₂ and γ₃.
      reset_every: updates between resets of the moments; 0 never resets them.
    """
    adam = optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype)

    def init(params: optax.Params) -> StableSpamState:
        largest, norm, squared_norm = (per_tensor(params, 0.0) for _ in range(3))
        count = jnp.zeros([], jnp.int32)
        return StableSpamState(count, largest, norm, squared_norm, adam.init(params))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        del params
        count = optax.safe_increment(state.count)
        axes = jax.tree.map_with_path(tensor_axes, updates)

        def averaged(new: optax.Updates, old: optax.Updates, decay: float) -> tuple[Any, Any]:
            average = jax.tree.map(lambda x, y: decay * y + (1 - decay) * x, new, old)
            return average, optax.tree.bias_correction(average, decay, count)

        grads = widened(updates)
        largest = jax.tree.map(lambda g, a: jnp.max(jnp.abs(g), axis=a), grads, axes)
        thresholds, bounds = averaged(largest, state.largest, largest_decay)
        grads = jax.tree.map(_clip_spikes, grads, largest, bounds)
        squares = jax.tree.map(lambda g, a: jnp.sum(jnp.square(g), axis=a), grads, axes)
        norm, mean = averaged(jax.tree.map(jnp.sqrt, squares), state.norm, norm_decay)
        squared_norm, square = averaged(squares, state.squared_norm, squared_norm_decay)

        def normalize(g: jax.Array, s: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            factor = m / (jnp.sqrt(v) + eps) / jnp.where(s > 0, jnp.sqrt(s), 1.0)
            return g * over_tensor(factor, g)

        grads = jax.tree.map(normalize, grads, squares, mean, square)
        grads = jax.tree.map(lambda g, u: g.astype(u.dtype), grads, updates)
        kept = True if not reset_every else jnp.asarray(count) % reset_every != 0
        fresh = jax.tree.map(lambda x: zero_unless(kept, x), state.adam)
        steps, adam_state = adam.update(grads, fresh)
        return steps, StableSpamState(count, thresholds, norm, squared_norm, adam_state)

    return optax.GradientTransformation(init, update)


def _clip_spikes(g: jax.Array, largest: jax.Array, bound: jax.Array) -> jax.Array:
    """Entries above the bound, scaled so that the largest one becomes it."""
    bound = over_tensor(bound, g)
    return jnp.where(jnp.abs(g) > bound, g * bound / over_tensor(largest, g), g)


def _conflicts(config: OptimizerConfig) -> Iterator[Conflict]:
    """The keys that Stable-SPAM cannot work with."""
    if config.galore is not None and config.galore.moments == "reset":
        reason = "its moments are of normalized gradients; set galore.moments='keep' or 'reproject'"
        yield "galore.moments", config.galore.moments, reason


STABLE_SPAM = OptimizerKind(scale_by=scale_by_stable_spam, conflicts=_conflicts)
