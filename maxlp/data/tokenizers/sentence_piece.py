"""SentencePiece `.model` files."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from maxlp.data.tokenizers import SpecialNames, Tokenizer, as_str, ids_below, piece_bytes
from maxlp.runtime.extras import import_extra
from maxlp.runtime.messages import one_line


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. The character `▁` (U+2581) in a text is read as a space."""

    def __init__(self, data: bytes, names: SpecialNames):
        """Reads the bytes of a model."""
        sentencepiece = import_extra("sentencepiece")
        if not data:  # SentencePiece takes it for a model without pieces
            raise ValueError("not a SentencePiece model (the file is empty)")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=data)
        except RuntimeError as error:
            raise ValueError(f"not a SentencePiece model ({one_line(error)})") from None
        self._args = (data, names)
        self.vocab_size = self._model.get_piece_size()
        pieces = {self._model.id_to_piece(i): i for i in range(self.vocab_size)}
        self.specials = {piece: i for piece, i in pieces.items() if self._model.is_control(i)}
        self.bos_id, self.eos_id, self.pad_id = names.find(self.specials, pieces.get)
        self.fingerprint = hashlib.sha256(data).hexdigest()
        self.files = {"tokenizer.model": data}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._args, {"files": self.files}

    def encode(self, text: str | bytes) -> np.ndarray:
        return np.asarray(self._model.encode(as_str(text)), np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._model.decode(ids_below(ids, self.vocab_size).tolist())

    @cached_property
    def tokens(self) -> list[bytes]:
        model = self._model

        def token(i: int) -> bytes:
            if model.is_control(i) or model.is_unknown(i) or model.is_unused(i):
                return b""
            return piece_bytes(model.id_to_piece(i))

        return [token(i) for i in range(self.vocab_size)]
