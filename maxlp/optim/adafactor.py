"""Adafactor for stacked parameters: a second moment of rows and columns instead of entries."""

from collections.abc import Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from maxlp.optim.config import Conflict, OptimizerConfig, OptimizerKind
from maxlp.optim.tree_utils import over_tensor, tensor_mean, widened
from maxlp.schema import CountOrZero, DecayRate, PositiveFraction, Range


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
    each layer is clipped to an RMS of `clipping_threshold`. The two largest dims are factored: a stack
    must have fewer layers than its matrices have rows.

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
            rms = jnp.sqrt(tensor_mean(path, jnp.square(widened(u))))
            return (u / over_tensor(jnp.maximum(1.0, rms / clipping_threshold), u)).astype(u.dtype)

        return jax.tree.map_with_path(one, updates)

    return optax.chain(
        _scale_by_factored_rms(decay_rate, min_dim_size_to_factor),
        optax.stateless(clip),
        optax.ema(momentum, debias=False, accumulator_dtype=mu_dtype) if momentum else optax.identity(),
    )


def _scale_by_factored_rms(decay_rate: float, min_dim_size_to_factor: int) -> optax.GradientTransformation:
    """`optax.scale_by_factored_rms` that also works without parameters, as inside GaLore.

    Optax reads only their shapes and dtypes, and those of the updates are the same.
    """
    factored = optax.scale_by_factored_rms(
        decay_rate=decay_rate, min_dim_size_to_factor=min_dim_size_to_factor
    )

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        return factored.update(updates, state, updates if params is None else params)

    return optax.GradientTransformation(factored.init, update)


def _conflicts(config: OptimizerConfig) -> Iterator[Conflict]:
    """The keys that Adafactor cannot work with."""
    if config.galore is not None and config.has_galore and config.galore.moments != "keep":
        yield "galore.moments", config.galore.moments, "its moments are factored; set galore.moments='keep'"
    if config.mu_dtype is not None and not config.options.get("momentum"):
        reason = "without options.momentum it has no first moment; unset mu_dtype"
        yield "mu_dtype", config.mu_dtype, reason
    if config.low_bit is not None:
        reason = "its moments are factored; leave low_bit.mu and .nu unset"
        yield "low_bit.mu", config.low_bit.mu, reason


ADAFACTOR = OptimizerKind(scale_by=scale_by_adafactor, conflicts=_conflicts)
