"""What a loss spike is: one definition for the live run, the guards, the report and the benchmarks.

The thresholds are configurable because the published ones could not be confirmed. Wortsman et al. 2023
(arXiv:2304.13013) are reported to count a loss spike at 3.2 running standard deviations above the running
mean and an RMS spike at RMS_t above 2.3; the authors' training code saves its state at RMS_t > 1.8. They
find that RMS_t spikes precede loss spikes by 1 to 8 steps.
"""

import collections
import dataclasses
import math
from typing import Annotated, Any, NamedTuple

import numpy as np

from maxlp import schema
from maxlp.schema import Count, CountOrZero, OneOf, Positive

GUARDS = ("off", "skip", "rollback")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """What counts as a spike and what is done about it: the config's ``spikes`` section.

    Attributes:
      guard: "off" only records spikes. "skip" does not apply the update of a step whose loss or gradient
        norm is not finite or stands out. "rollback" returns to a checkpoint from before such a loss and
        skips the batches around it.
      statistics: whether every step measures RMS_t and the gradient norm of each tensor.
      update_ratios: whether every step also measures ‖update‖ / ‖weight‖ of each tensor. On a GPU this
        reads the parameters once more, and keeps the updates of 16-bit parameters in float32.
      window: number of preceding finite losses that the mean and the standard deviation are taken over.
      threshold: a loss spikes at this many standard deviations above the mean.
      min_history: number of losses before which nothing counts as a spike.
      merge_steps: a spike at most this many steps after another one belongs to it.
      rms_threshold: a tensor spikes when its RMS_t is above this.
      lead: number of steps before a loss spike in which an RMS_t spike predicts it.
      guard_threshold: the guard acts at this many standard deviations; by default far above `threshold`,
        so that it does not act on noise. "rollback" acts only on spikes, so never below `threshold`.
      rewind_steps: "rollback" returns to a checkpoint at least this much older than the spike, if there
        is one.
      skip_batches: "rollback" skips this many batches, and at least those up to the spike. (PaLM,
        Chowdhery et al. 2022, section 5.1: about 100 steps back, 200 to 500 batches skipped.)
      max_actions: after this many skips in a row, or rollbacks in total, the run stops with an error. A
        skip does not count while the loss scale of float16 training falls.

    Raises:
      ValueError: an unknown guard, a number below its lower bound, or `update_ratios` without `statistics`.
    """

    guard: Annotated[str, OneOf(GUARDS)] = "off"
    statistics: bool = True
    update_ratios: bool = False
    window: Count = 64
    threshold: Positive = 3.2
    min_history: Count = 16
    merge_steps: CountOrZero = 10
    rms_threshold: Positive = 1.8
    lead: Count = 8
    guard_threshold: Positive = 6.0
    rewind_steps: CountOrZero = 100
    skip_batches: CountOrZero = 200
    max_actions: Count = 10

    def __post_init__(self) -> None:
        schema.check(self)
        if self.window < self.min_history:
            raise ValueError(f"window={self.window} must be at least min_history={self.min_history}")
        if self.update_ratios and not self.statistics:
            raise ValueError("update_ratios=True needs statistics=True")


class Spike(NamedTuple):
    """A loss that is `sigmas` standard deviations above the `mean` of those before it.

    `begins` is False where the loss belongs to a spike that began a few steps earlier.
    """

    step: int
    loss: float
    mean: float
    sigmas: float
    begins: bool = True


class Detector:
    """Finds the spikes among losses that arrive one by one.

    Its state can be saved, so that a resumed run finds the same spikes as an uninterrupted one.
    """

    def __init__(self, config: SpikeConfig) -> None:
        self._config = config
        self._losses: collections.deque[float] = collections.deque(maxlen=config.window)
        self._last: int | None = None  # step of the last loss that stood out

    def observe(self, step: int, loss: float) -> Spike | None:
        """Returns the spike that this loss belongs to, if any; a loss that is not finite is always one."""
        spike = self._stands_out(step, loss)
        if math.isfinite(loss):
            self._losses.append(loss)
        if spike is None:
            return None
        merged = self._last is not None and step - self._last <= self._config.merge_steps
        self._last = step
        return spike._replace(begins=not merged)

    def _stands_out(self, step: int, loss: float) -> Spike | None:
        before = np.array(self._losses, np.float64)
        mean = float(before.mean()) if len(before) else math.nan
        if not math.isfinite(loss):
            return Spike(step, loss, mean, math.inf)
        std = float(before.std()) if len(before) >= self._config.min_history else 0.0
        if std == 0 or loss <= mean + self._config.threshold * std:
            return None
        return Spike(step, loss, mean, (loss - mean) / std)

    def get_state(self) -> dict[str, Any]:
        """The state, ready for JSON."""
        return {"losses": list(self._losses), "last": self._last}

    def set_state(self, state: dict[str, Any]) -> None:
        self._losses = collections.deque(state["losses"], maxlen=self._config.window)
        self._last = state["last"]
