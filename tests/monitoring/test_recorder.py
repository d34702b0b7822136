"""Which steps have a record, and that each number belongs to its step."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from maxlp.monitoring.recorder import Recorder
from maxlp.monitoring.spikes import SpikeConfig
from maxlp.monitoring.watch import Watch


class Throughput:
    def __init__(self):
        self.ticks = []

    def tick(self, step, progress):
        self.ticks.append((step, progress))

    def report(self):
        return {"perf/step_time": 1.0}


class Writer:
    def __init__(self):
        self.records = {}

    def write(self, step, record):
        assert step not in self.records
        self.records[step] = record


class Batches:
    def metrics(self):
        return {"data/skipped": 2}


class Observer(Watch):
    def __init__(self):
        super().__init__(SpikeConfig())
        self.seen = {}

    def observe(self, step, values):
        self.seen[step] = float(values["loss"])
        return super().observe(step, values)


@pytest.mark.parametrize("waits", [(), (4,), (1, 3, 7)])
def test_every_third_and_the_last_step_have_a_record_of_their_own_metrics(waits):
    """Metrics arrive a step late, unless the loop waits for a step."""
    throughput, watch, writer = Throughput(), Observer(), Writer()
    recorder = Recorder(throughput, watch, writer, Batches(), Path("unused"), 3)
    for step in range(1, 8):
        metrics = {"loss": jnp.float32(step / 8), "grad_norms": {"w": jnp.array([step, 2.0 * step])}}
        recorder.push(step, metrics, wait=step in waits or step == 7, last=step == 7)
    assert throughput.ticks == [(step, step) for step in range(1, 8)]
    assert watch.seen == {step: step / 8 for step in range(1, 8)}
    assert list(writer.records) == [3, 6, 7]
    for step, record in writer.records.items():
        assert record["train/loss"] == step / 8 and record["train/grad_norms/w/1"] == 2 * step
        assert record["perf/step_time"] == 1.0 and record["data/skipped"] == 2
        assert "memory/host_peak_gib" in record
