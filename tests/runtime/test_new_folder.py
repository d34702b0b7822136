"""A folder that is written as a whole or not at all."""

import pytest

from maxlp.runtime import files, mirror, new_folder, storage


def test_of_two_processes_that_write_a_folder_one_is_refused(tmp_path):
    target = tmp_path / "a" / "b"
    with new_folder.unfinished(target) as first:
        (first / "weights").write_text("first")
        with (
            pytest.raises(ValueError, match=rf"^{target} is being written by another process.*delete"),
            new_folder.unfinished(target),
        ):
            pass
        assert (first / "weights").read_text() == "first"
    assert [path.name for path in target.iterdir()] == ["weights"]
    with pytest.raises(ValueError, match="is not empty"), new_folder.unfinished(target):
        pass
    assert [path.name for path in target.iterdir()] == ["weights"]


def test_an_unfinished_folder_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), new_folder.unfinished(tmp_path / "a" / "b") as folder:
        (folder / "weights").write_text("x")
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_a_file_that_a_mirror_leaves_out_stays_in_the_bucket(bucket, monkeypatch):
    monkeypatch.setattr(mirror, "_LARGE_BYTES", 3)
    storage.write(f"{bucket}/corpus.parquet", b"large")
    folder = files.local_path(bucket)
    assert not list(folder.iterdir())
    with pytest.raises(ValueError, match="is not empty"), new_folder.unfinished(folder):
        raise KeyError
    assert storage.read(f"{bucket}/corpus.parquet") == b"large"
