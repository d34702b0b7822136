"""Ends the data before a document that cannot be used, at the same step in all processes."""

from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

from maxlp.data.readers import BrokenExample
from maxlp.parallel.batches import device_batches
from maxlp.runtime import distributed


class IntactBatches:
    """The batches of this process up to a document that cannot be used: the steps before it can be saved.

    All processes end after the same batch, although perhaps only one of them meets the document. That one
    meets it in its read-ahead, while the two batches before it wait on the devices, and announces that
    these are the last. The others check for this before every step. None of them can be past these batches:
    a process waits for the result of a step, in which all take part, before it starts the next but one.
    """

    def __init__(self, batches: Any):
        self.get_state, self._batches = batches.get_state, batches
        self._ends = distributed.Announcements("broken document")  # [number of batches, error]
        self.error = ""

    def __iter__(self) -> Iterator[dict]:
        try:
            yield from self._batches
        except BrokenExample as error:
            self._ends.add([self.get_state()["step"], str(error)])

    def on_devices(self, mesh: Mesh) -> Iterator[tuple[dict, dict]]:
        """As `device_batches`; a ValueError if there is no batch before the document."""
        begin = self.get_state()["step"]
        for batch, data_state in device_batches(self, mesh):
            if any(data_state["step"] > end for end, _ in self._ends.all()):
                break
            yield batch, data_state
        end, self.error = min(self._ends.all(), default=(0, ""))
        if self.error and end == begin:
            raise ValueError(self.error)
