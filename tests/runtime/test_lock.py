"""One process at a time holds a workdir; a holder that is gone does not keep it."""

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from maxlp.runtime import lock, shared_workdir
from maxlp.runtime.lock import WorkdirLock
from tests.runtime import workers
from tests.training_runs import wait_until

HOLD = """
import pathlib, sys
from maxlp.runtime import lock
lock.BEAT_SECONDS = 0.05
with lock.WorkdirLock(pathlib.Path(sys.argv[1])) as held:
    sys.stdin.readline()
    try:
        held.acquire()
    except ValueError as error:
        sys.exit(f"error: {error}")
    print("held", flush=True)
    sys.stdin.readline()
"""


def start(workdir):
    command = [sys.executable, "-c", HOLD, str(workdir)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, text=True, **pipes)


def go(*processes):
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()


@contextlib.contextmanager
def holder(workdir):
    """Another process that holds the lock until the end of the block, where it releases it."""
    with start(workdir) as process:
        go(process)
        assert process.stdout.readline() == "held\n"
        yield process
        if process.poll() is None:
            process.communicate("\n")


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    for name, seconds in (("BEAT_SECONDS", 0.05), ("WATCH_SECONDS", 0.5), ("SETTLE_SECONDS", 0.1)):
        monkeypatch.setattr(lock, name, seconds)


def refused(workdir, name=""):
    with WorkdirLock(workdir) as second, pytest.raises(ValueError, match=rf"is in use: {name}.*--workdir$"):
        second.acquire()


def taken(workdir):
    with WorkdirLock(workdir) as held:
        held.acquire()
        held.acquire()  # as after a rollback in the same process
    assert not (workdir / "lock").exists()


def test_a_second_process_is_refused_until_the_first_ends_however_it_ends(tmp_path):
    workdir = tmp_path / "new" / "run"
    with holder(workdir) as first:
        for _ in range(2):
            refused(
                workdir, f"process {first.pid} on {os.uname().nodename} has been running there since 20"
            )
    with holder(workdir) as second:
        refused(workdir)
        second.kill()
        second.wait()
    assert (workdir / "lock").exists()
    taken(workdir)


def test_the_lock_has_the_permissions_of_other_files(tmp_path):
    """Users who share a workdir as a group can take the lock of a member who was killed."""
    before = os.umask(0o002)
    try:
        (tmp_path / "file").touch()
        with WorkdirLock(tmp_path) as held:
            held.acquire()
            assert (tmp_path / "lock").stat().st_mode == (tmp_path / "file").stat().st_mode
    finally:
        os.umask(before)


