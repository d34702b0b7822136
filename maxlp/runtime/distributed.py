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

import contextlib
import importlib.util
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import logging
from jax._src.distributed import global_state  # its store of keys and values has no public name
from jax.experimental import multihost_utils

from maxlp.runtime import cpu, files
from maxlp.runtime.exits import EXIT_FAILED, EXIT_INTERRUPTED, hard_exit

_EXPLICIT = ("MAXLP_COORDINATOR", "MAXLP_NUM_PROCESSES", "MAXLP_PROCESS_ID")


def initialize() -> None:
    """Joins this process to the others described by the environment; does nothing if it is alone.

    Call it before anything that touches a device. See the table at the top of the file.

    Raises:
      ValueError: the environment is contradictory, or names a cluster that JAX cannot find.
    """
    _join()
    alone = not jax.distributed.is_initialized()
    cpu.configure_client(alone)
    if not alone:
        sys.excepthook = _exit_after(sys.excepthook)
        logging.info("process %d of %d", jax.process_index(), jax.process_count())


def _join() -> None:
    timeout = _env_int("MAXLP_INIT_TIMEOUT", 300, minimum=1)
    timeouts: dict[str, Any] = {
        "initialization_timeout": timeout + 60,  # at its end JAX aborts, so `_ended_after` comes first
        "heartbeat_timeout_seconds": _env_int("MAXLP_HEARTBEAT_TIMEOUT", 100, minimum=1),
    }
    mode = os.environ.get("MAXLP_DISTRIBUTED", "")
    if mode not in ("", "0", "1"):
        raise ValueError(f"MAXLP_DISTRIBUTED={mode!r}: set 1 (detect a cluster) or 0 (single process)")
    if mode == "0":
        return
    jax.config.update("jax_enable_preemption_service", False)  # until `peers.begin_training`
    with _ended_after(timeout):
        if any(name in os.environ for name in _EXPLICIT):
            _initialize_explicit(timeouts)
        elif cluster := "MAXLP_DISTRIBUTED=1" if mode == "1" else _detect_cluster():
            try:
                jax.distributed.initialize(**timeouts)
            except ValueError as error:
                raise ValueError(
                    f"{cluster}, but JAX finds no other processes ({error}); set {', '.join(_EXPLICIT)}, "
                    "or MAXLP_DISTRIBUTED=0 for a single process"
                ) from error


@contextlib.contextmanager
def _ended_after(timeout: int) -> Iterator[None]:
    """Ends this process with one line if the processes do not find each other in time."""

    def end() -> None:
        coordinator = os.environ.get("MAXLP_COORDINATOR", "the coordinator that JAX detected")
        first = os.environ.get("MAXLP_PROCESS_ID") == "0"
        reason = "not all processes joined" if first or _answers(coordinator) else "nobody answers"
        print(
            f"error: {coordinator}: {reason} within MAXLP_INIT_TIMEOUT={timeout} s; start all "
            f"{os.environ.get('MAXLP_NUM_PROCESSES', '')} processes at about the same time, and check the "
            "address and that its port is open to all of them",
            file=sys.stderr,
        )
        hard_exit(EXIT_FAILED)

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1):
            return True
    except (OSError, ValueError):
        return False


def _initialize_explicit(timeouts: dict[str, Any]) -> None:
    missing = [name for name in _EXPLICIT if not os.environ.get(name)]
    if missing:
        raise ValueError(f"{', '.join(missing)} not set: set all of {', '.join(_EXPLICIT)} or none")
    coordinator = os.environ["MAXLP_COORDINATOR"]
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"MAXLP_COORDINATOR={coordinator!r} is not host:port, for example 10.0.0.1:8476")
    num_processes = _env_int("MAXLP_NUM_PROCESSES", minimum=1)
    process_id = _env_int("MAXLP_PROCESS_ID", minimum=0)
    if process_id >= num_processes:
        raise ValueError(
            f"MAXLP_PROCESS_ID={process_id} is out of range: MAXLP_NUM_PROCESSES={num_processes} "
            f"allows 0 to {num_processes - 1}"
        )
    if num_processes > 1:
        if process_id == 0:
            _check_port(int(port))
        jax.distributed.initialize(
            coordinator, num_processes, process_id, cluster_detection_method="deactivate", **timeouts
        )


def _check_port(port: int) -> None:
    """Raises OSError if process 0 cannot listen on the port: JAX's service would crash."""
    try:
        with socket.create_server(("", port)):
            pass
    except OSError as error:
        name = f"MAXLP_COORDINATOR={os.environ['MAXLP_COORDINATOR']}"
        raise OSError(error.errno, os.strerror(error.errno or 0), name) from error


def _detect_cluster() -> str | None:
    """What in the environment indicates other processes; None if nothing does."""
    env = os.environ
    # Only srun sets SLURM_STEP_*: an interactive shell inside an allocation is a single process.
    if "SLURM_STEP_NODELIST" in env and _env_int("SLURM_STEP_NUM_TASKS", 1, minimum=1) > 1:
        return "SLURM_STEP_NUM_TASKS is above 1"
    # `import jax` puts "tpu" here when it finds TPU chips and the TPU library.
    if "tpu" in (jax.config.jax_platforms or ""):  # type: ignore[attr-defined]
        return "this is a TPU host"
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        if importlib.util.find_spec("kubernetes") is None:
            raise ValueError(
                "JOB_COMPLETION_INDEX is set (an indexed Kubernetes job), but finding the other pods needs "
                f"`pip install 'jax[k8s]'`; or set {', '.join(_EXPLICIT)}, or MAXLP_DISTRIBUTED=0 for a "
                "single process"
            )
        return "JOB_COMPLETION_INDEX is set"
    return None


def _env_int(name: str, default: int | None = None, *, minimum: int) -> int:
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
