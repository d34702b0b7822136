"""Where the metrics of a run go: console, ``metrics.jsonl``, TensorBoard, W&B.

A record is a flat dict of scalars with names like ``train/loss``, at a step: the number of finished
updates.
"""

import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
from absl import logging

from maxlp.runtime import distributed, files
from maxlp.runtime.messages import format_seconds

MIN_DATA_WAIT = 0.05  # fraction of the time; the console omits shorter waits for data
NO_BREAK_SPACE = "\u00a0"
MAX_SLASHES = 2  # names with more belong to single layers, too many for a console line

# What the console shows of a training record after the step. A narrow terminal omits the last ones.
PROGRESS = {
    "perf/eta": "eta {}",
    "train/tau": "τ {:,.1f}",
    "train/gain": "gain {:.2f}",
    "train/loss": "loss {:#.5g}",
    "train/learning_rate": "lr {:.2e}",
    "perf/tokens_per_sec": "{} tok/s",
    "perf/images_per_sec": "{} img/s",
    "train/grad_norm": "grad {:.3g}",
    "train/logit_scale": "logit scale {:.1f}",
    "perf/data_wait": "data wait {:.0%}",
    "data/skipped": "skipped {:,.0f}",
    "perf/mfu": "mfu {:.1%}",
}


class Writer(Protocol):
    """One output of `MetricWriter`; records have the keys ``step`` and ``time`` besides the metrics."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class MetricWriter:
    """Sends records to every output of a run; does nothing in processes other than the primary.

    Args:
      workdir: receives ``metrics.jsonl`` and ``tensorboard/``.
      total_steps: of the whole run, for the console; None if it is not known.
      resume_step: finished updates of the restored checkpoint, 0 for a new run. Records of later
        steps are removed from ``metrics.jsonl``, because they will be written again. (So write the
        records of a step before its checkpoint.)
      run_config: shown by W&B.
      tensorboard: write event files.
      wandb_project: the W&B project; None or "" disables W&B. Its environment variables apply, such as
        WANDB_MODE=offline.
      wandb_group, wandb_tags: of the run in W&B.

    Raises:
      ValueError: tensorboardX or wandb is requested but not installed.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        total_steps: int | None,
        resume_step: int,
        run_config: Mapping[str, Any] | None = None,
        tensorboard: bool = True,
        wandb_project: str | None = None,
        wandb_group: str = "",
        wandb_tags: tuple[str, ...] = (),
    ) -> None:
        self._writers: list[Writer] = []
        if not distributed.is_primary():
            return
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self._writers += [
            JsonlWriter(workdir / "metrics.jsonl", resume_step),
            ConsoleWriter(total_steps, sys.stdout),
        ]
        if tensorboard:
            from maxlp.runtime.tensorboard_writer import TensorBoardWriter

            self._writers.append(TensorBoardWriter(workdir / "tensorboard", resume_step))
        if wandb_project:
            from maxlp.runtime.wandb_writer import WandbWriter

            group, tags = wandb_group or None, list(wandb_tags) or None  # None: those of the environment
            self._writers.append(WandbWriter(wandb_project, workdir, run_config, group=group, tags=tags))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one record.

        Args:
          step: number of finished updates.
          metrics: names to scalars (Python, numpy or finished JAX arrays).
        """
        if not self._writers:
            return
        scalars = {name: np.asarray(value).item() for name, value in metrics.items()}
        record = {"step": int(step), "time": time.time(), **scalars}
        for writer in self._writers:
            writer.write(record)

    def close(self) -> None:
        """Flushes and closes every output; a second call does nothing."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.close()


