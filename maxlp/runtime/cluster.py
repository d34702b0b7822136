"""Joins this process to the others of a run, at a given address or where JAX finds them."""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax

from maxlp.runtime.distributed import EXPLICIT, env_int
from maxlp.runtime.exits import EXIT_FAILED, hard_exit


def join(detected: str | None, timeout: int, heartbeat: int) -> None:
    """Returns when all processes have joined, and ends this one if that takes too long.

    Args:
      detected: what in the environment indicates a cluster that JAX can find; None if the variables
        `EXPLICIT` describe the processes.
      timeout: seconds to wait for all processes.
      heartbeat: seconds of silence after which a process counts as dead.

    Raises:
      ValueError: the variables are contradictory, or JAX finds no cluster.
      OSError: another program has the port of process 0.
    """
    jax.config.update("jax_enable_preemption_service", False)  # until `peers.begin_training`
    timeouts: dict[str, Any] = {
        "initialization_timeout": timeout + 60,  # at its end JAX aborts, so `_ended_after` comes first
        "heartbeat_timeout_seconds": heartbeat,
    }
    with _ended_after(timeout):
        if detected is None:
            return _initialize_explicit(timeouts)
        try:
            jax.distributed.initialize(**timeouts)
        except ValueError as error:
            raise ValueError(
                f"{detected}, but JAX finds no other processes ({error}); set {', '.join(EXPLICIT)}, or "
                "MAXLP_DISTRIBUTED=0 for a single process"
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
    missing = [name for name in EXPLICIT if not os.environ.get(name)]
    if missing:
        raise ValueError(f"{', '.join(missing)} not set: set all of {', '.join(EXPLICIT)} or none")
    coordinator = os.environ["MAXLP_COORDINATOR"]
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"MAXLP_COORDINATOR={coordinator!r} is not host:port, for example 10.0.0.1:8476")
    num_processes = env_int("MAXLP_NUM_PROCESSES", minimum=1)
    process_id = env_int("MAXLP_PROCESS_ID", minimum=0)
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
