"""Checkpoints in buckets keep the promises of those on disk."""

import hashlib
import json
import random
import signal
import time

import pytest

from maxlp.runtime import checkpoint, files, manifest, storage
from maxlp.runtime.checkpoint import Checkpointer, CheckpointError
from tests.runtime import workers
from tests.runtime.damage import DAMAGES
from tests.runtime.workers import forget


@pytest.fixture(autouse=True)
def _forgotten():
    """No test sees the mirrors of another."""
    yield
    forget()


def save(url, *steps, **kwargs):
    forget()
    with Checkpointer(url, every_steps=1, **kwargs) as checkpointer:
        for step in steps:
            checkpointer.save(step, workers.device_state(step), {"position": step}, {"meta": "é"})


def restore_latest(url):
    """As by a new process; its state is compared bit for bit."""
    forget()
    with Checkpointer(url, every_steps=1) as checkpointer:
        return workers.restore(checkpointer)


def steps(url):
    return sorted({name.partition("/")[0] for name in storage.find(url)})


def test_what_is_saved_is_restored_to_the_bit(bucket):
    url = f"{bucket}/run/checkpoints"
    save(url, 1, 2, 3)
    assert steps(url) == ["2", "3"]
    restored = restore_latest(url)
    assert (restored.step, restored.data_state, restored.meta) == (3, {"position": 3}, {"meta": "é"})
    for place in (f"{bucket}/run", url, f"{url}/2"):
        forget()
        found = checkpoint.restore(place, workers.abstract_state())
        workers.assert_equals_expected(found.state, found.step)
        assert found.step == (2 if place.endswith("2") else 3)


@pytest.mark.parametrize(
    "kind", ["flip", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("truncate", "delete"))]
)
def test_damage_is_found_without_reading_and_the_step_before_is_restored(bucket, kind, tmp_path):
    url, rng = f"{bucket}/{kind}", random.Random(0)
    save(url, 1, 2)
    names = sorted(storage.find(f"{url}/2").keys() - {manifest.NAME})
    name = max(names, key=lambda name: storage.find(f"{url}/2")[name].size)
    path = tmp_path / "file"
    path.write_bytes(storage.read(f"{url}/2/{name}"))
    DAMAGES[kind](path, rng)
    if path.exists():
        storage.write(f"{url}/2/{name}", path.read_bytes())
    else:
        storage.remove(f"{url}/2/{name}")
    assert restore_latest(url).step == 1
    assert steps(url) == ["1", "2.damaged"]
    save(url, 2)
    assert restore_latest(url).step == 2


@pytest.mark.full
def test_a_step_without_a_manifest_is_not_seen_and_goes_at_the_next_start(bucket):
    save(bucket, 1, 2)
    storage.remove(f"{bucket}/2/{manifest.NAME}")
    forget()
    assert [info.step for info in checkpoint.list_steps(bucket)] == [1]
    assert restore_latest(bucket).step == 1
    assert steps(bucket) == ["1"]


@pytest.mark.full
def test_without_an_intact_checkpoint_the_run_does_not_start_over(bucket):
    save(bucket, 1)
    storage.write(f"{bucket}/1/checkpoint.json", b"{}")
    with pytest.raises(CheckpointError, match=r"no intact checkpoint .*has 2 bytes instead of"):
        restore_latest(bucket)


@pytest.mark.full
def test_two_writers_of_one_step_notice_each_other(bucket, monkeypatch):
    def text_of(sums):
        storage.write(f"{bucket}/1/{manifest.NAME}", b"another's")
        return "mine"

    monkeypatch.setattr(manifest, "text_of", text_of)
    with pytest.raises(checkpoint.NotWrittenError, match="exists already"):
        save(bucket, 1)
    assert storage.read(f"{bucket}/1/{manifest.NAME}") == b"another's"


