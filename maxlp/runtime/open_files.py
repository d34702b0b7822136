"""The limit of open files."""

import contextlib
import resource

OPEN_FILES = 2**16


def allow_open_files() -> None:
    """Lets this process open as many files as its hard limit allows, up to `OPEN_FILES`.

    Data of thousands of shards keeps as many files open, and the soft limit (`ulimit -n`) is often 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS allows fewer than its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
