"""The likelihood of continuations under a language model, as benchmarks ask for it.

Shape letters: B rows · S length.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlp.data.tokenizers import Tokenizer
from maxlp.families.llama import losses
from maxlp.nn.decoding import padded_length

BATCH_TOKENS = 4096  # at once, on all devices: 2 GiB of logits at a vocabulary of 128k
LENGTH_STEP = 128  # lengths are padded to multiples of it, as attention kernels of TPUs need

Ids = Sequence[int]


def encode_document(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, after the one that begins documents in training."""
    return [tokenizer.bos_id, *(tokenizer.encode(text).tolist() if text else [])]


def encode_pair(
    encode: Callable[[str], list[int]], context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """The tokens of a context and those of its continuation.

    White space at the end of the context moves to the continuation, as tokenizers join it with a word. So
    does a token that holds the end of the context and the whole continuation, such as `(A`.

    Args:
      encode: the tokens of a text from its beginning on, such as `encode_document`.
    """
    begin, whole = encode(context.rstrip()), encode(context + continuation)
    if len(begin) >= len(whole):  # without a token, the continuation would seem certain
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(begin, whole, strict=False))
        begin = [token for token, _ in same]
    return begin, whole[len(begin) :]


def rolling(tokenizer: Tokenizer, text: str, max_len: int) -> list[tuple[list[int], list[int]]]:
    """Contexts and continuations that together score each token of a text once.

    Each continuation has up to `max_len` tokens; the last one has as much context as the model reads.
    """
    ids = encode_document(tokenizer, text)
    ends = [min(begin + max_len, len(ids) - 1) for begin in range(0, len(ids) - 1, max_len)]
    return [
        (ids[max(0, end - max_len) : begin + 1], ids[begin + 1 : end + 1])
        for begin, end in zip([0, *ends], ends, strict=False)
    ]


def score(model: nnx.Module, pairs: Sequence[tuple[Ids, Ids]], max_len: int) -> list[tuple[float, bool]]:
    """The log-likelihood in nats of each continuation, and whether it is the greedy one.

    Args:
      pairs: tokens of contexts, at least one each, and of their continuations. Where both have more than
        `max_len + 1` tokens, the first ones of the context are left out.
      max_len: how many tokens the model reads.

    Raises:
      ValueError: a continuation does not fit.
    """
    longest = max((len(continuation) for _, continuation in pairs), default=0)
    if longest > max_len:
        raise ValueError(f"a continuation has {longest} tokens, more than model.max_seq_len={max_len}")
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, (context, continuation) in enumerate(pairs):
        length = min(len(context) + len(continuation) - 1, max_len)
        by_length[padded_length(length, LENGTH_STEP)].append(number)
    graphdef, state = nnx.split(model)
    found: dict[int, tuple[float, bool]] = {}
    for length, numbers in sorted(by_length.items(), reverse=True):
        for rows in batches(numbers, rows_of(length)):
            batch = _rows([pairs[number] for number in rows], length, max_len)
            sums = jax.device_get(_score(graphdef, nnx.to_pure_dict(state), *batch))
            found |= {n: (float(value), bool(greedy)) for n, value, greedy in zip(rows, *sums, strict=True)}
    return [found[number] for number in range(len(pairs))]


def rows_of(length: int) -> int:
    """How many sequences of a length are one batch; a multiple of the devices, over which it is split."""
    devices = jax.device_count()
    return max(1, BATCH_TOKENS // length // devices) * devices


def batches(numbers: Sequence[int], size: int) -> Iterable[list[int]]:
    """Parts of one size; the last one repeats its last number, so that all have the same shape."""
    for start in range(0, len(numbers), size):
        part = [*numbers[start : start + size]]
        yield part + part[-1:] * (size - len(part))


def _rows(pairs: Sequence[tuple[Ids, Ids]], length: int, max_len: int) -> tuple[np.ndarray, ...]:
    """Inputs, targets and which targets count, each (B, S)."""
    tokens_BS, targets_BS = np.zeros((2, len(pairs), length), np.int32)
    mask_BS = np.zeros((len(pairs), length), bool)
    for row, (context, continuation) in enumerate(pairs):
        ids = [*context, *continuation][-max_len - 1 :]
        size = len(ids) - 1
        tokens_BS[row, :size], targets_BS[row, :size] = ids[:-1], ids[1:]
        mask_BS[row, size - len(continuation) : size] = True
    return tokens_BS, targets_BS, mask_BS


@functools.partial(jax.jit, static_argnames="graphdef")
def _score(
    graphdef: nnx.GraphDef, state: dict, tokens_BS: jax.Array, targets_BS: jax.Array, mask_BS: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """For each row, the log-likelihood of the targets that count, and whether all are the argmax (B,)."""
    nll_BS, _, hit_BS = losses.cross_entropy(nnx.merge(graphdef, state)(tokens_BS), targets_BS)
    return -jnp.sum(jnp.where(mask_BS, nll_BS, 0.0), axis=1), jnp.all(hit_BS | ~mask_BS, axis=1)
