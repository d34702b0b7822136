"""Files of benchmarks import each other by their own names, as when they run as scripts."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _as_scripts(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
