"""A run in a bucket: its small files are worked on in a local copy, the mirror.

Object stores cannot append to a file, rename a folder, or lock. So the files beside the arrays of
checkpoints (config, metrics, tokenizer, records) live in a temporary folder of each process, where the same
code as on disk reads and writes them, and are copied:

- from the bucket when the folder is opened, when the lock is taken, and at every barrier in the processes
  that do not hold the lock;
- to the bucket every `PUSH_SECONDS` (less often if that takes long), before a checkpoint becomes complete,
  and at the end of the run. A kill loses no record from before the newest checkpoint.

Arrays are never in the mirror: `bucket` writes them to the bucket and reads them there. A folder of a step
in the mirror holds only the record and the manifest of a complete checkpoint.
"""

import atexit
import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import jax
from absl import logging

from maxlp.runtime import distributed, files, lock, manifest, new_folder, storage

PUSH_SECONDS = 30.0
_PAUSE_PER_PUSH = 9.0  # times its seconds: gigabytes of metrics take a tenth of the network's time, not all

_THREADS = 8
_LARGE_BYTES = 64 << 20  # files from this size on are not held in memory, nor are they files of a run
_MAX_FILES = 10_000  # of a run; a folder with more is another one, given by mistake
_OF_ORBAX = {"state", "_CHECKPOINT_METADATA", "commit_success.txt", "orbax.checkpoint"}
_NOT_PULLED = {*_OF_ORBAX, "tensorboard", "profile", "wandb", lock.NAME}
_NOT_PUSHED = {"checkpoint.json", manifest.NAME, "wandb", lock.NAME}  # `bucket` writes the first two
_mirrors: dict[str, "Mirror"] = {}  # by URL


def open_folder(url: str, name: str) -> Path:
    """The local mirror of a folder in a bucket, copied from there if this process has not done so yet.

    Args:
      url: of a run, or of its checkpoints, or of one of them; or of a folder that does not exist.
      name: what names the URL in a message, such as "--workdir".

    Raises:
      ValueError: the URL cannot be used.
    """
    url = url.rstrip("/")
    if not url.startswith(tuple(f"{protocol}://" for protocol in storage.BUCKETS)):
        known = " or ".join(f"{protocol}://" for protocol in storage.BUCKETS)
        raise ValueError(f"{name}={url} is not a folder that can be used; name one on disk, or at {known}")
    if find(_folder(url)) is None:
        try:
            storage.check(url)
            mirror = Mirror(_run_of(url))
            mirror.pull()
        except OSError as error:
            raise ValueError(f"{name}={url}: {error}") from error
        _mirrors[mirror.url] = mirror
    return _folder(url)


def _run_of(url: str) -> str:
    """The run that a URL of checkpoints belongs to, or else the URL itself."""
    checkpoints = re.fullmatch(r"(\w+://.+)/checkpoints(/\d+)?", url)
    if not checkpoints:
        return url
    try:
        storage.stat(f"{checkpoints[1]}/config.json")
    except FileNotFoundError:
        return url
    return checkpoints[1]


def find(path: Path) -> "Mirror | None":
    """The mirror that a path is in."""
    return next((mirror for mirror in _mirrors.values() if path.is_relative_to(mirror.folder)), None)


def with_urls(text: str) -> str:
    """A text with URLs instead of folders in mirrors."""
    for protocol in storage.BUCKETS:
        text = text.replace(f"{_root()}/{protocol}/", f"{protocol}://")
    return text


def before_barrier() -> None:
    """Copies to the bucket what this process has written, if it holds the lock."""
    for mirror in _mirrors.values():
        if mirror.holder:
            mirror.push()


def after_barrier() -> None:
    """Copies from the bucket what the process that holds the lock has written before the barrier."""
    for mirror in _mirrors.values():
        if not mirror.holder:
            mirror.pull()


@functools.cache
def _root() -> Path:
    root = tempfile.mkdtemp(prefix="maxlp-mirror-")
    atexit.register(remove_all)
    return Path(root)


def remove_all() -> None:
    """Deletes all mirrors, at the end of the process; one that is just being copied stays."""
    if all(mirror.busy.acquire(timeout=1) for mirror in _mirrors.values()):
        shutil.rmtree(_root(), ignore_errors=True)


def _folder(url: str) -> Path:
    protocol, _, rest = url.partition("://")
    return _root() / protocol / rest


