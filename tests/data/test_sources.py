"""Specs, splits, mixtures, samples, and readers in other threads and processes."""

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from maxlp.data.sources import KINDS, Kind, Source, make_source, open_source, parse_spec
from maxlp.prepare import prepare_image_text, prepare_text
from tests.data.corpora import (
    TEXTS,
    error_of,
    texts_of,
    write_jsonl,
    write_parquet,
    write_pictures,
    write_tfds,
)


def open_without_a_key(spec):
    return {}["columns"]


def test_a_reader_that_lacks_a_key_is_named(monkeypatch):
    monkeypatch.setitem(KINDS, "own", Kind(f"{__name__}:open_without_a_key", ("text",)))
    message = f"source 'own:a': {__name__}:open_without_a_key fails with KeyError: 'columns' (MAXLP_TRACE"
    assert message in error_of("own:a")


def open_missing(spec):
    return open(spec.path, encoding="utf-8")


def test_a_file_that_a_reader_cannot_open_is_named_with_its_source(monkeypatch):
    monkeypatch.setitem(KINDS, "own", Kind(f"{__name__}:open_missing", ("text",)))
    with pytest.raises(FileNotFoundError) as caught:
        make_source("own:/nope.csv", "train")
    assert caught.value.filename == "source 'own:/nope.csv': /nope.csv"


def open_tokens(spec):
    return Source(spec, [{"tokens": np.arange(5, dtype=np.uint16)}])


def test_a_reader_of_tokens_says_of_which_tokenizer(monkeypatch):
    """Ids beyond the vocabulary would have no embedding, and the loss of the first step would be NaN."""
    monkeypatch.setitem(KINDS, "own", Kind(f"{__name__}:open_tokens", ("text",)))
    assert error_of("own:a") == (
        "source 'own:a': its records are tokens, but its reader does not say of which tokenizer; pass the "
        "argument tokenizer to Source"
    )


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.arange(5), "its tokens are int64; its reader must return uint16 or uint32, or for a conv"),
        (np.array([7, 259], np.uint16), "token 259 is not one of its tokenizer, which has 259 tokens"),
        (np.array([7, ~259], np.int32), "token 259 is not one of its tokenizer, which has 259 tokens"),
    ],
)
def test_tokens_of_another_dtype_or_vocabulary_are_refused(tokens, message, monkeypatch):
    """Signed ones would be read as a conversation; the loss of ids beyond the vocabulary is NaN."""

    def open_own(spec):
        return Source(spec, Records([tokens[:1].astype(np.uint16), tokens]), tokenizer={"vocab_size": 259})

    monkeypatch.setattr(sys.modules[__name__], "open_tokens", open_own)
    monkeypatch.setitem(KINDS, "own", Kind(f"{__name__}:open_tokens", ("text",)))
    with pytest.raises(ValueError, match=f"^record 1: {message}"):
        _ = make_source("own:a", "train")[1]


class Records(list):
    """A reader of these tokens."""

    def __getitem__(self, row):
        return {"tokens": super().__getitem__(row)}

    def where(self, row):
        return f"record {row}"


REQUIRED = "its reader must use one of str, int, float, bool"


def open_column(
    spec,
    *,
    column: int = 0,
    header: bool = True,
    name: str | None = None,
    share: float = 1,
    columns: list[str] = (),
    untyped=0,
):
    raise ValueError(f"{column!r} {header!r} {name!r} {share!r}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("column=2&header=false&name=1&share=2", "2 False '1' 2.0"),
        ("column=two", "column='two' is not an integer"),
        ("header=0", "header='0' is not true or false"),
        ("share=all", "share='all' is not a number"),
        ("columns=a", f"option 'columns' has the annotation list[str]; {REQUIRED}"),
        ("untyped=1", f"option 'untyped' has the annotation <class 'inspect._empty'>; {REQUIRED}"),
    ],
)
def test_options_have_the_types_of_their_annotations(options, message, monkeypatch):
    monkeypatch.setitem(KINDS, "own", Kind(f"{__name__}:open_column", ("text",)))
    assert error_of(f"own:a?{options}") == f"source 'own:a?{options}': {message}"


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (lambda _: [], r"^paths\(\) of a data source names no file$"),
        (lambda _: {}["files"], r"^source 'stdlib .*': paths\(\) fails with KeyError\('files'\)$"),
    ],
)
def test_a_reader_without_paths_is_named(monkeypatch, paths, message):
    source = make_source("stdlib", "train")
    monkeypatch.setattr(type(source.reader), "paths", paths)
    with pytest.raises(ValueError, match=message):
        _ = source.fingerprint


