"""What the fingerprint of a corpus notices, and what it may not."""

import os
import shutil

import pytest

from maxlp.data import fingerprint


@pytest.fixture(params=["whole", "sampled"])
def files(tmp_path, request, monkeypatch):
    """Three files of 8 to 10 kB, read whole or in 64 samples of 32 bytes and their ends."""
    if request.param == "sampled":
        for name, value in dict(WHOLE_BYTES=1000, BLOCKS=64, BLOCK_BYTES=32).items():
            monkeypatch.setattr(fingerprint, name, value)
    paths = [tmp_path / "corpus" / name for name in ("a.txt", "b/c.txt", "d.txt")]
    for number, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(bytes((i * (7 + number)) % 251 for i in range(8000 + 1000 * number)))
    return [str(path) for path in paths]


def test_a_copy_has_the_same_fingerprint(files, tmp_path):
    shutil.copytree(tmp_path / "corpus", tmp_path / "elsewhere" / "copy")
    copy = [path.replace("/corpus/", "/elsewhere/copy/") for path in files]
    assert fingerprint.of_files(copy) == fingerprint.of_files(files)


def test_changes_are_noticed(files):
    found = {
        fingerprint.of_files(files),
        fingerprint.of_files(files[::-1]),
        fingerprint.of_files(files[:2]),
    }
    with open(files[1], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")  # the last byte of a file
    found.add(fingerprint.of_files(files))
    with open(files[2], "ab") as file:
        file.write(b"!")  # one more
    found.add(fingerprint.of_files(files))
    with open(files[0], "wb") as file:
        file.write(bytes(8000))  # another content of the same size
    found.add(fingerprint.of_files(files))
    os.rename(files[0], f"{files[0]}2")
    found.add(fingerprint.of_files([f"{files[0]}2", *files[1:]]))
    assert len(found) == 7


def test_a_block_that_begins_where_a_file_ends_is_of_the_next_file(monkeypatch):
    for name, value in dict(BLOCKS=4, BLOCK_BYTES=32).items():
        monkeypatch.setattr(fingerprint, name, value)
    places = {("a", 0, 32), ("a", 32, 32), ("b", 0, 32), ("b", 32, 32)}
    assert {*fingerprint._samples(["a", "b"], [64, 64])} == places


def test_empty_and_tiny_files(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 2)
    paths = [str(tmp_path / name) for name in "abc"]
    found = set()
    for contents in ((b"", b"abc", b""), (b"", b"abd", b""), (b"abc", b"", b""), (b"", b"", b"")):
        for path, content in zip(paths, contents, strict=True):
            with open(path, "wb") as file:
                file.write(content)
        found.add(fingerprint.of_files(paths))
    assert len(found) == 4


def test_a_large_corpus_is_read_in_part(tmp_path, monkeypatch):
    path, read = tmp_path / "big", []
    with path.open("wb") as file:
        file.truncate(2**36)  # sparse
    digest = fingerprint._digest
    monkeypatch.setattr(fingerprint, "_digest", lambda place: read.append(place[2]) or digest(place))
    before = fingerprint.of_files([str(path)])
    assert sum(read) <= 2 * fingerprint.BLOCKS * fingerprint.BLOCK_BYTES
    with path.open("r+b") as file:
        file.truncate(2**36 - 1)
    assert fingerprint.of_files([str(path)]) != before
