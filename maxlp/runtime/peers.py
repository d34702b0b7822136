"""Ends all processes together when one of them gets SIGTERM before training has begun.

JAX has a service for preemption, but it only agrees on a step after which all processes stop. The first
one may be minutes away. So it is started with the training loop; until then the process that gets the
signal tells the others through the key-value store of JAX's coordination service.
"""

import _thread
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax._src.distributed import global_state  # the store has no public name

from maxlp.runtime import distributed
from maxlp.runtime.preemption import exit_preempted

_KEY = "maxlp/sigterm"
_POLL_SECONDS = 0.5
_PEER_TIMEOUT = 5000  # milliseconds that a process waits until the others know

_received = threading.Event()  # the signal, in this process
_ends = threading.Event()  # some process has received it
_trains = threading.Event()


def tell() -> None:
    """Ends all processes, because this one got SIGTERM."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one got it, too
        global_state.client.key_value_set(_KEY, f"SIGTERM in process {jax.process_index()}")


def receive() -> None:
    """Python's handler of SIGTERM, in the main thread.

    Keeps it from failing in a collective while the processes end one after the other.
    """
    _received.set()
    if _ends.is_set():
        threading.Event().wait()


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Ends this process when another one has called `tell`, until `begin_training`."""
    thread = threading.Thread(target=_watch, args=(global_state.client,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        _trains.set()
        thread.join()  # at the end of the interpreter a thread inside of JAX would abort it


def _watch(client: Any) -> None:
    while not _trains.wait(_POLL_SECONDS):
        try:
            reason = client.key_value_try_get(_KEY)
        except jax.errors.JaxRuntimeError:  # there is no such key
            continue
        _ends.set()
        _thread.interrupt_main(signal.SIGTERM)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # not all are left
            client.wait_at_barrier(_KEY, _PEER_TIMEOUT)
        if distributed.is_primary():  # last: JAX aborts processes that lose the first one
            time.sleep(0.5)
        exit_preempted(reason)


def begin_training() -> None:
    """Lets JAX catch SIGTERM, for `multihost_utils.reached_preemption_sync_point`. A collective."""
    distributed.barrier("all processes can save")
    if global_state.preemption_sync_manager is None:
        jax.config.update("jax_enable_preemption_service", True)
        global_state.initialize_preemption_sync_manager()
    if any(distributed.gather_json(_received.is_set())) and not _trains.is_set():
        threading.Event().wait()  # `_watch` ends this process
    _trains.set()
