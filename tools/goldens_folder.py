"""The argument of the programs that write goldens: the folder."""

import sys
from pathlib import Path


def goldens_folder() -> Path:
    """The folder on the command line; ends the program with one line if that is not what it holds."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(f"error: give the folder, as in python {sys.argv[0]} tests/goldens")
    return Path(sys.argv[1])
