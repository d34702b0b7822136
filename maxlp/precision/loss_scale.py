"""Dynamic loss scaling: keeps float16 gradients between underflow and overflow.

The range of float16, 2^-24 to 65504, is too narrow for gradients. The loss is multiplied by a scale
before it is differentiated, and the float32 gradients are divided by it afterwards. The scale
adapts itself: it doubles after a number of steps in a row without an overflow, and halves at an
overflow, and that step is skipped (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2;
MPX, Gräfe & Trimpe 2025, arXiv:2507.03312, section 3.2).

Gradients are divided by the scale they were made with. (Code that adjusts the scale first and
divides by the new one, as MPX's does, trains with gradients of half the size on every step that
doubles it.) Scales are powers of two, so that multiplying and dividing by them rounds nothing.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from maxlp import schema
from maxlp.schema import Count, PowerOfTwo

State = dict[str, jax.Array]
Scale = Annotated[float, PowerOfTwo()]


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A gate (`core.gates`) that adapts the loss scale.

    Its state is ``{"scale": float32, "good_steps": int32}``, both scalars.

    Attributes:
      initial: the first scale.
      growth_interval: finite steps in a row after which the scale doubles.
      minimum, maximum: bounds of the scale. (The loss itself is float32, so it may exceed 65504.)
      per_tensor: the scale stays ``initial``; only overflowing tensors skip a step (`optim.skip_tensors`).

    Raises:
      ValueError: scales that are not powers of two or not in order, an interval below 1 step.
    """

    initial: Scale = 2.0**15
    growth_interval: Count = 2000
    minimum: Scale = 1.0
    maximum: Scale = 2.0**24
    per_tensor: bool = False

    def __post_init__(self):
        schema.check(self)
        if not self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                f"initial={self.initial} must lie between minimum={self.minimum} and maximum={self.maximum}"
            )

    def init(self) -> State:
        """The state before the first step."""
        return {"scale": jnp.float32(self.initial), "good_steps": jnp.int32(0)}

    def accept(self, state: State, metrics: dict[str, jax.Array]) -> tuple[jax.Array, State, State]:
        """Accepts a step if the norm of all of its gradients is finite.

        Args:
          metrics: of the step, with the scalar ``grad_norm``.

        Returns:
          whether the step is accepted (a bool scalar), the state with the next scale, and the
          metric ``loss_scale`` that the step used.
        """
        if self.per_tensor:
            # Not the state: a resumed run may have another `initial`.
            return jnp.bool_(True), self.init(), {"loss_scale": state["scale"]}
        finite = jnp.isfinite(metrics["grad_norm"])
        good_steps = jnp.where(finite, state["good_steps"] + 1, 0)
        grows = good_steps >= self.growth_interval
        factor = jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5)
        scale = jnp.clip(state["scale"] * factor, self.minimum, self.maximum)
        after = {"scale": scale, "good_steps": jnp.where(grows, 0, good_steps)}
        return finite, after, {"loss_scale": state["scale"]}
