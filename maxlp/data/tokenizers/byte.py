"""The byte tokenizer."""

from collections.abc import Sequence

import numpy as np

from maxlp.data.tokenizers import Tokenizer, as_bytes, ids_below


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes, 256 is bos, 257 eos, 258 pad."""

    vocab_size = 259
    bos_id, eos_id, pad_id = 256, 257, 258
    fingerprint = "bytes"

    def __init__(self) -> None:
        self.files = {}

    def encode(self, text: str | bytes) -> np.ndarray:
        return np.frombuffer(as_bytes(text), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return ids_below(ids, 256).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def _byte_lengths(self) -> np.ndarray:
        return np.array([1] * 256 + [0] * 3, np.int32)
