"""A folder that is written as a whole or not at all."""

import errno
from pathlib import Path

import pytest

from maxlp.runtime import files, mirror, new_folder, storage


def test_of_two_processes_that_write_a_folder_one_is_refused(tmp_path):
    target = tmp_path / "a" / "b"
    with new_folder.unfinished(target) as first:
        (first / "weights").write_text("first")
        with (
            pytest.raises(ValueError, match=rf"^--output={target} is being written by another process; "),
            new_folder.unfinished(target),
        ):
            pass
        assert (first / "weights").read_text() == "first"
    assert [path.name for path in target.iterdir()] == ["weights"]
    with pytest.raises(ValueError, match="is not empty"), new_folder.unfinished(target):
        pass
    assert [path.name for path in target.iterdir()] == ["weights"]


def test_what_a_killed_process_left_is_replaced(tmp_path):
    (tmp_path / ".unfinished").mkdir()
    (tmp_path / ".unfinished" / "of the killed one").write_text("half")
    with new_folder.unfinished(tmp_path) as folder:
        (folder / "weights").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_without_locks_a_folder_that_may_be_in_use_is_refused(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EBADF, "as on NFS")

    monkeypatch.setattr(new_folder.fcntl, "flock", fails)
    with new_folder.unfinished(tmp_path) as first:
        with (
            pytest.raises(ValueError, match=rf"another process, or was by one.*delete {first}$"),
            new_folder.unfinished(tmp_path),
        ):
            pass
        (first / "weights").write_text("first")
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_an_unfinished_folder_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), new_folder.unfinished(tmp_path / "a" / "b") as folder:
        (folder / "weights").write_text("x")
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_process_creates_at_the_same_time_stays(tmp_path, monkeypatch):
    mkdir, failure = Path.mkdir, ValueError("refused")

    def beaten(path):
        mkdir(path)
        raise FileExistsError

    monkeypatch.setattr(Path, "mkdir", beaten)
    with pytest.raises(ValueError, match="refused"), new_folder.created(tmp_path / "a" / "b"):
        raise failure
    assert (tmp_path / "a" / "b").is_dir()


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    for folder in tmp_path / "file", tmp_path / "file" / "folder":
        with pytest.raises(OSError, match=str(tmp_path / "file")), new_folder.created(folder):
            pass


def test_a_folder_in_a_bucket_is_marked_until_it_is_whole(bucket, monkeypatch):
    folder, write, during = files.local_path(bucket), storage.write, []

    def write_and_look(url, content, **options):
        write(url, content, **options)
        during.append(new_folder.UNFINISHED in storage.find(bucket))

    monkeypatch.setattr(storage, "write", write_and_look)
    with new_folder.unfinished(folder):
        (folder / "weights").write_text("x")
        (folder / "config").write_text("x")
        mirror.find(folder).pull()  # as at a barrier: copies the mark, too
    assert during == [True] * 3
    assert {path.name for path in folder.iterdir()} == storage.find(bucket).keys() == {"config", "weights"}


def test_a_folder_in_a_bucket_that_fails_leaves_nothing(bucket):
    folder = files.local_path(bucket)
    with pytest.raises(KeyError), new_folder.unfinished(folder):
        (folder / "weights").write_text("x")
        mirror.find(folder).push()
        raise KeyError
    assert not storage.find(bucket) and not folder.exists()


def test_what_a_killed_process_left_in_a_bucket_is_not_taken_for_a_whole_folder(bucket):
    storage.write(f"{bucket}/{new_folder.UNFINISHED}", b"\n")
    storage.write(f"{bucket}/weights", b"x")
    folder = files.local_path(bucket)
    with (
        pytest.raises(ValueError, match=r"by another process, or was by one that was killed"),
        new_folder.unfinished(folder),
    ):
        raise KeyError
    assert storage.read(f"{bucket}/weights") == b"x"


def test_a_file_that_a_mirror_leaves_out_stays_in_the_bucket(bucket, monkeypatch):
    monkeypatch.setattr(mirror, "_LARGE_BYTES", 3)
    storage.write(f"{bucket}/corpus.parquet", b"large")
    folder = files.local_path(bucket)
    assert not list(folder.iterdir())
    with pytest.raises(ValueError, match="is not empty"), new_folder.unfinished(folder):
        raise KeyError
    assert storage.find(bucket).keys() == {"corpus.parquet"}
    assert storage.read(f"{bucket}/corpus.parquet") == b"large"
