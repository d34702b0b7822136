import json
import os
import pickle
import subprocess
import sys
import zlib

import numpy as np
import pytest

from maxlp.data import sources
from maxlp.data.sources import make_source, sample_texts, split_options

TEXTS = ["first\nline", "", "zweite Zeile: äöü 漢字 🎉", 'tab\tand \\ and "quotes"', "x" * 3000] * 9


def texts_of(source):
    return [source[i]["text"] for i in range(len(source))]


def as_str(texts):
    return [text.decode() if isinstance(text, bytes) else text for text in texts]


def write_jsonl(path, texts, key="text"):
    path.write_text("".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts))
    return path


def write_parquet(path, texts, key="text", rows=4):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"id": list(range(len(texts))), key: texts})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)
    return path


def write_tfds(folder, texts):
    import tensorflow_datasets as tfds

    with tfds.core.registered.skip_registration():  # found by its files, as in another process

        class ToyText(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("1.0.0")

            def _info(self):
                features = tfds.features.FeaturesDict({"body": tfds.features.Text()})
                return tfds.core.DatasetInfo(builder=self, features=features)

            def _split_generators(self, dl_manager):
                return {"train": self._generate_examples(), "validation": self._generate_examples()}

            def _generate_examples(self):
                for i, text in enumerate(texts):
                    yield i, {"body": text}

    ToyText(data_dir=str(folder), file_format="array_record").download_and_prepare()


# --- round trips ----------------------------------------------------------------------------------


def test_text_files_are_read_byte_for_byte(tmp_path):
    contents = {f"{i % 3}/{i:02d}.txt": bytes([i, 255, 10, 13]) * i for i in range(20)}
    for name, data in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "0/other.md").write_text("no")
    expected = [contents[name] for name in sorted(contents)]
    assert texts_of(make_source(f"text:{tmp_path}/**/*.txt", "all")) == expected
    os.remove(tmp_path / "0/other.md")
    assert texts_of(make_source(f"text:{tmp_path}", "all")) == expected


def test_jsonl_round_trip(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:20], key="content")
    second = write_jsonl(tmp_path / "b.jsonl", TEXTS[20:], key="content")
    second.write_bytes(b"\n\r\n" + second.read_bytes().rstrip(b"\n"))  # blank lines, no last newline
    for spec in (f"jsonl:{tmp_path}", f"jsonl:{tmp_path}/?.jsonl"):
        assert texts_of(make_source(spec + "?text_key=content", "all")) == TEXTS


def test_jsonl_lines_are_found_across_blocks(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 7)
    assert texts_of(make_source(f"jsonl:{path}", "all")) == TEXTS


def test_parquet_round_trip_in_any_order(tmp_path):
    write_parquet(tmp_path / "a.parquet", TEXTS[:21])
    write_parquet(tmp_path / "b.parquet", [], rows=5)
    write_parquet(tmp_path / "c.parquet", TEXTS[21:], rows=7)
    source = make_source(f"parquet:{tmp_path}", "all")
    order = np.random.default_rng(0).permutation(len(TEXTS))
    assert [source[i]["text"] for i in order] == [TEXTS[i] for i in order]


def test_tfds_round_trip(tmp_path):
    write_tfds(tmp_path, TEXTS)
    spec = f"tfds:toy_text?text_key=body&data_dir={tmp_path}"
    expected = sorted(TEXTS)  # TFDS shuffles when it writes
    for split in ("train", "heldout"):
        assert sorted(as_str(texts_of(make_source(spec, split)))) == expected
    assert len(make_source(spec + "&split=train[:20%]+validation[:40%]")) == 9 + 18


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "tfds"])
def test_sources_pickle_and_read_the_same_in_another_process(tmp_path, kind):
    if kind == "text":
        for i, text in enumerate(TEXTS):
            (tmp_path / f"{i:03d}").write_text(text)
        spec = f"text:{tmp_path}"
    elif kind == "jsonl":
        spec = f"jsonl:{write_jsonl(tmp_path / 'a.jsonl', TEXTS)}"
    elif kind == "parquet":
        spec = f"parquet:{write_parquet(tmp_path / 'a.parquet', TEXTS)}"
    else:
        write_tfds(tmp_path, TEXTS)
        spec = f"tfds:toy_text?text_key=body&data_dir={tmp_path}"
    source = make_source(spec, "train")
    source[0]  # opens what is opened lazily
    other = subprocess.run(
        [sys.executable, "-c", "import pickle, sys; s = pickle.load(sys.stdin.buffer);"
         "print(repr(s), [s[i] for i in range(len(s))])"],
        input=pickle.dumps(source), capture_output=True, check=True,
    )  # fmt: skip
    assert other.stdout.decode().strip() == f"{source!r} {[source[i] for i in range(len(source))]}"


