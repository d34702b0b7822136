"""A trace of a few steps for XProf (``pip install xprof tensorboard``)."""

from pathlib import Path
from typing import Any

import jax

from maxlp import schema
from maxlp.schema import Count, CountOrZero


class Profiler:
    """Records some steps of this process in ``workdir/profile``.

    Steps are counted from the launch of this process, not from step 0 of the run.

    Args:
      workdir: working directory of the run.
      start: first step of the trace; 1 is the first step, which is slow. 0 disables the trace.
      steps: number of steps.

    Raises:
      ValueError: an argument is out of range.
    """

    def __init__(self, workdir: Path, *, start: CountOrZero = 0, steps: Count = 3):
        schema.check_arguments(Profiler, start=start, steps=steps)
        self.directory = workdir / "profile"
        self.first, self.last = start, start + steps - 1
        self.running = False

    def before(self, nth: int) -> None:
        """Call before the nth step is dispatched."""
        if nth == self.first:
            jax.profiler.start_trace(self.directory)
            self.running = True

    def after(self, nth: int, results: Any) -> None:
        """Call after the nth step was dispatched, with the arrays that it returns."""
        if self.running and nth == self.last:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """Ends a trace that is still running."""
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
