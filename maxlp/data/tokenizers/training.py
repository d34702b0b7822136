"""Trains byte-level BPE tokenizers."""

import contextlib
import os
from collections.abc import Iterable, Iterator

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from maxlp.data.sources import Mixture, Source
from maxlp.data.tokenizers import SpecialNames, Tokenizer, as_bytes, as_str
from maxlp.data.tokenizers.hugging_face import HuggingFaceTokenizer

SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")

PERMUTED = 2**24  # more documents than this are shuffled one by one, instead of with a list of all of them

# Merges stay within one of these: a word with one preceding space or symbol, up to three digits, a
# run of symbols, a run of white space. Otherwise this follows the patterns of Llama 3 and GPT-4,
# except that a line break also takes the indentation after it, and a run of symbols takes both: 5 %
# fewer tokens on Python source.
SPLIT = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+(?:[\r\n]+[ \t]*)?"
    r"|[\r\n]+[ \t]*"
    r"|\s+(?!\S)|\s"
)


def sample_texts(source: Source | Mixture, max_bytes: int, seed: int) -> Iterator[bytes]:
    """Yields pieces of randomly chosen documents, `max_bytes` bytes in total or as many as there are.

    Every document contributes its first 10 kB before any contributes more, so that a few long ones do
    not dominate (a tokenizer trained on 4 MB of the standard library then needs 3 % fewer tokens). The
    sample depends only on the source, `max_bytes` and `seed`. Each source of a mixture contributes in
    proportion to its weight.

    Raises:
      ValueError: the source holds tokens.
    """
    if isinstance(source, Mixture):
        for part, weight in zip(source.sources, source.weights, strict=True):
            yield from sample_texts(part, int(max_bytes * weight), seed)
        return
    if source.tokenizer:
        raise ValueError(f"source {source.name!r} holds tokens; a tokenizer is trained on text")
    start, stop = 0, 10_000
    if "messages" in source[0]:
        raise ValueError(
            f"source {source.name!r} holds conversations, which need a tokenizer with a chat template, "
            "such as DIR/tokenizer.json?chat_template=plain; prepare text --train_tokenizer makes one"
        )
    indices: Iterable[int] = _shuffled(len(source), seed)
    longer: list[int] = []
    while True:
        for index in indices:
            if max_bytes <= 0:
                return
            data = as_bytes(source[index]["text"])
            piece = data[start:stop][:max_bytes]
            max_bytes -= len(piece)
            yield piece
            if len(data) > stop:
                longer.append(index)
        if not longer:
            return
        indices, longer = longer, []
        start, stop = stop, 3 * stop  # tripled, so that long documents take few passes


def _shuffled(size: int, seed: int) -> Iterable[int]:
    """The numbers below `size` in a random order."""
    if size <= PERMUTED:
        return np.random.default_rng(seed).permutation(size)
    from maxlp.data import common  # which imports Grain

    return (common.shuffled(index, size, (seed,)) for index in range(size))


def train_bpe(
    texts: Iterable[str | bytes], vocab_size: int, ends: bool = False, setting: str = "vocab_size="
) -> Tokenizer:
    """Trains a lossless byte-level BPE; its `files` hold the `tokenizer.json`.

    The three `SPECIALS` get the ids 0, 1, 2 and the bytes the next 256. The same texts in the same
    order give the same file.

    Args:
      texts: documents.
      vocab_size: number of ids, including special tokens and bytes.
      ends: whether other libraries add the end token to a text, besides the beginning token.
      setting: what the user writes before the number, for messages.

    Raises:
      ValueError: `vocab_size` is too small, or the texts are too few to learn that many tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + len(SPECIALS)
    if vocab_size < smallest:
        raise ValueError(
            f"a BPE of {vocab_size} tokens has no room for the {smallest} bytes and special tokens; set "
            f"{setting}{smallest} or more"
        )
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    bos, eos, _ = SPECIALS
    form = f"{bos} $A {eos}" if ends else f"{bos} $A"
    tok.post_processor = processors.TemplateProcessing(form, special_tokens=[(bos, 0), (eos, 1)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=alphabet,
        special_tokens=list(SPECIALS),
        show_progress=False,
    )
    with _parallel_tokenizers():
        tok.train_from_iterator(map(as_str, texts), trainer)
    learned = tok.get_vocab_size()
    if learned != vocab_size:
        raise ValueError(
            f"a BPE of {vocab_size} tokens was requested, but the texts gave only {learned} tokens; set "
            f"{setting}{learned}, or train on more text"
        )
    return HuggingFaceTokenizer(tok.to_str().encode(), SpecialNames())


@contextlib.contextmanager
def _parallel_tokenizers() -> Iterator[None]:
    """Enables the library's threads, and disables them at the end: forked processes would hang or warn."""
    key = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(key)
    os.environ.setdefault(key, "true")
    try:
        yield
    finally:
        os.environ[key] = before or "false"
