"""Draws the packages of maxlp and their imports, read from the source: docs/figures/architecture.svg.

    python -m tools.architecture

Packages stand above what they import, in an order with few crossings (Sugiyama et al. 1981). An arrow that
other arrows imply is left out, and imports inside functions do not count.
"""

import argparse
import ast
import dataclasses
import functools
import itertools
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "maxlp"
FIGURE = ROOT / "docs" / "figures" / "architecture.svg"
COMMANDS = "commands"
FAMILIES = "families"

WIDTH, BOX, LANE = 720, (138, 46), 22  # pixels: of the picture, of a box, and for an arrow through a layer
GAP, LAYER_HEIGHT, MARGIN = 18, 84, 16
SWEEPS = 24  # passes over the layers that reorder their boxes
COLORS = {
    COMMANDS: "#fde9c8",
    **dict.fromkeys(("families.llama", "families.qwen3", "families.clip"), "#d9ead3"),
}

Graph = dict[str, set[str]]


# --- packages and imports -------------------------------------------------------------------------------


def node_of(path: Path) -> str | None:
    """The box that a file belongs to."""
    folders = path.relative_to(PACKAGE).parts[:-1]
    if not folders:
        return None if path.name == "__init__.py" else COMMANDS
    if folders[0] == FAMILIES and len(folders) > 1:
        return ".".join(folders[:2])
    return folders[0]


@functools.cache
def sources() -> dict[str, list[Path]]:
    """The files of each box."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if (node := node_of(path)) is not None:
            found.setdefault(node, []).append(path)
    return found


def imported_files(path: Path) -> set[Path]:
    """Files of the package that a file imports at its top level."""
    names = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    bases = [ROOT.joinpath(*name.split(".")) for name in names if name.split(".")[0] == PACKAGE.name]
    candidates = {file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py")}
    return {file for file in candidates if file.exists()}


def imports() -> Graph:
    """The boxes that each box imports."""
    graph: Graph = {}
    for node, paths in sources().items():
        used = {node_of(file) for path in paths for file in imported_files(path)}
        graph[node] = {other for other in used if other not in (None, node)}
    return graph


def reduced(graph: Graph) -> Graph:
    """The graph without the arrows that others imply (transitive reduction)."""

    @functools.cache
    def reachable(node: str) -> frozenset[str]:
        return frozenset(graph[node]).union(*(reachable(other) for other in graph[node]))

    return {
        node: {one for one in used if not any(one in reachable(other) for other in used - {one})}
        for node, used in graph.items()
    }


def rounded_lines(node: str) -> int:
    """Lines of a box's files in hundreds, so that small changes leave the picture as it is."""
    count = sum(len(path.read_text().splitlines()) for path in sources()[node])
    return max(100, round(count, -2))


# --- layout ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Item:
    """A box, or, without a name, the place where an arrow passes through a layer.

    Attributes:
      below: the items in the next lower layer that arrows lead to.
    """

    name: str
    layer: int
    below: list["Item"] = dataclasses.field(default_factory=list)
    above: list["Item"] = dataclasses.field(default_factory=list)
    x: float = 0.0

    @property
    def width(self) -> int:
        return BOX[0] if self.name else LANE


def layer_of(graph: Graph) -> dict[str, int]:
    """The length of the longest path of imports below each box."""

    @functools.cache
    def height(node: str) -> int:
        return 1 + max((height(other) for other in graph[node]), default=-1)

    return {node: height(node) for node in graph}


def layout(graph: Graph) -> list[list[Item]]:
    """Layers of items from the bottom up, with their places."""
    layers = layer_of(graph)
    boxes = {node: Item(node, layer) for node, layer in sorted(layers.items())}
    rows: list[list[Item]] = [[] for _ in range(max(layers.values()) + 1)]
    for box in boxes.values():
        rows[box.layer].append(box)
    for node, other in sorted((node, other) for node, used in graph.items() for other in used):
        item = boxes[node]
        for layer in range(layers[node] - 1, layers[other], -1):
            lane = Item("", layer)
            rows[layer].append(lane)
            _connect(item, lane)
            item = lane
        _connect(item, boxes[other])
    best = None
    for sweep in range(SWEEPS):
        _place(rows)
        if best is None or crossings(rows) < best[0]:
            best = crossings(rows), [list(row) for row in rows]
        _reorder(rows, upwards=sweep % 2 == 0)
    assert best is not None
    _place(best[1])
    return best[1]


