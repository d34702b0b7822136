"""CLIP's byte-level BPE (Radford et al. 2021, arXiv:2103.00020), from a `tokenizer.json` or OpenAI's
list of merges.

The vocabulary has lower-case words without the white space between them, so `decode` does not restore
a text exactly. `?pad=!` pads as OpenAI and open_clip do, with id 0.

Ids are those of OpenAI and open_clip for texts that ftfy leaves unchanged. They run it first: it
straightens curly quotes, narrows full-width characters and repairs wrongly decoded text. Here, as in
Hugging Face's tokenizer, these stay as they are.
"""

import gzip
import html
from functools import cached_property

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from maxlp.data.tokenizers import SpecialNames, as_str
from maxlp.data.tokenizers.hugging_face import HuggingFaceTokenizer
from maxlp.runtime.messages import one_line

# Merges stay within one of these: the end of a contraction, a run of letters, a digit, a run of other
# characters.
WORD = r"'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"
SPECIALS = ("<|startoftext|>", "<|endoftext|>")
NUM_MERGES = 49_408 - 2 * 256 - len(SPECIALS)
GZIP_MAGIC = b"\x1f\x8b"


class ClipTokenizer(HuggingFaceTokenizer):
    """A `tokenizer.json` whose words end in `</w>`: lower case, no HTML entities, no white space."""

    def encode(self, text: str | bytes) -> np.ndarray:
        # Unescaped twice, as by OpenAI: alt texts are often escaped twice. The tokenizer.json does
        # the rest, but lowers each character by itself, so that no word would end in a final sigma.
        text = html.unescape(html.unescape(as_str(text)))
        return super().encode(text.lower() if self._lowers else text)

    @cached_property
    def _lowers(self) -> bool:
        normalizer = self._tok.normalizer
        return normalizer is not None and normalizer.normalize_str("A") == "a"

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        raise ValueError("bits per byte need a tokenizer that keeps white space and case, not CLIP's")


def from_merges(data: bytes, names: SpecialNames) -> ClipTokenizer:
    """The tokenizer of OpenAI's list of merges, `bpe_simple_vocab_16e6.txt.gz` or unpacked."""
    return ClipTokenizer(tokenizer_json(data), names)


def tokenizer_json(data: bytes) -> bytes:
    """Converts a list of merges to a `tokenizer.json`.

    Ids are those of OpenAI's CLIP: the 256 bytes, the 256 bytes at the end of a word, the merges in
    order, and the beginning and the end of a text. Only the first 48,894 merges of the list are used,
    as in CLIP.

    Raises:
      ValueError: `data` is not such a list.
    """
    try:
        text = (gzip.decompress(data) if data[:2] == GZIP_MAGIC else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"not a list of merges ({one_line(error)})") from None
    lines = [line.split() for line in text.split("\n")[1 : NUM_MERGES + 1]]
    merges = [(line[0], line[1]) for line in lines if len(line) == 2]
    # Printable bytes come first; the others are represented by characters from U+0100 on.
    characters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (ord(c) >= 256, ord(c)))
    tokens = [*characters, *(c + "</w>" for c in characters), *(first + second for first, second in merges)]
    vocabulary = {token: i for i, token in enumerate([*tokens, *SPECIALS])}
    try:
        tok = tokenizers.Tokenizer(models.BPE(vocabulary, merges, end_of_word_suffix="</w>"))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"not a list of merges ({one_line(error)})") from None
    white_space = tokenizers.Regex(r"\s+")
    tok.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(white_space, " "), normalizers.Lowercase()]
    )
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(WORD), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([*SPECIALS])
    return tok.to_str().encode()
