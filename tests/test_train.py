"""Runs of the training command: kills, restarts, other meshes, several processes, non-finite losses."""

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from maxlp import train
from maxlp.data import text
from maxlp.data.images import encode_png
from maxlp.monitoring import curves, run_record, sections
from maxlp.monitoring.run_record import read_jsonl
from maxlp.parallel import sharding
from maxlp.planning import topologies
from maxlp.runtime import manifest
from maxlp.runtime.lock import WorkdirLock
from tests.commands import run_command
from tests.run_outputs import arrays, checkpoint, losses, records
from tests.training_runs import ROOT, environments, finish, shown, start

WHOLE = (
    "--config.train.total_steps=12",
    "--config.train.eval_every=4",
    "--config.optimizer.schedule=constant",  # so that a shorter run is the beginning of a longer one
)
SMALL_CLIP = [
    "--config=configs/clip/debug.py",
    "--config.model.embed_dim=16",
    "--config.model.visual.image_size=16",
    *(
        f"--config.model.{tower}.{key}={value}"
        for tower in ("visual", "text")
        for key, value in dict(width=32, num_layers=1, num_heads=2, mlp_dim=64).items()
    ),
    "--config.model.visual.patch_dropout=0.5",
    "--config.model.text.eos_id=257",
    "--config.data.tokenizer=bytes",
    "--config.data.image_size=16",
    "--config.data.batch_size=16",
    "--config.optimizer.warmup_steps=2",
    "--config.train.log_every=1",
    "--config.train.eval_every=4",
]


def run(workdir: Path, *options: str, **kwargs) -> str:
    return finish(start(workdir, *options, **kwargs))


# From outside, the signal could come when the run has ended.
STOPS_ITSELF = """
import builtins, os, re, signal
from maxlp import train
from maxlp.run import cli

show, step = print, os.environ["STOP_AT"]

def show_and_stop(*words, **kwargs):
    show(*words, **kwargs)
    if words and re.match(rf"step {step}\\D", str(words[0])):
        builtins.print = show
        os.kill(os.getpid(), signal.SIGTERM)

builtins.print = show_and_stop
train.define_flags()
cli.run(train.main)
"""


def stop_at(step: int, workdir: Path, *options: str, **kwargs) -> str:
    """A run that gets SIGTERM as soon as it has printed this step."""
    command = (sys.executable, "-c", STOPS_ITSELF)
    return finish(start(workdir, *options, command=command, STOP_AT=str(step), **kwargs), code=75)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 12 steps."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    return workdir, run(workdir, *WHOLE)


def test_a_run_writes_its_files_and_learns(whole):
    workdir, out = whole
    assert {"config.json", "run.json", "metrics.jsonl", "loss.png", "checkpoints", "tensorboard"} <= {
        p.name for p in workdir.iterdir()
    }
    assert "first step after" in out and "step 12/12" in out
    seen = losses(workdir)
    assert sorted(seen) == list(range(1, 13))
    # The loss of untrained weights is near the entropy of a uniform guess.
    assert abs(seen[1] - math.log(512)) < 1.0
    assert seen[12] < seen[1]
    evals = [r for r in records(workdir) if "eval/loss" in r]
    assert [r["step"] for r in evals] == [4, 8, 12]
    assert {r["eval/tokens"] for r in evals} == {evals[0]["eval/tokens"]}, "always the same text"
    (full,) = (r for r in records(workdir) if "eval_full/loss" in r)
    assert full["step"] == 12 and full["eval_full/tokens"] > evals[0]["eval/tokens"]
    assert re.search(r"\n  eval/loss .* at step 12 on the first 2 validation batches", out)
    assert re.search(r"\n  eval_full/loss .* at step 12 on all validation data\n", out)
    begun = json.loads((workdir / "run.json").read_text())["starts"][0]
    assert begun["versions"]["jax"] == jax.__version__
    assert begun["num_params"] == sum(
        len(v) // 4 for k, v in arrays(workdir / "checkpoints" / "12").items() if "params" in k
    )


