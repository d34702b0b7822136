"""Order, resuming, independence of processes and workers, broken examples, and texts."""

import dataclasses
import itertools
import json
import types

import numpy as np
import pytest

from maxlp.data import image_text, merge_states
from maxlp.data.images import Example
from tests.data.corpora import assert_same_batches, picture, write_files, write_pictures

SMALL = dict(source="glyphs", tokenizer="bytes", text_len=16, image_size=8, batch_size=8, num_threads=2)


def make(split="train", seed=0, process_index=0, process_count=1, **config):
    return image_text.make_data(
        image_text.ImageTextDataConfig(**(SMALL | config)),
        split=split,
        seed=seed,
        process_index=process_index,
        process_count=process_count,
    )


def take(dataset_or_iterator, steps=None):
    iterator = iter(dataset_or_iterator)
    batches = list(itertools.islice(iterator, steps))
    iterator.close()
    return batches


def captions(**config):
    return list(image_text.captions(image_text.ImageTextDataConfig(**(SMALL | config))))


def decoded(batch):
    return [bytes(int(i) for i in ids if i < 256).decode() for ids in batch["text"]]


def numbers(batch):
    """Which pictures of `write_pictures` a batch has, -1 where the mask is false; captions must agree."""
    found = batch["image"][:, 4, 4, 0].astype(int)
    for number, text in zip(found, decoded(batch), strict=True):
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
    assert_same_batches([expected], [whole[step]])
    iterator.close()
    other = iter(make())
    next(other)  # the state replaces the position
    other.set_state(state)
    assert_same_batches(list(itertools.islice(other, 3)), whole[step : step + 3])
    assert other.get_state()["step"] == step + 3
    other.close()


def test_billions_of_examples_in_batches_of_a_prime_number():
    class Many:
        def __len__(self):
            return 5 * 10**9

        def example(self, index, rng):
            assert 0 <= index < len(self)
            return Example(np.zeros((8, 8, 3), np.uint8), str(index), -1)

    data = dataclasses.replace(make(batch_size=37), examples=Many())
    (batch,) = take(data, 1)
    assert len(set(map(bytes, batch["text"]))) == 37


@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_one_order(whole, count):
    parts = [take(make(process_index=index, process_count=count), 5) for index in range(count)]
    joined = [
        {key: np.concatenate([part[key] for part in step]) for key in step[0]}
        for step in zip(*parts, strict=True)
    ]
    assert_same_batches(joined, whole[:5])


def test_resume_with_other_processes_and_chunks(whole, monkeypatch):
    iterators = [iter(make(process_index=index, process_count=2)) for index in range(2)]
    for iterator in iterators:
        list(itertools.islice(iterator, 6))
    state = merge_states([iterator.get_state() for iterator in iterators])
    monkeypatch.setattr(image_text, "CHUNK_ROWS", 3)
    alone = iter(make())
    alone.set_state(state)
    assert_same_batches(list(itertools.islice(alone, 3)), whole[6:9])
    for iterator in [*iterators, alone]:
        iterator.close()


def test_worker_processes_change_nothing(whole):
    iterator, resumed = iter(make(num_workers=2)), iter(make())
    assert_same_batches(list(itertools.islice(iterator, 3)), whole[:3])
    resumed.set_state(iterator.get_state())
    iterator.close()
    assert_same_batches(list(itertools.islice(resumed, 2)), whole[3:5])
    resumed.close()


def test_epochs_are_permutations_without_duplicates(whole):
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
    spec = write_pictures(tmp_path / "a.tar", 19)
    batches = take(make(source=spec, num_epochs=3, crop_scale=(1.0, 1.0)))
    assert len(batches) == 3 * 2


@pytest.mark.parametrize("count", [1, 2])
def test_validation_has_each_example_once(tmp_path, count):
    spec = write_pictures(tmp_path / "a.tar", 19)
    parts = [
        take(make("validation", validation_source=spec, process_index=index, process_count=count))
        for index in range(count)
    ]
    joined = [[n for part in step for n in numbers(part)] for step in zip(*parts, strict=True)]
    assert joined == [list(range(8)), list(range(8, 16)), [16, 17, 18] + [-1] * 5]


def test_validation_records_are_not_trained_on(tmp_path):
    spec = write_pictures(tmp_path / "a.tar", 40).replace("split=all", "validation=0.1")
    train = {n for batch in take(make(source=spec, batch_size=4), 9) for n in numbers(batch)}
    validation = {
        n for batch in take(make("validation", source=spec, batch_size=4)) for n in numbers(batch)
    }
    assert validation == {9, 19, 29, 39} and train == set(range(40)) - validation


