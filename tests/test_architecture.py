"""Who may import whom (see CONTRIBUTING.md), read from the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = {"train", "evaluate", "generate", "plan", "convert", "prepare", "report"}
LEAVES = {"precision", "optim", "data", "metrics", "distributed", "profiler"}


def imported(path: Path) -> set[str]:
    """Names of the maxlp modules that a file imports: "models", "optim", …"""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        found |= {name.split(".")[1] for name in names if name.startswith("maxlp.")}
    return found


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "maxlp").parts[0].removesuffix(".py")


FILES = sorted((ROOT / "maxlp").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    part, uses = part_of(path), imported(path) - {part_of(path)}
    assert "train" not in uses, "nothing imports train"
    if part in ("models", "losses", "sharding"):
        assert uses <= {"sharding", "losses"}
    elif part in ("contrastive", "gradients"):
        assert uses <= {"sharding"}
    elif part == "step":
        assert uses <= {"gradients", "sharding"}
    elif part == "layerwise":
        assert uses <= {"gradients", "models", "sharding"}
    elif part in LEAVES:
        assert not uses
    elif part == "checkpoint":
        assert uses <= {"distributed"}
    elif part not in COMMANDS | {"build", "config", "workdir", "evals", "diagnostics", "planning", "tasks"}:
        assert part == "__init__"


def test_configs_import_only_each_other():
    for path in sorted((ROOT / "configs").rglob("*.py")):
        assert not imported(path), path
        assert "jax" not in path.read_text().split(), path


def test_data_touches_no_device():
    for path in sorted((ROOT / "maxlp" / "data").rglob("*.py")):
        modules = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            for name in (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert not modules & {"jax", "flax", "optax"}, path