def test_evaluate_and_generate_and_report_on_the_run(whole):
    workdir, _ = whole

    def output(*command):
        done = run_command(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    measured = dict(line.split() for line in output("evaluate", f"--workdir={workdir}").splitlines()[1:])
    last = [r for r in records(workdir) if "eval_full/loss" in r][-1]
    # The command shows four decimals.
    assert float(measured["loss"]) == pytest.approx(last["eval_full/loss"], abs=1e-4)
    assert float(measured["bits_per_byte"]) == pytest.approx(last["eval_full/bits_per_byte"], abs=1e-4)
    generate = ("generate", f"--workdir={workdir}", "--prompt=def ", "--prompt=x", "--max_new_tokens=5")
    text = output(*generate)
    assert "\ndef " in text and "\nx" in text
    assert text == output(*generate)
    assert "finished, 12 steps" in output("report", str(workdir))


# A training run on a clock that only its data (3 seconds a batch) and its steps (1 second) move.
SLOW_DATA = """
import functools
from concurrent.futures import Future
import jax
from maxlp import train
from maxlp.run import cli, intact_batches

now = 0.0

def taking(seconds, function):
    def slow(*args):
        global now
        result = jax.block_until_ready(function(*args))
        now += seconds
        return result
    return slow

def slow_batches(*args):
    batches = real_batches(*args)
    while batch := taking(3.0, next)(batches, None):
        yield batch

def compiled(*args):
    future = Future()
    future.set_result(taking(1.0, compile(*args).result()))
    return future

compile, train.compile_in_background = train.compile_in_background, compiled
real_batches, intact_batches.device_batches = intact_batches.device_batches, slow_batches
train.Throughput = functools.partial(train.Throughput, clock=lambda: now)
train.define_flags()
cli.run(train.main)
"""


@pytest.mark.aot("jax_cuda13_plugin")
def test_a_gpu_does_nothing_else_while_the_step_is_compiled():
    class Step:
        def lower(self, *_):
            return self

        def compile(self):
            time.sleep(0.3)

    with contextlib.ExitStack() as stack:
        mesh = sharding.make_mesh(devices=topologies.devices(topologies.parse("h100:1x1")))
        assert train.compile_in_background(Step(), {}, {}, mesh, stack).done()


def test_a_run_seems_finished_with_a_checkpoint_of_its_last_step(tmp_path):
    s = SimpleNamespace(train=SimpleNamespace(total_steps=8))
    for saved, finished in (("7", False), ("9.unfinished", False), ("8", True)):
        (tmp_path / "checkpoints" / saved).mkdir(parents=True)
        assert train.seems_finished(s, tmp_path) == finished


@pytest.mark.full
def test_a_run_says_how_long_it_waits_for_data(tmp_path):
    """In the record of every step, before and after evaluations and checkpoints too."""
    run(tmp_path, *WHOLE, command=(sys.executable, "-c", SLOW_DATA))
    timed = {r["step"]: r for r in read_jsonl(tmp_path / "metrics.jsonl") if "perf/step_time" in r}
    assert sorted(timed) == list(range(2, 13))
    assert {(r["perf/step_time"], r["perf/data_wait"]) for r in timed.values()} == {(4.0, 0.75)}


@pytest.mark.slow
def test_low_precision_run_resumes_exactly(tmp_path):
    """FP8 histories and StableAdamW's state are part of the run as weights are."""
    options = (
        "--config.precision.recipe=fp8_delayed",
        "--config.optimizer.name=stable_adamw",
        "--config.precision.first_blocks=0",
        "--config.train.total_steps=6",
    )
    out = run(tmp_path / "whole", *options)
    assert "layers/mlp/down_proj: fp8_delayed" in out
    assert out.count("from step 2 on, delayed scales come from histories") == 1
    stop_at(2, tmp_path / "cut", *options)
    run(tmp_path / "cut", *options)
    assert checkpoint(tmp_path / "cut", 6) == checkpoint(tmp_path / "whole", 6)
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


@pytest.mark.full
def test_magnitudes_are_logged_and_change_nothing(tmp_path):
    options = ("--config.train.total_steps=4", "--config.precision.magnitudes_every=2")
    run(tmp_path / "measured", *options)
    run(tmp_path / "plain", *options[:1])
    assert losses(tmp_path / "measured") == losses(tmp_path / "plain")
    found = [r for r in read_jsonl(tmp_path / "measured" / "metrics.jsonl") if "magnitude/layers/0" in r]
    assert [r["step"] for r in found] == [2, 4]
    assert found[0].keys() == {"step", "time", "magnitude/layers/0", "magnitude/layers/1"}


@pytest.mark.slow
def test_adascale_ends_after_the_steps_of_the_small_batch_and_resumes_exactly(tmp_path):
    options = (
        "--config.optimizer.name=sgd",
        "--config.optimizer.learning_rate=0.02",
        "--config.optimizer.adascale=4",
        "--config.train.microbatches=4",
        "--config.train.total_steps=20",
    )
    run(tmp_path / "whole", *options)
    stop_at(4, tmp_path / "cut", *options)
    run(tmp_path / "cut", *options)
    got = [r for r in records(tmp_path / "cut") if "train/tau" in r]
    last, tau = got[-1]["step"], [r["train/tau"] for r in got]
    assert 20 / 4 < last < 20 and tau[-2] < 20 <= tau[-1]
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert any("eval/loss" in r for r in records(tmp_path / "cut") if r["step"] == last)
    assert checkpoint(tmp_path / "cut", last) == checkpoint(tmp_path / "whole", last)
    assert "nothing is left to train" in run(tmp_path / "cut", *options)
    assert f"finished, {last} steps" in shown("report", str(tmp_path / "cut"))


@pytest.mark.full
def test_a_run_with_adascale_goes_on_with_another_batch_size(tmp_path):
    def options(scale: int) -> tuple[str, ...]:
        return (
            "--config.optimizer.name=sgd",
            "--config.optimizer.learning_rate=0.02",
            "--config.train.total_steps=20",
            f"--config.optimizer.adascale={scale}",
            f"--config.train.microbatches={scale}",
            f"--config.data.batch_size={4 * scale}",
        )

    stop_at(4, tmp_path, *options(2))
    seen = losses(tmp_path)
    assert "add --allow_change" in finish(start(tmp_path, *options(4)), code=2)
    run(tmp_path, *options(4), "--allow_change")
    tau = {r["step"]: r["train/tau"] for r in records(tmp_path) if "train/tau" in r}
    stopped, last = len(seen), max(tau)
    assert 1 <= tau[stopped + 1] - tau[stopped] <= 4 and tau[last - 1] < 20 <= tau[last]
    rows = stopped * 8 + (last - stopped) * 16
    length = json.loads((tmp_path / "config.json").read_text())["data"]["seq_len"]
    assert f"{rows * length:,} ({16 * length:,} per step)" in shown("report", str(tmp_path))


@pytest.mark.full
def test_sigterm_saves_and_exits_with_75_and_the_run_resumes_to_the_bit(whole, tmp_path):
    options = (*WHOLE, "--config.checkpoint.every_steps=100")
    out = stop_at(5, tmp_path, *options)
    stopped = int(out.split("stopped and saved at step ")[1].split(";")[0])
    assert "the same command resumes" in out and (tmp_path / "checkpoints" / str(stopped)).exists()
    assert f"resuming at step {stopped}" in run(tmp_path, *options)
    launches = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [launch.get("ended_by") for launch in launches] == ["SIGTERM", None]
    assert records(tmp_path) == records(whole[0])
    assert checkpoint(tmp_path, 12) == checkpoint(whole[0], 12)
    remove_watch(tmp_path / "checkpoints" / "12")
    assert "nothing is left to train" in run(tmp_path, *options)


def remove_watch(saved: Path) -> None:
    """Removes the spike detector's state from a checkpoint: older checkpoints have none."""
    record = json.loads((saved / "checkpoint.json").read_text())
    del record["meta"]["watch"]
    (saved / "checkpoint.json").write_text(json.dumps(record))
    (saved / "manifest.txt").unlink()
    manifest.write(saved, manifest.checksums(saved, manifest.file_sizes(saved)))


def refused(workdir: Path, message: str) -> None:
    """A start that ends with one line and changes nothing."""

    def content():
        return {p: p.is_file() and p.read_bytes() for p in workdir.rglob("*")}

    before, process = content(), start(workdir, *WHOLE)
    out = finish(process, code=2)
    assert message in out.splitlines()[-1] and "Traceback" not in out
    assert content() == before


def test_a_workdir_in_use_or_without_its_checkpoints_is_refused_and_stays_as_it_is(whole, tmp_path):
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    (workdir / "checkpoints" / "99.unfinished").mkdir()
    with WorkdirLock(workdir) as lock:
        lock.acquire()
        lock._released.set()  # no more beats
        refused(workdir, f"{workdir} is in use: process {os.getpid()} on ")
    shutil.rmtree(workdir / "checkpoints")
    refused(workdir, "checkpoints holds no checkpoint, but the run had saved step 12")


# Once, the save of step 6 never ends, and the clock is set back: what TensorStore does then.
CLOCK_SET_BACK = """
import os, pathlib, threading, time
from maxlp import train
from maxlp.run import cli
from maxlp.runtime import checkpoint, manifest

checksums, now = manifest.shared_checksums, time.time

def never_ends(root, *args):
    if root.name == "6.unfinished":
        time.time = lambda: now() - 3600
        threading.Event().wait()
    return checksums(root, *args)

marker = pathlib.Path(os.environ["MARKER"])
if not marker.exists():
    marker.touch()
    checkpoint._CLOCK_GRACE = 0.1
    manifest.shared_checksums = never_ends
train.define_flags()
cli.run(train.main)
"""


@pytest.mark.full
def test_a_run_whose_save_never_ends_because_of_the_clock_starts_itself_again(whole, tmp_path):
    command = (sys.executable, "-c", CLOCK_SET_BACK)
    out = finish(start(tmp_path / "run", *WHOLE, command=command, MARKER=str(tmp_path / "marker")))
    assert out.count("the clock was set back by 3,600 s") == 1 and "is started now" in out
    assert "run: resuming at step 3" in out and "killed" not in out
    assert records(tmp_path / "run") == records(whole[0])
    assert checkpoint(tmp_path / "run", 12) == checkpoint(whole[0], 12)
    assert not (tmp_path / "run" / "lock").exists()


def test_a_loss_that_is_not_finite_is_not_saved(tmp_path):
    process = start(tmp_path, "--config.train.total_steps=12", "--config.optimizer.learning_rate=1e30")
    out = process.communicate(timeout=300)[0]
    assert process.returncode == 2
    assert "error: the loss of step" in out.splitlines()[-1]
    seen = losses(tmp_path)
    saved = [int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()]
    assert all(math.isfinite(seen[n]) for n in saved)
    assert len(seen) < 12


NEVER_COMPILES = """
from maxlp import train
from maxlp.run import cli

train.compile_in_background = None
train.define_flags()
cli.run(train.main)
"""


@pytest.mark.full
def test_the_end_of_the_data_is_reported_and_saved(tmp_path):
    (tmp_path / "corpus").mkdir()
    for i in range(40):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"{i} bottles of beer on the wall. " * 20)
    options = [f"--config.data.source=text:{tmp_path}/corpus?validation=0.1", "--config.data.num_epochs=1"]
    options.append("--config.train.log_every=1000")
    process = start(tmp_path / "run", *options, "--config.train.total_steps=1000", devices=2)
    out = finish(process, code=2)
    message = out.splitlines()[-1]
    assert "the data ended at step" in message and "num_epochs" in message
    ended = int(message.split("ended at step ")[1].split()[0])
    assert (tmp_path / "run" / "checkpoints" / str(ended)).exists()
    assert list(losses(tmp_path / "run")) == [ended]
    (launch,) = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert launch["ended_by"].startswith("ValueError: the data ended at step")
    (full,) = (r for r in records(tmp_path / "run") if "eval_full/loss" in r)
    assert full["step"] == ended
    options.append(f"--config.train.total_steps={ended}")
    command = (sys.executable, "-c", NEVER_COMPILES)  # at exit the compilation would be waited for
    out = finish(start(tmp_path / "run", *options, devices=2, command=command))
    assert f"at step {ended} of {ended}: nothing is left to train" in out
    assert f"finished, {ended} steps" in shown("report", str(tmp_path / "run"))


