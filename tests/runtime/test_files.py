"""Files and folders that change atomically."""

import pytest

from maxlp.runtime import files


def test_a_failed_write_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    assert files.read_json(path, {"starts": []}) == {"starts": []}
    files.write_json(path, {"starts": [1]})

    def fails(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "sync", fails)
    with pytest.raises(OSError, match="No space left"):
        files.write_json(path, {"starts": [1, 2]})
    assert files.read_json(path) == {"starts": [1]}


def test_the_content_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    path, synced = tmp_path / "a", []
    monkeypatch.setattr(files, "sync", lambda p: synced.append((p.read_text(), path.exists())))
    files.write_text(path, "content")
    assert synced == [("content", False)]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_unused_paths_are_numbered(tmp_path):
    names = []
    for _ in range(3):
        path = files.unused_path(tmp_path / "3.damaged")
        path.mkdir()
        names.append(path.name)
    assert names == ["3.damaged", "3.damaged-2", "3.damaged-3"]


def test_a_url_is_refused_with_the_way_out(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"gs://bucket/run is a URL: mount the bucket"):
        files.local_path("gs://bucket/run")
    monkeypatch.chdir(tmp_path)
    assert files.local_path("run/../other") == tmp_path / "other"


def test_a_folder_is_on_disk_before_it_gets_its_name_and_then_so_is_the_name(tmp_path, monkeypatch):
    (tmp_path / "3.unfinished" / "state").mkdir(parents=True)
    (tmp_path / "3.unfinished" / "state" / "a").write_text("content")
    synced = []
    monkeypatch.setattr(files, "sync", lambda p: synced.append((p, (tmp_path / "3").exists())))
    files.publish(tmp_path / "3.unfinished", tmp_path / "3")
    before = {tmp_path / "3.unfinished", tmp_path / "3.unfinished" / "state"}
    assert {p for p, named in synced if not named} == before
    assert [p for p, named in synced if named] == [tmp_path]
    assert (tmp_path / "3" / "state" / "a").read_text() == "content"
