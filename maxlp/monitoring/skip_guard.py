"""A guard against loss spikes that skips a step on the device.

A batch that makes the loss or the gradient norm infinite, or far larger than in the preceding steps, has no
effect: the train step leaves parameters, model state and optimizer state as they were. This is decided on
the device, so that the host need not wait for a step before it starts the next. The losses and norms of the
last `window` steps are part of the training state and of its checkpoints. They include those of skipped
steps, so that a persistent change of level is soon accepted.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from maxlp.monitoring.spikes import SpikeConfig

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SkipGuard:
    """A gate of the train step that accepts finite losses and gradient norms close to the recent ones.

    Its state is ``{"seen": int32 (), "values": float32 (2, window)}``: the number of finite steps so far,
    and a ring buffer with the losses and the gradient norms of the last of them.
    """

    config: SpikeConfig

    def init(self) -> State:
        return {"seen": jnp.zeros((), jnp.int32), "values": jnp.zeros((2, self.config.window), jnp.float32)}

    def accept(self, state: State, metrics: State) -> tuple[jax.Array, State, State]:
        """Decides whether a step counts.

        Args:
          state: as left by the previous step.
          metrics: of this step, with the scalars "loss" and "grad_norm".

        Returns:
          (accepted, new state, additional metrics): a bool scalar, the state with this step's values if
          they are finite, and no metrics.
        """
        new = jnp.stack([metrics["loss"], metrics["grad_norm"]]).astype(jnp.float32)
        seen, values = state["seen"], state["values"]
        count = jnp.minimum(seen, self.config.window)
        filled = jnp.arange(self.config.window) < count
        mean = jnp.sum(jnp.where(filled, values, 0), axis=1) / jnp.maximum(count, 1)
        deviations = jnp.where(filled, values - mean[:, None], 0)
        std = jnp.sqrt(jnp.sum(jnp.square(deviations), axis=1) / jnp.maximum(count, 1))
        stands_out = (new > mean + self.config.guard_threshold * std) & (std > 0)
        finite = jnp.isfinite(new).all()
        accepted = finite & ~(stands_out.any() & (count >= self.config.min_history))
        written = values.at[:, seen % self.config.window].set(new)
        return accepted, {"seen": seen + finite, "values": jnp.where(finite, written, values)}, {}