@pytest.mark.full
def test_the_steps_before_a_broken_document_are_saved_and_the_run_resumes_once_it_is_repaired(tmp_path):
    lines = [json.dumps({"text": f"{i} bottles of beer on the wall. " * 3}) for i in range(3000)]
    lines[100] = '{"text": "trunc'  # not among the documents that are sampled at the start
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    options = [f"--config.data.source=jsonl:{tmp_path}/a.jsonl", "--config.data.shuffle=False"]
    command = (tmp_path / "run", *options, "--config.train.total_steps=20")
    message = finish(start(*command), code=2).splitlines()[-1]
    assert f"{tmp_path}/a.jsonl:101: not a complete JSON object" in message
    saved = int(re.search(r"step (\d+) is saved: repair the data", message)[1])
    assert saved > 0 and (tmp_path / "run" / "checkpoints" / str(saved)).exists()
    again = finish(start(*command), code=2).splitlines()[-1]
    assert f"{tmp_path}/a.jsonl:101: " in again and "is saved" not in again
    lines[100] = json.dumps({"text": "whole"})
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    out = finish(start(*command, "--allow_change"))
    assert f"resuming at step {saved}" in out and "step 20/20" in out


@pytest.mark.full
def test_init_from_takes_weights_only(whole, tmp_path):
    out = run(
        tmp_path,
        "--config.train.total_steps=3",
        "--config.optimizer.learning_rate=1e-30",
        f"--config.train.init_from={whole[0]}",
    )
    assert "a new run" in out
    before, after = (arrays(d / "checkpoints" / str(n)) for d, n in ((whole[0], 12), (tmp_path, 3)))
    params = [name for name in before if "params" in name]
    assert params and all(before[name] == after[name] for name in params)
    assert losses(tmp_path)[1] < losses(whole[0])[1]


