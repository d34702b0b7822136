"""Checkpoints: whole, verified, or not there.

Orbax writes and reads the arrays, asynchronously and on any mesh. It keeps no checksum of their bytes
and does not go back to an older step when the newest is broken; this file adds both. On disk::

    DIR/300/                 step 300: gets this name when everything in it is on disk, not before
        state/ ...           the arrays (Orbax)
        checkpoint.json      step, shape and dtype of every array, state of the data, meta
        manifest.txt         CRC-32 and size of every file above; its last line is its own CRC-32
    DIR/300.unfinished/      being written; a kill leaves it, the next start removes it
    DIR/300.damaged/         differed from its manifest when a run wanted to resume; kept to be looked at
    DIR/300.removed/         being deleted because newer ones are complete

DIR is on a file system that all processes share and that renames atomically (local disk, NFS, Lustre,
a mounted bucket).

Why CRC-32: the enemy is a disk, a cable or a cut-off write, not a forger. It sees every flipped bit,
every burst up to 32 bits and all but one in 4e9 of other changes, and zlib's is the fastest checksum of
the standard library (4.1 GB/s measured on one server core; SHA-256 with its own instructions 1.8) and
lets the GIL go. All processes share the work, at saving and at restoring, because the checksums of a
large model would take one of them minutes to hours.
"""

import json
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import logging

from maxlp.runtime import distributed

