import contextlib
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from maxlp.data.sources import make_source, sample_texts
from maxlp.data.tokenizer import SPECIALS, make_tokenizer, train_bpe, train_or_load

HOSTILE = [
    "",
    " ",
    "\n",
    " leading and trailing \r\n\t \x0b\x0c\u2028\u00a0\u3000 ",
    "\x00\x01\x7f\ufeff\ufffd\ufffe\U0010ffff",
    "a" * 20_000 + " " * 5_000 + "\n" * 5_000 + "(" * 5_000,
    "e\u0301 \u1112\u1161\u11ab 漢字 🎉👩‍👩‍👧 ﷽ عربى हिन्दी \u202eRTL",
    "<|begin_of_text|><|end_of_text|><|pad|><s></s><unk><0x0A>[UNK]",
    "١٢٣٤٥ 1234567 Ⅷ ½ don't DON'T we'll",
    "".join(map(chr, range(0x2000))),
]
INVALID = [bytes(range(256)), b"\xff\xfe\xfd", b"ok \xe2\x82", b"\xed\xa0\x80", b"\xf8" * 1000]


def stdlib_texts(count=40):
    source = make_source("stdlib", "heldout")
    return [source[i]["text"].decode() for i in range(min(count, len(source)))]


@pytest.fixture(scope="module")
def bpe_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(sample_texts(make_source("stdlib", "train"), 500_000, 0), 1024, str(path))
    return str(path)


@pytest.fixture(scope="module")
def sentencepiece_paths(tmp_path_factory):
    """Models of Llama's settings, with and without its dummy prefix."""
    import sentencepiece

    paths = {}
    for prefix in (True, False):
        paths[prefix] = str(tmp_path_factory.mktemp("spm") / f"{prefix}.model")
        with open(paths[prefix], "wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter("\n".join(stdlib_texts(12)).split("\n")),
                model_writer=file,
                model_type="bpe",
                vocab_size=600,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=prefix,
                minloglevel=2,
            )
    return paths


def assert_exact(tokenizer, texts):
    """Lossless, and the byte lengths of the ids add up to the bytes of the text."""
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and ids.ndim == 1
        assert tokenizer.decode(ids) == text
        assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
        assert not set(ids.tolist()) & {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}


# --- bytes ----------------------------------------------------------------------------------------


def test_byte_tokenizer_is_the_bytes():
    tokenizer = make_tokenizer("bytes")
    assert tokenizer.vocab_size == 259 == len(tokenizer.byte_lengths)
    assert tokenizer.byte_lengths.sum() == 256
    assert_exact(tokenizer, HOSTILE + stdlib_texts())
    for data in INVALID:
        assert tokenizer.encode(data).tolist() == list(data)


def test_byte_tokenizer_decodes_any_ids():
    tokenizer = make_tokenizer("bytes")
    ids = [256, 72, 105, 257, 258, 300, -1]
    assert tokenizer.decode(ids) == "Hi"
    assert tokenizer.decode(np.array([0xE2, 0x82], np.int32)) == "\ufffd"


# --- byte-level BPE -------------------------------------------------------------------------------


def test_trained_bpe_is_exact(bpe_path):
    tokenizer = make_tokenizer(bpe_path)
    assert tokenizer.vocab_size == 1024
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    assert_exact(tokenizer, HOSTILE + stdlib_texts())
    texts = stdlib_texts()
    assert sum(map(len, texts)) > 2 * sum(len(tokenizer.encode(text)) for text in texts)


def test_byte_lengths_of_each_token_are_those_of_what_it_decodes_to(bpe_path):
    tokenizer = make_tokenizer(bpe_path)
    whole = 0
    for i in range(tokenizer.vocab_size):
        text = tokenizer.decode([i])
        if "\ufffd" not in text:  # half of a character has no text of its own
            assert tokenizer.byte_lengths[i] == len(text.encode())
            whole += 1
    assert whole > 700
    assert not tokenizer.byte_lengths[:3].any() and (tokenizer.byte_lengths[3:] > 0).all()


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


