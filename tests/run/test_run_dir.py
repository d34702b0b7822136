"""The files of a run beside its checkpoints: what a launch finds there, and what it makes of damage."""

import contextlib
import importlib.machinery
import json
import subprocess
import sys
import types

import pytest
from ml_collections import ConfigDict

from maxlp.run import changes, launch, run_dir

SECTIONS = {"model": {"name": "llama"}, "optimizer": {"learning_rate": 1.0}, "spikes": {"window": 9}}
CONFIG = ConfigDict(SECTIONS)


def started(workdir, step=0):
    run_dir.record_launch(workdir, CONFIG, step, num_params=1000, units_per_step=2048)


def test_every_start_and_the_last_checkpoint_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--workdir=/data/my run"])
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.__spec__ = importlib.machinery.ModuleSpec("maxlp.train", None)  # as after python -m
    started(tmp_path)
    main.__spec__ = None
    run_dir.record_checkpoint(tmp_path, 4)
    started(tmp_path, 4)
    run_dir.record_checkpoint(tmp_path, 8)
    record = json.loads((tmp_path / "run.json").read_text())
    assert [start["step"] for start in record["starts"]] == [0, 4] and record["last_checkpoint"] == 8
    module, script = (start["command"] for start in record["starts"])
    assert module == "python -m maxlp.train '--workdir=/data/my run'"
    assert script == "python train.py '--workdir=/data/my run'"


def test_variables_that_configure_jax_and_xla_are_recorded_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    monkeypatch.setenv("JAX_DEFAULT_PRNG_IMPL", "rbg")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    started(tmp_path)
    [start] = json.loads((tmp_path / "run.json").read_text())["starts"]
    found = start["environment"]
    assert found["XLA_FLAGS"] == "--xla_gpu_autotune_level=0" and found["JAX_DEFAULT_PRNG_IMPL"] == "rbg"
    assert all(key.startswith(("JAX_", "XLA_", "LIBTPU_", "NCCL_")) for key in found)


def test_changes_of_variables_that_configure_jax_are_reported(tmp_path, monkeypatch):
    assert not changes.check_environment(tmp_path)
    with monkeypatch.context() as without_any:
        without_any.setattr(run_dir, "CONFIGURING", ("JAX_DEFAULT_",))
        started(tmp_path)
        without_any.setenv("JAX_DEFAULT_PRNG_IMPL", "rbg")
        assert changes.check_environment(tmp_path) == ["JAX_DEFAULT_PRNG_IMPL: unset -> rbg"]
    monkeypatch.setenv("JAX_DEFAULT_PRNG_IMPL", "rbg")
    monkeypatch.setenv("JAX_RANDOM_SEED_OFFSET", "1")
    started(tmp_path)
    assert not changes.check_environment(tmp_path)
    monkeypatch.delenv("JAX_DEFAULT_PRNG_IMPL")
    monkeypatch.setenv("JAX_RANDOM_SEED_OFFSET", "2")
    monkeypatch.setenv("JAX_THREEFRY_PARTITIONABLE", "0")
    assert changes.check_environment(tmp_path) == [
        "JAX_DEFAULT_PRNG_IMPL: rbg -> unset",
        "JAX_RANDOM_SEED_OFFSET: 1 -> 2",
        "JAX_THREEFRY_PARTITIONABLE: unset -> 0",
    ]


def test_changed_versions_of_packages_are_reported(tmp_path, monkeypatch):
    started(tmp_path)
    monkeypatch.setattr(run_dir, "versions", lambda: found | {"jax": "0.99.0"})
    found = json.loads((tmp_path / "run.json").read_text())["starts"][0]["versions"]
    assert changes.check_environment(tmp_path) == [f"jax: {found['jax']} -> 0.99.0"]


def test_the_revision_is_that_of_the_code_and_not_of_a_project_that_holds_its_environment(
    tmp_path, monkeypatch
):
    def git(*words):
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *author, *words], cwd=tmp_path, check=True)

    file = tmp_path / "maxlp" / "run" / "run_dir.py"
    file.parent.mkdir(parents=True)
    file.write_text("x = 1")
    monkeypatch.setattr(run_dir, "__file__", str(file))
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "the project's")
    assert run_dir.git_revision() is None
    git("add", ".")
    git("commit", "-q", "-m", "the code's")
    assert len(run_dir.git_revision()) == 40
    file.write_text("x = 2")
    assert run_dir.git_revision().endswith("-dirty")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # as in a container that mounts the checkout
    assert run_dir.git_revision().endswith("-dirty")


