"""About how many tokens and windows the documents of a source give, from a sample. Letters: W windows."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxlp.data import common
from maxlp.data.tokenizers import Tokenizer, as_bytes
from maxlp.runtime.messages import counted, rounded

# With fewer documents, a few long ones among them would matter.
SAMPLED_DOCUMENTS, ENOUGH_DOCUMENTS, SAMPLE_SECONDS = 1024, 128, 0.5
ENCODED_BYTES, ENCODED_PIECE = 200_000, 4_000


def describe(sources: Sequence[Any], tokenizer: Tokenizer, settings: Mapping[str, Any], steps: int) -> str:
    """See `text.TextDataset.describe`."""
    noun = "document" if settings["documents"] == [1] else "documents"
    documents = f"{' + '.join(f'{count:,}' for count in settings['documents'])} {noun}"
    found = [sample_lengths(source, tokenizer) for source in sources]
    lengths = [sample for sample in found if sample is not None and sample.any()]
    if not lengths or len(lengths) < len(found):
        return documents
    tokens = [len(source) * float(n.mean()) for source, n in zip(sources, lengths, strict=True)]
    documents += f", about {' + '.join(rounded(n, 2) for n in tokens)} tokens"
    if not steps:
        return documents
    per_window = [tokens_per_window(sample, settings) for sample in lengths]
    shares = zip(settings["weights"], per_window, tokens, strict=True)
    rows = steps * settings["batch_size"]
    epochs = " + ".join(rounded(weight * rows * size / n, 2) for weight, size, n in shares)
    steps_per_epoch = tokens[0] / per_window[0] / settings["batch_size"]
    ends = early_end(settings["num_epochs"], steps_per_epoch, steps)
    return f"{documents}; {counted(steps, 'step reads', 'steps read')} {epochs} epochs{ends}"


def early_end(num_epochs: int | None, steps_per_epoch: float, steps: int) -> str:
    """A warning on a line of its own if the data ends before this many steps; "" if it is enough."""
    if num_epochs is None:
        return ""
    last = math.ceil(num_epochs * steps_per_epoch)
    if last >= steps:
        return ""
    return (
        f"\nwarning: data.num_epochs={num_epochs} ends the data after about {last:,} of {steps:,} steps; "
        "raise it, or lower train.total_steps"
    )


def sample_lengths(source: Any, tokenizer: Tokenizer) -> np.ndarray | None:
    """About how many tokens, bos and eos included, each of some documents has, spread over a source.

    Returns:
      int64 [documents]; None if reading them takes long, as over a network.

    Raises:
      ValueError: one of them cannot be used.
    """
    began = time.monotonic()
    indices = np.unique(np.linspace(0, len(source) - 1, SAMPLED_DOCUMENTS).astype(np.int64))
    texts, lengths = [], []  # in bytes, in tokens
    encoded_size = encoded_tokens = 0
    specials = 2  # bos and eos
    # In another order, so that the first of them are spread over the source, too.
    for number, index in enumerate(common.permutation(len(indices), (0,))):
        if time.monotonic() - began > SAMPLE_SECONDS:
            if number < ENOUGH_DOCUMENTS:
                return None
            break
        document = source[int(indices[index])]  # a broken one ends the run before it trains
        if "conversation" in document:
            lengths.append(len(document["conversation"]))
        elif "tokens" in document:
            tokens = len(document["tokens"])
            lengths.append(tokens + specials if tokens else 0)
        else:
            content = as_bytes(document["text"])
            texts.append(len(content))
            if encoded_size < ENCODED_BYTES:
                piece = content[:ENCODED_PIECE]
                encoded_size += len(piece)
                encoded_tokens += len(tokenizer.encode(piece))
    tokens_per_byte = encoded_tokens / max(1, encoded_size)
    of_texts = (round(size * tokens_per_byte) + specials if size else 0 for size in texts)
    return np.array([*lengths, *of_texts], np.int64)


def tokens_per_window(lengths: np.ndarray, settings: Mapping[str, Any]) -> float:
    """How many tokens of documents of these lengths a window holds on average, see `packing`."""
    seq_len, most = settings["seq_len"], settings["max_documents"]
    if settings["packing"] == "concat":
        return float(lengths.sum()) / concat_windows(lengths, seq_len, most)
    return float(lengths.sum()) / max(1, count_windows(lengths, seq_len, most))


def concat_windows(lengths: np.ndarray, seq_len: int, max_documents: int | None) -> float:
    """How many windows `pack_concat` fills with documents of these lengths, the last one in part."""
    end = held = 0
    for length in lengths[lengths > 0].tolist():
        begin = end
        if held == max_documents:  # the window is closed
            begin += -end % seq_len
        end = begin + length
        held = held + 1 if begin % seq_len and begin // seq_len == end // seq_len else 1
    return end / seq_len


def count_windows(lengths: np.ndarray, seq_len: int, max_documents: int | None) -> int:
    """How many windows `pack_first_fit` fills with documents of these lengths, if it may fill any."""
    whole, free_W, held_W = 0, np.full(len(lengths), seq_len), np.zeros(len(lengths), int)
    for length in lengths:
        pieces, size = divmod(max(0, int(length) - 1), seq_len)
        whole += pieces
        if size:
            window = int(np.argmax(free_W >= size))
            held_W[window] += 1
            free_W[window] = free_W[window] - size if held_W[window] != max_documents else 0
    return whole + int(np.count_nonzero(held_W))