def test_training_is_deterministic_across_processes(tmp_path):
    code = (
        "import sys; from maxlp.data import sources, tokenizer;"
        "source = sources.make_source('stdlib', 'train');"
        "tokenizer.train_or_load(sys.argv[1], sources.sample_texts(source, 200_000, 0), 700)"
    )
    here, there, other = (tmp_path / name / "tokenizer.json" for name in ("a", "b", "c"))
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, str(there)], check=True, env=env)
    source = make_source("stdlib", "train")
    train_or_load(str(here), sample_texts(source, 200_000, 0), 700)
    train_or_load(str(other), sample_texts(source, 200_000, 1), 700)
    assert here.read_bytes() == there.read_bytes() != other.read_bytes()
    assert os.listdir(here.parent) == ["tokenizer.json"]  # no temporary files are left


def test_train_or_load_keeps_what_is_there(tmp_path):
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
    with pytest.raises(ValueError, match="below 259"):
        train_bpe(["text"], 258, path)
    with pytest.raises(ValueError, match="gave only 262 tokens"):
        train_bpe(["aab aab"], 5000, path)
    assert not os.path.exists(path)
    assert train_bpe(["aab aab"], 262, path).vocab_size == 262


def test_a_fork_after_training_encodes_in_silence(tmp_path):
    code = (
        "import os, sys; from maxlp.data import tokenizer;"
        "made = tokenizer.train_bpe(['aab aab'] * 1000, 260, sys.argv[1]);"
        "pid = os.fork();"
        "pid and os.waitpid(pid, 0);"
        "print(made.encode('aab').tolist(), flush=True)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "tokenizer.json")]
    env = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    first, second = done.stdout.splitlines()
    assert first == second and "tokenizers" not in done.stderr


# --- files of others ------------------------------------------------------------------------------


def hugging_face(path, *, decoder, pre_tokenizer, specials, trainer, normalizer=None, model=None):
    import tokenizers

    tok = tokenizers.Tokenizer(model or tokenizers.models.BPE())
    tok.decoder, tok.pre_tokenizer = decoder, pre_tokenizer
    if normalizer:
        tok.normalizer = normalizer
    tok.train_from_iterator(stdlib_texts(10), trainer)
    tok.add_special_tokens(specials)
    tok.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{specials[0]} $A", special_tokens=[(specials[0], tok.token_to_id(specials[0]))]
    )
    tok.enable_truncation(16)  # as some files have: it must not cut a document
    tok.enable_padding(length=32)
    tok.save(str(path))
    return str(path)


@contextlib.contextmanager
def edited_json(path):
    with open(path) as file:
        config = json.load(file)
    yield config
    with open(path, "w") as file:
        json.dump(config, file)


def test_another_byte_level_tokenizer_json(tmp_path):
    """As GPT-2's and Llama 3's: other regex, specials last, a post-processor, an added word."""
    from tokenizers import decoders, pre_tokenizers, trainers

    path = hugging_face(
        tmp_path / "tokenizer.json",
        decoder=decoders.ByteLevel(),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        specials=["<|begin_of_text|>", "<|end_of_text|>", "<|reserved|>"],
        trainer=trainers.BpeTrainer(
            vocab_size=700,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    with edited_json(path) as config:
        config["added_tokens"].append({"id": 703, "content": "    return", **flags})
    tokenizer = make_tokenizer(path)
    assert tokenizer.vocab_size == 704
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (700, 701, 701)
    assert_exact(tokenizer, HOSTILE + stdlib_texts())
    assert 703 in tokenizer.encode("x\n    return y")
    assert make_tokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint  # the folder of it
    named = make_tokenizer(f"{path}?bos=<|reserved|>&eos=<|begin_of_text|>&pad=a")
    assert (named.bos_id, named.eos_id) == (702, 700)
    assert named.decode([named.pad_id]) == "a"


def test_llama2_like_tokenizer_json(tmp_path):
    """Pieces with byte fallback and a dummy prefix: one byte more for each text."""
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

    path = hugging_face(
        tmp_path / "tokenizer.json",
        model=models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        normalizer=normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        ),
        pre_tokenizer=pre_tokenizers.Split("\n", "isolated"),
        decoder=decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
             decoders.Strip(" ", 1, 0)]
        ),
        specials=["<s>", "</s>"],
        trainer=trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=[AddedToken("<unk>", special=True)]
            + [f"<0x{byte:02X}>" for byte in range(256)],
            show_progress=False,
        ),
    )  # fmt: skip
    with edited_json(path) as config:  # the byte pieces belong to the model, as in Llama's file
        added = config["added_tokens"]
        config["added_tokens"] = [each for each in added if each["content"][:3] != "<0x"]
    tokenizer = make_tokenizer(path)
    assert tokenizer.prefix_bytes == 1
    for text in filter(None, HOSTILE + stdlib_texts()):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.byte_lengths[ids].sum() == len(text.encode()) + 1


