"""The files of a run beside its checkpoints.

config.json   the resolved config
run.json      every launch of the run: time, step, command, git revision, versions, devices, variables that
              configure JAX and XLA, and the signal or error that ended it; the step of the last checkpoint
              that was completed; the commit of each repository of the Hub
tokenizer.*   the tokenizer's own file, if it has one
lock          names the process that trains here, see `runtime.lock`
metrics.jsonl, tensorboard/, loss.png, checkpoints/, spikes/, profile/, early_precision.json, wandb_id

Only a process that holds the lock writes to a workdir.
"""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

import maxlp
from maxlp.runtime import distributed
from maxlp.runtime.checkpoint import check_path, list_steps
from maxlp.runtime.distributed import is_primary
from maxlp.runtime.files import read_json, remove, write_json

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
CONFIGURING = ("JAX_", "XLA_", "LIBTPU_", "NCCL_")  # beginnings of environment variables
MAX_REASON = 500  # characters of an error in run.json


@contextlib.contextmanager
def undone_on_failure(workdir: Path) -> Iterator[None]:
    """If the block fails, what it has added to the workdir is removed again."""
    before = set(workdir.iterdir()) if is_primary() else set()
    try:
        yield
    except BaseException:
        if is_primary():
            for path in set(workdir.iterdir()) - before:
                remove(path)
        raise


def save_config(workdir: Path, c: ConfigDict) -> None:
    """Writes the resolved config."""
    write_json(workdir / "config.json", json.loads(c.to_json_best_effort()))


def check_workdir(workdir: Path) -> None:
    """Raises a ValueError for a workdir that cannot be created, written to or resumed; writes nothing."""
    check_path(workdir, "--workdir")
    check_writable(workdir, "--workdir")
    for path in (workdir / name for name in ("config.json", "run.json", "metrics.jsonl")):
        if os.path.lexists(path) and not path.is_file():
            raise ValueError(f"{path} is not a file; put back the file, or move it away")


def check_writable(directory: Path, name: str) -> None:
    """Raises a ValueError, with the flag's name, unless a folder can be written to or created."""
    folder = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
    if not folder.exists():
        raise ValueError(
            f"{name}={directory}: {folder} is a link to {os.readlink(folder)}, which does not exist (is "
            "the volume mounted?)"
        )
    if not folder.is_dir():
        raise ValueError(f"{name}={directory}: {folder} is a file; give a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{name}={directory}: {folder} is not writable; give another folder")


@contextlib.contextmanager
def scratch(workdir: Path) -> Iterator[Path]:
    """A temporary folder in place of a workdir: a dry run does there what a launch does to the workdir.

    It holds links to what the workdir holds; files are replaced by renaming, which replaces the link. The
    message of a ValueError names the workdir instead of it.
    """
    parent = next(path for path in workdir.absolute().parents if path.exists())
    shared = parent if jax.process_count() > 1 else None
    made = tempfile.mkdtemp(prefix="dry-run-", dir=shared) if is_primary() else ""
    folder = Path(distributed.gather_json(made)[0])
    try:
        if is_primary() and workdir.is_dir():
            for path in workdir.iterdir():
                (folder / path.name).symlink_to(path.absolute())
        yield folder
    except ValueError as error:
        raise ValueError(str(error).replace(str(folder), str(workdir))) from error
    finally:
        distributed.barrier("dry run")
        if is_primary():
            shutil.rmtree(folder, ignore_errors=True)


def load_config(workdir: Path) -> ConfigDict:
    """The config of a run, in today's keys if an earlier version wrote it.

    Raises:
      ValueError: the directory holds no run, or its config is damaged.
    """
    if workdir.is_file():
        raise ValueError(f"{workdir} is a file; give the folder of the run")
    path = workdir / "config.json"
    remedy = "put back a good copy, or delete it: the next launch of the run writes it again"
    if "model_type" in read_json(path, {}, remedy=remedy):
        raise ValueError(
            f"{path} is a Hugging Face config; train --from={workdir} in another --workdir, or import the "
            f"weights: python -m maxlp.convert import --input={workdir} --output=DIR"
        )
    config = read_json(path, fields={"model": dict}, remedy=remedy)
    if config is None and (workdir / "run.json").exists():
        raise ValueError(f"{path} is missing; put it back, or start the run again, which writes it")
    if config is None:
        raise ValueError(f"{path} does not exist: {workdir} holds no run")
    if others := [name for name, section in config.items() if not isinstance(section, dict)]:
        raise ValueError(f"{path} is damaged ({others[0]} is not a section); {remedy}")
    from maxlp.run import earlier_versions  # new runs do not need it

    try:
        return ConfigDict(earlier_versions.upgraded(config))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged (a wrong kind of value: {error}); {remedy}") from None


def is_imported(config: Container[str]) -> bool:
    """Whether a config is that of imported weights, which has no sections about training."""
    return "mesh" not in config and "train" not in config


