import os
import subprocess
import sys

import pytest

from maxlp.data.sources import make_source, sample_texts
from maxlp.data.tokenizers import make_tokenizer
from maxlp.data.tokenizers.training import SPECIALS, train_bpe, train_or_load
from tests.data.tokenizers.texts import HOSTILE, assert_exact, stdlib_texts


def test_a_trained_bpe_is_exact(bpe_path):
    tokenizer = make_tokenizer(bpe_path)
    assert tokenizer.vocab_size == 1024
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    assert_exact(tokenizer, HOSTILE + stdlib_texts())
    texts = stdlib_texts()
    assert sum(map(len, texts)) > 2 * sum(len(tokenizer.encode(text)) for text in texts)


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


def test_training_is_deterministic_and_a_fork_after_it_encodes_silently(tmp_path):
    """A fresh process with another hash seed makes the same file; it forks, as data workers may."""
    code = (
        "import os, sys; from maxlp.data import sources; from maxlp.data.tokenizers import training;"
        "source = sources.make_source('stdlib', 'train');"
        "made = training.train_or_load(sys.argv[1], sources.sample_texts(source, 100_000, 0), 600);"
        "pid = os.fork();"
        "pid and os.waitpid(pid, 0);"
        "print(made.encode('aab').tolist(), flush=True)"
    )
    here, there, other = (tmp_path / name / "tokenizer.json" for name in ("a", "b", "c"))
    env = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(there)],
        capture_output=True, text=True, timeout=60, check=True, env=env | {"PYTHONHASHSEED": "7"},
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert first == second and "tokenizers" not in done.stderr
    source = make_source("stdlib", "train")
    train_or_load(str(here), sample_texts(source, 100_000, 0), 600)
    train_or_load(str(other), sample_texts(source, 100_000, 1), 600)
    assert here.read_bytes() == there.read_bytes() != other.read_bytes()
    assert os.listdir(here.parent) == ["tokenizer.json"]  # no temporary files are left


def test_train_or_load_keeps_an_existing_file(tmp_path):
    path = str(tmp_path / "tokenizer.json")
    source = make_source("stdlib", "train")
    made = train_or_load(path, sample_texts(source, 100_000, 0), 600)
    before = os.stat(path).st_mtime_ns
    again = train_or_load(path, sample_texts(source, 200_000, 1), 600)
    assert again.fingerprint == made.fingerprint and os.stat(path).st_mtime_ns == before
    with pytest.raises(ValueError, match="has vocab_size 600, not 700"):
        train_or_load(path, sample_texts(source, 100_000, 0), 700)


def test_training_errors(tmp_path):
    path = str(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="no room for the 259 bytes"):
        train_bpe(["text"], 258, path)
    with pytest.raises(ValueError, match="gave only 262 tokens"):
        train_bpe(["aab aab"], 5000, path)
    assert not os.path.exists(path)
    assert train_bpe(["aab aab"], 262, path).vocab_size == 262


def test_specials_in_a_text_are_text(bpe_path):
    tokenizer = make_tokenizer(bpe_path)
    for name in SPECIALS:
        assert len(tokenizer.encode(name)) > 1
