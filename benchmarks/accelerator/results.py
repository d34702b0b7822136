"""The results of the pieces: one JSON file each.

The file is replaced after every row, so that a piece that is stopped leaves what it has measured.
"""

import datetime
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxlp.run.run_dir import git_revision, versions
from maxlp.runtime.files import read_json, write_json

RUNNING, DONE, LEFT_OUT, FAILED = "running", "done", "left out", "failed"
INTERRUPTED = "interrupted"  # for lack of time; another call continues after its last row
NO_TIME = "no time was left"  # the "error" of an interrupted piece
# Of results in bfloat16 against those of the CPU. Outputs and gradients are rounded, which changes a value
# by at most 2^-9 of it, and so are the probabilities and the gradients of the logits that they are computed
# from; the norm of the error stays below four times that.
TOLERANCE = 2.0**-7


class LeftOut(Exception):
    """This machine cannot run the piece, for example because PyTorch is missing; that is not a failure."""


class OutOfTime(Exception):
    """The next row would not be finished in time; another call begins with it."""


class Result:
    """What a piece has measured so far, and its file.

    Attributes:
      name: of the piece.
      folder: of the results of all pieces.
      device: as in `__main__.find_device`.
      tiny: whether the sizes only check that everything runs.
      rows: the measurements, each a dictionary of plain values.
    """

    def __init__(self, name: str, folder: Path, seconds: float):
        self.name, self.folder = name, folder
        self.device = load(folder / "device.json")
        self.tiny: bool = self.device["tiny"]
        self.rows: list[dict[str, Any]] = []
        self._end = time.monotonic() + seconds
        self._header = {
            "piece": name,
            "command": " ".join(sys.orig_argv),
            "commit": git_revision() or os.environ.get("GIT_COMMIT"),
            "versions": versions(),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "device": self.device,
            "start": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        self._started = time.monotonic()
        self._earlier = rows_of_the_same(load(path(folder, name)), self._header)
        if not self._earlier:
            self.write(RUNNING)

    @property
    def seconds_left(self) -> float:
        """Seconds until the piece is stopped."""
        return self._end - time.monotonic()

    def add(self, **values: Any) -> None:
        """Adds a row to the file, and prints it to the log."""
        self.rows.append(values)
        self.write(RUNNING)
        print({key: value for key, value in values.items() if not isinstance(value, list)}, flush=True)

    def measure(self, function: Callable[[], dict[str, Any]], **names: Any) -> dict[str, Any]:
        """Adds and returns a row: its names and what a function measures, or else the function's error.

        An error does not stop the other rows. If an interrupted attempt has a row with these names, it is
        added instead.
        """
        row = next((row for row in self._earlier if row.items() >= names.items()), None)
        if row is None:
            try:
                row = names | function()
            except Exception as error:  # such as a kernel that this device refuses, or no memory left
                traceback.print_exception(error)
                row = names | {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
        self.add(**row)
        return row

    def write(self, status: str, **more: Any) -> None:
        taken = round(time.monotonic() - self._started, 1)
        write_json(
            path(self.folder, self.name),
            self._header | dict(status=status, seconds=taken, rows=self.rows) | more,
        )


def path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def load(file: Path) -> dict[str, Any]:
    """A result; {} if there is none."""
    return read_json(file, remedy="delete it") or {}


def is_unfinished(result: dict[str, Any]) -> bool:
    """Whether the attempt that wrote a result was interrupted, or killed while it ran."""
    return result.get("status") in (RUNNING, INTERRUPTED)


def rows_of_the_same(result: dict[str, Any], header: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an interrupted attempt, if it was of the same code, versions, XLA_FLAGS and device."""
    same = all(result.get(key) == header[key] for key in ("commit", "versions", "xla_flags", "device"))
    if not same or not header["commit"] or header["commit"].endswith("-dirty"):
        return []
    return result["rows"] if is_unfinished(result) else []


def is_of(result: dict[str, Any], device: dict[str, Any]) -> bool:
    """Whether a result was measured on this kind of device, with sizes that are as tiny or full."""
    return all(result["device"][key] == device[key] for key in ("platform", "kind", "tiny"))
