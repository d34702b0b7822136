"""The outputs of metrics: console, metrics.jsonl, TensorBoard, W&B."""

import contextlib
import fcntl
import io
import json
import math
import os
import struct
import sys
import termios
import tracemalloc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from maxlp.monitoring.run_record import read_jsonl
from maxlp.runtime import distributed, writers


@contextlib.contextmanager
def writer(workdir, **changes):
    w = writers.MetricWriter(workdir, **(dict(total_steps=6, resume_step=0, tensorboard=False) | changes))
    yield w
    w.close()


def write_steps(workdir, steps, resume_step):
    with writer(workdir, resume_step=resume_step) as w:
        for step in steps:
            w.write(step, {"train/loss": jnp.float32(1 / step)})
            if step % 2 == 0:
                w.write(step, {"eval/loss": np.float32(step)})


def without_time(path):
    return [{k: v for k, v in r.items() if k != "time"} for r in read_jsonl(path)]


def test_a_file_cut_off_at_any_byte_and_resumed_equals_an_uninterrupted_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(tmp_path, range(1, 7), 0)
    whole, text = without_time(path), path.read_bytes()
    assert len(whole) == 9
    for cut in range(0, len(text) + 1, 23):
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
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1


def test_reading_reports_lines_that_are_not_records_and_keeps_nan(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    assert read_jsonl(path) == []
    with writer(tmp_path) as w:
        w.write(1, {"train/loss": jnp.nan, "train/grad_norm": np.inf})
    path.write_bytes(path.read_bytes() + b'7\n\x00\x00\n{"no": 1}\n{"step": "2"}\n{"step": 2, "train/lo')
    (record,) = read_jsonl(path)
    assert math.isnan(record["train/loss"]) and record["train/grad_norm"] == math.inf
    assert caplog.messages == [f"{path}: ignored 4 of 5 lines, which are not records; the first is line 2"]


def test_a_resume_keeps_lines_that_are_not_records(tmp_path):
    path, others = tmp_path / "metrics.jsonl", [b"by hand", b"\xff\x00", b'{"no": 1}']
    write_steps(tmp_path, range(1, 4), 0)
    first, *later = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, *others, *later]) + b'\n{"step": 9')
    write_steps(tmp_path, [], 1)
    assert path.read_bytes().splitlines() == [first, *others]


