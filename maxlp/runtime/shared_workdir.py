"""Checks that all processes of a run see the same workdir, where each host may have a disk of its own.

Without it a run trains until it saves a checkpoint, of which each host then holds a part.
"""

import time
from collections.abc import Callable
from pathlib import Path

from maxlp.runtime import distributed, files

VISIBLE_SECONDS = 60.0  # for so long clients of NFS may keep what they know of a folder


def check(workdir: Path, read_lock: Callable[[], bytes], token: str) -> None:
    """Checks that every process reads the lock that the primary process has just taken. A collective.

    Args:
      workdir: of the run, for the message.
      read_lock: returns the content of the lock's file as this process sees it.
      token: what the primary process has written there.

    Raises:
      ValueError: in all processes, with the numbers of those that do not see it.
    """
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not (seen := _holds(read_lock, token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = [str(process) for process, sees in enumerate(distributed.gather_json(seen)) if not sees]
    if blind:
        raise ValueError(
            f"--workdir={files.shown(workdir)} is not the same folder in all processes: what process 0 "
            f"writes there has not appeared in process {', '.join(blind)} after {VISIBLE_SECONDS:.0f} s; "
            "choose a folder that all hosts share, or one in a bucket"
        )


def _holds(read: Callable[[], bytes], token: str) -> bool:
    try:
        return token.encode() in read()
    except OSError:
        return False
