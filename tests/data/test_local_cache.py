"""Compressed files, and copies of files, in the local cache."""

import gzip
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow
import pytest

from maxlp.data import local_cache
from maxlp.data.readers.tars import Tars
from maxlp.data.sources import make_source, open_source, parse_spec
from tests.data.corpora import TEXTS, error_of, texts_of, write_files, write_jsonl, write_pictures


def compress(path, kind):
    """Replaces a file by a compressed one of two parts, as those that tools append to each other."""
    data, target = path.read_bytes(), path.with_name(path.name + kind)
    parts = data[: len(data) // 3], data[len(data) // 3 :]
    make = gzip.compress if kind == ".gz" else lambda part: pyarrow.compress(part, "zstd", asbytes=True)
    target.write_bytes(b"".join(make(part) for part in parts))
    path.unlink()
    return target


@pytest.mark.parametrize("kind", [".gz", ".zst"])
@pytest.mark.parametrize("place", ["local", "remote"])
def test_compressed_lines_are_read_in_any_order(server, cache, kind, place, capfd):
    expected = texts_of(make_source(f"jsonl:{write_jsonl(server.folder / 'a.jsonl', TEXTS)}", "all"))
    path = compress(server.folder / "a.jsonl", kind)
    spec = f"jsonl:{server.folder}" if place == "local" else f"jsonl:{server.url}/a.jsonl{kind}"
    source = make_source(spec, "all")
    assert [source[i]["text"] for i in reversed(range(len(TEXTS)))] == expected[::-1]
    name = path if place == "local" else f"{server.url}/a.jsonl{kind}"
    assert source.where(3) == f"{name}:4" and source.reader.paths() == [str(name)]
    make_source(spec, "train")
    told = [line for line in capfd.readouterr().err.splitlines() if "decompressing" in line]
    assert told == [f"decompressing 1 file ({path.stat().st_size / 1e6:.1f} MB) into {cache}"], "once"


@pytest.mark.parametrize("kind", [".gz", ".zst"])
def test_compressed_tars_and_texts(server, cache, kind):
    expected = open_source(parse_spec(write_pictures(server.folder / "a.tar", 5), "all", "image_text"))
    records = [expected[i] for i in range(5)]
    compress(server.folder / "a.tar", kind)
    for place in (server.folder, f"{server.url}/a.tar{kind}"):
        found = open_source(parse_spec(f"tar:{place}?split=all", "all", "image_text"))
        assert [found[i] for i in range(5)] == records and found.where(2).endswith(f"a.tar{kind}: 002")
    (server.folder / "b.txt").write_text("äöü" * 100)
    compress(server.folder / "b.txt", kind)
    for place in (f"{server.folder}/b.txt{kind}", f"{server.url}/b.txt{kind}"):
        assert texts_of(make_source(f"text:{place}", "all")) == [("äöü" * 100).encode()]


@pytest.mark.parametrize("kind", [".gz", ".zst"])
def test_truncated_and_damaged_files_are_named(tmp_path, cache, kind):
    path = compress(write_jsonl(tmp_path / "a.jsonl", TEXTS), kind)
    whole = path.read_bytes()
    for data in (whole[:-1], whole[: len(whole) // 4], b"", b"no header" + whole):
        path.write_bytes(data)
        message = error_of(f"jsonl:{path}")
        assert f"{path} is truncated or damaged (" in message and "copy it again" in message
        assert not list(cache.rglob("*.tmp")), "nothing is left of it"
    path.write_bytes(whole)
    assert texts_of(make_source(f"jsonl:{path}", "all")) == TEXTS


def test_an_unusable_tar_is_named_and_not_its_copy(tmp_path, cache):
    (tmp_path / "a.tar").write_bytes(b"<html>" * 200)
    for number, files in enumerate(([("a.npy", b"1")], [("7.jpg", b"1"), ("7.cls", b"cat")])):
        write_files(tmp_path / f"{number}.tar", files)
    for name in ("a.tar", "0.tar", "1.tar"):
        path = compress(tmp_path / name, ".gz")
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}"):
            Tars(str(path))


def test_a_changed_file_replaces_its_copy(tmp_path, cache):
    sizes = set()
    for time, text in enumerate("ab"):
        path = compress(write_jsonl(tmp_path / "a.jsonl", [text]), ".gz")
        os.utime(path, ns=(time, time))
        assert texts_of(make_source(f"jsonl:{path}", "all")) == [text]
        sizes.add(path.stat().st_size)
    assert len(sizes) == 1, "only its time tells"
    assert len([entry for entry in cache.rglob("*") if entry.is_file()]) == 1


def test_plain_files_come_before_compressed_ones(tmp_path, cache):
    """As before there were compressed ones: what a folder holds must not change for runs that resume."""
    compress(write_jsonl(tmp_path / "b.jsonl", ["b"]), ".gz")
    assert texts_of(make_source(f"jsonl:{tmp_path}", "all")) == ["b"]
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    assert texts_of(make_source(f"jsonl:{tmp_path}", "all")) == ["a"]


def test_one_of_several_makes_an_entry(tmp_path, cache):
    path, made = tmp_path / "a", []
    path.write_bytes(b"x")

    def make(path, target):
        made.append(path)
        target.write(b"entry")

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: local_cache.cached(str(path), "kind", make), range(8)))
    assert len(made) == len(found) == 1
    assert Path(*found).read_bytes() == b"entry"


def test_a_full_disk_is_told_before_anything_is_copied(tmp_path, cache, monkeypatch):
    path = compress(write_jsonl(tmp_path / "a.jsonl", TEXTS), ".gz")
    usage = local_cache.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(local_cache.shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(OSError, match=f"no room for .* set XDG_CACHE_HOME .*{cache}"):
        make_source(f"jsonl:{path}", "all")


def test_a_cache_that_cannot_be_written_to_is_told_with_the_remedy(tmp_path, cache, monkeypatch):
    path = compress(write_jsonl(tmp_path / "a.jsonl", TEXTS), ".gz")
    monkeypatch.setattr(local_cache.os, "access", lambda *_: False)
    assert not local_cache.has_room()
    with pytest.raises(PermissionError, match=f"denied; set XDG_CACHE_HOME to a folder .*{cache}"):
        make_source(f"jsonl:{path}", "all")


def test_zst_without_its_library_is_told(tmp_path):
    path = compress(write_jsonl(tmp_path / "a.jsonl", TEXTS), ".zst")
    code = "import sys; sys.modules['pyarrow'] = None; from maxlp.data.sources import make_source\n"
    code += f"try: make_source('jsonl:{path}', 'all')\nexcept ValueError as error: print(error)"
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip().endswith("pyarrow is not installed; run pip install 'maxlp[data]'")
