"""Prepared folders; tests/test_prepare.py has the round trips of text."""

import pytest

from maxlp.data.readers.array_record import pack_example, unpack_example
from maxlp.data.sources import make_source, open_source, parse_spec
from maxlp.prepare import prepare_image_text, prepare_text
from tests.data.corpora import TEXTS, write_jsonl, write_pictures


def open_images(folder):
    return open_source(parse_spec(f"array_record:{folder}", "all", "image_text"))


def test_an_example_is_packed_without_loss():
    example = {"image": b"\x00\xff", "text": "漢字", "label": -1, "where": "a.tar: 7"}
    assert unpack_example(pack_example(**example)) == example
    assert unpack_example(pack_example(b"", None, 3, "")) == dict(image=b"", text=None, label=3, where="")


def test_examples_are_those_that_were_prepared(tmp_path):
    spec = write_pictures(tmp_path / "a.tar", 20, {4})
    prepare_image_text(spec, str(tmp_path / "out"), shards=3)
    original = open_source(parse_spec(spec, "all", "image_text"))
    prepared = open_images(tmp_path / "out")
    assert len(prepared) == 20
    for i in range(20):
        assert {**original[i], "where": original.where(i)} == prepared[i]
    assert prepared.where(4) == f"{tmp_path}/out: record 4, from {tmp_path}/a.tar: 004"
    message = "format 'maxlp-image-text-1' is not 'maxlp-documents-1'; prepare .* `maxlp.prepare text`"
    with pytest.raises(ValueError, match=message):
        make_source(f"array_record:{tmp_path}/out", "all")
    path = tmp_path / "out" / "00002-of-00003.array_record"
    data = path.read_bytes()
    path.write_bytes(data[:300] + bytes(40) + data[340:])
    with pytest.raises(ValueError, match=r"out: record 1\d: it cannot be read \(Corrupted"):
        list(open_images(tmp_path / "out"))


def test_damaged_folders_are_refused(tmp_path):
    corpus = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    manifest = prepare_text(f"jsonl:{corpus}", str(tmp_path / "out"), shards=3)
    spec = f"array_record:{tmp_path}/out"
    path = tmp_path / "out" / manifest["shards"][1]["file"]
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=f"{path} has {len(data) - 1} bytes, expected {len(data)}"):
        make_source(spec, "train")
    path.write_bytes(data[:1000] + bytes(400) + data[1400:])
    with pytest.raises(ValueError, match=r"out: record \d+: it cannot be read \(Corrupted.*prepare the"):
        list(make_source(spec, "all"))
    path.unlink()
    with pytest.raises(ValueError, match=f"{path} is missing"):
        make_source(spec, "train")
    (tmp_path / "out" / "dataset.json").write_text("{")
    with pytest.raises(ValueError, match=r"out/dataset.json is damaged \(.*\); prepare the data again"):
        make_source(spec, "train")