_RECORD = "checkpoint.json"
_MANIFEST = "manifest.txt"
_PEER_TIMEOUT = 3600.0  # seconds that the primary waits for the checksums of another process
_HASH_THREADS = 4
_HASH_BLOCK = 4 << 20


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message is one line that names it."""


class NotWrittenError(CheckpointError):
    """The file system's failure and not the user's: the run may be started again."""

    exit_code = 1


class Restored(NamedTuple):
    """What `Checkpointer.restore_latest` and `restore` give back."""

    step: int
    state: Any
    data_state: dict[str, Any]
    meta: dict[str, Any]


class StepInfo(NamedTuple):
    """One directory of `list_steps`: `saved_at` in seconds since 1970; `status` complete or its suffix."""

    step: int
    path: Path
    status: str
    num_bytes: int
    saved_at: float


class Checkpointer:
    """Saves every few steps in the background, keeps the newest, restores the newest sound one.

    Every process of a run makes one and calls the same methods in the same order, from the main thread.
    It owns its directory: it removes what a killed run left unfinished, so a program that only reads
    calls `restore` or `load_params` instead.

    Args:
        directory: where the numbered step directories go; made if missing.
        every_steps: `should_save` says yes at multiples of this.
        keep_last: how many of the newest complete checkpoints stay, at least 1. With 1, a checkpoint that
            is damaged later leaves nothing to go back to.
        keep_every: checkpoints of steps that are multiples of this stay for good; None for none.
        asynchronous: False makes `save` return only when the checkpoint is complete.

    Raises:
        ValueError: an argument out of range, or a directory that is not on a mounted file system.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int,
        keep_last: int = 2,
        keep_every: int | None = None,
        asynchronous: bool = True,
    ) -> None:
        for key, value in {
            "every_steps": every_steps,
            "keep_last": keep_last,
            "keep_every": keep_every,
        }.items():
            if value is not None and value < 1:
                raise ValueError(f"checkpoint.{key}={value} must be at least 1")
        self.directory = _local_path(directory)
        self._every_steps = every_steps
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._asynchronous = asynchronous
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._newest: int | None = None
        if distributed.is_primary():
            self.directory.mkdir(parents=True, exist_ok=True)
            for left in [*self.directory.glob("*.unfinished*"), *self.directory.glob("*.removed")]:
                logging.warning("removing %s: left by a run that was killed", left)
                _remove(left)

    def should_save(self, step: int) -> bool:
        """True at the positive multiples of `every_steps`."""
        return step > 0 and step % self._every_steps == 0

    def save(
        self, step: int, state: Any, data_state: Mapping[str, Any], meta: Mapping[str, Any] | None = None
    ) -> None:
        """Starts a checkpoint and returns as soon as `state` may be changed or donated.

        Saving the step that was just saved or restored does nothing. One save is in flight at a time: a
        second one first waits for the first, and raises what went wrong with it.

        Args:
            step: number of finished steps.
            state: a pytree of `jax.Array`, typed PRNG keys included; none of size 0.
            data_state: JSON-able position of the data, merged over processes; the primary's is saved.
            meta: JSON-able facts about the run (config, versions); the primary's is saved.

        Raises:
            CheckpointError: the save before this one failed, or `state` holds something else than arrays.
        """
        self._join()
        if step == self._newest:
            return
        if self._path(step).exists():
            raise CheckpointError(
                f"{self._path(step)} exists already: resume from it or use another directory"
            )
        for path, leaf in _leaves(state):
            if not isinstance(leaf, jax.Array) or not leaf.size:
                raise CheckpointError(f"cannot save {path}: {_spec(leaf)} is not a jax.Array with elements")
        record = json.dumps(
            {
                "step": step,
                "meta": dict(meta or {}),
                "data_state": dict(data_state),
                "arrays": _describe(state),
            },
            indent=1,
        )
        ocp = _orbax()
        context = ocp.Context()
        context.array.saving.use_compression = False  # gains 8 % on float32 weights, takes twice the time
        with context:
            arrays_written = ocp.save_checkpointables_async(
                self._path(step, ".unfinished"), {"state": state}
            )
        self._newest = step
        self._pending = self._thread.submit(self._finish, step, arrays_written, record)
        if not self._asynchronous:
            self.wait()

    def restore_latest(self, abstract_state: Any) -> Restored | None:
        """Restores the newest checkpoint whose every byte is as it was written.

        Damaged ones are named in the log, one line for each fault, and set aside as ``<step>.damaged``, so
        that the run can save these steps again.

        Args:
            abstract_state: the state as `jax.ShapeDtypeStruct`, with the shardings that the arrays are born
                with; the mesh and the number of processes may differ from those that saved.

        Returns:
            The checkpoint, or None if the directory never held one.

        Raises:
            CheckpointError: there are checkpoints but none is sound, or the sound one is of another model.
        """
        self.wait()
        step, damaged = _newest_sound(self.directory)
        if step is None:
            self._refuse_fresh_start(damaged)
            return None
        restored = _load(self._path(step), abstract_state, exact=True)
        if distributed.is_primary():
            for bad in damaged:
                _set_aside(self._path(bad))
        self._newest = step
        return restored

    def wait(self) -> None:
        """Returns when everything saved so far is complete; raises CheckpointError if it could not be."""
        self._join()
        distributed.barrier("checkpoint wait")

    def close(self) -> None:
        """Waits, then ends the background thread."""
        self.wait()
        self._thread.shutdown()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            self.close()
        elif self._pending is not None:
            # No barrier: the other processes may never come to it. The save in flight still ends well.
            error = self._pending.exception()
            if error is not None:
                logging.error("the last checkpoint was not written: %s", error)

    def _path(self, step: int, suffix: str = "") -> Path:
        return self.directory / f"{step}{suffix}"

    def _join(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except Exception as error:
            step, self._newest = self._newest, None
            reason = f"{type(error).__name__}: {error}"
            raise NotWrittenError(
                f"checkpoint {self.directory}/{step} was not written: {reason}"
            ) from error

    def _finish(self, step: int, arrays_written: Any, record: str) -> None:
        """Background thread: waits for the arrays, adds record and manifest, gives the final name."""
        arrays_written.result()
        root, rank = self._path(step, ".unfinished"), jax.process_index()
        sums = _checksums(root, _share(_files(root)))
        if rank != 0:
            _write_synced(self._path(step, f".unfinished.sums-{rank}"), json.dumps(sums))
            return
        for peer in range(1, jax.process_count()):
            part = self._path(step, f".unfinished.sums-{peer}")
            sums |= json.loads(_read_when_there(part))
            part.unlink()
        _write_synced(root / _RECORD, record)
        # Normally the record alone; also a file that a stale directory listing hid from its process.
        sums |= _checksums(root, [name for name in _files(root) if name not in sums])
        _write_synced(root / _MANIFEST, _format_manifest(sums))
        _publish(root, self._path(step))
        self._retire()

    def _retire(self) -> None:
        """Deletes what `keep_last` and `keep_every` do not keep; only complete checkpoints are counted."""
        steps = _steps(self.directory)
        for step in steps[: -self._keep_last]:
            if not self._keep_every or step % self._keep_every:
                os.rename(self._path(step), self._path(step, ".removed"))
                _remove(self._path(step, ".removed"))

    def _refuse_fresh_start(self, damaged: Mapping[int, list[str]]) -> None:
        found = [f"{step} ({faults[0]})" for step, faults in damaged.items()]
        found += sorted(path.name for path in self.directory.glob("*.damaged*"))
        if found:
            raise CheckpointError(
                f"no sound checkpoint in {self.directory}: {', '.join(found)}; "
                "put back a good copy, or delete these to start from the beginning"
            )


def restore(path: str | os.PathLike[str], abstract_state: Any) -> Restored:
    """Reads a checkpoint without changing anything on disk.

    Args:
        path: a step directory, a directory of steps (the newest sound one is read) or a run's working
            directory that holds one as ``checkpoints``.
        abstract_state: `jax.ShapeDtypeStruct` with shardings, for the whole state or some of its top-level
            entries, such as ``{"params": ..., "model_state": ...}``. Floating-point arrays are cast to the
            dtype asked for.

    Raises:
        CheckpointError: nothing there, nothing sound, or shapes that differ.
    """
    return _load(_find(path), abstract_state, exact=False)


def load_params(path: str | os.PathLike[str], abstract_params: Any) -> Any:
    """The parameters alone of another run (`init_from`); arguments and errors as for `restore`."""
    return restore(path, {"params": abstract_params}).state["params"]


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The `meta` that was saved with a checkpoint; `path` and errors as for `restore`."""
    return _read_record(_find(path))["meta"]


def list_steps(directory: str | os.PathLike[str]) -> list[StepInfo]:
    """What a directory of checkpoints holds, oldest step first, by its manifests; reads no array."""
    infos = []
    for path in _local_path(directory).glob("[0-9]*"):
        number, *suffixes = path.name.replace("-", ".").split(".")
        if not path.is_dir() or not number.isdigit():
            continue
        sums = _read_manifest(path)
        status = suffixes[0] if suffixes else "damaged" if sums is None else "complete"
        num_bytes = sum(size for _, size in (sums or {}).values())
        infos.append(StepInfo(int(number), path, status, num_bytes, path.stat().st_mtime))
    return sorted(infos)


# Reading


def _find(path: str | os.PathLike[str]) -> Path:
    """The step directory that `path` means, verified."""
    root = _local_path(path)
    if (root / "checkpoints").is_dir():
        root /= "checkpoints"
    if root.name.isdigit() and root.is_dir() and not _steps(root):
        if faults := _verify(root):
            raise CheckpointError(f"{root} is damaged: {faults[0]}")
        return root
    step, damaged = _newest_sound(root)
    if step is None:
        reason = ", ".join(f"{bad} is damaged ({faults[0]})" for bad, faults in damaged.items())
        raise CheckpointError(f"no checkpoint in {root}: {reason or 'no step directory'}")
    return root / str(step)


def _newest_sound(directory: Path) -> tuple[int | None, dict[int, list[str]]]:
    """The newest step that passes verification, and the faults of those passed over, newest first."""
    damaged: dict[int, list[str]] = {}
    for step in reversed(distributed.gather_json(_steps(directory))[0]):
        faults = _verify(directory / str(step))
        if not faults:
            return step, damaged
        damaged[step] = faults
        if distributed.is_primary():
            for fault in faults:
                logging.error("checkpoint %s is damaged: %s", directory / str(step), fault)
    return None, damaged


def _verify(root: Path) -> list[str]:
    """Compares a step directory with its manifest, every process a share; all get all faults."""
    return [fault for faults in distributed.gather_json(_verify_share(root)) for fault in faults]


def _verify_share(root: Path) -> list[str]:
    sums = _read_manifest(root)
    if sums is None:
        state = "does not match its own checksum" if (root / _MANIFEST).exists() else "is missing"
        return [f"{_MANIFEST} {state}"] if distributed.is_primary() else []
    names = _share({name: size for name, (_, size) in sums.items()})
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        faults = pool.map(lambda name: _fault(root / name, *sums[name]), names)
        return [f"{name} {fault}" for name, fault in zip(names, faults, strict=True) if fault]


def _fault(path: Path, crc: str, size: int) -> str | None:
    try:
        found = path.stat().st_size
        if found != size:
            return f"has {found} bytes, was saved with {size}"
        return None if _checksum(path) == crc else "has other content than was saved"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _load(root: Path, abstract_state: Any, *, exact: bool) -> Restored:
    """Loads a verified step directory; with `exact`, structure and dtypes must be those saved."""
    record = _read_record(root)
    _check_fits(root, record["arrays"], abstract_state, exact=exact)
    ocp = _orbax()
    context = ocp.Context()
    context.pytree.loading.partial_load = not exact
    try:
        with context:
            state = ocp.load_checkpointables(root, {"state": abstract_state})["state"]
    except Exception as error:
        # Orbax reports every failure as a missing handler and hangs the reason below it.
        reason = error.__cause__ or error
        raise CheckpointError(f"Orbax cannot load {root}: {type(reason).__name__}: {reason}") from error
    return Restored(record["step"], state, record["data_state"], record["meta"])


def _check_fits(root: Path, saved: Mapping[str, str], abstract_state: Any, *, exact: bool) -> None:
    wanted = _describe(abstract_state)
    paths = wanted.keys() | saved.keys() if exact else wanted.keys()
    for path in sorted(paths, key=lambda path: (not path.startswith("params/"), path)):
        old, new = saved.get(path, "absent"), wanted.get(path, "absent")
        if old != new and (exact or not _castable(old, new)):
            raise CheckpointError(
                f"{root} does not fit this config: {path} is {old} there and {new} here; "
                "use the config it was saved with or another directory"
            )


def _castable(old: str, new: str) -> bool:
    return "float" in old and "float" in new and old.partition("[")[2] == new.partition("[")[2]


def _read_record(root: Path) -> dict[str, Any]:
    return json.loads((root / _RECORD).read_text())


# The tree, as paths, shapes and dtypes


def _leaves(tree: Any) -> Iterable[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def _describe(tree: Any) -> dict[str, str]:
    """Dtype and shape of every leaf, such as ``float32[8,16]``, by its path."""
    return {path: _spec(leaf) for path, leaf in _leaves(tree)}


def _spec(leaf: Any) -> str:
    shape = ",".join(str(size) for size in getattr(leaf, "shape", ()))
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}[{shape}]"


# The directory


def _orbax() -> Any:
    """Orbax's v1 API, imported at first use: it takes half a second of start-up."""
    from orbax.checkpoint import v1

    return v1


def _local_path(directory: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(directory):
        raise ValueError(f"{directory} is a URL: mount the bucket (gcsfuse, s3fs) and give its path here")
    return Path(os.path.abspath(os.path.expanduser(directory)))


def _steps(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit())


def _files(root: Path) -> dict[str, int]:
    """Size in bytes of every file below `root`, by its path from there."""
    return {
        path.relative_to(root).as_posix(): path.stat().st_size for path in root.rglob("*") if path.is_file()
    }


def _share(sizes: Mapping[str, int]) -> list[str]:
    """The files that this process checksums: every n-th of them, by falling size."""
    by_size = sorted(sizes, key=lambda name: (-sizes[name], name))
    return by_size[jax.process_index() :: jax.process_count()]


def _checksums(root: Path, names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """CRC-32 and size of files that were just written, which are on the disk when this returns."""

    def one(name: str) -> tuple[str, int]:
        _sync(root / name)
        return _checksum(root / name), (root / name).stat().st_size

    names = list(names)
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def _checksum(path: Path) -> str:
    crc, block = 0, bytearray(_HASH_BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            crc = zlib.crc32(memoryview(block)[:count], crc)
    return f"{crc:08x}"


def _format_manifest(sums: Mapping[str, tuple[str, int]]) -> str:
    body = "".join(f"{crc} {size} {name}\n" for name, (crc, size) in sorted(sums.items()))
    return body + f"{zlib.crc32(body.encode()):08x}\n"


def _read_manifest(root: Path) -> dict[str, tuple[str, int]] | None:
    """CRC-32 and size by file; None where the manifest is missing or was changed."""
    try:
        data = (root / _MANIFEST).read_bytes()
    except OSError:
        return None
    body, own_crc = data[:-9], data[-9:]
    if not body or own_crc != f"{zlib.crc32(body):08x}\n".encode():
        return None
    lines = [line.split(" ", 2) for line in body.decode().splitlines()]
    return {name: (crc, int(size)) for crc, size, name in lines}


def _write_synced(path: Path, text: str) -> None:
    """Writes a file that is never seen half written, and is on the disk when this returns."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    _sync(temporary)
    temporary.replace(path)


def _read_when_there(path: Path) -> str:
    deadline = time.monotonic() + _PEER_TIMEOUT
    while path.name not in os.listdir(path.parent):  # `exists` may answer from a stale NFS cache
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear within {_PEER_TIMEOUT:.0f} s")
        time.sleep(0.05)
    return path.read_text()


def _publish(unfinished: Path, final: Path) -> None:
    for path in [unfinished, *unfinished.rglob("*/")]:
        _sync(path)
    unfinished.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    """Returns when a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_aside(path: Path) -> None:
    target, count = path.with_name(f"{path.name}.damaged"), 1
    while target.exists():
        count += 1
        target = path.with_name(f"{path.name}.damaged-{count}")
    path.rename(target)
    logging.error("kept the damaged checkpoint as %s", target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)  # what is left goes at the next start
    else:
        path.unlink(missing_ok=True)
