import os
import subprocess
import sys

import pytest
import tokenizers

from maxlp.data.sources import make_source
from maxlp.data.tokenizers import make_tokenizer, training
from maxlp.data.tokenizers.training import SPECIALS, sample_texts, train_bpe
from maxlp.prepare import prepare_text
from tests.data.corpora import write_jsonl
from tests.data.tokenizers.texts import HOSTILE, assert_exact, stdlib_texts


def test_a_trained_bpe_is_exact(bpe_path):
    tokenizer = make_tokenizer(bpe_path)
    assert tokenizer.vocab_size == 1024
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    assert_exact(tokenizer, HOSTILE + stdlib_texts())
    texts = stdlib_texts()
    assert sum(map(len, texts)) > 2 * sum(len(tokenizer.encode(text)) for text in texts)


@pytest.mark.parametrize(("ends", "form"), [(False, [0, 3]), (True, [0, 3, 1])])
def test_other_libraries_add_the_special_tokens_of_training(ends, form):
    """A model reads a text as a document, or as a caption, from its beginning on."""
    file = train_bpe(["!"], 259, ends=ends).files["tokenizer.json"]
    assert tokenizers.Tokenizer.from_str(file.decode()).encode("!").ids == form


def test_byte_lengths_match_the_decoded_tokens(bpe_path):
    tokenizer = make_tokenizer(bpe_path)
    whole = 0
    for i in range(tokenizer.vocab_size):
        text = tokenizer.decode([i])
        if "\ufffd" not in text:  # a part of a character does not decode alone
            assert tokenizer.byte_lengths[i] == len(text.encode())
            whole += 1
    assert whole > 700
    assert not tokenizer.byte_lengths[:3].any() and (tokenizer.byte_lengths[3:] > 0).all()


def test_training_is_deterministic_and_a_fork_after_it_encodes_silently():
    """A fresh process with another hash seed makes the same tokenizer; it forks, as data workers may."""
    code = (
        "import os, sys; from maxlp.data import sources; from maxlp.data.tokenizers import training;"
        "source = sources.make_source('stdlib', 'train');"
        "made = training.train_bpe(training.sample_texts(source, 100_000, 0), 600);"
        "pid = os.fork();"
        "pid and os.waitpid(pid, 0);"
        "print(made.encode('aab').tolist(), made.fingerprint, flush=True)"
    )
    env = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True, text=True, timeout=60, check=True, env=env | {"PYTHONHASHSEED": "7"},
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert first == second and "tokenizers" not in done.stderr
    source = make_source("stdlib", "train")
    here, other = (train_bpe(sample_texts(source, 100_000, seed), 600).fingerprint for seed in (0, 1))
    assert first.endswith(here) and other != here


def test_training_errors():
    with pytest.raises(ValueError, match="no room for the 259 bytes"):
        train_bpe(["text"], 258)
    with pytest.raises(ValueError, match="gave only 262 tokens"):
        train_bpe(["aab aab"], 5000)
    assert train_bpe(["aab aab"], 262).vocab_size == 262


def test_specials_in_a_text_are_text(bpe_path):
    tokenizer = make_tokenizer(bpe_path)
    for name in SPECIALS:
        assert len(tokenizer.encode(name)) > 1


def test_sample_is_deterministic_and_has_the_requested_size():
    source = make_source("stdlib", "train")
    first, again, other = (b"".join(sample_texts(source, 300_000, seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert len(first) == len(other) == 300_000
    mixture = make_source("stdlib?weight=3;stdlib?validation=0.5&weight=1", "train")
    assert len(b"".join(sample_texts(mixture, 400_000, 0))) == 400_000


def test_sample_takes_a_whole_small_corpus_once(tmp_path):
    contents = [b"a" * 123_456 + b"b" * 7, b"c" * 10_000, b"d" * 10_001, b""]
    for i, data in enumerate(contents):
        (tmp_path / str(i)).write_bytes(data)
    pieces = list(sample_texts(make_source(f"text:{tmp_path}", "all"), 10**9, 0))
    assert sorted(b"".join(pieces)) == sorted(b"".join(contents))
    assert max(map(len, pieces[:4])) == 10_000


def test_documents_that_are_too_many_for_a_list_are_shuffled_one_by_one(tmp_path, monkeypatch):
    texts = [f"{number:05d}" * (1 if number else 3000) for number in range(1000)]
    source = make_source(f"jsonl:{write_jsonl(tmp_path / 'a.jsonl', texts)}", "all")
    monkeypatch.setattr(training, "PERMUTED", 999)
    first, other = (list(sample_texts(source, 10**6, seed)) for seed in (0, 1))
    assert sorted(first) == sorted(other)
    assert b"".join(first) != b"".join(other) and b"".join(sorted(first)) != b"".join(first)
    assert sum(map(len, first)) == sum(map(len, texts))


def test_a_source_of_tokens_cannot_be_sampled(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    prepare_text(f"text:{tmp_path}/a.txt", str(tmp_path / "out"), tokenizer="bytes")
    with pytest.raises(ValueError, match="holds tokens; a tokenizer is trained on text"):
        next(sample_texts(make_source(f"array_record:{tmp_path}/out", "all"), 100, 0))
