"""The command of the numerics lab: what it refuses, in one line and before it compiles anything."""

import dataclasses
import subprocess
import sys
import time
import types

import pytest

from maxlp import lab
from maxlp.precision import RecipeOptions
from maxlp.run import attribution, reopen, run_dir, two_runs
from maxlp.run.config import ConfigError
from maxlp.run.settings import read
from maxlp.runtime import manifest
from tests.commands import run_command
from tests.monitoring.fixtures import write_run, write_spike
from tests.run.fixtures import changed, load


def refused(tmp_path, other=None, workdir=None, step=None, **precision):
    s = read(load("debug"))
    s = dataclasses.replace(s, precision=dataclasses.replace(s.precision, **precision))
    with pytest.raises(ValueError) as error:
        lab.attribute(s, workdir, step, other, tmp_path / "out", 5)
    assert not (tmp_path / "out").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("recipe", "precision", "named"),
    [
        ("wta_crs", {}, "wta_crs with options.keep=0.3"),
        (
            None,
            dict(recipe="int8_switchback", options=RecipeOptions(keep=0.5)),
            "int8_switchback with options.keep=0.5",
        ),
        (
            None,
            dict(recipe="fp8_current", rules=(("*/up_proj", "wta_crs"),)),
            "wta_crs with options.keep=0.3",
        ),
    ],
)
def test_sampled_tokens_have_no_switch(tmp_path, recipe, precision, named):
    message = refused(tmp_path, recipe, **precision)
    assert message.startswith(f"config.precision: recipe {named} takes gradients of kernels from a share")


def test_recipes_that_do_not_fit(tmp_path):
    assert refused(tmp_path, "fp9").startswith("--recipe='fp9' is unknown; one of bf16, fp8_delayed")
    assert "recipe=bf16 quantizes no matmul of this run; choose" in refused(tmp_path)
    assert refused(tmp_path, scalify="fp8").startswith("config.precision.scalify=fp8 propagates scales")
    assert "leave none of the 4 blocks" in refused(tmp_path, "fp8_current", first_blocks=4)
    message = refused(tmp_path, "fp8_current", tmp_path, first_blocks=4)
    assert message.startswith("--recipe=fp8_current does not fit this run, whose other settings stay")


@pytest.mark.parametrize(
    "tool, word, message",
    [
        (
            "predict",
            "--recipe=quest",
            "--recipe is not for predict, which takes --recipes, --batches; leave",
        ),
        ("choose", "B", "choose takes one run; leave out B"),
    ],
)
def test_flags_of_another_tool_are_refused(tmp_path, tool, word, message):
    done = run_command("lab", tool, str(tmp_path), word)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {message}"), done.stderr


def test_recording_has_no_results_of_a_comparison(tmp_path):
    words = ("--config=llama/debug", f"--record={tmp_path}/a", "--top=3")
    done = run_command("lab", "diff", *words)
    assert done.returncode == 2 and "--record compares nothing, and writes to FOLDER; leave" in done.stderr