def test_a_deleted_config_does_not_make_a_run_no_run(tmp_path):
    with pytest.raises(ValueError, match=r"holds no run$"):
        run_dir.load_config(tmp_path)
    started(tmp_path)
    with pytest.raises(ValueError, match=r"config.json is a file; give the folder of the run$"):
        run_dir.load_config(tmp_path / "config.json")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="is missing; put it back, or start the run again"):
        run_dir.load_config(tmp_path)


def test_lost_checkpoints_are_an_error_and_checkpoints_not_reached_are_not(tmp_path):
    run_dir.check_checkpoints(tmp_path)
    started(tmp_path)
    run_dir.check_checkpoints(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "4.unfinished").mkdir()
    run_dir.check_checkpoints(tmp_path)
    run_dir.record_checkpoint(tmp_path, 4)
    with pytest.raises(ValueError, match=r"had saved step 4.*mount"):
        run_dir.check_checkpoints(tmp_path)
    (tmp_path / "checkpoints" / "4").mkdir()
    run_dir.check_checkpoints(tmp_path)  # whether it is intact is found when it is restored


def test_a_run_of_an_earlier_version_that_had_resumed_is_known_to_have_had_a_checkpoint(tmp_path):
    started(tmp_path, 4)
    with pytest.raises(ValueError, match="had saved step 4"):
        run_dir.check_checkpoints(tmp_path)


def test_a_step_that_is_null_in_the_record_of_a_run_counts_as_missing(tmp_path):
    for last in (None, 4):
        record = {"starts": [{"step": None}], "last_checkpoint": last}
        (tmp_path / "run.json").write_text(json.dumps(record))
        with pytest.raises(ValueError, match="had saved step 4") if last else contextlib.nullcontext():
            run_dir.check_checkpoints(tmp_path)


def continues(workdir, c) -> bool:
    return launch.repeats_the_last_launch(workdir, list(changes.check_config(workdir, c)))


def test_another_config_or_no_record_is_another_run(tmp_path):
    assert not continues(tmp_path, CONFIG)
    started(tmp_path)
    assert continues(tmp_path, CONFIG)
    assert continues(tmp_path, ConfigDict(SECTIONS | {"spikes": {"window": 10}}))
    assert not continues(tmp_path, ConfigDict(SECTIONS | {"optimizer": {"learning_rate": 0.5}}))
    (tmp_path / "run.json").unlink()
    assert not continues(tmp_path, CONFIG)


NO_SECTION = '{"starts": [3], "model": {"name": "llama"}, "precision": [1]}'
NO_NAME = '{"starts": [3], "model": {"name": ["llama"]}}'
NO_SOURCE = '{"starts": [3], "model": {"name": "llama"}, "data": {"source": 7}}'


@pytest.mark.parametrize(
    "content",
    ["", '{"starts": [', "[]", "{}", '{"starts": [3], "model": 3}', NO_SECTION, NO_NAME, NO_SOURCE],
)
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", run_dir.load_config),
        ("config.json", lambda workdir: changes.check_config(workdir, CONFIG)),
        ("run.json", run_dir.check_checkpoints),
        ("run.json", lambda workdir: run_dir.record_launch(workdir, CONFIG, 0, 1)),
    ],
)
def test_damage_is_named_with_a_remedy_that_keeps_the_run_and_nothing_is_changed(
    tmp_path, name, read, content
):
    started(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name} is damaged \(.*\); put back .*, or delete it: "):
        read(tmp_path)
    assert (tmp_path / name).read_text() == content
    (tmp_path / name).unlink()
    started(tmp_path)


def test_a_folder_of_hugging_face_is_no_damaged_run(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    for read in (run_dir.load_config, lambda workdir: changes.check_config(workdir, CONFIG)):
        with pytest.raises(ValueError, match=rf"Face config; train --from={tmp_path} in .*convert import"):
            read(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "run.json", "metrics.jsonl"])
def test_a_folder_in_place_of_a_file_is_refused_before_anything_is_written(tmp_path, name):
    run_dir.check_workdir(tmp_path)
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{name} is not a file; put back the file"):
        run_dir.check_workdir(tmp_path)


def test_a_link_to_a_folder_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "volume")
    for workdir in (tmp_path / "runs", tmp_path / "runs" / "a"):
        with pytest.raises(ValueError, match=rf"--workdir={workdir}: .*/runs is a link to .*/volume,"):
            run_dir.check_workdir(workdir)
    (tmp_path / "volume").mkdir()
    run_dir.check_workdir(tmp_path / "runs" / "a")
