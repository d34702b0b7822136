import numpy as np

from maxlp.data.tokenizers import make_tokenizer
from tests.data.tokenizers.texts import HOSTILE, INVALID, assert_exact, stdlib_texts


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
