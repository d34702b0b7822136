"""Samples of tars against tarfile, the index, and truncated tars."""

import errno
import io
import json
import os
import pickle
import tarfile

import numpy as np
import pytest

from maxlp.data.readers import BrokenExample, tars
from maxlp.data.sources import open_source, parse_spec
from tests.data.corpora import few_open_files, write_files


def samples(count, folder="", seed=0):
    """Files of `count` samples, each with its types in a random order."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        types = {
            "jpg": rng.bytes(int(rng.integers(1, 3000))),
            "txt": f"caption {seed} {number} é".encode(),
            "json": json.dumps({"alt": f"alt {number}"}).encode(),
            "cls": str(number % 7).encode(),
        }
        for kind in rng.permutation(sorted(types)):
            yield f"{folder}{number:04d}.{kind}", types[kind]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_those_of_the_files(tmp_path, format):
    long = "" if format == tarfile.USTAR_FORMAT else "über-" * 30  # names beyond a header's 100 bytes
    files = [("folder/", None), *samples(20, f"folder.v2/{long}"), ("readme.md", b"#")]
    write_files(tmp_path / "a.tar", files, format)
    write_files(tmp_path / "b.tar", samples(11, seed=1), format)
    found = pickle.loads(pickle.dumps(tars.Tars(str(tmp_path / "{a,b}.tar"))))
    expected = {}
    for name in ("a", "b"):
        with tarfile.open(tmp_path / f"{name}.tar") as tar:
            for member in filter(tarfile.TarInfo.isfile, tar):
                stem, kind = os.path.splitext(member.name)
                expected.setdefault((name, stem), {})[kind] = tar.extractfile(member).read()
    expected = {key: types for key, types in expected.items() if ".jpg" in types}
    assert len(found) == len(expected) == 31
    order = np.random.default_rng(0).permutation(31)
    for row in order:
        (name, stem), types = list(expected.items())[row]
        assert found[row] == {
            "image": types[".jpg"],
            "text": types[".txt"].decode(),
            "label": int(types[".cls"]),
        }
        assert found.where(row) == f"{tmp_path}/{name}.tar: {stem}"


def test_files_that_no_sample_uses_are_warned_of(tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(
        tars.logging, "log_first_n", lambda _, text, n, *values: logged.append(text % values)
    )
    others = [("v.with.png", b"1"), ("v.txt", b"1"), ("x.jpg", b"1"), ("y.jpg", b"1")]
    write_files(tmp_path / "a.tar", [*samples(3), *others])
    assert len(tars.Tars(str(tmp_path))) == len(tars.Tars(str(tmp_path))) == 3
    assert len(logged) == 1 and "a.tar: 3 of 6 samples are left out, such as v.with.png: " in logged[0]
    write_files(tmp_path / "b.tar", [("x.jpg", b"1"), ("x.txt", b"a"), ("x.jpg", b"2"), ("x.txt", b"b")])
    assert tars.Tars(str(tmp_path / "b.tar"))[0] == {"image": b"2", "text": "b", "label": -1}
    assert logged[1].endswith("b.tar: 2 files take the place of another with the same key and type")


def test_hidden_files_and_marks_are_left_out(tmp_path):
    files = [("x.jpg", b"1"), ("x.txt", b"\xef\xbb\xbfa cat\r\n"), ("y.jpg", b"2"), ("y.txt", b"b")]
    hidden = [each for name, data in files for each in ((f"./._{name}", b"mac"), (f"./{name}", data))]
    write_files(tmp_path / "a.tar", hidden)
    found = tars.Tars(str(tmp_path / "a.tar"))
    assert [(found[row]["image"], found[row]["text"]) for row in range(len(found))] == [
        (b"1", "a cat"),
        (b"2", "b"),
    ]


def test_captions_may_be_in_json(tmp_path):
    others = [("x.jpg", b"1"), ("x.json", b'{"alt": 3}'), ("y.jpg", b"1"), ("y.json", b'{"alt": null}')]
    write_files(tmp_path / "a.tar", [*samples(3), *others])
    found = tars.Tars(str(tmp_path), "json:alt")
    assert [found[row]["text"] for row in range(3)] == ["alt 0", "alt 1", "alt 2"]
    with pytest.raises(BrokenExample, match="'alt' of the JSON is int"):
        found[3]
    assert found[4] == {"image": b"1", "text": None, "label": -1}
    with pytest.raises(BrokenExample, match="no 'title'"):
        tars.Tars(str(tmp_path), "json:title")[0]


def test_a_wrong_type_of_captions_is_refused_where_images_have_labels(tmp_path):
    spec = f"tar:{write_files(tmp_path / 'a.tar', samples(3))}?split=all"
    assert open_source(parse_spec(f"{spec}&text=json:alt", "all", "image_text"))[0]["text"] == "alt 0"
    with pytest.raises(ValueError, match=r"no sample has a \.caption; correct \?text=caption, or drop it"):
        open_source(parse_spec(f"{spec}&text=caption", "all", "image_text"))


def test_the_case_of_extensions_is_irrelevant(tmp_path):
    write_files(tmp_path / "a.tar", [("x.JPG", b"1"), ("x.CAPTION", b"a cat")])
    for text in ("caption", "CAPTION"):
        assert tars.Tars(str(tmp_path), text)[0] == {"image": b"1", "text": "a cat", "label": -1}


@pytest.mark.parametrize(("kind", "text"), [("txt", b"caf\xe9"), ("json:alt", b'{"alt": "caf\xe9"}')])
def test_a_caption_that_is_not_utf8_is_broken(kind, text, tmp_path):
    write_files(tmp_path / "a.tar", [("x.jpg", b"1"), (f"x.{kind.partition(':')[0]}", text)])
    with pytest.raises(BrokenExample, match=r"\(0xe9\) is not UTF-8"):
        tars.Tars(str(tmp_path), kind)[0]


def test_index_is_reused_until_the_tar_changes(tmp_path, monkeypatch):
    path = tmp_path / "a.tar"
    write_files(path, samples(5))
    first = tars.Tars(str(path))
    scan = tars.scan_tar
    monkeypatch.setattr(tars, "scan_tar", lambda *_: pytest.fail("scanned twice"))
    second = tars.Tars(str(path))
    assert [second[row] for row in range(5)] == [first[row] for row in range(5)]
    monkeypatch.setattr(tars, "scan_tar", scan)
    write_files(path, samples(6, seed=1))
    assert tars.Tars(str(path))[5]["text"].startswith("caption 1 5")
    assert sorted(each.name for each in tmp_path.glob("a.tar?*"))[1:] == [], "one index a tar"
    # Another tar of the same size, as after a repair: its time tells them apart.
    first, other = ((("a.txt", b"x"), ("a.jpg", b"1")), (("a.jpg", b"2"), ("a.txt", b"y")))
    for files, caption in ((first, "x"), (other, "y")):
        write_files(path, files)
        os.utime(path, ns=(len(caption), ord(caption)))
        assert tars.Tars(str(path))[0]["text"] == caption


def test_an_index_that_another_process_made_meanwhile_is_never_missing(tmp_path, monkeypatch):
    path, scan, removed = str(tmp_path / "a.tar"), tars.scan_tar, []
    write_files(path, samples(3))

    def scan_while_another_does(path, text_type, name):
        monkeypatch.setattr(tars, "scan_tar", scan)
        tars.index_tar(path, text_type, path)
        return scan(path, text_type, name)

    monkeypatch.setattr(tars, "scan_tar", scan_while_another_does)
    monkeypatch.setattr(os, "remove", removed.append)
    assert os.path.isfile(tars.index_tar(path, "txt", path)) and not removed


def test_a_damaged_index_is_made_anew(tmp_path):
    """Also one that would run code: NumPy is told not to unpickle."""
    path = write_files(tmp_path / "a.tar", samples(5))
    expected = [tars.Tars(str(path))[row] for row in range(5)]
    (index,) = tmp_path.glob("*.index.npy")
    whole, trace = index.read_bytes(), tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(trace),)

    forged = io.BytesIO()
    np.save(forged, np.array([Payload()]), allow_pickle=True)
    other = io.BytesIO()
    np.save(other, np.zeros(5, tars.INDEX_DTYPE)[:0])
    for content in (
        b"",
        whole[:40],
        whole[:-10],
        forged.getvalue(),
        pickle.dumps(Payload()),
        other.getvalue(),
    ):
        index.write_bytes(content)
        found = tars.Tars(str(path))
        assert [found[row] for row in range(5)] == expected and not trace.exists()
        assert index.read_bytes() == whole


def test_more_tars_are_read_than_files_may_be_open(tmp_path):
    for number in range(50):
        write_files(tmp_path / f"{number:02d}.tar", samples(2, seed=number))
    with few_open_files():
        found = tars.Tars(str(tmp_path))
        assert [found[2 * number + 1]["text"] for number in range(50)] == [
            f"caption {number} 1 é" for number in range(50)
        ]


def test_members_never_leave_the_tar(tmp_path):
    """Names are keys of samples, and links are not followed: nothing is written or read elsewhere."""
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (tmp_path / "in").mkdir()
    path = write_files(
        tmp_path / "in" / "a.tar", [("../../up.jpg", b"1"), ("/abs.jpg", b"2"), ("/abs.txt", b"c")]
    )
    with tarfile.open(path, "a") as tar:
        for name, kind in (("../../up.txt", tarfile.SYMTYPE), ("x.jpg", tarfile.LNKTYPE)):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, str(secret)
            tar.addfile(link)
    found = tars.Tars(str(path))
    assert [found[row]["text"] for row in range(len(found))] == ["c"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in", "secret.txt"]


def test_files_of_gigabytes_are_broken_examples(tmp_path):
    """The tar is sparse: 5 GiB that take no room on the disk."""
    path, big = tmp_path / "a.tar", 5 * 2**30
    with path.open("wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        for name, size in (
            ("0.jpg", big),
            ("0.txt", 3),
            ("1.jpg", 3),
            ("1.txt", big),
            ("2.jpg", 1),
            ("2.txt", 1),
        ):
            member = tarfile.TarInfo(name)
            member.size = size
            file.write(member.tobuf())
            file.seek(-(-size // 512) * 512, os.SEEK_CUR)
        file.write(bytes(1024))
        tar.closed = True  # everything is written
    found = tars.Tars(str(path))
    for row in (0, 1):
        with pytest.raises(BrokenExample, match="its image or caption has more than 1 GiB"):
            found[row]
    assert len(found) == 3 and len(found[2]["image"]) == 1


def test_index_stays_in_memory_where_it_cannot_be_written(tmp_path, monkeypatch):
    write_files(tmp_path / "a.tar", samples(5))

    def fill_the_disk(path, index):
        with open(path, "wb") as file:
            file.write(index.tobytes()[:10])
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(tars.np, "save", fill_the_disk)
    found = tars.Tars(str(tmp_path / "a.tar"))
    assert found[4]["text"] == "caption 0 4 é" and os.listdir(tmp_path) == ["a.tar"]


def test_a_truncated_tar_is_named(tmp_path):
    path = tmp_path / "whole.tar"
    write_files(path, samples(4))
    data = path.read_bytes()
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    boundary = last.offset  # between two files, where nothing seems to be missing
    for size in (len(data) // 2, boundary, boundary + 100, last.offset_data + 1, 700):
        cut = tmp_path / f"cut{size}.tar"
        cut.write_bytes(data[:size])
        with pytest.raises(
            ValueError, match=r"cut\d+.tar is not a complete tar .*download it again"
        ) as error:
            tars.Tars(str(cut))
        assert "\n" not in str(error.value)


def test_a_tar_with_a_damaged_header_is_named(tmp_path):
    """tarfile ends at a header that is damaged or zero, as at the end of a tar."""
    path = tmp_path / "whole.tar"
    write_files(path, samples(4))
    data = path.read_bytes()
    with tarfile.open(path) as tar:
        start = tar.getmembers()[8].offset
    end = start + tarfile.BLOCKSIZE
    for name, damaged in {
        "changed": data[:start] + b"?" + data[start + 1 :],
        "zeroed": data[:start] + bytes(end - start) + data[end:],
        "joined": data + data,
    }.items():
        (tmp_path / f"{name}.tar").write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{name}.tar is not a complete tar .*it is damaged"):
            tars.Tars(str(tmp_path / f"{name}.tar"))


def test_unusable_tars_are_named(tmp_path):
    write_files(tmp_path / "a.tar", [("a.npy", b"1")])
    (tmp_path / "b.tar").write_bytes(b"<html>" * 200)
    (tmp_path / "c.zip").write_bytes(b"")
    (tmp_path / "c.jpg").write_bytes(b"")
    write_files(tmp_path / "e.tar", [("7.jpg", b"1"), ("7.cls", b"cat")])
    write_files(tmp_path / "f.tar", [("7.jpg", b"1"), ("8.jpg", b"1"), ("7.txt", b"a"), ("8.txt", b"a")])
    for name, message in {
        "a.tar": r"a\.tar has no sample with an image \(\.jpg/.*: a\.npy\).*set \?text=",
        "b.tar": r"b\.tar is not a complete tar",
        "c.zip": r"c\.zip cannot be read",
        "c.jpg": r"c\.jpg is not a \.tar",
        "e.tar": r"e\.tar: 7\.cls contains b'cat', not the number of a class",
        "f.tar": r"f\.tar has no sample .* side by side .*, as tar --sort=name does",
        "{0..3}.tar": r"no file .*0\.tar",
        "d*.tar": r"no file .*d\*\.tar",
    }.items():
        with pytest.raises(ValueError, match=message):
            tars.Tars(str(tmp_path / name))


def test_names_are_split_at_the_first_dot_of_the_base_name():
    """As in WebDataset: "1.left.jpg" and "1.txt" are of one sample."""
    assert tars._split("v1.0/1.left.JPG") == ("v1.0/1", "left.jpg")
    assert tars._split("1.txt") == ("1", "txt")


def test_a_folder_is_searched_with_its_subfolders(tmp_path):
    for name in ("b.tar", "a/c.tar", ".hidden/d.tar", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert tars.find_tars(str(tmp_path)) == [f"{tmp_path}/a/c.tar", f"{tmp_path}/b.tar"]


def test_a_folder_without_tars_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"no \.tar file in the folder"):
        tars.find_tars(str(tmp_path))
