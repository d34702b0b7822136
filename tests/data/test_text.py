"""The order of documents, resuming, and independence of processes and workers."""

import collections
import dataclasses
import functools
import itertools
import json
import multiprocessing
import types

import numpy as np
import pytest

from maxlp.data import common, estimates, merge_states, sources, text
from maxlp.data.tokenizers.byte import ByteTokenizer
from maxlp.data.tokenizers.training import train_bpe
from maxlp.prepare import prepare_text
from tests.data.corpora import write_jsonl
from tests.data.windows import (
    BOS,
    EOS,
    assert_equal,
    assert_resumes,
    corpus,
    join,
    make,
    take,
    with_specials,
)


def order_of(documents, **kwargs):
    """The first tokens of the documents in reading order: a block of one window mixes nothing."""
    batches = take(iter(make([documents], batch_size=1, shuffle_tokens=0, **kwargs)))
    begins = batches["targets"][(batches["tokens"] == BOS) & batches["loss_mask"]]
    return [int(token) for token in begins if token != EOS]


def test_shuffle_differs_by_epoch_and_seed_and_is_a_permutation():
    documents = corpus(50, 20)
    whole = order_of(documents, shuffle=False, num_epochs=1)
    orders = {}
    for seed in range(3):
        both = order_of(documents, num_epochs=2, seed=seed)
        orders[seed, 0], orders[seed, 1] = both[: len(whole)], both[len(whole) :]
    assert all(sorted(order) == whole for order in orders.values())
    assert len({tuple(order) for order in [whole, *orders.values()]}) == 7


def test_windows_of_a_block_are_mixed():
    documents = corpus(50, 200)
    plain = take(iter(make([documents], shuffle_tokens=0)), 12)
    mixed = take(iter(make([documents], shuffle_tokens=12 * 4 * 8)), 12)
    rows = {
        key: batches["tokens"].reshape(-1, 8).tolist()
        for key, batches in [("plain", plain), ("mixed", mixed)]
    }
    assert rows["plain"] != rows["mixed"] and sorted(rows["plain"]) == sorted(rows["mixed"])


