"""Checkpoints: complete and verified, or absent.

Orbax writes and reads the arrays, asynchronously and on any mesh. It stores no checksum of their bytes
and does not fall back to an older step when the newest is damaged; this file adds both. On disk::

    DIR/300/                 step 300; the directory gets this name once everything in it is on disk
        state/ ...           the arrays (Orbax)
        checkpoint.json      step, shape and dtype of every array, state of the data, meta
        manifest.txt         checksums of all files above, see `manifest`
    DIR/300.unfinished/      being written; left behind by a kill, removed at the next launch
    DIR/300.damaged/         did not match its manifest when a run resumed; kept for inspection
    DIR/300.removed/         being deleted because newer checkpoints are complete

DIR is on a file system that all processes share and that renames atomically (local disk, NFS, Lustre,
a mounted bucket), or in a bucket, see `bucket` for the differences. All processes share the work of
computing checksums, when saving and when restoring.
"""

import functools
import json
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import logging

from maxlp import schema
from maxlp.runtime import distributed, files, manifest, tree_spec, verification
from maxlp.runtime.tree_spec import Names
from maxlp.schema import Count

_RECORD = "checkpoint.json"
_READ_AT_ONCE = 2**30  # bytes of arrays on their way from the files to the devices
_MAX_REASON = 300  # characters
_AGAIN = "the same command resumes from the last complete one, or starts anew where there is none"
_PEER_TIMEOUT = 3600.0  # seconds the primary process waits for the checksums of another one
_ORBAX_TIMEOUT = 10**9  # seconds; Orbax measures them with a clock that may be set, and aborts
_CLOCK_GRACE = 30.0  # seconds after which a save that the clock disturbed is given up


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message is one line that names it."""


class NotWrittenError(CheckpointError):
    """The file system failed, not the user: restarting the run may help."""


class ClockSetBackError(NotWrittenError):
    """The system's clock was set back while a checkpoint was being written, so that TensorStore hangs.

    Until the clock has caught up, it reads the same files again and again, because what it has read seems
    to be older than its request. Before that, only another process can write checkpoints.
    """


class Restored(NamedTuple):
    """Result of `Checkpointer.restore_latest` and `restore`."""

    step: int
    state: Any
    data_state: dict[str, Any]
    meta: dict[str, Any]


class StepInfo(NamedTuple):
    """One directory found by `list_steps`.

    `status` is "complete", "damaged" (no valid manifest) or the suffix of the directory's name;
    `num_bytes` is the total size according to the manifest; `saved_at` is in seconds since 1970.
    """

    step: int
    path: Path
    status: str
    num_bytes: int
    saved_at: float


class Checkpointer:
    """Saves in the background, keeps the newest checkpoints, restores the newest intact one.

    Every process of a run creates one and calls the same methods in the same order, from the main
    thread. It removes what a killed run left unfinished in its directory, so a program that only reads
    calls `restore` instead.

    Args:
      directory: contains the numbered step directories; created if missing.
      every_steps: `should_save` is true at multiples of this.
      keep_last: how many of the newest complete checkpoints to keep, at least 1. With 1 there is nothing
        to fall back to if that checkpoint is damaged later.
      keep_every: checkpoints at multiples of this are never deleted; None deletes all old ones.
      on_complete: called with the step of a checkpoint that has just become complete, in the primary
        process, from a background thread.

    Raises:
      ValueError: an argument is out of range, or `directory` cannot be used (see `check_path`).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: Count,
        keep_last: Count = 2,
        keep_every: Count | None = None,
        on_complete: Callable[[int], None] | None = None,
    ) -> None:
        counts = {"every_steps": every_steps, "keep_last": keep_last, "keep_every": keep_every}
        schema.check_arguments(Checkpointer, **counts)
        self.directory = files.local_path(directory, "directory")
        check_path(self.directory, "directory")
        self._every_steps = every_steps
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._on_complete = on_complete
        _silence_orbax()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._newest: int | None = None
        self._clocks = (0.0, 0.0)  # system and monotonic, when the last save began
        self._longest = 0.0  # seconds that a save has taken
        self._bucket = files.bucket(self.directory)
        if distributed.is_primary():
            self.directory.mkdir(parents=True, exist_ok=True)
            if self._bucket:
                self._bucket.sweep(self.directory)
            for leftover in [*self.directory.glob("*.unfinished*"), *self.directory.glob("*.removed")]:
                logging.warning("removing %s, which was not finished", leftover)
                files.remove(leftover)

    def should_save(self, step: int) -> bool:
        """True at the positive multiples of `every_steps`. Every process calls it after every step.

        Raises:
          NotWrittenError: the save in flight has failed.
        """
        if self._pending is not None and (self._pending.done() or self._set_back() > 1):
            self._join()
        return step > 0 and step % self._every_steps == 0

    def save(
        self, step: int, state: Any, data_state: Mapping[str, Any], meta: Mapping[str, Any] | None = None
    ) -> None:
        """Starts a checkpoint and returns as soon as `state` may be changed or donated.

        Saving the step that was just saved or restored does nothing. Only one save is in flight at a
        time: the next one first waits for it, and raises its error if it failed.

        Args:
          step: number of finished steps.
          state: a pytree of non-empty `jax.Array`s, typed PRNG keys included.
          data_state: JSON-serializable position of the data, merged over processes; the primary's is
            saved.
          meta: JSON-serializable facts about the run (config, versions); the primary's is saved.

        Raises:
          CheckpointError: the previous save failed, `state` contains other leaves than non-empty arrays,
            or the directory already holds another checkpoint of this step.
        """
        from orbax.checkpoint import v1 as ocp  # imported late because it adds half a second

        self._join()
        if step == self._newest:
            return
        if (final := self._path(step)).exists():
            raise CheckpointError(f"{final} already exists: resume from it or use another directory")
        for path, leaf in tree_spec.leaves(state):
            if not isinstance(leaf, jax.Array) or not leaf.size:
                found = tree_spec.describe_leaf(leaf)
                raise CheckpointError(f"cannot save {path}: {found} is not a non-empty jax.Array")
        arrays = tree_spec.describe(state)
        record = {"step": step, "meta": dict(meta or {}), "data_state": dict(data_state), "arrays": arrays}
        context = ocp.Context()
        context.array.saving.use_compression = False  # gains 8 % on float32 weights, takes twice the time
        context.asynchronous.timeout_secs = _ORBAX_TIMEOUT
        target = str(self._path(step, ".unfinished"))
        if self._bucket:
            target = self._bucket.location(final)
            context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
        self._newest, self._clocks = step, (time.time(), time.monotonic())
        try:
            with context:
                arrays_written = ocp.save_checkpointables_async(target, {"state": state})
        except Exception as error:
            raise self._not_written(error) from error
        self._pending = self._thread.submit(
            self._finish, step, arrays_written, json.dumps(record, indent=1)
        )

    def restore_latest(self, abstract_state: Any, required: Names = None) -> Restored | None:
        """Restores the newest checkpoint whose files all match their checksums.

        Newer, damaged ones are logged, one line per fault, and renamed to ``<step>.damaged``, so that
        the run can save these steps again.

        Args:
          abstract_state: the state as `jax.ShapeDtypeStruct`s with the shardings of the restored arrays;
            mesh and number of processes may differ from those that saved.
          required: top-level entries that must be in both, None for all; of others, what only the
            checkpoint has is not read.

        Returns:
          The checkpoint, or None if the directory never held one.

        Raises:
          CheckpointError: there are checkpoints but none is intact, or the newest intact one does not
            match `abstract_state`.
        """
        self.wait()
        step, damaged = verification.newest_intact(self.directory)
        if step is None:
            found = verification.list_damaged(self.directory, damaged)
            if not found:
                return None
            raise CheckpointError(
                f"no intact checkpoint in {self.directory}: {found}; put back a good copy, or delete "
                "these to start from the beginning"
            )
        restored = _load(self._path(step), abstract_state, exact=True, required=required)
        if distributed.is_primary():
            for bad in damaged:
                target = files.unused_path(self._path(bad, ".damaged"))
                files.move(self._path(bad), target)
                logging.error("kept the damaged checkpoint as %s", target)
        self._newest = step
        return restored._replace(state=jax.tree.map(_donatable, restored.state))

    def wait(self) -> None:
        """Returns when all saves are complete; raises CheckpointError if one failed."""
        self._join()
        distributed.barrier("checkpoint wait")

    def close(self) -> None:
        """Waits, then stops the background thread."""
        self.wait()
        self._thread.shutdown()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            self.close()
        elif self._pending is not None:
            # No barrier: the other processes may never reach it. The save in flight is still completed.
            try:
                self._join()
            except NotWrittenError as error:
                logging.error("%s", error)

    def _path(self, step: int, suffix: str = "") -> Path:
        return self.directory / f"{step}{suffix}"

    def _join(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        while not wait_for([pending], timeout=1).done:
            self._check_clock()
        if error := pending.exception():
            raise self._not_written(error) from error
        self._longest = max(self._longest, time.monotonic() - self._clocks[1])

    def _not_written(self, error: BaseException) -> NotWrittenError:
        path, self._newest = f"{self.directory}/{self._newest}", None
        # TensorStore adds the location in its source code, and Orbax a page about itself.
        reason = " ".join(str(error).partition("[source locations=")[0].split())[:_MAX_REASON]
        return NotWrittenError(
            f"checkpoint {path} was not written: {type(error).__name__}: {reason}; {_AGAIN}"
        )

    def _set_back(self) -> float:
        """By how many seconds the clock was set back since the last save began."""
        wall, monotonic = self._clocks
        return (time.monotonic() - monotonic) - (time.time() - wall)

    def _check_clock(self) -> None:
        elapsed, set_back = time.monotonic() - self._clocks[1], self._set_back()
        if set_back > 1 and elapsed > _CLOCK_GRACE + 2 * self._longest:
            raise ClockSetBackError(
                f"checkpoint {self.directory}/{self._newest} was not written, because the clock was "
                f"set back by {set_back:,.0f} s meanwhile; {_AGAIN}"
            )

    def _finish(self, step: int, arrays_written: Any, record: str) -> None:
        """Background thread: waits for the arrays, and completes the checkpoint."""
        arrays_written.result()
        if not self._bucket:
            self._publish(step, record)
        elif distributed.is_primary():
            self._bucket.commit(self._path(step), _RECORD, record)
        if not distributed.is_primary():
            return
        if self._on_complete:
            self._on_complete(step)
        self._delete_old()

    def _publish(self, step: int, record: str) -> None:
        """Adds record and manifest, sets the final name."""
        root = self._path(step, ".unfinished")
        sums = manifest.shared_checksums(root, jax.process_index(), jax.process_count(), _PEER_TIMEOUT)
        if not distributed.is_primary():
            return
        files.write_text(root / _RECORD, record)
        # Usually the record alone; also any file that a stale directory listing hid from its process.
        sums |= manifest.checksums(root, [name for name in manifest.file_sizes(root) if name not in sums])
        manifest.write(root, sums)
        files.publish(root, self._path(step))

    def _delete_old(self) -> None:
        """Deletes the complete checkpoints that neither `keep_last` nor `keep_every` keeps."""
        for step in verification.list_numbered(self.directory)[: -self._keep_last]:
            if self._keep_every and step % self._keep_every == 0:
                continue
            if self._bucket:
                self._bucket.delete(self._path(step))
            else:
                self._path(step).rename(self._path(step, ".removed"))
                files.remove(self._path(step, ".removed"))


def check_path(path: Path, name: str) -> None:
    """Raises a ValueError for a folder whose checkpoints could be saved, but perhaps not read.

    Orbax searches for the files of a checkpoint with a pattern that begins with its path.
    """
    special = [character for character in files.shown(path) if character in "[]*?\\"]
    if special:
        raise ValueError(
            f"{name}={path} contains {special[0]}, and Orbax, which reads checkpoints, takes their path "
            "for a pattern; choose a path without [ ] * ? \\"
        )


@functools.cache
def _silence_orbax() -> None:
    """Drops what Orbax prints about a failed save besides the error that it raises."""
    logging.get_absl_logger().addFilter(_is_not_repeated)
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        # Orbax closes its event loop at the first error; writes that end later cannot report to it.
        if repr(unraisable.exc_value) != "RuntimeError('Event loop is closed')":
            report(unraisable)

    sys.unraisablehook = report_others


def _is_not_repeated(record: Any) -> bool:
    """Orbax logs each error that it raises as well, with a traceback from every thread that it passes."""
    return record.levelname != "ERROR" or "orbax" not in record.pathname


def restore(path: str | os.PathLike[str], abstract_state: Any) -> Restored:
    """Reads a checkpoint without changing anything on disk.

    Args:
      path: a step directory, a directory of steps (its newest intact one is read) or the working
        directory of a run, whose steps are in ``checkpoints``.
      abstract_state: `jax.ShapeDtypeStruct`s with shardings, for the whole state or some of its
        top-level entries, such as ``{"params": ..., "model_state": ...}``. Floating-point arrays are
        cast to the requested dtype.

    Raises:
      CheckpointError: there is no intact checkpoint, or its shapes differ from `abstract_state`.
    """
    return _load(_find(path), abstract_state, exact=False)


def check_fits(path: str | os.PathLike[str], abstract_state: Any) -> None:
    """Raises a CheckpointError as `restore` would, but reads neither arrays nor checksums."""
    fitting_record(_find(path, verify=False), abstract_state, exact=False)


def list_steps(directory: str | os.PathLike[str]) -> list[StepInfo]:
    """Lists a directory of checkpoints, oldest step first, from its manifests; reads no array."""
    infos = []
    for path in files.entries(files.local_path(directory)):
        number, *suffixes = path.name.replace("-", ".").split(".")
        if not number.isdigit():
            continue
        sums = manifest.read(path)
        try:
            found = path.stat()
        except FileNotFoundError:  # deleted meanwhile by the run, which may be in progress
            continue
        if not stat.S_ISDIR(found.st_mode):
            continue
        if suffixes:
            status = suffixes[0]
        else:
            status = "damaged" if sums is None else "complete"
        num_bytes = sum(size for _, size in (sums or {}).values())
        infos.append(StepInfo(int(number), path, status, num_bytes, found.st_mtime))
    return sorted(infos)


def _find(path: str | os.PathLike[str], verify: bool = True) -> Path:
    """Resolves `path` as in `restore` to a step directory, which is verified unless that takes too long."""
    root = files.local_path(path)
    if os.path.isdir(root / "checkpoints"):  # False, not an error, in a folder that may not be entered
        root /= "checkpoints"
    if root.name.isdigit() and root.is_dir() and not verification.list_numbered(root):
        faults = verification.verify(root) if verify else []
        if faults:
            raise CheckpointError(f"{root} is damaged: {faults[0]}; put back a good copy, or move it away")
        return root
    if not verify:
        complete = [info.path for info in list_steps(root) if info.status == "complete"]
        if complete:
            return complete[-1]
    step, damaged = verification.newest_intact(root)
    if step is None:
        bad = verification.list_damaged(root, damaged)
        found = f"{bad}; put back a good copy" if bad else "no step directory"
        others = verification.list_numbered(root.parent) if root.name.isdigit() else []
        if others:
            found = f"that step is not saved; saved: {', '.join(map(str, others))}"
        raise CheckpointError(f"no intact checkpoint in {root}: {found}")
    return root / str(step)


def fitting_record(
    root: Path, abstract_state: Any, *, exact: bool, required: Names = None
) -> dict[str, Any]:
    """The record of a step directory; a CheckpointError if its arrays differ, see `tree_spec`."""
    record = files.read_json(root / _RECORD)
    saved_arrays = record["arrays"]
    if mismatch := tree_spec.find_mismatch(saved_arrays, abstract_state, exact=exact, required=required):
        path, saved, wanted = mismatch
        raise CheckpointError(
            f"{root} does not fit this config: {path} is {saved} in the checkpoint and {wanted} in the "
            "config; use the config it was saved with or another directory"
        )
    return record


def _load(root: Path, abstract_state: Any, *, exact: bool, required: Names = None) -> Restored:
    """Loads a verified step directory; with `exact`, structure and dtypes must be those saved."""
    from orbax.checkpoint import v1 as ocp

    record = fitting_record(root, abstract_state, exact=exact, required=required)
    if required is not None:
        shared = tree_spec.entries(record["arrays"]).union(required)
        abstract_state = {part: tree for part, tree in abstract_state.items() if part in shared}
    context = ocp.Context()
    # The arrays have been compared. Orbax would also compare nodes without arrays, such as a field that is
    # None and that an earlier version did not have.
    context.pytree.loading.partial_load = True
    # By default all arrays are read at once, so that the host holds the whole state beside the devices'.
    largest = max(map(_num_bytes, record["arrays"].values()), default=0)
    context.memory.read_concurrent_bytes = max(_READ_AT_ONCE, largest) + 1  # at least what one array needs
    try:
        with context:
            path = bucket.location(root) if (bucket := files.bucket(root)) else str(root)
            state = ocp.load_checkpointables(path, {"state": abstract_state})["state"]
    except Exception as error:
        # Orbax reports every failure as a missing handler, with the reason as its cause.
        reason = error.__cause__ or error
        raise CheckpointError(f"Orbax cannot load {root}: {type(reason).__name__}: {reason}") from error
    return Restored(record["step"], state, record["data_state"], record["meta"])


def _num_bytes(described: str) -> int:
    """The size of an array that `tree_spec` describes; an upper bound for a dtype like ``key<fry>``."""
    dtype, _, _ = described.partition("[")
    itemsize = jax.numpy.dtype(dtype).itemsize if "<" not in dtype else 16
    return itemsize * math.prod(tree_spec.shape_of(described))


def _donatable(array: jax.Array) -> jax.Array:
    """The array; on CPUs a copy that can be donated, in place of the original, which is deleted.

    On CPUs a restored array can share the memory of the NumPy array that Orbax has read. Such memory cannot
    be donated: the program copies it, so that the first step would hold the state twice.
    """
    if next(iter(array.devices())).platform != "cpu":
        return array
    copy = jax.block_until_ready(jax.numpy.copy(array))
    array.delete()
    return copy
