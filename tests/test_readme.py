"""What the documents name exists, their lists are complete, and their commands have a help text."""

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxlp import convert
from maxlp.data import sources
from maxlp.families import FAMILIES, weights
from maxlp.families.clip.presets import CLIP_SIZES
from maxlp.families.llama.presets import llama
from maxlp.run import settings
from maxlp.run.config import load_file
from maxlp.run.presets import LOW_BIT, choose
from tests.commands import run_command

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONFIGS = (ROOT / "docs" / "configs.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
COMMANDS = {name for page in PAGES for name in re.findall(r"python -m maxlp\.(\w+)", page.read_text())}

FOLDERS = "maxlp|configs|tests|tools|benchmarks|launch|docs"
FILE = re.compile(rf"(?<![\w/])(?:{FOLDERS})/[\w/]+(?:\.(?:py|md|sh|json|yaml|txt|svg)\b|/(?=`))")
TEST = re.compile(r"\b(test_\w+\.py)(?:::(\w+)(…?))?")
DEFINED_IN = re.compile(r"`(\w+)`\s(?:of|in)\s`((?:maxlp|tests|tools)/[\w/]+\.py)`")
NAME = re.compile(r"`(maxlp(?:\.\w+)+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    text = page.read_text()
    assert [name for name in FILE.findall(text) if not (ROOT / name).exists()] == []
    links = [link for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    for file, test, more in TEST.findall(text):
        found = [path.read_text() for path in (ROOT / "tests").rglob(file)]
        assert found, file
        definition = f"def {test}" + ("" if more else "(") if test else ""
        assert any(definition in one for one in found), f"{file}::{test}"
    for name in NAME.findall(text):
        pkgutil.resolve_name(name)  # raises if there is no such module or attribute


def test_tables_that_take_an_entry_exist():
    """`NAME` of `FILE`, and in CONTRIBUTING every other name in capitals."""
    for page in PAGES:
        for name, file in DEFINED_IN.findall(page.read_text()):
            definition = re.compile(rf"^(?:def |class )?{name}\b", re.MULTILINE)
            assert definition.search((ROOT / file).read_text()), f"{page.name}: {name} of {file}"
    names = set(re.findall(r"`([A-Z_]{4,})`", (ROOT / "CONTRIBUTING.md").read_text()))
    code = "\n".join(path.read_text() for path in [*ROOT.glob("maxlp/**/*.py"), *ROOT.glob("tests/*.py")])
    assert names <= set(re.findall(r"^([A-Z_]{4,})\b", code, re.MULTILINE))


def test_lists_of_configs_are_complete():
    folders = re.findall(r"`configs/(\w+)/` holds (.*?)(?:;|\. \[)", README, re.DOTALL)
    listed = [family for family, _ in folders]
    assert listed == list(FAMILIES), "README names the configs of each family, in the order of FAMILIES"
    for family, listed in folders:
        names = {name for group in re.findall(r"`([\w. ]+)`", listed) for name in group.split()}
        assert names == {p.name.removesuffix(".py") for p in (ROOT / "configs" / family).glob("*.py")} - {
            "__init__"
        }


def test_the_help_of_convert_lists_the_formats():
    _, _, rows, _ = re.split(r"^=+ =+ =+\n", convert.__doc__, flags=re.MULTILINE)
    listed = re.findall(r"^\w+", rows, re.MULTILINE)
    assert listed == [name for family in FAMILIES for name in weights.formats(family)]


def test_sections_and_their_classes_are_those_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \| (`[\w.]+`(?:, `[\w.]+`)*) \|", README, re.MULTILINE)
    assert [section for section, _ in rows] == list(settings.SECTIONS)
    for _, classes in rows:
        for name in re.findall(r"[\w.]+", classes):
            assert callable(pkgutil.resolve_name(f"maxlp.{name}"))


def test_the_example_of_a_config_takes_choices(tmp_path):
    (example,) = re.findall(r"^```python\n(.*?)^```", CONFIGS, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.py").write_text(example)
    s = settings.read(load_file(f"{tmp_path}/mine.py:optimizer=lion,precision=fp8_delayed"))
    assert (s.optimizer.name, s.precision.recipe, s.model.embed_dim) == ("lion", "fp8_delayed", 512)


def test_choices_and_sources_are_those_of_the_code():
    choices = re.findall(r"^\| `(\w+)=`", CONFIGS, re.MULTILINE)
    with pytest.raises(ValueError) as error:
        choose("no_such_choice", llama())
    assert set(choices) - {"size"} == set(str(error.value).split("arguments: ")[1].split(", "))
    assert set(re.findall(r"`low_bit=`.*?`(\w+)`, `(\w+)` or `(\w+)`", CONFIGS)[0]) == set(LOW_BIT)
    assert set(re.findall(r"`size=` .*?`((?:\w+ )+\w+)`", CONFIGS)[0].split()) == set(CLIP_SIZES)
    table = CONFIGS[CONFIGS.index("## Sources") : CONFIGS.index("## Tokenizers")]
    for place, pattern, text in (
        ("the table of docs/configs.md", r"^\| `(\w+)", table),
        ("the docstring of maxlp/data/sources.py", r"^    (\w+)", sources.__doc__),
    ):
        assert set(re.findall(pattern, text, re.MULTILINE)) == set(sources.KINDS), f"{place} lists them all"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_command_has_help(command):
    done = run_command(command, "--help")
    assert done.returncode == 0 and not done.stderr
    assert f"python -m maxlp.{command}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("tool", ["architecture", "composition", "record_peaks", "source_links"])
def test_a_tool_asked_for_help_does_nothing_else(tool):
    done = subprocess.run(
        [sys.executable, "-m", f"tools.{tool}", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and f"python -m tools.{tool}" in done.stdout
