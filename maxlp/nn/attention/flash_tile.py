"""The tiles of ring attention as fused kernels for TPU, in Pallas: no logit leaves the chip.

This module implements `tiles.TileKernels`. A kernel visits pairs of tiles in the order of a table
and keeps the accumulator of a tile on the chip until the last pair of that tile. It starts from the
accumulators of earlier ring steps and updates them in place, so that nothing has to be merged
between steps, and tiles that are not in the table cost nothing. The backward pass is two kernels,
one for dq and one for dk and dv, as in JAX's splash attention. Both recompute the logits: 7
matmuls, where a single kernel with all of a device's dk and dv on the chip would need 5.

Why not splash attention itself: it returns the log-sum-exp but defines no gradient for it, and the
functions below it, which would accept the log-sum-exp over all ring steps, are private and change.
This module needs nothing but `pallas_call`.

Logits are stored as (keys, queries), keys along sublanes and queries along lanes. A quantity of
each query (maximum, sum, segment id) is then one row, which is stored, read and broadcast as it is.

Shape letters: those of `nn.attention.tiles`, and P pairs of tiles.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxlp.nn.attention.tiles import MASKED_LOGIT, Pairs, SegmentIds, dot, float32_zeros_like

MAX_TILE_SIZE = 1024
LANES = 128
MAX_TILES = 180  # in a length: the table of a device's causal pairs fills half of a TPU's scalar memory
INTERPRET = False  # runs the kernels operation by operation, on any platform (for tests)


def tile_size(length: int) -> int:
    """The largest divisor that is a multiple of 128 and at most `MAX_TILE_SIZE`.

    0 if there is none, or if it would make more than `MAX_TILES` tiles.
    """
    size = next((size for size in range(MAX_TILE_SIZE, 0, -LANES) if length % size == 0), 0)
    return size if length <= MAX_TILES * size else 0


def forward(
    pairs: Pairs, causal: bool, q_nBKGsH, k_nBKtH, v_nBKtH, segment_ids: SegmentIds, accumulator: Any
) -> tuple:
    """`TileKernels.forward`; the accumulator is maximum and total (n, B, K, G, 1, s), and out_nBKGHs."""
    if accumulator is None:
        out_nBKGHs = float32_zeros_like(jnp.swapaxes(q_nBKGsH, -1, -2))
        accumulator = out_nBKGHs[..., :1, :] + MASKED_LOGIT, out_nBKGHs[..., :1, :], out_nBKGHs
    query_ids, key_ids = _as_rows(segment_ids)
    queries, keys = (q_nBKGsH, query_ids), (k_nBKtH, v_nBKtH, key_ids)
    return _accumulate(_forward, "ring_forward", pairs, causal, accumulator, queries, keys)


def finish_forward(accumulator: tuple) -> tuple[jax.Array, jax.Array]:
    """`TileKernels.finish_forward`."""
    maximum, total, out_nBKGHs = accumulator
    return _transpose(out_nBKGHs / total), _transpose(maximum + jnp.log(total))


def backward(
    pairs: Pairs,
    causal: bool,
    q_nBKGsH,
    k_nBKtH,
    v_nBKtH,
    segment_ids: SegmentIds,
    log_sum,
    delta,
    dout,
    dq: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`TileKernels.backward`; dq is transposed, (n, B, K, G, H, s)."""
    (query_ids, key_ids), zeros = _as_rows(segment_ids), float32_zeros_like(k_nBKtH)
    queries = q_nBKGsH, query_ids, _transpose(log_sum), _transpose(delta), dout
    keys = k_nBKtH, v_nBKtH, key_ids
    dq = float32_zeros_like(_transpose(q_nBKGsH)) if dq is None else dq
    (dq,) = _accumulate(_dq, "ring_dq", pairs, causal, (dq,), queries, keys)
    by_key = jnp.argsort(pairs[1], stable=True)
    pairs = pairs[0][by_key], pairs[1][by_key]
    dk, dv = _accumulate(_dkv, "ring_dkv", pairs, causal, (zeros, zeros), queries, keys, by_key=True)
    return dq, dk, dv


def finish_dq(dq: jax.Array) -> jax.Array:
    """`TileKernels.finish_dq`."""
    return _transpose(dq)


