"""Hugging Face `tokenizer.json` files."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers

from maxlp.data.specs import one_line
from maxlp.data.tokenizers import Tokenizer, as_str, find_specials, ids_below, piece_bytes


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`. It has `byte_lengths` if it is byte-level or its tokens are `▁` pieces."""

    def __init__(self, data: bytes, bos: str | None = None, eos: str | None = None, pad: str | None = None):
        """Reads the bytes of a `tokenizer.json`; `bos`, `eos`, `pad` as in `find_specials`."""
        try:
            tok = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"not a tokenizer.json ({one_line(error)})") from None
        tok.no_truncation()
        tok.no_padding()
        tok.encode_special_tokens = True  # names of special tokens in a text are encoded as text
        self._tok = tok
        self._args = (data, bos, eos, pad)
        self._added = tok.get_added_tokens_decoder()
        self.vocab_size = max(tok.get_vocab(with_added_tokens=True).values()) + 1
        self.specials = {token.content: i for i, token in self._added.items() if token.special}
        self.bos_id, self.eos_id, self.pad_id = find_specials(self.specials, tok.token_to_id, bos, eos, pad)
        self.fingerprint = hashlib.sha256(data).hexdigest()
        self.files = {"tokenizer.json": data}

    def __reduce__(self) -> tuple[Any, ...]:
        # The library's own pickle loses `encode_special_tokens`.
        return type(self), self._args, {"files": self.files}

    def encode(self, text: str | bytes) -> np.ndarray:
        # A batch of one is twice as fast as `encode`, because it keeps no character offsets.
        (encoding,) = self._tok.encode_batch_fast([as_str(text)], add_special_tokens=False)
        ids = encoding.ids
        return np.fromiter(ids, np.int32, len(ids))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tok.decode(ids_below(ids, self.vocab_size).tolist())

    def _byte_lengths(self) -> np.ndarray:
        config = json.loads(self._args[0])
        if '"ByteLevel"' in json.dumps(config["decoder"]):
            length = len  # each character of a byte-level token is one byte
        elif "▁" in json.dumps(config["decoder"], ensure_ascii=False):
            length = piece_bytes
        else:
            raise ValueError(
                "bits per byte need a byte-level or SentencePiece-like tokenizer.json;"
                f" the decoder of this one is {(config['decoder'] or {}).get('type')}"
            )
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, i in self._tok.get_vocab(with_added_tokens=False).items():
            lengths[i] = length(token)
        for i, token in self._added.items():
            lengths[i] = 0 if token.special else len(token.content.encode())
        return lengths
