"""The package: the command `maxlp`, presets by name from any folder, and what a wheel holds."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from maxlp import __main__ as command
from maxlp.run import config

ROOT = Path(__file__).parent.parent


def run(*args: str, cwd: Path, package: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "maxlp", *args],
        cwd=cwd,
        env={"PATH": "", "PYTHONPATH": str(package), "HOME": str(cwd), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_overview_has_every_command_in_80_columns():
    modules = {path.stem for path in (ROOT / "maxlp").glob("*.py")} - {"__init__", "__main__"}
    assert set(command.COMMANDS) == modules
    assert all(name in command.usage() for name in modules)
    assert max(map(len, command.usage().splitlines())) <= 80


def test_an_overview_that_nobody_reads_ends_quietly():
    process = subprocess.Popen(
        [sys.executable, "-m", "maxlp"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.communicate()[1] == b""


def test_an_unknown_command_lists_the_commands(tmp_path):
    done = run("trian", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: 'trian' is not a command; choose one of {', '.join(command.COMMANDS)}\n"


@pytest.mark.parametrize("name", ["llama/8b", "llama/8b.py", "configs/llama/8b.py"])
def test_presets_are_found_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config.config_file(f"{name}:precision=int8") == f"{config.PRESETS}/llama/8b.py:precision=int8"


def test_a_file_comes_before_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs/llama").mkdir(parents=True)
    (tmp_path / "configs/llama/8b.py").touch()
    assert config.config_file("configs/llama/8b.py") == "configs/llama/8b.py"


@pytest.mark.parametrize("name", ["llama/debg", "", "llama"])
def test_a_missing_config_lists_the_presets(name):
    with pytest.raises(ValueError, match=r"presets: clip/b16, .*qwen3/finetune$") as error:
        config.config_file(name)
    assert ("did you mean llama/debug?" in str(error.value)) == (name == "llama/debg")


def test_old_pip_knows_every_extra_by_its_name():
    """The pip of Python 3.11's `venv` does not normalize a name that a user writes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert [*extras] == [re.sub("[-_.]+", "-", name).lower() for name in extras]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling", reason="needs pip install '.[dev]'")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


@pytest.mark.full
def test_a_wheel_holds_the_package_and_its_presets_alone(wheel):
    names = wheel.namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"maxlp"}
    assert {f"maxlp/configs/{preset}.py" for preset in config.presets()} <= set(names)
    assert "maxlp/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.full
def test_a_wheel_trains_in_a_folder_that_has_configs_of_its_own(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/__init__.py").touch()
    small = [
        "--config.train.total_steps=1",
        "--config.optimizer.warmup_steps=0",
        "--config.data.seq_len=32",
    ]
    done = run(
        "train", "--config=llama/tiny", "--workdir=run", *small, cwd=tmp_path, package=tmp_path / "site"
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/checkpoints/1").is_dir()