def test_word_piece_has_no_byte_lengths(tmp_path):
    from tokenizers import decoders, models, pre_tokenizers, trainers

    path = hugging_face(
        tmp_path / "tokenizer.json",
        model=models.WordPiece(unk_token="[UNK]"),
        pre_tokenizer=pre_tokenizers.Whitespace(),
        decoder=decoders.WordPiece(),
        specials=["<s>", "</s>", "[UNK]"],
        trainer=trainers.WordPieceTrainer(vocab_size=500, show_progress=False),
    )
    tokenizer = make_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("def f")) == "def f"
    with pytest.raises(ValueError, match="WordPiece"):
        _ = tokenizer.byte_lengths


def test_sentencepiece_is_exact(sentencepiece_paths):
    texts = HOSTILE + stdlib_texts()
    tokenizer = make_tokenizer(sentencepiece_paths[False])
    assert (tokenizer.vocab_size, tokenizer.prefix_bytes) == (600, 0)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    assert_exact(tokenizer, texts)
    prefixed = make_tokenizer(sentencepiece_paths[True])
    assert prefixed.prefix_bytes == 1
    for text in filter(None, texts):
        ids = prefixed.encode(text)
        assert prefixed.decode(ids) == text
        assert prefixed.byte_lengths[ids].sum() == len(text.encode()) + 1
    assert tokenizer.decode(tokenizer.encode("a▁b")) == "a b"  # the one character it cannot keep


# --- all ------------------------------------------------------------------------------------------


def test_tokenizers_pickle(bpe_path, sentencepiece_paths):
    text = "<|end_of_text|> </s> def f(x): return x"
    for spec in ("bytes", f"{bpe_path}?pad=a", sentencepiece_paths[True]):
        tokenizer = make_tokenizer(spec)
        again = pickle.loads(pickle.dumps(tokenizer))
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
        assert again.fingerprint == tokenizer.fingerprint and again.pad_id == tokenizer.pad_id


def test_files_make_the_tokenizer_again(tmp_path, bpe_path, sentencepiece_paths):
    for path in (bpe_path, sentencepiece_paths[True]):
        tokenizer = make_tokenizer(path)
        ((name, data),) = tokenizer.files.items()
        (tmp_path / name).write_bytes(data)
        assert make_tokenizer(str(tmp_path / name)).fingerprint == tokenizer.fingerprint


def test_specials_in_a_text_are_text(bpe_path):
    tokenizer = make_tokenizer(bpe_path)
    for name in SPECIALS:
        assert len(tokenizer.encode(name)) > 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("/nowhere/tokenizer.json", ["/nowhere/tokenizer.json", "'bytes'"]),
        ("bpe:2048", ["--train_tokenizer"]),
        ("bytes?bos=a", ["no such file"]),
        ("{}/no.json", ["not a tokenizer.json"]),
        ("{}/no.model", ["not a SentencePiece model"]),
        ("{bpe}?begin=a", ["'begin'", "bos, eos, pad"]),
        ("{bpe}?bos=<nope>", ["'<nope>'", *SPECIALS]),
    ],
)
def test_errors_are_one_line(tmp_path, bpe_path, spec, words):
    for name in ("no.json", "no.model"):
        (tmp_path / name).write_bytes(b"\xff\x00 neither\n" * 3)
    with pytest.raises(ValueError) as caught:
        make_tokenizer(spec.format(tmp_path, bpe=bpe_path))
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_a_file_without_specials_says_so(tmp_path):
    from tokenizers import Tokenizer, models

    path = str(tmp_path / "tokenizer.json")
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(path)
    with pytest.raises(ValueError, match=r"no eos of a usual name; .* none; set \?eos=TOKEN"):
        make_tokenizer(path)
    assert make_tokenizer(path + "?eos=b").bos_id == 1
