"""Packing: documents of different lengths into windows of one length.

In a window, documents are numbered by `segment_ids` from 1, and `positions` count from 0 in each.
Padding has segment 0. `loss_mask` is true where the target is the next token of the same document, unless
that token is only read, as in the prompt of a conversation: such tokens come as their complements `~id`.
Some attention kernels bound the number of documents in a window (`max_documents`); a window with that many
is closed, and the rest of it is padding.

Letters: W windows, S sequence length.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from maxlp.data.common import Batch


class Documents(Protocol):
    """A queue of tokenized documents, the first of them perhaps partly consumed.

    Attributes:
      offset: number of tokens of the first document that are consumed.
    """

    offset: int

    def peek(self, index: int) -> np.ndarray | None:
        """All tokens of the `index`-th document of the queue; None after the last."""
        ...

    def advance(self, documents: int, offset: int) -> None:
        """Removes documents from the front, and sets the offset in the one that is then first."""
        ...


def pack_concat(
    documents: Documents, num_windows: int, seq_len: int, pad_id: int, max_documents: int | None
) -> Batch:
    """Cuts the next `num_windows * seq_len` tokens, documents end to end, into windows [W, S].

    All tokens are learned: `data.chat` refuses this packing for conversations.
    """
    size = num_windows * seq_len
    # One token more than the windows hold: the last target, which is also the first token of the next
    # block.
    tokens, owner = np.full(size + 1, pad_id, np.int32), np.full(size + 1, -1, np.int32)
    end, index, offset = 0, 0, documents.offset
    held = 0  # documents so far in the window that is being filled
    while (document := documents.peek(index)) is not None:
        begin = end
        if held == max_documents:  # the window is closed
            begin += -end % seq_len
        end = min(begin + len(document) - offset, size + 1)
        tokens[begin:end] = document[offset : offset + end - begin]
        owner[begin:end] = index
        if end > size:
            offset += size - begin
            break
        if end > begin:
            joins = begin % seq_len and begin // seq_len == end // seq_len
            held = held + 1 if joins else 1
        index, offset = index + 1, 0
    documents.advance(index, offset)
    is_target = (owner[:-1] == owner[1:]) & (owner[:-1] >= 0)
    targets = np.where(owner[:-1] >= 0, tokens[1:], pad_id)
    return {
        "tokens": tokens[:-1].reshape(num_windows, seq_len),
        "targets": targets.reshape(num_windows, seq_len),
        "loss_mask": is_target.reshape(num_windows, seq_len),
        **_segments(owner[:-1].reshape(num_windows, seq_len)),
    }


def pack_first_fit(
    documents: Documents, num_windows: int, seq_len: int, pad_id: int, max_documents: int | None
) -> Batch:
    """Puts each document in turn, in pieces of at most S, into the first window [W, S] with room for it.

    Stops at the first piece for which no window has room.
    """
    tokens_WS, targets_WS = np.full((2, num_windows, seq_len), pad_id, np.int32)
    owner_WS = np.full((num_windows, seq_len), -1, np.int32)
    free_W, held_W = [seq_len] * num_windows, [0] * num_windows
    # Room only shrinks, so the search for a size continues where the last one of that size ended.
    first: dict[int, int] = {}
    index, offset = 0, documents.offset
    while (document := documents.peek(index)) is not None:
        size = min(seq_len, len(document) - 1 - offset)
        if size <= 0:
            index, offset = index + 1, 0
            continue
        window = next((w for w in range(first.get(size, 0), num_windows) if free_W[w] >= size), None)
        if window is None:
            break
        first[size] = window
        begin = seq_len - free_W[window]
        held_W[window] += 1
        free_W[window] = free_W[window] - size if held_W[window] != max_documents else 0
        tokens_WS[window, begin : begin + size] = document[offset : offset + size]
        targets_WS[window, begin : begin + size] = document[offset + 1 : offset + 1 + size]
        owner_WS[window, begin : begin + size] = index
        offset += size
    documents.advance(index, offset)
    return {
        "tokens": _ids(tokens_WS),
        "targets": _ids(targets_WS),
        "loss_mask": (owner_WS >= 0) & (targets_WS >= 0),
        **_segments(owner_WS),
    }


PACKERS: dict[str, Callable[[Documents, int, int, int, int | None], Batch]] = {
    "concat": pack_concat,
    "first_fit": pack_first_fit,
}


def _ids(tokens: np.ndarray) -> np.ndarray:
    """The ids of tokens, some of which may be given as their complement `~id`, which is negative."""
    return np.maximum(tokens, ~tokens)


def _segments(owner_WS: np.ndarray) -> Batch:
    """Segment ids and positions, int32 [W, S], from the index of each token's document; -1 is padding."""
    starts_WS = np.zeros(owner_WS.shape, bool)
    starts_WS[:, 1:] = owner_WS[:, 1:] != owner_WS[:, :-1]
    column_S = np.arange(owner_WS.shape[1], dtype=np.int32)
    start_WS = np.maximum.accumulate(np.where(starts_WS, column_S, 0), axis=1)
    is_text_WS = owner_WS >= 0
    return {
        "segment_ids": (np.cumsum(starts_WS, axis=1, dtype=np.int32) + 1) * is_text_WS,
        "positions": (column_S - start_WS) * is_text_WS,
    }