def record_launch(
    workdir: Path, c: ConfigDict, step: int, num_params: int, units_per_step: int = 0
) -> None:
    """Records the config and a launch at ``step``; from then on a step takes ``units_per_step`` units."""
    if not is_primary():
        return
    record = read_record(workdir)
    save_config(workdir, c)
    device = jax.devices()[0]
    record["starts"].append(
        {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "step": step,
            "num_params": num_params,
            "units_per_step": units_per_step,
            "command": _command(),
            "git": git_revision(),
            "python": platform.python_version(),
            "versions": versions(),
            "environment": environment(),
            "platform": device.platform,
            "device_kind": device.device_kind,
            "num_devices": jax.device_count(),
            "num_processes": jax.process_count(),
            "host": platform.node(),
        }
    )
    if (hub := sys.modules.get("maxlp.runtime.hub")) and hub.commits:
        record["hub_commits"] = hub.commits
    write_json(workdir / "run.json", record)


def environment() -> dict[str, str]:
    """The variables of this process's environment that configure JAX and XLA."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(CONFIGURING)}


@contextlib.contextmanager
def recording_errors(workdir: Path) -> Iterator[None]:
    """If the block fails, the error is recorded as what ended the newest launch.

    A `BrokenPipeError` of standard output becomes another `OSError`: it ends other commands quietly, but
    a run stops before its last step.
    """
    try:
        yield
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        with contextlib.suppress(OSError, ValueError):  # such as a full disk, which may be the error itself
            record_end(workdir, text[:MAX_REASON])
        if isinstance(error, BrokenPipeError) and error.filename == distributed.STANDARD_OUTPUT:
            raise OSError(
                "the run has stopped because nobody reads its output any more, as after `| head`; the same "
                "command, with its output in a file, resumes it from the last checkpoint"
            ) from error
        raise


def record_end(workdir: Path, reason: str) -> None:
    """Records what ended the newest launch before the last step."""
    if is_primary():
        record = read_record(workdir)
        record["starts"][-1]["ended_by"] = reason
        write_json(workdir / "run.json", record)


def _command() -> str:
    """The command line of this process, to be typed again: `sys.argv` holds the file of a module."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", module.name] if module else sys.argv[:1]
    return shlex.join(["python", *program, *sys.argv[1:]])


def hub_commits(workdir: Path) -> dict[str, str]:
    """The commits at which the run took repositories of the Hub, by their ids."""
    return read_record(workdir).get("hub_commits", {})


def use_hub_commits(workdir: Path, data: object) -> None:
    """Pins data of the Hub (hf://) to the commits at which the run first read it."""
    if "hf://" in str(data) and (found := hub_commits(workdir)):
        from maxlp.runtime import hub  # few runs need it

        hub.commits.update(found)


def holds_run(workdir: Path) -> bool:
    """Whether a run has been started in a folder; a config.json of another library does not count."""
    return (workdir / "run.json").exists() or "model" in read_json(workdir / "config.json", {})


def record_checkpoint(workdir: Path, step: int) -> None:
    """Records in run.json that the checkpoint of a step is complete."""
    write_json(workdir / "run.json", read_record(workdir) | {"last_checkpoint": step})


def check_checkpoints(workdir: Path) -> None:
    """Checks that the checkpoints of a run are there, so that it does not silently start over.

    Raises:
      ValueError: run.json records a checkpoint, and there is none.
    """
    record, directory = read_record(workdir), workdir / "checkpoints"
    steps = [record.get("last_checkpoint"), *(start.get("step") for start in record["starts"])]
    last = max(step or 0 for step in steps)
    if last and not any(info.status in ("complete", "damaged") for info in list_steps(directory)):
        raise ValueError(
            f"{directory} holds no checkpoint, but the run had saved step {last}: put the checkpoints back "
            "(is the volume mounted?), choose another --workdir, or delete run.json there to start over"
        )


def saved_data_state(workdir: Path) -> dict[str, Any] | None:
    """The state of the data in the newest checkpoint of a run.

    Returns:
      None before the first checkpoint, {} if no checkpoint has a readable record.
    """
    infos = [i for i in list_steps(workdir / "checkpoints") if i.status != "unfinished"]
    for info in reversed(infos):
        try:
            return read_json(info.path / "checkpoint.json", {}, fields={"data_state": dict})["data_state"]
        except (ValueError, KeyError):  # damaged: reported when the run is restored
            continue
    return {} if infos else None


def read_record(workdir: Path) -> dict[str, Any]:
    remedy = "put back a good copy, or delete it: only the history of launches is lost"
    number = (int, type(None))
    launch = {"step": number, "environment": (dict, type(None)), "versions": (dict, type(None))}
    fields = {"starts": [launch], "last_checkpoint": number, "hub_commits": (dict, type(None))}
    return read_json(workdir / "run.json", {"starts": []}, fields=fields, remedy=remedy)


def versions() -> dict[str, str]:
    found = {"maxlp": maxlp.__version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def git_revision() -> str | None:
    """The commit of the running code, with "-dirty" if it was changed since; None if it has none."""
    file = Path(__file__).resolve()
    # Git refuses the checkout of another user (in a container, a mounted one), but its code runs already.
    git = ["git", "-c", f"safe.directory={file.parents[2]}"]
    tracked = [*git, "ls-files", "--error-unmatch", file.name]  # fails in a .venv inside another project
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    options: dict[str, Any] = dict(cwd=file.parent, capture_output=True, text=True, timeout=10, check=True)
    try:
        subprocess.run(tracked, **options)
        return subprocess.run(describe, **options).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
