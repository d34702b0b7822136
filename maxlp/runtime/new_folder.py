"""A folder that a command writes as a whole or not at all."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from maxlp.runtime import files


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Yields a folder to write to, whose content is moved to `folder` at the end of the block.

    If the block raises, nothing remains of what it wrote, nor of `folder` if it did not exist.

    Args:
      folder: empty or new.

    Raises:
      ValueError: it is not, or another process is writing it.
    """
    if mirror := files.mirrored(folder):
        with mirror.written(folder):
            yield folder
        return
    temporary = folder / ".unfinished"  # inside, because `folder` may be all that can be written to
    with contextlib.ExitStack() as undo:
        for missing in (each for each in reversed((folder, *folder.parents)) if not each.exists()):
            undo.callback(_remove_empty, missing)
        try:
            temporary.mkdir(parents=True)  # of several processes one succeeds
        except FileExistsError:
            raise ValueError(
                f"{folder} is being written by another process, or was by one that was killed; choose "
                f"another directory, or delete {temporary}"
            ) from None
        undo.callback(files.remove, temporary)
        if any(path != temporary for path in folder.iterdir()):
            raise ValueError(f"{folder} is not empty; choose a new directory")
        yield temporary
        for path in sorted(temporary.iterdir()):
            path.rename(folder / path.name)
        temporary.rmdir()
        undo.pop_all()


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
