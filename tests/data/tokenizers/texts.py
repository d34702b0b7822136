"""Texts that are hard for tokenizers, and a check that a tokenizer is lossless."""

import numpy as np

from maxlp.data.sources import make_source

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
    source = make_source("stdlib", "validation")
    return [source[i]["text"].decode() for i in range(min(count, len(source)))]


def assert_exact(tokenizer, texts):
    """Lossless, and the byte lengths of the ids add up to the bytes of the text."""
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and ids.ndim == 1
        assert tokenizer.decode(ids) == text
        assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
        assert not set(ids.tolist()) & {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
