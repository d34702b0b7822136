"""What the README names exists, and its commands answer."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxlp.run import build

ROOT = Path(__file__).parent.parent
TEXT = "\n".join((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))


def test_files_named_exist():
    named = set(re.findall(r"\b(?:maxlp|configs|tests|tools|docs)/[\w/]+\.(?:py|md)", TEXT))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_presets_and_sections_are_those_of_the_code():
    readme = (ROOT / "README.md").read_text()
    listed = re.findall(r"`configs/llama/` holds (.*?); `configs/clip/`", readme, re.DOTALL)[0]
    names = {name for group in re.findall(r"`([\w ]+)`", listed) for name in group.split()}
    assert names == {p.stem for p in (ROOT / "configs" / "llama").glob("*.py")} - {"__init__"}
    rows = re.findall(r"^\| `(\w+)` \| `[\w.]+`(?:, `[\w.]+`)* \|", readme, re.MULTILINE)
    assert rows == list(build.SECTIONS)


@pytest.mark.parametrize("command", sorted(set(re.findall(r"python -m maxlp\.(\w+)", TEXT))))
def test_command_has_help(command):
    done = subprocess.run(
        [sys.executable, "-m", f"maxlp.{command}", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    assert f"python -m maxlp.{command}" in done.stdout
