"""The life of worker processes."""

import multiprocessing
import os
import threading


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
