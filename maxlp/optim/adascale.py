"""AdaScale SGD: a larger batch takes longer and fewer steps, as far as the gradient noise allows.

A batch S times as large has a gradient with 1/S of the variance. Where noise dominates, S steps of the
small batch become one step S times as long; where the gradient is nearly exact, a large batch is worth no
more than a small one. Johnson et al. 2020 (arXiv:2007.05105, algorithm 1) measure which case holds. With
the gradients g_i of n equal parts of the batch (microbatches, replicas) and their mean ḡ

    σ² = S · (Σ‖g_i‖²/n - ‖ḡ‖²) / (n - 1)        variance of a gradient of the small batch
    μ² = ‖ḡ‖² - σ²/S                             its squared mean
    gain = (σ² + μ²) / (σ²/S + μ²)               in [1, S], from running means of σ² and μ²
    θ ← θ - gain · lr(τ) · update                τ ← τ + gain

τ counts steps of the small batch: the schedule is that of the small batch, and the run ends at its τ.

The gain is derived for updates that are linear in the gradient, as those of SGD with momentum are. Adam and
its relatives divide by the gradient's own size, noise included, so that their step already grows with the
batch: the gain would count the batch twice.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from maxlp.optim.tree_utils import find_states, widened

REPORTED = ("learning_rate", "gain", "tau")  # attributes of the state that are metrics of a run


def refusal(gain: float, rows: int, microbatches: int) -> str | None:
    """The message for a batch that AdaScale cannot scale by at most ``gain``; see `run.constraints`."""
    if gain > rows:
        return f"optimizer.adascale={gain} divides data.batch_size={rows} to less than a row; lower it"
    if microbatches > 1:
        return None
    return (
        f"optimizer.adascale={gain} needs train.microbatches of at least 2, because one gradient has no "
        "variance; raise train.microbatches"
    )


class AdascaleState(NamedTuple):
    """What has been measured; scalars.

    τ is in two parts because a float32 would round the gains that it adds: at a million steps to multiples
    of 1/16, and beyond 2^24 gains of 1 to nothing.

    Attributes:
      whole_steps: int32, the integer part of τ, the finished steps of the small batch.
      part_of_step: the rest of τ, in [0, 1); float32 like the following ones.
      gain: of the last update.
      learning_rate: of the last update, the gain included.
      variance, squared_mean: running means of σ² and μ², each times the same weight, which cancels.
    """

    whole_steps: jax.typing.ArrayLike
    part_of_step: jax.typing.ArrayLike
    gain: jax.typing.ArrayLike
    learning_rate: jax.typing.ArrayLike
    variance: jax.typing.ArrayLike
    squared_mean: jax.typing.ArrayLike

    @property
    def tau(self) -> jax.Array:
        """τ as a float32, as the schedule and the metrics take it."""
        return jnp.asarray(self.whole_steps + self.part_of_step, jnp.float32)


def scale_by_adascale(
    schedule: optax.Schedule, *, scale: float, samples: int
) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by -gain · schedule(τ), as the last transformation of a chain.

    Its `update` needs the keywords `mean_of_squares`, Σ‖g_i‖²/n, and `square_of_mean`, ‖ḡ‖², of the raw
    gradients: see `update_arguments`. For momentum, put `sgd.scale_by_momentum` in front.

    Args:
      schedule: maps τ to the learning rate of the small batch.
      scale: S, the ratio of the batch to the small batch.
      samples: n, the number of parts with a gradient of their own; at least 2.

    Raises:
      ValueError: fewer than two samples, or a scale below 1.
    """
    if samples < 2:
        raise ValueError(f"{samples=} must be at least 2: one gradient has no variance")
    if scale < 1:
        raise ValueError(f"{scale=} must be at least 1")
    keep = max(1 - samples / 1000, 0.0)  # the decay rate of the running means, the paper's

    def init(params: optax.Params) -> AdascaleState:
        del params
        zeros = AdascaleState(*(jnp.zeros([], jnp.float32) for _ in AdascaleState._fields))
        return zeros._replace(whole_steps=jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        mean_of_squares: jax.Array,
        square_of_mean: jax.Array,
        **extra: Any,
    ) -> Any:
        del params, extra
        # Estimates of numbers that are not negative: clipped before they are averaged, as in fairscale.
        variance = jnp.maximum(scale * (mean_of_squares - square_of_mean) / (samples - 1), 0.0)
        squared_mean = jnp.maximum(square_of_mean - variance / scale, 0.0)
        variance = keep * state.variance + (1 - keep) * variance
        squared_mean = keep * state.squared_mean + (1 - keep) * squared_mean
        gain = _gain(variance, squared_mean, scale)
        rate = jnp.asarray(gain * schedule(state.tau), jnp.float32)
        updates = jax.tree.map(lambda u: (-rate * u).astype(u.dtype), updates)
        more = state.part_of_step + gain
        whole = jnp.floor(more)
        steps = state.whole_steps + whole.astype(jnp.int32)
        return updates, AdascaleState(steps, more - whole, gain, rate, variance, squared_mean)

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def _gain(variance: jax.Array, squared_mean: jax.Array, scale: float) -> jax.Array:
    """The gain in [1, scale]; 1 where all gradients were zero."""
    of_batch = variance / scale + squared_mean
    gain = jnp.where(of_batch > 0, (variance + squared_mean) / jnp.where(of_batch > 0, of_batch, 1.0), 1.0)
    return jnp.clip(gain, 1.0, scale)


# --- in the train step ----------------------------------------------------------------------------------


def update_arguments(grads: optax.Updates, metrics: dict[str, Any]) -> dict[str, jax.Array]:
    """The keywords of `scale_by_adascale`'s update in a train step.

    Args:
      grads: the gradient of the batch, before clipping.
      metrics: with ``microbatch_grad_norm``, the root of the mean ‖g_i‖² of its microbatches.
    """
    return {
        "mean_of_squares": jnp.square(metrics["microbatch_grad_norm"]),
        "square_of_mean": cast(jax.Array, optax.tree.norm(widened(grads), squared=True)),
    }


def metrics_of(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """The ``learning_rate`` and the ``gain`` of the last update, ``tau`` after it, and the ``noise_scale``.

    The last is σ²/μ², at most a million: a batch that many times as large as the small one gains half of
    the most that any batch gains (the simple noise scale of McCandlish et al. 2018, arXiv:1812.06162).
    """
    [(_, state)] = find_states(opt_state, AdascaleState)
    noise_scale = state.variance / jnp.maximum(state.squared_mean, 1e-6 * state.variance)
    found = {name: getattr(state, name) for name in REPORTED}
    return found | {"noise_scale": jnp.where(state.variance > 0, noise_scale, 0.0)}
