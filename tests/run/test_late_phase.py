"""Runs that end in high precision."""

import shutil

import pytest
from ml_collections import ConfigDict

from maxlp.run import late_phase, run_dir
from maxlp.run.config import ConfigError
from maxlp.run.settings import read
from maxlp.runtime import manifest
from maxlp.runtime.files import write_json
from tests.run.fixtures import changed, load
from tests.run_outputs import checkpoint, losses
from tests.training_runs import finish, start

NVFP4 = ("--config.precision.recipe=nvfp4", "--config.precision.first_blocks=0")
STEPS = (
    *("--config.train.total_steps=6", "--config.train.eval_every=6"),
    *("--config.checkpoint.every_steps=2", "--config.checkpoint.keep_last=9"),
)
LATE = "--config.precision.high_precision_from=4"


@pytest.mark.full
def test_a_run_that_ends_in_high_precision(tmp_path):
    """It equals one with its recipe changed by hand, bit for bit; a kill in either phase changes
    nothing."""
    whole, by_hand = tmp_path / "whole", tmp_path / "by_hand"
    out = finish(start(whole, *NVFP4, *STEPS, LATE))
    assert "config.precision.recipe: 'nvfp4' -> 'bf16'" in out and "resuming at step 4" in out
    finish(start(by_hand, *NVFP4, *STEPS))
    assert losses(whole)[4] == losses(by_hand)[4] and losses(whole)[5] != losses(by_hand)[5]
    shutil.rmtree(by_hand / "checkpoints" / "6")
    finish(start(by_hand, "--config.precision.recipe=bf16", *NVFP4[1:], *STEPS))
    assert losses(whole) == losses(by_hand)
    assert checkpoint(whole, 6) == checkpoint(by_hand, 6)

    for kept in (4, 2):  # a kill in the late phase, and one before it
        for path in (whole / "checkpoints").iterdir():
            if int(path.name) > kept:
                shutil.rmtree(path)
        finish(start(whole, *NVFP4, *STEPS, LATE))
        assert checkpoint(whole, 6) == checkpoint(by_hand, 6)
    assert run_dir.load_config(whole).precision.recipe == "bf16", "what evaluates the run computes alike"

    for step in ("4", "6"):
        files = (path for path in (whole / "checkpoints" / step / "state").rglob("*") if path.is_file())
        max(files, key=lambda path: path.stat().st_size).write_bytes(b"")
    message = finish(start(whole, *NVFP4, *STEPS, LATE), code=2)
    assert "is that of step 2, on the other side of config.precision.high_precision_from=4" in message
    finish(start(whole, *NVFP4, *STEPS, LATE))
    assert checkpoint(whole, 6) == checkpoint(by_hand, 6)


def test_a_run_without_low_precision_has_no_late_phase(tmp_path):
    message = finish(start(tmp_path, LATE, "--dry_run"), code=2)
    assert "config.precision.high_precision_from=4 changes nothing: all matmuls compute in" in message


@pytest.mark.parametrize(("recipe", "is_refused"), [("fp8_delayed", True), ("fp8_current", False)])
def test_a_late_phase_is_refused_if_any_matmul_has_a_history(recipe, is_refused):
    """The head, which stays in high precision, has none."""
    c = changed(load("debug"), {"precision.high_precision_from": 4, "precision.recipe": recipe})
    message = late_phase.refusal(read(c))
    assert ("fp8_delayed's histories" in message) if is_refused else message is None


@pytest.mark.parametrize(("step", "recipe"), [(3, "nvfp4"), (4, "nvfp4"), (5, "bf16"), (None, "bf16")])
def test_the_last_early_step_has_the_early_precision(tmp_path, step, recipe):
    c = changed(load("debug"), {"precision.high_precision_from": 4})
    run_dir.save_config(tmp_path, c)
    early = c.precision.to_dict() | {"recipe": "nvfp4", "first_blocks": 0}
    del early["scatter"]  # as if written by a version that had no such key
    write_json(tmp_path / late_phase.EARLY, {"last_step": 4, "precision": early})
    found = late_phase.config_at(tmp_path, step).precision
    assert found.recipe == recipe and found.scatter == c.precision.scatter


