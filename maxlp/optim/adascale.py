"""AdaScale SGD: a larger batch takes longer and fewer steps, as far as the gradient noise allows.

A batch S times as large has a gradient with 1/S of the variance. Where noise dominates, S steps of the
small batch become one step S times as long; where the gradient is nearly exact, a large batch is worth no
more than a small one. Johnson et al. 2020 (arXiv:2007.05105, algorithm 1) measure which case holds. With
the gradients g_i of n parts of the batch (microbatches, replicas) and their mean ḡ

    σ² = S/n · (Σ‖g_i‖² - n‖ḡ‖²) / (n - 1)      variance of a gradient of the small batch
    μ² = ‖ḡ‖² - σ²/S                             its squared mean
    gain = (σ² + μ²) / (σ²/S + μ²)               in [1, S]
    θ ← θ - gain · lr(τ) · update                τ ← τ + gain

τ counts steps of the small batch: the schedule is that of the small batch, and the run ends at its τ.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax


class AdascaleState(NamedTuple):
    """τ, and the running means of σ² and μ² with the weight that debiases them: float32 scalars."""

    tau: jax.typing.ArrayLike
    weight: jax.typing.ArrayLike
    variance: jax.typing.ArrayLike
    squared_mean: jax.typing.ArrayLike


def scale_by_adascale(
    schedule: optax.Schedule, *, scale: float, samples: int, smoothing: float | None = None
) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by -gain · schedule(τ), as the last transformation of a chain.

    Its `update` needs the keywords `sum_of_squares`, Σ‖g_i‖², and `square_of_mean`, ‖ḡ‖², of the raw
    gradients: see `sample_statistics`. For momentum, put `optax.trace` in front.

    Args:
      schedule: maps τ to the learning rate of the small batch.
      scale: S, the ratio of the batch to the small batch.
      samples: n, the number of parts with a gradient of their own; at least 2.
      smoothing: decay rate of the running means; None for max(1 - n/1000, 0), fairscale's choice.

    Raises:
      ValueError: fewer than two samples, or a scale below 1.
    """
    if samples < 2:
        raise ValueError(f"{samples=} must be at least 2: one gradient has no variance")
    if scale < 1:
        raise ValueError(f"{scale=} must be at least 1")
    keep = max(1 - samples / 1000, 0.0) if smoothing is None else smoothing

    def init(params: optax.Params) -> AdascaleState:
        del params
        return AdascaleState(*(jnp.zeros([], jnp.float32) for _ in AdascaleState._fields))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        sum_of_squares: jax.Array,
        square_of_mean: jax.Array,
        **extra: Any,
    ) -> Any:
        del params, extra
        spread = (sum_of_squares - samples * square_of_mean) / (samples - 1)
        variance = jnp.maximum(scale / samples * spread, 1e-6)
        squared_mean = jnp.maximum(square_of_mean - variance / scale, 0.0)
        new = AdascaleState(
            state.tau,
            keep * state.weight + (1 - keep),
            keep * state.variance + (1 - keep) * variance,
            keep * state.squared_mean + (1 - keep) * squared_mean,
        )
        gain = gain_of(new, scale)
        rate = -gain * schedule(state.tau)
        updates = jax.tree.map(lambda u: (rate * u).astype(u.dtype), updates)
        return updates, new._replace(tau=state.tau + gain)

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def gain_of(state: AdascaleState, scale: float) -> jax.Array:
    """The gain of the last step, in [1, scale]."""
    variance, squared_mean = state.variance / state.weight, state.squared_mean / state.weight
    return jnp.clip((variance + squared_mean) / (variance / scale + squared_mean), 1.0, scale)


def sample_statistics(grads: optax.Updates) -> tuple[optax.Updates, dict[str, jax.Array]]:
    """The mean of n gradients, and the keywords of `scale_by_adascale`'s update.

    Args:
      grads: a tree of (n, …) arrays.
    """
    mean = jax.tree.map(lambda g: jnp.mean(g, axis=0), grads)
    squares = optax.tree.norm(grads, squared=True), optax.tree.norm(mean, squared=True)
    return mean, {"sum_of_squares": squares[0], "square_of_mean": squares[1]}
