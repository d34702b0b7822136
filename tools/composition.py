"""Prints docs/composition.md: which features can be combined, from the data that tests/matrix.py runs.

python -m tools.composition > docs/composition.md
"""

import os
import textwrap
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from maxlp.run import constraints
from tests import composition

Rows = Callable[[str, str], tuple[composition.Row, ...]]  # of a family and a tier
SLOW = textwrap.fill(", ".join(f.name for f in composition.FEATURES if f.slow) + ".", 100)
HEAD = f"""# What can be combined

Every pair of features in the tables below runs (✓) or is refused with a reason (a number).

A pair runs if `tests/matrix.py` trains a small model with both on up to eight simulated devices, gets
the losses, gradient norms and quantization state of the same run on one device, saves a checkpoint and
resumes from it bit for bit. Pairs are combined into rows of many features, so the rows also show that more
than two features can be combined. The slow tier runs the pairs of a recipe and an optimizer, those of CLIP
that meet in the same code as Llama's, and those of
{SLOW}

`train`, `train --dry_run`, `plan`, its closed form and its search refuse the same configs with the same
messages: all of them use the rules of `maxlp/run/constraints.py` and those of the family.

This page is printed by `python -m tools.composition`, and a test compares the two.
"""


def table(family: str, rows: Rows) -> list[str]:
    names = [f.name for f in composition.FEATURES]
    numbers: dict[str, int] = {}
    pairs = composition.pairs(family)

    def cell(a: str, b: str) -> str:
        if (a, b) not in pairs and (b, a) not in pairs:
            return ""
        message = pairs.get((a, b), pairs.get((b, a)))
        return "✓" if message is None else str(numbers.setdefault(message, len(numbers) + 1))

    lines = ["| |" + "|".join(str(i + 1) for i in range(len(names))) + "|", "|---" * (len(names) + 1) + "|"]
    lines += [
        f"| {i + 1} {name} |"
        + "|".join("" if j >= i else cell(name, other) for j, other in enumerate(names))
        + "|"
        for i, name in enumerate(names)
    ]
    lines += ["", *(f"{number}. {message}" for message, number in numbers.items())]
    for tier in ("full", "slow"):
        if listed := rows(family, tier):
            lines += ["", f"{len(listed)} rows of the {tier} tier:", ""]
            lines += [f"- {', '.join(row)}" for row in listed]
    return lines


def rules() -> list[str]:
    return [
        "## The rules that relate sections",
        "",
        *(f"- `{rule.__name__}`: {rule.__doc__}" for rule in constraints.RULES),
    ]


def text(rows: Rows = composition.rows) -> str:
    parts = [HEAD]
    for family in composition.FAMILIES:
        parts += [f"## {family}", "", *table(family, rows), ""]
    return "\n".join([*parts, *rules(), ""])


if __name__ == "__main__":
    print(text(), end="")
