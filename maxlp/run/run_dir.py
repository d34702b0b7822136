"""The files of a run beside its checkpoints.

config.json   the resolved config
run.json      every start of the run: time, step, command, git revision, versions, devices
tokenizer.*   the tokenizer's own file, if it has one
metrics.jsonl, tensorboard/, loss.png, checkpoints/
"""

import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import logging
from ml_collections import ConfigDict

import maxlp
from maxlp.run.config import RENAMED
from maxlp.runtime import distributed
from maxlp.runtime.files import read_json, remove, write_json

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


@contextlib.contextmanager
def created(workdir: Path) -> Iterator[None]:
    """Creates a workdir; if the block fails, what it has added to the workdir is removed again."""
    missing = [folder for folder in (workdir, *workdir.parents) if not folder.exists()]
    workdir.mkdir(parents=True, exist_ok=True)
    before = set(workdir.iterdir())
    try:
        yield
    except BaseException:
        if distributed.is_primary():
            for path in set(workdir.iterdir()) - before:
                remove(path)
            with contextlib.suppress(OSError):  # not empty
                for folder in missing:
                    folder.rmdir()
        raise


def save_config(workdir: Path, c: ConfigDict) -> None:
    """Writes the resolved config."""
    write_json(workdir / "config.json", json.loads(c.to_json_best_effort()))


def load_config(workdir: Path) -> ConfigDict:
    """The config of a run, in today's keys if an earlier version wrote it.

    Raises:
      ValueError: the directory holds no run.
    """
    path = workdir / "config.json"
    if not path.exists():
        raise ValueError(f"{path} does not exist: --workdir={workdir} holds no run")
    return ConfigDict(_upgraded(read_json(path)))


def _upgraded(config: dict[str, Any]) -> dict[str, Any]:
    """A config of version 0.1 in today's keys and words."""
    for old, new in RENAMED.items():
        section, key = old.split(".")
        if key in config.get(section, {}):
            config[section][new.split(".")[1]] = config[section].pop(key)
    low_bit = config.get("optimizer", {}).get("low_bit")
    if low_bit is not None and "mu" not in low_bit:
        low_bit |= {"mu": "float8_e4m3fn", "nu": "float8_e5m2"}  # what an empty section meant
    data = config.get("data", {})
    data.pop("name", None)  # the family determines the kind of data
    for key in ("source", "validation_source"):
        if data.get(key):
            data[key] = data[key].replace("heldout", "validation")
    return config


def record_start(workdir: Path, step: int, num_params: int) -> None:
    """Appends this start of the run, at ``step`` finished updates, to run.json."""
    if not claim(workdir):
        logging.warning(
            "another process trains in %s, and both overwrite the same files; stop one of them", workdir
        )
    path = workdir / "run.json"
    record = read_json(path, {"starts": []})
    device = jax.devices()[0]
    record["starts"].append(
        {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "step": step,
            "num_params": num_params,
            "command": " ".join(sys.argv),
            "git": git_revision(),
            "python": platform.python_version(),
            "versions": versions(),
            "platform": device.platform,
            "device_kind": device.device_kind,
            "num_devices": jax.device_count(),
            "num_processes": jax.process_count(),
            "host": platform.node(),
        }
    )
    write_json(path, record)


def claim(workdir: Path) -> bool:
    """Locks a workdir for the life of this process; False if another process on this machine holds it.

    True on file systems without locks. Callers only warn if it is False: a lock on a network file
    system may outlive a lost host, and the run of that host must be able to start again.
    """
    path = str(workdir.resolve())
    if path in _claimed:
        return True
    directory = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(directory)
        return False
    except OSError:
        pass
    _claimed[path] = directory
    return True


_claimed: dict[str, int] = {}


def versions() -> dict[str, str]:
    found = {"maxlp": maxlp.__version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def git_revision() -> str | None:
    """The commit of the running code, with "-dirty" if it was changed since; None outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    here = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
