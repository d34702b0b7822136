"""The structure of the code, read from its source: imports, and how much there is to read."""

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from maxlp.families import FAMILIES
from maxlp.optim import OPTIMIZERS
from tests.fixtures import Trainer, batch

ROOT = Path(__file__).parent.parent
COMMANDS = {"train", "evaluate", "generate", "plan", "convert", "prepare", "report", "lab", "__main__"}

# The packages that each package may import at the top of its files. "families" is the contract alone; each
# family counts as a package of its own, which is loaded by name. All may import "schema".
ALLOWED: dict[str, set[str]] = {
    "schema": set(),
    "numerics": set(),
    "runtime": set(),
    "data": {"runtime"},
    "parallel": {"numerics"},
    "nn": {"parallel"},
    "core": {"nn", "parallel"},
    "precision": {"nn", "numerics", "parallel"},
    "optim": {"numerics", "parallel"},
    "monitoring": {"data", "optim", "runtime"},
    "families": {"core", "nn", "numerics", "runtime"},
    "run": {
        *("core", "data", "families", "monitoring", "nn", "optim", "parallel", "precision", "runtime"),
    },
    "planning": {"core", "families", "nn", "optim", "parallel", "precision", "run", "runtime"},
}
ALLOWED_IN_FAMILIES = {*ALLOWED} - {"monitoring", "optim"}
BUILDS_ON = {"qwen3": {"llama"}}  # a family that holds only what differs from another one

MAX_CLOSURE_LINES = 10_000  # of our code that `train` imports
MAX_LLAMA_LINES = 12_800
TOO_LONG = "import what few runs need inside the function that needs it; else raise the limit"
MAX_FILES_TO_GRADIENT = 8
MAX_FUNCTION_LINES = 90
MAX_NESTED_FUNCTIONS = 3
MAX_CONFIG_FUNCTIONS = 15


def files(folder: str = "maxlp") -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_path(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((found for found in candidates if found.exists()), None)


def top_level_imports(path: Path) -> set[Path]:
    """Files of the project that importing this one imports, not counting imports inside functions."""
    found: set[Path] = set()
    for node in tree(path).body:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {
            p for name in names if name.split(".")[0] in ("maxlp", "configs") and (p := module_path(name))
        }
    # Importing a module imports the packages that it is in.
    packages = {p / "__init__.py" for one in found for p in one.parents if p != ROOT and ROOT in p.parents}
    return found | {p for p in packages if p.exists()}


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "maxlp").parts
    if parts[0] == "families" and parts[1] in FAMILIES:
        return parts[1]
    return parts[0].removesuffix(".py")


