import contextlib
import io
import json
import math
import struct
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from maxlp.runtime import metrics

# Llama 3.1: name, embed, layers, query heads, mlp; 8 kv heads of 128, vocabulary 128256, untied.
LLAMA = {"8B": (4096, 32, 32, 14336), "70B": (8192, 80, 64, 28672), "405B": (16384, 126, 128, 53248)}


def llama_flops(name, seq_len=8192):
    d, layers, heads, mlp = LLAMA[name]
    layer = 2 * d * heads * 128 + 2 * d * 8 * 128 + 3 * d * mlp + 2 * d
    return metrics.train_flops_per_token(layers * layer + d + 128256 * d, layers, heads, 128, seq_len)


def device(kind, platform="gpu"):
    return types.SimpleNamespace(device_kind=kind, platform=platform)


# --- FLOPs and peaks ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "full", "causal"),
    [
        ("8B", "5.791445e+10", "5.147200e+10"),
        ("70B", "4.814427e+11", "4.492305e+11"),
        ("405B", "2.625449e+12", "2.523981e+12"),
    ],
)
def test_flops_per_token_of_llama_3_1(name, full, causal):
    assert tuple(f"{x:.6e}" for x in llama_flops(name)) == (full, causal)


@pytest.mark.parametrize(
    ("name", "kind", "tokens_per_sec", "full", "causal"),
    [
        # MaxText's published runs on v6e-256, whose own MFU (45.46 %, 50.33 %) is the full one.
        ("8B", "TPU v6 lite", 7207, 0.4547, 0.4041),
        ("70B", "TPU v6 lite", 960, 0.5035, 0.4698),
        # NVIDIA's DGX Cloud benchmark of 70B in MaxText: 506.6 TFLOP/s for each H100.
        ("70B", "NVIDIA H100 80GB HBM3", 1052.266, 506.6 / 989, None),
    ],
)
def test_mfu_of_published_runs(name, kind, tokens_per_sec, full, causal):
    now = iter([0.0, 1.0])
    meter = metrics.Throughput(
        units_per_step=round(256 * tokens_per_sec),
        flops_per_unit=llama_flops(name),
        peak=metrics.peak_flops(device(kind)),
        num_devices=256,
        total_steps=10,
        clock=lambda: next(now),
    )
    meter.tick(1)
    meter.tick(2)
    report = meter.report()
    assert report["perf/mfu"] == pytest.approx(full, abs=1e-4)
    if causal:
        assert report["perf/mfu_causal"] == pytest.approx(causal, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "dtype", "tflops"),
    [
        ("TPU v4", "bfloat16", 275),
        ("TPU v5 lite", "bfloat16", 197),
        ("TPU v5", "int8", 918),
        ("TPU v5p", "bfloat16", 459),
        ("TPU v6 lite", "float8", 918),
        ("TPU7x", "float8", 2307),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 80GB HBM3", "float8", 1979),
        ("NVIDIA GH200 480GB", "bfloat16", 989),
        ("NVIDIA GB200", "bfloat16", 2500),
        ("NVIDIA B200", "bfloat16", 2250),
    ],
)
def test_device_kinds_find_their_published_peak(kind, dtype, tflops):
    assert metrics.peak_flops(device(kind), dtype) == (1e12 * tflops, False)


def test_cpu_peak_is_measured_once_and_shared_by_simulated_devices(monkeypatch):
    peak = metrics.peak_flops()
    assert peak.measured
    assert 1e9 < peak.flops * jax.local_device_count() < 1e14
    assert metrics.peak_flops() == peak
    metrics._measured_flops.cache_clear()
    monkeypatch.setattr(jax, "local_device_count", lambda backend: 10**6)
    assert metrics.peak_flops().flops < peak.flops / 100
    metrics._measured_flops.cache_clear()


# --- Speed ----------------------------------------------------------------------------------------


