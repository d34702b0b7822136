"""Another vocabulary for trained weights: which rows each of its tokens starts from."""

import jax
import numpy as np
import pytest

from maxlp.data.tokenizers import SpecialNames
from maxlp.data.tokenizers.byte import ByteTokenizer
from maxlp.data.tokenizers.hugging_face import HuggingFaceTokenizer
from maxlp.data.tokenizers.training import train_bpe
from maxlp.run import pretrained
from maxlp.run.config import ConfigError
from maxlp.run.experiment import resolve
from maxlp.run.settings import read
from maxlp.run.tokenizer import prepare_tokenizer
from maxlp.run.tokenizer_swap import pieces
from tests.pretrained import write_llama
from tests.run.fixtures import changed, load

OLD = train_bpe(["the cat sat on the mat, and the dog on the cat"] * 9, 275)
NEW = train_bpe(["der Hund saß auf der Matte, und the cat übte"] * 9, 285)


def sentence_piece(tokens: list[str]) -> HuggingFaceTokenizer:
    """As that of Llama 2: `▁` for a space, one in front of each text, tokens for single bytes."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    specials = ["<unk>", "<s>", "</s>"]
    vocabulary = [*specials, *(f"<0x{i:02X}>" for i in range(256)), *tokens]
    merges = [(t[:i], t[i:]) for t in tokens for i in range(1, len(t)) if {t[:i], t[i:]} <= {*tokens}]
    tok = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(vocabulary)}, merges, byte_fallback=True, unk_token="<unk>")
    )
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tok.add_special_tokens(specials)
    return HuggingFaceTokenizer(tok.to_str().encode(), SpecialNames())


PIECES = sentence_piece(["▁", "a", "b", "c", "t", "at", "cat", "▁cat"])


@pytest.mark.parametrize("old", [OLD, PIECES, ByteTokenizer()], ids=["bpe", "pieces", "bytes"])
@pytest.mark.parametrize("new", [NEW, PIECES, ByteTokenizer()], ids=["bpe", "pieces", "bytes"])
def test_a_shared_token_keeps_its_row_and_another_gets_those_of_its_text(new, old):
    found = pieces(new, old)
    assert len(found) == new.vocab_size
    for i, token in enumerate(new.tokens):
        if not token:
            continue
        text = b"".join(old.tokens[j] for j in found[i])
        assert text == token or (old.prefix_bytes and text == b" " + token), "the pieces spell the token"
        assert len(found[i]) == 1 or token not in old.tokens
    assert any(len(each) > 1 for each in found) or new is old or new.vocab_size == 259


@pytest.mark.parametrize("tokenizer", [OLD, PIECES, ByteTokenizer()], ids=["bpe", "pieces", "bytes"])
def test_the_same_tokenizer_changes_nothing(tokenizer):
    unknown = {0} if tokenizer is PIECES else set()  # <unk>, for which there is no text
    assert all(found == [i] for i, found in enumerate(pieces(tokenizer, tokenizer)) if i not in unknown)


def test_special_tokens_go_by_name_then_by_role():
    found = pieces(NEW, OLD)
    assert [found[i] for i in (NEW.bos_id, NEW.eos_id, NEW.pad_id)] == [[0], [1], [2]]
    found = pieces(ByteTokenizer(), PIECES)
    assert found[256:] == [[PIECES.bos_id], [PIECES.eos_id], [PIECES.pad_id]]


def test_bytes_of_a_part_of_a_character_and_a_space_in_front():
    part, letters = "ß".encode()[:1], 3 + 256  # after the special tokens and the bytes
    a, b, t = (PIECES.tokens.index(letter, letters) for letter in (b"a", b"b", b"t"))
    found = pieces(ByteTokenizer(), PIECES)
    assert found[part[0]] == [PIECES.tokens.index(part)]
    assert found[ord("a")] == [a], "the letter, not its byte"
    *_, tab = pieces(sentence_piece(["▁", "a", "b", "tab"]), PIECES)
    assert tab == [t, a, b], "without the space that `encode` puts in front"


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.parametrize("tie", [True, False])
def test_rows_of_embedding_and_head_are_kept_or_means(tmp_path, devices, tie):
    # With rows that no token has.
    folder, workdir = write_llama(tmp_path / "hf", tie_embeddings=tie, vocab_size=320), tmp_path / "run"
    (tmp_path / "new.json").write_bytes(NEW.files["tokenizer.json"])
    workdir.mkdir()
    c = changed(load("debug"), {"data.seq_len": 32, "mesh.fsdp": -1})
    c = pretrained.configure(c, workdir, str(folder), f"{tmp_path}/new.json")
    assert c.model.vocab_size == 384 and c.train.swap_tokenizer, "a multiple of 128"
    s = read(c)
    prepare_tokenizer(s, workdir)
    run = resolve(c, jax.devices()[:devices])
    with jax.set_mesh(run.mesh):
        new = jax.device_get(pretrained.load(s, run.mesh, workdir))
        plain = changed(load("debug"), {"data.seq_len": 32})
        old = jax.device_get(
            pretrained.load(read(pretrained.configure(plain, workdir, str(folder))), run.mesh, None)
        )
    theirs = pretrained.make_tokenizer(str(folder))
    tables = [(old["tok_embed"]["embedding"], new["tok_embed"]["embedding"])]
    if not tie:
        tables.append((old["lm_head"]["kernel"].T, new["lm_head"]["kernel"].T))
    for before, after in tables:
        for i, found in enumerate(pieces(NEW, theirs)):
            # float32 sums of K rows, in another order: K roundings of 2^-24
            tolerance = 0 if len(found) == 1 else 2**-22
            np.testing.assert_allclose(after[i], before[found].mean(0), atol=tolerance, rtol=0)
        everything = before[: theirs.vocab_size].mean(0)
        rest = after[NEW.vocab_size :]
        # Means of all rows, in float32.
        np.testing.assert_allclose(rest, np.tile(everything, (len(rest), 1)), atol=2**-20)
    assert (new["final_norm"]["scale"] == old["final_norm"]["scale"]).all()


def test_contradictions_are_refused(tmp_path):
    folder = write_llama(tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"^--swap_tokenizer=bytes needs --from"):
        pretrained.configure(load("debug"), tmp_path, None, "bytes")
    with pytest.raises(
        ConfigError, match=r"^--swap_tokenizer=bytes contradicts .*tokenizer=bpe:300; give one"
    ):
        pretrained.configure(
            changed(load("debug"), {}), tmp_path, str(folder), "bytes", {"data.tokenizer": "bpe:300"}
        )
