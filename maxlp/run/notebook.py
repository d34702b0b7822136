"""Runs the commands of maxlp in a notebook."""

import subprocess
import sys
import tempfile


def run(command: str, *arguments: str, typed: str = "") -> None:
    """Runs ``python -m maxlp.COMMAND`` and prints its output in the cell, as it comes.

    Args:
      typed: what the command reads from its standard input.

    Raises:
      RuntimeError: the command failed; what it printed says why.
    """
    with tempfile.TemporaryFile("w+") as given:
        given.write(typed)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", f"maxlp.{command}", *arguments],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="")
    if process.returncode:
        raise RuntimeError(f"maxlp {command} ended with exit code {process.returncode}, see above")
