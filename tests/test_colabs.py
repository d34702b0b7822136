"""The notebooks run from top to bottom, with trainings so short that they test names, flags and files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))
MAX_BYTES = 600_000  # of a notebook with its figures

# Appended to the arguments of every training.
SHORT = {
    "clip_small": (
        "--config.train.total_steps=4",
        "--config.optimizer.warmup_steps=2",
        "--config.train.log_every=2",
        "--config.model.visual.num_layers=1",
        "--config.model.text.num_layers=1",
        "--config.data.batch_size=32",
    ),
    "finetune": (
        "--config.train.total_steps=10",
        "--config.train.eval_every=5",
        "--config.optimizer.warmup_steps=2",
        "--config.data.seq_len=64",
    ),
    "llama_small": (
        "--config.train.total_steps=10",
        "--config.precision.health_every=10",
        "--config.optimizer.warmup_steps=2",
        "--config.model.num_layers=3",
        "--config.data.source=stdlib?validation=0.002",
        "--config.data.tokenizer=bytes",
        "--config.data.shuffle_tokens=16384",
        "--config.data.seq_len=64",
    ),
    "numerics_lab": (
        "--config.train.total_steps=4",
        "--config.train.log_every=2",
        "--config.optimizer.warmup_steps=2",
        "--config.model.num_layers=1",
        "--config.data.shuffle_tokens=16384",
        "--config.precision.health_every=2",
    ),
    "sharding_and_planning": (),
}
SHORTEN = """
from maxlp.run import notebook
_run = notebook.run
def run(command, *arguments, **keywords):
    _run(command, *arguments, *({short} if command == "train" else ()), **keywords)
notebook.run = run
"""


def cells_of(path: Path, kind: str = "code") -> list[dict]:
    return [
        cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind
    ]


def code_of(path: Path) -> str:
    """The code cells as one program, without the commands of IPython."""
    lines = [line for cell in cells_of(path) for line in [*cell["source"], "\n"]]
    return "".join(line for line in lines if not line.startswith("%"))


LONGEST = ("finetune", "llama_small", "numerics_lab", "sharding_and_planning")
IN_TIERS = [
    pytest.param(path, marks=pytest.mark.slow if path.stem in LONGEST else pytest.mark.full)
    for path in NOTEBOOKS
]


@pytest.mark.parametrize("path", IN_TIERS, ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom(path, tmp_path):
    env = {**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    env.pop("JAX_NUM_CPU_DEVICES", None)  # the notebooks choose it themselves
    program = SHORTEN.format(short=SHORT[path.stem]) + code_of(path)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=path.parent, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_opens_in_colab_and_shows_what_it_printed(path):
    assert f"blob/main/colabs/{path.name})" in "".join(cells_of(path, "markdown")[0]["source"])
    assert json.loads(path.read_text())["metadata"]["colab"]["name"] == path.name
    install, *cells = cells_of(path)
    assert any(line.startswith("%pip install") for line in install["source"])
    outputs = [output for cell in cells for output in cell["outputs"]]
    printed = "".join("".join(output.get("text", [])) for output in outputs)
    assert [cell["execution_count"] for cell in cells] == [*range(2, len(cells) + 2)], "run in order"
    assert len(printed.splitlines()) > 10
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert str(Path.home()) not in printed
    assert path.stat().st_size <= MAX_BYTES


def test_notebooks_show_figures():
    outputs = [output for path in NOTEBOOKS for cell in cells_of(path) for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
