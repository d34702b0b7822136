"""Reads the files in the workdir of a run that has not begun, is in progress, was killed or finished."""

import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from maxlp.monitoring.spike_records import find_spikes, recorded_spikes
from maxlp.monitoring.spikes import Spike, SpikeConfig
from maxlp.runtime import checkpoint, lock
from maxlp.runtime.files import local_path, read_json
from maxlp.runtime.writers import parse_lines

_NONE = type(None)
_NUMBERS = {  # those that a report computes with, by section of the config
    "data": ("batch_size", "seq_len"),
    "train": ("total_steps", "log_every", "eval_batches"),
    "spikes": (),
}
_CONFIG = {name: (dict.fromkeys(keys, (int, _NONE)), _NONE) for name, keys in _NUMBERS.items()}
_COUNTS = ("step", "num_params", "units_per_step", "num_devices", "num_processes")
_LAUNCH = dict.fromkeys(_COUNTS, (int, _NONE)) | dict.fromkeys(("command", "git", "ended_by"), (str, _NONE))
_LAUNCH |= {"versions": (dict, _NONE)}


@dataclasses.dataclass(frozen=True)
class Run:
    """The contents of a workdir; files that are missing or damaged appear as empty.

    Attributes:
      workdir: the directory.
      config: the resolved config, `config.json`.
      info: `run.json`, which lists every launch of the run.
      checkpoints: what the directory of checkpoints holds, oldest step first.
      spike_records: those of the spikes that the run recorded, in order.
    """

    workdir: Path
    config: Mapping[str, Any]
    info: Mapping[str, Any]
    checkpoints: list[checkpoint.StepInfo]
    spike_records: list[dict[str, Any]]

    @functools.cached_property
    def records(self) -> list[dict[str, Any]]:
        """The records of `metrics.jsonl`, in order.

        They are read when they are first asked for: those of a long run take a minute.

        Raises:
          ValueError: a value that is not a number.
        """
        return read_jsonl(self.workdir / "metrics.jsonl")

    @property
    def launches(self) -> list[dict[str, Any]]:
        """Every launch of the run in order, including resumes, without what is null."""
        launches = self.info.get("starts", [])
        return [{key: value for key, value in launch.items() if value is not None} for launch in launches]

    @property
    def lock_age(self) -> float | None:
        """Seconds since a process that trains here last renewed the lock; None if none holds it.

        A process renews it every `lock.BEAT_SECONDS`, and removes it at its end unless it is killed.
        """
        try:
            return max(0.0, time.time() - (self.workdir / lock.NAME).stat().st_mtime)
        except OSError:
            return None

    @property
    def num_params(self) -> int | None:
        """Number of model parameters, if the newest launch recorded it."""
        return self.launches[-1].get("num_params") if self.launches else None

    @property
    def step(self) -> int:
        """Number of finished updates at the last record."""
        return self.records[-1]["step"] if self.records else 0

    @property
    def progress(self) -> float:
        """How many of the config's total steps the finished updates count as: AdaScale's τ, or the same."""
        _, tau = self.series("train/tau")
        return float(tau[-1]) if len(tau) else self.step

    @property
    def unit(self) -> str:
        """What throughput counts: "tokens" or "images"."""
        return "images" if self.setting("data", "seq_len") is None else "tokens"

    @property
    def units_per_step(self) -> int:
        """How many tokens or images a step processes; 0 if the config does not contain it."""
        return (self.setting("data", "batch_size") or 0) * (self.setting("data", "seq_len") or 1)

    @property
    def units_seen(self) -> int:
        """How many tokens or images the finished updates have processed, of whatever batch size."""
        seen, end = 0, self.step
        for launch in reversed(self.launches):
            begin = min(end, launch.get("step", 0))
            seen += (end - begin) * launch.get("units_per_step", self.units_per_step)
            end = begin
        return seen + end * self.units_per_step

    @property
    def evaluations(self) -> tuple[str, ...]:
        """Prefixes of the evaluations to show: not ``eval_full`` if it repeats the numbers of ``eval``."""
        return ("eval",) if self._evaluated_all else ("eval", "eval_full")

    def validation_part(self, prefix: str) -> str:
        """What the metrics ``eval/…`` or ``eval_full/…`` were measured on."""
        batches = self.setting("train", "eval_batches")
        if prefix == "eval" and batches is None and not self._evaluated_all:
            return "validation data"  # config.json is missing or damaged: how much is unknown
        if prefix == "eval" and batches and not self._evaluated_all:
            several = f"the first {batches} validation batches"
            return several if batches > 1 else "the first validation batch"
        return "all validation data"

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of all metrics, in the order in which they were first recorded."""
        return list(dict.fromkeys(itertools.chain.from_iterable(self.records)))

    def records_with(self, prefix: str) -> list[dict[str, Any]]:
        """The records with a metric whose name begins with `prefix`, in order."""
        names = [name for name in self.names if name.startswith(prefix)]
        return [record for record in self.records if any(name in record for name in names)]

    @functools.cached_property
    def _evaluated_all(self) -> bool:
        """Whether the last ``eval/…`` are those of all validation data, as where it is shorter."""
        # Those of `run.measurements` may follow.
        *_, part, whole = ({}, {}, *self.records_with("eval"))
        names = [name for name in whole if name.startswith("eval_full/")]
        return bool(names) and all(part.get(n.replace("_full", "", 1)) == whole[n] for n in names)

    @property
    def spike_config(self) -> SpikeConfig:
        """The run's definition of a spike; keys of other versions of maxlp are ignored.

        Raises:
          ValueError: a wrong value in `config.json`.
        """
        known = {field.name for field in dataclasses.fields(SpikeConfig)}
        values = self.config.get("spikes", {})
        # None is the default, as in `config.bind`.
        given = {key: value for key, value in values.items() if key in known and value is not None}
        try:
            return SpikeConfig(**given)
        except ValueError as error:
            path = self.workdir / "config.json"
            raise ValueError(f"{path} is damaged (spikes.{error}); put back a good copy") from None

    @functools.cached_property
    def spikes(self) -> list[Spike]:
        """The spikes that the run recorded, or else those among its logged losses."""
        if self.spike_records:
            return [Spike(*(record[key] for key in Spike._fields)) for record in self.spike_records]
        return find_spikes(*self.series("train/loss"), self.spike_config)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps (int64) and values (float64) of the records that contain `name`."""
        found = [record for record in self.records if name in record]
        steps, values = [r["step"] for r in found], [r[name] for r in found]
        return np.array(steps, np.int64), np.array(values, np.float64)

    def setting(self, section: str, key: str) -> Any:
        """A value of the config, or None."""
        return self.config.get(section, {}).get(key)