def test_a_lock_of_another_user_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    """As earlier versions wrote it: only its owner could. A workdir without a lock is another error."""

    def denied(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", denied)
    with WorkdirLock(tmp_path) as lock, pytest.raises(PermissionError):
        lock.acquire()
    (tmp_path / "lock").write_text("")
    message = r"lock is the lock of another user's run; if no run uses this workdir, delete the file$"
    with WorkdirLock(tmp_path) as lock, pytest.raises(ValueError, match=message):
        lock.acquire()


def test_what_a_killed_holder_left_half_written_is_removed(tmp_path):
    (tmp_path / "spikes").mkdir()
    for path in (tmp_path / ".run.json.0123abcd.tmp", tmp_path / "spikes" / ".7.json.0123abcd.tmp"):
        path.write_text("{")
    kept = {"spikes", "run.json", "notes.tmp", ".notes.tmp", ".notes.draft.tmp", ".a.0123abcd.tmp"}
    for name in kept - {"spikes", ".a.0123abcd.tmp"}:
        (tmp_path / name).write_text("")
    (tmp_path / ".a.0123abcd.tmp").mkdir()
    taken(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept and not [*(tmp_path / "spikes").iterdir()]


def test_of_processes_that_start_at_once_exactly_one_holds(tmp_path):
    processes = [start(tmp_path) for _ in range(4)]
    go(*processes)
    # Whoever is refused ends; the one that holds the lock waits for its input.
    wait_until(lambda: sum(p.poll() is None for p in processes) <= 1)
    outputs = [process.communicate("\n") for process in processes]
    assert [out for out, _ in outputs if out] == ["held\n"]
    assert sum("is in use" in err for _, err in outputs) == 3


OTHER = {"host": "other", "pid": 7, "boot": "another boot", "since": "2026-01-01", "token": "x"}


@contextlib.contextmanager
def other_machine(workdir):
    """The lock of a process on another machine, which lives and raises its count."""
    stop, path = threading.Event(), workdir / "lock"

    def beat():
        count = 0
        while not stop.wait(0.05):
            count += 1
            path.write_text(json.dumps(OTHER | {"count": count}))

    path.write_text(json.dumps(OTHER))
    thread = threading.Thread(target=beat)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.mark.parametrize("error", [None, errno.ENOLCK, errno.EOPNOTSUPP, errno.EWOULDBLOCK])
def test_on_another_machine_the_count_decides(tmp_path, monkeypatch, error):
    """A network file system locks for one machine only, has no locks, or keeps that of a lost machine."""

    def fails(*_):
        raise OSError(error, "no lock")

    if error is not None:
        monkeypatch.setattr(lock.fcntl, "flock", fails)
    with other_machine(tmp_path):
        refused(tmp_path, "process 7 on other")
    (tmp_path / "lock").write_text(json.dumps(OTHER))
    taken(tmp_path)


def test_of_two_that_take_an_unlockable_file_at_once_the_last_writer_holds(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.ENOLCK, "no lock")

    monkeypatch.setattr(lock.fcntl, "flock", fails)
    monkeypatch.setattr(lock.time, "sleep", lambda _: (tmp_path / "lock").write_text(json.dumps(OTHER)))
    refused(tmp_path, "process 7 on other")


def test_who_was_taken_over_ends_itself(tmp_path):
    with holder(tmp_path) as first:
        deadline = time.monotonic() + 60
        while first.poll() is None and time.monotonic() < deadline:
            (tmp_path / "lock").write_text(json.dumps(OTHER))  # again, as the holder may write meanwhile
            time.sleep(0.02)
        assert first.wait(timeout=1) == 2
        assert f"error: another process has taken over {tmp_path}" in first.stderr.read()
    assert json.loads((tmp_path / "lock").read_text()) == OTHER


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 3}', "\0" * 600])
def test_a_damaged_lock_is_stale(tmp_path, content):
    (tmp_path / "lock").write_text(content)
    taken(tmp_path)


def test_a_damaged_lock_of_a_process_that_lives_is_respected(tmp_path):
    with holder(tmp_path):
        os.truncate(tmp_path / "lock", 0)
        with WorkdirLock(tmp_path) as second, pytest.raises(ValueError, match="is in use"):
            second.acquire()


@pytest.mark.full
def test_all_processes_of_a_run_learn_that_it_is_refused(tmp_path):
    with holder(tmp_path) as first:
        run = workers.Workers(2)
        replies = run.call("lock", tmp_path)
        assert all(f"process {first.pid} on" in reply["refused"] for reply in replies)
    assert run.call("lock", tmp_path) == [{"held": True}] * 2
    refused(tmp_path, f"process {run.processes[0].pid} on")
    run.send("released")
    run.finish(0, 0)
    taken(tmp_path)


@pytest.mark.full
def test_a_workdir_that_each_process_has_on_a_disk_of_its_own_is_refused(tmp_path):
    run = workers.Workers(2)
    for reply in run.call("lock_apart", tmp_path):
        assert "is not the same folder in all processes" in reply["refused"]
        assert "has not appeared in process 1 after" in reply["refused"]
    run.finish(0, 0)
    assert not list(tmp_path.glob("*"))


@pytest.mark.parametrize(("content", "seen"), [(b'{"token": "c0ffee"}', True), (b'{"token": "0"}', False)])
def test_each_process_reads_the_lock_of_the_primary_one(tmp_path, monkeypatch, content, seen):
    monkeypatch.setattr(shared_workdir, "VISIBLE_SECONDS", 0.0)
    outcome = contextlib.nullcontext() if seen else pytest.raises(ValueError, match="all hosts share")
    with outcome:
        shared_workdir.check(tmp_path, lambda: content, "c0ffee")


def test_the_count_rises_while_the_lock_is_held(tmp_path):
    with WorkdirLock(tmp_path) as held:
        held.acquire()
        first = (tmp_path / "lock").read_bytes()
        wait_until(lambda: (tmp_path / "lock").read_bytes() != first)
        time.sleep(0.02)
        assert json.loads((tmp_path / "lock").read_text())["count"] >= 1


def test_a_beat_ends_before_the_lock_is_released(tmp_path, monkeypatch):
    """It would truncate a closed file, or whatever has its descriptor by then."""
    begun, pwrite = threading.Event(), os.pwrite

    def slow(*arguments):
        written = pwrite(*arguments)
        if threading.current_thread().name == "workdir lock":
            begun.set()
            time.sleep(0.2)
        return written

    monkeypatch.setattr(os, "pwrite", slow)
    truncated, ftruncate = [], os.ftruncate
    monkeypatch.setattr(os, "ftruncate", lambda *of: (truncated.append(of[0]), ftruncate(*of)))
    with WorkdirLock(tmp_path) as held:
        held.acquire()
        assert begun.wait(60)
    time.sleep(0.3)
    assert len(truncated) >= 2 and len({*truncated}) == 1


def test_a_process_forked_after_the_release_keeps_the_file_with_that_descriptor(tmp_path, monkeypatch):
    in_child, descriptors, pwrite = [], [], os.pwrite
    monkeypatch.setattr(os, "register_at_fork", lambda *, after_in_child: in_child.append(after_in_child))
    monkeypatch.setattr(os, "pwrite", lambda *of: (descriptors.append(of[0]), pwrite(*of)))
    with WorkdirLock(tmp_path) as held:
        held.acquire()
    with (tmp_path / "other").open("w") as other:
        os.dup2(other.fileno(), descriptors[0])
        try:
            in_child[0]()
            os.fstat(descriptors[0])
        finally:
            with contextlib.suppress(OSError):
                if descriptors[0] != other.fileno():
                    os.close(descriptors[0])
