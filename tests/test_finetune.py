"""From a model to a model: adapters are trained, resumed, evaluated, exported and imported again."""

import re
import shutil
from pathlib import Path

import pytest

from tests import run_outputs
from tests.training_runs import SMALL, finish, shown, start

pytestmark = pytest.mark.full


def bits_per_byte(workdir: Path, *options: str) -> float:
    out = shown("evaluate", f"--workdir={workdir}", *options)
    return float(re.search(r"bits_per_byte +([\d.]+)", out)[1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """A small model, and adapters trained on it for six steps."""
    folder = tmp_path_factory.mktemp("finetune")
    base, tuned = folder / "base", folder / "tuned"
    finish(start(base, "--config.train.total_steps=3"))
    finish(start(tuned, *options(base)))
    return base, tuned


def options(base: Path) -> list[str]:
    return [
        f"--config.train.init_from={base}",
        "--config.train.lora.rank=4",
        "--config.train.total_steps=6",
        "--config.optimizer.learning_rate=1e-2",
    ]


def test_adapters_are_resumed_to_the_bit(runs, tmp_path):
    base, tuned = runs
    shutil.copytree(tuned, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/6")
    assert "resuming at step 3" in finish(start(tmp_path / "run", *options(base)))
    assert run_outputs.checkpoint(tmp_path / "run", 6) == run_outputs.checkpoint(tuned, 6)


def test_an_exported_model_computes_what_the_adapted_one_does(runs, tmp_path):
    base, tuned = runs
    shown("convert", "export", f"--workdir={tuned}", f"--output={tmp_path}/hf")
    shown("convert", "import", f"--input={tmp_path}/hf", f"--output={tmp_path}/back")
    of_data = [flag for flag in SMALL if flag.startswith(("--config=", "--config.data."))]
    found = bits_per_byte(tmp_path / "back", *of_data)
    expected = bits_per_byte(tuned)
    assert abs(found - expected) <= 1e-4  # four printed digits; the kernels' sums are rounded to float32
    assert expected < bits_per_byte(base) - 1e-2
