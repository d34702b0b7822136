"""How a process ends: exit codes for launchers, and an end that waits for nothing."""

import os
import select
import sys
from typing import NoReturn

from maxlp.runtime.files import mirror_module

EXIT_FAILED = 1
"""Exit code when the system failed, as when a disk is full: the same command may succeed later."""

EXIT_PREEMPTED = 75
"""Exit code after SIGTERM, once everything is saved (EX_TEMPFAIL: restart the run)."""

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C (128 + SIGINT, as in shells)."""


def hard_exit(code: int) -> NoReturn:
    """Ends this process immediately after a failure, without exit handlers.

    `sys.exit` would wait for a compilation in the background. With several processes it would also take
    minutes: at exit JAX waits for all processes, and the others wait for this one in a collective.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if mirror := mirror_module():
        mirror.remove_all()
    os._exit(code)


def drop_unread_output() -> bool:
    """Whether nobody reads standard output any more, as after ``| head`` or in a closed terminal.

    What is left of it is dropped, and what standard error would get where nobody reads that.
    """
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)  # asks for no event: errors are always reported
    unread = [descriptor for descriptor, _ in poll.poll(0)]
    for descriptor in unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return sys.stdout.fileno() in unread
