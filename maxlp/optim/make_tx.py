"""Builds a run's optimizer, one optax chain, from the config:

    clip → rescale → decoupled weight decay → learning rate (with AdaScale, times its gain)

    clip    = by global norm, or AdaGC, which clips by global norm in its warm-up
    rescale = low_bit(galore(scale_by))              both wrappers optional

Wrappers for parameters in 16 bits and for offloading go around the chain.
"""

import dataclasses
import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxlp.optim.config import SHARED, OptimizerConfig
from maxlp.optim.rms import Rms, make_rms
from maxlp.optim.schedules import make_schedule
from maxlp.optim.tree_utils import find_states, leaf_name, widened


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A run's optimizer.

    Attributes:
      tx: the gradient transformation.
      schedule: the learning rate as a function of the number of finished updates.
      rms: RMS_t of each parameter, as a function of gradients and state: see `rms.make_rms`.
    """

    tx: optax.GradientTransformation
    schedule: optax.Schedule
    rms: Rms

    def rate_of_last_update(self, opt_state: optax.OptState) -> dict[str, jax.Array]:
        """The metric ``learning_rate``; rejected steps do not advance the schedule."""
        [(_, state)] = find_states(opt_state, optax.ScaleByScheduleState)
        rate = self.schedule(jnp.maximum(state.count - 1, 0))
        return {"learning_rate": jnp.asarray(rate, jnp.float32)}


def make_tx(
    config: OptimizerConfig, *, total_steps: int, microbatches: int = 1, seed: int = 0
) -> Optimizer:
    """Builds the optimizer of a run.

    AdamW is Loshchilov & Hutter 2019 (arXiv:1711.05101, algorithm 2) in its common form: the decay has the
    learning rate as a factor, `p -= lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * p)`.

    Args:
      config: the `optimizer` section.
      total_steps: updates of the whole run.
      microbatches: of each update, whose gradients AdaScale compares.
      seed: of the stochastic rounding of bfloat16 parameters.

    Raises:
      ValueError: an unknown option, or a schedule that does not fit into `total_steps`.
    """
    schedule = make_schedule(
        config.schedule,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        total_steps=total_steps,
        final_lr_fraction=config.final_lr_fraction,
        decay_fraction=config.decay_fraction,
    )
    clip = _clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    if config.adagc is not None:
        from maxlp.optim.adagc import clip_by_own_norms

        clip = clip_by_own_norms(config.adagc, config.clip_norm)
    mask = functools.partial(decay_mask, decay_embeddings=config.decay_embeddings)
    middle = _rescale(config), optax.add_decayed_weights(config.weight_decay, mask)
    if divisors := config.kind.decay_divisors(config):
        from maxlp.optim.divided_decay import divide_decay

        middle = (divide_decay(*middle, divisors),)
    tx = optax.chain(clip, *middle, _learning_rate(config, schedule, microbatches))
    if config.kind.averages:
        tx = optax.contrib.schedule_free(tx, lambda t: schedule(t - 1), config.b1)  # its first t is 1
    if config.param_rounding == "nearest":
        from maxlp.optim.float16_params import float16_params

        tx = float16_params(tx)
    elif config.param_rounding is not None:
        from maxlp.optim.pure_bf16 import pure_bf16

        tx = pure_bf16(tx, method=config.param_rounding, seed=seed)
    if config.offload:
        from maxlp.optim.offload import offload

        tx = offload(tx)
    return Optimizer(tx, schedule, make_rms(config))


def _clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` in float32; optax sums the squares of 16-bit gradients in their dtype."""
    clip = optax.clip_by_global_norm(max_norm)

    def clipped(grads: optax.Updates, _: optax.Params | None) -> optax.Updates:
        in_float32, _ = clip.update(widened(grads), clip.init(grads))
        return optax.tree.cast_like(in_float32, grads)

    return optax.stateless(clipped)


def _learning_rate(
    config: OptimizerConfig, schedule: optax.Schedule, microbatches: int
) -> optax.GradientTransformation:
    """Multiplies by the negative learning rate, the last transformation of the chain."""
    if config.adascale is None:
        return optax.scale_by_learning_rate(schedule)
    from maxlp.optim.adascale import scale_by_adascale

    return scale_by_adascale(schedule, scale=config.adascale, samples=microbatches)


def _rescale(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optimizer's rescaling, inside GaLore and low-bit moments if the config sets them."""
    scale_by = config.kind.scale_by
    takes = inspect.signature(scale_by).parameters
    if config.mu_dtype is not None and "mu_dtype" not in takes:
        raise ValueError(
            f"mu_dtype={config.mu_dtype!r} cannot be combined with name={config.name!r}, which has no "
            "first moment; leave mu_dtype unset"
        )
    shared = {key: getattr(config, key) for key in SHARED if key in takes}
    rescale = scale_by(**shared, **config.options)
    if config.galore is not None:
        from maxlp.optim.galore import galore

        rescale = galore(rescale, config.galore)
    if config.low_bit is not None:
        from maxlp.optim.low_bit import low_bit

        rescale = low_bit(rescale, config.low_bit)
    return rescale


class AveragePart(NamedTuple):
    """The part of an `optax.contrib.ScheduleFreeState` that determines the average."""

    b1: jax.Array
    z: optax.Params


def eval_params(opt_state: Any, params: optax.Params) -> optax.Params:
    """The parameters to evaluate and to publish: the average of schedule_free_adamw, else `params`.

    Args:
      opt_state: a state of a transformation made by `make_tx`, or its `schedule_free.eval_part`.
      params: the trained parameters.
    """
    found = find_states(opt_state, optax.contrib.ScheduleFreeState, AveragePart)
    if not found:
        return params
    _, state = found[0]
    return optax.contrib.schedule_free_eval_params(state, params)


def decay_mask(params: optax.Params, decay_embeddings: bool) -> Any:
    """The tensors with weight decay, as a tree of bools like `params`.

    The last part of a tensor's name decides: `kernel` and an adapter's `a` and `b` decay, `embedding` only
    with `decay_embeddings`, all others (`scale`, `bias`, a logit scale, a class token …) do not. The rank
    cannot decide: a norm scale stacked over layers is an (L, D) array and still a scale.
    """
    decayed = {"kernel", "a", "b"}
    if decay_embeddings:
        decayed.add("embedding")
    return jax.tree.map_with_path(lambda path, _: leaf_name(path) in decayed, params)
