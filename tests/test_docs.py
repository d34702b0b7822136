"""Generated parts of the documentation are up to date, and the website builds without a warning."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import architecture, source_links

ROOT = Path(__file__).parent.parent


def test_the_picture_of_the_packages_is_up_to_date():
    assert architecture.FIGURE.read_text() == architecture.svg(), "out of date: run ./check --fix"


def test_the_picture_leaves_out_only_arrows_that_follow_from_others():
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert architecture.reduced(graph) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}


def test_links_to_code_lead_to_the_lines_of_the_definitions():
    text = source_links.PAGE.read_text()
    assert len(source_links.LINK.findall(text)) > 15
    assert text == source_links.updated(text), "out of date: run ./check --fix"


def test_a_link_to_a_definition_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="does not define no_such_function"):
        source_links.updated("[`no_such_function`](../maxlp/train.py#L1)")


@pytest.mark.full
def test_the_website_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="needs pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, "--config-file", "tools/mkdocs.yml"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "api" / "core.html").read_text()
    assert "maxlp.core.train_step.train_step" in page
    assert "batch_gradients" in (tmp_path / "from_batch_to_gradient.html").read_text()
