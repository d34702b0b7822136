"""How fast a run is, measured without slowing it down.

`Throughput` turns finished steps into tokens/s and, on devices with a published peak, MFU.
`DelayedFetch` brings the metrics of a step to the host one step later, so that the host waits for a step
only after the next one is dispatched. `monitoring.recorder` joins both with the outputs of a run.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from maxlp.runtime import cpu

T = TypeVar("T")


class DelayedFetch:
    """Keeps the metrics of the newest step on the device until the next step is dispatched.

    Where dispatching a step includes waiting for it (a single CPU device), there is nothing to delay.
    """

    def __init__(self) -> None:
        self._delays = not cpu.is_synchronous()
        self._pending: list[tuple[int, Any]] = []

    def push(self, step: int, metrics: Any, wait: bool = False) -> Iterator[tuple[int, Any]]:
        """Takes a step's device metrics and returns those that are due on the host.

        Args:
          step: number of finished updates.
          metrics: tree of JAX arrays.
          wait: also wait for this step, as before a pause and after the last step.

        Returns:
          An iterator of (step, tree of numpy arrays): the step before, unless it was returned already,
          and this one with `wait` or without a delay. Each item is yielded on arrival. Exhaust it
          before the next push.
        """
        for leaf in jax.tree.leaves(metrics):
            leaf.copy_to_host_async()
        done, self._pending = [*self._pending, (step, metrics)], []
        if self._delays and not wait:
            self._pending = [done.pop()]
        return ((step, jax.device_get(metrics)) for step, metrics in done)

    def flush(self) -> Iterator[tuple[int, Any]]:
        """Returns the step that `push` keeps, if any, as `push` does."""
        done, self._pending = self._pending, []
        return ((step, jax.device_get(metrics)) for step, metrics in done)


class Throughput:
    """Tokens (or images) per second, step time, MFU and remaining time (ETA) of finished steps.

    Counts the seconds between ticks, except those in `paused`. The first tick only starts the clock,
    because the time before it is compilation.

    Args:
      units_per_step: tokens or images per step, over all processes.
      flops_per_unit: FLOPs per token or image with (full, causal) attention.
      peak_flops: of one device, see `hardware.published_flops`; without it there is no MFU.
      num_devices: over all processes.
      total_steps: of the whole run, for the ETA.
      unit: what is counted; the metric is ``perf/<unit>_per_sec``.
      clock: returns seconds that never decrease.
    """

    def __init__(
        self,
        *,
        units_per_step: int,
        flops_per_unit: tuple[float, float],
        peak_flops: float | None,
        num_devices: int,
        total_steps: int,
        unit: str = "tokens",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._unit, self._units_per_step, self._flops_per_unit = unit, units_per_step, flops_per_unit
        self._peak_flops, self._num_devices = peak_flops, num_devices
        self._total_steps = total_steps
        self._clock = clock
        self._first: tuple[float, float] | None = None  # progress and time of the first tick
        self._step = self._reported_step = 0
        self._progress = 0.0
        self._last_tick = self._seconds = self._waited = 0.0

    def tick(self, step: int, progress: float | None = None) -> None:
        """Records that the result of `step` has just reached the host.

        Args:
          progress: how many of `total_steps` are finished, where a step counts as more than one (AdaScale).
        """
        self._progress = step if progress is None else progress
        now = self._clock()
        if self._first is None:
            self._first = (self._progress, now)
            self._reported_step, self._seconds, self._waited = step, 0.0, 0.0
        else:
            self._seconds += now - self._last_tick
        self._step, self._last_tick = step, now

    def waiting_for(self, batches: Iterator[T]) -> Iterator[T]:
        """Yields the batches and counts the seconds until each is available.

        The device works on the previous step meanwhile, so this is an upper bound of the delay that
        waiting for data can have caused. Where steps are not queued, it is the delay.
        """
        while True:
            start = self._clock()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waited += self._clock() - start
            yield batch

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time inside. Wait for the last step and tick it first."""
        start = self._clock()
        yield
        self._last_tick += self._clock() - start

    def report(self) -> dict[str, float]:
        """The ``perf/`` metrics of the steps since the last report; {} if there are none.

        ``perf/data_wait`` is the fraction of the time in which the loop waited for data, see
        `waiting_for`. ``perf/eta`` is in seconds; unlike the others it includes pauses and assumes that
        they continue at the same rate.
        """
        if self._first is None or self._step == self._reported_step:
            return {}
        step_time = self._seconds / (self._step - self._reported_step)
        data_wait = self._waited / self._seconds
        self._reported_step, self._seconds, self._waited = self._step, 0.0, 0.0
        units_per_sec = self._units_per_step / step_time
        first, start = self._first
        finished = max(1.0, self._progress - first)  # 0 if all steps were skipped
        wall_per_step = (self._last_tick - start) / finished
        return {
            f"perf/{self._unit}_per_sec": units_per_sec,
            "perf/step_time": step_time,
            "perf/data_wait": data_wait,
            **self._mfu(units_per_sec),
            "perf/eta": wall_per_step * max(0.0, self._total_steps - self._progress),
        }

    def _mfu(self, units_per_sec: float) -> dict[str, float]:
        if self._peak_flops is None:
            return {}
        per_flop = units_per_sec / (self._peak_flops * self._num_devices)
        full, causal = self._flops_per_unit
        return {
            "perf/mfu": full * per_flop,
            "perf/mfu_causal": causal * per_flop,
            "perf/peak_tflops": self._peak_flops / 1e12,
        }