def open_all(folder):
    """A source of each kind that reads files."""
    jsonl = write_jsonl(folder / "a.jsonl", TEXTS)
    parquet = write_parquet(folder / "a.parquet", TEXTS, rows=2)
    (folder / "text").mkdir()
    for i, text in enumerate(TEXTS):
        (folder / "text" / f"{i:03d}").write_text(text)
    write_tfds(folder / "tfds", TEXTS)
    prepare_text(f"jsonl:{jsonl}", f"{folder}/tokens", tokenizer="bytes", shards=3)
    images = write_pictures(folder / "a.tar", 6)
    prepare_image_text(images, f"{folder}/images", shards=2)
    texts = (
        f"jsonl:{jsonl}",
        f"parquet:{parquet}",
        f"text:{folder}/text",
        f"tfds:toy_text?text_key=body&data_dir={folder}/tfds",
        f"array_record:{folder}/tokens",
    )
    image_texts = (images, f"array_record:{folder}/images?split=all")
    sources = [make_source(spec, "train") for spec in texts]
    return sources + [open_source(parse_spec(spec, "train", "image_text")) for spec in image_texts]


def test_pickled_sources_read_the_same_in_another_process(tmp_path):
    sources = open_all(tmp_path)
    for source in sources:
        source[0]  # opens what is opened lazily
    code = (
        "import pickle, sys; sources = pickle.load(sys.stdin.buffer);"
        "print([(repr(s), [s[i] for i in range(len(s))]) for s in sources])"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(sources), capture_output=True, check=True
    )
    expected = [(repr(source), [source[i] for i in range(len(source))]) for source in sources]
    assert other.stdout.decode().strip() == str(expected)
    order = np.random.default_rng(0).permutation(len(TEXTS) * 20)
    with ThreadPoolExecutor(8) as pool:
        for source, (_, records) in zip(sources, expected, strict=True):
            rows = order % len(source)
            found = pool.map(lambda row, source=source: str(source[row]), rows)
            assert list(found) == [str(records[row]) for row in rows], repr(source)


def test_grain_reads_a_source(tmp_path):
    import grain

    source = make_source(f"jsonl:{write_jsonl(tmp_path / 'a.jsonl', TEXTS)}", "all")
    dataset = grain.MapDataset.source(source).seed(1).shuffle().to_iter_dataset()
    assert sorted(each["text"] for each in dataset) == sorted(TEXTS)
    assert [each["text"] for each in source] == TEXTS  # plain iteration ends too


# --- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "every"), [(0.02, 50), (0.1, 10), (0.5, 2)])
@pytest.mark.parametrize("total", [50, 99, 100, 101])
def test_record_split_takes_every_record_once(tmp_path, fraction, every, total):
    path = write_jsonl(tmp_path / "a.jsonl", [str(i) for i in range(total)])
    train, validation = (
        texts_of(make_source(f"jsonl:{path}?validation={fraction}", split))
        for split in ("train", "validation")
    )
    assert validation == [str(i) for i in range(total) if i % every == every - 1]
    assert train == [str(i) for i in range(total) if i % every != every - 1]


@pytest.mark.parametrize("split", ["train", "validation", "all"])
def test_there_is_no_record_outside_of_a_split(tmp_path, split):
    """The row beside its last one may be of another split."""
    path = write_jsonl(tmp_path / "a.jsonl", [str(i) for i in range(25)])
    source = open_source(parse_spec(f"jsonl:{path}?validation=0.1", split, "text"))
    for index in (-1, len(source)):
        with pytest.raises(IndexError, match=f"there is no document {index} in "):
            source[index]


def test_a_fraction_that_no_spacing_gives_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    for fraction, others in ((0.4, "0.5 or 0.333"), (0.3, "0.333 or 0.25"), (0.22, "0.25 or 0.2")):
        message = f"validation={fraction} is not 1/N, and takes every N-th record; set {others}"
        assert message in error_of(f"jsonl:{path}?validation={fraction}")


