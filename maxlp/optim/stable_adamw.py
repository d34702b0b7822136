"""StableAdamW: AdamW with shorter steps where the second moment lags behind the gradient.

After a quiet period v̂ is small. When the signal changes, the first large gradients are divided by a √v̂
that does not include them yet, and the step is far too long: this is how a loss spike begins. One number
per tensor detects it (Wortsman et al. 2023, arXiv:2304.13013, algorithm 2):

    RMS_t = √mean(g² / max(v̂, eps²))        about 1 as long as v̂ matches the gradient
    lr_t  = lr / max(1, RMS_t / d)          d = 1: update clipping, as in Adafactor
    θ    ← θ − lr_t·weight_decay·θ − lr_t·m̂ / (√v̂ + eps)

β2 can also grow with the number t of the step, as Adafactor's does, so that v̂ follows the gradient closely
at first and averages over many steps later:

    β2_t = 1 − t^(−λ)      and v̂ = v, because β2_1 = 0

This is not `optax.clip_by_block_rms` after Adam: that bounds m̂/√v̂, which the momentum has already
smoothed, and rarely acts at all.
"""

import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxlp import schema
from maxlp.optim.config import Divisors, OptimizerConfig, OptimizerKind
from maxlp.optim.rms import rms_of_tensor
from maxlp.optim.tree_utils import find_states, layer_axes, over_tensor, widened
from maxlp.schema import PositiveFraction, Range

ClipThreshold = Annotated[float, Range(above=0, infinite=True)]
CLIP_THRESHOLD = 1.0


class StableAdamState(NamedTuple):
    """`optax.ScaleByAdamState` with the RMS_t of the last update, (*layers) for each parameter."""

    count: jax.typing.ArrayLike
    mu: optax.Updates
    nu: optax.Updates
    rms: optax.Updates


def scale_by_stable_adam(
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-6,
    mu_dtype: Any = None,
    *,
    clip_threshold: ClipThreshold = CLIP_THRESHOLD,
    decay_rate: PositiveFraction | None = None,
) -> optax.GradientTransformation:
    """Adam's step divided by max(1, RMS_t / clip_threshold), for each tensor of each layer.

    Unclipped steps equal those of `optax.scale_by_adam`. Moments and RMS_t are at least float32.

    Args:
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: added to √v̂; eps² is also the lower bound of v̂ in RMS_t.
      mu_dtype: dtype of the first moment; None for float32.
      clip_threshold: d above; `inf` is Adam that records its RMS_t.
      decay_rate: λ above; None keeps β2 constant at b2.

    Raises:
      ValueError: clip_threshold is not positive, or decay_rate is not in (0, 1].
    """
    schema.check_arguments(scale_by_stable_adam, clip_threshold=clip_threshold, decay_rate=decay_rate)

    def second_moment(grads: optax.Updates, nu: optax.Updates, count: jax.typing.ArrayLike) -> tuple:
        """The new nu, and v̂."""
        if decay_rate is None:
            nu = optax.tree.update_moment_per_elem_norm(grads, nu, b2, 2)
            return nu, optax.tree.bias_correction(nu, b2, count)

        power = -decay_rate

        def average(g: jax.Array, v: jax.Array) -> jax.Array:
            weight = jnp.asarray(count, v.dtype) ** power  # 1 - β2 would have lost its last digits
            return weight * jnp.square(g) + (1 - weight) * v

        nu = jax.tree.map(average, grads, nu)
        return nu, nu

    def init(params: optax.Params) -> StableAdamState:
        zeros = optax.tree.zeros_like(widened(params))
        return StableAdamState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.cast(zeros, mu_dtype),
            nu=zeros,
            rms=jax.tree.map_with_path(lambda k, z: jnp.zeros(z.shape[: layer_axes(k)], z.dtype), zeros),
        )

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        del params
        count = optax.safe_increment(state.count)
        wide = widened(updates)
        mu = optax.tree.update_moment(wide, state.mu, b1, 1)
        mu_hat = optax.tree.bias_correction(mu, b1, count)
        nu, nu_hat = second_moment(wide, state.nu, count)

        def step(g: jax.Array, m: jax.Array, v: jax.Array, rms: jax.Array) -> jax.Array:
            u = m / (jnp.sqrt(v) + eps)
            return (u / over_tensor(step_divisor(rms, clip_threshold), u)).astype(g.dtype)

        rms_t = jax.tree.map_with_path(functools.partial(rms_of_tensor, eps=eps), wide, nu_hat)
        updates = jax.tree.map(step, updates, mu_hat, nu_hat, rms_t)
        return updates, StableAdamState(count, optax.tree.cast(mu, mu_dtype), nu, rms_t)

    return optax.GradientTransformation(init, update)


def step_divisor(rms: jax.Array, clip_threshold: float) -> jax.Array:
    """The divisor of the step, max(1, RMS_t / d)."""
    return jnp.maximum(1.0, rms / clip_threshold)


def last_rms(opt_state: optax.OptState) -> optax.Updates:
    """RMS_t of the last update, (*layers) for each parameter; inside GaLore, of the projected gradient."""
    [(_, state)] = find_states(opt_state, StableAdamState)
    return state.rms


def _decay_divisors(config: OptimizerConfig) -> Divisors | None:
    """The factor by which clipping shortens the step, which then shortens the decay too.

    Algorithm 2 and the authors' published reference do this. The optimizer of their training runs
    multiplied the decay by the unclipped rate.
    """
    if not config.decay_with_clip:
        return None
    clip_threshold = config.options.get("clip_threshold", CLIP_THRESHOLD)
    return lambda state: jax.tree.map(lambda rms: step_divisor(rms, clip_threshold), last_rms(state))


STABLE_ADAMW = OptimizerKind(
    scale_by=scale_by_stable_adam,
    decay_divisors=_decay_divisors,
    last_rms=last_rms,
    like_params=True,
    galore_rates=True,
)
