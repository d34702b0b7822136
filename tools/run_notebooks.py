"""Runs notebooks from top to bottom and saves them with their outputs.

    .venv/bin/python -m tools.run_notebooks colabs/*.ipynb

Two CPU cores: about half an hour for all.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import nbclient
import nbformat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    for path in parser.parse_args().notebooks:
        earlier_runs = Path(tempfile.gettempdir()) / f"maxlp_{path.stem}"
        shutil.rmtree(earlier_runs, ignore_errors=True)
        notebook = nbformat.read(path, as_version=4)
        client = nbclient.NotebookClient(
            notebook,
            timeout=None,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(path.parent)}},
        )
        client.execute()
        install = next(cell for cell in notebook.cells if cell.cell_type == "code")
        install.outputs = []  # what pip prints depends on the machine
        nbformat.write(notebook, path)
        print(path)


if __name__ == "__main__":
    main()
