"""Hugging Face `tokenizer.json` files."""

import functools
import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers

from maxlp.data.tokenizers import SpecialNames, Tokenizer, as_str, ids_below, piece_bytes
from maxlp.runtime.messages import one_line


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`. It has `byte_lengths` if it is byte-level or its tokens are `▁` pieces."""

    def __init__(self, data: bytes, names: SpecialNames):
        """Reads the bytes of a `tokenizer.json`."""
        try:
            tok = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"not a tokenizer.json ({one_line(error)})") from None
        tok.no_truncation()
        tok.no_padding()
        tok.encode_special_tokens = True  # names of special tokens in a text are encoded as text
        self._tok = tok
        self._args = (data, names)
        self._added = tok.get_added_tokens_decoder()
        self.vocab_size = max(tok.get_vocab(with_added_tokens=True).values()) + 1
        self.specials = {token.content: i for i, token in self._added.items() if token.special}
        self.bos_id, self.eos_id, self.pad_id = names.find(self.specials, tok.token_to_id)
        if "bos" not in names.given and tok.encode("").ids == [self.eos_id]:
            self.bos_id = self.eos_id  # the file itself adds no bos to a text, as with SigLIP 2
        self.fingerprint = hashlib.sha256(data).hexdigest()
        self.files = {"tokenizer.json": data}

    def __reduce__(self) -> tuple[Any, ...]:
        # The library's own pickle loses `encode_special_tokens`.
        return type(self), self._args, {"files": self.files}

    def encode(self, text: str | bytes) -> np.ndarray:
        # A batch of one is twice as fast as `encode`, because it keeps no character offsets.
        try:
            (encoding,) = self._tok.encode_batch_fast([as_str(text)], add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(
                f"the tokenizer.json cannot encode a text ({one_line(error)}); give another data.tokenizer"
            ) from None
        return np.array(encoding.ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tok.decode(ids_below(ids, self.vocab_size).tolist())

    @cached_property
    def tokens(self) -> list[bytes]:
        """See `Tokenizer`; with other decoders than byte-level and SentencePiece's, as in the file."""
        as_bytes = {"bytes": level_bytes, "pieces": piece_bytes}.get(self._alphabet(), str.encode)
        tokens = [b""] * self.vocab_size
        for token, i in self._tok.get_vocab(with_added_tokens=False).items():
            tokens[i] = as_bytes(token)
        for i, token in self._added.items():
            tokens[i] = b"" if token.special else token.content.encode()
        return tokens

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        if not self._alphabet():
            decoder = json.loads(self._args[0])["decoder"]
            raise ValueError(
                "bits per byte need a byte-level or SentencePiece-like tokenizer.json;"
                f" the decoder of this one is {(decoder or {}).get('type')}"
            )
        return super().byte_lengths

    def _alphabet(self) -> str:
        """What a token is written in: "bytes", "pieces" as in SentencePiece, or "" for neither."""
        decoder = json.dumps(json.loads(self._args[0])["decoder"], ensure_ascii=False)
        if '"ByteLevel"' in decoder:
            return "bytes"
        return "pieces" if "▁" in decoder else ""


@functools.cache
def _byte_of() -> dict[str, int]:
    """GPT-2's character for each byte: printable ones are themselves, the others follow from U+0100 on."""
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    printable = {chr(i): i for i in range(256) if chr(i) in alphabet}
    others = (i for i in range(256) if chr(i) not in alphabet)
    return printable | {chr(256 + n): i for n, i in enumerate(others)}


def level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token, in which each character stands for one."""
    table = _byte_of()
    return b"".join(bytes([table[c]]) if c in table else c.encode() for c in token)
