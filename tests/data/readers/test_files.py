import contextlib
import glob
import os
import zlib

import pytest

from maxlp.data.readers import walk
from maxlp.data.readers.access import find_files
from maxlp.data.readers.files import choose_files
from maxlp.data.sources import make_source
from tests.data.corpora import error_of, texts_of


def test_text_files_are_read_byte_for_byte(tmp_path):
    contents = {f"{i % 3}/{i:02d}.txt": bytes([i, 255, 10, 13]) * i for i in range(20)}
    for name, data in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "0/other.md").write_text("no")
    expected = [contents[name] for name in sorted(contents)]
    assert texts_of(make_source(f"text:{tmp_path}/**/*.txt", "all", any_bytes=True)) == expected
    os.remove(tmp_path / "0/other.md")
    assert texts_of(make_source(f"text:{tmp_path}", "all", any_bytes=True)) == expected


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffaé".encode())
    assert texts_of(make_source(f"text:{tmp_path}", "all")) == ["aé".encode()]


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path):
    for name in ("data/a/1.txt", "elsewhere/2.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "data/a/up").symlink_to(tmp_path / "data")
    (tmp_path / "data/b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "data/a")
    names = [os.path.relpath(path, tmp_path / "data") for path in sorted(walk(str(tmp_path / "data")))]
    assert names == ["a/1.txt", "b/2.txt", "b/back/1.txt"]
    for pattern in ("data", "data/**", "data/**/*.txt"):
        assert len(make_source(f"text:{tmp_path}/{pattern}", "all")) == 3


def test_two_stars_are_any_number_of_folders(tmp_path):
    names = ("a.txt", "x/b.txt", "x/y/c.txt", "x/y/z/d.md", "x[1]/y/e.txt", ".hidden/f.txt", "x/.g.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    patterns = "**", "**/", "**/*.txt", "**/y/*", "x*/**/*.txt", "**/y/**", "**/**/*.txt", "x/**.txt"
    for pattern in (f"{tmp_path}/{each}" for each in (*patterns, "no/**")):
        expected = sorted(filter(os.path.isfile, {*glob.glob(pattern, recursive=True)}))
        with contextlib.nullcontext() if expected else pytest.raises(ValueError, match="no file matches"):
            assert find_files(pattern)[1] == expected


@pytest.mark.parametrize("pattern", ["", "/*.txt", "/**/*.txt"])
def test_a_link_whose_target_is_missing_is_named(tmp_path, pattern):
    (tmp_path / "1.txt").write_text("one")
    (tmp_path / "2.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(FileNotFoundError) as caught:
        texts_of(make_source(f"text:{tmp_path}{pattern}", "all"))
    assert caught.value.filename == str(tmp_path / "2.txt")


def test_braces_name_files_and_folders_in_their_order(tmp_path):
    for name in ("a/1.txt", "a/2.txt", "b/1.txt", "c[1]/x{1}.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for pattern, expected in {
        "{b,a}/1.txt": [b"b/1.txt", b"a/1.txt"],
        "{b,a}/*.txt": [b"b/1.txt", b"a/1.txt", b"a/2.txt"],
        "{b,a}": [b"b/1.txt", b"a/1.txt", b"a/2.txt"],
        "a/{1..2}.txt": [b"a/1.txt", b"a/2.txt"],
        "c[1]/x{1}.txt": [b"c[1]/x{1}.txt"],  # a file of this name
    }.items():
        assert texts_of(make_source(f"text:{tmp_path}/{pattern}", "all")) == expected
    assert f"no file or folder {tmp_path}/a/3.txt" in error_of(f"text:{tmp_path}/a/{{1..3}}.txt")
    assert f"no file matches {tmp_path}/d/*.txt" in error_of(f"text:{tmp_path}/{{a,d}}/*.txt")


def test_compressed_files_beside_others_are_warned_of(tmp_path, caplog):
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.txt.gz"):
        (tmp_path / name).write_text("{}")
    assert find_files(str(tmp_path), ".jsonl")[1] == [f"{tmp_path}/a.jsonl"]
    (record,) = caplog.records
    assert record.getMessage().endswith(f": 2 compressed ones are left out, such as {tmp_path}/b.jsonl.gz")
    (tmp_path / "a.jsonl").unlink()
    assert len(find_files(str(tmp_path), ".jsonl")[1]) == 2 and len(caplog.records) == 1


def test_other_compressed_files_are_refused(tmp_path):
    for name in ("a.txt", "b.txt.xz"):
        (tmp_path / name).write_text("a")
    for pattern in (tmp_path, f"{tmp_path}/*", f"{tmp_path}/b.txt.xz", f"{tmp_path}/{{a.txt,b.txt.xz}}"):
        with pytest.raises(
            ValueError, match=r"b\.txt\.xz cannot be read; decompress it, or compress it with"
        ):
            make_source(f"text:{pattern}", "all", any_bytes=True)


def test_a_reader_of_archives_finds_them(tmp_path):
    for name in ("a.zip", "b.zip", "c.txt"):
        (tmp_path / name).write_text("a")
    archives = [f"{tmp_path}/a.zip", f"{tmp_path}/b.zip"]
    for pattern in (f"{tmp_path}", f"{tmp_path}/*.zip", f"{tmp_path}/{{a,b}}.zip"):
        assert find_files(pattern, ".zip")[1] == archives


def test_a_file_in_another_encoding_is_named(tmp_path):
    (tmp_path / "1.txt").write_text("größer")
    (tmp_path / "2.txt").write_text("größer", encoding="latin-1")
    message = error_of(f"text:{tmp_path}", "all", 1)
    assert message.startswith(f"{tmp_path}/2.txt: byte 2 (0xf6) is not UTF-8; convert the text")


def test_stdlib_split_is_disjoint_stable_and_complete():
    train, validation = make_source("stdlib", "train"), make_source("stdlib", "validation")
    everything = make_source("stdlib", "all").reader.names
    train_names, validation_names = train.reader.names, validation.reader.names
    assert not set(train_names) & set(validation_names)
    assert sorted(train_names + validation_names) == everything == sorted(everything)
    assert all(zlib.crc32(name.encode()) / 2**32 < 0.02 for name in validation_names)
    assert 0.005 < len(validation) / len(everything) < 0.05
    assert "typing.py" in everything and "json/decoder.py" in everything
    assert not [name for name in everything if "site-packages" in name or not name.endswith(".py")]
    assert all(document["text"].decode() for document in validation)


def test_text_split_does_not_depend_on_the_folder(tmp_path):
    splits = []
    for folder in ("one", "another/place"):
        root = tmp_path / folder
        (root / "sub").mkdir(parents=True)
        for i in range(60):
            (root / "sub" / f"{i}.txt").write_text(str(i))
        for spec in (f"text:{root}?validation=0.3", f"text:{root}/**/*.txt?validation=0.3"):
            splits.append([texts_of(make_source(spec, split)) for split in ("train", "validation")])
    assert all(each == splits[0] for each in splits)
    assert sorted(splits[0][0] + splits[0][1]) == sorted(str(i).encode() for i in range(60))
    assert 5 < len(splits[0][1]) < 35


def test_a_single_file_cannot_be_split(tmp_path):
    assert f"no readable file in the folder {tmp_path}" in error_of(f"text:{tmp_path}")
    (tmp_path / "only.txt").write_text("x")
    message = error_of(f"text:{tmp_path}", "validation")
    assert "a single document" in message and "?split=all" in message
    assert len(make_source(f"text:{tmp_path}?split=all", "validation")) == 1
    assert len(make_source(f"text:{tmp_path}", "train")) == 1
    (tmp_path / "other.txt").write_text("x")
    assert "'validation'" in error_of(f"text:{tmp_path}?validation=0", "validation")


def test_several_files_are_never_all_in_one_split():
    for i in range(20):
        for names in ([f"{i}.txt"], [f"{i}.txt", f"{i}.md"]):
            parts = [choose_files(names, split, 0.5) for split in ("train", "validation")]
            assert [len(part) for part in parts] == [1, len(names) - 1]
