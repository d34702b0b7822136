"""The command line: ``maxlp COMMAND ...`` is ``python -m maxlp.COMMAND ...``."""

import ast
import runpy
import signal
import sys
from pathlib import Path

import maxlp

COMMANDS = ("train", "evaluate", "generate", "report", "lab", "plan", "prepare", "convert")


def main() -> None:
    """Runs the command that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name == "--version":
        print(maxlp.__version__)
    elif name in ("-h", "--help", "help"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends quietly when nobody reads on, as with `head`
        print(usage())
    elif name in COMMANDS:
        del sys.argv[1]
        runpy.run_module(f"maxlp.{name}", run_name="__main__", alter_sys=True)
    else:
        message = f"error: {name!r} is not a command; choose one of {', '.join(COMMANDS)}"
        print(message, file=sys.stderr)
        sys.exit(2)


def usage() -> str:
    """All commands, each with the first sentence of its docstring."""
    lines = [f"  {name:<9} {summary(name)}" for name in COMMANDS]
    head = ["maxlp COMMAND --FLAG=VALUE ...    (maxlp COMMAND --help lists the flags)", ""]
    start = ["", "A first run: maxlp train --config=llama/debug --workdir=/tmp/run"]
    return "\n".join(head + lines + start)


def summary(command: str) -> str:
    source = (Path(__file__).parent / f"{command}.py").read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(source)) or ""
    return doc.partition("\n")[0].partition(". ")[0].rstrip(".") + "."


if __name__ == "__main__":
    main()
