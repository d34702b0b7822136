"""Files and folders that change atomically."""

import contextlib
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from maxlp.runtime import files


def test_a_failed_write_leaves_the_old_content_and_names_the_file(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    assert files.read_json(path, {"starts": []}) == {"starts": []}
    files.write_json(path, {"starts": [1]})

    def fails(*_):
        raise OSError(28, "No space left on device")

    for function in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, function, fails)
            with pytest.raises(OSError, match=re.escape(f"No space left on device: '{path}'")):
                files.write_json(path, {"starts": [1, 2]})
        assert files.read_json(path) == {"starts": [1]} and os.listdir(tmp_path) == ["run.json"]


def test_an_error_without_a_number_keeps_its_message():
    """As those of buckets."""
    with pytest.raises(OSError, match=r"^access refused$"), files.naming("run.json"):
        raise OSError("access refused")


def test_content_and_name_are_on_disk_in_this_order(tmp_path, monkeypatch):
    path, synced = tmp_path / "a", []
    fsync = os.fsync

    def record(descriptor):
        fsync(descriptor)
        synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), path.exists()))

    monkeypatch.setattr(os, "fsync", record)
    files.write_text(path, "content")
    assert synced == [(False, False), (True, True)]
    assert path.read_text() == "content" and os.listdir(tmp_path) == ["a"]


def test_a_kill_leaves_the_old_content_and_a_file_that_is_removed(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("old")
    block = "file.write(b'new'); file.flush(); os.kill(os.getpid(), 9)"
    code = "import os, pathlib, sys; from maxlp.runtime import files\n"
    code += f"with files.replacing(pathlib.Path(sys.argv[1])) as file: {block}"
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -9
    assert path.read_text() == "old" and len(os.listdir(tmp_path)) == 2
    files.remove_temporaries(tmp_path)
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", r"it is empty"),
        (b'{"starts": [', r"Expecting value"),
        (b"[]", r"a list instead of an object"),
        (b"3", r"a number instead of an object"),
        (b"null", r"null instead of an object"),
        (b"\xff\xfe", r"not text"),
        (b"[" * 100_000, r"(recursion|Stack overflow)"),
        (b"{}", r"no valid 'starts'"),
        (b'{"starts": 3}', r"no valid 'starts'"),
    ],
)
def test_damage_is_one_line_with_the_file_and_the_remedy(tmp_path, content, found):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"run\.json is damaged \(.*{found}.*\); delete it$") as error:
        files.read_json(path, fields={"starts": list}, remedy="delete it")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("shape", "good", "bad"),
    [
        ([int], [[], [1, 2]], [[1, "a"], 3, None]),
        ([int, str], [[1, "a"]], [[1], [1, "a", 2], []]),
        ({"b": int}, [{"b": 1}, {"b": 1, "c": 2}], [{}, {"b": "a"}, 3]),
        ([{"b": (int, type(None))}], [[{}], [{"b": 1}]], [[3], [{"b": "a"}]]),
        (({"b": int}, type(None)), [None, {"b": 1}], [{}, 3]),
    ],
)
def test_shapes_of_fields(tmp_path, shape, good, bad):
    path = tmp_path / "a.json"
    for value, fine in [*((each, True) for each in good), *((each, False) for each in bad)]:
        files.write_json(path, {"a": value})
        with contextlib.nullcontext() if fine else pytest.raises(ValueError, match="no valid 'a'"):
            files.read_json(path, fields={"a": shape})


def test_the_fields_of_every_object_of_a_list_are_checked(tmp_path):
    path = tmp_path / "a.json"
    for content, fine in (([{"to": 1}], True), ([{"to": 1}, {}], False), ([3], False)):
        files.write_json(path, content)
        with contextlib.nullcontext() if fine else pytest.raises(ValueError, match="no valid 'to'"):
            files.read_json(path, kind=list, fields={"to": int})


def test_unused_paths_are_numbered(tmp_path):
    names = []
    for _ in range(3):
        path = files.unused_path(tmp_path / "3.damaged")
        path.mkdir()
        names.append(path.name)
    assert names == ["3.damaged", "3.damaged-2", "3.damaged-3"]


@pytest.mark.parametrize("path", ["ftp://bucket/run", "https://server/run", Path("gs://bucket/run")])
def test_what_is_not_in_a_bucket_is_refused_with_the_remedy(path):
    with pytest.raises(ValueError, match=r"--workdir=\w+:/.*name one on disk, or at gs:// or s3://"):
        files.local_path(path, "--workdir")


@pytest.mark.parametrize("path", ["", " "])
def test_an_empty_path_is_refused_rather_than_taken_for_the_current_directory(path):
    with pytest.raises(ValueError, match=r"--workdir= * is empty \(an unset shell variable\?\)"):
        files.local_path(path, "--workdir")


def test_a_path_that_libraries_cannot_take_is_refused():
    assert files.local_path("/run é") == Path("/run é")
    with pytest.raises(ValueError, match=r"^--workdir=/run\udcff is not UTF-8; choose another path"):
        files.local_path(os.fsdecode(b"/run\xff"), "--workdir")


def test_paths_become_absolute_and_may_contain_colons(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert files.local_path("run/../other") == tmp_path / "other"
    assert files.local_path("~/run") == tmp_path / "home" / "run"
    assert files.local_path("lr:1e-3/run") == tmp_path / "lr:1e-3" / "run"


def test_a_home_of_no_user_is_refused_rather_than_taken_for_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"--workdir=~nobody-here/run: .* or \./~nobody-here"):
        files.local_path("~nobody-here/run", "--workdir")
    assert files.local_path("./~nobody-here/run") == tmp_path / "~nobody-here" / "run"


def test_caches_are_below_the_home_directory_or_where_the_user_says(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.cache_folder() == tmp_path / ".cache" / "maxlp"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)  # nobody's, as in some containers
    with pytest.raises(ValueError, match="no home directory; set HOME or XDG_CACHE_HOME"):
        files.cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert files.cache_folder() == Path("/scratch/maxlp")


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
