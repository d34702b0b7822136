"""Properties of all tokenizers, and `make_tokenizer`."""

import json
import pickle

import pytest

from maxlp.data.tokenizers import make_tokenizer
from maxlp.data.tokenizers.training import SPECIALS
from tests.data.tokenizers.texts import INVALID


def test_invalid_utf8_is_replaced(bpe_path, sentencepiece_paths):
    for path in (bpe_path, sentencepiece_paths[False]):
        tokenizer = make_tokenizer(path)
        for data in INVALID:
            assert tokenizer.decode(tokenizer.encode(data)) == data.decode(errors="replace")
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_unknown_ids_decode_to_nothing(bpe_path, sentencepiece_paths):
    for path in (bpe_path, sentencepiece_paths[False]):
        tokenizer = make_tokenizer(path)
        ids = [tokenizer.bos_id, *tokenizer.encode("def f").tolist(), tokenizer.eos_id, 99_999, -1]
        assert tokenizer.decode(ids) == "def f"


def test_tokenizers_pickle(bpe_path, sentencepiece_paths):
    text = "<|end_of_text|> </s> def f(x): return x"
    beside = "chat_template=plain"
    for spec in ("bytes", f"{bpe_path}?pad=a&{beside}", f"{sentencepiece_paths[True]}?{beside}"):
        tokenizer = make_tokenizer(spec)
        again = pickle.loads(pickle.dumps(tokenizer))
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
        assert again.fingerprint == tokenizer.fingerprint and again.pad_id == tokenizer.pad_id
        assert again.files == tokenizer.files


def test_the_files_reproduce_the_tokenizer(tmp_path, bpe_path, sentencepiece_paths):
    for path in (bpe_path, sentencepiece_paths[True]):
        tokenizer = make_tokenizer(path)
        ((name, data),) = tokenizer.files.items()
        (tmp_path / name).write_bytes(data)
        assert make_tokenizer(str(tmp_path / name)).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("/nowhere/tokenizer.json", ["/nowhere/tokenizer.json", "'bytes'"]),
        ("bpe:2048", ["--train_tokenizer"]),
        ("gpt2", ["no such file; give 'bytes', hf:ORG/NAME,"]),
        ("{}", ["no tokenizer.json or tokenizer.model in this folder"]),
        ("bytes?bos=a", ["no such file"]),
        ("{}/no.json", ["not a tokenizer.json"]),
        ("{}/no.model", ["not a SentencePiece model"]),
        ("{}/empty.model", ["not a SentencePiece model (the file is empty)"]),
        ("{bpe}?begin=a", ["'begin'", "bos, eos, pad"]),
        ("{bpe}?bos=<nope>", ["'<nope>'", *SPECIALS]),
    ],
)
def test_errors_are_one_line(tmp_path, bpe_path, spec, words):
    for name in ("no.json", "no.model"):
        (tmp_path / name).write_bytes(b"\xff\x00 neither\n" * 3)
    (tmp_path / "empty.model").touch()
    with pytest.raises(ValueError) as caught:
        make_tokenizer(spec.format(tmp_path, bpe=bpe_path))
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_a_file_without_special_tokens_needs_options(tmp_path):
    from tokenizers import Tokenizer, models

    path = str(tmp_path / "tokenizer.json")
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(path)
    with pytest.raises(ValueError, match=r"no eos token of a usual name; .* none; set \?eos=TOKEN"):
        make_tokenizer(path)
    assert make_tokenizer(path + "?eos=b").bos_id == 1


def test_unusual_special_tokens_are_those_of_the_tokenizer_config(tmp_path):
    from tokenizers import Tokenizer, models

    path = str(tmp_path / "tokenizer.json")
    tok = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tok.add_special_tokens(["[EOS]", "[BOS]", "<pad>", "[PAD]"])
    tok.save(path)
    config = {"eos_token": {"content": "[EOS]"}, "bos_token": "[BOS]", "pad_token": "[PAD]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for made in (make_tokenizer(path), pickle.loads(pickle.dumps(make_tokenizer(path)))):
        assert (made.eos_id, made.bos_id, made.pad_id) == (2, 3, 4)  # <pad> is a usual name
    assert make_tokenizer(path + "?eos=b&pad=[PAD]").eos_id == 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": None}))
    assert make_tokenizer(path).bos_id == 2
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json: its tokenizer_config.json is damaged"):
        make_tokenizer(path)
