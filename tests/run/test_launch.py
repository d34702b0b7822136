"""What ends a launch is found by its dry run, before anything is compiled, and leaves nothing behind.

The command's own steps run here in this process: `train` calls the same functions in both cases.
"""

import contextlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from maxlp import train
from maxlp.core import train_step
from maxlp.run import run_dir
from maxlp.run.experiment import resolve
from maxlp.run.launch import check_launch
from maxlp.runtime.checkpoint import Checkpointer
from tests.run.fixtures import changed, load, zeros

TINY = {
    "llama": {
        "model.embed_dim": 8,
        "model.num_layers": 1,
        "model.num_heads": 1,
        "model.num_kv_heads": 1,
        "model.head_dim": 8,
        "model.mlp_dim": 8,
        "model.vocab_size": 300,
        "data.tokenizer": "bytes",
    },
    "clip": {"data.source": "glyphs", "data.tokenizer": "bytes", "model.text.pool": "eos"},
}
TINY["clip"] |= {"model.text.vocab_size": 300, "model.text.eos_id": 257}


def prepared(workdir: Path, values: dict[str, Any], family: str = "llama"):
    """What `train` has when it checks whether it can continue: the run, and its state as shapes."""
    run = resolve(changed(load("debug", family=family), TINY[family] | values), jax.devices()[:1])
    with jax.set_mesh(run.mesh):
        return run, *run.abstract_state()


def dry_run(workdir: Path, values: dict[str, Any], family: str = "llama") -> None:
    """The part of `train --dry_run` that a launch has too, other than tracing the step."""
    run, graphdef, abstract = prepared(workdir, values, family)
    with jax.set_mesh(run.mesh):
        check_launch(run, abstract, workdir, {})
        train.dry_run(run, graphdef, workdir)


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Documents of 64 bytes, in both splits."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(100):
        (folder / f"{i}.txt").write_text("x" * 64)
    return folder


@pytest.mark.parametrize("family", TINY)
def test_a_good_start_is_accepted_and_leaves_nothing(family, tmp_path, corpus):
    values = {"data.source": f"text:{corpus}"} if family == "llama" else {}
    dry_run(tmp_path / "run", values, family)
    assert set(tmp_path.iterdir()) == {corpus}


def test_a_run_that_must_not_compile_is_refused(tmp_path):
    run, _, abstract = prepared(tmp_path / "run", {})
    with jax.disable_jit(), pytest.raises(ValueError, match=r"^JAX_DISABLE_JIT is set; unset it"):
        check_launch(run, abstract, tmp_path / "run", {})
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_traces_the_step(tmp_path, corpus, monkeypatch):
    """So that it refuses what only the program of the step can find."""
    given = {"dry_run": True, "allow_change": False, "workdir": str(tmp_path / "run")}
    monkeypatch.setattr(train.flags, "FLAGS", SimpleNamespace(**given))
    monkeypatch.setattr(train, "open_data", pytest.fail)

    def fail(*_):
        raise ValueError("of the program")

    monkeypatch.setattr(train_step, "squared_norm", fail)
    c = changed(load("debug"), TINY["llama"] | {"data.source": f"text:{corpus}"})
    lock = SimpleNamespace(workdir=tmp_path / "run")
    with contextlib.ExitStack() as stack, pytest.raises(ValueError, match=r"^of the program"):
        train.train(c, lock, stack, train.Startup(0.0))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"data.source": "text:/nowhere/*.txt"}, "/nowhere"),
    ("llama", {"data.source": "text:{tmp}/empty.txt"}, "empty.txt"),
    ("llama", {"data.source": "nosuch:/data"}, "kind 'nosuch' is unknown"),
    ("llama", {"data.source": "jsonl:{tmp}/corpus/1.txt"}, "corpus/1.txt"),
    ("llama", {"data.source": "array_record:{tmp}/corpus"}, "corpus"),
    ("llama", {"data.tokenizer": "/nowhere/tokenizer.json"}, "/nowhere/tokenizer.json"),
    ("llama", {"data.tokenizer": "{tmp}/corpus/1.txt"}, "corpus/1.txt"),
    ("llama", {"data.tokenizer": "bytes?bos=x"}, "bytes?bos=x"),
    ("llama", {"model.vocab_size": 200}, "config.model.vocab_size=200"),
    ("llama", {"data.tokenizer": "bpe:10"}, "a BPE of 10 tokens has no room for the 259 bytes"),
    ("llama", {"train.init_from": "/nowhere"}, "config.train.init_from=/nowhere does not exist"),
    (
        "llama",
        {"train.init_from": "https://server/run"},
        "config.train.init_from=https://server/run is not a folder that can be used",
    ),
    ("llama", {"metrics.wandb_project": "x"}, "config.metrics.wandb_project='x' needs wandb"),
    ("clip", {"data.source": "tar:/nowhere.tar"}, "/nowhere.tar"),
    ("clip", {"data.validation_source": "tar:/nowhere.tar"}, "/nowhere.tar"),
    ("clip", {"data.batch_size": 2**20}, "batch_size=1048576 is more than the"),
    ("clip", {"model.text.eos_id": 258}, "config.model.text.eos_id=257"),
]


