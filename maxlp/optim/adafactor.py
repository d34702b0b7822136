"""Adafactor for stacked parameters: a second moment of rows and columns instead of entries."""

from collections.abc import Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from maxlp.optim.config import Conflict, OptimizerConfig, OptimizerKind
from maxlp.optim.tree_utils import over_tensor, tensor_axes, widened
from maxlp.schema import CountOrZero, DecayRate, PositiveFraction, Range

EPSILON = 1e-30  # the paper's ε₁, added to squares


def scale_by_adafactor(
    mu_dtype: Any = None,
    *,
    momentum: DecayRate = 0.0,
    decay_rate: PositiveFraction = 0.8,
    min_dim_size_to_factor: CountOrZero = 128,
    clipping_threshold: Annotated[float, Range(above=0, infinite=True)] = 1.0,
) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018, arXiv:1804.04235, algorithm 4) with an external learning rate.

    The second moment of a matrix is stored as its row and column means, and the step of each tensor of
    each layer is clipped to an RMS of `clipping_threshold`. The two largest dims of a tensor are factored.

    Args:
      mu_dtype: dtype of the momentum; None for the parameter's.
      momentum: decay rate of an average of the steps; 0 keeps none.
      decay_rate: the second moment decays at the rate 1 - t^-decay_rate.
      min_dim_size_to_factor: tensors whose second largest dim is smaller keep the whole moment.
      clipping_threshold: the largest RMS of a step.
    """

    def clip(updates: optax.Updates, params: optax.Params | None = None) -> optax.Updates:
        del params

        def one(path: KeyPath, u: jax.Array) -> jax.Array:
            rms = jnp.sqrt(jnp.mean(jnp.square(widened(u)), axis=tensor_axes(path, u)))
            return (u / over_tensor(jnp.maximum(1.0, rms / clipping_threshold), u)).astype(u.dtype)

        return jax.tree.map_with_path(one, updates)

    return optax.chain(
        _scale_by_factored_rms(decay_rate, min_dim_size_to_factor),
        optax.stateless(clip),
        optax.ema(momentum, debias=False, accumulator_dtype=mu_dtype) if momentum else optax.identity(),
    )


def _scale_by_factored_rms(decay_rate: float, min_dim_size_to_factor: int) -> optax.GradientTransformation:
    """`optax.scale_by_factored_rms` for the tensor of each layer, with the same state.

    Optax would factor the two largest dims of a stack, of which one may be the layers.
    """

    def factored(path: KeyPath, p: jax.Array) -> list[int]:
        """The two dims that are factored, the smaller one first; none if the moment is kept whole."""
        dims = sorted(tensor_axes(path, p), key=p.shape.__getitem__)[-2:]
        return dims if len(dims) == 2 and p.shape[dims[0]] >= min_dim_size_to_factor else []

    def init(params: optax.Params) -> optax.FactoredState:
        def moments(path: KeyPath, p: jax.Array) -> tuple[jax.Array, ...]:
            none, dims = jnp.zeros((1,), p.dtype), factored(path, p)
            if not dims:
                return none, none, jnp.zeros_like(p)
            row, column = (jnp.zeros(p.shape[:dim] + p.shape[dim + 1 :], p.dtype) for dim in dims[::-1])
            return row, column, none

        found = jax.tree.map_with_path(moments, params)
        return optax.FactoredState(jnp.zeros([], jnp.int32), *_transposed(found, params, 3))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        del params
        count = optax.safe_increment(state.count)
        weight = count.astype(jnp.float32) ** -decay_rate

        def one(path: KeyPath, g: jax.Array, row: jax.Array, column: jax.Array, whole: jax.Array) -> tuple:
            square, dims = jnp.square(g) + EPSILON, factored(path, g)
            if not dims:
                whole = _average(whole, square, weight)
                return g * whole**-0.5, row, column, whole
            small, large = dims
            row = _average(row, jnp.mean(square, large), weight)
            column = _average(column, jnp.mean(square, small), weight)
            rows, columns = jnp.expand_dims(row, large), jnp.expand_dims(column, small)
            share = rows / jnp.mean(rows, small, keepdims=True)
            return g * share**-0.5 * columns**-0.5, row, column, whole

        found = jax.tree.map_with_path(one, updates, state.v_row, state.v_col, state.v)
        updates, *moments = _transposed(found, updates, 4)
        return updates, optax.FactoredState(count, *moments)

    return optax.GradientTransformation(init, update)


def _average(old: jax.Array, new: jax.Array, weight: Any) -> Any:
    return ((1 - weight) * old + weight * new).astype(old.dtype)


def _transposed(tree: Any, like: Any, size: int) -> tuple:
    """A tuple of trees, from a tree of tuples."""
    return jax.tree.transpose(jax.tree.structure(like), jax.tree.structure((0,) * size), tree)


def _conflicts(config: OptimizerConfig) -> Iterator[Conflict]:
    """The keys that Adafactor cannot work with."""
    if config.galore is not None and config.galore.moments != "keep":
        yield "galore.moments", config.galore.moments, "its moments are factored; set galore.moments='keep'"
    if config.mu_dtype is not None and not config.options.get("momentum"):
        reason = "without options.momentum it has no first moment; unset mu_dtype"
        yield "mu_dtype", config.mu_dtype, reason
    if config.low_bit is not None:
        reason = "its moments are factored; leave low_bit.mu and .nu unset"
        yield "low_bit.mu", config.low_bit.mu, reason


ADAFACTOR = OptimizerKind(scale_by=scale_by_adafactor, conflicts=_conflicts)
