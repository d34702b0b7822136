"""Several processes as one program: start-up from the environment, small exchanges, preemption.

Environment, read once by `initialize`:

===========================  =================================================================
MAXLP_COORDINATOR            ``host:port`` of process 0; with the next two, any launcher will do
MAXLP_NUM_PROCESSES          how many processes there are
MAXLP_PROCESS_ID             which one this is, from 0
MAXLP_DISTRIBUTED            ``1``: let JAX detect the cluster; ``0``: single process, whatever else is set
MAXLP_INIT_TIMEOUT           seconds to wait for all processes to arrive (default 300)
MAXLP_HEARTBEAT_TIMEOUT      seconds of silence after which a process counts as dead (default 100)
===========================  =================================================================

With none of the first four set, a Slurm step of several tasks, a TPU host and an indexed Kubernetes
job (JobSet) are recognised, and JAX's own detection finds the addresses.
``JAX_LOCAL_DEVICE_IDS=0`` restricts a process to some of the GPUs of its host.

When one process dies, JAX ends all of them after the heartbeat timeout: there is no recovery inside
the job, its supervisor starts it again and it resumes from the last checkpoint. `launch/` has supervisors
that do not wait for the timeout.
"""

import importlib.util
import json
import os
import re
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

EXIT_PREEMPTED = 75
"""Exit code after a checkpoint was saved because of SIGTERM (EX_TEMPFAIL: start me again)."""

EXIT_INTERRUPTED = 130
"""Exit code after a checkpoint was saved because of Ctrl-C (the shell's 128 + SIGINT)."""

_EXPLICIT = ("MAXLP_COORDINATOR", "MAXLP_NUM_PROCESSES", "MAXLP_PROCESS_ID")


def initialize() -> None:
    """Joins this process to the others that the environment speaks of; does nothing when it is alone.

    Call it before anything that touches a device. See the table at the top of the file.

    Raises:
        ValueError: the environment contradicts itself, or names a cluster that JAX cannot find.
    """
    _give_simulated_devices_threads()
    timeouts: dict[str, Any] = {
        "initialization_timeout": _env_int("MAXLP_INIT_TIMEOUT", 300, least=1),
        "heartbeat_timeout_seconds": _env_int("MAXLP_HEARTBEAT_TIMEOUT", 100, least=1),
    }
    mode = os.environ.get("MAXLP_DISTRIBUTED", "")
    if mode not in ("", "0", "1"):
        raise ValueError(f"MAXLP_DISTRIBUTED={mode!r}: write 1 (detect a cluster) or 0 (single process)")
    if mode == "0":
        return
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
    if jax.distributed.is_initialized():
        sys.excepthook = _leave_after(sys.excepthook)
        logging.info("process %d of %d", jax.process_index(), jax.process_count())


def _give_simulated_devices_threads() -> None:
    """Eight threads for each simulated device, unless NPROC is set.

    XLA's CPU client has one for each. A device whose program has independent branches (CLIP's towers) waits
    in a collective of each at once; when the waiting ones hold every thread, the program hangs.
    """
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = int(flag[1]) if flag else jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if devices > 1:
        os.environ.setdefault("NPROC", str(8 * devices))


def _initialize_explicit(timeouts: dict[str, Any]) -> None:
    missing = [name for name in _EXPLICIT if not os.environ.get(name)]
    if missing:
        raise ValueError(f"{', '.join(missing)} not set: {', '.join(_EXPLICIT)} go together, all or none")
    coordinator = os.environ["MAXLP_COORDINATOR"]
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"MAXLP_COORDINATOR={coordinator!r} is not host:port, for example 10.0.0.1:8476")
    num_processes = _env_int("MAXLP_NUM_PROCESSES", least=1)
    process_id = _env_int("MAXLP_PROCESS_ID", least=0)
    if process_id >= num_processes:
        raise ValueError(
            f"MAXLP_PROCESS_ID={process_id} is out of range: MAXLP_NUM_PROCESSES={num_processes} "
            f"allows 0 to {num_processes - 1}"
        )
    if num_processes > 1:
        jax.distributed.initialize(
            coordinator, num_processes, process_id, cluster_detection_method="deactivate", **timeouts
        )


def _detect_cluster() -> str | None:
    """What in the environment tells of other processes; None when this one is alone."""
    env = os.environ
    # SLURM_STEP_* are set by srun only: an interactive shell inside an allocation is alone.
    if "SLURM_STEP_NODELIST" in env and _env_int("SLURM_STEP_NUM_TASKS", 1, least=1) > 1:
        return "SLURM_STEP_NUM_TASKS is above 1"
    # `import jax` puts "tpu" here when it sees TPU chips and the TPU library.
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


def leave(code: int) -> NoReturn:
    """Ends this process now, for a failure.

    `sys.exit` waits for a compilation in the background; and of one process among several it takes minutes:
    at exit JAX waits for all processes, while they wait for this one in a collective, alive and silent.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_after(report: Any) -> Any:
    def excepthook(kind: type[BaseException], *error: Any) -> None:
        report(kind, *error)
        leave(EXIT_INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)

    return excepthook


def _env_int(name: str, default: int | None = None, *, least: int) -> int:
    text = os.environ.get(name, default)
    try:
        value = int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = least - 1
    if value < least:
        raise ValueError(f"{name}={text!r} is not a whole number of at least {least}")
    return value


def is_primary() -> bool:
    """True in the one process that writes files and prints."""
    return jax.process_index() == 0


def say(message: object) -> None:
    """Prints a line for the user, once for all processes."""
    if is_primary():
        print(message, flush=True)


def barrier(name: str) -> None:
    """Waits until every process has come to the barrier of this name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def gather_json(obj: Any) -> list[Any]:
    """Every process's `obj`, in process order, on every process.

    A collective: all processes must call it, from the main thread. Each object takes the way through
    JSON, alone or not, so that a result never depends on the number of processes.

    Args:
        obj: anything that `json.dumps` takes; it may differ in content and size between processes.
    """
    data = np.frombuffer(json.dumps(obj).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size)).reshape(-1)
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


class PreemptionGuard:
    """Turns SIGTERM and Ctrl-C into a question that the training loop asks once a step.

    ::

        with PreemptionGuard() as guard:
            for step in range(start, total_steps):
                ...
                if guard.should_stop(step):
                    save; wait; sys.exit(guard.exit_code)

    The first signal only sets a flag, so the step in work ends and is saved; a second Ctrl-C kills.
    Of several processes, a signal to any one of them stops all after the same step
    (`multihost_utils.reached_preemption_sync_point`; there the JAX runtime holds SIGTERM itself).
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "PreemptionGuard":
        signals = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
        self._previous = {number: signal.signal(number, self._receive) for number in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self._received = signal.Signals(number)
        logging.warning("%s: saving a checkpoint after this step, then exiting", self._received.name)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if jax.process_count() > 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def should_stop(self, step: int) -> bool:
        """Whether to save after `step` and leave; every process asks once a step, with the same number."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """What to leave with after `should_stop`: `EXIT_PREEMPTED`, or `EXIT_INTERRUPTED` on Ctrl-C."""
        return EXIT_INTERRUPTED if self._received == signal.SIGINT else EXIT_PREEMPTED