def _connect(item: Item, lower: Item) -> None:
    item.below.append(lower)
    lower.above.append(item)


def _place(rows: list[list[Item]]) -> None:
    """Spreads the items of each layer over the width, in their order."""
    for row in rows:
        free = WIDTH - 2 * MARGIN - sum(item.width for item in row)
        gap = min(free / (len(row) + 1), 3 * GAP)
        x = (WIDTH - sum(item.width for item in row) - gap * (len(row) - 1)) / 2
        for item in row:
            item.x = x + item.width / 2
            x += item.width + gap


def _reorder(rows: list[list[Item]], upwards: bool) -> None:
    """Orders the items of each layer by the mean place of their neighbours in the layer before."""
    for row in rows if upwards else rows[::-1]:
        places = {}
        for item in row:
            neighbours = (item.below if upwards else item.above) or [item]
            places[item] = sum(other.x for other in neighbours) / len(neighbours)
        row.sort(key=lambda item: places[item])
        _place([row])


def crossings(rows: list[list[Item]]) -> int:
    """The number of pairs of arrows that cross."""
    total = 0
    for row in rows:
        arrows = [(item.x, lower.x) for item in row for lower in item.below]
        total += sum((a[0] - b[0]) * (a[1] - b[1]) < 0 for a, b in itertools.combinations(arrows, 2))
    return total


# --- the picture ----------------------------------------------------------------------------------------


def svg() -> str:
    """The picture as text."""
    rows = layout(reduced(imports()))
    height = 2 * MARGIN + BOX[1] + LAYER_HEIGHT * (len(rows) - 1)

    def y(layer: int) -> float:
        return MARGIN + BOX[1] / 2 + LAYER_HEIGHT * (len(rows) - 1 - layer)

    arrows, boxes = [], []
    for item in itertools.chain(*rows):
        if item.name:
            arrows += [_arrow(item, lower, y) for lower in item.below]
            boxes += _box(item, y(item.layer))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" font-family="sans-serif" text-anchor="middle">',
            "<title>The packages of maxlp and their imports</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 8 4 0 8z" fill="#666"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
            '<g fill="none" stroke="#666" stroke-width="1.2">',
            *arrows,
            "</g>",
            *boxes,
            "</svg>",
            "",
        ]
    )


def _arrow(item: Item, lower: Item, y) -> str:
    """A smooth line from a box to the next box below, through the lanes between."""
    points = [(item.x, y(item.layer) + BOX[1] / 2)]
    while not lower.name:
        points += [(lower.x, y(lower.layer) - BOX[1] / 2), (lower.x, y(lower.layer) + BOX[1] / 2)]
        [lower] = lower.below
    points.append((lower.x, y(lower.layer) - BOX[1] / 2))
    path = f"M{points[0][0]:.0f} {points[0][1]:.0f}"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        middle = (y0 + y1) / 2
        path += f" C{x0:.0f} {middle:.0f} {x1:.0f} {middle:.0f} {x1:.0f} {y1:.0f}"
    return f'<path d="{path}" marker-end="url(#head)"/>'


def _box(item: Item, y: float) -> list[str]:
    left, top = item.x - BOX[0] / 2, y - BOX[1] / 2
    color = COLORS.get(item.name, "#dce6f2")
    return [
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{BOX[0]}" height="{BOX[1]}" rx="6" fill="{color}" '
        'stroke="#888"/>',
        f'<text x="{item.x:.0f}" y="{y - 3:.0f}" font-size="14" font-weight="bold">{item.name}</text>',
        f'<text x="{item.x:.0f}" y="{y + 14:.0f}" font-size="11" fill="#444">'
        f"about {rounded_lines(item.name):,} lines</text>",
    ]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    FIGURE.write_text(svg())
    print(FIGURE.relative_to(ROOT))
