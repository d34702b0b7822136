"""A trace of a few steps for XProf (``pip install xprof tensorboard``)."""

from pathlib import Path
from typing import Any

import jax


class Profiler:
    """The config's ``profile`` section: a trace of some steps of this process, in ``workdir/profile``.

    Args:
      start: the first step in the trace, of this start of the run: 1 is its first (which is slow); 0: no
        trace.
      steps: how many.
    """

    def __init__(self, workdir: Path, *, start: int = 0, steps: int = 3):
        if start < 0 or steps < 1:
            raise ValueError(
                f"start={start}, steps={steps}: start is 1 or later (0: never), steps 1 or more"
            )
        self.directory = workdir / "profile"
        self.first, self.last = start, start + steps - 1
        self.running = False

    def before(self, nth: int) -> None:
        """To be called before the nth step of this start is queued."""
        if nth == self.first:
            jax.profiler.start_trace(self.directory)
            self.running = True

    def after(self, nth: int, results: Any) -> None:
        """To be called when the nth step was queued, with what it returns."""
        if self.running and nth == self.last:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