def _transpose(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _as_rows(segment_ids: SegmentIds) -> tuple:
    """(n, B, s) to (n, B, 1, s)."""
    return jax.tree.map(lambda ids_nBs: ids_nBs[:, :, None], segment_ids)


# --- kernels over pairs of tiles --------------------------------------------------------------------------


def _accumulate(
    update: Callable,
    name: str,
    pairs: Pairs,
    causal: bool,
    accumulators: tuple,
    queries: tuple,
    keys: tuple,
    by_key: bool = False,
) -> tuple:
    """Calls ``update(accumulators, queries, keys, diagonal)`` for each pair of tiles, as one kernel.

    Args:
      update: gets references to the blocks of the pair, and whether to apply the causal mask
        within it.
      name: of the kernel, in profiles.
      pairs: in the order of the tiles that own the accumulators, so that each of these leaves the
        chip once.
      causal: pairs with i = j lie on the diagonal of the causal mask.
      by_key: the accumulators belong to tiles of keys and also sum over the G query heads that
        share a key; otherwise they belong to tiles of queries.
    """
    from jax.experimental import pallas as pl  # takes half a second to import
    from jax.experimental.pallas import tpu as pltpu

    _, B, K, G = queries[0].shape[:4]
    P, owner = len(pairs[0]), int(by_key)

    def kernel(i_P: Any, j_P: Any, initial: tuple, queries: tuple, keys: tuple, *accumulators: Any) -> None:
        p, g = pl.program_id(2 if by_key else 3), pl.program_id(3 if by_key else 2)
        tile_P = (i_P, j_P)[owner]
        is_new_tile = (p == 0) | (tile_P[p] != tile_P[jnp.maximum(p - 1, 0)])

        @pl.when(is_new_tile & (g == 0) if by_key else is_new_tile)
        def load_initial() -> None:
            for ref, value in zip(accumulators, initial, strict=True):
                ref[...] = value[...]

        if causal:
            diagonal = i_P[p] == j_P[p]
            pl.when(diagonal)(lambda: update(accumulators, queries, keys, True))
            pl.when(jnp.logical_not(diagonal))(lambda: update(accumulators, queries, keys, False))
        else:
            update(accumulators, queries, keys, False)

    # The dims that an accumulator sums over come last; they run in sequence.
    summed = 2 if by_key else 1
    call = pl.pallas_call(
        kernel,
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in accumulators),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, K, P, G) if by_key else (B, K, G, P),
            in_specs=[
                _block_specs(accumulators, owner, by_key),
                _block_specs(queries, 0, by_key),
                _block_specs(keys, 1, by_key),
            ],
            out_specs=_block_specs(accumulators, owner, by_key),
        ),
        input_output_aliases={2 + k: k for k in range(len(accumulators))},  # 2: after the tables of pairs
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (4 - summed) + ("arbitrary",) * summed
        ),
        interpret=INTERPRET,
        name=name,
    )
    return tuple(call(*pairs, accumulators, queries, keys))


def _block_specs(arrays: tuple, side: int, by_key: bool) -> tuple:
    """The block of each array (n, B, …) that a pair of tiles uses: one tile of one row and head.

    Args:
      side: 0 for arrays of queries (tile i of the pair), 1 for arrays of keys (tile j).
      by_key: the order of the grid, as in `_accumulate`.
    """
    from jax.experimental import pallas as pl

    def index_map(rank: int, b: Any, k: Any, g: Any, p: Any, *pairs: Any) -> tuple:
        g, p = (p, g) if by_key else (g, p)
        return *(pairs[side][p], b, k, g)[: rank - 2], 0, 0

    def block(x: jax.Array) -> pl.BlockSpec:
        shape = (None,) * (x.ndim - 2) + x.shape[-2:]
        return pl.BlockSpec(shape, functools.partial(index_map, x.ndim))

    return jax.tree.map(block, arrays)


# --- what the kernels compute for one pair ----------------------------------------------------------------


def _forward(accumulators: tuple, queries: tuple, keys: tuple, diagonal: bool) -> None:
    (maximum, total, out), (q, query_ids), (k, v, key_ids) = accumulators, queries, keys
    logits_ts = _logits(q, k, query_ids, key_ids, diagonal)
    old = maximum[...]
    new = jnp.maximum(old, jnp.max(logits_ts, axis=0, keepdims=True))
    weights_ts, rescale = jnp.exp(logits_ts - new), jnp.exp(old - new)
    maximum[...] = new
    total[...] = total[...] * rescale + jnp.sum(weights_ts, axis=0, keepdims=True)
    out[...] = out[...] * rescale + dot(v[...], weights_ts.astype(v.dtype), 0, 0)


def _dq(accumulators: tuple, queries: tuple, keys: tuple, diagonal: bool) -> None:
    (dq,), (k, _, _) = accumulators, keys
    _, dlogits_ts = _probs_and_dlogits(queries, keys, diagonal)
    dq[...] += dot(k[...], dlogits_ts.astype(k.dtype), 0, 0)


def _dkv(accumulators: tuple, queries: tuple, keys: tuple, diagonal: bool) -> None:
    (dk, dv), (q, _, _, _, dout) = accumulators, queries
    probs_ts, dlogits_ts = _probs_and_dlogits(queries, keys, diagonal)
    dk[...] += dot(dlogits_ts.astype(q.dtype), q[...], 1, 0)
    dv[...] += dot(probs_ts.astype(dout.dtype), dout[...], 1, 0)


def _probs_and_dlogits(queries: tuple, keys: tuple, diagonal: bool) -> tuple[jax.Array, jax.Array]:
    """The attention probabilities, and the gradient of ``q @ k.T``."""
    (q, query_ids, log_sum, delta, dout), (k, v, key_ids) = queries, keys
    probs_ts = jnp.exp(_logits(q, k, query_ids, key_ids, diagonal) - log_sum[...])
    dprobs_ts = dot(v[...], dout[...], 1, 1)
    return probs_ts, probs_ts * (dprobs_ts - delta[...]) * q.shape[-1] ** -0.5


def _logits(q: Any, k: Any, query_ids: Any, key_ids: Any, diagonal: bool) -> jax.Array:
    logits_ts = dot(k[...], q[...], 1, 1) * q.shape[-1] ** -0.5
    if query_ids is not None:
        same = key_ids[...].reshape(-1, 1) == query_ids[...]
        logits_ts = jnp.where(same, logits_ts, MASKED_LOGIT)
    if diagonal:
        key, query = (jax.lax.broadcasted_iota(jnp.int32, logits_ts.shape, axis) for axis in (0, 1))
        logits_ts = jnp.where(key <= query, logits_ts, MASKED_LOGIT)
    return logits_ts
