"""What worker processes run: they serve the elements of a dataset, and end with their parent."""

import multiprocessing
import os
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any


def serve(connection: Connection) -> None:
    """Receives a dataset; sends each element as (element, None), an error as (None, (error, traceback))."""
    end_with_parent()
    elements = _received(connection)
    while True:
        try:
            answer = next(elements), None
        except Exception as error:
            answer = None, (error, traceback.format_exc())  # pickled, an error loses its traceback
        connection.send(answer)


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