def test_each_block_and_each_source_has_an_order_of_its_own():
    """Random numbers that two of them shared would show as equal permutations."""
    document = [{"tokens": 10 + np.arange(4000, dtype=np.uint32)}]
    first_SB = take(iter(make([document], shuffle_tokens=12 * 4 * 8)), 24)["tokens"][..., 1]
    blocks = [block.argsort().tolist() for block in first_SB.reshape(2, -1)]  # of 48 windows each
    assert blocks[0] != blocks[1] and list(range(48)) not in blocks
    sources = [corpus(50, 20), corpus(50, 20, first=1000)]
    batches = take(iter(make(sources, batch_size=1, shuffle_tokens=0)), 120)
    begins = batches["targets"][(batches["tokens"] == BOS) & batches["loss_mask"]]
    order = [(int(token) - 10) // 20 for token in begins if token != EOS]
    orders = [[n for n in order if n < 1000], [n - 1000 for n in order if n >= 1000]]
    length = min(map(len, orders))
    assert length > 20 and orders[0][:length] != orders[1][:length]


def test_small_corpus_is_read_through_before_it_repeats():
    documents = corpus(30, 100)
    total = sum(len(with_specials(document)) for document in documents)
    batches = take(iter(make([documents], batch_size=64, shuffle_tokens=0)), total // 512)
    counts = collections.Counter(batches["tokens"].ravel().tolist())
    assert max(count for token, count in counts.items() if token > EOS) == 1


def test_large_corpus_feeds_each_row_its_own_documents(monkeypatch):
    monkeypatch.setattr(text, "DOCUMENTS_PER_STREAM", 50)
    documents = corpus(1000, 40)
    dataset = make([documents], batch_size=12)
    total = sum(len(with_specials(document)) for document in documents)
    batches = take(iter(dataset), total // (12 * 8))
    origin = np.where(batches["tokens"] > EOS, (batches["tokens"] - 10) // 40, -1)
    counts = collections.Counter(n for row in range(12) for n in set(origin[:, row].flat) - {-1})
    assert max(counts.values()) == 2  # the fastest rows are already in the next epoch
    assert len(counts) > 0.85 * len(documents)
    assert np.mean([count == 1 for count in counts.values()]) > 0.8


VARIANTS = [
    dict(packing="concat"),
    dict(packing="first_fit"),
    dict(packing="concat", num_epochs=1),
    dict(packing="first_fit", weights=[3, 1]),
    dict(packing="concat", weights=[3, 1], batch_size=24),
]


def variant(kwargs, **more):
    sources = [corpus(400, 30)]
    if "weights" in kwargs:
        sources.append(corpus(300, 60, seed=1, first=1000))
    return make(sources, **(dict(batch_size=12) | kwargs | more))


@pytest.mark.parametrize("kwargs", VARIANTS)
def test_global_batch_does_not_depend_on_process_count(kwargs, monkeypatch):
    # 400 documents over streams of at least 100: 4 streams of 3 or 6 rows, which no 12 processes share.
    monkeypatch.setattr(text, "DOCUMENTS_PER_STREAM", 100)
    steps = None if "num_epochs" in kwargs else 40
    expected = take(iter(variant(kwargs)), steps)
    for count in (2, 3, 4, 12):
        parts = [
            take(iter(variant(kwargs, process_index=i, process_count=count)), steps) for i in range(count)
        ]
        assert_equal(join(parts), expected, process_count=count)


def test_global_batch_and_resume_do_not_depend_on_workers(monkeypatch):
    monkeypatch.setattr(text, "DOCUMENTS_PER_STREAM", 100)
    documents = [{"text": f"{i} " * (i % 9)} for i in range(400)]
    plain, resumed, busy = (
        iter(make([documents], tokenizer=ByteTokenizer(), num_workers=workers)) for workers in (0, 0, 3)
    )
    take(plain, 7)
    busy.set_state(json.loads(json.dumps(plain.get_state())))
    assert_equal(take(busy, 20), take(plain, 20))
    assert len(multiprocessing.active_children()) == 3, "for four streams"
    assert busy.get_state() == plain.get_state()
    resumed.set_state(busy.get_state())
    busy.close()
    assert_equal(take(resumed, 20), take(plain, 20))


@pytest.mark.parametrize("kwargs", VARIANTS)
def test_resume_is_exact_on_any_number_of_processes(kwargs, monkeypatch):
    monkeypatch.setattr(text, "DOCUMENTS_PER_STREAM", 100)
    steps = len(take(iter(variant(kwargs)))["tokens"]) if "num_epochs" in kwargs else 40
    expected = take(iter(variant(kwargs)), steps)
    rng = np.random.default_rng(0)
    for stop in {0, 1, steps - 1, *rng.integers(2, steps, 2).tolist()}:
        make_dataset = functools.partial(variant, kwargs)
        assert_resumes(make_dataset, expected, stop, before=4, counts=(1, 2, 4))


def test_a_state_saved_at_the_end_restores_the_end():
    iterator = iter(make([corpus(20, 30)], num_epochs=1))
    take(iterator)
    other = iter(make([corpus(20, 30)], num_epochs=1))
    other.set_state(iterator.get_state())
    for ended in (iterator, other, other):
        with pytest.raises(StopIteration):
            next(ended)


def text_files(folder, texts):
    folder.mkdir(exist_ok=True)
    for number, content in enumerate(texts):
        (folder / f"{number}.txt").write_text(content)
    config = text.TextDataConfig(
        source=f"text:{folder}?split=all", tokenizer="bytes", seq_len=8, batch_size=2, shuffle_tokens=0
    )
    return text.make_data(config, split="train")


def test_overwritten_files_are_refused_and_a_copy_is_not(tmp_path):
    iterator = iter(text_files(tmp_path / "a", ["first text", "second text", "third"]))
    expected = [next(iterator) for _ in range(3)]
    state = json.loads(json.dumps(iterator.get_state()))
    copy = iter(text_files(tmp_path / "copy", ["first text", "second text", "third"]))
    copy.set_state(state)
    assert_equal(next(copy), next(iterator))
    swapped = text_files(tmp_path / "a", ["first text", "Second text", "third"])
    with pytest.raises(ValueError, match=r"^the files of data.source have changed .*--allow_change$"):
        iter(swapped).set_state(state)
    del state["settings"]["fingerprints"], state["settings"]["max_documents"]  # as version 0.2 saved it
    iter(swapped).set_state(state)
    assert len(expected) == 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, (2, 0)), ({"seq_len": 16}, (2, 0)), ({"seed": 1}, (0, 0)), ({"documents": [5]}, (0, 0))],
)
def test_allowed_changes_go_on_at_the_same_document_or_at_the_first(tmp_path, changes, expected):
    """Cursors point into documents that may have become shorter."""
    texts = [letter * 20 for letter in "abcd"]
    iterator = iter(text_files(tmp_path / "a", texts))
    for _ in range(3):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    assert state["streams"] == {"0": [[2, 4]]}, "48 of 22 tokens each"
    now = text_files(tmp_path / "a", [each[:2] for each in texts])
    resumed = iter(dataclasses.replace(now, settings=now.settings | changes))
    resumed.set_state(state, allow_change=True)
    assert resumed.get_state()["step"] == 3 and resumed.get_state()["streams"] == {"0": [[*expected]]}
    assert next(resumed)["loss_mask"].any()
    resumed.close()


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_another_batch_size_goes_on_with_unread_documents(monkeypatch, before, after):
    """Each row has a stream of its own here, so that there are more or fewer streams than before."""
    monkeypatch.setattr(text, "DOCUMENTS_PER_STREAM", 100)

    def documents_of(batches):
        begins = batches["targets"][(batches["tokens"] == BOS) & batches["loss_mask"]]
        return [int(token) for token in begins if token != EOS]

    documents = corpus(400, 30)
    settings = dict(shuffle_tokens=0, num_epochs=None)
    first = iter(make([documents], batch_size=before, **settings))
    read = documents_of(take(first, 240 // before))
    resumed = iter(make([documents], batch_size=after, **settings))
    with pytest.raises(ValueError, match=r"^data.batch_size: .*--allow_change"):
        resumed.set_state(first.get_state())
    resumed.set_state(first.get_state(), allow_change=True)
    new = documents_of(take(resumed, 240 // after))
    assert len(read) > 20 and len(new) > 20
    assert len({*read} & {*new}) <= before + after, "streams are a few documents apart"
    assert len({*new}) == len(new)


def test_a_run_goes_on_with_more_epochs(monkeypatch):
    """Exactly, if a block is a single step; larger ones are mixed again, which is said."""
    warned = []
    monkeypatch.setattr(text.logging, "warning", lambda message, *_: warned.append(message))
    one, two, resumed = (
        iter(make([corpus(20, 30)], num_epochs=epochs, shuffle_tokens=0)) for epochs in (1, 2, 2)
    )
    seen = take(one, 3)
    assert_equal(seen, take(two, 3))
    resumed.set_state(one.get_state(), allow_change=True)
    assert_equal(take(resumed), take(two))
    assert warned[1:] == ["the last data.shuffle_tokens are mixed again: some may come twice, some never"]


def test_state_of_other_data_or_too_few_processes_is_refused(monkeypatch):
    monkeypatch.setattr(text, "DOCUMENTS_PER_STREAM", 100)
    documents = corpus(400, 30)
    half = [make([documents], process_index=i, process_count=2) for i in range(2)]
    states = [iter(each).get_state() for each in half]
    with pytest.raises(ValueError, match=r"lacks stream 2.*merge_states"):
        iter(make([documents])).set_state(states[0])
    with pytest.raises(ValueError, match=r"^data.seq_len: 8 when .*, now 16; .*--allow_change"):
        iter(make([documents], seq_len=16)).set_state(merge_states(states))
    with pytest.raises(ValueError, match=r"^documents of data.source: \[400\] when .*, now \[401\]"):
        iter(make([corpus(401, 30)])).set_state(merge_states(states))
    states[1]["settings"]["documents"] = [401]
    with pytest.raises(
        ValueError, match=r"different settings: {'documents': \[400\]} and {'documents': \[401\]}"
    ):
        merge_states(states)
    states[1]["settings"]["documents"] = [400]
    states[1]["step"] += 1
    with pytest.raises(ValueError, match="different step: 0 and 1"):
        merge_states(states)


def test_validation_counts_each_token_once_for_any_process_count(tmp_path):
    rng = np.random.default_rng(0)
    texts = [[rng.integers(97, 123, n, np.uint8) for n in rng.integers(0, 60, 30)] for _ in "ab"]
    texts = [[text.tobytes().decode() for text in part] for part in texts]
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", part) for name, part in zip("ab", texts, strict=True)]
    expected = collections.Counter()
    for document in filter(None, texts[0] + texts[1]):
        expected.update([*document.encode(), ByteTokenizer.eos_id])
    source = ";".join(f"jsonl:{path}?split=all" for path in paths)
    unused = dict(packing="first_fit", num_workers=3)
    config = text.TextDataConfig(source=source, tokenizer="bytes", seq_len=16, batch_size=6, **unused)
    for count in (1, 2, 3, 6):
        process = [dict(process_index=i, process_count=count) for i in range(count)]
        parts = [take(iter(text.make_data(config, split="validation", **each))) for each in process]
        assert len({len(part["tokens"]) for part in parts}) == 1
        batches = join(parts)
        assert collections.Counter(batches["targets"][batches["loss_mask"]].tolist()) == expected
        first = [ByteTokenizer.bos_id, *texts[0][0].encode(), ByteTokenizer.eos_id]
        assert batches["tokens"][0, 0, : len(first)].tolist() == first[:16], "in order"


def test_the_sources_of_a_mixture_are_spread_over_validation(tmp_path):
    counts = dict(a=30, b=60, c=1, d=30)
    for name, count in counts.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name}{i:02d}" for i in range(count)])
    source = ";".join(f"jsonl:{tmp_path}/{name}.jsonl?split=all" for name in counts)
    config = text.TextDataConfig(source=source, tokenizer="bytes", seq_len=64, batch_size=1)
    batches = take(iter(text.make_data(config, split="validation")))
    found = bytes(batches["tokens"][batches["tokens"] < 256].tolist()).decode()
    names = [found[i : i + 3] for i in range(0, len(found), 3)]
    for name, count in counts.items():
        assert [each for each in names if each[0] == name] == [f"{name}{i:02d}" for i in range(count)]
        for stop in range(len(names)):
            # Each of the four counts is rounded, and so are those of the others in the length of this part.
            share, found = count / len(names), sum(each[0] == name for each in names[:stop])
            assert abs(found - stop * share) <= 0.5 + 4 * 0.5 * share
    of_equal_lengths = [each[0] for each in names if each[0] in "ad"]
    assert of_equal_lengths == ["a", "d"] * 30, "in the order of the sources, on every machine"


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_mixture_shares_are_of_windows_and_windows_are_not_mixed(packing, monkeypatch):
    monkeypatch.setattr(text, "DOCUMENTS_PER_STREAM", 100)
    sources = [corpus(400, 10), corpus(100, 80, seed=1, first=1000), corpus(50, 80, first=2000)]
    batches = take(iter(make(sources, [5, 3, 2], packing=packing)), 500)
    first_of_source = [0, 10 + 1000 * 80, 10 + 2000 * 80]
    rows = batches["tokens"].reshape(-1, 8)
    origin = np.where(rows > EOS, np.searchsorted(first_of_source, rows, side="right"), 0)
    largest = origin.max(axis=1, keepdims=True)
    assert ((origin == largest) | (origin == 0)).all()
    seen = np.bincount(largest.ravel(), minlength=4)[1:] / np.count_nonzero(largest)
    # Two windows more or less, of 500.
    np.testing.assert_allclose(seen, [0.5, 0.3, 0.2], atol=2 / 500)


def test_mixture_shares_are_right_over_a_few_windows_as_well_as_over_many():
    """Of any windows in a row, a source has at most two or three more than its share, or fewer."""
    weights = np.array([0.5, 0.3, 0.2])
    for num_streams in (1, 4):
        plan, counts = types.SimpleNamespace(num_streams=num_streams), []
        for block, number in itertools.product(range(1000 // num_streams), range(num_streams)):
            stream = types.SimpleNamespace(
                plan=plan, number=number, settings={"weights": weights}, queues=[None] * 3
            )
            counts.append(text._Stream._shares(stream, block, 1))
        excess = np.cumsum(np.array(counts) - weights, axis=0)
        assert (np.ptp(excess, axis=0) < 3).all()


@pytest.mark.parametrize("num_streams", [1, 3, 8])
def test_other_streams_continue_after_the_documents_that_were_read(num_streams):
    """Document d is number d // n of stream d % n."""
    plan = types.SimpleNamespace(num_streams=num_streams)
    iterator = types.SimpleNamespace(_plan=plan, _rows=[(s, None) for s in range(num_streams)])
    for read in itertools.product((0, 1, 7, 24), repeat=2):
        saved = [[(count, 5), (0, 3)] for count in read]  # of two streams, and of a second source nothing
        new = text.TextIterator._redistribute(iterator, saved)
        for s in range(num_streams):
            assert new[str(s)] == [(len(range(s, sum(read), num_streams)), 0), (0, 0)]


def test_a_state_says_nothing_of_an_order_that_is_not_shuffled():
    """Else a run would be told of changes in an order that it does not have."""
    documents = [{"text": "1"}] * (common.CACHED + 1)
    for shuffle in (False, True):
        settings = make([documents], shuffle=shuffle, num_epochs=1).settings
        assert (common.SHUFFLE_ROUNDS in settings) == shuffle


def test_a_source_that_fails_is_reported_by_next():
    documents = [{"text": "1 2"}, {"text": "broken"}]
    with pytest.raises(ValueError, match=r"invalid literal.*broken"):
        next(iter(make([documents])))


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_documents_without_text_are_an_error(packing):
    with pytest.raises(ValueError, match=r"none of the 3 documents has text; check data\.source"):
        next(iter(make([[{"text": ""}] * 3], packing=packing)))


def test_documents_of_a_small_source_come_equally_often_in_their_order(monkeypatch):
    """A number of streams that divides that of documents would give each stream the same ones for ever."""
    monkeypatch.setattr(text, "DOCUMENTS_PER_STREAM", 1)
    small = [{"tokens": np.full(length, 10 + i)} for i, length in enumerate((3, 300, 3, 30))]
    how = dict(shuffle=False, batch_size=8, seq_len=16)
    tokens = take(iter(make([[{"text": "9"}] * 8, small], **how)), 600)["tokens"]
    times = [np.count_nonzero(tokens == 10 + i) / len(each["tokens"]) for i, each in enumerate(small)]
    assert max(times) < 1.2 * min(times)


def test_each_stream_meets_the_only_text_of_a_small_source(monkeypatch):
    monkeypatch.setattr(text, "DOCUMENTS_PER_STREAM", 10)
    small = [{"text": "7"}, *[{"text": ""}] * 4]
    for seed in range(4):  # each row of the batch is a stream
        tokens = take(iter(make([corpus(40, 20), small], seed=seed)), 40)["tokens"]
        assert ((tokens == 7).sum((0, 2)) > 0).all()


def test_a_single_text_among_empty_ones_is_read(tmp_path):
    texts = [{"text": ""}] * 99 + [{"text": "7"}]
    for seed in range(9):
        batches = take(iter(make([texts], seed=seed)), 2)
        assert (batches["tokens"] == 7).sum() > 1


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_empty_documents_are_left_out_of_raw_data_as_of_prepared(tmp_path, packing):
    path = write_jsonl(tmp_path / "a.jsonl", ["", "one", "", "", "four and", "", "more"] * 9)
    prepare_text(f"jsonl:{path}", str(tmp_path / "out"), tokenizer="bytes")
    how = dict(tokenizer="bytes", seq_len=8, batch_size=2, packing=packing, max_documents=2)
    how |= dict(shuffle=False, num_epochs=2)
    raw, prepared = (
        text.make_data(text.TextDataConfig(source=f"{spec}?split=all", **how), split="train")
        for spec in (f"jsonl:{path}", f"array_record:{tmp_path}/out")
    )
    assert_equal(take(iter(raw)), take(iter(prepared)))


def test_empty_files_are_refused_at_the_start(tmp_path):
    with pytest.raises(ValueError, match=r"no text in 3 documents of split 'all'$"):
        text_files(tmp_path / "a", ["", " ", "\n\n"])
    text_files(tmp_path / "a", ["", "", "x"])


def test_the_error_for_empty_validation_documents_names_the_split(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["x", ""] * 5)
    found = r"validation=0.5': no text in 5 documents of split 'validation'; change \?split=$"
    with pytest.raises(ValueError, match=found):
        sources.make_source(f"jsonl:{path}?validation=0.5", "validation")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(seq_len=1), "seq_len=1 must be at least 2"),
        (dict(batch_size=6, process_count=4), "batch_size=6 must be a multiple of the 4 processes"),
        (dict(batch_size=0), "batch_size=0 must be at least 1"),
        (
            dict(process_index=2, process_count=2),
            "process_index=2 must be in 0 … process_count-1=1",
        ),
        (dict(packing="best"), "packing='best' is unknown; one of concat, first_fit"),
        (dict(seed=-1), "seed=-1 "),
        (dict(num_epochs=0), "num_epochs=0 "),
        (dict(num_workers=-1), "num_workers=-1 "),
        (dict(shuffle_tokens=-1), "shuffle_tokens=-1 "),
        (dict(sources=[corpus(2, 5), corpus(2, 5)], num_epochs=1), "needs a single source"),
    ],
)
def test_errors_are_one_line(kwargs, message):
    with pytest.raises(ValueError, match=message) as error:
        make(**(dict(sources=[corpus(3, 9)]) | kwargs))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tokens", [False, True], ids=["text", "tokens"])
def test_the_start_tells_documents_tokens_and_epochs(tokens, tmp_path, monkeypatch):
    """A mixture of 2,000 and 3,000 documents, of 10 and 40 bytes on average, and bos and eos."""
    rng = np.random.default_rng(0)
    specs, sizes = [], []
    for name, count, most in (("a", 2000, 20), ("b", 3000, 80)):
        lengths = rng.integers(1, most, count)
        path = write_jsonl(tmp_path / f"{name}.jsonl", ["x" * n for n in lengths])
        specs.append(f"jsonl:{path}?split=all")
        sizes.append((lengths + 2).sum())
        if tokens:
            prepare_text(f"jsonl:{path}", str(tmp_path / name), tokenizer="bytes")
            specs[-1] = f"array_record:{tmp_path / name}?split=all"
    config = text.TextDataConfig(source=";".join(specs), tokenizer="bytes", seq_len=64, batch_size=8)
    dataset = text.make_data(config, split="train")
    shown = dataset.describe(steps=100)
    assert shown.startswith("2,000 + 3,000 documents, about ")
    counts = shown.split(" about ")[1].split(" tokens; ")[0].replace(",", "")
    about = [float(x) for x in counts.split(" + ")]
    read = [float(x) for x in shown.split(" 100 steps read ")[1].removesuffix(" epochs").split(" + ")]
    # Of uniform lengths, the mean of 1,000 or more is within 3 standard errors: 3 · 0.58 / √1000 = 5 %.
    np.testing.assert_allclose(about, sizes, rtol=0.08)  # and two digits are shown
    np.testing.assert_allclose(read, 100 * 8 * 64 / 2 / np.array(sizes), rtol=0.08)
    assert "epochs" not in dataset.describe()
    monkeypatch.setattr(estimates, "SAMPLE_SECONDS", -1.0)  # reading takes too long
    assert dataset.describe(steps=100) == "2,000 + 3,000 documents"
    dataset.settings["documents"] = [1]
    assert dataset.describe() == "1 document"


def test_the_start_warns_of_data_that_end_early(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["x" * 30] * 1000)  # 62.5 steps of 8 · 64 tokens
    config = text.TextDataConfig(
        source=f"jsonl:{path}?split=all", tokenizer="bytes", seq_len=64, batch_size=8, num_epochs=2
    )
    dataset = text.make_data(config, split="train")
    assert sum(1 for _ in dataset) == 125
    assert "warning" not in dataset.describe(steps=125)
    assert dataset.describe(steps=126).endswith(
        "epochs\nwarning: data.num_epochs=2 ends the data after about 125 of 126 steps; raise it, or lower "
        "train.total_steps"
    )


@pytest.mark.parametrize("how", [dict(packing="first_fit"), dict(packing="concat", max_documents=1)])
def test_the_start_counts_windows_that_are_not_full(tmp_path, how):
    """Documents of 41 tokens with eos leave room in windows of 64, so that each needs its own."""
    path = write_jsonl(tmp_path / "a.jsonl", ["x" * 40] * 400)
    config = text.TextDataConfig(
        source=f"jsonl:{path}?split=all",
        tokenizer="bytes",
        seq_len=64,
        batch_size=8,
        num_epochs=1,
        **how,
    )
    dataset = text.make_data(config, split="train")
    assert sum(1 for _ in dataset) == 50
    assert "; 50 steps read 1 epochs" in dataset.describe(steps=50)
    assert "\nwarning: data.num_epochs=1 ends the data after about 50 of 51" in dataset.describe(steps=51)


def test_a_source_whose_sampled_documents_are_empty_is_described(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["", "x", *[""] * 2998])
    config = text.TextDataConfig(
        source=f"jsonl:{path}?split=all", tokenizer="bytes", seq_len=8, batch_size=1
    )
    assert text.make_data(config, split="train").describe(steps=9) == "3,000 documents"


def test_a_broken_document_among_the_sampled_ones_is_found_before_training(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["x"] * 100)
    path.write_text(path.read_text() + "{\n")
    config = text.TextDataConfig(source=f"jsonl:{path}", tokenizer="bytes", seq_len=64, batch_size=8)
    dataset = text.make_data(config, split="train")
    with pytest.raises(ValueError, match=r"a.jsonl:101: not a complete JSON object .*; correct the line"):
        dataset.describe()


def test_only_the_byte_tokenizer_takes_text_that_is_not_utf8(tmp_path):
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / name).write_bytes(b"gr\xf6\xdfer" * 50)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(train_bpe(["text"], 259).files["tokenizer.json"])

    def make(tokenizer):
        sizes = dict(seq_len=64, batch_size=1)
        config = text.TextDataConfig(source=f"text:{tmp_path}/texts", tokenizer=str(tokenizer), **sizes)
        return text.make_data(config, split="train")

    assert 0xF6 in next(iter(make("bytes")))["tokens"]
    with pytest.raises(ValueError, match=r"^data.source: .*/texts/[ab]: byte 2 \(0xf6\) is not UTF-8"):
        make(tokenizer)


def test_make_data_reads_the_standard_library():
    config = text.TextDataConfig(
        source="stdlib", tokenizer="bytes", seq_len=64, batch_size=4, shuffle_tokens=2**12
    )
    train, validation = (text.make_data(config, split=split) for split in ("train", "validation"))
    batch = next(iter(train))
    window = train.tokenizer.decode(batch["tokens"][0])
    documents = (train.documents[0][i][0] for i in range(10**4))
    assert any(window in train.tokenizer.decode(document) for document in documents)
    assert next(iter(validation))["tokens"][0, 0] == train.tokenizer.bos_id
    for split, message in (("test", "one of train, validation$"), ("heldout", "write 'validation'")):
        with pytest.raises(ValueError, match=message):
            text.make_data(config, split=split)


def test_make_data_mixes_and_refuses_tokens_of_another_tokenizer(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [f"document {i}" for i in range(60)])
    source = f"jsonl:{tmp_path}/a.jsonl"
    sizes = dict(tokenizer="bytes", seq_len=8, batch_size=2, shuffle_tokens=0)
    mixed = text.TextDataConfig(source=f"{source};stdlib?weight=3", **sizes)
    assert text.make_data(mixed, split="train").settings["weights"] == [0.25, 0.75]
    prepare_text(source, str(tmp_path / "tokens"), train_tokenizer=270)
    tokens = text.TextDataConfig(source=f"array_record:{tmp_path}/tokens", **sizes)
    message = (
        r"of the tokenizer .*/tokens/tokenizer.json, not of data.tokenizer='bytes'; set that tokenizer"
    )
    with pytest.raises(ValueError, match=message):
        text.make_data(tokens, split="train")
    tokens = dataclasses.replace(tokens, tokenizer=f"{tmp_path}/tokens/tokenizer.json")
    batch = next(iter(text.make_data(tokens, split="train")))
    assert (batch["tokens"] < 270).all()
