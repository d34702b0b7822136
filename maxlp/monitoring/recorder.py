"""Passes the metrics of every step to the spike watch and to the outputs of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import optax

from maxlp.monitoring.statistics import flat
from maxlp.monitoring.watch import Watch
from maxlp.optim.tree_utils import widened
from maxlp.runtime.hardware import memory_metrics
from maxlp.runtime.throughput import DelayedFetch, Throughput
from maxlp.runtime.writers import MetricWriter

AVERAGED = ("loss", "accuracy")  # of a batch, and therefore noisy


@jax.jit
def param_norm(params: Any) -> jax.Array:
    """The L2 norm of all parameters, summed in float32.

    It is not part of the train step. There, XLA for GPUs would compute it within the update of the
    parameters, in another kernel than that of the moments, and read these twice.
    """
    return optax.tree.norm(widened(params))


class IntervalMeans:
    """Means over the steps since the last record; steps that a gate skipped are only counted.

    The losses of all steps reach the host for the spike watch, so that the means cost the device nothing.
    Their sums are part of a checkpoint: a run that stops within an interval and resumes writes the record
    of an uninterrupted run.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._steps = self._skipped = 0

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds the metrics of a step."""
        if metrics.get("skipped", 0):
            self._skipped += 1
            return
        values = {name: float(metrics[name]) for name in AVERAGED if name in metrics}
        self._sums = {name: self._sums.get(name, 0.0) + value for name, value in values.items()}
        self._steps += 1

    def take(self) -> dict[str, float]:
        """The means, and the number of skipped steps if there were any. Begins the next interval."""
        found = {name: value / self._steps for name, value in self._sums.items()}
        if self._skipped:
            found["skipped"] = float(self._skipped)
        self._sums, self._steps, self._skipped = {}, 0, 0
        return found

    def get_state(self) -> dict[str, Any]:
        """The state, ready for JSON."""
        return {"sums": self._sums, "steps": self._steps, "skipped": self._skipped}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._sums, self._steps = dict(state["sums"]), state["steps"]
        self._skipped = state.get("skipped", 0)  # not in checkpoints of earlier versions


class Recorder:
    """Watches every step for spikes and writes a record at intervals.

    The metrics of a step are read when the next step is already queued, so that the device never waits. A
    record has the mean loss and accuracy since the last one, and the number of skipped steps; its other
    metrics are those of its step.

    Args:
      batches: the data iterator, whose ``metrics()`` are part of a record.
      log_every: steps between records.
      meta: what `meta` returned when the state of the run was saved.
    """

    def __init__(
        self,
        throughput: Throughput,
        watch: Watch,
        writer: MetricWriter,
        batches: Any,
        workdir: Path,
        log_every: int,
        meta: Mapping[str, Any],
    ):
        self._throughput, self._watch, self._writer = throughput, watch, writer
        self._batches, self._workdir = batches, workdir
        self._log_every = log_every
        self._fetch = DelayedFetch()
        self._means = IntervalMeans()
        self._unrecorded: tuple[int, Any] | None = None  # the newest step, with its metrics
        watch.set_meta(meta)
        if state := meta.get("interval"):  # checkpoints of earlier versions have none
            self._means.set_state(state)

    def push(self, step: int, metrics: Mapping[str, Any], params: Any, wait: bool, last: bool) -> None:
        """Takes the device metrics of a step.

        Args:
          params: the parameters after it, whose norm a record has too.
          wait: whether to wait for this step, as before an evaluation or a checkpoint.
          last: whether the run ends with this step, which then has a record in any case.

        Raises:
          rollback.RollbackRequested: the run must return to a checkpoint from before a spike.
          FloatingPointError: the loss is not finite.
        """
        if last or step % self._log_every == 0:
            metrics = {**metrics, "param_norm": param_norm(params)}
        for done, values in self._fetch.push(step, metrics, wait=wait):
            self._take(done, values, record=last and done == step)

    def flush(self) -> None:
        """Waits for the last step and takes its metrics, as `push` with `wait` would have done."""
        for done, values in self._fetch.flush():
            self._take(done, values)

    def finish(self, params: Any) -> None:
        """Writes a record of the last step if it has none, as for a run that ends because its data does."""
        self.flush()
        if self._unrecorded:
            step, values = self._unrecorded
            self._record(step, {**values, "param_norm": float(param_norm(params))})

    def _take(self, step: int, values: Any, record: bool = False) -> None:
        self._throughput.tick(step, float(values.get("tau", step)))
        self._means.add(values)
        if spike := self._watch.observe(step, values):  # before its step is saved
            self._watch.act(self._workdir, spike, values)
        self._unrecorded = step, values
        if record or step % self._log_every == 0:
            self._record(step, values)

    def _record(self, step: int, values: Any) -> None:
        metrics = flat(values) | self._means.take()
        train = {f"train/{name}": value for name, value in metrics.items()}
        running = self._throughput.report() | memory_metrics() | self._batches.metrics()
        self._writer.write(step, train | running)
        self._unrecorded = None

    def meta(self) -> dict[str, Any]:
        """What a checkpoint stores: the state of the watch, and the means since the last record."""
        return self._watch.meta() | {"interval": self._means.get_state()}
