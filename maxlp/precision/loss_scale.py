"""Dynamic loss scaling: float16 gradients are kept between underflow and overflow.

float16 has the range of 2^-24 to 65504, too small for gradients. The loss is multiplied by a scale before
it is differentiated, the float32 gradients are divided by it afterwards, and the scale finds its own size:
it doubles after a number of steps in a row without an overflow, and halves at an overflow, whose step
changes nothing else (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; MPX, Gräfe & Trimpe 2025,
arXiv:2507.03312, section 3.2).

Gradients are divided by the scale they were made with. (Who adjusts the scale first and divides by the
new one, as MPX's code does, trains with gradients of half the size on every step that doubles it.) Scales
are powers of two, so that multiplying and dividing by them rounds nothing.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

State = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """How the scale moves; its state is ``{"scale": float32, "good_steps": int32}``, both scalars.

    Attributes:
      initial: the first scale.
      growth_interval: finite steps in a row after which the scale doubles.
      minimum, maximum: where it stops. (The loss itself is float32, so that the scale may exceed 65504.)

    Raises:
      ValueError: scales that are no powers of two or not in order, an interval below 1.
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    minimum: float = 1.0
    maximum: float = 2.0**24

    def __post_init__(self):
        for key in ("initial", "minimum", "maximum"):
            value = getattr(self, key)
            if not (0 < value < math.inf and math.frexp(value)[0] == 0.5):
                raise ValueError(f"precision.loss_scale.{key}={value} must be a power of two")
        if not self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                f"precision.loss_scale.initial={self.initial} must lie between minimum={self.minimum} and "
                f"maximum={self.maximum}"
            )
        if self.growth_interval < 1:
            raise ValueError(
                f"precision.loss_scale.growth_interval={self.growth_interval} must be 1 step or more"
            )

    def init(self) -> State:
        return {"scale": jnp.float32(self.initial), "good_steps": jnp.int32(0)}

    def accept(self, state: State, metrics: dict[str, jax.Array]) -> tuple[jax.Array, State, State]:
        """Whether a step counts (`step.Judge`): if the norm of all of its gradients is finite.

        Returns:
          the verdict, the state with the next scale, and the metric ``loss_scale`` that the step used.
        """
        finite = jnp.isfinite(metrics["grad_norm"])
        good_steps = jnp.where(finite, state["good_steps"] + 1, 0)
        grows = good_steps >= self.growth_interval
        factor = jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5)
        scale = jnp.clip(state["scale"] * factor, self.minimum, self.maximum)
        after = {"scale": scale, "good_steps": jnp.where(grows, 0, good_steps)}
        return finite, after, {"loss_scale": state["scale"]}