def test_state_of_other_data_is_refused():
    state = iter(make()).get_state()
    with pytest.raises(ValueError, match=r"^data.batch_size: 8 when .*, now 4"):
        iter(make(batch_size=4)).set_state(state)


def test_another_batch_size_tells_where_the_examples_go_on(caplog):
    resumed = iter(make(batch_size=4))
    with caplog.at_level("WARNING", logger="absl"):
        resumed.set_state(iter(make()).get_state() | {"step": 5}, allow_change=True)
    assert "40 examples were read; the data continues after the first 20 in their order" in caplog.text
    assert resumed.get_state()["step"] == 5


def test_other_files_classes_or_templates_are_refused(tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\n")
    config = dict(source=write_pictures(tmp_path / "a.tar", 24), classes=str(names))
    state = iter(make(**config)).get_state()
    iter(make(**config)).set_state(state)
    changes = (
        lambda: dict(templates=("{}!",)),
        lambda: names.write_text("dog\ncat\n") and {},
        lambda: names.write_text("cat\ndog\n") and dict(source=write_pictures(tmp_path / "a.tar", 24, {3})),
    )
    for change in changes:
        other = make(**config | change())
        with pytest.raises(ValueError, match=r"^the files of data.source have changed"):
            iter(other).set_state(state)
    resumed = iter(other)
    resumed.set_state(state | {"step": 5}, allow_change=True)
    assert resumed.get_state()["step"] == 5


# --- broken examples ------------------------------------------------------------------------------


def test_broken_examples_are_replaced_and_counted(tmp_path):
    broken = {3, 4, 11}
    spec = write_pictures(tmp_path / "a.tar", 24, broken)
    whole = iter(make(source=spec))
    assert whole.metrics() == {}
    batches = list(itertools.islice(whole, 6))
    found = [numbers(batch) for batch in batches]
    for batch in found:  # a broken example is replaced by one that its batch does not contain yet
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
        assert_same_batches(list(itertools.islice(resumed, 3)), batches[3:])
        assert resumed.metrics() == {"data/skipped": 3}, "restored ones are not counted again"
        for iterator in [*iterators, resumed]:
            iterator.close()
    whole.close()


@pytest.mark.parametrize("count", [12, 24])
def test_broken_examples_that_fill_a_row_of_all_batches_are_replaced(tmp_path, count):
    spec = write_pictures(tmp_path / "a.tar", count)
    rows = [numbers(batch)[5] for batch in take(make(source=spec, batch_size=12), count // 12)]
    spec = write_pictures(tmp_path / "a.tar", count, set(rows))
    for batch in take(make(source=spec, batch_size=12, max_broken=9), count // 12):
        assert numbers(batch)[5] == numbers(batch)[6]


def test_an_example_with_neither_caption_nor_label_is_broken(tmp_path):
    files = [("1.png", picture((1, 0, 0))), ("1.json", b'{"alt": null}')]
    source = f"tar:{write_files(tmp_path / 'a.tar', files)}?text=json:alt&split=all"
    with pytest.raises(ValueError, match=r"a\.tar: 1: it has neither a caption nor a label"):
        take(make(source=source, batch_size=1, max_broken=0))


def test_broken_examples_are_masked_in_evaluation(tmp_path):
    spec = write_pictures(tmp_path / "a.tar", 10, {3, 4})
    found = [numbers(batch) for batch in take(make("validation", validation_source=spec))]
    assert found == [[0, 1, 2, -1, -1, 5, 6, 7], [8, 9] + [-1] * 6]


def test_each_process_counts_its_own_broken_examples_after_a_resume(tmp_path):
    """The limit is one for each process, so what others found before does not count."""
    spec = write_pictures(tmp_path / "a.tar", 24, {3})
    state = iter(make(source=spec)).get_state() | {"streams": {"0": [3], "1": [20, 21], "2": [22]}}
    for count in (1, 2):
        iterators = [
            iter(make(source=spec, process_index=i, process_count=count, max_broken=2))
            for i in range(count)
        ]
        for iterator in iterators:
            iterator.set_state(state)
            assert iterator.metrics() == {"data/skipped": 4}
        again = merge_states([iterator.get_state() for iterator in iterators])
        assert again["streams"] == state["streams"], "also those of a process that no longer takes part"
        if count == 1:
            list(itertools.islice(iterators[0], 3))  # an epoch, with one broken example
            assert iterators[0].metrics() == {"data/skipped": 4}
        for iterator in iterators:
            iterator.close()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_too_many_broken_examples_stop_the_run(tmp_path, split, caplog):
    spec = write_pictures(tmp_path / "a.tar", 24, {3, 4, 11})
    iterator = iter(make(split, source=spec, max_broken=2))
    message = (
        r"max_broken=2 examples are broken, the last of them .*a\.tar: 0(03|04|11): .*raise max_broken"
    )
    with pytest.raises(ValueError, match=message) as error:
        list(itertools.islice(iterator, 6))
    assert "\n" not in str(error.value)
    assert len([each for each in caplog.records if "skipped" in each.message]) == 2, "one was not skipped"
    iterator.close()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_source_that_cannot_be_used_is_refused_when_the_data_opens(tmp_path, split):
    pictures = [(f"{n}.{kind}", data) for n in range(9) for kind, data in (("jpg", b"x"), ("txt", b"a"))]
    write_files(tmp_path / "a.tar", pictures)
    labels = [
        (f"{n}.{kind}", data) for n in range(9) for kind, data in (("png", picture(n)), ("cls", b"1"))
    ]
    write_files(tmp_path / "b.tar", labels)
    for name, message in (("a", "1 bytes are not a JPEG"), ("b", "no caption, and its label 1 is not")):
        found = "data.source: no usable image in the first 9 examples of"
        with pytest.raises(ValueError, match=rf"^{found} .*{name}\.tar: 0: {message}"):
            make(split, source=f"tar:{tmp_path}/{name}.tar?split=all")


def test_large_images_are_broken(tmp_path):
    spec = write_pictures(tmp_path / "a.tar", 24)
    with pytest.raises(ValueError, match="20 × 16 pixels are more than max_pixels=300"):
        take(make(source=spec, max_pixels=300, max_broken=3), 1)


def test_broken_captions_are_left_out_for_a_tokenizer_unless_all_are(tmp_path):
    jsons = [b'{"alt": "one"}', b'{"alt": 3}', b'{"al', b'{"alt": "two"}']
    files = [
        (f"{i}.{kind}", data) for i, j in enumerate(jsons) for kind, data in (("jpg", b"1"), ("json", j))
    ]
    write_files(tmp_path / "a.tar", files)
    write_files(tmp_path / "b.tar", files[2:6])
    assert captions(source=f"tar:{tmp_path}/a.tar?text=json:alt&split=all") == ["one", "two"]
    with pytest.raises(
        ValueError, match=r"no usable caption in 2 examples of .*b.tar.*, the last of them .*b.tar: 2: "
    ):
        captions(source=f"tar:{tmp_path}/b.tar?text=json:alt&split=all")


# --- sources --------------------------------------------------------------------------------------


def test_class_names_and_templates(tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\n")
    files = [
        (f"{n}.{kind}", data)
        for n in range(6)
        for kind, data in (("png", picture(n, (8, 8), "L")), ("cls", str(n % 3).encode()))
    ]
    write_files(tmp_path / "a.tar", files)
    data = make(
        "validation",
        validation_source=f"tar:{tmp_path}/a.tar?split=all",
        classes=str(names),
        templates=("one {}", "{}!"),
    )
    (batch,) = take(data)
    assert batch["label"].tolist()[:6] == [0, 1, -1, 0, 1, -1], "label 2 is not one of the two classes"
    assert batch["mask"].tolist() == [True, True, False, True, True, False, False, False]
    np.testing.assert_array_equal(batch["text"][:2], data.encode(["one cat", "one dog"]))
    assert data.templates == ["one {}", "{}!"]
    names.write_text("cat\ndog\nbird\n", encoding="utf-8-sig")
    labelled = dict(source=f"tar:{tmp_path}/a.tar?split=all", classes=str(names), batch_size=2)
    batch = take(make("validation", **labelled, text_len=24), 1)[0]
    assert decoded(batch) == ["a photo of a cat.", "a photo of a dog."], "the default template"
    batches = take(make(**labelled, templates=("1 {}", "2 {}")), 30)
    assert {text for batch in batches for text in decoded(batch)} == {
        f"{number} {name}" for number in (1, 2) for name in ("cat", "dog", "bird")
    }
    file = tmp_path / "templates.txt"
    file.write_text("1 {}\n\n2 {}\n")
    from_file = make(**labelled, templates_file=str(file))
    assert from_file.templates == ["1 {}", "2 {}"]
    for each, expected in zip(take(from_file, 30), batches, strict=True):
        np.testing.assert_array_equal(each["text"], expected["text"])
    with pytest.raises(ValueError, match=r"^templates_file='.*' takes the place of templates; unset one"):
        make(**labelled, templates=("1 {}",), templates_file=str(file))
    file.write_text("a photo of a {}\na photo\n")
    with pytest.raises(ValueError, match=r"^templates_file='.*': 'a photo' must have one {} for the class"):
        make(**labelled, templates_file=str(file))
    with pytest.raises(ValueError, match="no caption, and its label"):
        take(make(source=f"tar:{tmp_path}/a.tar?split=all", batch_size=2, max_broken=3))
    with pytest.raises(
        ValueError, match=f"^classes='{tmp_path}/no.txt' cannot be read .*; give a text file"
    ):
        make(source=f"tar:{tmp_path}/a.tar?split=all", classes=str(tmp_path / "no.txt"))


def test_classes_of_the_same_name_are_warned_of(tmp_path, caplog):
    files = [(f"{n}.{kind}", data) for n in range(9) for kind, data in (("png", picture(n)), ("cls", b"1"))]
    source = f"tar:{write_files(tmp_path / 'a.tar', files)}?split=all"
    names = tmp_path / "names.txt"
    for lines, number in (("cat\ndog\n", 0), ("crane\ndog\ncrane\n", 1)):
        names.write_text(lines)
        make("validation", source=source, classes=str(names))
        assert len(caplog.records) == number
    assert "has 1 name more than once, such as 'crane'" in caplog.messages[0]


def test_classes_without_an_image_that_has_one_of_them_are_refused_when_the_data_opens(tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\n")
    captions = dict(source=write_pictures(tmp_path / "a.tar", 24), classes=str(names))
    make("train", **captions)
    with pytest.raises(ValueError, match=r"^data.classes='.*': none of the first 24 .* has a label among"):
        make("validation", **captions)
    labels = [
        (f"{n}.{kind}", data) for n in range(9) for kind, data in (("png", picture(n)), ("cls", b"8"))
    ]
    write_files(tmp_path / "b.tar", labels)
    with pytest.raises(ValueError, match=r"none of the first 9 .* among these 2 classes"):
        make("validation", **captions | dict(validation_source=f"tar:{tmp_path}/b.tar?split=all"))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(source="wds:x.tar"), "kind 'wds' is unknown; kinds: array_record, digits, glyphs, tar"),
        (dict(source="tar"), "source 'tar' lacks a path; write 'tar:PATH'"),
        (dict(source="tar:/nope"), "^data.source: source 'tar:/nope': no file or folder /nope"),
        (dict(source="glyphs", validation_source="nope", split="validation"), "^data.validation_source: "),
        (dict(tokenizer="/nope"), "^data.tokenizer: tokenizer '/nope': no such file"),
        (dict(source="digits:x"), "digits takes no path; kinds that do: tar, array_record, tfds"),
        (dict(source="glyphs?colour=red"), "unknown option 'colour'; glyphs takes characters"),
        (dict(source="glyphs?validation_characters=lots"), "validation_characters='lots' is not a number"),
        (dict(source="glyphs?validation=fonts"), "source 'glyphs.*validation='fonts' is unknown"),
        (dict(source="glyphs?heldout_faces=x"), "'heldout_faces' was renamed; write 'validation_faces'"),
        (
            dict(batch_size=4096),
            "^data.batch_size=4096 is more than the 637 examples of data.source='glyphs'",
        ),
        (dict(batch_size=6, process_count=4), "batch_size=6 must be a multiple of the 4"),
        (dict(crop_scale=(0.5, 0.2)), "crop_scale=\\(0.5, 0.2\\) must be ascending"),
        *((dict(templates=(text,)), "must have one {} for the") for text in ("-", "{.a}", "{[a]}", "{{}}")),
        (dict(split="test"), "split 'test' is unknown; one of train, validation"),
        (dict(text_len=2), "text_len=2 must be at least 3"),
        (dict(num_threads=0), "num_threads=0 must be between 1 and 1024"),
        (dict(max_broken=-1), "max_broken=-1 must be at least 0"),
    ],
)
def test_errors_are_one_line(kwargs, message):
    with pytest.raises(ValueError, match=message) as error:
        make(**kwargs)
    assert "\n" not in str(error.value)


# --- texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bos, rows", [(8, [[8, 1, 9, 0], [8, 1, 2, 9]]), (9, [[1, 9, 0, 0], [1, 2, 3, 9]])]
)
def test_a_text_begins_with_bos_unless_that_is_eos(bos, rows):
    """Text towers pool the first eos: in front of a text it would hide the text."""
    letters = types.SimpleNamespace(
        bos_id=bos, eos_id=9, pad_id=0, encode=lambda text: np.array([ord(c) - 96 for c in text])
    )
    ids_NS, num_cut = image_text.encode_texts(letters, ["a", "abcd"], 4)
    assert ids_NS.tolist() == rows and ids_NS.dtype == np.int32 and num_cut == 1


def test_rows_of_siglip_2_equal_those_of_its_own_tokenizer(tmp_path):
    """Lower case, no bos although the vocabulary has one, cut or padded to the length."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<pad>", "<eos>", "<bos>", "<unk>", "a", "photo", "of", "two", "cats", "and", "dogs", "red"]
    tok = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.add_special_tokens(words[:4])
    tok.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    tok.save(str(tmp_path / "tokenizer.json"))
    data = make(tokenizer=str(tmp_path / "tokenizer.json"), text_len=6, lowercase=True)
    tok.enable_truncation(6)
    tok.enable_padding(pad_id=0, length=6)
    texts = ["A photo of TWO Cats and dogs", "Red cats", ""]
    assert data.encode(texts).tolist() == [tok.encode(text.lower()).ids for text in texts]


def test_texts_keep_their_end(monkeypatch):
    data, logged = make(text_len=6), []
    monkeypatch.setattr(image_text.logging, "log_first_n", lambda *args: logged.append(args))
    data.encode(["abcd"])
    assert not logged
    assert data.encode(["ab", "abcdefgh", ""]).tolist() == [
        [256, 97, 98, 257, 258, 258],
        [256, 97, 98, 99, 100, 257],
        [256, 257, 258, 258, 258, 258],
    ]
    assert len(logged) == 1 and "prompts are longer than text_len" in logged[0][1]


def test_texts_that_are_cut_are_counted_with_one_warning(tmp_path, monkeypatch):
    spec = write_pictures(tmp_path / "a.tar", 16)  # "number 10" to "number 15" have 9 bytes
    logged = []
    monkeypatch.setattr(image_text.logging, "warning", lambda text, *args: logged.append(text % args))
    for text_len, share in (10, 6 / 16), (11, 0):
        iterator = iter(make(source=spec, text_len=text_len))
        for _ in range(2):  # epochs
            list(itertools.islice(iterator, 2))
            assert iterator.metrics() == ({"data/texts_cut": share} if share else {})
        iterator.close()
    assert len(logged) == 1 and "of 8 texts are longer than text_len=10 tokens" in logged[0]


def test_captions_for_a_tokenizer(tmp_path):
    assert captions() == make().classes
    spec = write_pictures(tmp_path / "a.tar", 5)
    assert captions(source=spec) == [f"number {i}" for i in range(5)]
    files = [
        (f"{n}.{kind}", data) for n in range(40) for kind, data in (("png", b""), ("cls", b"%d" % (n % 3)))
    ]
    files += [("40.png", b""), ("40.txt", b"its own")]
    spec = f"tar:{write_files(tmp_path / 'b.tar', files)}?split=all"
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\n")
    found = captions(source=spec, classes=str(names), templates=("one {}", "two {}"))
    assert len(found) == 28, "label 2 is not one of the two classes"
    assert set(found) == {"one cat", "two cat", "one dog", "two dog", "its own"}


@pytest.mark.parametrize(("split", "other"), [("train", "eval_crop"), ("validation", "random_crop")])
def test_only_training_images_are_cropped_at_random(split, other, tmp_path, monkeypatch):
    spec = write_pictures(tmp_path / "a.tar", 8, set())
    data = make(split, source=spec, validation_source=spec)
    monkeypatch.setattr(image_text.images, other, lambda *_, **__: pytest.fail(other))
    assert len(take(data, 1)) == 1


def test_the_start_warns_of_data_that_end_early():
    dataset = make(source="glyphs", batch_size=16, num_epochs=2)
    last = 2 * dataset.steps_per_epoch
    assert "warning" not in dataset.describe(last)
    assert f"\nwarning: data.num_epochs=2 ends the data after about {last} of " in dataset.describe(
        last + 1
    )
