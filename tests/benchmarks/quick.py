"""Runs a benchmark with ``--quick``."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_quick(name: str, out: Path, *arguments: str) -> str:
    """The standard output of ``benchmarks/NAME.py``, which has to succeed and to draw its figure."""
    command = [sys.executable, f"benchmarks/{name}.py", "--quick", f"--out={out}", *arguments]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (out / "figure.png").exists()
    return done.stdout
