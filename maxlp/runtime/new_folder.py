"""A folder that a command writes as a whole or not at all."""

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from maxlp.runtime import files

UNFINISHED = ".unfinished"  # in the folder; on disk the files are in it, in a bucket it is empty


def clean_up_on_sigterm() -> None:
    """From now on the first SIGTERM raises a `SystemExit`, so that blocks delete what is not finished.

    By default SIGTERM ends a process like a kill, and a dataset or a model stays in a temporary folder. The
    same holds for SIGHUP of a closed terminal, unless it is ignored, as under nohup.
    """
    signal.signal(signal.SIGTERM, _exit)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _exit)


def _exit(number: int, _: object) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    sys.exit(128 + number)  # as in shells


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Yields a folder to write to, whose content is moved to `folder` at the end of the block.

    If the block raises, nothing remains of what it wrote, nor of `folder` if it did not exist. What a kill
    leaves on disk is deleted by the next process that writes to `folder`; in a bucket that process raises
    an error, because it cannot know whether the other one was killed or still writes.

    Args:
      folder: empty or new.

    Raises:
      ValueError: it is not, or another process is writing it.
    """
    if mirror := files.mirrored(folder):
        with mirror.written(folder):
            yield folder
        return
    temporary = folder / UNFINISHED  # inside, because `folder` may be all that can be written to
    with created(folder), only_writer(folder) as locked:
        if locked:
            files.remove(temporary)  # of a process that was killed
        try:
            temporary.mkdir()  # of several processes one succeeds, also without locks
        except FileExistsError:
            raise ValueError(in_use_message(folder, temporary)) from None
        try:
            if any(path != temporary for path in folder.iterdir()):
                raise ValueError(f"{folder} is not empty; choose a new directory")
            yield temporary
            for path in sorted(temporary.iterdir()):
                path.rename(folder / path.name)
        finally:
            files.remove(temporary)


@contextlib.contextmanager
def created(folder: Path) -> Iterator[None]:
    """Creates a folder and its parents; if the block raises, deletes those of them that are empty again."""
    with contextlib.ExitStack() as undo:
        for path in reversed((folder, *folder.parents)):
            try:
                path.mkdir()
            except OSError:
                if not path.is_dir():
                    raise
            else:  # not if it was there, or another process has just created it and will write to it
                undo.callback(_remove_empty, path)
        yield
        undo.pop_all()


def in_use_message(folder: Path, left: Path) -> str:
    """What to do where a folder has a writer that may have been killed; ``left`` is what it left then."""
    return (
        f"{folder} is being written by another process, or was by one that was killed; choose another "
        f"directory, or delete {left}"
    )


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[bool]:
    """Locks a folder, so that a second writer is refused; a kill releases it, unlike a marker file.

    Yields:
      Whether it is locked; False on a file system that cannot lock folders.

    Raises:
      ValueError: another process has locked it.
    """
    descriptor, locked = os.open(folder, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--output={folder} is being written by another process; wait until it ends, or choose "
                "another folder"
            ) from None
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(descriptor)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
