"""Step times, and metrics that are fetched one step late."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.runtime import cpu
from maxlp.runtime.throughput import DelayedFetch, Throughput

ONE_DEVICE = dict(units_per_step=1, flops_per_unit=(1, 1), peak_flops=None, num_devices=1)


class Leaf:
    """Stands in for a device array and records what is done with it."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def copy_to_host_async(self):
        self.log.append(f"copy {self.name}")

    def __array__(self, dtype=None, copy=None):
        self.log.append(f"wait {self.name}")
        return np.array(1.0)


def test_a_step_is_waited_for_only_after_the_next_is_dispatched():
    log = []
    fetch = DelayedFetch()
    list(fetch.push(1, {"x": Leaf("1", log)}))
    assert "wait 1" not in log
    list(fetch.push(2, {"x": Leaf("2", log)}))
    assert log.index("copy 2") < log.index("wait 1")
    assert "wait 2" not in log


def test_every_step_is_returned_once_and_in_order():
    fetch, got = DelayedFetch(), []
    for step in range(1, 8):
        got += fetch.push(step, {"loss": jnp.float32(step) ** 2}, wait=step in (1, 4, 7))
        if step in (1, 4, 7):
            assert got[-1][0] == step
    assert [(step, float(m["loss"])) for step, m in got] == [(s, s**2) for s in range(1, 8)]


def test_throughput_excludes_compilation_and_pauses():
    now = [0.0]
    meter = Throughput(
        units_per_step=1000,
        flops_per_unit=(4e6, 2e6),
        peak_flops=1e9,
        num_devices=8,
        total_steps=104,
        clock=lambda: now[0],
    )

    def train(step, seconds):
        now[0] += seconds
        meter.tick(step)

    assert meter.report() == {}
    train(100, 60.0)  # resumed at 99; the first step compiles
    assert meter.report() == {}
    train(101, 2.0)
    train(102, 4.0)
    report = meter.report()
    assert report["perf/step_time"] == 3.0
    assert report["perf/tokens_per_sec"] == pytest.approx(1000 / 3)
    assert report["perf/mfu"] == pytest.approx(1000 / 3 * 4e6 / 8e9)
    assert report["perf/mfu_causal"] == report["perf/mfu"] / 2
    assert report["perf/eta"] == 2 * 3.0
    assert report["perf/peak_tflops"] == 1e-3
    assert report["perf/data_wait"] == 0

    def slow():
        for batch in "abc":
            now[0] += 0.5
            yield batch

    batches = meter.waiting_for(slow())
    assert next(batches) == "a"
    now[0] += 1.0  # between the tick and the pause: still training
    with meter.paused():
        now[0] += 100.0
    train(103, 4.0)
    report = meter.report()
    assert report["perf/step_time"] == 5.5
    assert report["perf/data_wait"] == 0.5 / 5.5
    assert report["perf/eta"] == (6 + 100 + 5.5) / 3  # the remaining time includes evaluations
    assert meter.report() == {}


class Machine:
    """A clock, a data pipeline and a device, each of which takes its time on that clock.

    Args:
      step: seconds of a train step.
      batch: seconds in which the pipeline makes a batch, while the others work.
      queues: whether a step is dispatched and then runs beside the host.
    """

    def __init__(self, *, step: float, batch: float, queues: bool):
        self.step, self.batch, self.queues = step, batch, queues
        self.now = self.finished = 0.0

    def batches(self):
        made = 0.0
        while True:
            made = max(made, self.now - 2 * self.batch) + self.batch  # at most two wait
            self.now = max(self.now, made)
            yield made

    def train_step(self):
        self.finished = max(self.finished, self.now) + self.step
        if not self.queues:
            self.now = self.finished
        return Arriving(self, self.finished)


class Arriving:
    """A metric that reaches the host at a time."""

    def __init__(self, machine, at):
        self.machine, self.at = machine, at

    def copy_to_host_async(self):
        pass

    def __array__(self, dtype=None, copy=None):
        self.machine.now = max(self.machine.now, self.at)
        return np.array(self.at)


@pytest.mark.parametrize(
    ("queues", "batch", "step_time", "data_wait"),
    [
        (False, 3.0, 3.0, 2 / 3),  # made within 3 seconds, 1 of them during the step before
        (False, 0.25, 1.0, 0.0),
        (True, 3.0, 3.0, 1.0),  # an upper bound: the host waits for nothing else
        (True, 0.25, 1.0, 0.0),
    ],
)
def test_waits_for_a_slow_and_a_fast_pipeline(monkeypatch, queues, batch, step_time, data_wait):
    monkeypatch.setattr(cpu, "is_synchronous", lambda: not queues)
    machine = Machine(step=1.0, batch=batch, queues=queues)
    meter = Throughput(**ONE_DEVICE, total_steps=20, clock=lambda: machine.now)
    fetch, reports, stream = DelayedFetch(), [], meter.waiting_for(machine.batches())
    for step in range(1, 21):
        next(stream)
        for done, _ in fetch.push(step, machine.train_step(), wait=step == 1):
            meter.tick(done)
            if done % 4 == 0:
                reports.append(meter.report())
    assert len(reports) == (4 if queues else 5)
    for report in reports[1:] if queues else reports:  # in the first, a queued step begins to lag
        assert report["perf/step_time"] == pytest.approx(step_time)
        assert report["perf/data_wait"] == pytest.approx(data_wait)


def test_the_remaining_time_of_steps_that_count_as_more_than_one():
    now = [0.0]
    meter = Throughput(**ONE_DEVICE, total_steps=20, clock=lambda: now[0])
    for step, progress in ((1, 3.0), (2, 5.0), (3, 8.0)):  # 5 in 2 seconds, after the first
        now[0] += 1.0
        meter.tick(step, progress)
    report = meter.report()
    assert report["perf/eta"] == pytest.approx(12 * 2 / 5)
    assert "perf/tokens_per_sec" in report and not any("mfu" in name or "peak" in name for name in report)
    now[0] += 1.0
    meter.tick(4, 22.0)
    assert meter.report()["perf/eta"] == 0


def test_an_exception_in_a_pause_is_not_swallowed():
    meter = Throughput(**ONE_DEVICE, total_steps=1)
    with pytest.raises(RuntimeError, match="evaluation failed"), meter.paused():
        raise RuntimeError("evaluation failed")
