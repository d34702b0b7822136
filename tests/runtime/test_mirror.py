"""The local copy of a run's small files, and the lock of a run in a bucket."""

import itertools
import json
import os
import signal
import threading
import time
import types

import pytest

from maxlp.monitoring import rollback, spike_records
from maxlp.monitoring.spikes import Spike, SpikeConfig
from maxlp.runtime import checkpoint, files, lock, manifest, mirror, storage
from maxlp.runtime.checkpoint import Checkpointer
from tests.runtime import workers
from tests.runtime.workers import forget
from tests.training_runs import wait_until


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    for name, seconds in (("BEAT_SECONDS", 0.05), ("WATCH_SECONDS", 0.5), ("SETTLE_SECONDS", 0.1)):
        monkeypatch.setattr(lock, name, seconds)
    monkeypatch.setattr(mirror, "PUSH_SECONDS", 0.05)
    yield
    forget()


def opened(url):
    """The folder of a run, as a new process sees it."""
    forget()
    return files.local_path(url, "--workdir")


def names(url):
    return sorted(storage.find(url).keys() - {lock.NAME})


# --- files ----------------------------------------------------------------------------------------------


def test_what_a_run_writes_appends_renames_and_deletes_is_in_the_bucket(bucket):
    folder = opened(bucket)
    with lock.open_lock(folder) as held:
        held.acquire()
        (folder / "a.txt").write_text("1")
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_text("b")
        (folder / ".a.txt.123.tmp").write_text("half")
        wait_until(lambda: names(bucket) == ["a.txt", "sub/b"])  # copied while the run continues
        files.remove(folder / "sub")
        with (folder / "a.txt").open("a") as file:
            file.write("2")
        (folder / "c").mkdir()
        (folder / "c" / "d").write_text("d")
        files.move(folder / "c", folder / "e")
    assert names(bucket) == ["a.txt", "e/d"] and lock.NAME not in storage.find(bucket)
    assert (opened(bucket) / "a.txt").read_text() == "12"
    # The time of a checkpoint is that of its folder. A float of seconds since 1970 has steps of 2.4e-7.
    changed = storage.find(bucket)["e/d"].changed
    assert (opened(bucket) / "e").stat().st_mtime == pytest.approx(changed, abs=1e-6, rel=0)


@pytest.mark.full
def test_only_the_first_of_several_processes_copies_the_metrics_from_the_bucket(bucket, monkeypatch):
    for name in ("metrics.jsonl", "run.json"):
        storage.write(f"{bucket}/{name}", b"{}")
    folder = opened(bucket)  # before the processes have joined, all copy them
    monkeypatch.setattr(mirror.jax.distributed, "is_initialized", lambda: True)
    for first, expected in ((True, ["metrics.jsonl", "run.json"]), (False, ["run.json"])):
        monkeypatch.setattr(mirror.distributed, "is_primary", lambda first=first: first)
        mirror.after_barrier()
        assert sorted(path.name for path in folder.iterdir()) == expected
    assert sorted(path.name for path in opened(bucket).iterdir()) == ["run.json"]
    assert names(bucket) == ["metrics.jsonl", "run.json"]


def test_of_a_process_without_the_lock_only_the_profile_is_copied(bucket, monkeypatch):
    monkeypatch.setattr(mirror.jax, "process_count", lambda: 2)
    folder = opened(bucket)
    with lock.open_lock(folder):
        (folder / "profile" / "plugins").mkdir(parents=True)
        (folder / "profile" / "plugins" / "host1.xplane.pb").write_text("trace")
        (folder / "metrics.jsonl").write_text("{}")
    assert names(bucket) == ["profile/plugins/host1.xplane.pb"]


def test_a_temporary_folder_that_is_cleaned_takes_nothing_from_the_bucket(bucket):
    folder = opened(bucket)
    with lock.open_lock(folder) as held:
        held.acquire()
        (folder / "a.txt").write_text("1")
        wait_until(lambda: names(bucket) == ["a.txt"])
        (folder / "a.txt").unlink()
    assert names(bucket) == ["a.txt"]


def test_a_bucket_that_does_not_exist_is_named_with_its_flag(bucket):
    other = bucket.replace("bucket", "nobody", 1)
    with pytest.raises(ValueError, match=rf"^--workdir={other}: .*nobody.* does not exist"):
        opened(other)


def test_a_folder_that_does_not_exist_is_not_made_up(bucket):
    assert not opened(f"{bucket}/none").exists()
    assert names(f"{bucket}/none") == []