class Mirror:
    """The mirror of one folder.

    Attributes:
      url: of the folder.
      folder: the local one; exists if the bucket has any file there.
      holder: the lock that lets this process write to the bucket.
      busy: held while files are copied.
    """

    def __init__(self, url: str) -> None:
        self.url, self.folder = url, _folder(url)
        self.holder: MirrorLock | None = None
        self.busy = threading.RLock()
        self._tags: dict[str, str] = {}  # of the files that were pulled
        self._synced: dict[str, tuple[int, int]] = {}  # time and size of local files equal to the bucket's
        self._ended = threading.Event()

    def url_of(self, path: Path) -> str:
        """The URL of a path in this mirror."""
        return "/".join([self.url, *path.relative_to(self.folder).parts])

    def lock(self, workdir: Path) -> "MirrorLock":
        """Its lock, not yet taken."""
        return MirrorLock(workdir, self)

    def pull(self) -> None:
        """Makes the local files equal to those of the bucket."""
        with self.busy:
            found = storage.find(self.url)
            if found:
                self.folder.mkdir(parents=True, exist_ok=True)
            wanted = {name: entry for name, entry in found.items() if _is_pulled(name, found)}
            if len(wanted) > _MAX_FILES:
                raise FileExistsError(f"{self.url} holds {len(wanted):,} files; give the folder of a run")
            for name in self._tags.keys() - wanted.keys():
                self._forget(name)
            for name, entry in wanted.items():
                if self._tags.get(name) == entry.tag:
                    continue
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    if entry.size < _LARGE_BYTES:
                        files.write_bytes(path, storage.read(f"{self.url}/{name}"))
                    else:
                        storage.download(f"{self.url}/{name}", path)
                except FileNotFoundError:  # deleted meanwhile
                    self._forget(name)
                    continue
                for changed in (path, path.parent):  # of a step, the time of its manifest, its last file
                    os.utime(changed, (entry.changed, entry.changed))
                self._tags[name], self._synced[name] = entry.tag, _stamp(path)

    def _forget(self, name: str) -> None:
        """Deletes a local file, and the folders that are then empty."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            for folder in path.relative_to(self.folder).parents[:-1]:
                (self.folder / folder).rmdir()
        self._tags.pop(name, None)
        self._synced.pop(name, None)

    def push(self) -> None:
        """Copies what has changed to the bucket, except for checkpoints.

        A file that is gone here stays there: it may have been cleaned from the temporary folder.
        """
        with self.busy:
            if self.holder:
                self.holder.end_if_lost()
            # Not `rglob`, which raises an error if a folder is renamed meanwhile.
            paths = (Path(folder, name) for folder, _, names in os.walk(self.folder) for name in names)
            for path in paths:
                name = path.relative_to(self.folder).as_posix()
                if not _is_pushed(name):
                    continue
                try:
                    stamp = _stamp(path)
                    if self._synced.get(name) == stamp:
                        continue
                    _send(path, f"{self.url}/{name}")
                except FileNotFoundError:  # replaced or deleted meanwhile
                    continue
                self._synced[name] = stamp

    def remove(self, path: Path) -> None:
        """Deletes a file or a folder in the bucket, if this process holds the lock."""
        if self.holder:
            with self.busy:
                remove_folder(self.url_of(path))

    def send(self, path: Path) -> None:
        """Copies one file to the bucket, also without the lock."""
        _send(path, self.url_of(path))

    @contextlib.contextmanager
    def written(self, folder: Path) -> Iterator[None]:
        """Copies a new folder to the bucket at the end of the block; if it fails, nothing remains.

        Until then the folder of the bucket holds the file `new_folder.UNFINISHED`, also after a kill.

        Raises:
          ValueError: another process is writing the folder of the bucket, or was when it was killed; or it
            is not empty. (Its mirror may be, as it lacks large files.)
        """
        marker = folder / new_folder.UNFINISHED
        try:
            storage.write(self.url_of(marker), b"\n", create=True)  # of several processes one succeeds
        except FileExistsError:
            raise ValueError(new_folder.in_use_message(folder, folder)) from None
        if storage.find(self.url_of(folder)).keys() != {marker.name}:
            storage.remove(self.url_of(marker))
            raise ValueError(f"{folder} is not empty; choose a new directory")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            yield
            self.push()
        except BaseException:
            files.remove(folder)
            storage.remove(self.url_of(folder))
            raise
        files.remove(marker)  # which a barrier may have copied
        storage.remove(self.url_of(marker))

    def move(self, path: Path, target: Path) -> None:
        """Gives a folder another name, here and in the bucket."""
        with self.busy:
            self.copy(path, target)
            remove_folder(self.url_of(path))
            old = path.relative_to(self.folder).as_posix()
            for known in (self._tags, self._synced):
                for name in [name for name in known if name.startswith(f"{old}/")]:
                    del known[name]
            path.rename(target)

    def copy(self, path: Path, target: Path) -> None:
        """Copies a folder within the bucket, manifests last."""
        source, target_url = self.url_of(path), self.url_of(target)

        def copy(name: str) -> None:
            storage.copy(f"{source}/{name}", f"{target_url}/{name}")

        remove_folder(target_url)
        names = storage.find(source)
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(copy, itertools.filterfalse(_is_manifest, names)))
        for name in filter(_is_manifest, names):
            copy(name)

    def start(self) -> None:
        """Pushes from now on in the background, until `stop`."""
        threading.Thread(target=self._push_regularly, name="mirror", daemon=True).start()

    def _push_regularly(self) -> None:
        pause = PUSH_SECONDS
        while not self._ended.wait(pause):
            began, pause = time.monotonic(), PUSH_SECONDS
            try:
                self.push()
                pause = max(pause, _PAUSE_PER_PUSH * (time.monotonic() - began))
            except OSError as error:
                logging.warning("%s; trying again in %.0f s", error, pause)

    def stop(self) -> None:
        """Pushes for the last time."""
        self._ended.set()
        self.push()


def remove_folder(url: str) -> None:
    """Deletes a folder of a bucket, manifests first: what a kill leaves of a checkpoint is incomplete."""
    for name in filter(_is_manifest, storage.find(url)):
        storage.remove(f"{url}/{name}")
    storage.remove(url)


def _is_manifest(name: str) -> bool:
    return PurePosixPath(name).name == manifest.NAME


def _is_pulled(name: str, found: dict[str, storage.Entry]) -> bool:
    if name == "metrics.jsonl" and jax.distributed.is_initialized() and not distributed.is_primary():
        return False  # it may be hundreds of megabytes, and only the first process reads and writes it
    path = PurePosixPath(name)
    complete = path.name != "checkpoint.json" or str(path.parent / manifest.NAME) in found
    small = found[name].size < _LARGE_BYTES or path.suffix in (".jsonl", ".safetensors")
    return complete and small and not _NOT_PULLED & {*path.parts}


def _is_pushed(name: str) -> bool:
    return not _NOT_PUSHED & {*PurePosixPath(name).parts} and not name.endswith(".tmp")


def _name_urls(record: Any) -> bool:
    """Makes log lines name URLs."""
    record.msg, record.args = with_urls(record.getMessage()), ()
    return True


logging.get_absl_logger().addFilter(_name_urls)


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _send(path: Path, url: str) -> None:
    if path.stat().st_size < _LARGE_BYTES:
        storage.write(url, path.read_bytes())  # what a file that grows held at one moment
    else:
        storage.upload(path, url)


class MirrorLock(lock.WorkdirLock):
    """The lock of a run in a bucket: the file ``lock`` there, with the content and rules of one on disk.

    There is no kernel to ask. On the holder's machine its process is looked up, by number and start.
    """

    def __init__(self, workdir: Path, mirror: Mirror) -> None:
        super().__init__(workdir)
        self._mirror, self._url = mirror, f"{mirror.url}/{lock.NAME}"
        self._record |= {
            "boot": f"{self._record['boot']} {_pid_namespace()}",
            "started": _started(os.getpid()),
        }

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._held:
            self._send_profile()
            return
        try:
            self._mirror.stop()
        except OSError as error:
            if kind is None:
                raise
            logging.error("%s", error)  # what ends the run is another error
        finally:
            self._released.set()
            self._beats.join()  # a beat that has begun would write the lock again
            self._held, self._mirror.holder = False, None
            if self._is_mine():
                storage.remove(self._url)

    def _send_profile(self) -> None:
        """Copies the profiler's trace, all that a process without the lock writes to the bucket."""
        if jax.process_count() > 1:
            for path in self.workdir.glob("profile/**/*"):
                if path.is_file():
                    self._mirror.send(path)

    def _take(self) -> None:
        content = self._content()
        holder = lock.parse_holder(content) if content else None
        if content and self._is_alive(holder):
            raise ValueError(
                lock.in_use_message(self.workdir, lock.parse_holder(self._content()) or holder)
            )
        try:
            storage.in_time(functools.partial(self._write, 0, create=not content))
            if content:
                time.sleep(lock.SETTLE_SECONDS)
        except FileExistsError:  # by a process that has started at the same time
            pass
        except storage.StorageError as error:
            raise ValueError(f"{self._url} cannot be written: {error}") from error
        if not self._is_mine():
            raise ValueError(lock.in_use_message(self.workdir, lock.parse_holder(self._content())))
        self._beats.start()  # first, since to pull may take longer than others wait for a beat
        self._held = True
        self.workdir.mkdir(parents=True, exist_ok=True)
        self._mirror.pull()  # what the former holder has written since this process began
        self._mirror.holder = self
        self._mirror.start()

    def _is_alive(self, holder: dict[str, Any] | None) -> bool:
        if holder and "started" in holder and holder["boot"] == self._record["boot"] and holder["started"]:
            same = (holder["pid"], holder["started"]) == (os.getpid(), self._record["started"])
            return not same and _started(holder["pid"]) == holder["started"]  # `same` after an exec
        return lock.changes(self._url, self._content, holder)

    def _content(self) -> bytes:
        try:
            return storage.read(self._url)
        except FileNotFoundError:
            return b""

    def _write(self, count: int, create: bool = False) -> None:
        content = json.dumps(self._record | {"count": count}).encode()
        storage.write(self._url, content, create=create)


def _pid_namespace() -> str:
    """The namespace within which process ids are unique; each container of a machine has its own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process of this machine began, in ticks since boot; "" if there is none, or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
