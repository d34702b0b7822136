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
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import logging
from ml_collections import ConfigDict

import maxlp
from maxlp.run.config import RENAMED
from maxlp.runtime import distributed
from maxlp.runtime.files import read_json, write_json

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def check_workdir(workdir: Path) -> None:
    """Raises a ValueError for a workdir that cannot be created or written to; writes nothing."""
    folder = next(path for path in (workdir, *workdir.absolute().parents) if path.exists())
    if not folder.is_dir():
        raise ValueError(f"--workdir={workdir}: {folder} is a file; give a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"--workdir={workdir}: {folder} is not writable; give another folder")


@contextlib.contextmanager
def scratch(workdir: Path) -> Iterator[Path]:
    """A temporary folder in place of a workdir: a dry run does there what a start does to the workdir.

    It holds links to what the workdir holds; files are replaced by renaming, which replaces the link.
    """
    parent = next(path for path in workdir.absolute().parents if path.exists())
    shared = parent if jax.process_count() > 1 else None
    made = tempfile.mkdtemp(prefix="dry-run-", dir=shared) if distributed.is_primary() else ""
    folder = Path(distributed.gather_json(made)[0])
    try:
        if distributed.is_primary() and workdir.is_dir():
            for path in workdir.iterdir():
                (folder / path.name).symlink_to(path.absolute())
        yield folder
    except ValueError as error:
        raise ValueError(str(error).replace(str(folder), str(workdir))) from error
    finally:
        distributed.barrier("dry run")
        if distributed.is_primary():
            shutil.rmtree(folder, ignore_errors=True)


def save_config(workdir: Path, c: ConfigDict) -> list[str]:
    """Writes the resolved config; returns one line for each value that differs from the previous one."""
    new = json.loads(c.to_json_best_effort())
    path, changes = workdir / "config.json", []
    if path.exists():
        old, now = _flat(load_config(workdir).to_dict()), _flat(new)
        keys = sorted(k for k in old.keys() | now.keys() if old.get(k) != now.get(k))
        changes = [f"config.{k}: {old.get(k)!r} -> {now.get(k)!r}" for k in keys]
    write_json(path, new)
    return changes


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


def _flat(tree: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
