"""APOLLO: Adam's scales of channels or tensors, estimated from a random projection of the gradient.

For a kernel with gradient G whose short side is m (written here as the first; Zhu et al. 2024,
arXiv:2412.05270, algorithm 1), with a random P, (r, m), of variance 1/r, drawn anew every
`update_proj_gap` steps

    R = P G                                  (r, n)   what Adam sees: its moments have r/m of the size
    s = ‖Adam(R)‖ / ‖R‖                      of each column (APOLLO), or of the whole tensor (APOLLO-Mini)
    step = scale · G · s                     with a norm of at most growth · that of the step before

There is no SVD, and P is computed from the seed when it is needed. The RMS of a step is about √(r / m) of
that of Adam's, times `scale`.
"""

from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from maxlp.optim.config import OptimizerKind
from maxlp.optim.tree_utils import HIDDEN_KERNELS, Targets, matches, over_tensor, widened
from maxlp.schema import Count, OneOf, Positive, Range, Seed

Growth = Annotated[float, Range(at_least=1, infinite=True)]


class ApolloState(NamedTuple):
    """Finished updates, Adam's state for projected gradients, and the norm of each kernel's last step."""

    count: jax.typing.ArrayLike
    adam: optax.ScaleByAdamState
    norms: optax.Updates


def scale_by_apollo(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    mu_dtype: Any = None,
    *,
    rank: Count = 256,
    scale: Positive = 1.0,
    granularity: Annotated[str, OneOf(("channel", "tensor"))] = "channel",
    growth: Growth = 1.01,
    update_proj_gap: Count = 200,
    targets: Targets = HIDDEN_KERNELS,
    seed: Seed = 0,
) -> optax.GradientTransformation:
    """APOLLO for the matrices of the layers, Adam for all other parameters.

    Args:
      b1, b2, eps: of Adam.
      mu_dtype: dtype of the first moments; None for float32.
      rank: r, at most the short side of a kernel; the paper has a quarter of the width.
      scale: factor on the steps of the kernels.
      granularity: what shares a scale: a "channel", one entry of the long side, or the "tensor" of a layer.
      growth: the largest ratio of the norms of successive steps; `inf` does not limit them.
      update_proj_gap: steps between draws of P.
      targets: regular expressions, searched in names such as `layers/attn/q_proj/kernel`.
      seed: seed of P, which all kernels of a size and their layers share.
    """
    adam = optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype)

    def init(params: optax.Params) -> ApolloState:
        def norm(path: KeyPath, p: jax.Array) -> Any:
            return jnp.zeros(p.shape[:-2]) if matches(path, targets) else optax.MaskedNode()

        norms, wide = jax.tree.map_with_path(norm, params), widened(params)
        low_rank = jax.tree.map(lambda p, n: _zeros_projected(p, n, rank), wide, norms)
        moments: Any = adam.init(low_rank)
        return ApolloState(jnp.zeros([], jnp.int32), moments, norms)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        del params
        key = jax.random.fold_in(jax.random.key(seed), state.count // update_proj_gap)
        grads = widened(updates)
        low_rank = jax.tree.map(lambda g, n: _projected(g, n, rank, key), grads, state.norms)
        scaled, moments = cast(tuple[Any, Any], adam.update(low_rank, state.adam))

        def step(g: jax.Array, r: jax.Array, u: jax.Array, norm: Any) -> jax.Array:
            if not _is_target(norm):
                return u
            axes = (_short_dim(g.shape),) if granularity == "channel" else (-2, -1)
            length, unit = (jnp.linalg.norm(x, axis=axes, keepdims=True) for x in (u, r))
            # Where all squares underflow, the unit of gradients other than 0 is 0: they make no step.
            return scale * g * length / jnp.where(unit > 0, unit, jnp.inf)

        steps = jax.tree.map(step, grads, low_rank, scaled, state.norms)
        factors = jax.tree.map(lambda u, n: _shrinking(u, n, growth), steps, state.norms)
        steps = jax.tree.map(lambda u, f: u * over_tensor(f, u) if _is_target(f) else u, steps, factors)
        norms = jax.tree.map(lambda u, n: _norm(u) if _is_target(n) else n, steps, state.norms)
        steps = jax.tree.map(lambda s, u: s.astype(u.dtype), steps, updates)
        return steps, ApolloState(optax.safe_increment(state.count), moments, norms)

    return optax.GradientTransformation(init, update)


def scale_by_apollo_mini(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    mu_dtype: Any = None,
    *,
    scale: Positive = 128**0.5,
    growth: Growth = 1.01,
    update_proj_gap: Count = 200,
    targets: Targets = HIDDEN_KERNELS,
    seed: Seed = 0,
) -> optax.GradientTransformation:
    """APOLLO of rank 1 with one scale a tensor; for the arguments see `scale_by_apollo`."""
    return scale_by_apollo(
        b1,
        b2,
        eps,
        mu_dtype,
        rank=1,
        scale=scale,
        granularity="tensor",
        growth=growth,
        update_proj_gap=update_proj_gap,
        targets=targets,
        seed=seed,
    )


def _is_target(norm: Any) -> bool:
    return not isinstance(norm, optax.MaskedNode)


def _short_dim(shape: tuple[int, ...]) -> int:
    return -2 if shape[-2] <= shape[-1] else -1


def _zeros_projected(p: jax.Array, norm: Any, rank: int) -> jax.Array:
    """Zeros of the shape of a kernel's projected gradient; other parameters as they are."""
    if not _is_target(norm):
        return p
    shape, dim = list(p.shape), _short_dim(p.shape)
    shape[dim] = min(rank, shape[dim])
    return jnp.zeros(shape, p.dtype)


def _projected(g: jax.Array, norm: Any, rank: int, key: jax.Array) -> jax.Array:
    """The gradient that Adam sees."""
    if not _is_target(norm):
        return g
    dim = _short_dim(g.shape)
    rank = min(rank, g.shape[dim])
    p = jax.random.normal(key, (rank, g.shape[dim]), g.dtype) / rank**0.5
    return p @ g if dim == -2 else g @ p.T


def _norm(u: jax.Array) -> jax.Array:
    return jnp.linalg.norm(u, axis=(-2, -1))


def _shrinking(u: jax.Array, norm: Any, growth: float) -> Any:
    """The factor that limits the growth of a step's norm; the first step has no limit."""
    if not _is_target(norm):
        return norm
    return jnp.where(norm > 0, jnp.minimum(1.0, growth * norm / _norm(u)), 1.0)


APOLLO, APOLLO_MINI = (
    OptimizerKind(scale_by=scale_by, not_galore="it projects gradients itself", matmuls="once")
    for scale_by in (scale_by_apollo, scale_by_apollo_mini)
)
