import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maxlp.monitoring.rollback import read_rollbacks
from maxlp.monitoring.run_record import read_jsonl
from maxlp.monitoring.spike_records import Crossing, read_record
from maxlp.monitoring.spikes import SpikeConfig
from maxlp.run import late_phase, reopen, replay
from maxlp.run.config import ConfigError
from maxlp.run.settings import read
from maxlp.runtime import manifest
from maxlp.runtime.checkpoint import StepInfo
from tests.monitoring.fixtures import write_rollback, write_spike
from tests.run.fixtures import changed, load
from tests.run_outputs import losses
from tests.training_runs import finish, start


def test_the_first_gradient_to_stand_out():
    rng = np.random.default_rng(0)
    norms = {name: 1 + 0.1 * rng.uniform(-1, 1, 40) for name in "abc"}
    norms["b"][10] = 5.0  # long before
    norms["a"][36], norms["c"][36], norms["b"][38] = 3.0, 2.0, 9.0
    steps = [{"step": i, "grad_norms": {k: v[i] for k, v in norms.items()}} for i in range(40)]
    first = replay.first_to_stand_out(steps, SpikeConfig())
    assert (first.tensor, first.step) == ("a", 36) and first.value > 10
    assert replay.first_to_stand_out(steps[:20], SpikeConfig(lead=2)) is None


def test_gradients_that_are_not_finite_stand_out_however_short_the_replay():
    steps = [{"step": i, "grad_norms": {"a": 1.0, "b": 1.0, "c": 1.0}} for i in range(1, 4)]
    assert replay.first_to_stand_out(steps, SpikeConfig()) is None
    steps[2]["grad_norms"] = {"a": 1.0, "b": math.nan, "c": math.inf}
    first = replay.first_to_stand_out(steps, SpikeConfig())
    assert first == Crossing("b and 1 other", 3, math.inf)
    lines = [*replay.finding_lines(replay.Finding({}, by_rms=None, by_grad_norm=first), 3, SpikeConfig())]
    expected = "first by gradient norm: b and 1 other at step 3, that of the spike (not finite)"
    assert lines[1] == expected


def test_gradients_that_overflowed_before_do_not_hide_the_first_to_stand_out():
    steps = [{"step": i, "grad_norms": {"a": 1 + 0.1 * (i % 2), "b": 1 + 0.1 * (i % 3)}} for i in range(40)]
    steps[20]["grad_norms"] = {"a": math.inf, "b": math.nan}  # of a step that the loss scale skipped
    steps[38]["grad_norms"]["b"] = 3.0
    first = replay.first_to_stand_out(steps, SpikeConfig())
    assert (first.tensor, first.step) == ("b", 38) and 10 < first.value < math.inf


def test_only_the_last_steps_are_examined():
    steps = [
        {"step": n, "loss": float(n), "rms": {"a": 2.0 if n in (5, 6) else 1.0}, "grad_norms": {"a": 1.0}}
        for n in range(1, 11)
    ]
    finding = replay.examine(steps, SpikeConfig(lead=4))
    assert finding.losses == {n: float(n) for n in range(1, 11)}
    assert finding.by_rms == Crossing("a", 6, 2.0) and finding.by_grad_norm is None


def test_the_lines_of_a_finding():
    losses = {step: 1.0 for step in range(20, 40)}
    finding = replay.Finding(losses, by_rms=None, by_grad_norm=Crossing("a", 36, 12.34))
    assert list(replay.finding_lines(finding, 39, SpikeConfig())) == [
        "first by RMS_t: no tensor was above 1.8 in the 8 steps before the spike",
        "first by gradient norm: a at step 36, 3 before the spike (12.3 σ)",
    ]
    name = "text/layers/mlp/down_proj/kernel/11"
    finding = replay.Finding(losses, by_rms=Crossing(name, 30, 2.0), by_grad_norm=None)
    rows = "\n".join(replay.finding_lines(finding, 39, SpikeConfig()))
    assert name in rows and "above its preceding mean" in rows and max(map(len, rows.splitlines())) <= 80


def test_a_replay_too_short_for_a_mean_does_not_say_that_no_gradient_stood_out():
    finding = replay.Finding({step: 1.0 for step in range(30, 40)}, by_rms=None, by_grad_norm=None)
    [_, line] = replay.finding_lines(finding, 39, SpikeConfig())
    assert line.replace("\n ", "") == (
        "first by gradient norm: unknown, because a mean takes spikes.min_history=16 steps and the replay "
        "has 9 steps before the spike"
    )