def test_a_split_in_the_spec_overrides_the_requested_one(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert texts_of(make_source(f"jsonl:{path}?split=all", "validation")) == TEXTS
    assert len(make_source(f"jsonl:{path}?validation=0", "train")) == len(TEXTS)


def test_an_empty_split_is_an_error(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert "'validation' contains none of the 45 documents" in error_of(
        f"jsonl:{path}?validation=0", "validation"
    )
    (tmp_path / "empty.jsonl").write_text("\n")
    for options in ("", "?split=all"):
        message = error_of(f"jsonl:{tmp_path}/empty.jsonl{options}")
        assert "its files hold no documents; check the path" in message


@pytest.mark.parametrize(
    ("number", "option", "fraction"),
    [(45, "?validation=0", 0.1), (3, "", 0.5), (2, "?validation=0.33", 0.5)],
)
def test_an_empty_split_names_a_fraction_that_works(tmp_path, number, option, fraction):
    path = write_jsonl(tmp_path / "a.jsonl", ["text"] * number)
    message = error_of(f"jsonl:{path}{option}", "validation")
    assert f"none of the {number} documents; set ?validation={fraction}, or ?split=all" in message
    assert all(len(make_source(f"jsonl:{path}?validation={fraction}", s)) for s in ("train", "validation"))


def test_a_single_record_cannot_be_split(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["text"])
    assert "a single document cannot be divided" in error_of(f"jsonl:{path}", "validation")


# --- mixtures and samples -------------------------------------------------------------------------


def test_mixture(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS, key="body")
    mixture = make_source(f"stdlib?weight=1; jsonl:{path}?text_key=body&weight=3", "train")
    assert mixture.weights == (0.25, 0.75)
    assert [len(source) for source in mixture.sources] == [
        len(make_source("stdlib", "train")),
        len(TEXTS),
    ]
    again = make_source(f"jsonl:{path}?text_key=body;stdlib;jsonl:{path}?text_key=body&weight=2", "train")
    assert again.weights == (0.75, 0.25)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", ["is empty; try 'stdlib'"]),
        ("json:/x", ["'json' is unknown (did you mean jsonl?); kinds: array_record, jsonl, parquet, "]),
        ("/data/x.txt", ["kind '/data/x.txt' is unknown (did you mean text?)", "write KIND:PATH"]),
        ("/data/x.jsonl", ["did you mean jsonl?"]),
        ("jsonl:", ["jsonl:PATH"]),
        ("stdlib:/x", ["no path", "text, jsonl"]),
        ("stdlib?validation=a", ["validation='a'"]),
        ("stdlib?validation=0.9", ["1e-9 to 0.5"]),
        ("stdlib?validation=1e-320", ["1e-9 to 0.5"]),
        ("stdlib?holdout=0.1", ["'holdout'", "validation, split, weight"]),
        ("stdlib?heldout=0.1", ["option 'heldout' was renamed; write 'validation'"]),
        ("stdlib?split=test", ["'test'", "train, validation, all"]),
        ("stdlib?split=heldout", ["split 'heldout' was renamed; write 'validation'"]),
        ("tfds:c4?split=heldout", ["split 'heldout' was renamed; write 'validation'"]),
        ("stdlib?weight=-1", ["'stdlib?weight=-1': weight -1"]),
        ("stdlib?weight=1e308;text:/x?weight=1e308", ["weight 1e+308 must be positive and at most 1e300"]),
        ("stdlib?weight=x", ["'stdlib?weight=x': weight='x' is not a number"]),
        ("tar:/x", ["source 'tar:/x' has no text; kinds that do: array_record, jsonl, parquet"]),
        ("jsonl:/nowhere/a.jsonl", ["/nowhere/a.jsonl"]),
        ("text:/nowhere/*.txt", ["/nowhere/*.txt"]),
        ("array_record:/nowhere", ["dataset.json"]),
    ],
)
def test_errors_are_one_line_and_name_the_cause(spec, words):
    message = error_of(spec)
    assert all(word in message for word in words), message


def test_the_requested_split_is_checked():
    assert "split 'heldout' was renamed; write 'validation'" in error_of("stdlib", "heldout")
    assert "split 'test' is unknown" in error_of("stdlib", "test")


def test_drawn_images_have_no_records():
    with pytest.raises(ValueError, match=r"'glyphs': its images are drawn .* no records to read"):
        open_source(parse_spec("glyphs", "train", "image_text"))
