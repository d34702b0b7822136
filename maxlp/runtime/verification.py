"""Finds the newest intact checkpoint. Each process verifies a share of the files."""

from collections.abc import Mapping
from pathlib import Path

import jax
from absl import logging

from maxlp.runtime import distributed, files, manifest


def newest_intact(directory: Path) -> tuple[int | None, dict[int, list[str]]]:
    """Verifies checkpoints from the newest on, until one is intact. A collective.

    Args:
      directory: contains one directory per checkpoint, named by its step.

    Returns:
      The newest intact step, or None, and the faults of the newer ones by step, newest first. These
      faults are logged; without an intact step the caller reports them.
    """
    damaged: dict[int, list[str]] = {}
    for step in reversed(distributed.gather_json(list_numbered(directory))[0]):
        faults = verify(directory / str(step))
        if not faults:
            _log(directory, damaged, step)
            return step, damaged
        damaged[step] = faults
    return None, damaged


def _log(directory: Path, damaged: Mapping[int, list[str]], intact: int) -> None:
    if not damaged or not distributed.is_primary():
        return
    for step, faults in damaged.items():
        for fault in faults:
            logging.error("checkpoint %s is damaged: %s", directory / str(step), fault)
    logging.error("step %d is read instead", intact)


def verify(root: Path) -> list[str]:
    """Returns the faults of one checkpoint, in every process those found by all. A collective."""
    place = files.bucket(root) or manifest
    faults = place.find_faults(root, jax.process_index(), jax.process_count())
    return [fault for found in distributed.gather_json(faults) for fault in found]


def list_damaged(directory: Path, damaged: Mapping[int, list[str]]) -> str:
    """One line with the damaged steps, from `newest_intact`, and those that earlier launches renamed."""
    found = [f"{step} ({faults[0]})" for step, faults in damaged.items()]
    return ", ".join(found + sorted(path.name for path in directory.glob("*.damaged*")))


def list_numbered(directory: Path) -> list[int]:
    """The steps with a complete checkpoint, intact or not, in increasing order."""
    return sorted(int(path.name) for path in files.entries(directory) if path.name.isdigit())
