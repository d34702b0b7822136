"""Another vocabulary for trained weights (``--swap_tokenizer``).

A token that both tokenizers have keeps its rows of the embedding table and of the head. Any other starts
from the mean of the rows of its pieces, into which the old tokenizer splits its text: the fast vocabulary
transfer of Gee et al. 2022 (arXiv:2402.09977).

Shape letters: V rows of the old vocabulary · W of the new one · K pieces of a token · D embed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.traversals import flatten_mapping, unflatten_mapping

from maxlp.core.train_state import MakeModel, State
from maxlp.data.tokenizers import Tokenizer
from maxlp.nn.lora import axes_of
from maxlp.run.settings import TrainConfig


def refusal(train: TrainConfig) -> str | None:
    """The message for a run that cannot have its tokenizer swapped; see `run.constraints`."""
    if not train.init_from:
        return "train.swap_tokenizer needs train.init_from, the weights to swap it of; give --from"
    if train.lora is None:
        return None
    return (
        f"train.swap_tokenizer adds tokens, which train.lora.rank={train.lora.rank} would leave frozen; "
        "unset one of them"
    )


def pieces(new: Tokenizer, old: Tokenizer) -> list[list[int]]:
    """For each id of a new tokenizer, the ids of the old one; it starts from the mean of their rows."""
    own, found = _ids_of(old), [[] for _ in new.tokens]
    for token, ids in _ids_of(new).items():
        theirs = own.get(token, [])
        if len(theirs) == len(ids):  # several have the same text: SentencePiece's "A" and its byte "<0x41>"
            sources = [[i] for i in theirs]
        else:
            sources = [theirs[-1:] or _pieces_of(token, old, own)] * len(ids)
        for i, source in zip(ids, sources, strict=True):
            found[i] = source
    for name, i in new.specials.items():
        found[i] = [old.specials[name]] if name in old.specials else _pieces_of(name.encode(), old, own)
    for role in ("pad_id", "bos_id", "eos_id"):  # a vocabulary without pad or bos uses eos in their place
        found[getattr(new, role)] = [getattr(old, role)]
    return found


def _ids_of(tokenizer: Tokenizer) -> dict[bytes, list[int]]:
    ids: dict[bytes, list[int]] = {}
    for i, token in enumerate(tokenizer.tokens):
        if token:
            ids.setdefault(token, []).append(i)
    return ids


def _pieces_of(token: bytes, old: Tokenizer, own: dict[bytes, list[int]]) -> list[int]:
    """The old ids of a text, or of its bytes if it is a part of a character; [] if there are none."""
    try:
        token.decode()
    except UnicodeDecodeError:
        return [own[byte][-1] for byte in (token[i : i + 1] for i in range(len(token))) if byte in own]
    if not old.prefix_bytes:
        return old.encode(token).tolist()
    if token.startswith(b" "):
        return old.encode(token[1:]).tolist()  # which puts the space back
    ids = old.encode(token).tolist()
    return ids[1:] if len(ids) > 1 and old.tokens[ids[0]] == b" " else ids


def swap_rows(params: State, abstract: State, make: MakeModel, old: Tokenizer, new: Tokenizer) -> State:
    """Parameters with the rows of another vocabulary. Rows without a token start from the mean of all.

    Args:
      params: of the old vocabulary.
      abstract: shapes, dtypes and shardings with the new one.
      make: the model, whose parameters name their axes.
    """
    found = pieces(new, old)
    flat, wanted = flatten_mapping(params), flatten_mapping(abstract)
    variables = jax.eval_shape(lambda: nnx.state(make(nnx.Rngs(0)), nnx.Param))
    for path, variable in nnx.to_flat_state(variables):
        if "vocab" not in (axes := axes_of(variable)):
            continue
        target, axis = wanted[path], axes.index("vocab")
        ids_WK = np.full((target.shape[axis], max(map(len, found))), -1, np.int32)
        for row_K, ids in zip(ids_WK, found, strict=False):
            row_K[: len(ids)] = ids
        means = functools.partial(_means, size=old.vocab_size, axis=axis)
        flat[path] = jax.jit(means, out_shardings=target.sharding)(flat[path], ids_WK)
    return unflatten_mapping(flat)


def _means(table: jax.Array, ids_WK: jax.Array, *, size: int, axis: int) -> jax.Array:
    """The mean of K rows of a table for each W, without ids of -1; if all are -1, the mean of all rows."""
    table_VD = jnp.moveaxis(table, axis, 0).astype(jnp.float32)

    def add(sum_WD: jax.Array, ids_W: jax.Array) -> tuple[jax.Array, None]:
        return sum_WD + jnp.where(ids_W[:, None] < 0, 0.0, table_VD[ids_W]), None

    zeros_WD = jnp.zeros((len(ids_WK), table_VD.shape[1]), jnp.float32)
    sums_WD, _ = jax.lax.scan(add, zeros_WD, ids_WK.T)
    counts_W1 = jnp.sum(ids_WK >= 0, axis=1, keepdims=True)
    rows_WD = jnp.where(counts_W1 == 0, table_VD[:size].mean(0)[None], sums_WD / jnp.maximum(counts_W1, 1))
    return jnp.moveaxis(rows_WD, 0, axis).astype(table.dtype)
