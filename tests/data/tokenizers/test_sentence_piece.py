from maxlp.data.tokenizers import make_tokenizer
from tests.data.tokenizers.texts import HOSTILE, assert_exact, stdlib_texts


def test_sentencepiece_is_exact(sentencepiece_paths):
    texts = HOSTILE + stdlib_texts()
    tokenizer = make_tokenizer(sentencepiece_paths[False])
    assert (tokenizer.vocab_size, tokenizer.prefix_bytes) == (600, 0)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    assert tokenizer.tokens[:3] == [b""] * 3, "<unk> and the special tokens"
    assert_exact(tokenizer, texts)
    prefixed = make_tokenizer(sentencepiece_paths[True])
    assert prefixed.prefix_bytes == 1
    for text in filter(None, texts):
        ids = prefixed.encode(text)
        assert prefixed.decode(ids) == text
        assert prefixed.byte_lengths[ids].sum() == len(text.encode()) + 1
    assert tokenizer.decode(tokenizer.encode("a▁b")) == "a b"  # the only character that is not kept