class JsonlWriter:
    """One JSON object per line, complete on disk after each write (NaN and Infinity as in Python)."""

    def __init__(self, path: Path, resume_step: int) -> None:
        self._path = path
        if path.exists():
            # A new run repeats step 0 too; a resumed run does not repeat the step it resumes from.
            last = resume_step if resume_step > 0 else -1
            lines = parse_lines(path)
            kept = (line + b"\n" for line, record in lines if record is None or record["step"] <= last)
            with files.replacing(path) as file:
                file.writelines(kept)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        with files.naming(self._path):
            self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        with files.naming(self._path):
            self._file.close()


def parse_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each line and its record, or None and a warning if it is not one; without a truncated last line.

    They are read one by one: the file of a long run takes several times its size in memory.
    """
    if not path.exists():
        return
    others: list[int] = []
    number = 0
    with path.open("rb") as file:
        for line in file:
            record = _parse(line)
            if record is None and not line.endswith(b"\n"):
                break
            number += 1
            if record is None:
                others.append(number)
            yield line.removesuffix(b"\n"), record
    if others:
        message = "%s: ignored %d of %d lines, which are not records; the first is line %d"
        logging.warning(message, path, len(others), number, others[0])


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


class ConsoleWriter:
    """A single line that is updated in place on a terminal, in its width; otherwise one line per record."""

    def __init__(self, total_steps: int | None, stream: TextIO) -> None:
        self._total_steps, self._stream = total_steps, stream
        self._live = stream.isatty()
        self._line_is_open = False

    def write(self, record: Mapping[str, Any]) -> None:
        # Records other than training progress stay on the screen.
        is_progress = "train/loss" in record
        parts = list(_format_progress(record) if is_progress else _format_pairs(record))
        parts.insert(0, f"step {record['step']}" + (f"/{self._total_steps}" if self._total_steps else ""))
        if not self._live:
            with files.naming(distributed.STANDARD_OUTPUT):
                print("  ".join(parts), file=self._stream, flush=True)
            return
        width = shutil.get_terminal_size().columns - 1  # a cursor after the last column wraps the line
        line = _on_one_line(parts, width) if is_progress else _on_lines(parts, width) + "\n"
        self._stream.write(f"\r\x1b[K{line}")
        self._stream.flush()
        self._line_is_open = is_progress

    def close(self) -> None:
        if self._line_is_open:
            print(file=self._stream, flush=True)


def _on_one_line(parts: Sequence[str], width: int) -> str:
    """The parts on a line: closer together in a narrow one, without the last ones in a very narrow one."""
    shorter = (" ".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((line for line in ("  ".join(parts), *shorter) if len(line) <= width), "")


def _on_lines(parts: Sequence[str], width: int) -> str:
    """The parts on as many lines as they need, none of them broken."""
    glued = "  ".join(part.replace(" ", NO_BREAK_SPACE) for part in parts)
    wrapped = textwrap.fill(
        glued, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return wrapped.replace(NO_BREAK_SPACE, " ")


def _format_pairs(record: Mapping[str, Any]) -> Iterator[str]:
    for name, value in metrics_of(record).items():
        if name.count("/") <= MAX_SLASHES:
            yield f"{name} {value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{name} {value:.4g}"


def _format_progress(record: Mapping[str, Any]) -> Iterator[str]:
    for name, template in PROGRESS.items():
        if name not in record or (name == "perf/data_wait" and record[name] < MIN_DATA_WAIT):
            continue
        yield template.format(FORMATS.get(name, float)(record[name]))


def format_count(value: float) -> str:
    """Three digits of a number, as in 987, 12.3k and 1.23M."""
    for unit in ("", "k", "M", "G"):
        if abs(float(f"{value:.3g}")) < 1000 or unit == "G":
            break
        value /= 1000
    return f"{value:.3g}{unit}"


FORMATS: dict[str, Callable[[float], Any]] = {  # of values in `PROGRESS`
    "perf/eta": format_seconds,
    "perf/tokens_per_sec": format_count,
    "perf/images_per_sec": format_count,
}


def metrics_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without its step and time."""
    return {name: value for name, value in record.items() if name not in ("step", "time")}