def test_the_checkpoint_to_start_from(tmp_path, monkeypatch):
    def list_steps(folder):
        steps = [10, 20] if folder.name == "checkpoints" and folder.parent == tmp_path else []
        return [StepInfo(n, folder / str(n), "complete", 0, 0.0) for n in steps]

    assert reopen.find_checkpoint(tmp_path, 9, lead=2) is None, "no checkpoint: from the beginning"
    monkeypatch.setattr(reopen.checkpoint, "list_steps", list_steps)
    assert reopen.find_checkpoint(tmp_path, 25, lead=2) == tmp_path / "checkpoints" / "20"
    with pytest.raises(ValueError, match="no checkpoint from before step 9; its oldest is from step 10"):
        reopen.find_checkpoint(tmp_path, 9, lead=2)
    kept = tmp_path / "spikes" / "checkpoints" / "5"
    kept.mkdir(parents=True)
    write_spike(tmp_path, 25, checkpoint="spikes/checkpoints/5")
    assert reopen.find_checkpoint(tmp_path, 25, lead=2) == kept
    write_spike(tmp_path, 25, checkpoint=None)
    assert reopen.find_checkpoint(tmp_path, 25, lead=2) is None, "that of step 20 is of later steps"


def test_checkpoints_of_steps_that_a_rollback_has_undone_start_no_replay(tmp_path):
    def save(folder, step):
        path = tmp_path / folder / str(step)
        path.mkdir(parents=True)
        manifest.write(path, {"a": ("0", 0)})
        return path

    before, _ = save("spikes/checkpoints", 20), save("spikes/checkpoints", 32)
    again, after = save("spikes/checkpoints-1", 33), save("checkpoints", 30)
    write_rollback(tmp_path, spike=30, to=20, batches=[20, 37])
    assert reopen.find_checkpoint(tmp_path, 29, lead=2) == before
    assert reopen.find_checkpoint(tmp_path, 35, lead=2) == after
    assert reopen.find_checkpoint(tmp_path, 36, lead=2) == again


def test_a_mesh_that_does_not_fit_the_devices_names_those_of_the_run(tmp_path):
    s = read(changed(load("debug"), {"mesh.stage": 16}))
    with pytest.raises(ConfigError, match="change the sizes or the number of devices"):
        reopen._check_devices(s, tmp_path)  # of a config, whose mesh can be changed
    (tmp_path / "run.json").write_text('{"starts": [{"step": 0, "num_devices": 16}]}')
    message = "ran on 16 devices, and .* which does not fit the 8 here; start on 16, .*device_count=16$"
    with pytest.raises(ValueError, match=message):
        reopen._check_devices(s, tmp_path)


def test_an_unknown_precision_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="--precision=fp4 is unknown; one of recipe, bf16, float32"):
        replay.replay(tmp_path, 13, "fp4")


def test_another_precision_leaves_nothing_quantized():
    """Every key of the section that names a format or a recipe is as in a run without low precision."""
    low = {
        "recipe": "quest",
        "options.clipping": "max",
        "rules": (("lm_head", "mxfp8"),),
        "smooth_swiglu": "token",
        "high_precision_from": 5,
        "scalify": "fp8",
        "exchange": "int8",
        "scatter": "int8",
    }
    plain = read(changed(load("debug"), {"model.dtype": "float32"}))
    s = read(changed(load("debug"), {f"precision.{key}": value for key, value in low.items()}))
    found = replay.with_precision(s, "float32")
    assert found.precision == plain.precision and found.model == plain.model
    assert replay.with_precision(s, "recipe").precision == s.precision


def test_parameters_in_float16_have_no_other_precision():
    s = read(load("debug", "precision=scalify_fp16_params"))
    with pytest.raises(ValueError, match=r"^--precision=bf16 does not work with model.param_dtype=float16"):
        replay.with_precision(s, "bf16")


def report(workdir, *options, devices=1, code=0):
    command = (sys.executable, "-m", "maxlp.report")
    return finish(start(workdir, *options, config=(), devices=devices, command=command), code)


def replayed(workdir, *options, devices=1):
    """The losses of a replay by step, as printed: with four decimals."""
    rows = (line.split() for line in report(workdir, *options, devices=devices).splitlines())
    return {int(row[1]): float(row[3]) for row in rows if row[0] == "step"}


def logged(workdir, *steps):
    found = losses(workdir)
    return {step: round(found[step], 4) for step in steps}


STEPS = (
    *("--config.train.total_steps=6", "--config.train.eval_every=6"),
    *("--config.checkpoint.every_steps=2", "--config.checkpoint.keep_last=9"),
)


@pytest.mark.slow
def test_spikes_that_were_rolled_back_are_replayed_on_their_own_batches(tmp_path):
    """With a threshold so low that noise counts as spikes; the second is beyond the run's last record."""
    values = {"threshold": 0.5, "guard_threshold": 0.5, "min_history": 4, "window": 8, "merge_steps": 0}
    values |= {"rewind_steps": 4, "skip_batches": 7, "lead": 3, "max_actions": 2, "guard": "rollback"}
    options = [f"--config.spikes.{key}={value}" for key, value in values.items()]
    options += ["--config.train.total_steps=60", "--config.checkpoint.every_steps=4"]
    finish(start(tmp_path, *options, "--config.optimizer.learning_rate=0.02"), code=2)
    for entry in read_rollbacks(tmp_path):
        record = read_record(tmp_path, entry["spike"]["step"])
        found = replayed(tmp_path, f"--spike={record['step']}")
        assert found.items() >= {one["step"]: round(one["loss"], 4) for one in record["steps"][1:]}.items()


