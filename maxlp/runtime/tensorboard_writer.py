"""Metrics in TensorBoard."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlp.runtime import files
from maxlp.runtime.writers import metrics_of


class TensorBoardWriter:
    """Event files for TensorBoard; it hides the steps of earlier launches that will be repeated.

    tensorboardX's `SummaryWriter` writes in a thread. If that fails, as on a full disk, the program waits
    forever for room in its queue; so this uses what is below it.
    """

    FLUSH_SECONDS = 10.0  # tensorboardX waits for the disk at each flush

    def __init__(self, logdir: Path, resume_step: int) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2, summary_pb2
        except ImportError:
            raise ValueError(
                "tensorboard=True needs tensorboardX: pip install tensorboardX, or set it to False"
            ) from None
        self._path, self._event, self._summary = logdir, event_pb2.Event, summary_pb2.Summary
        logdir.mkdir(exist_ok=True)
        self._writer, self._flushed = EventsWriter(str(logdir / "events")), time.monotonic()
        # Also for a new run, whose folder may hold the points of a launch that was killed.
        first = resume_step + 1 if resume_step else 0
        self._add(first, time.time(), file_version="brain.Event:2")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(first, time.time(), session_log=start)

    def _add(self, step: int, walltime: float, **content: Any) -> None:
        with files.naming(self._path):
            self._writer.write_event(self._event(step=step, wall_time=walltime, **content))
            if time.monotonic() - self._flushed > self.FLUSH_SECONDS:
                self._writer.flush()
                self._flushed = time.monotonic()

    def write(self, record: Mapping[str, Any]) -> None:
        value, metrics = self._summary.Value, metrics_of(record)
        values = [value(tag=name, simple_value=x) for name, x in metrics.items()]
        self._add(record["step"], record["time"], summary=self._summary(value=values))

    def close(self) -> None:
        with files.naming(self._path):
            self._writer.close()
