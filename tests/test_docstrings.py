"""Docstrings describe what exists, explain shape letters and errors, and are indented alike."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$")
ENTRY = re.compile(r"^  ((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*):(?: |$)")
Documented = ast.FunctionDef | ast.ClassDef


def definitions(path: Path) -> Iterator[tuple[Documented, list[str]]]:
    """Functions and classes with a docstring, and its lines without the common indent."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield node, text.splitlines()


def section(lines: list[str], title: str) -> list[str]:
    """The lines of a section, up to the next line without an indent."""
    if f"{title}:" not in lines:
        return []
    rest = lines[lines.index(f"{title}:") + 1 :]
    end = next((i for i, line in enumerate(rest) if line and line[0] != " "), len(rest))
    return [line for line in rest[:end] if line]


def parameters(node: Documented) -> set[str]:
    """Names that Args may describe: those of a function, or of a class's `__init__`, and its fields."""
    if isinstance(node, ast.FunctionDef):
        a = node.args
        every = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
        return {one.arg for one in every if one is not None}
    inits = [
        child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"
    ]
    return attributes(node).union(*map(parameters, inits))


def attributes(node: Documented) -> set[str]:
    """Names that Attributes may describe: fields, properties and what methods assign to `self`."""
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name | ast.Attribute) and isinstance(child.ctx, ast.Store):
            found.add(child.id if isinstance(child, ast.Name) else child.attr)
        elif isinstance(child, ast.FunctionDef):
            found.add(child.name)
    return found


@pytest.mark.parametrize(
    "path", sorted((ROOT / "maxlp").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_sections_describe_what_exists(path):
    for node, lines in definitions(path):
        for title, known in (("Args", parameters), ("Attributes", attributes)):
            entries = [line for line in section(lines, title) if not line.startswith("    ")]
            for line in entries:
                entry = ENTRY.match(line)
                assert entry, f"{node.name}: {title} has no name, or another indent, in {line!r}"
                names = {name.lstrip("*") for name in entry[1].split(", ")}
                assert names <= known(node), f"{node.name}: {title} describes {names - known(node)}"
        for line in lines:
            stripped = line.strip()
            assert line == stripped or not SECTION.match(stripped), f"{node.name}: {stripped} is indented"


PACKAGES = sorted((ROOT / "maxlp").glob("*/**/*.py"))  # not commands, whose docstrings are help
ERRORS = {"ValueError", "ConfigError", "CheckpointError"}


def raised(node: ast.AST) -> Iterator[str]:
    """The names of the errors that a function itself raises, not one inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
            yield ast.unparse(child.exc.func)
        elif not isinstance(child, Documented):
            yield from raised(child)


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_functions_tell_which_errors_they_raise(path):
    for node, lines in definitions(path):
        if isinstance(node, ast.FunctionDef) and node.name[0] != "_" and ERRORS & {*raised(node)}:
            assert re.search(r"Raises:|raises|Error", " ".join(lines)), node.name


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_explain_the_letters_of_shapes(path):
    nodes = [*ast.walk(tree := ast.parse(path.read_text()))]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    if shaped := [name for name in names if re.fullmatch(r"[a-z]\w*_[A-Z][A-Za-z0-9]*", name)]:
        assert re.search(r"\b(Shape l|L)etters\b", ast.get_docstring(tree) or ""), shaped
