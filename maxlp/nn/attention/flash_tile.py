"""The tiles of ring attention as fused kernels for TPU: no logit leaves the chip.

The same functions as in `models.tiles`, in Pallas. A kernel visits pairs of tiles in the order of a table,
keeps the sums of a tile on the chip until its last pair, and adds to what came from earlier turns of the
ring, in place. So nothing is merged between turns, and tiles that are not in the table cost nothing. The
backward pass is two kernels, one for q and one for k and v, as in JAX's splash attention. Both make the
logits again: 7 matmuls, where one kernel with all of a device's dk and dv on the chip would do 5.

Why no library's kernel: splash attention returns the logarithms of its sums, but has no gradient for them,
and the functions under it that would take those of all tiles are private, and change. Here `pallas_call` is
all that is used.

Logits lie with keys along sublanes and queries along lanes: what there is one of for each query is a row,
and is kept, read and broadcast as such.

Shape letters as in `models.tiles`; P pairs of tiles.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxlp.nn.attention.tiles import NO_LOGIT, zeros

TILE = 1024
LANES = 128
MOST = 180  # tiles of a chunk: the table of a device's pairs then fills half of a TPU's scalar memory
INTERPRET = False  # operation by operation, on any platform (for tests)


def tile_size(chunk: int) -> int:
    """The largest divisor of a chunk that is a multiple of 128 and at most `TILE`.

    0 where the kernels do not fit: if there is none, or it would make too many tiles.
    """
    size = next((size for size in range(TILE, 0, -LANES) if chunk % size == 0), 0)
    return size if chunk <= MOST * size else 0


def forward(pairs: tuple, masked: bool, q_nBKGsH, k_nBKtH, v_nBKtH, ids: tuple, sums: Any) -> tuple:
    """`tiles.forward`; sums are (n, B, K, G, 1, s), the same, and (n, B, K, G, H, s), transposed."""
    if sums is None:
        out_nBKGHs = zeros(jnp.swapaxes(q_nBKGsH, -1, -2))
        sums = out_nBKGHs[..., :1, :] + NO_LOGIT, out_nBKGHs[..., :1, :], out_nBKGHs
    ids, key_ids = _rows(ids)
    return _visit(_forward, pairs, masked, sums, (q_nBKGsH, ids), (k_nBKtH, v_nBKtH, key_ids))


def attended(sums: tuple) -> tuple[jax.Array, jax.Array]:
    """`tiles.attended`."""
    best, total, out_nBKGHs = sums
    return upright(out_nBKGHs / total), upright(best + jnp.log(total))


def backward(
    pairs: tuple, masked: bool, q_nBKGsH, k_nBKtH, v_nBKtH, ids: tuple, log_sum, product, dout, dq: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`tiles.backward`; the gradient of q is transposed, (n, B, K, G, H, s)."""
    (ids, key_ids), of_keys = _rows(ids), zeros(k_nBKtH)
    queries = q_nBKGsH, ids, jnp.swapaxes(log_sum, -1, -2), jnp.swapaxes(product, -1, -2), dout
    keys = k_nBKtH, v_nBKtH, key_ids
    dq = zeros(jnp.swapaxes(q_nBKGsH, -1, -2)) if dq is None else dq
    (dq,) = _visit(_dq, pairs, masked, (dq,), queries, keys)
    by_key = jnp.argsort(pairs[1], stable=True)
    pairs = pairs[0][by_key], pairs[1][by_key]
    dk, dv = _visit(_dkv, pairs, masked, (of_keys, of_keys), queries, keys, by_key=True)
    return dq, dk, dv


def upright(x: jax.Array) -> jax.Array:
    """`tiles.upright`."""
    return jnp.swapaxes(x, -1, -2)


def _rows(ids: tuple) -> tuple:
    return jax.tree.map(lambda ids_nBs: ids_nBs[:, :, None], ids)


# --- kernels ------------------------------------------------------------------------------------------