@pytest.mark.full
def test_a_run_continues_on_another_mesh_with_equal_losses(tmp_path):
    """fsdp 8 to data 2 × tensor 4 in the middle of a run: losses of the uninterrupted run, to rounding."""
    heads = ["--config.model.num_heads=4", "--config.model.num_kv_heads=4", "--config.model.head_dim=8"]
    total, stop = "--config.train.total_steps=12", "--config.optimizer.warmup_steps=2"
    reference, moved = tmp_path / "reference", tmp_path / "moved"
    run(reference, *heads, total, stop, devices=8)
    stop_at(5, moved, *heads, total, stop, devices=8)
    out = run(
        moved,
        *heads,
        total,
        stop,
        "--config.mesh.data=2",
        "--config.mesh.fsdp=1",
        "--config.mesh.tensor=4",
        devices=8,
    )
    assert "changed since the last launch: config.mesh.tensor: 1 -> 4" in out
    got, want = losses(moved), losses(reference)
    assert got.keys() == want.keys()
    assert all(math.isclose(got[n], want[n], rel_tol=1e-4) for n in want), (got, want)


@pytest.mark.parametrize(
    ("processes", "mesh"),
    [
        pytest.param(2, "--config.mesh.dcn_data=2", marks=pytest.mark.full),
        pytest.param(4, "--config.mesh.data=1", marks=pytest.mark.slow),
    ],
)
def test_several_processes_train_like_one_and_one_process_continues(whole, processes, mesh, tmp_path):
    """Two processes with one replica each, or four that share one, have the losses of a single process.

    Then a single process resumes from their checkpoint on another mesh.
    """
    six, nine = "--config.train.total_steps=6", "--config.train.total_steps=9"
    group = [
        start(tmp_path, *WHOLE, six, mesh, devices=4 // processes, **env) for env in environments(processes)
    ]
    for process in group:
        finish(process)
    assert "resuming at step 6" in run(tmp_path, *WHOLE, nine, devices=2)
    got, want = losses(tmp_path), losses(whole[0])
    assert sorted(got) == list(range(1, 10))
    assert all(math.isclose(got[n], want[n], rel_tol=1e-4) for n in got), (got, want)


def write_pictures(folder: Path, count: int, broken: int) -> None:
    """A WebDataset of squares of three shades with their names as classes, one of them cut short."""
    names = ("black", "gray", "white")
    (folder / "classes.txt").write_text("\n".join(names))
    rng = np.random.default_rng(0)
    with tarfile.open(folder / "pictures.tar", "w") as tar:
        for number in range(count):
            label = number % 3
            pixels = np.uint8(100 * label + rng.integers(0, 50, (20, 24, 3)))
            image = encode_png(pixels)[: 200 if number == broken else None]
            for kind, data in (("png", image), ("cls", b"%d" % label)):
                member = tarfile.TarInfo(f"{number:03d}.{kind}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


@pytest.mark.full
def test_clip_trains_resumes_exactly_and_is_evaluated(tmp_path):
    """From a tar file with a damaged image, whose count survives the interruption."""
    write_pictures(tmp_path, count=40, broken=5)
    options = [
        f"--config.data.source=tar:{tmp_path}/pictures.tar?validation=0.25",
        f"--config.data.classes={tmp_path}/classes.txt",
        "--config.train.total_steps=8",
    ]
    out = run(tmp_path / "whole", *options, config=SMALL_CLIP)
    assert "skipped 1" in out and "pictures.tar: 005" in out
    stop_at(3, tmp_path / "cut", *options, config=SMALL_CLIP)
    assert "resuming at step" in run(tmp_path / "cut", *options, config=SMALL_CLIP)
    assert checkpoint(tmp_path / "cut", 8) == checkpoint(tmp_path / "whole", 8)
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    last = read_jsonl(tmp_path / "cut" / "metrics.jsonl")
    assert [r["data/skipped"] for r in last if "train/loss" in r][-1] == 1
    seen = losses(tmp_path / "whole")
    assert sorted(seen) == list(range(1, 9)) and seen[8] < seen[1]

    found = shown("evaluate", f"--workdir={tmp_path / 'cut'}", "--linear_probe").splitlines()[1:]
    measured = {name: float(value) for name, value in map(str.split, found)}
    at_end = [r for r in records(tmp_path / "whole") if "eval/zero_shot_top1" in r][-1]
    for name, value in at_end.items():
        if name != "step":
            assert measured[name.removeprefix("eval/")] == pytest.approx(value, abs=1e-4)
    assert measured["linear_probe_test_accuracy"] == 1.0  # shades are easy to classify
    assert "linear_probe_train_examples 29" in [" ".join(line.split()) for line in found]  # 1 of 30 broken


@pytest.mark.full
def test_the_steps_before_too_many_broken_images_are_saved(tmp_path):
    write_pictures(tmp_path, count=40, broken=22)
    command = [
        tmp_path / "run",
        f"--config.data.source=tar:{tmp_path}/pictures.tar?validation=0.25",
        f"--config.data.classes={tmp_path}/classes.txt",
        "--config.data.batch_size=4",
        "--config.train.total_steps=8",
    ]
    message = finish(start(*command, "--config.data.max_broken=0", config=SMALL_CLIP), code=2)
    message = message.splitlines()[-1]
    assert "pictures.tar: 022: " in message and "raise max_broken" in message
    saved = int(re.search(r"step (\d+) is saved", message)[1])
    assert saved > 0 and f"resuming at step {saved}" in run(*command, config=SMALL_CLIP)


@pytest.mark.slow
def test_a_run_that_is_killed_at_random_ends_like_one_that_is_not(tmp_path):
    """At least five times, with SIGKILL: weights, optimizer state, data position and records are equal."""
    options = ("--config.train.total_steps=60", "--config.train.eval_every=10")
    run(tmp_path / "whole", *options)
    killed, rng, kills, steps = tmp_path / "killed", random.Random(0), 0, set()
    while kills < 6:
        process = start(killed, *options)
        wait = rng.randint(1, 12)
        for line in process.stdout:
            if line.startswith("step "):
                steps.add(line.split()[1])
                wait -= 1
                if wait == 0:
                    time.sleep(rng.random() * 0.2)
                    break
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
    assert kills >= 5
    run(killed, *options)
    assert checkpoint(killed, 60) == checkpoint(tmp_path / "whole", 60)
    assert records(killed) == records(tmp_path / "whole")


@pytest.mark.slow
def test_the_debug_run_reaches_the_score_in_its_header(tmp_path):
    """The README's command reaches the validation bits per byte in the config's header."""
    command = [
        sys.executable,
        "-m",
        "maxlp.train",
        "--config=configs/llama/debug.py",
        f"--workdir={tmp_path}",
    ]
    # The tests' XLA flags compile quickly; a long run wants fast programs.
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=1800)
    expected = next(
        float(line.split(":")[1].split()[0])
        for line in (ROOT / "configs/llama/debug.py").read_text().splitlines()
        if line.startswith("Validation bits per byte:")
    )
    final = [r for r in read_jsonl(tmp_path / "metrics.jsonl") if "eval_full/bits_per_byte" in r][-1]
    assert final["eval_full/bits_per_byte"] < expected + 0.03
    sample = shown("generate", f"--workdir={tmp_path}", "--prompt=def ")
    assert "def " in sample and len(sample) > 100


def on_a_read_only_file_system(*_, **__):
    raise OSError(errno.EROFS, "Read-only file system")


def test_a_run_that_cannot_keep_its_compiled_programs_says_so(tmp_path, monkeypatch, capsys):
    """As in a container whose user has the home directory / and may not write there."""
    (tmp_path / "home").touch()
    before = jax.config.jax_compilation_cache_dir
    train.keep_compiled_programs(tmp_path / "home" / "xla")
    assert "home/xla cannot be written to (Not a directory); set XDG_CACHE_HOME" in capsys.readouterr().out
    monkeypatch.setattr(train.tempfile, "TemporaryFile", on_a_read_only_file_system)
    train.keep_compiled_programs(tmp_path)
    assert f"{tmp_path} cannot be written to (Read-only file system)" in capsys.readouterr().out
    assert jax.config.jax_compilation_cache_dir == before


def test_a_folder_without_room_for_compiled_programs_is_not_used(tmp_path, capsys):
    """JAX would leave the beginning of each, which no later launch replaces."""
    before, limits = jax.config.jax_compilation_cache_dir, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        train.keep_compiled_programs(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{tmp_path} cannot be written to (File too large)" in capsys.readouterr().out
    assert jax.config.jax_compilation_cache_dir == before
    assert not list(tmp_path.iterdir())


def test_a_finished_run_whose_curves_cannot_be_drawn_ends_well(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_record, "load_run", lambda workdir: None)
    monkeypatch.setattr(sections, "loss_lines", lambda run: [])
    monkeypatch.setattr(curves, "plot_curves", on_a_read_only_file_system)
    assert train.finish(tmp_path) == 0
    assert "no curves: [Errno 30] Read-only file system; more: python -m" in capsys.readouterr().out


def test_data_that_is_only_compared_stays_at_its_beginning(tmp_path, monkeypatch):
    """A run that was rolled back to its beginning has the record of a later checkpoint."""
    config = text.TextDataConfig(
        source="stdlib", tokenizer="bytes", seq_len=8, batch_size=2, shuffle_tokens=0
    )
    later = iter(text.make_data(config, split="train"))
    next(later)
    later.close()
    step = tmp_path / "checkpoints" / "1.rolled_back"
    step.mkdir(parents=True)
    (step / "checkpoint.json").write_text(json.dumps({"data_state": later.get_state()}))
    settings = SimpleNamespace(model=None, data=None, loss=None, train=SimpleNamespace(total_steps=1))
    run = SimpleNamespace(settings=settings, mesh=None, family=SimpleNamespace(evaluator=lambda *_: None))
    monkeypatch.setattr(train, "prepare_tokenizer", lambda *_: "bytes")
    monkeypatch.setattr(train, "make_data", lambda _, __, split, ___: text.make_data(config, split=split))
    monkeypatch.setattr(train, "flags", SimpleNamespace(FLAGS=SimpleNamespace(allow_change=False)))
    batches, _, _ = train.open_data(run, None, tmp_path)
    assert batches.get_state()["step"] == 0
    config = dataclasses.replace(config, seq_len=16)
    with pytest.raises(ValueError, match=r"^data.seq_len: 8 when the run was saved, now 16"):
        train.open_data(run, None, tmp_path)