def test_reads_from_many_threads_agree(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    for source in (
        make_source(f"parquet:{write_parquet(tmp_path / 'a.parquet', TEXTS, rows=2)}", "all"),
        make_source(f"jsonl:{write_jsonl(tmp_path / 'a.jsonl', TEXTS)}", "all"),
    ):
        with ThreadPoolExecutor(8) as pool:
            order = np.random.default_rng(0).permutation(len(TEXTS) * 20) % len(TEXTS)
            assert list(pool.map(lambda i, s=source: s[i]["text"], order)) == [TEXTS[i] for i in order]


# --- splits ---------------------------------------------------------------------------------------


def test_stdlib_split_is_disjoint_stable_and_complete():
    train, heldout = make_source("stdlib", "train"), make_source("stdlib", "heldout")
    everything = make_source("stdlib", "all").records.names
    train_names, heldout_names = train.records.names, heldout.records.names
    assert not set(train_names) & set(heldout_names)
    assert sorted(train_names + heldout_names) == everything == sorted(everything)
    assert all(zlib.crc32(name.encode()) / 2**32 < 0.02 for name in heldout_names)
    assert 0.005 < len(heldout) / len(everything) < 0.05
    assert "typing.py" in everything and "json/decoder.py" in everything
    assert not [name for name in everything if "site-packages" in name or not name.endswith(".py")]
    assert all(document["text"].decode() for document in heldout)


def test_text_split_does_not_depend_on_the_folder(tmp_path):
    splits = []
    for folder in ("one", "another/place"):
        root = tmp_path / folder
        (root / "sub").mkdir(parents=True)
        for i in range(60):
            (root / "sub" / f"{i}.txt").write_text(str(i))
        for spec in (f"text:{root}?heldout=0.3", f"text:{root}/**/*.txt?heldout=0.3"):
            splits.append([texts_of(make_source(spec, split)) for split in ("train", "heldout")])
    assert all(each == splits[0] for each in splits)
    assert sorted(splits[0][0] + splits[0][1]) == sorted(str(i).encode() for i in range(60))
    assert 5 < len(splits[0][1]) < 35


@pytest.mark.parametrize(("heldout", "every"), [(0.02, 50), (0.1, 10), (0.5, 2)])
@pytest.mark.parametrize("total", [50, 99, 100, 101])
def test_record_split_takes_every_record_once(tmp_path, heldout, every, total):
    path = write_jsonl(tmp_path / "a.jsonl", [str(i) for i in range(total)])
    train, held = (
        texts_of(make_source(f"jsonl:{path}?heldout={heldout}", split)) for split in ("train", "heldout")
    )
    assert held == [str(i) for i in range(total) if i % every == every - 1]
    assert train == [str(i) for i in range(total) if i % every != every - 1]


def test_split_in_the_spec_comes_first(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert texts_of(make_source(f"jsonl:{path}?split=all", "heldout")) == TEXTS
    assert len(make_source(f"jsonl:{path}?heldout=0", "train")) == len(TEXTS)


# --- specs, mixtures, samples ---------------------------------------------------------------------


def test_split_options_leaves_globs_alone():
    assert split_options("text:/a/?.txt") == ("text:/a/?.txt", {})
    assert split_options("a/?b/*?x=1&y=a=b") == ("a/?b/*", {"x": "1", "y": "a=b"})
    assert split_options("tfds:c4?split=train[:9%]+test") == (
        "tfds:c4",
        {"split": "train[:9%]+test"},
    )


def test_mixture_from_string_and_mapping(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS, key="body")
    spec = f"stdlib?weight=1; jsonl:{path}?text_key=body&weight=3"
    for mixture in (
        make_source(spec, "train"),
        make_source({"stdlib": 0.5, f"jsonl:{path}?text_key=body": 1.5}, "train"),
    ):
        assert mixture.weights == (0.25, 0.75)
        assert [len(source) for source in mixture.sources] == [
            len(make_source("stdlib", "train")),
            len(TEXTS),
        ]


def test_grain_reads_a_source(tmp_path):
    import grain

    source = make_source(f"jsonl:{write_jsonl(tmp_path / 'a.jsonl', TEXTS)}", "all")
    dataset = grain.MapDataset.source(source).seed(1).shuffle().to_iter_dataset()
    assert sorted(each["text"] for each in dataset) == sorted(TEXTS)
    assert [each["text"] for each in source] == TEXTS  # plain iteration ends too


def test_sample_is_deterministic_and_of_the_size_asked():
    source = make_source("stdlib", "train")
    first, again, other = (b"".join(sample_texts(source, 300_000, seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert len(first) == len(other) == 300_000
    mixture = make_source("stdlib?weight=3;stdlib?heldout=0.5&weight=1", "train")
    assert len(b"".join(sample_texts(mixture, 400_000, 0))) == 400_000


def test_sample_takes_everything_of_a_small_corpus_once(tmp_path):
    contents = [b"a" * 123_456 + b"b" * 7, b"c" * 10_000, b"d" * 10_001, b""]
    for i, data in enumerate(contents):
        (tmp_path / str(i)).write_bytes(data)
    pieces = list(sample_texts(make_source(f"text:{tmp_path}", "all"), 10**9, 0))
    assert sorted(b"".join(pieces)) == sorted(b"".join(contents))
    assert max(map(len, pieces[:4])) == 10_000


# --- errors ---------------------------------------------------------------------------------------


def error_of(spec, split="train", index=None):
    with pytest.raises(ValueError) as caught:
        source = make_source(spec, split)
        if index is not None:
            source[index]
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", ["stdlib"]),
        ("json:/x", ["'json'", "stdlib, text, jsonl, parquet, array_record, tfds"]),
        ("/data/x.txt", ["unknown kind '/data/x.txt'"]),
        ("jsonl:", ["jsonl:PATH"]),
        ("stdlib:/x", ["no path", "text, jsonl"]),
        ("stdlib?heldout=a", ["heldout='a'"]),
        ("stdlib?heldout=0.9", ["0 to 0.5"]),
        ("stdlib?holdout=0.1", ["'holdout'", "heldout, split, weight"]),
        ("stdlib?split=test", ["'test'", "train, heldout, all"]),
        ("stdlib?weight=-1", ["-1"]),
        ("jsonl:/nowhere/a.jsonl", ["/nowhere/a.jsonl"]),
        ("text:/nowhere/*.txt", ["/nowhere/*.txt"]),
        ("tfds:no_such_dataset", ["no_such_dataset", "tfds build"]),
        ("array_record:/nowhere", ["dataset.json"]),
    ],
)
def test_errors_are_one_line_and_name_what_is_wrong(spec, words):
    message = error_of(spec)
    assert all(word in message for word in words), message


def test_empty_folder_and_empty_split(tmp_path):
    assert str(tmp_path) in error_of(f"text:{tmp_path}")
    (tmp_path / "only.txt").write_text("x")
    assert "one document" in (told := error_of(f"text:{tmp_path}", "heldout")) and "?split=all" in told
    assert len(make_source(f"text:{tmp_path}?split=all", "heldout")) == 1
    (tmp_path / "other.txt").write_text("x")
    assert "'heldout'" in error_of(f"text:{tmp_path}?heldout=0", "heldout")
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert "'heldout'" in error_of(f"jsonl:{path}?heldout=0", "heldout")
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "none of its 0 documents" in error_of(f"jsonl:{tmp_path}/empty.jsonl")


def test_jsonl_errors_name_file_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"body": "b", "id": 1}\n{"text": 3}\n[1]\n{"text": "trunc')
    for index, line, word in ((1, 3, "body, id"), (2, 4, "int"), (3, 5, "list"), (4, 6, "JSON")):
        message = error_of(f"jsonl:{path}", "all", index)
        assert f"{path}:{line}: " in message and word in message
    write_jsonl(path, TEXTS, key="body")
    assert "text_key" in error_of(f"jsonl:{path}")  # at once, not when training reaches it


def test_parquet_errors(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", TEXTS, key="body")
    message = error_of(f"parquet:{path}")
    assert "id, body" in message and "text_key" in message
    assert "row 0" in error_of(f"parquet:{path}?text_key=id")
    path.write_bytes(path.read_bytes()[:-100])
    assert f"{path} is not a readable Parquet file" in error_of(f"parquet:{path}?text_key=body")


def test_tfds_errors(tmp_path):
    write_tfds(tmp_path, TEXTS)
    assert "found: body" in error_of(f"tfds:toy_text?data_dir={tmp_path}")
    assert "'test'" in error_of(f"tfds:toy_text?data_dir={tmp_path}&split=test")


def test_missing_libraries_are_named(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    message = error_of(f"parquet:{path}")
    assert "pyarrow" in message and "pip install 'maxlp[data]'" in message


def test_import_is_light():
    heavy = ("tensorflow", "tensorflow_datasets", "pyarrow", "tokenizers", "sentencepiece")
    code = "import sys, maxlp.data.sources, maxlp.data.tokenizer; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(heavy) & set(done.stdout.split())
