"""The lock of a workdir: one run at a time writes to it.

The file ``lock`` in the workdir names its holder (host, process, boot of the machine, start) and holds a
count that the holder raises every `BEAT_SECONDS`. It stays behind when the holder is killed. Whether the
holder still lives is decided without comparing clocks:

- On the holder's machine, recognized by its boot id, by the kernel: it releases a file lock (flock) when
  the process ends, however it ends.
- Elsewhere by the count: if it stands still for `WATCH_SECONDS`, the holder is gone. Between machines flock
  may do nothing, or outlive a machine that was lost.

A holder that was suspended for so long that another process took the lock ends itself at its next beat.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from maxlp.runtime import distributed
from maxlp.runtime.exits import hard_exit
from maxlp.runtime.files import mirrored, naming, remove_temporaries, shown

NAME = "lock"
BEAT_SECONDS = 5.0
WATCH_SECONDS = 30.0  # several beats: the holder's threads, or the file system, may be slow
SETTLE_SECONDS = 1.0  # longer than it takes for a write to be seen by processes that start at the same time

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


def open_lock(workdir: Path) -> "WorkdirLock":
    """The lock of a workdir on disk or in a bucket, not yet taken."""
    mirror = mirrored(workdir)
    return mirror.lock(workdir) if mirror else WorkdirLock(workdir)


class WorkdirLock:
    """Holds a workdir from `acquire` to the end of the ``with`` block.

    Args:
      workdir: created by `acquire` if missing.
    """

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir
        self._path = workdir / NAME
        self._descriptor: int | None = None
        self._held = False
        self._released = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="workdir lock", daemon=True)
        self._created: list[Path] = []  # folders; removed at the end if they are empty
        self._record = {
            "host": platform.node(),
            "pid": os.getpid(),
            "boot": boot_id(),
            "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "token": secrets.token_hex(8),
        }

    def __enter__(self) -> "WorkdirLock":
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is None:
            return
        self._released.set()
        self._beats.join()  # a beat that has begun would write to the closed file
        if _is_at(self._descriptor, self._path) and self._is_mine():
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor, self._held = None, False
        with contextlib.suppress(OSError):  # not empty
            for folder in self._created:
                folder.rmdir()

    def acquire(self) -> None:
        """Takes the lock, in the primary process; does nothing if it is held already. A collective.

        Raises:
          ValueError: another process holds it, or not all processes of the run see this workdir.
        """
        failure: Exception | None = None
        if distributed.is_primary() and not self._held:
            try:
                with naming(self._path):
                    self._take()
            except (OSError, ValueError) as error:
                failure = error
        if jax.process_count() > 1:
            answer = [str(failure) if failure else None, self._record["token"]]
            message, token = distributed.gather_json(answer)[0]
            failure = failure or (ValueError(message) if message else None)
        if failure:
            raise failure
        if jax.process_count() > 1:
            from maxlp.runtime import shared_workdir  # a single process needs none

            shared_workdir.check(self.workdir, self._content, token)

    def _take(self) -> None:
        self._created = [folder for folder in (self.workdir, *self.workdir.parents) if not folder.exists()]
        self.workdir.mkdir(parents=True, exist_ok=True)
        descriptor, locked = _open(self._path)
        try:
            holder = parse_holder(_read(descriptor))
            if locked is not None and (not holder or holder["boot"] == self._record["boot"]):
                lives = not locked
            else:
                lives = changes(self._path, self._content, holder)
            if lives:
                raise ValueError(in_use_message(self.workdir, parse_holder(_read(descriptor)) or holder))
            self._descriptor = descriptor
            self._write(0)
            if not locked:
                time.sleep(SETTLE_SECONDS)
                if not self._is_mine():
                    raise ValueError(in_use_message(self.workdir, parse_holder(_read(descriptor))))
            self._beats.start()
        except BaseException:
            self._descriptor = None
            os.close(descriptor)
            raise
        self._held = True
        os.register_at_fork(after_in_child=self._close_in_child)
        for directory in (self.workdir, self.workdir / "spikes"):
            remove_temporaries(directory)

    def _close_in_child(self) -> None:
        """In a forked child, which would otherwise hold the lock when its parent is gone."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, count: int) -> None:
        """Writes in place: the kernel's lock belongs to this file, so that no other may replace it."""
        assert self._descriptor is not None
        content = json.dumps(self._record | {"count": count}).encode()
        os.pwrite(self._descriptor, content, 0)
        os.ftruncate(self._descriptor, len(content))
        os.fsync(self._descriptor)

    def _content(self) -> bytes:
        """The file, opened anew: network file systems then fetch the content."""
        return self._path.read_bytes()

    def _is_mine(self) -> bool:
        """False if the file names another holder. A file that is gone or half written names none."""
        try:
            holder = parse_holder(self._content())
        except OSError:
            return True
        return not holder or holder["token"] == self._record["token"]

    def end_if_lost(self) -> None:
        """Ends this process if another one holds the workdir now."""
        if not self._released.is_set() and not self._is_mine():
            print(f"error: another process has taken over {shown(self.workdir)}", file=sys.stderr)
            hard_exit(2)

    def _beat(self) -> None:
        count = 0
        while not self._released.wait(BEAT_SECONDS):
            self.end_if_lost()
            count += 1
            try:
                self._write(count)
            except OSError:  # a full disk ends the run where it loses something, not here
                continue


def boot_id() -> str:
    """An id of this boot of this machine; the machine's name where the kernel has no such id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return platform.node()


def _open(path: Path) -> tuple[int, bool | None]:
    """Opens the file and tries to lock it.

    Returns:
      Its descriptor, and whether the kernel granted the lock; None where the file system has no locks.

    Raises:
      ValueError: the file is one of another user, to which this user may not write.
    """
    while True:
        try:
            # Less the umask, as all files of a run.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:
            if not path.exists():
                raise
            raise ValueError(
                f"{path} is the lock of another user's run; if no run uses this workdir, delete the file"
            ) from None
        locked: bool | None = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, *_UNSUPPORTED):
                raise
            locked = None if error.errno in _UNSUPPORTED else False
        if _is_at(descriptor, path):
            return descriptor, locked
        os.close(descriptor)  # its holder deleted it at this moment


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, 4096, 0)


def parse_holder(content: bytes) -> dict[str, Any] | None:
    """What a holder wrote; None if there is none, or it has not finished writing."""
    try:
        record = json.loads(content)
    except ValueError:
        return None
    complete = isinstance(record, dict) and record.keys() >= {"host", "pid", "boot", "since", "token"}
    return record if complete else None


def changes(name: object, read: Callable[[], bytes], holder: dict[str, Any] | None) -> bool:
    """Whether a lock (``read`` returns its content) changes, as it does while its holder lives."""
    before = read()
    if not before:
        return False
    process = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
    print(f"{name} names {process}: watching for {WATCH_SECONDS:.0f} s whether it still runs", flush=True)
    deadline = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(0.5, WATCH_SECONDS / 10))
        try:
            if read() != before:
                return True
        except FileNotFoundError:
            return False
    return False


def in_use_message(workdir: Path, holder: dict[str, Any] | None) -> str:
    if not holder:
        return f"{workdir} is in use by another process that has just started; choose another --workdir"
    name = f"process {holder['pid']} on {holder['host']}"
    return (
        f"{workdir} is in use: {name} has been running there since {holder['since']}; wait until it ends, "
        f"stop it (kill {holder['pid']} there), or choose another --workdir"
    )
