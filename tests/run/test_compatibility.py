"""A resumed run whose state is not that of its checkpoints is refused with the keys of the config."""

import re
import shutil
from pathlib import Path
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from maxlp.core.train_state import State
from maxlp.run import changes, compatibility, run_dir
from maxlp.run.config import ConfigError
from maxlp.run.experiment import Experiment, resolve
from maxlp.run.launch import check_launch
from maxlp.runtime.checkpoint import Checkpointer
from tests.run.fixtures import TINY, changed, load, zeros

EXCHANGE, LOCAL = {"precision.exchange": "int8"}, {"train.local.steps": 4}
EVERYWHERE = {"precision.first_blocks": 0, "precision.last_blocks": 0, "precision.min_dim": 0}
DELAYED = EVERYWHERE | {"precision.recipe": "fp8_delayed", "precision.options.history": 4}


def prepared(values: dict[str, Any], replicas: int) -> tuple[ConfigDict, Experiment, State]:
    c = changed(load("debug"), TINY | values | {"mesh.data": replicas, "mesh.fsdp": 1})
    run = resolve(c, jax.devices()[:replicas])
    with jax.set_mesh(run.mesh):
        return c, run, run.abstract_state()[1]


def save(workdir: Path, values: dict[str, Any], replicas: int = 1) -> None:
    c, run, abstract = prepared(values, replicas)
    workdir.mkdir(exist_ok=True)
    run_dir.save_config(workdir, c)
    with jax.set_mesh(run.mesh), Checkpointer(workdir / "checkpoints", every_steps=1) as checkpoints:
        checkpoints.save(3, zeros(abstract), data_state={})


def resume(workdir: Path, values: dict[str, Any], replicas: int = 1) -> None:
    """What a resumed run checks before it compiles."""
    c, run, abstract = prepared(values, replicas)
    assert check_launch(run, abstract, workdir, changes.check_config(workdir, c))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (EXCHANGE, "precision.exchange=int8"),
        (LOCAL, "train.local.steps=4"),
        (EXCHANGE | LOCAL, "train.local.steps=4"),
    ],
)
def test_another_number_of_replicas_is_refused_where_each_has_a_state(tmp_path, values, reason):
    save(tmp_path, values, replicas=2)
    resume(tmp_path, values, replicas=2)
    with pytest.raises(ConfigError) as caught:
        resume(tmp_path, values, replicas=4)
    assert str(caught.value) == (
        f"config.mesh.data=4: the checkpoints of {tmp_path} hold the states of 2 replicas "
        f"(config.{reason}); resume with config.mesh.data=2, or start a new run from its weights, with "
        f"--from={tmp_path} and another --workdir"
    )


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        (EXCHANGE, {}, "config.precision.exchange: 'int8' -> 'none'"),
        ({}, LOCAL, "config.train.local.steps: None -> 4"),
        ({}, {"optimizer.name": "sgd"}, "config.optimizer.name: 'adamw' -> 'sgd'"),
        (DELAYED, {**DELAYED, "precision.options.history": 2}, "config.precision.options.history: 4 -> 2"),
    ],
)
def test_a_change_of_what_a_run_keeps_is_named(tmp_path, before, now, reason):
    """Other changes are not."""
    save(tmp_path, before, replicas=2)
    with pytest.raises(ConfigError, match=rf"do not fit the changed config \({re.escape(reason)}\); undo"):
        resume(tmp_path, now | {"train.total_steps": 400}, replicas=2)


def test_histories_of_another_smooth_swiglu_are_not_misread(tmp_path):
    smooth = {"precision.smooth_swiglu": "token"}
    save(tmp_path / "delayed", DELAYED)
    with pytest.raises(ConfigError, match=r"misread \(config\.precision\.smooth_swiglu: "):
        resume(tmp_path / "delayed", DELAYED | smooth)
    current = EVERYWHERE | {"precision.recipe": "fp8_current"}
    save(tmp_path / "current", current)
    resume(tmp_path / "current", current | smooth)


def test_histories_of_rotated_tensors_are_not_misread(tmp_path):
    rotated = DELAYED | {"precision.options.fwd_hadamard": True}
    for before, now in ((DELAYED, rotated), (rotated, DELAYED)):
        save(tmp_path / str(before), before)
        with pytest.raises(ConfigError, match=r"misread \(config\.precision\.options\.fwd_hadamard: "):
            resume(tmp_path / str(before), now)
    resume(tmp_path / str(DELAYED), DELAYED | {"precision.options.fwd_hadamard": False})


def test_a_checkpoint_with_an_unreadable_record_is_left_to_the_one_before(tmp_path):
    """`Checkpointer.restore_latest` finds it damaged, and restores the newest intact one in use."""
    save(tmp_path, {})
    for step in ("2", "4", "5.rolled_back"):
        shutil.copytree(tmp_path / "checkpoints" / "3", tmp_path / "checkpoints" / step)
    for step in ("2", "5.rolled_back"):
        (tmp_path / "checkpoints" / step / "checkpoint.json").write_text('{"step": 2, "arrays": {}}')
    (tmp_path / "checkpoints" / "4" / "checkpoint.json").write_text('{"step": 4, "arr')
    resume(tmp_path, {})
    with pytest.raises(ConfigError, match=re.escape(f"the checkpoints of {tmp_path} do not fit")):
        resume(tmp_path, {"optimizer.name": "sgd"})
    shutil.rmtree(tmp_path / "checkpoints" / "2")
    (tmp_path / "checkpoints" / "3" / "checkpoint.json").write_text("")
    resume(tmp_path, {})


def test_a_gate_of_any_name_may_begin_or_end_with_a_start(tmp_path):
    save(tmp_path, {"spikes.guard": "skip"})
    _, run, abstract = prepared({}, 1)
    compatibility.check(run, abstract | {"norm_limit": {"rejected": abstract["step"]}}, tmp_path, {})
