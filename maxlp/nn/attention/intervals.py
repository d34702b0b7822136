"""Masks of attention as intervals: the keys that a query sees are the positions lo ≤ t < hi.

Causal masks, documents in packed rows, padding, and the parts of a sequence that a ring sends around
are all of this form, for queries and, the other way round, for keys. An interval takes two integers
per token where a mask takes a square, and a kernel finds in it the blocks that it can skip and those
that need no mask.

Shape letters: B batch · S tokens that see · T tokens that are seen.
"""

import jax
import jax.numpy as jnp

Interval = tuple[jax.Array, jax.Array]  # lo and hi, int32 (B, S)

PADDING_ID = jnp.iinfo(jnp.int32).max  # behind all documents, as padding is in a row
EMPTY = 2**30, 0  # changes neither the least lo nor the largest hi of a block


def everything(B: int, S: int, T: int) -> Interval:
    """Each of (B, S) tokens sees all T."""
    return jnp.zeros((B, S), jnp.int32), jnp.full((B, S), T, jnp.int32)


def up_to_itself(B: int, S: int) -> Interval:
    """Causal queries; see `from_itself`."""
    positions_BS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    return jnp.zeros_like(positions_BS), positions_BS + 1


def from_itself(B: int, S: int) -> Interval:
    """Causal keys: the queries that see a key are those from its own position on."""
    positions_BS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    return positions_BS, jnp.full((B, S), S, jnp.int32)


def same_segment(ids_BS: jax.Array, other_ids_BT: jax.Array) -> Interval:
    """The tokens of the other sequence that are in a token's own segment.

    Ids increase along a row, and padding, which is 0, is at its end. So lo is the number of smaller ids, hi
    that of ids that are not larger. Each is a sum of T comparisons, which XLA fuses: nothing of size S × T
    is stored. A binary search would need fewer comparisons, but one after another; attention itself takes
    thousands of operations for each pair.
    """
    ids, others = (jnp.where(x == 0, PADDING_ID, x) for x in (ids_BS, other_ids_BT))
    ids_BS1, others_B1T = ids[:, :, None], others[:, None]
    return (
        jnp.sum(others_B1T < ids_BS1, axis=2, dtype=jnp.int32),
        jnp.sum(others_B1T <= ids_BS1, axis=2, dtype=jnp.int32),
    )


def intersection(a: Interval, b: Interval) -> Interval:
    """What both contain; `EMPTY` where that is nothing."""
    lo, hi = jnp.maximum(a[0], b[0]), jnp.minimum(a[1], b[1])
    return jnp.where(lo < hi, lo, EMPTY[0]), jnp.where(lo < hi, hi, EMPTY[1])
