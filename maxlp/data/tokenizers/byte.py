"""The byte tokenizer."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from maxlp.data.tokenizers import Tokenizer, as_bytes, ids_below


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes, 256 is bos, 257 eos, 258 pad."""

    vocab_size = 259
    bos_id, eos_id, pad_id = 256, 257, 258
    fingerprint = "bytes"
    any_bytes = True

    def __init__(self) -> None:
        self.files, self.specials = {}, {}

    def encode(self, text: str | bytes) -> np.ndarray:
        return np.frombuffer(as_bytes(text), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return ids_below(ids, 256).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    @cached_property
    def tokens(self) -> list[bytes]:
        return [bytes([i]) for i in range(256)] + [b""] * 3