def test_an_empty_folder_for_the_results_is_refused():
    words = ["attribute", "--config=llama/debug:precision=fp8_current", "--out="]
    done = subprocess.run([sys.executable, "-m", "maxlp.lab", *words], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: --out= is empty (an unset shell")


@pytest.mark.parametrize("tool, flag", [("attribute", "--out"), ("diff", "--record")])
def test_a_folder_that_cannot_be_written_is_refused_first(tmp_path, tool, flag):
    (tmp_path / "file").touch()
    words = [tool, "--config=llama/debug:precision=fp8_current", f"{flag}={tmp_path}/file/lab"]
    done = run_command("lab", *words)
    assert done.returncode == 2
    assert done.stderr == f"error: {flag}={tmp_path}/file/lab: {tmp_path}/file is a file; give a folder\n"


CONFIGURED = """
import sys
from maxlp import lab
from maxlp.run import cli
from maxlp.runtime import cpu

def configured(alone):
    raise ValueError(f"alone={alone}")

cpu.configure_client = configured
lab.define_flags()
cli.run(lab.main, num_arguments=3)
"""


def test_simulated_devices_get_their_threads(tmp_path):
    words = ["attribute", "--config=llama/debug:precision=fp8_current", f"--out={tmp_path}"]
    done = subprocess.run([sys.executable, "-c", CONFIGURED, *words], capture_output=True, text=True)
    assert "error: alone=True" in done.stderr


def test_steps_without_a_batch(tmp_path):
    write_run(tmp_path)
    saved = tmp_path / "checkpoints" / "405"
    saved.mkdir(parents=True)  # not complete
    message = refused(tmp_path, "fp8_current", tmp_path, 402)
    assert message.startswith("--step=402 has no batch in ") and "which has taken 400 steps" in message
    manifest.write(saved, {"a": ("0", 0)})
    assert "which has taken 405 steps" in refused(tmp_path, "fp8_current", tmp_path, 407)
    reopen._check_step(tmp_path, 406)
    write_spike(tmp_path, 407)
    reopen._check_step(tmp_path, 407)  # of steps that were rolled back
    ended = types.SimpleNamespace(batches=iter(()), start=3, run=types.SimpleNamespace(mesh=None), state={})
    with pytest.raises(ValueError, match="--step=5 has no batch: the data ends before it"):
        reopen.batch_of(ended, 5)


def test_steps_in_two_precisions_are_not_compared():
    s = read(load("debug"))
    s = dataclasses.replace(
        s, precision=dataclasses.replace(s.precision, recipe="fp8_current", high_precision_from=4)
    )
    at = types.SimpleNamespace(start=1, run=types.SimpleNamespace(settings=s), state={})
    with pytest.raises(ConfigError, match=r"--steps=4 from step 2 passes step 4, .* use --steps=3 or "):
        two_runs.steps_of(at, None, 4)
    with pytest.raises(ConfigError, match=r"--steps=2 from step 4 passes step 4, .* use --steps=1 or "):
        two_runs.steps_of(at, 4, 2)
    plain = types.SimpleNamespace(
        start=1, run=types.SimpleNamespace(settings=read(load("debug"))), state={}
    )
    with pytest.raises(ConfigError, match="--steps=4 from step 2 passes step 4"):
        two_runs.steps_of(plain, None, 4, s)


def test_another_recipe_has_none_of_the_options_and_rules_of_the_run(tmp_path, monkeypatch):
    """Options belong to the recipe that they change."""
    seen = []

    def stop(s, workdir, step, *, same_precision):
        seen.append((s.precision, same_precision))
        raise ValueError("stop")

    monkeypatch.setattr(attribution, "evaluator", stop)
    run = dict(recipe="fp8_delayed", options=RecipeOptions(history=8), rules=(("lm_head", "fp8_current"),))
    refused(tmp_path, None, **run)
    refused(tmp_path, "mxfp8", **run)
    (own, same), (other, differs) = seen
    assert own.options.history == 8 and (same, differs) == (True, False)
    assert (other.recipe, other.options, other.rules) == ("mxfp8", RecipeOptions(), ())


@pytest.mark.parametrize(
    ("own", "same"), [({"first_blocks": 1}, True), ({"rules": (("lm_head", "fp8_current"),)}, False)]
)
def test_a_choice_is_made_without_the_rules_of_the_run(own, same, tmp_path, monkeypatch):
    """Without a rule a matmul has another recipe, whose scales the run's checkpoint does not hold."""

    def stop(s, workdir, step, *, same_precision):
        raise ValueError(f"{s.precision.rules} {s.precision.first_blocks} {same_precision}")

    monkeypatch.setattr(attribution, "evaluator", stop)
    s = read(load("debug"))
    s = dataclasses.replace(s, precision=dataclasses.replace(s.precision, recipe="fp8_delayed", **own))
    with pytest.raises(ValueError) as error:
        lab.attribute(s, None, None, None, tmp_path, 5, budget=0.1)
    assert str(error.value) == f"() 0 {same}"


def test_runs_with_and_without_a_tokenizer_file_differ_in_their_configs(tmp_path):
    for name, tokenizer in {"a": "bytes", "b": "bpe:300"}.items():
        (tmp_path / name).mkdir()
        run_dir.save_config(tmp_path / name, changed(load("debug"), {"data.tokenizer": tokenizer}))
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    done = run_command("lab", "diff", f"{tmp_path}/a", f"{tmp_path}/b")
    words = "error: config.data.tokenizer: 'bytes' -> 'bpe:300': diff needs the same model, data and seed"
    assert done.returncode == 2 and done.stderr.startswith(words), done.stderr


def test_progress_in_a_log_has_a_first_line_one_every_ten_seconds_and_a_last(monkeypatch, capsys):
    bar = lab.Bar()
    for done in range(5):
        monkeypatch.setattr(time, "monotonic", lambda done=done: bar.start + 4.0 * done)
        bar(done, 4)
    shown = capsys.readouterr().err.splitlines()
    assert shown == ["0 of 4, compiling", "3 of 4, 0:04 left", "4 of 4, 0:00 left"]
