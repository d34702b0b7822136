r"""Links from docs/ to the lines of the code on which definitions begin.

    python -m tools.source_links

writes the current line numbers into docs/from_batch_to_gradient.md. A link names what it leads to:

    [`Llama.hidden`](../maxlp/families/llama/model.py#L188)
"""

import argparse
import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "from_batch_to_gradient.md"
LINK = re.compile(r"\[`(?P<name>[\w.]+)`\]\(\.\./(?P<file>maxlp/[\w/]+\.py)#L(?P<line>\d+)\)")


def definitions(path: Path) -> dict[str, int]:
    """Line by name of the functions, classes, methods and constants that a file defines."""
    found: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                found[prefix + child.name] = child.lineno
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                found.update({prefix + t.id: child.lineno for t in targets if isinstance(t, ast.Name)})

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def updated(text: str) -> str:
    """The page with the current line in every link.

    Raises:
      ValueError: a file or a definition that does not exist.
    """

    def with_line(link: re.Match[str]) -> str:
        path = ROOT / link["file"]
        lines = definitions(path) if path.exists() else {}
        if link["name"] not in lines:
            raise ValueError(f"{link['file']} does not define {link['name']}; correct the link")
        return f"[`{link['name']}`](../{link['file']}#L{lines[link['name']]})"

    return LINK.sub(with_line, text)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    PAGE.write_text(updated(PAGE.read_text()))
