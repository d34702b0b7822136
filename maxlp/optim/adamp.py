"""AdamP: Adam that does not lengthen the weights that a normalization makes scale-free.

Where a norm follows, a weight's length means nothing, but momentum makes it grow, and a longer weight
turns by a smaller angle: the effective learning rate decays by itself. Heo et al. 2021 (arXiv:2006.08217)
remove from the step its part along the weight, wherever the gradient itself is nearly at right angles to
the weight, which is what scale-freeness does to it:

    max |cos(g, w)| < δ / √dim(w)   →   step ← step - ŵ (ŵ·step), weight decay ← wd_ratio · weight decay

First for every output channel of a tensor, else for the tensor as a whole, else not.
"""

import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from maxlp.optim.tree_utils import LayerAxes, layer_axes, name_of, over_tensor, widened


class AdamPState(NamedTuple):
    """As `optax.ScaleByAdamState`, and by what the decay of each parameter is divided: (*layers)."""

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
    delta: float = 0.1,
    wd_ratio: float = 0.1,
    layer_axes: LayerAxes = layer_axes,
) -> optax.GradientTransformation:
    """Adam's direction less its radial part, for tensors of each layer with more than one dim.

    Args:
        b1, b2, eps: of Adam.
        mu_dtype: dtype of the first moment, None for float32.
        delta: how nearly at right angles: δ above.
        wd_ratio: factor of the weight decay where the radial part is removed.
        layer_axes: how many leading axes of the parameter at a path count its layers.

    Raises:
        ValueError: in the update, no parameters (as under `galore`, which shows this one a projection).
    """
    adam = optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype)

    def init(params: optax.Params) -> AdamPState:
        moments: Any = adam.init(widened(params))
        ones = jax.tree.map_with_path(lambda k, p: jnp.ones(p.shape[: layer_axes(k)]), params)
        return AdamPState(moments.count, moments.mu, moments.nu, ones)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        if params is None:
            raise ValueError("adamp needs the parameters; it cannot run inside galore")
        grads, weights = widened(updates), widened(params)
        old = optax.ScaleByAdamState(state.count, state.mu, state.nu)
        steps, moments = cast(tuple[Any, Any], adam.update(grads, old))

        def one(path: KeyPath, g: jax.Array, w: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
            axes, layers = layer_axes(path), jnp.ones(g.shape[: layer_axes(path)])
            if g.ndim - axes < 2:
                return step, layers
            every = tuple(range(axes, g.ndim))
            channel = axes if name_of(path).endswith("embedding") else g.ndim - 1  # a table's are its rows
            views = tuple(i for i in every if i != channel), every
            (by_channel, channel_free), (whole, free) = (
                _tangent(g, w, step, view, axes, delta, eps) for view in views
            )
            chosen = jnp.where(channel_free, by_channel, jnp.where(free, whole, step))
            return chosen, jnp.where((channel_free | free).reshape(layers.shape), 1 / wd_ratio, 1.0)

        both = jax.tree.map_with_path(one, grads, weights, steps)
        steps, divisors = jax.tree.transpose(jax.tree.structure(grads), jax.tree.structure((0, 0)), both)
        steps = jax.tree.map(lambda s, u: s.astype(u.dtype), steps, updates)
        return steps, AdamPState(moments.count, moments.mu, moments.nu, divisors)

    return optax.GradientTransformation(init, update)


def decay_divisors(state: optax.OptState) -> optax.Updates:
    """For `stable_adamw.divide_decay`."""
    return optax.tree.get(state, "divisor")


def _tangent(
    g: jax.Array, w: jax.Array, step: jax.Array, view: tuple[int, ...], axes: int, delta: float, eps: float
) -> tuple[jax.Array, jax.Array]:
    """The step without its part along `w`, in vectors along `view`; and whether those are scale-free.

    The verdict is one for each layer, bool (*layers, 1, …).
    """

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(a * b, axis=view, keepdims=True)

    length = jnp.sqrt(dot(w, w))
    cosine = jnp.abs(dot(g, w)) / jnp.maximum(jnp.sqrt(dot(g, g)) * length, eps)
    size = math.prod(w.shape[i] for i in view)
    largest = jnp.max(cosine, axis=tuple(range(axes, w.ndim)))
    direction = w / (length + eps)
    return step - direction * dot(direction, step), over_tensor(largest < delta / size**0.5, w)