@pytest.mark.full
def test_both_phases_of_a_run_are_replayed_with_their_own_recipes(tmp_path):
    recipe = ("--config.precision.recipe=nvfp4", "--config.precision.first_blocks=0")
    finish(start(tmp_path, *recipe, *STEPS, "--config.precision.high_precision_from=4"))
    assert json.loads((tmp_path / "early_precision.json").read_text())["last_step"] == 4
    for step, name in {4: "nvfp4", 5: "bf16", None: "bf16"}.items():
        assert late_phase.config_at(tmp_path, step).precision.recipe == name
    assert replayed(tmp_path, "--spike=4") == logged(tmp_path, 3, 4)
    assert replayed(tmp_path, "--spike=6") == logged(tmp_path, 5, 6)
    assert replayed(tmp_path, "--spike=4", "--precision=bf16") != logged(tmp_path, 3, 4)

    shutil.rmtree(tmp_path / "checkpoints" / "4")
    message = report(tmp_path, "--spike=6", code=2)
    assert (
        "the recipe changed after step 4 (config.precision.high_precision_from=4), and the che" in message
    )
    assert list(replayed(tmp_path, "--spike=6", "--precision=bf16")) == [3, 4, 5, 6]
    (tmp_path / "early_precision.json").unlink()
    message = report(tmp_path, "--spike=3", code=2)
    assert "the recipe of step 3 is unknown: after step 4 config.precision.high_precision_from=4" in message


RELEASED = {"train.release_gradients": True, "optimizer.offload": True, "optimizer.clip_norm": 0.0}
EXCHANGED = {"precision.exchange": "int8"}
REPLICAS = {"data": 2, "fsdp": 1}
KEPT = [
    pytest.param({}, RELEASED, marks=pytest.mark.slow, id="offload"),
    pytest.param(
        {}, {"precision.scalify": "fp16", "model.dtype": "float16"}, marks=pytest.mark.slow, id="scalify"
    ),
    pytest.param({"fsdp": 2}, {"precision.scatter": "int8"}, marks=pytest.mark.slow, id="scatter"),
    pytest.param(REPLICAS, EXCHANGED, marks=pytest.mark.slow, id="exchange"),
    pytest.param(REPLICAS, EXCHANGED | {"train.local.steps": 2}, marks=pytest.mark.slow, id="local"),
]


@pytest.mark.parametrize(("mesh", "changes"), KEPT)
def test_what_a_run_keeps_besides_its_matmuls_does_not_prevent_a_replay(tmp_path, mesh, changes):
    values = {f"mesh.{axis}": size for axis, size in mesh.items()} | changes
    options = [f"--config.{key}={value}" for key, value in values.items()]
    devices = 2 if mesh else 1
    finish(start(tmp_path, *options, *STEPS, "--config.spikes.lead=1", devices=devices))
    as_logged = logged(tmp_path, 3, 4)
    assert replayed(tmp_path, "--spike=4", devices=devices) == as_logged
    exact = replayed(tmp_path, "--spike=4", "--precision=float32", devices=devices)
    assert exact == pytest.approx(as_logged, rel=0.01)  # a format of 16 or 8 bits changes little


def command(name, *options):
    full = [sys.executable, "-m", f"maxlp.{name}", *options]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(full, cwd=root, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_replay_repeats_the_run_and_runs_in_another_precision(tmp_path):
    sizes = dict(embed_dim=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, mlp_dim=64)
    options = {f"model.{key}": value for key, value in sizes.items()} | {
        "model.vocab_size": 512,
        "model.dtype": "bfloat16",
        "data.source": "stdlib?validation=0.002",
        "data.tokenizer": "bytes",
        "data.seq_len": 32,
        "data.shuffle_tokens": 4096,
        "optimizer.name": "stable_adamw",
        "optimizer.warmup_steps": 2,
        "train.total_steps": 14,
        "train.log_every": 1,
        "train.eval_every": 0,
        "checkpoint.every_steps": 5,
    }
    values = [f"--config.{key}={value}" for key, value in options.items()]
    command("train", "--config=configs/llama/debug.py", f"--workdir={tmp_path}", *values)
    records = [r for r in read_jsonl(tmp_path / "metrics.jsonl") if "train/loss" in r]
    logged = [r["train/loss"] for r in records if 11 <= r["step"] <= 13]

    def replayed(*options):
        lines = command("report", str(tmp_path), "--spike=13", *options).splitlines()
        assert lines[0].startswith("replaying steps 11 to 13") and lines[2].startswith("  RMS_t ")
        begins = ["first by RMS_t: ", "first by gradient norm: ", "the batch of step 13 ", "  row 0: '"]
        assert all(any(line.startswith(begin) for line in lines) for begin in begins)
        assert max(map(len, lines)) <= 80
        return [float(line.split()[3]) for line in lines if line.startswith("step ")]

    same, exact = replayed(), replayed("--precision=float32")
    assert same == [round(loss, 4) for loss in logged]
    assert exact != same and exact == pytest.approx(logged, 0.01)  # bfloat16 rounds by 2^-9
