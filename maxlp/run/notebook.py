"""Commands in a notebook."""

import subprocess
import sys


def run(command: str, *arguments: str) -> None:
    """Runs ``python -m maxlp.COMMAND`` and prints its output in the cell, as it comes.

    Raises:
      RuntimeError: the command failed; what it printed says why.
    """
    program = [sys.executable, "-m", f"maxlp.{command}", *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="")
    if process.returncode:
        raise RuntimeError(f"maxlp {command} ended with exit code {process.returncode}, see above")