def test_a_whole_record_without_a_line_break_at_the_end_is_read_and_kept(tmp_path):
    """As some editors leave the last line."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": 0.5}\n{"step": 2, "train/loss": 0.25}')
    assert [record["step"] for record in read_jsonl(path)] == [1, 2]
    write_steps(tmp_path, [3], 2)
    assert [record["step"] for record in read_jsonl(path)] == [1, 2, 3]


def test_a_resume_needs_less_memory_than_the_file_and_records_share_their_names(tmp_path):
    path = tmp_path / "metrics.jsonl"
    values = {f"train/rms/layers/{n}": 0.5 for n in range(100)}
    path.write_text("".join(json.dumps({"step": n, **values}) + "\n" for n in range(2000)))
    size = path.stat().st_size
    tracemalloc.start()
    write_steps(tmp_path, [], 1500)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    first, *_, last = records = read_jsonl(path)
    assert len(records) == 1501 and size * 3 // 4 < path.stat().st_size < size
    assert peak < size / 10
    assert list(map(id, first)) == list(map(id, last))


def test_a_value_that_is_no_number_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3, "train/loss": "abc"}\n')
    with pytest.raises(ValueError, match=rf"^{path}: train/loss of step 3 is 'abc', not a number; correct"):
        read_jsonl(path)


def test_each_record_is_on_disk_immediately(tmp_path):
    with writer(tmp_path) as w:
        w.write(1, {"train/loss": 2.0})
        assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [1]


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
    "perf/eta": 3723.4,
}
LINE = "step 10/20  eta 1:02:03  loss 1.2500  lr 3.00e-04  12.3k tok/s  grad 0.5  mfu 41.2%"
# The widest numbers that a long run on many devices has.
WIDE = RECORD | {
    "step": 123456,
    "train/loss": 10.71662,
    "train/grad_norm": 0.8791,
    "perf/tokens_per_sec": 123456789.0,
    "perf/data_wait": 0.5,
    "perf/eta": 99 * 3600 + 3599.0,
}
EVALUATION = {"eval/loss": 3.6412345, "eval/perplexity": 38.1389, "eval/accuracy": 0.31234}
EVALUATION |= {"eval/bits_per_byte": 1.75912, "eval/tokens": 204700.0, "eval/bytes": 611340.0}


def test_console_prints_one_line_per_record_without_a_terminal():
    stream = io.StringIO()
    console = writers.ConsoleWriter(20, stream)
    console.write(RECORD)
    console.write({"step": 11, "time": 0.0, "train/loss": math.nan})
    console.write(
        {"step": 20, "time": 0.0, "eval/loss": 1.0, "eval/bits_per_byte": 1.44269, "eval/tokens": 20470}
        | {"health/layers/0/kernel": 1.0}
    )
    console.write({"step": 20, "time": 0.0, "eval/loss": 60.0, "eval/perplexity": math.exp(60)})
    console.close()
    assert stream.getvalue().splitlines() == [
        LINE,
        "step 11/20  loss nan",
        "step 20/20  eval/loss 1  eval/bits_per_byte 1.443  eval/tokens 20,470",
        "step 20/20  eval/loss 60  eval/perplexity 1.142e+26",
    ]


@pytest.mark.parametrize(("data_wait", "shown"), [(0.04, "step 1/20  loss 1.0000"), (0.5, "data wait 50%")])
def test_console_shows_only_waits_for_data_that_matter(data_wait, shown):
    stream = io.StringIO()
    console = writers.ConsoleWriter(20, stream)
    console.write({"step": 1, "time": 0.0, "train/loss": 1.0, "perf/data_wait": data_wait})
    assert stream.getvalue().strip().endswith(shown)


def test_output_to_a_full_disk_is_named(monkeypatch):
    def fails():
        raise OSError(28, "No space left on device")

    stream = io.StringIO()
    monkeypatch.setattr(stream, "flush", fails)
    monkeypatch.setattr("sys.stdout", stream)
    console = writers.ConsoleWriter(20, stream)
    for write in (console.write, distributed.print_primary):
        with pytest.raises(OSError, match="No space left on device: 'standard output'"):
            write(RECORD)


def on_screen(output):
    """The lines that a terminal shows: a carriage return and 'erase line' restart a line."""
    return [line.rstrip("\r").split("\r\x1b[K")[-1] for line in output.split("\n")]


def terminal(columns, monkeypatch):
    """Standard output as a pseudo-terminal of this width, and a function that reads it."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    stream = os.fdopen(theirs, "w")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", stream)

    def read():
        stream.close()
        output = b""
        with (
            os.fdopen(ours, "rb", buffering=0) as file,
            contextlib.suppress(OSError),
        ):  # Linux: EIO at the end
            while part := file.read(4096):
                output += part
        return on_screen(output.decode())

    return stream, read


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_every_line_on_a_terminal_is_whole(columns, monkeypatch):
    """None is longer than the terminal is wide, and each begins with the numbers that matter."""
    stream, read = terminal(columns, monkeypatch)
    console = writers.ConsoleWriter(1_000_000, stream)
    console.write(WIDE)
    console.write({"step": 123456, "time": 0.0} | EVALUATION)
    console.write(WIDE | {"step": 123466})
    console.close()
    evaluation, *more, progress, end = read()
    assert end == "" and all(len(line) < columns for line in (evaluation, *more, progress))
    shown = "step 123466/1000000 eta 99:59:59 loss 10.717 lr 3.00e-04 123M tok/s grad 0.879"
    assert " ".join(progress.split()).startswith(shown)
    assert ("mfu 41.2%" in progress) == (columns == 200)
    numbers = [f"{k} {v:,.0f}" if v >= 1000 else f"{k} {v:.4g}" for k, v in EVALUATION.items()]
    lines = [part for line in (evaluation, *more) for part in line.strip().split("  ")]
    assert lines == ["step 123456/1000000", *numbers]


def test_a_narrow_terminal_shows_what_fits(monkeypatch):
    stream, read = terminal(30, monkeypatch)
    console = writers.ConsoleWriter(20, stream)
    for step in (8, 9, 10):
        console.write(RECORD | {"step": step})
    console.write({"step": 10, "time": 0.0, "eval/loss": 1.0})
    console.write(RECORD | {"step": 11})
    console.close()
    assert read() == ["step 10/20  eval/loss 1", "step 11/20 eta 1:02:03", ""]


@pytest.mark.parametrize(("columns", "shown"), [(22, "step 11/20"), (23, "step 11/20 eta 1:02:03")])
def test_a_line_takes_all_columns_but_the_last(columns, shown, monkeypatch):
    stream, read = terminal(columns, monkeypatch)
    console = writers.ConsoleWriter(20, stream)
    console.write(RECORD | {"step": 11})
    console.close()
    assert read() == [shown, ""]