@pytest.mark.full
def test_where_the_store_keeps_no_md5_files_are_read(bucket, monkeypatch):
    """Customer-managed keys: the tag of an object is not the MD5 of its content."""
    entry = storage._entry

    def salted(info):
        found = entry(info)
        return found._replace(md5=hashlib.md5(found.md5.encode()).hexdigest())

    monkeypatch.setattr(storage, "_entry", salted)
    save(bucket, 1, 2)
    sums = manifest.read(files.local_path(f"{bucket}/2"))
    assert not any(checksum.startswith("md5:") for checksum, _ in sums.values())
    assert restore_latest(bucket).step == 2
    name = next(name for name in sums if "/d/" in name)
    content = bytearray(storage.read(f"{bucket}/2/{name}"))
    content[0] ^= 1
    storage.write(f"{bucket}/2/{name}", bytes(content))
    assert restore_latest(bucket).step == 1


@pytest.mark.full
def test_a_checkpoint_may_be_copied_between_bucket_and_disk(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("maxlp.runtime.bucket._BLOCK_BYTES", 10_000)  # files are read in several blocks
    save(f"{bucket}/a", 1)
    for name in storage.find(f"{bucket}/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(storage.read(f"{bucket}/a/{name}"))
    assert restore_latest(tmp_path).step == 1
    save(tmp_path, 2)
    for path in (tmp_path / "2").rglob("*"):
        if path.is_file():
            storage.write(f"{bucket}/b/{path.relative_to(tmp_path)}", path.read_bytes())
    assert restore_latest(f"{bucket}/b").step == 2
    name = max(name for name in storage.find(f"{bucket}/b") if "/d/" in name)
    content = storage.read(f"{bucket}/b/{name}")
    storage.write(f"{bucket}/b/{name}", content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        restore_latest(f"{bucket}/b")


# --- several processes, and kills -----------------------------------------------------------------------


@pytest.mark.full
def test_two_processes_save_and_restore_what_one_does(bucket):
    pair = workers.Workers(2)
    pair.call("save", f"{bucket}/checkpoints", 2)
    assert any(
        name.startswith("2/state/ocdbt.process_1/d/") for name in storage.find(f"{bucket}/checkpoints")
    )
    restored = restore_latest(f"{bucket}/checkpoints")
    assert (restored.step, restored.data_state) == (2, {"position": [2, 2]})
    save(f"{bucket}/one", 5)
    reply = {"step": 5, "data_state": {"position": 5}, "meta": {"meta": "é"}}
    assert pair.call("restore", f"{bucket}/one") == [reply, reply]
    pair.finish(0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "kills"), [(1, 20), (2, 8)])
def test_kills_at_random_moments_lose_no_complete_checkpoint(bucket, processes, kills):
    url, rng, newest, unfinished = f"{bucket}-{processes}/run", random.Random(0), 0, 0
    save_seconds = 0.0
    for _ in range(kills):
        run = workers.Workers(processes)
        run.send("save_until_killed", url)
        restored = run.read()["saved"]
        assert newest <= restored <= newest + 1, "completed, but killed before it printed that"
        if not save_seconds:
            begun = time.monotonic()
            restored = run.read()["saved"]
            save_seconds = time.monotonic() - begun
        time.sleep(rng.uniform(0.2, 2.5) * save_seconds)
        for process in rng.sample(run.processes, processes):
            process.send_signal(signal.SIGKILL)
        lines = run.processes[0].stdout.readlines()  # what `read` buffered first
        newest = max([restored, *(json.loads(line)["saved"] for line in lines if line.startswith("{"))])
        found = storage.find(url)
        unfinished += any(f"{step}/{manifest.NAME}" not in found for step in steps(url))
    newest = max(newest, restore_latest(url).step)
    print(f"{url}: {kills} kills, {unfinished} within a save; {newest} checkpoints complete, none lost")
    assert {int(step) for step in steps(url)} == {newest - 1, newest}
    assert unfinished >= kills // 4, "the test kills within saves"
