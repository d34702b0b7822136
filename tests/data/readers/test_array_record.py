"""Prepared folders; tests/test_prepare.py has the round trips of text."""

import json

import pytest

from maxlp.data.readers import array_record
from maxlp.data.readers.array_record import pack_example, unpack_example
from maxlp.data.sources import make_source, open_source, parse_spec
from maxlp.prepare import prepare_image_text, prepare_text
from tests.data.corpora import (
    TEXTS,
    as_str,
    few_open_files,
    picture,
    texts_of,
    write_files,
    write_jsonl,
    write_pictures,
)


def open_images(folder):
    return open_source(parse_spec(f"array_record:{folder}", "all", "image_text"))


def test_an_example_is_packed_without_loss():
    example = {"image": b"\x00\xff", "text": "漢字", "label": -1, "where": "a.tar: 7"}
    assert unpack_example(pack_example(**example)) == example
    assert unpack_example(pack_example(b"", None, 3, "")) == dict(image=b"", text=None, label=3, where="")


def test_an_image_without_a_caption_is_prepared_as_it_is(tmp_path):
    captions = {"1": "one", "2": None}
    files = [
        file
        for name, text in captions.items()
        for file in ((f"{name}.png", picture(9)), (f"{name}.json", json.dumps({"alt": text}).encode()))
    ]
    spec = f"tar:{write_files(tmp_path / 'a.tar', files)}?text=json:alt"
    prepare_image_text(spec, str(tmp_path / "out"))
    prepared = open_images(tmp_path / "out")
    assert [prepared[i]["text"] for i in range(2)] == ["one", None]


def test_an_example_that_cannot_be_read_is_left_out(tmp_path):
    captions = (b"one", b"caf\xe9", b"two")
    files = [(f"{n}.{k}", v) for n, c in enumerate(captions) for k, v in (("png", picture(9)), ("txt", c))]
    made = prepare_image_text(f"tar:{write_files(tmp_path / 'a.tar', files)}", str(tmp_path / "out"))
    assert (made["documents"], made["broken_examples"], made["split"]) == (2, 1, "all")
    prepared = open_images(tmp_path / "out")
    assert [prepared[i]["text"] for i in range(2)] == ["one", "two"]
    spec = f"tar:{write_files(tmp_path / 'b.tar', files[2:4])}"
    with pytest.raises(ValueError, match=r"b.tar': no readable image in 1 example$"):
        prepare_image_text(spec, str(tmp_path / "none"))


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


@pytest.mark.parametrize("content", ["text", "tokens", "image_text"])
def test_a_manifest_of_another_shape_is_refused(tmp_path, content):
    output = tmp_path / "out"
    if content == "image_text":
        prepare_image_text(write_pictures(tmp_path / "a.tar", 3), str(output))
    else:
        corpus, tokenizer = write_jsonl(tmp_path / "a.jsonl", TEXTS), "bytes" if content == "tokens" else ""
        prepare_text(f"jsonl:{corpus}", str(output), shards=2, tokenizer=tokenizer)
    file = output / "dataset.json"
    manifest = json.loads(file.read_text())
    kind = "image_text" if content == "image_text" else "text"
    values = (None, 3, "text", [], {}, [3], [{}], {"file": 3}, -1)
    nested = {key: value for key, value in manifest.items() if isinstance(value, dict)}
    damaged = [*values, *({**manifest, key: value} for key in manifest for value in values)]
    damaged += [
        {**manifest, key: {**inner, name: value}}
        for key, inner in nested.items() for name in inner for value in values
    ]  # fmt: skip
    shard = manifest["shards"][0]
    damaged += [{**manifest, "shards": [{**shard, key: value}]} for key in shard for value in values]
    damaged.append({**manifest, "shards": [{**shard, "file": f"../out/{shard['file']}"}]})
    refused = 0
    for each in damaged:
        file.write_text(json.dumps(each))
        try:
            source = open_source(parse_spec(f"array_record:{output}", "all", kind))
            _ = source[0], source.fingerprint, source.where(0)
        except ValueError as error:
            refused += 1
            assert str(output) in str(error) and "\n" not in str(error)
    assert refused > len(damaged) / 3, "the others change what is not read"


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


def test_more_shards_are_read_than_files_may_be_open(tmp_path, monkeypatch):
    corpus = write_jsonl(tmp_path / "a.jsonl", 2 * TEXTS)
    prepare_text(f"jsonl:{corpus}", str(tmp_path / "out"), shards=2 * len(TEXTS))
    spec = f"array_record:{tmp_path}/out"
    with few_open_files():
        assert as_str(texts_of(make_source(spec, "all"))) == [text for text in 2 * TEXTS if text]
    monkeypatch.setattr(array_record, "allow_open_files", lambda: None)
    with few_open_files(), pytest.raises(OSError, match=r"Too many open files: .*out"):
        list(make_source(spec, "all"))


def test_counts_and_files_of_another_preparation_are_refused_at_once(tmp_path):
    prepare_image_text(write_pictures(tmp_path / "a.tar", 6), str(tmp_path / "out"), shards=2)
    file = tmp_path / "out" / "dataset.json"
    manifest = json.loads(file.read_text())
    manifest["shards"][0]["documents"] = 4
    file.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"dataset.json is damaged \(its shards have 7 documents, not 6\)"):
        open_images(tmp_path / "out")
    manifest["shards"][0]["documents"] = 3
    file.write_text(json.dumps(manifest))
    open_images(tmp_path / "out")
    shard = tmp_path / "out" / manifest["shards"][0]["file"]
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(ValueError, match=r"out'?: .*cannot be read .*; prepare the data again"):
        open_images(tmp_path / "out")