def test_numbers_of_at_least_1000_have_separators():
    stream = io.StringIO()
    values = {"eval/a": 1000.0, "eval/b": -20470.4, "health/layers/c": 999.4, "eval/d": -0.5}
    writers.ConsoleWriter(20, stream).write({"step": 20, "time": 0.0} | values)
    assert (
        stream.getvalue()
        == "step 20/20  eval/a 1,000  eval/b -20,470  health/layers/c 999.4  eval/d -0.5\n"
    )


def test_format_count():
    numbers = (0.0123, 7, 999.4, 999.6, 7144, 999_999, 1.5e9, 2e13)
    shown = ["0.0123", "7", "999", "1k", "7.14k", "1M", "1.5G", "2e+04G"]
    assert [writers.format_count(x) for x in numbers] == shown


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


def test_tensorboard_hides_what_a_start_without_a_checkpoint_has_left(tmp_path):
    with writer(tmp_path, tensorboard=True) as w:
        w.write(0, {"eval/loss": 2.0})
    assert ("purged from", 0) in read_events(tmp_path / "tensorboard")


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        (
            "tensorboardX.event_file_writer",
            {"tensorboard": True},
            "tensorboard=True needs tensorboardX: pip install",
        ),
        ("wandb", {"wandb_project": "llama"}, "wandb_project='llama' needs wandb: pip install"),
    ],
)
def test_a_missing_package_is_reported_in_one_line(tmp_path, monkeypatch, module, changes, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=message), writer(tmp_path, **changes):
        pass


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
def test_a_full_disk_is_an_error_at_once_and_names_the_file(tmp_path, monkeypatch, name):
    """tensorboardX's own writer would wait forever, because the thread that empties its queue has ended."""

    def fails(_):
        raise OSError(28, "No space left on device")

    with writer(tmp_path, tensorboard=True) as w, pytest.raises(OSError, match=rf"No space left.*/{name}'"):
        jsonl, _, tensorboard = w._writers
        if name == "metrics.jsonl":
            monkeypatch.setattr(jsonl, "_file", types.SimpleNamespace(write=fails, close=jsonl._file.close))
        else:
            monkeypatch.setattr(tensorboard._writer, "write_event", fails)
        w.write(1, {"train/loss": 1.0})


def test_wandb_continues_the_run_of_the_workdir(tmp_path, monkeypatch):
    calls, logged = [], []

    class Run:
        def __init__(self, **kwargs):
            calls.append(kwargs)
            self.id = kwargs["id"] or "abc"

        def log(self, values, step):
            logged.append((step, values))

        def finish(self):
            pass

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=Run))
    labels = [{}, {"wandb_group": "sizes", "wandb_tags": ("a", "b")}]
    for resume_step in (0, 1):
        options = {"wandb_project": "llama", "run_config": {"seed": 1 + resume_step}} | labels[resume_step]
        with writer(tmp_path, resume_step=resume_step, **options) as w:
            w.write(resume_step + 1, {"train/loss": 2.0})
    assert [c["id"] for c in calls] == [None, "abc"] and {c["resume"] for c in calls} == {"allow"}
    assert calls[0]["project"] == "llama" and calls[0]["config"] == {"seed": 1}
    assert calls[1]["config"] == {"seed": 2} and calls[1]["allow_val_change"]
    # Without a choice in the config, the environment chooses: WANDB_RUN_GROUP, WANDB_TAGS, WANDB_MODE.
    assert [(c["group"], c["tags"]) for c in calls] == [(None, None), ("sizes", ["a", "b"])]
    assert not any("mode" in c for c in calls)
    assert logged == [(1, {"train/loss": 2.0}), (2, {"train/loss": 2.0})]


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with writer(tmp_path / "run", tensorboard=True) as w:
        w.write(1, {"train/loss": 2.0})
    assert not (tmp_path / "run").exists()


def test_jsonl_is_plain_json(tmp_path):
    with writer(tmp_path) as w:
        w.write(np.int32(3), {"train/loss": jnp.bfloat16(0.5), "train/tokens": np.int64(7)})
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record.pop("time") > 1e9
    assert record == {"step": 3, "train/loss": 0.5, "train/tokens": 7}


@pytest.mark.parametrize("process", [1, 2])
def test_no_later_process_writes(process, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: process)
    with writer(tmp_path / "run") as w:
        w.write(1, {"train/loss": jnp.float32(1.0)})
    assert not (tmp_path / "run").exists()
