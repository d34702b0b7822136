"""The tokenizer of a run: mistakes in the config are refused with the key, the value and the way out."""

import pytest

from maxlp.data.tokenizers import make_tokenizer
from maxlp.data.tokenizers.training import train_bpe
from maxlp.run.config import ConfigError
from maxlp.run.settings import read
from maxlp.run.tokenizer import prepare_tokenizer, saved_tokenizer
from tests.run.fixtures import changed, load


def settings(tokenizer: str, vocab_size: int = 4096):
    return read(changed(load("debug"), {"data.tokenizer": tokenizer, "model.vocab_size": vocab_size}))


def test_more_tokens_than_the_model_has_room_for_are_refused(tmp_path):
    file = tmp_path / "tokenizer.json"
    train_bpe(["abc"], 259, str(file))
    with pytest.raises(ConfigError, match=r"^config.data.tokenizer=.* set config.model.vocab_size=259"):
        prepare_tokenizer(settings(str(file), vocab_size=256), tmp_path / "run")


def test_another_tokenizer_than_that_of_the_run_is_refused(tmp_path):
    file, workdir = tmp_path / "tokenizer.json", tmp_path / "run"
    workdir.mkdir()
    train_bpe(["abc"], 259, str(file))
    assert prepare_tokenizer(settings(str(file)), workdir) == str(workdir / "tokenizer.json")
    train_bpe(["abab"], 260, str(file))
    with pytest.raises(ConfigError, match=r"is not .*tokenizer.json, .* use that one or a new workdir"):
        prepare_tokenizer(settings(str(file)), workdir)


def test_the_names_of_special_tokens_stay_with_the_file_of_the_run(tmp_path):
    file, workdir = tmp_path / "other.json", tmp_path / "run"
    workdir.mkdir()
    train_bpe(["abc"], 259, str(file))
    options = "?bos=<|pad|>&eos=<|end_of_text|>"
    spec = prepare_tokenizer(settings(f"{file}{options}"), workdir)
    assert spec == f"{workdir / 'tokenizer.json'}{options}"
    file.unlink()
    assert make_tokenizer(spec).bos_id == make_tokenizer(spec).pad_id
    assert saved_tokenizer("bytes", workdir) == "bytes"
