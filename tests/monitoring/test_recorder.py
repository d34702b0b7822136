"""Which steps have a record, and that each number belongs to its step."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.monitoring.recorder import Recorder
from maxlp.monitoring.spikes import SpikeConfig
from maxlp.monitoring.watch import Watch

PARAMS = {"w": jnp.array([3.0, 4.0])}


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
    recorder = Recorder(throughput, watch, writer, Batches(), Path("unused"), 3, {})
    for step in range(1, 8):
        metrics = {"loss": jnp.float32(step / 8), "grad_norms": {"w": jnp.array([step, 2.0 * step])}}
        params = {"w": jnp.full(257, step, jnp.bfloat16)}  # whose squares have to be added in float32
        recorder.push(step, metrics, params, wait=step in waits or step == 7, last=step == 7)
    assert throughput.ticks == [(step, step) for step in range(1, 8)]
    assert watch.seen == {step: step / 8 for step in range(1, 8)}
    assert list(writer.records) == [3, 6, 7]
    for step, record in writer.records.items():
        since = [n for n in range(1, step + 1) if not any(n <= done < step for done in writer.records)]
        assert record["train/loss"] == np.mean(since) / 8 and record["train/grad_norms/w/1"] == 2 * step
        assert record["train/param_norm"] == pytest.approx(step * 257**0.5, rel=1e-6)
        assert record["perf/step_time"] == 1.0 and record["data/skipped"] == 2
        assert "memory/host_peak_gib" in record


def records(steps, meta, skipped=()):
    """What a run of these steps writes every fourth step, and what a checkpoint after it stores."""
    writer = Writer()
    recorder = Recorder(Throughput(), Watch(SpikeConfig()), writer, Batches(), Path("unused"), 4, meta)
    for step in steps:
        metrics = {"loss": jnp.float32(1 / step), "accuracy": jnp.float32(step / 7)}
        if skipped:
            metrics["skipped"] = jnp.float32(step in skipped)
            metrics["loss"] = jnp.float32(100) if step in skipped else metrics["loss"]
        recorder.push(step, metrics, PARAMS, wait=True, last=False)
    return writer.records, json.loads(json.dumps(recorder.meta()))


@pytest.mark.parametrize("stop", range(1, 8))
def test_a_run_that_stops_within_an_interval_writes_the_records_of_one_that_does_not(stop):
    """To the bit: the sums are part of the checkpoint."""
    whole, _ = records(range(1, 9), {})
    first, meta = records(range(1, stop + 1), {})
    rest, _ = records(range(stop + 1, 9), meta)
    names = ("train/loss", "train/accuracy")
    got = {step: {name: record[name] for name in names} for step, record in (first | rest).items()}
    assert got == {step: {name: record[name] for name in names} for step, record in whole.items()}
    assert got[8]["train/loss"] == np.mean([np.float32(1 / n) for n in range(5, 9)], dtype=np.float64)


def test_flush_takes_the_metrics_of_the_last_step_without_a_record_of_its_own():
    watch, writer = Observer(), Writer()
    recorder = Recorder(Throughput(), watch, writer, Batches(), Path("unused"), 3, {})
    for step in range(1, 9):
        recorder.push(step, {"loss": jnp.float32(step / 8)}, PARAMS, wait=False, last=False)
        if step in (6, 8):
            recorder.flush()
            assert max(watch.seen) == step
    assert list(writer.records) == [3, 6]
    recorder.flush()
    assert watch.seen == {step: step / 8 for step in range(1, 9)}
    assert recorder.meta()["interval"] == {"sums": {"loss": 15 / 8}, "steps": 2, "skipped": 0}


@pytest.mark.parametrize("waits", [(), (8,)])
def test_the_end_of_the_data_has_a_record_of_the_steps_since_the_last_one(waits):
    writer = Writer()
    recorder = Recorder(Throughput(), Observer(), writer, Batches(), Path("unused"), 3, {})
    for step in range(1, 9):
        recorder.push(step, {"loss": jnp.float32(step / 8)}, PARAMS, wait=step in waits, last=False)
    for _ in range(2):  # once
        recorder.finish(PARAMS)
    assert list(writer.records) == [3, 6, 8]
    assert writer.records[8]["train/param_norm"] == 5
    assert writer.records[8]["train/loss"] == 15 / 16 and recorder.meta()["interval"]["steps"] == 0
    recorder.push(9, {"loss": jnp.float32(1)}, PARAMS, wait=True, last=False)
    written = dict(writer.records)
    recorder.finish(PARAMS)
    assert writer.records == written, "step 9 has one"


def test_a_checkpoint_without_sums_begins_an_interval():
    rest, _ = records((4,), {"watch": records(range(1, 4), {})[1]["watch"]})
    assert rest[4]["train/loss"] == 0.25


def test_skipped_steps_are_counted_and_not_part_of_the_mean():
    skipped = {2, 3, 5, 6, 7, 8}
    found, meta = records(range(1, 3), {}, skipped)
    rest, _ = records(range(3, 13), meta, skipped)  # resumed within an interval
    found |= rest
    assert found[4]["train/loss"] == np.mean([np.float32(1), np.float32(1 / 4)], dtype=np.float64)
    assert found[8]["train/loss"] == 100  # all steps of the interval were skipped
    assert [found[step]["train/skipped"] for step in (4, 8, 12)] == [2, 4, 0]
