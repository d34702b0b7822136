"""The notebooks run from top to bottom in their small setting."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))


def code_of(path: Path) -> str:
    """The code cells as one program, without the commands of IPython."""
    cells = json.loads(path.read_text())["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in [*cell["source"], "\n"]]
    return "".join(line for line in lines if not line.startswith("%"))


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom(path):
    """A few steps are enough to find names, flags and files that no longer exist."""
    env = {**os.environ, "MAXLP_COLAB_SMALL": "1", "MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    env.pop("JAX_NUM_CPU_DEVICES", None)  # the notebooks choose it themselves
    done = subprocess.run(
        [sys.executable, "-c", code_of(path)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_notebooks_are_saved_without_output():
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        compile(code_of(path), path.name, "exec")
        cells = json.loads(path.read_text())["cells"]
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