def _visit(
    add: Callable,
    pairs: tuple,
    masked: bool,
    sums: tuple,
    queries: tuple,
    keys: tuple,
    by_key: bool = False,
) -> tuple:
    """``add(sums, queries, keys, diagonal)`` for each pair of tiles, with the blocks that it needs.

    Args:
      pairs: in the order of the tiles whose sums these are, so that each of them is left only once.
      masked: pairs i = j are on the diagonal of a causal mask.
      by_key: sums are those of keys, over the G heads that share a key as well, and not those of queries.
    """
    # Here because it takes half a second and only ring attention needs it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    _, B, K, G = queries[0].shape[:4]
    P, own = len(pairs[0]), int(by_key)
    grid = (B, K, P, G) if by_key else (B, K, G, P)  # sums go over what comes last

    def blocks(side: int, arrays: tuple) -> tuple:
        """Of arrays (n, …) those at tile i (side 0) or j (side 1) of a pair, and at its row and head."""

        def index(x: jax.Array, b: Any, k: Any, g: Any, p: Any, *pairs: Any) -> tuple:
            g, p = (p, g) if by_key else (g, p)
            return *(pairs[side][p], b, k, g)[: x.ndim - 2], 0, 0

        def block(x: jax.Array) -> pl.BlockSpec:
            return pl.BlockSpec((None,) * (x.ndim - 2) + x.shape[-2:], functools.partial(index, x))

        return jax.tree.map(block, arrays)

    def kernel(i_P: Any, j_P: Any, came: tuple, queries: tuple, keys: tuple, *sums: Any) -> None:
        p, g = pl.program_id(2 if by_key else 3), pl.program_id(3 if by_key else 2)
        own_P = (i_P, j_P)[own]
        new = (p == 0) | (own_P[p] != own_P[jnp.maximum(p - 1, 0)])

        @pl.when(new & (g == 0) if by_key else new)
        def _():
            for to, start in zip(sums, came, strict=True):
                to[...] = start[...]

        if masked:
            diagonal = i_P[p] == j_P[p]
            pl.when(diagonal)(lambda: add(sums, queries, keys, True))
            pl.when(jnp.logical_not(diagonal))(lambda: add(sums, queries, keys, False))
        else:
            add(sums, queries, keys, False)

    run = pl.pallas_call(
        kernel,
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in sums),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[blocks(own, sums), blocks(0, queries), blocks(1, keys)],
            out_specs=blocks(own, sums),
        ),
        input_output_aliases={2 + place: place for place in range(len(sums))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (2 if by_key else 3) + ("arbitrary",) * (2 if by_key else 1)
        ),
        interpret=INTERPRET,
        name=f"ring{add.__name__}",
    )
    return tuple(run(*pairs, sums, queries, keys))


def _forward(sums: tuple, queries: tuple, keys: tuple, diagonal: bool) -> None:
    (best, total, out), (q, ids), (k, v, key_ids) = sums, queries, keys
    logits_ts = _logits(q, k, ids, key_ids, diagonal)
    old = best[...]
    new = jnp.maximum(old, jnp.max(logits_ts, axis=0, keepdims=True))
    exp_ts, keep = jnp.exp(logits_ts - new), jnp.exp(old - new)
    best[...] = new
    total[...] = total[...] * keep + jnp.sum(exp_ts, axis=0, keepdims=True)
    out[...] = out[...] * keep + _dot(v[...], exp_ts.astype(v.dtype), 0, 0)


def _dq(sums: tuple, queries: tuple, keys: tuple, diagonal: bool) -> None:
    (dq,), (k, _, _) = sums, keys
    _, dlogits_ts = _gradient(queries, keys, diagonal)
    dq[...] += _dot(k[...], dlogits_ts.astype(k.dtype), 0, 0)


def _dkv(sums: tuple, queries: tuple, keys: tuple, diagonal: bool) -> None:
    (dk, dv), (q, _, _, _, dout) = sums, queries
    prob_ts, dlogits_ts = _gradient(queries, keys, diagonal)
    dk[...] += _dot(dlogits_ts.astype(q.dtype), q[...], 1, 0)
    dv[...] += _dot(prob_ts.astype(dout.dtype), dout[...], 1, 0)


def _gradient(queries: tuple, keys: tuple, diagonal: bool) -> tuple[jax.Array, jax.Array]:
    """The probabilities, and the gradient of the logits before their scale."""
    (q, ids, log_sum, product, dout), (k, v, key_ids) = queries, keys
    prob_ts = jnp.exp(_logits(q, k, ids, key_ids, diagonal) - log_sum[...])
    dprob_ts = _dot(v[...], dout[...], 1, 1)
    return prob_ts, prob_ts * (dprob_ts - product[...]) * q.shape[-1] ** -0.5


def _logits(q: Any, k: Any, ids: Any, key_ids: Any, diagonal: bool) -> jax.Array:
    logits_ts = _dot(k[...], q[...], 1, 1) * q.shape[-1] ** -0.5
    if ids is not None:
        same = key_ids[...].reshape(-1, 1) == ids[...]
        logits_ts = jnp.where(same, logits_ts, NO_LOGIT)
    if diagonal:
        key, query = (jax.lax.broadcasted_iota(jnp.int32, logits_ts.shape, axis) for axis in (0, 1))
        logits_ts = jnp.where(key <= query, logits_ts, NO_LOGIT)
    return logits_ts


def _dot(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    dims = (((x_axis,), (y_axis,)), ((), ()))
    return jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)