def lines(paths: set[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


# --- imports ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_packages_import_only_what_they_may(path):
    package = package_of(path)
    used = {package_of(p) for p in top_level_imports(path)} - {package, "schema", "__init__"}
    if package in FAMILIES:
        others = used - ALLOWED_IN_FAMILIES - BUILDS_ON.get(package, set())
        assert not others, "BUILDS_ON lists the families that one builds on"
    elif package in ALLOWED:
        assert used <= ALLOWED[package]
    else:
        assert package in COMMANDS | {"__init__"}, "only commands are modules of maxlp itself"
        assert used <= ALLOWED.keys(), "a command imports neither another command nor a family"


def test_there_is_no_import_circle():
    graph = {path: top_level_imports(path) - {path} for path in files()}
    # A package's own file is imported with every module in it; only what it imports counts as a dependency.
    graph = {
        p: {q for q in used if not (q.name == "__init__.py" and q.parent in p.parents)}
        for p, used in graph.items()
    }
    while leaves := {path for path, used in graph.items() if not used & graph.keys()}:
        graph = {path: used for path, used in graph.items() if path not in leaves}
    assert not graph, "a circle among these"


def presets() -> list[Path]:
    """The config files, and what they share."""
    return [*files("configs"), *(path for path in files() if path.name == "presets.py")]


def test_presets_import_only_presets():
    for path in presets():
        assert all(used.name in ("presets.py", "__init__.py") for used in top_level_imports(path)), path


def test_data_and_presets_touch_no_device():
    for path in (*files("maxlp/data"), *presets()):
        modules = {
            alias.name
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        modules |= {node.module or "" for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom)}
        assert not {name.split(".")[0] for name in modules} & {"jax", "flax", "optax"}, path


def test_an_optimizer_is_named_only_where_it_is_defined():
    """All others read its `OptimizerKind`, which a new optimizer has too; presets choose one."""
    own = {module_path(entry.partition(":")[0]) for entry in OPTIMIZERS.values()}
    own |= {ROOT / "maxlp" / "optim" / "config.py", *presets()}
    for path in {*files()} - own:
        strings = {node.value for node in ast.walk(tree(path)) if isinstance(node, ast.Constant)}
        assert not strings & OPTIMIZERS.keys(), path


# --- how much there is to read ---------------------------------------------------------------------------


def test_a_llama_run_imports_few_lines():
    """What `train` imports at once, and what a run of the debug config has imported after a dry run."""
    closure, todo = set(), [ROOT / "maxlp" / "train.py"]
    while todo:
        if (path := todo.pop()) not in closure:
            closure.add(path)
            todo += top_level_imports(path)
    assert lines(closure) <= MAX_CLOSURE_LINES, TOO_LONG
    families = {path.parent.name for path in closure if "families" in path.parts}
    assert families == {"families"}, "a family is imported when a config names it"

    command = [
        sys.executable,
        "-c",
        DRY_RUN,
        "--config=configs/llama/debug.py",
        "--workdir=unused",
        "--dry_run",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {Path(name) for name in json.loads(done.stdout.splitlines()[-1])} - {*presets()}
    assert lines(imported) <= MAX_LLAMA_LINES, TOO_LONG
    names = {name for path in imported for name in path.relative_to(ROOT).parts}
    assert not {"qwen3", "clip", "planning"} & names


DRY_RUN = """
import json, sys
from absl import flags
from maxlp import train
from maxlp.run import cli
train.define_flags()
flags.FLAGS(sys.argv)
assert train.main() == 0
found = [m.__file__ for name, m in sys.modules.items() if name.startswith("maxlp") and m.__file__]
print(json.dumps(found))
"""


def test_the_documentation_gives_these_limits():
    text = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    assert f"imports at most {MAX_LLAMA_LINES:,} lines" in text
    assert f"at most {MAX_FILES_TO_GRADIENT} files" in text
    assert f"no function is longer than {MAX_FUNCTION_LINES} lines" in text


def test_a_batch_reaches_the_gradient_through_few_files():
    trainer, called = Trainer(), set()

    def record(frame, event, arg):
        if event == "call":
            called.add(frame.f_code.co_filename)

    gradients = functools.partial(trainer.gradients, trainer.graphdef)
    sys.setprofile(record)
    try:
        jax.eval_shape(gradients, trainer.abstract, batch(0), None)
    finally:
        sys.setprofile(None)
    ours = {Path(name).relative_to(ROOT) for name in called if name.startswith(str(ROOT / "maxlp"))}
    assert len(ours) <= MAX_FILES_TO_GRADIENT, sorted(map(str, ours))


def functions(path: Path):
    """The functions of a file, each with the number of functions that it is nested in."""

    def visit(node: ast.AST, depth: int):
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function:
                yield child, depth
            yield from visit(child, depth + is_function)

    yield from visit(tree(path), 0)


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_are_short_and_flat(path):
    for function, depth in functions(path):
        assert function.end_lineno - function.lineno < MAX_FUNCTION_LINES, function.name
        assert depth < MAX_NESTED_FUNCTIONS, function.name
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            assert not isinstance(node.targets[0], ast.Name), f"line {node.lineno}: a lambda has a name"


def test_few_functions_take_a_config_dict():
    taking = [
        f"{path.relative_to(ROOT)}:{function.name}"
        for path in (*files(), *files("configs"))
        for function, _ in functions(path)
        for argument in (*function.args.args, *function.args.kwonlyargs)
        if argument.annotation is not None and "ConfigDict" in ast.unparse(argument.annotation)
    ]
    assert len(taking) <= MAX_CONFIG_FUNCTIONS, taking


def test_contracts_are_types():
    """No module uses `hasattr` to find out what another one has set."""
    for path in files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "hasattr", f"{path}:{node.lineno}"