class Leaf:
    """Stands for a device array and notes what is done with it."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def copy_to_host_async(self):
        self.log.append(f"copy {self.name}")

    def __array__(self, dtype=None, copy=None):
        self.log.append(f"wait {self.name}")
        return np.array(1.0)


def test_a_step_is_waited_for_only_when_the_next_is_queued():
    log = []
    fetch = metrics.DelayedFetch()
    list(fetch.push(1, {"x": Leaf("1", log)}))
    assert "wait 1" not in log
    list(fetch.push(2, {"x": Leaf("2", log)}))
    assert log.index("copy 2") < log.index("wait 1")
    assert "wait 2" not in log


def test_every_step_comes_back_once_and_in_order():
    fetch, got = metrics.DelayedFetch(), []
    for step in range(1, 8):
        got += fetch.push(step, {"loss": jnp.float32(step) ** 2}, wait=step in (1, 4, 7))
        if step in (1, 4, 7):
            assert got[-1][0] == step
    assert [(step, float(m["loss"])) for step, m in got] == [(s, s**2) for s in range(1, 8)]


def test_throughput_leaves_out_compilation_and_pauses():
    now = [0.0]
    meter = metrics.Throughput(
        units_per_step=1000,
        flops_per_unit=(4e6, 2e6),
        peak=metrics.Peak(1e9, measured=True),
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
    assert (report["perf/peak_tflops"], report["perf/peak_measured"]) == (1e-3, 1.0)
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
    assert report["perf/eta"] == (6 + 100 + 5.5) / 3  # who waits for the end waits for evaluations too
    assert meter.report() == {}


def test_an_exception_in_a_pause_passes():
    meter = metrics.Throughput(
        units_per_step=1, flops_per_unit=(1, 1), peak=metrics.Peak(1, False), num_devices=1, total_steps=1
    )
    with pytest.raises(RuntimeError, match="evaluation failed"), meter.paused():
        raise RuntimeError("evaluation failed")


def test_memory_is_that_of_this_process():
    before = metrics.memory_metrics()["memory/host_peak_gib"]
    block = np.ones(2**27, np.int8)  # 1/8 GiB, touched
    after = metrics.memory_metrics()["memory/host_peak_gib"]
    assert 0.01 < before <= after < 1000
    assert block.nbytes / 2**30 < after


def test_memory_of_the_fullest_device(monkeypatch):
    stats = [{"bytes_in_use": 2**30, "bytes_limit": 2**34}, {"bytes_in_use": 3 * 2**30}, None]
    devices = [types.SimpleNamespace(memory_stats=lambda s=s: s) for s in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    got = metrics.memory_metrics()
    del got["memory/host_peak_gib"]
    assert got == {"memory/device_gib_in_use": 3.0, "memory/device_gib_limit": 16.0}


# --- Writers --------------------------------------------------------------------------------------


@contextlib.contextmanager
def writer(workdir, **changes):
    w = metrics.MetricWriter(
        workdir, **({"total_steps": 6, "console": False, "tensorboard": False} | changes)
    )
    yield w
    w.close()


def write_steps(workdir, steps, resume_step):
    with writer(workdir, resume_step=resume_step) as w:
        for step in steps:
            w.write(step, {"train/loss": jnp.float32(1 / step)})
            if step % 2 == 0:
                w.write(step, {"eval/loss": np.float32(step)})


def without_time(path):
    return [{k: v for k, v in r.items() if k != "time"} for r in metrics.read_jsonl(path)]


def test_a_run_cut_at_any_byte_and_resumed_leaves_the_file_of_an_uncut_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(tmp_path, range(1, 7), 0)
    whole, text = without_time(path), path.read_bytes()
    assert len(whole) == 9
    for cut in range(0, len(text) + 1, 7):
        complete = text[:cut].count(b"\n")
        finished = whole[complete - 1]["step"] if complete else 0
        for resume_step in {0, max(finished - 1, 0)}:  # before the records of the last step
            path.write_bytes(text[:cut])
            write_steps(tmp_path, range(resume_step + 1, 7), resume_step)
            assert without_time(path) == whole
            kept = path.read_bytes().splitlines()[: sum(r["step"] <= resume_step for r in whole)]
            assert kept == text.splitlines()[: len(kept)]


def test_a_fresh_start_repeats_step_zero(tmp_path):
    for _ in range(2):
        with writer(tmp_path) as w:
            w.write(0, {"eval/loss": 5.0})
    assert len(metrics.read_jsonl(tmp_path / "metrics.jsonl")) == 1


def test_reading_skips_what_is_no_record_and_keeps_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert metrics.read_jsonl(path) == []
    with writer(tmp_path) as w:
        w.write(1, {"train/loss": jnp.nan, "train/grad_norm": np.inf})
    path.write_bytes(path.read_bytes() + b'7\n\x00\x00\n{"no": 1}\n{"step": 2, "train/lo')
    (record,) = metrics.read_jsonl(path)
    assert math.isnan(record["train/loss"]) and record["train/grad_norm"] == math.inf


def test_each_record_is_on_disk_at_once(tmp_path):
    with writer(tmp_path) as w:
        w.write(1, {"train/loss": 2.0})
        assert [r["step"] for r in metrics.read_jsonl(tmp_path / "metrics.jsonl")] == [1]


def test_values_must_be_scalars(tmp_path):
    with writer(tmp_path) as w, pytest.raises(ValueError, match="size 1"):
        w.write(1, {"train/loss": jnp.ones(2)})


RECORD = {
    "step": 10,
    "time": 0.0,
    "train/loss": 1.25,
    "train/grad_norm": 0.5,
    "train/learning_rate": 3e-4,
    "perf/tokens_per_sec": 12345.6,
    "perf/mfu": 0.412,
    "perf/peak_measured": 1.0,
    "perf/eta": 3723.4,
}
LINE = (
    "step 10/20  loss 1.2500  12,346 tok/s  mfu 41.2% of measured peak  lr 3.00e-04  grad 0.5  eta 1:02:03"
)


def test_console_prints_a_line_a_record_without_a_terminal():
    stream = io.StringIO()
    console = metrics.ConsoleWriter(20, stream)
    console.write(RECORD)
    console.write({"step": 11, "time": 0.0, "train/loss": math.nan})
    console.write(
        {"step": 20, "time": 0.0, "eval/loss": 1.0, "eval/bits_per_byte": 1.44269, "eval/tokens": 20470}
    )
    console.close()
    assert stream.getvalue().splitlines() == [
        LINE,
        "step 11/20  loss nan",
        "step 20/20  eval/loss 1  eval/bits_per_byte 1.443  eval/tokens 20,470",
    ]


def on_screen(output):
    """The lines that a terminal shows: a carriage return and 'erase line' start a line again."""
    return [line.split("\r\x1b[K")[-1] for line in output.split("\n")]


def test_console_renews_one_line_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    stream = io.StringIO()
    stream.isatty = lambda: True
    console = metrics.ConsoleWriter(20, stream)
    for step in (8, 9, 10):
        console.write(RECORD | {"step": step})
    console.write({"step": 10, "time": 0.0, "eval/loss": 1.0})
    console.write(RECORD | {"step": 11})
    console.close()
    assert on_screen(stream.getvalue()) == [
        "step 10/20  eval/loss 1",
        LINE.replace("10/20", "11/20")[:29],
        "",
    ]


def test_seconds_are_readable():
    assert [metrics.format_seconds(s) for s in (0, 59.6, 3599, 90000)] == [
        "0:00",
        "1:00",
        "59:59",
        "25:00:00",
    ]


def read_events(logdir):
    """Scalars (tag, step, value) and purged steps from event files, in the order of writing."""
    for path in sorted(logdir.iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
            if event.HasField("session_log"):
                yield ("purged from", event.step)
            yield from ((v.tag, event.step, v.simple_value) for v in event.summary.value)


def test_tensorboard_gets_the_scalars_and_hides_what_a_resume_repeats(tmp_path):
    with writer(tmp_path, tensorboard=True) as w:
        w.write(1, {"train/loss": 2.0, "train/grad_norm": 0.5})
        w.write(2, {"train/loss": 1.5})
    first = list(read_events(tmp_path / "tensorboard"))
    scalars = [("train/loss", 1, 2.0), ("train/grad_norm", 1, 0.5), ("train/loss", 2, 1.5)]
    assert [e for e in first if len(e) == 3] == scalars

    with writer(tmp_path, tensorboard=True, resume_step=1) as w:
        w.write(2, {"train/loss": 1.5})
    assert ("purged from", 2) in read_events(tmp_path / "tensorboard")


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        ("tensorboardX", {"tensorboard": True}, "tensorboard=True needs tensorboardX: pip install"),
        ("wandb", {"wandb_project": "llama"}, "wandb_project='llama' needs wandb: pip install"),
    ],
)
def test_a_missing_package_is_one_line(tmp_path, monkeypatch, module, changes, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=message), writer(tmp_path, **changes):
        pass


def test_wandb_goes_on_with_the_run_of_the_workdir(tmp_path, monkeypatch):
    calls, logged = [], []

    def init(**kwargs):
        calls.append(kwargs)
        log = lambda values, step: logged.append((step, values))  # noqa: E731
        return types.SimpleNamespace(id=kwargs["id"] or "abc", log=log, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for resume_step in (0, 1):
        with writer(tmp_path, wandb_project="llama", run_config={"seed": 1}, resume_step=resume_step) as w:
            w.write(resume_step + 1, {"train/loss": 2.0})
    assert [c["id"] for c in calls] == [None, "abc"]
    assert calls[0]["project"] == "llama" and calls[0]["config"] == {"seed": 1}
    assert logged == [(1, {"train/loss": 2.0}), (2, {"train/loss": 2.0})]


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with writer(tmp_path / "run", console=True, tensorboard=True) as w:
        w.write(1, {"train/loss": 2.0})
    assert not (tmp_path / "run").exists()


def test_jsonl_is_plain_json(tmp_path):
    with writer(tmp_path) as w:
        w.write(np.int32(3), {"train/loss": jnp.bfloat16(0.5), "train/tokens": np.int64(7)})
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record.pop("time") > 1e9
    assert record == {"step": 3, "train/loss": 0.5, "train/tokens": 7}
