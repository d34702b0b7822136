"""What a global batch must not depend on, broken examples, captions and CLIP's tokenizer."""

import gzip
import html
import io
import itertools
import json
import pickle
import re
import sys
import tarfile
import types
import unicodedata

import numpy as np
import pytest
from PIL import Image

from maxlp import prepare
from maxlp.data import DATA, image_text, merge_states
from maxlp.data.sources import make_source
from maxlp.data.tokenizer import make_tokenizer

SMALL = dict(text_len=16, image_size=8, batch_size=8, num_threads=2)


def make(split="train", **kwargs):
    return DATA["image_text"](split=split, **(SMALL | kwargs))


def take(dataset_or_iterator, steps=None):
    iterator = iter(dataset_or_iterator)
    batches = list(itertools.islice(iterator, steps))
    iterator.close()
    return batches


def assert_same(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            np.testing.assert_array_equal(ours[key], value, err_msg=key)
            assert ours[key].dtype == value.dtype


def write_tar(path, count, broken=()):
    """Pictures of one colour, which is their number; those of `broken` are cut short or no pictures."""
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            file = io.BytesIO()
            Image.new("RGB", (20, 16), (number, 0, 0)).save(file, "PNG")
            data = file.getvalue()
            if number in broken:
                data = data[:50] if number % 2 else b"not a picture"
            for kind, content in ("png", data), ("txt", f"number {number}".encode()):
                member = tarfile.TarInfo(f"{number:03d}.{kind}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return f"tar:{path}?split=all"


def numbers(batch):
    """Which pictures of `write_tar` a batch has, -1 where the mask is false; captions must agree."""
    found = batch["image"][:, 4, 4, 0].astype(int)
    for number, ids in zip(found, batch["text"], strict=True):
        text = bytes(int(i) for i in ids if i < 256).decode()
        assert text in (f"number {number}", "")
    return np.where(batch["mask"], found, -1).tolist() if "mask" in batch else found.tolist()


# --- order ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole():
    """Two and a half epochs of glyphs, 79 batches each."""
    return take(make(), 200)


@pytest.mark.parametrize("step", [0, 1, 78, 79, 130])
def test_resume_is_exact(whole, step):
    iterator = iter(make())
    for _ in range(step):
        next(iterator)
    state = json.loads(json.dumps(merge_states([iterator.get_state()])))
    expected = next(iterator)
    assert_same([expected], [whole[step]])
    iterator.close()
    other = iter(make())
    next(other)  # a state replaces whatever was before
    other.set_state(state)
    assert_same(list(itertools.islice(other, 3)), whole[step : step + 3])
    assert other.get_state()["step"] == step + 3
    other.close()


@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_one_order(whole, count):
    parts = [take(make(process_index=index, process_count=count), 5) for index in range(count)]
    joined = [
        {key: np.concatenate([part[key] for part in step]) for key in step[0]}
        for step in zip(*parts, strict=True)
    ]
    assert_same(joined, whole[:5])


def test_resume_with_other_processes_and_chunks(whole, monkeypatch):
    iterators = [iter(make(process_index=index, process_count=2)) for index in range(2)]
    for iterator in iterators:
        list(itertools.islice(iterator, 6))
    state = merge_states([iterator.get_state() for iterator in iterators])
    monkeypatch.setattr(image_text, "CHUNK_ROWS", 3)
    alone = iter(make())
    alone.set_state(state)
    assert_same(list(itertools.islice(alone, 3)), whole[6:9])
    for iterator in [*iterators, alone]:
        iterator.close()


def test_worker_processes_change_nothing(whole):
    iterator = iter(make(num_workers=2))
    assert_same(list(itertools.islice(iterator, 3)), whole[:3])
    state = iterator.get_state()
    iterator.set_state(state)
    assert_same(list(itertools.islice(iterator, 2)), whole[3:5])
    iterator.close()


def test_epochs_are_permutations_without_twins(whole):
    texts = [[ids.tobytes() for ids in batch["text"]] for batch in take(make(text_len=64), 158)]
    epochs = [[text for batch in part for text in batch] for part in (texts[:79], texts[79:])]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) == 79 * 8
    assert epochs[0] != epochs[1] and len(set(epochs[0]) ^ set(epochs[1])) > 0
    assert len({batch["image"].tobytes() for batch in whole}) == 200
    assert any(
        (a["image"] != b["image"]).any() for a, b in zip(whole[:3], take(make(seed=1), 3), strict=True)
    )


def test_epochs_end(tmp_path):
    spec = write_tar(tmp_path / "a.tar", 19)
    batches = take(make(source=spec, num_epochs=3, crop_scale=(1.0, 1.0)))
    assert len(batches) == 3 * 2


@pytest.mark.parametrize("count", [1, 2])
def test_held_out_has_each_example_once(tmp_path, count):
    spec = write_tar(tmp_path / "a.tar", 19)
    parts = [
        take(make("heldout", heldout_source=spec, process_index=index, process_count=count))
        for index in range(count)
    ]
    joined = [[n for part in step for n in numbers(part)] for step in zip(*parts, strict=True)]
    assert joined == [list(range(8)), list(range(8, 16)), [16, 17, 18] + [-1] * 5]


def test_records_of_a_source_are_held_out(tmp_path):
    spec = write_tar(tmp_path / "a.tar", 40).replace("split=all", "heldout=0.1")
    train = {n for batch in take(make(source=spec, batch_size=4), 9) for n in numbers(batch)}
    heldout = {n for batch in take(make("heldout", source=spec, batch_size=4)) for n in numbers(batch)}
    assert heldout == {9, 19, 29, 39} and train == set(range(40)) - heldout


def test_state_of_other_data_is_refused():
    state = iter(make()).get_state()
    with pytest.raises(ValueError, match="data state was saved with batch_size=8, now batch_size=4"):
        iter(make(batch_size=4)).set_state(state)


# --- broken examples ------------------------------------------------------------------------------


def test_broken_examples_are_replaced_and_counted(tmp_path):
    broken = {3, 4, 11}
    spec = write_tar(tmp_path / "a.tar", 24, broken)
    whole = iter(make(source=spec))
    assert whole.metrics() == {}
    batches = list(itertools.islice(whole, 6))
    found = [numbers(batch) for batch in batches]
    for batch in found:  # in place of a broken one comes another of its epoch, never one of its batch
        assert not broken & set(batch) and len(set(batch)) == 8
    assert whole.metrics() == {"data/skipped": 3}

    for count in (1, 2):
        iterators = [iter(make(source=spec, process_index=i, process_count=count)) for i in range(count)]
        parts = [list(itertools.islice(iterator, 3)) for iterator in iterators]
        assert [[n for part in step for n in numbers(part)] for step in zip(*parts, strict=True)] == found[
            :3
        ]
        state = json.loads(json.dumps(merge_states([iterator.get_state() for iterator in iterators])))
        resumed = iter(make(source=spec))
        resumed.set_state(state)
        assert resumed.metrics() == {"data/skipped": 3}
        assert_same(list(itertools.islice(resumed, 3)), batches[3:])
        assert resumed.metrics() == {"data/skipped": 3}, "known ones are not counted again"
        for iterator in [*iterators, resumed]:
            iterator.close()
    whole.close()


def test_broken_examples_are_masked_in_evaluation(tmp_path):
    spec = write_tar(tmp_path / "a.tar", 10, {3, 4})
    found = [numbers(batch) for batch in take(make("heldout", heldout_source=spec))]
    assert found == [[0, 1, 2, -1, -1, 5, 6, 7], [8, 9] + [-1] * 6]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_too_many_broken_examples_stop_the_run(tmp_path, split):
    spec = write_tar(tmp_path / "a.tar", 24, {3, 4, 11})
    iterator = iter(make(split, source=spec, max_broken=2))
    message = (
        r"max_broken=2 examples are broken, the last of them .*a\.tar: 0(03|04|11): .*raise max_broken"
    )
    with pytest.raises(ValueError, match=message) as error:
        list(itertools.islice(iterator, 6))
    assert "\n" not in str(error.value)
    iterator.close()


def test_large_images_are_broken(tmp_path):
    spec = write_tar(tmp_path / "a.tar", 24)
    with pytest.raises(ValueError, match="20 × 16 pixels are more than max_pixels=300"):
        take(make(source=spec, max_pixels=300, max_broken=3), 1)


# --- sources --------------------------------------------------------------------------------------


def test_digits(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        make(source="digits")
    folder = tmp_path / "sklearn" / "datasets" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "sklearn" / "__init__.py").touch()
    rows = np.random.default_rng(0).integers(0, 17, (50, 64))
    with gzip.open(folder / "digits.csv.gz", "wt") as file:
        file.writelines(",".join(f"{v}.0" for v in row) + f",{i % 10}.0\n" for i, row in enumerate(rows))
    monkeypatch.delitem(sys.modules, "sklearn")
    monkeypatch.syspath_prepend(tmp_path)
    heldout = make("heldout", source="digits", text_len=40)
    batches = take(heldout)
    assert sum(batch["mask"].sum() for batch in batches) == 10
    assert batches[0]["label"].tolist() == [i % 10 for i in range(4, 44, 5)]
    np.testing.assert_array_equal(batches[0]["image"][0, ..., 1], (255 - rows[4] * 255 // 16).reshape(8, 8))
    classes, templates = heldout.classes, heldout.templates
    np.testing.assert_array_equal(
        batches[0]["text"][0], heldout.encode([templates[0].format(classes[4])])[0]
    )
    train = take(make(source="digits", text_len=40), 5)
    texts = {bytes(int(i) for i in ids if i < 256).decode() for batch in train for ids in batch["text"]}
    assert (
        texts <= {template.format(name) for template in templates for name in classes} and len(texts) > 15
    )


def test_class_names_and_templates(tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\n")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(6):
            file = io.BytesIO()
            Image.new("L", (8, 8), number).save(file, "PNG")
            for kind, data in ("png", file.getvalue()), ("cls", str(number % 3).encode()):
                member = tarfile.TarInfo(f"{number}.{kind}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    data = make(
        "heldout",
        heldout_source=f"tar:{tmp_path}/a.tar?split=all",
        classes=str(names),
        templates=("one {}", "{}!"),
    )
    (batch,) = take(data)
    assert batch["label"].tolist()[:6] == [0, 1, -1, 0, 1, -1], "label 2 is none of the two classes"
    assert batch["mask"].tolist() == [True, True, False, True, True, False, False, False]
    np.testing.assert_array_equal(batch["text"][:2], data.encode(["one cat", "one dog"]))
    assert data.templates == ["one {}", "{}!"]
    with pytest.raises(ValueError, match="no caption, and its label"):
        take(make(source=f"tar:{tmp_path}/a.tar?split=all", batch_size=2, max_broken=3))
    with pytest.raises(
        ValueError, match=f"^classes='{tmp_path}/no.txt' cannot be read .*; give a text file"
    ):
        make(source=f"tar:{tmp_path}/a.tar?split=all", classes=str(tmp_path / "no.txt"))


def test_prepared_records_are_what_they_were(tmp_path):
    spec = write_tar(tmp_path / "a.tar", 20, {4})
    prepare.prepare_image_text(spec.partition("?")[0], str(tmp_path / "out"), split="all", shards=3)
    prepared = f"array_record:{tmp_path / 'out'}?split=all"
    kwargs = dict(batch_size=4, crop_scale=(1.0, 1.0))
    assert_same(take(make(source=prepared, **kwargs), 8), take(make(source=spec, **kwargs), 8))
    with pytest.raises(ValueError, match=r"record 4, from .*a\.tar: 004"):
        take(make("heldout", heldout_source=prepared, max_broken=0))
    with pytest.raises(ValueError, match="maxlp-image-text-1"):
        make_source(f"array_record:{tmp_path / 'out'}")
    path = tmp_path / "out" / "00002-of-00003.array_record"
    data = path.read_bytes()
    path.write_bytes(data[:300] + bytes(40) + data[340:])
    with pytest.raises(ValueError, match=r"out: record 1\d: it cannot be read \(Corrupted"):
        take(make("heldout", heldout_source=prepared, max_broken=1))


def test_tfds(monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    file = io.BytesIO()
    Image.new("L", (8, 8), 77).save(file, "PNG")

    class Examples(list):
        dataset_info = types.SimpleNamespace(
            features={"image": None, "label": types.SimpleNamespace(names=["zero", "one"])}
        )

    def data_source(name, split, decoders, **_):
        assert (name, split) == ("mnist", "validation") and "image" in decoders
        return Examples({"image": file.getvalue(), "label": np.int64(i % 2)} for i in range(3))

    monkeypatch.setattr(tfds, "data_source", data_source)
    (batch,) = take(make("heldout", source="tfds:mnist"))
    assert batch["label"][:3].tolist() == [0, 1, 0] and (batch["image"][:3] == 77).all()
    with pytest.raises(ValueError, match="no feature 'caption', found: image, label"):
        make("heldout", source="tfds:mnist?text_key=caption")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(source="wds:x.tar"), "unknown kind 'wds'; known: glyphs, digits, tar"),
        (dict(source="tar"), "source 'tar' lacks what to read; write 'tar:PATH'"),
        (dict(source="digits:x"), "digits takes no path; for one there are tar, array_record, tfds"),
        (dict(source="glyphs?colour=red"), "unknown option 'colour'; glyphs takes characters"),
        (dict(source="glyphs?heldout_characters=lots"), "heldout_characters='lots' is not a number"),
        (dict(source="glyphs?heldout=fonts"), "heldout='fonts' is unknown"),
        (dict(batch_size=4096), "batch_size=4096 is more than the 637 examples of source='glyphs'"),
        (dict(batch_size=6, process_count=4), "batch_size=6 must be a positive multiple of the 4"),
        (dict(crop_scale=(0.5, 0.2)), "crop_scale=\\(0.5, 0.2\\) must be two ascending"),
        (dict(templates=("no place",)), "must each have a {} for the class"),
        (dict(split="test"), "split='test' is unknown"),
    ],
)
def test_mistakes_are_one_line(kwargs, message):
    with pytest.raises(ValueError, match=message) as error:
        make(**kwargs)
    assert "\n" not in str(error.value)


# --- texts ----------------------------------------------------------------------------------------


def test_texts_keep_their_end():
    data = make(text_len=6)
    assert data.encode(["ab", "abcdefgh", ""]).tolist() == [
        [256, 97, 98, 257, 258, 258],
        [256, 97, 98, 99, 100, 257],
        [256, 257, 258, 258, 258, 258],
    ]


def test_texts_that_are_cut_are_counted_and_told_once(tmp_path, monkeypatch):
    spec = write_tar(tmp_path / "a.tar", 16)  # "number 0" to "number 15": six have nine bytes, not eight
    told = []
    monkeypatch.setattr(image_text.logging, "warning", lambda text, *values: told.append(text % values))
    for text_len, share in (10, 6 / 16), (11, 0):
        iterator = iter(make(source=spec, text_len=text_len))
        for _ in range(2):  # epochs
            list(itertools.islice(iterator, 2))
            assert iterator.metrics() == ({"data/texts_cut": share} if share else {})
        iterator.close()
    assert len(told) == 1 and "of 8 texts are longer than text_len=10 tokens" in told[0]


def test_captions_for_a_tokenizer(tmp_path):
    names = list(image_text.captions("glyphs"))
    assert names == make().classes
    spec = write_tar(tmp_path / "a.tar", 5)
    assert list(image_text.captions(spec)) == [f"number {i}" for i in range(5)]


def stand_in_of_bytes():
    """GPT-2's characters for bytes, in the order of CLIP's vocabulary."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(rest)}


def slow_clip(text, merges):
    """Ids by CLIP's rules, a merge at a time."""
    stand_in = stand_in_of_bytes()
    units = [*stand_in.values()]
    ids = {unit: i for i, unit in enumerate([*units, *(u + "</w>" for u in units), *map("".join, merges)])}
    text = re.sub(r"\s+", " ", html.unescape(html.unescape(text))).lower()
    words = re.findall(
        r"'s|'t|'re|'ve|'m|'ll|'d|[^\W\d_]+|\d|(?:[^\s\w]|_)+", unicodedata.normalize("NFC", text)
    )
    result = []
    for word in words:
        parts = [stand_in[byte] for byte in word.encode()]
        parts[-1] += "</w>"
        for first, second in merges:  # in the order of their rank
            at = 0
            while at + 1 < len(parts):
                if (parts[at], parts[at + 1]) == (first, second):
                    parts[at : at + 2] = [first + second]
                at += 1
        result += [ids[part] for part in parts]
    return result


def test_clip_tokenizer_equals_a_slow_one(tmp_path):
    merges = "i n|t h|a n|th e</w>|in g</w>|an d</w>|l e|c a|ca t</w>|' s</w>|e r|er s</w>|Ã ©</w>|2 0"
    merges = [tuple(pair.split()) for pair in merges.split("|")]
    path = tmp_path / "bpe_simple_vocab_16e6.txt.gz"
    path.write_bytes(gzip.compress(("#version: 0.2\n" + "\n".join(map(" ".join, merges)) + "\n").encode()))
    tok = make_tokenizer(str(path))
    for text in [
        "The  cat's\n\tsinging and THE CATS",
        "a photo of 2020 things, isn't it?!  &amp;lt;b&amp;gt; &quot;café&quot;",
        "e\u0301té 漢字 🎉 ½ x_y <|endoftext|>",
        "",
    ]:
        assert tok.encode(text).tolist() == slow_clip(text, merges), text
    assert (tok.bos_id, tok.eos_id) == (
        512 + len(merges),
        513 + len(merges),
    ) and tok.vocab_size == 514 + len(merges)
    # The run's own copy and a worker's are the same tokenizer.
    (tmp_path / "tokenizer.json").write_bytes(tok.files["tokenizer.json"])
    for other in (make_tokenizer(str(tmp_path / "tokenizer.json")), pickle.loads(pickle.dumps(tok))):
        assert other.fingerprint == tok.fingerprint and type(other) is type(tok)
        assert other.encode("The cat&#39;s").tolist() == slow_clip("the cat's", merges)
    assert make_tokenizer(f"{path}?pad=!").pad_id == 0
    (tmp_path / "bad.txt.gz").write_bytes(b"\x1f\x8bnot gzip")
    with pytest.raises(ValueError, match=r"bad\.txt\.gz: not a list of merges"):
        make_tokenizer(str(tmp_path / "bad.txt.gz"))