@pytest.mark.full
def test_a_push_that_fails_is_tried_again(bucket, monkeypatch):
    folder, write, failures = opened(bucket), storage.write, []

    def fails_twice(url, content, **kwargs):
        if url.endswith("a.txt") and len(failures) < 2:
            failures.append(url)
            raise storage.StorageError(f"{url}: unavailable")
        write(url, content, **kwargs)

    monkeypatch.setattr(storage, "write", fails_twice)
    with lock.open_lock(folder) as held:
        held.acquire()
        (folder / "a.txt").write_text("1")
        wait_until(lambda: names(bucket) == ["a.txt"])
    assert len(failures) == 2


def test_the_longer_a_push_takes_the_longer_is_the_pause(bucket, monkeypatch):
    """Gigabytes of metrics would otherwise be sent without end."""
    of_run = mirror.find(opened(bucket))
    now, waits, pushes = [0.0], [], iter([1.0, 60.0, OSError("down"), 0.0])

    def wait(seconds):
        waits.append(seconds)
        return len(waits) == 5

    def push():
        seconds = next(pushes)
        if isinstance(seconds, OSError):
            raise seconds
        now[0] += seconds

    monkeypatch.setattr(mirror, "PUSH_SECONDS", 30.0)
    monkeypatch.setattr(mirror, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(of_run, "_ended", types.SimpleNamespace(wait=wait))
    monkeypatch.setattr(of_run, "push", push)
    of_run._push_regularly()
    assert waits == [30, 30, 540, 30, 30]


def test_metrics_are_in_the_bucket_before_the_checkpoint_that_follows_them(bucket, monkeypatch):
    monkeypatch.setattr(mirror, "PUSH_SECONDS", 1000.0)
    folder, write, order = opened(bucket), storage.write, []

    def noted(url, *args, **kwargs):
        order.append(url.rpartition("/")[2])
        write(url, *args, **kwargs)

    monkeypatch.setattr(storage, "write", noted)
    with lock.open_lock(folder) as held:
        held.acquire()
        with Checkpointer(folder / "checkpoints", every_steps=1) as checkpointer:
            (folder / "metrics.jsonl").write_text("{}\n")
            checkpointer.save(1, workers.device_state(1), {})
    assert order.index("metrics.jsonl") < order.index(manifest.NAME)


def test_a_folder_that_is_no_run_is_not_copied(bucket, monkeypatch):
    monkeypatch.setattr(mirror, "_MAX_FILES", 1)
    for name in ("a", "b"):
        storage.write(f"{bucket}/{name}", b"1")
    with pytest.raises(ValueError, match=f"--workdir={bucket}: .* holds 2 files; give the folder of a run"):
        opened(bucket)


def test_messages_name_the_url(bucket):
    folder = opened(bucket)
    assert files.shown(f"{folder}/loss.png") == f"{bucket}/loss.png"
    assert files.shown(f"in {folder.parent}") == f"in {bucket.rpartition('/')[0]}"


def test_a_run_may_be_called_as_a_checkpoint_is(bucket):
    assert opened(f"{bucket}/checkpoints/300") == mirror._mirrors[f"{bucket}/checkpoints/300"].folder
    storage.write(f"{bucket}/run/config.json", b"{}")
    assert opened(f"{bucket}/run/checkpoints/300").parents[1] == mirror._mirrors[f"{bucket}/run"].folder


# --- what is renamed on disk ----------------------------------------------------------------------------


def save(folder, *steps, **kwargs):
    with Checkpointer(folder / "checkpoints", every_steps=1, **kwargs) as checkpointer:
        for step in steps:
            checkpointer.save(step, workers.device_state(step), {"step": step})


def test_a_move_that_is_cut_off_anywhere_leaves_one_complete_copy(bucket, monkeypatch):
    folder = opened(f"{bucket}/run")
    content = {f"checkpoints/7/{name}" for name in ("state/a", "state/b", manifest.NAME)}

    def is_complete(step):
        return {name for name in names(f"{bucket}/run") if name.startswith(f"{step}/")} == {
            name.replace("checkpoints/7", step) for name in content
        }

    def has_manifest(step):
        return f"{step}/{manifest.NAME}" in names(f"{bucket}/run")

    left = 0  # calls before the network fails
    copy, remove = storage.copy, storage.remove

    def call(operation, *urls):
        nonlocal left
        if left == 0:
            raise storage.StorageError("cut off")
        left -= 1
        operation(*urls)

    def remove_one_by_one(url):
        for name in sorted(storage.find(url), reverse=True):
            call(remove, f"{url}/{name}")
        call(remove, url)

    monkeypatch.setattr(storage, "copy", lambda source, target: call(copy, source, target))
    monkeypatch.setattr(storage, "remove", remove_one_by_one)
    old, new = "checkpoints/7", "checkpoints/7.rolled_back"
    for limit in itertools.count():
        for name in content:
            storage.write(f"{bucket}/run/{name}", b"x")
        (folder / old).mkdir(parents=True, exist_ok=True)
        left = limit
        try:
            mirror.find(folder).move(folder / old, folder / new)
        except storage.StorageError:
            moved = False
        else:
            moved = True
        assert is_complete(old) or is_complete(new)
        assert all(is_complete(step) for step in (old, new) if has_manifest(step))
        if moved:
            assert not any(name.startswith(f"{old}/") for name in names(f"{bucket}/run"))
            return


@pytest.mark.full
def test_a_rollback_sets_newer_checkpoints_aside(bucket):
    folder = opened(f"{bucket}/run")
    with lock.open_lock(folder) as held:
        held.acquire()
        save(folder, 1, 2, 3, keep_last=3)
        spike = Spike(step=3, loss=9.0, mean=1.0, sigmas=8.0)
        rollback.roll_back(folder, spike, SpikeConfig(rewind_steps=2))
    folder = opened(f"{bucket}/run")
    found = [(info.step, info.status) for info in checkpoint.list_steps(folder / "checkpoints")]
    assert found == [(1, "complete"), (2, "rolled_back"), (3, "rolled_back")]
    assert {n.split("/")[1] for n in names(f"{bucket}/run") if n.startswith("checkpoints")} == {
        *("1", "2.rolled_back", "3.rolled_back")
    }
    assert rollback.read_rollbacks(folder)[0]["to"] == 1
    with Checkpointer(folder / "checkpoints", every_steps=1) as checkpointer:
        assert workers.restore(checkpointer).step == 1


@pytest.mark.full
def test_the_checkpoint_before_a_spike_outlives_its_deletion(bucket):
    folder = opened(f"{bucket}/run")
    with lock.open_lock(folder) as held:
        held.acquire()
        save(folder, 1, 2)
        kept = spike_records.keep_checkpoint(folder, spike_step=2, lead=0)
        save(folder, 3, 4)
        rollback.set_spikes_aside(folder)
    assert kept == folder / "spikes" / "checkpoints" / "1"
    folder = opened(f"{bucket}/run")
    assert [info.step for info in checkpoint.list_steps(folder / "checkpoints")] == [3, 4]
    restored = checkpoint.restore(folder / "spikes.old" / "checkpoints" / "1", workers.abstract_state())
    workers.assert_equals_expected(restored.state, 1)
    assert not (folder / "spikes").exists()


# --- the lock -------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_second_start_is_refused_until_the_first_is_gone_however_it_ends(bucket):
    run = workers.Workers()
    assert run.call("lock", bucket) == [{"held": True}]
    message = f"is in use: process {run.processes[0].pid} on"
    with lock.open_lock(opened(bucket)) as second, pytest.raises(ValueError, match=message):
        second.acquire()
    run.processes[0].kill()
    run.finish(-signal.SIGKILL)
    with lock.open_lock(opened(bucket)) as second:
        second.acquire()
        second.acquire()  # as after a rollback in the same process


@pytest.mark.full
def test_on_another_machine_the_count_decides(bucket):
    record = {"host": "other", "pid": 1, "boot": "another", "since": "2026", "token": "t", "count": 0}
    storage.write(f"{bucket}/lock", json.dumps(record).encode())
    with lock.open_lock(opened(bucket)) as second:
        second.acquire()
    assert names(bucket) == []

    reads = iter(range(1000))
    storage.write(f"{bucket}/lock", json.dumps(record).encode())
    with lock.open_lock(opened(bucket)) as second, pytest.MonkeyPatch.context() as patch:
        patch.setattr(second, "_content", lambda: json.dumps(record | {"count": next(reads)}).encode())
        with pytest.raises(ValueError, match="process 1 on other has been running there since 2026"):
            second.acquire()


def test_of_two_processes_that_start_at_the_same_time_one_trains(bucket, monkeypatch):
    """The other one has found no lock, and then cannot create it."""
    record = {"host": "other", "pid": 1, "boot": "another", "since": "2026", "token": "t", "count": 0}
    content = json.dumps(record).encode()
    storage.write(f"{bucket}/lock", content)
    with lock.open_lock(opened(bucket)) as second:
        reads = itertools.chain([b""], itertools.repeat(content))
        monkeypatch.setattr(second, "_content", lambda: next(reads))
        with pytest.raises(ValueError, match="process 1 on other has been running there since 2026"):
            second.acquire()
    assert storage.read(f"{bucket}/lock") == content


def test_of_two_processes_that_take_over_a_stale_lock_the_last_writer_trains(bucket, monkeypatch):
    rival = json.dumps({"host": "rival", "pid": 2, "boot": "b", "since": "2026", "token": "t", "count": 0})
    storage.write(f"{bucket}/lock", b"{")  # damaged, so stale
    monkeypatch.setattr(lock, "changes", lambda *_: False)
    monkeypatch.setattr(mirror.time, "sleep", lambda _: storage.write(f"{bucket}/lock", rival.encode()))
    with lock.open_lock(opened(bucket)) as first, pytest.raises(ValueError, match="process 2 on rival"):
        first.acquire()
    assert storage.read(f"{bucket}/lock") == rival.encode()


def test_a_process_that_replaces_itself_finds_its_own_lock(bucket):
    """As after `ClockSetBackError`."""
    with lock.open_lock(opened(bucket)) as first:
        first.acquire()
        first._released.set()
        with lock.open_lock(opened(bucket)) as second:
            second.acquire()


@pytest.mark.full
def test_who_was_taken_over_completes_no_checkpoint_and_ends(bucket, monkeypatch):
    ended = []

    def hard_exit(code):
        ended.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(lock, "hard_exit", hard_exit)
    monkeypatch.setattr(lock, "BEAT_SECONDS", 1000.0)
    monkeypatch.setattr(mirror, "PUSH_SECONDS", 1000.0)
    folder = opened(bucket)
    with lock.open_lock(folder) as held:
        held.acquire()
        record = json.loads(storage.read(f"{bucket}/lock")) | {"token": "another"}
        storage.write(f"{bucket}/lock", json.dumps(record).encode())
        with pytest.raises(checkpoint.NotWrittenError):
            save(folder, 1)
        assert ended == [2]
        held._released.set()
    assert not [name for name in names(bucket) if name.endswith(manifest.NAME)]
    assert lock.NAME in storage.find(bucket)  # the other's


class ReadOnly:
    """A file system whose store refuses to write."""

    def __init__(self, fs):
        self._fs = fs

    def __getattr__(self, name):
        return getattr(self._fs, name)

    def pipe_file(self, *_, **__):
        raise OSError("Forbidden: no permission storage.objects.create")  # as gcsfs


def test_a_bucket_that_cannot_be_written_to_is_refused_and_stays_as_it_is(bucket, monkeypatch):
    folder, file_system = opened(bucket), storage.file_system
    monkeypatch.setattr(storage, "file_system", lambda url: ReadOnly(file_system(url)))
    message = f"{bucket}/lock: access refused"
    with lock.open_lock(folder) as held, pytest.raises(PermissionError, match=message):
        held.acquire()
    assert names(bucket) == [] and not os.path.exists(folder)


def test_a_beat_during_the_release_leaves_no_lock(bucket, monkeypatch):
    begun, write = threading.Event(), storage.write

    def slow(url, *arguments, **options):
        if threading.current_thread().name == "workdir lock":
            begun.set()
            time.sleep(0.2)
        write(url, *arguments, **options)

    monkeypatch.setattr(storage, "write", slow)
    with lock.open_lock(opened(bucket)) as held:
        held.acquire()
        assert begun.wait(60)
    time.sleep(0.3)
    assert lock.NAME not in storage.find(bucket)


def test_the_count_rises_while_the_files_are_copied_from_the_bucket(bucket, monkeypatch):
    """Gigabytes take longer than another machine waits for it."""
    folder = opened(bucket)
    counts = []

    def slow(_):
        counts.append(json.loads(storage.read(f"{bucket}/{lock.NAME}"))["count"])
        time.sleep(0.5)
        counts.append(json.loads(storage.read(f"{bucket}/{lock.NAME}"))["count"])

    monkeypatch.setattr(mirror.Mirror, "pull", slow)
    with lock.open_lock(folder) as held:
        held.acquire()
    assert counts[0] < counts[1]
