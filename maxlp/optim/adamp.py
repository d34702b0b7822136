"""AdamP: Adam that does not grow the norm of scale-invariant weights.

The norm of a weight in front of a normalization has no effect, but momentum makes it grow, and a longer
weight turns by a smaller angle: the effective learning rate decays on its own. Heo et al. 2021
(arXiv:2006.08217) remove the part of the step along the weight, wherever the gradient is nearly
orthogonal to the weight, as the gradient of a scale-invariant weight is:

    max |cos(g, w)| < δ / √dim(w)   →   step ← step - ŵ (ŵ·step), weight decay ← wd_ratio · weight decay

The test is made for the output channels of a tensor first, then for the tensor as a whole; if both fail,
the step is Adam's.
"""

import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from maxlp.optim.config import OptimizerKind
from maxlp.optim.tree_utils import find_states, layer_axes, leaf_name, over_tensor, per_tensor, widened
from maxlp.schema import NotNegative, PositiveFraction


class AdamPState(NamedTuple):
    """`optax.ScaleByAdamState` with the divisor of each parameter's weight decay, (*layers)."""

    count: jax.typing.ArrayLike
    mu: optax.Updates
    nu: optax.Updates
    divisor: optax.Updates


def scale_by_adamp(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    mu_dtype: Any = None,
    *,
    delta: NotNegative = 0.1,
    wd_ratio: PositiveFraction = 0.1,
) -> optax.GradientTransformation:
    """Adam's step without its radial part, for tensors of each layer with at least two dims.

    The update needs the parameters.

    Args:
      b1, b2, eps: of Adam.
      mu_dtype: dtype of the first moment; None for float32.
      delta: δ above, the threshold of orthogonality.
      wd_ratio: factor on the weight decay where the radial part is removed.
    """
    adam = optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype)

    def init(params: optax.Params) -> AdamPState:
        moments: Any = adam.init(widened(params))
        return AdamPState(moments.count, moments.mu, moments.nu, per_tensor(params, 1.0))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        assert params is not None, "AdamP projects steps along the parameters"
        grads, weights = widened(updates), widened(params)
        old = optax.ScaleByAdamState(state.count, state.mu, state.nu)
        steps, moments = cast(tuple[Any, Any], adam.update(grads, old))

        def one(path: KeyPath, g: jax.Array, w: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
            axes, layers = layer_axes(path), jnp.ones(g.shape[: layer_axes(path)])
            if g.ndim - axes < 2:
                return step, layers
            every = tuple(range(axes, g.ndim))
            channel = axes if leaf_name(path) == "embedding" else g.ndim - 1  # a table's channels are rows
            views = tuple(i for i in every if i != channel), every
            (by_channel, channel_free), (whole, free) = (
                _tangent(g, w, step, view, axes, delta, eps) for view in views
            )
            chosen = jnp.where(channel_free, by_channel, jnp.where(free, whole, step))
            return chosen, jnp.where((channel_free | free).reshape(layers.shape), 1 / wd_ratio, layers)

        both = jax.tree.map_with_path(one, grads, weights, steps)
        steps, divisors = jax.tree.transpose(jax.tree.structure(grads), jax.tree.structure((0, 0)), both)
        steps = jax.tree.map(lambda s, u: s.astype(u.dtype), steps, updates)
        return steps, AdamPState(moments.count, moments.mu, moments.nu, divisors)

    return optax.GradientTransformation(init, update)


def _decay_divisors(state: optax.OptState) -> optax.Updates:
    [(_, adamp)] = find_states(state, AdamPState)
    return adamp.divisor


def _tangent(
    g: jax.Array, w: jax.Array, step: jax.Array, view: tuple[int, ...], axes: int, delta: float, eps: float
) -> tuple[jax.Array, jax.Array]:
    """The step without its part along the weight, and whether the weight is scale-invariant.

    Args:
      g, w, step: gradient, weight and step, (*layers, …).
      view: the dims that form one vector: those of a channel, or of the whole tensor.
      axes: the number of layer axes.
      delta, eps: of `scale_by_adamp`.

    Returns:
      The tangential step, and one bool per layer, (*layers, 1, …).
    """

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(a * b, axis=view, keepdims=True)

    length = jnp.sqrt(dot(w, w))
    cosine = jnp.abs(dot(g, w)) / jnp.maximum(jnp.sqrt(dot(g, g)) * length, eps)
    size = math.prod(w.shape[i] for i in view)
    largest = jnp.max(cosine, axis=tuple(range(axes, w.ndim)))
    direction = w / (length + eps)
    return step - direction * dot(direction, step), over_tensor(largest < delta / size**0.5, w)


ADAMP = OptimizerKind(
    scale_by=scale_by_adamp,
    not_galore="it compares whole gradients with weights",
    decay_divisors=lambda config: _decay_divisors,
    second_moment=AdamPState,
)
