"""How much of a run is done."""

from collections.abc import Mapping
from typing import Any


class Progress:
    """Tells which step is the last one.

    A step counts as one step of the schedule, or with AdaScale as its gain, which only the device knows.
    So that the device rarely waits, the host reads the count of a step only if the run could have ended
    there. All processes read the same numbers.

    Args:
      total_steps: of the schedule.
      step: number of finished updates.
      done: finished steps of the schedule.
      fastest: the most that an update counts as.
    """

    def __init__(self, total_steps: int, step: int, done: float, *, fastest: float = 1.0) -> None:
        self.total_steps, self.done, self._step, self._fastest = total_steps, done, step, fastest

    def __str__(self) -> str:
        counted = "" if self.done == self._step else f"{self._step}, which counts as "
        return f"{counted}{self.done:.0f} of {self.total_steps}"

    @property
    def finished(self) -> bool:
        """Whether the run had ended at the newest step whose count is known."""
        return self.done >= self.total_steps

    def is_last(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Whether the run ends with this step.

        Args:
          metrics: of the step, on the device; with AdaScale among them ``tau``, the count after it.
        """
        # One update more than have been made, because the device adds up the gains with rounding.
        if self.done + self._fastest * (step + 1 - self._step) < self.total_steps:
            return False
        self._step, self.done = step, float(metrics.get("tau", step))
        return self.finished
