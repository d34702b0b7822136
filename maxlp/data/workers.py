"""The life of worker processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any


def serve(connection: Connection) -> None:
    """Sends the elements of the dataset that it receives as (element, None), errors as (None, error)."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal or Slurm sends them to all processes;
        signal.signal(number, signal.SIG_IGN)  # the parent ends its step, for which it needs this one
    end_with_parent()
    elements = _received(connection)
    while True:
        element = error = None
        try:
            element = next(elements)
        except Exception as raised:
            error = raised
        connection.send((element, error))


def _received(connection: Connection) -> Iterator[Any]:
    yield from connection.recv()


def end_with_parent() -> None:
    """Makes this process, started by multiprocessing, exit as soon as its parent has ended, even by a kill.

    Otherwise a worker waits forever for a place in a queue that nobody empties.
    """
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