@pytest.mark.parametrize(("family", "values", "part"), REFUSED, ids=lambda v: str(v)[:50])
def test_what_a_start_refuses_is_refused_by_a_dry_run(family, values, part, tmp_path, corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "empty.txt").write_text("")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    given = {"data.source": f"text:{corpus}"} if family == "llama" else {}
    given |= {k: v.format(tmp=tmp_path) if isinstance(v, str) else v for k, v in values.items()}
    with pytest.raises(ValueError, match=re.escape(part)) as caught:
        dry_run(tmp_path / "run", given, family)
    assert "\n" not in str(caught.value) and "dry-run-" not in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_workdir_that_cannot_be_written_to_is_refused(tmp_path, corpus, monkeypatch):
    (tmp_path / "file").write_text("")
    for workdir in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match=rf"^--workdir={workdir}: {tmp_path}/file is a file"):
            run_dir.check_workdir(workdir)
    with pytest.raises(ValueError, match=rf"^--workdir={tmp_path}/file: "):
        dry_run(tmp_path / "file", {"data.source": f"text:{corpus}"})
    run_dir.check_workdir(tmp_path / "new" / "run")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # tests may run as root
    with pytest.raises(ValueError, match=rf"^--workdir={tmp_path}/new/run: {tmp_path} is not writable"):
        run_dir.check_workdir(tmp_path / "new" / "run")


@pytest.mark.parametrize("name", ["run[1]", "run]", "run\\1", "run*", "run?"])
def test_a_workdir_whose_checkpoints_orbax_could_not_read_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=rf"^--workdir={re.escape(str(tmp_path / name))}/a contains "):
        run_dir.check_workdir(tmp_path / name / "a")
    with pytest.raises(ValueError, match=r"^directory=.* contains "):
        Checkpointer(tmp_path / name, every_steps=1)
    assert not list(tmp_path.iterdir())


def save(folder: Path, values: dict[str, Any]) -> None:
    """A checkpoint of step 3 of the tiny Llama with these changes."""
    run, _, abstract = prepared(folder, values)
    with jax.set_mesh(run.mesh), Checkpointer(folder / "checkpoints", every_steps=1) as checkpoints:
        checkpoints.save(3, zeros(abstract), data_state={})


def test_weights_and_checkpoints_of_another_shape_are_refused(tmp_path, corpus):
    data = {"data.source": f"text:{corpus}"}
    save(tmp_path / "other", data | {"model.mlp_dim": 16})
    other = {"train.init_from": str(tmp_path / "other")}
    mismatch = r"does not fit this config: params/layers/mlp/down_proj/kernel is float32\[1,16,8\]"
    with pytest.raises(ValueError, match=rf"^config\.train\.init_from={tmp_path}/other: .*{mismatch}"):
        dry_run(tmp_path / "run", data | other)
    with pytest.raises(ValueError, match=mismatch):
        dry_run(tmp_path / "other", data)
    # The run's own weights fit, and what a run would start from no longer matters when it resumes.
    dry_run(tmp_path / "run", data | other | {"model.mlp_dim": 16})
    dry_run(tmp_path / "other", data | {"model.mlp_dim": 16, "train.init_from": "/nowhere"})


def test_a_scratch_folder_stands_for_a_workdir(tmp_path):
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "a").write_text("old")
    with run_dir.scratch(workdir) as folder:
        assert (folder / "a").read_text() == "old"
        run_dir.write_json(folder / "a", "new")
        (folder / "b").write_text("more")
    assert (workdir / "a").read_text() == "old" and [p.name for p in workdir.iterdir()] == ["a"]
    assert not folder.exists()
    with pytest.raises(ValueError, match=rf"^{workdir}/x is wrong$"), run_dir.scratch(workdir) as folder:
        raise ValueError(f"{folder}/x is wrong")
    assert not folder.exists()
