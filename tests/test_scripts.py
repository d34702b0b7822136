"""Names and arguments of the library that scripts and notebooks use exist, so that a rename breaks a test.

The scripts are not run, because some need a GPU, PyTorch or minutes.
"""

import ast
import functools
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted([*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tools/*.py"), *ROOT.glob("colabs/*.ipynb")])
PACKAGES = ("maxlp", "configs", "tests")


def source(path: Path) -> str:
    """The program; of a notebook its code cells, without the commands of IPython."""
    if path.suffix == ".py":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return re.sub(r"^%.*", "", code, flags=re.MULTILINE)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(source(path), str(path))


def imported(path: Path) -> Iterator[tuple[str, str, str | None]]:
    """(name in the script, module, name in the module) of each import."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node.module, alias.name) for alias in node.names)


def load(module: str, name: str | None) -> Any:
    if name is None:
        return importlib.import_module(module)
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        return importlib.import_module(f"{module}.{name}")


def of_library(path: Path) -> dict[str, Any]:
    """What a script imports from this repository's packages, by its name in the script."""
    found = {
        local: load(module, name)
        for local, module, name in imported(path)
        if module.split(".")[0] in PACKAGES
    }
    return {local: value for local, value in found.items() if local not in bound(path)}


def bound(path: Path) -> set[str]:
    """Names that a file defines anywhere: functions, classes, variables, parameters."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def resolved(node: ast.expr, known: dict[str, Any]) -> Any:
    """The object of the library that an expression such as ``module.name`` refers to, or None.

    Raises:
      AttributeError: the module has no such name.
    """
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolved(node.value, known)
        return getattr(owner, node.attr) if isinstance(owner, ModuleType) else None
    return None


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_the_library_exist(path):
    known = of_library(path)
    for _, module, name in imported(path):
        for sibling in (path.with_name(f"{module}.py"), ROOT / "benchmarks" / f"{module}.py"):
            if name is not None and sibling.exists():
                assert name in bound(sibling), f"{sibling.name} has no {name}"
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute):
            resolved(node, known)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_arguments_of_the_library_exist(path):
    known = of_library(path)
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.Call) or not callable(function := resolved(node.func, known)):
            continue
        parameters = inspect.signature(function).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            continue
        given = {keyword.arg for keyword in node.keywords} - {None}
        assert given <= {*parameters}, f"line {node.lineno}: {function.__qualname__} takes {[*parameters]}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_named_exist(path):
    named = re.findall(r"\b(?:maxlp|configs|benchmarks|tests|tools)/[\w/]+\.py\b", path.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("fidelity", ["precision", "--only", "fp8"]),
        ("fidelity_clip", ["spikes", "--only", "float32"]),
        ("llama7b_memory", ["--only=galore9,released"]),
        ("optimizers", ["--only=adam;lion"]),
        ("llama7b_memory", ["--param_dtype=float8"]),
        ("llama7b_memory", ["--topology=h101:1x1"]),
        ("memory_table", ["--topology=h100:1"]),
        ("contrastive_memory", ["--topology=v5p:2x2"]),
        ("contrastive_memory", ["--topology=h100:1x1", "--loss=cosine"]),
        ("maxtext_compare", ["--topology=h100:1x8"]),
        ("passes", ["--recipes=fp9;fp8_current"]),
        ("passes", ["--chip=v5p"]),
        ("committed_plans", ["--only", "8b"]),
        ("plan_search", ["--presets", "llama/9b"]),
        ("plan_search", ["--machines", "h101:1x1"]),
        ("compare_llama", ["--heads=8"]),
        ("paired_steps", ["statistics"]),
    ],
)
def test_a_name_that_does_not_exist_is_refused(script, arguments, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # whose files import each other
    monkeypatch.setattr("sys.argv", [script, *arguments])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(script).main()
    wrong = re.split("[,;]", re.sub("^--\\w+=", "", arguments[-1]))[0]
    assert re.search(rf"error: .*{wrong}\b", capsys.readouterr().err)
