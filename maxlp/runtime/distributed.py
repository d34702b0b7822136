"""Several processes as one program: start-up from the environment, barriers, small exchanges.

Environment variables, read once by `initialize`:

===========================  =================================================================
MAXLP_COORDINATOR            ``host:port`` of process 0; with the next two, any launcher works
MAXLP_NUM_PROCESSES          number of processes
MAXLP_PROCESS_ID             index of this process, from 0
MAXLP_DISTRIBUTED            ``1``: let JAX detect the cluster; ``0``: single process in any case
MAXLP_INIT_TIMEOUT           seconds to wait for all processes at start-up (default 300)
MAXLP_HEARTBEAT_TIMEOUT      seconds of silence after which a process counts as dead (default 100)
===========================  =================================================================

With none of the first four set, a Slurm step with several tasks, a TPU host and an indexed Kubernetes
job (JobSet) are recognized, and JAX's own detection finds the addresses.
``JAX_LOCAL_DEVICE_IDS=0`` restricts a process to some of the GPUs of its host.

When one process dies, JAX ends all others after the heartbeat timeout. There is no recovery within
the job: its supervisor restarts it, and it resumes from the last checkpoint. The supervisors in
`launch/` do not wait for the timeout.
"""

import importlib.util
import json
import os
import sys
from typing import Any

import jax
import numpy as np
from absl import logging
from jax._src.distributed import global_state  # its store of keys and values has no public name
from jax.experimental import multihost_utils

from maxlp.runtime import cpu, files
from maxlp.runtime.exits import EXIT_INTERRUPTED, hard_exit

EXPLICIT = ("MAXLP_COORDINATOR", "MAXLP_NUM_PROCESSES", "MAXLP_PROCESS_ID")
STANDARD_OUTPUT = "standard output"  # as errors name it


def initialize() -> None:
    """Joins this process to the others described by the environment; does nothing if it is alone.

    Call it before anything that touches a device. See the table at the top of the file.

    Raises:
      ValueError: the environment is contradictory, names a cluster that JAX cannot find, or enables JAX's
        64-bit types, with which a run computes other numbers.
    """
    if jax.config.jax_enable_x64:
        raise ValueError(
            "JAX_ENABLE_X64 is set; unset it: 64-bit types change the numbers that a run computes"
        )
    _join()
    alone = not jax.distributed.is_initialized()
    cpu.configure_client(alone)
    if not alone:
        sys.excepthook = _exit_after(sys.excepthook)
        logging.info("process %d of %d", jax.process_index(), jax.process_count())


def _join() -> None:
    timeout = env_int("MAXLP_INIT_TIMEOUT", 300, minimum=1)
    heartbeat = env_int("MAXLP_HEARTBEAT_TIMEOUT", 100, minimum=1)
    mode = os.environ.get("MAXLP_DISTRIBUTED", "")
    if mode not in ("", "0", "1"):
        raise ValueError(f"MAXLP_DISTRIBUTED={mode!r}: set 1 (detect a cluster) or 0 (single process)")
    if mode == "0":
        return
    explicit = any(name in os.environ for name in EXPLICIT)
    detected = None
    if not explicit:
        detected = "MAXLP_DISTRIBUTED=1" if mode == "1" else _detect_cluster()
    if explicit or detected:
        from maxlp.runtime import cluster  # a single process needs none

        cluster.join(detected, timeout, heartbeat)


def _detect_cluster() -> str | None:
    """What in the environment indicates other processes; None if nothing does."""
    env = os.environ
    # Only srun sets SLURM_STEP_*: an interactive shell inside an allocation is a single process.
    if "SLURM_STEP_NODELIST" in env and env_int("SLURM_STEP_NUM_TASKS", 1, minimum=1) > 1:
        return "SLURM_STEP_NUM_TASKS is above 1"
    # `import jax` puts "tpu" here when it finds TPU chips and the TPU library.
    if "tpu" in (jax.config.jax_platforms or ""):  # type: ignore[attr-defined]
        return "this is a TPU host"
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        if importlib.util.find_spec("kubernetes") is None:
            raise ValueError(
                "JOB_COMPLETION_INDEX is set (an indexed Kubernetes job), but finding the other pods needs "
                f"`pip install 'jax[k8s]'`; or set {', '.join(EXPLICIT)}, or MAXLP_DISTRIBUTED=0 for a "
                "single process"
            )
        return "JOB_COMPLETION_INDEX is set"
    return None


def env_int(name: str, default: int | None = None, *, minimum: int) -> int:
    """An environment variable as an integer; a ValueError if it is another text or below ``minimum``."""
    text = os.environ.get(name, default)
    try:
        value = int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = minimum - 1
    if value < minimum:
        raise ValueError(f"{name}={text!r} must be a whole number of at least {minimum}")
    return value


def _exit_after(report: Any) -> Any:
    def excepthook(kind: type[BaseException], *error: Any) -> None:
        report(kind, *error)
        hard_exit(EXIT_INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)

    return excepthook


def is_primary() -> bool:
    """True in the one process that writes files and prints."""
    return jax.process_index() == 0


def print_primary(message: object) -> None:
    """Prints a line for the user, in the primary process only."""
    if is_primary():
        with files.naming(STANDARD_OUTPUT):
            print(files.shown(message), flush=True)


def barrier(name: str) -> None:
    """Waits until all processes have reached the barrier; what they wrote to a run is then visible."""
    if jax.process_count() > 1:
        if mirror := files.mirror_module():
            mirror.before_barrier()
        multihost_utils.sync_global_devices(name)
        if mirror:
            mirror.after_barrier()


def gather_json(obj: Any) -> list[Any]:
    """Returns every process's `obj`, in process order, in every process.

    A collective: all processes must call it, from the main thread. Even with a single process the
    object is converted to JSON and back, so that the result does not depend on the number of processes.

    Args:
      obj: anything that `json.dumps` accepts; content and size may differ between processes.
    """
    data = np.frombuffer(json.dumps(obj).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size)).reshape(-1)
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


class Announcements:
    """What any of the processes has announced on a topic, visible to all of them at once.

    Neither method is a collective. Looking costs a message to the coordinator (a quarter of a millisecond).
    """

    def __init__(self, topic: str) -> None:
        self._folder = f"maxlp/{topic}/"
        self._own: list[Any] = []

    def add(self, obj: Any) -> None:
        """Announces anything that `json.dumps` accepts."""
        self._own.append(obj)
        if jax.process_count() > 1:
            key = f"{self._folder}{jax.process_index()}"
            global_state.client.key_value_set(key, json.dumps(self._own), allow_overwrite=True)

    def all(self) -> list[Any]:
        """The announcements of all processes, in no particular order."""
        if jax.process_count() == 1:
            return self._own
        found = global_state.client.key_value_dir_get(self._folder)
        return [obj for _, own in found for obj in json.loads(own)]
