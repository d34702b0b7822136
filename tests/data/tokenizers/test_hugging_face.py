import contextlib
import json

import pytest

from maxlp.data.tokenizers import make_tokenizer
from tests.data.tokenizers.texts import HOSTILE, assert_exact, stdlib_texts


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
    tok.enable_truncation(16)  # as in some files; it must not cut a document
    tok.enable_padding(length=32)
    tok.save(str(path))
    return str(path)


@contextlib.contextmanager
def edited_json(path):
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    yield config
    with open(path, "w", encoding="utf-8") as file:
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


def test_a_text_that_cannot_be_encoded(tmp_path):
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    words = Tokenizer(models.WordLevel({"hello": 0}))
    words.add_special_tokens(["</s>"])
    words.save(str(path))
    tok = make_tokenizer(str(path))
    assert tok.encode("hello").tolist() == [0]
    with pytest.raises(ValueError, match=r"cannot encode a text \(.*Missing \[UNK\] token"):
        tok.encode("other")
