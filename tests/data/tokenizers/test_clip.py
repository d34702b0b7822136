"""CLIP's tokenizer against a slow one."""

import gzip
import html
import pickle
import re
import unicodedata

import pytest

from maxlp.data.tokenizers import make_tokenizer


def stand_in_of_bytes():
    """GPT-2's characters for bytes, in the order of CLIP's vocabulary."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(rest)}


def slow_clip(text, merges):
    """Ids by CLIP's rules, a merge at a time."""
    stand_in = stand_in_of_bytes()
    units = [*stand_in.values()]
    ids = {unit: i for i, unit in enumerate([*units, *(u + "</w>" for u in units), *map("".join, merges)])}
    text = re.sub(r"\s+", " ", html.unescape(html.unescape(text))).lower()
    words = re.findall(
        r"'s|'t|'re|'ve|'m|'ll|'d|[^\W\d_]+|\d|(?:[^\s\w]|_)+", unicodedata.normalize("NFC", text)
    )
    result = []
    for word in words:
        parts = [stand_in[byte] for byte in word.encode()]
        parts[-1] += "</w>"
        for first, second in merges:  # in the order of their rank
            at = 0
            while at + 1 < len(parts):
                if (parts[at], parts[at + 1]) == (first, second):
                    parts[at : at + 2] = [first + second]
                at += 1
        result += [ids[part] for part in parts]
    return result


def test_clip_tokenizer_equals_a_slow_one(tmp_path):
    merges = "i n|t h|a n|th e</w>|in g</w>|an d</w>|l e|c a|ca t</w>|' s</w>|e r|er s</w>|Ã ©</w>|2 0"
    merges = [tuple(pair.split()) for pair in merges.split("|")]
    path = tmp_path / "bpe_simple_vocab_16e6.txt.gz"
    path.write_bytes(gzip.compress(("#version: 0.2\n" + "\n".join(map(" ".join, merges)) + "\n").encode()))
    tok = make_tokenizer(str(path))
    for text in [
        "The  cat's\n\tsinging and THE CATS",
        "a photo of 2020 things, isn't it?!  &amp;lt;b&amp;gt; &quot;café&quot;",
        "e\u0301té 漢字 🎉 ½ x_y <|endoftext|>",
        "ΟΔΟΣ ΣΕ",
        "",
    ]:
        assert tok.encode(text).tolist() == slow_clip(text, merges), text
    assert (tok.bos_id, tok.eos_id) == (
        512 + len(merges),
        513 + len(merges),
    ) and tok.vocab_size == 514 + len(merges)
    # The run's own copy and a worker's are the same tokenizer.
    (tmp_path / "tokenizer.json").write_bytes(tok.files["tokenizer.json"])
    for other in (make_tokenizer(str(tmp_path / "tokenizer.json")), pickle.loads(pickle.dumps(tok))):
        assert other.fingerprint == tok.fingerprint and type(other) is type(tok)
        assert other.encode("The cat&#39;s").tolist() == slow_clip("the cat's", merges)
    assert make_tokenizer(f"{path}?pad=!").pad_id == 0
    (tmp_path / "bad.txt.gz").write_bytes(b"\x1f\x8bnot gzip")
    with pytest.raises(ValueError, match=r"bad\.txt\.gz: not a list of merges"):
        make_tokenizer(str(tmp_path / "bad.txt.gz"))