def load_run(workdir: str | os.PathLike[str]) -> Run:
    """Reads a workdir.

    Raises:
      ValueError: there is no such directory.
    """
    workdir = local_path(workdir, "--workdir")
    if not workdir.is_dir():
        raise ValueError(f"{workdir} is not a directory; give the --workdir of a run")
    return Run(
        workdir=workdir,
        config=_read_json(workdir / "config.json", _CONFIG),
        info=_read_json(workdir / "run.json", {"starts": [_LAUNCH]}),
        checkpoints=_list_checkpoints(workdir / "checkpoints"),
        spike_records=recorded_spikes(workdir),
    )


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the records of a ``metrics.jsonl`` in order.

    A last line truncated by a crash is skipped, other lines that are not records are reported; a missing
    file has no records.

    Raises:
      ValueError: a value that is not a number.
    """
    records = []
    for _, record in parse_lines(Path(path)):
        if record is None:
            continue
        for name, value in record.items():
            if not isinstance(value, int | float):
                found = f"{name} of step {record['step']} is {value!r}, not a number"
                raise ValueError(f"{path}: {found}; correct or delete the line")
        # One copy of each name: half of the memory for hundreds of thousands of records.
        records.append({sys.intern(name): value for name, value in record.items()})
    return records


def _read_json(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return read_json(path, {}, fields=fields)
    except (OSError, ValueError) as error:
        logging.warning("%s", error)
        return {}


def _list_checkpoints(directory: Path) -> list[checkpoint.StepInfo]:
    try:
        return checkpoint.list_steps(directory)
    except PermissionError as error:
        logging.warning("%s", error)
        return []


def tail(losses: np.ndarray) -> np.ndarray:
    """The last tenth of the losses, at most ten: a single one is too noisy to compare runs by."""
    return losses[-min(10, max(1, len(losses) // 10)) :]