def test_the_early_precision_is_kept_when_the_late_phase_begins(tmp_path):
    """From the config of the last start; a start in the late phase changes nothing."""
    late, early = (
        changed(load("debug"), {"precision.high_precision_from": 4, "precision.recipe": recipe})
        for recipe in ("bf16", "nvfp4")
    )
    kept = tmp_path / late_phase.EARLY
    late_phase.begin(read(late), 4, tmp_path)  # a run without a config, so without early steps
    run_dir.save_config(tmp_path, early)
    late_phase.begin(read(early), 3, tmp_path)
    assert late_phase.config_at(tmp_path, 3).precision.recipe == "nvfp4"
    for c, step in ((late, 3), (early, 4)):
        with pytest.raises(ConfigError, match=f"checkpoint is that of step {step}, on the other side of"):
            late_phase.begin(read(c), step, tmp_path)
    assert not kept.exists()
    for step in (4, 6):
        late_phase.begin(read(late), step, tmp_path)
        run_dir.save_config(tmp_path, late)
        recipes = [late_phase.config_at(tmp_path, step).precision.recipe for step in (4, 5)]
        assert recipes == ["nvfp4", "bf16"]


def test_a_phase_that_was_ended_afterwards_has_the_steps_until_then(tmp_path):
    """Of a run that had come to step 6 when its user wrote `high_precision_from=4`."""
    run_dir.save_config(tmp_path, changed(load("debug"), {"precision.recipe": "nvfp4"}))
    late = changed(load("debug"), {"precision.high_precision_from": 4})
    late_phase.begin(read(late), 6, tmp_path)
    run_dir.save_config(tmp_path, late)
    recipes = [late_phase.config_at(tmp_path, step).precision.recipe for step in (5, 6, 7)]
    assert recipes == ["nvfp4", "nvfp4", "bf16"]


def test_a_phase_that_samples_tokens_in_the_models_dtype_can_end(tmp_path):
    """It is a recipe, under whichever name; one that keeps all tokens is none."""
    late = {"precision.high_precision_from": 4}
    for name in ("bf16", "wta_crs"):
        c = changed(load("debug"), late | {"precision.recipe": name, "precision.options.keep": 0.5})
        assert late_phase.config_now(c.to_dict(), None)["precision"]["options"]["keep"] == 0.5
        run_dir.save_config(tmp_path, c)
        late_phase.begin(read(changed(load("debug"), late)), 4, tmp_path)
        assert late_phase.config_at(tmp_path, 4).precision.options.keep == 0.5
        (tmp_path / late_phase.EARLY).unlink()
    c.precision.options.keep = 1.0
    with pytest.raises(ConfigError, match="high_precision_from=4 changes nothing: all matmuls compute in"):
        late_phase.config_now(c.to_dict(), None)


def test_a_run_without_checkpoints_is_in_its_early_phase(tmp_path):
    c = changed(load("debug"), {"precision.recipe": "nvfp4", "precision.high_precision_from": 1})
    for workdir in (None, tmp_path):
        assert late_phase.config_now(c.to_dict(), workdir)["precision"]["recipe"] == "nvfp4"


@pytest.mark.parametrize(
    ("saved", "is_late"),
    [(["3"], False), (["3", "4"], True), (["3", "4.damaged"], False), (["4", "6"], True)],
)
def test_the_late_phase_begins_with_a_whole_checkpoint_of_its_step(tmp_path, saved, is_late):
    """Then no key of the section is left that quantizes, samples, or measures the quantization."""
    early = {"recipe": "int8_switchback", "options.keep": 0.5, "health_every": 2, "high_precision_from": 4}
    early |= {"rules": (("*/up_proj", "mxfp8"),), "min_dim": 32, "smooth_swiglu": "token"}
    c = changed(load("debug"), {f"precision.{key}": value for key, value in early.items()})
    for name in saved:
        (folder := tmp_path / "checkpoints" / name).mkdir(parents=True)
        (folder / "state").write_bytes(b"")
        manifest.write(folder, manifest.checksums(folder, ["state"]))
    now = ConfigDict(late_phase.config_now(c.to_dict(), tmp_path))
    late = changed(load("debug"), {"precision.high_precision_from": 4})
    assert read(now).precision == read(late if is_late else c).precision


def test_the_precision_of_early_steps_that_nothing_has_kept_is_unknown(tmp_path):
    """Such as those of a run whose files were copied in part."""
    c = changed(load("debug"), {"precision.high_precision_from": 4})
    run_dir.save_config(tmp_path, c)
    with pytest.raises(ConfigError, match="the recipe of step 4 is unknown: after step 4 config"):
        late_phase.config_at(tmp_path, 4)
    assert late_phase.config_at(tmp_path, 5).precision.recipe == "bf16"


def test_imported_weights_have_no_steps(tmp_path):
    (tmp_path / "config.json").write_text('{"model": {"name": "llama"}, "precision": {"recipe": "bf16"}}')
    with pytest.raises(ConfigError, match="holds imported weights and names no data; give a run that"):
        late_phase.config_at(tmp_path, None)
