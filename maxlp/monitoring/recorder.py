"""Passes the metrics of every step to the spike watch and to the outputs of a run."""

from pathlib import Path
from typing import Any

from maxlp.monitoring.statistics import flat
from maxlp.monitoring.watch import Watch
from maxlp.runtime.hardware import memory_metrics
from maxlp.runtime.throughput import DelayedFetch, Throughput
from maxlp.runtime.writers import MetricWriter


class Recorder:
    """Watches every step for spikes and writes a record at intervals.

    The metrics of a step are read when the next step is already queued, so that the device never waits.

    Args:
      batches: the data iterator, whose ``metrics()`` are part of a record.
      log_every: steps between records.
    """

    def __init__(
        self,
        throughput: Throughput,
        watch: Watch,
        writer: MetricWriter,
        batches: Any,
        workdir: Path,
        log_every: int,
    ):
        self._throughput, self._watch, self._writer = throughput, watch, writer
        self._batches, self._workdir = batches, workdir
        self._log_every = log_every
        self._fetch = DelayedFetch()

    def push(self, step: int, metrics: Any, wait: bool, last: bool) -> None:
        """Takes the device metrics of a step.

        Args:
          wait: whether to wait for this step, as before an evaluation or a checkpoint.
          last: whether the run ends with this step, which then has a record in any case.

        Raises:
          rollback.RollbackRequested: the run must return to a checkpoint from before a spike.
          FloatingPointError: the loss is not finite.
        """
        for done, values in self._fetch.push(step, metrics, wait=wait):
            self._throughput.tick(done, float(values.get("tau", done)))
            if spike := self._watch.observe(done, values):  # before its step is saved
                self._watch.act(self._workdir, spike, values)
            if done % self._log_every == 0 or (last and done == step):
                record = {f"train/{name}": value for name, value in flat(values).items()}
                running = self._throughput.report() | memory_metrics() | self._batches.metrics()
                self._writer.write(done, record | running)
