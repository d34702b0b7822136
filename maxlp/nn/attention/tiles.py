"""The tiles of ring attention in plain XLA operations, for any platform and shape.

A device's queries and keys are cut into n tiles each. Every turn of the ring (`models.ring`) says which of
them meet; the functions here visit those pairs and add to what earlier turns found. `models.flash_tile` has
the same functions as fused kernels, with sums in a layout of its own, of which `attended` and `upright`
make arrays of queries.

Shape letters: B batch · S length on one device · T keys of one device · N query heads · K kv heads ·
G = N/K · H head dim · n tiles · s, t queries and keys of one tile.
"""

from typing import Any

import jax
import jax.numpy as jnp

TILE = 512
NO_LOGIT = -1e30  # of a key that is not seen: its exponential is 0, and differences of two are defined


def tile_size(chunk: int) -> int:
    """The largest divisor of a chunk of at most `TILE`; the whole chunk if that is below 64."""
    size = next(size for size in range(min(TILE, chunk), 0, -1) if chunk % size == 0)
    return size if size >= 64 else chunk


def forward(pairs: tuple, masked: bool, q_nBKGsH, k_nBKtH, v_nBKtH, ids: tuple, sums: Any) -> tuple:
    """Online softmax over the keys of more pairs of tiles.

    Args:
      pairs: tiles of queries and of keys that meet, two int32 arrays in the order of the former.
      masked: query and key have a place in one causal order, the same for tiles i of both.
      ids: segments of queries and keys, (n, B, s) and (n, B, t), or two times None.
      sums: what an earlier call returned, or None.

    Returns: for each query the largest logit, the sum of exponentials under it and the weighted values.
    """
    if sums is None:
        out = zeros(q_nBKGsH)
        sums = out[..., 0] + NO_LOGIT, out[..., 0], out

    def visit(sums: tuple, pair: tuple) -> tuple[tuple, None]:
        i, j = pair
        seen = _seen(pair, masked, q_nBKGsH.shape[-2], ids)
        logits = _logits(_get(q_nBKGsH, i), _get(k_nBKtH, j), seen)
        best, total, out = (_get(x, i) for x in sums)
        new = jnp.maximum(best, jnp.max(logits, axis=-1))
        exp, keep = jnp.exp(logits - new[..., None]), jnp.exp(best - new)
        total = total * keep + jnp.sum(exp, axis=-1)
        out = out * keep[..., None] + _matmul("BKGst,BKtH->BKGsH", exp, _get(v_nBKtH, j))
        return tuple(_put(x, i, y) for x, y in zip(sums, (new, total, out), strict=True)), None

    return jax.lax.scan(visit, sums, pairs)[0]


def attended(sums: tuple) -> tuple[jax.Array, jax.Array]:
    """The output (n, B, K, G, s, H) and the logarithms of the sums (n, B, K, G, s, 1), float32."""
    best, total, out = sums
    return out / total[..., None], (best + jnp.log(total))[..., None]


def backward(
    pairs: tuple, masked: bool, q_nBKGsH, k_nBKtH, v_nBKtH, ids: tuple, log_sum, product, dout, dq: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients through more pairs of tiles, float32; with P the probabilities, that of the logits is
    P * (dout @ vT - product) (FlashAttention-2, arXiv:2307.08691, algorithm 2).

    Args:
      log_sum, product: of all keys, not of these: `attended`'s, and sum(dout * out); (n, B, K, G, s, 1).
      dout: (n, B, K, G, s, H).
      dq: what an earlier call returned, or None.

    Returns: the gradient of q, added to dq; those of k and v, of these pairs alone.
    """
    scale = q_nBKGsH.shape[-1] ** -0.5

    def visit(sums: tuple, pair: tuple) -> tuple[tuple, None]:
        (i, j), (dq, dk, dv) = pair, sums
        q, k, v, dout_i = _get(q_nBKGsH, i), _get(k_nBKtH, j), _get(v_nBKtH, j), _get(dout, i)
        logits = _logits(q, k, _seen(pair, masked, q.shape[-2], ids))
        prob = jnp.exp(logits - _get(log_sum, i))
        dprob = _matmul("BKGsH,BKtH->BKGst", dout_i, v)
        dlogits = prob * (dprob - _get(product, i)) * scale
        dq = _put(dq, i, _get(dq, i) + _matmul("BKGst,BKtH->BKGsH", dlogits, k))
        dk = _put(dk, j, _get(dk, j) + _matmul("BKGst,BKGsH->BKtH", dlogits, q))
        dv = _put(dv, j, _get(dv, j) + _matmul("BKGst,BKGsH->BKtH", prob, dout_i))
        return (dq, dk, dv), None

    of_keys = zeros(k_nBKtH)
    sums = zeros(q_nBKGsH) if dq is None else dq, of_keys, of_keys
    return jax.lax.scan(visit, sums, pairs)[0]


def upright(dq: jax.Array) -> jax.Array:
    """`backward`'s gradient of q as (n, B, K, G, s, H)."""
    return dq


def within(x: Any, activation: jax.Array) -> Any:
    """``x``, as if it depended on an activation.

    JAX computes what does not before the scan over layers, and keeps it: the masks of all pairs of tiles.
    """
    return jax.lax.optimization_barrier((x, activation))[0]


def zeros(activation: jax.Array) -> jax.Array:
    """float32, in the shape of an activation."""
    return jnp.broadcast_to(within(jnp.zeros((), jnp.float32), activation), activation.shape)


def _seen(pair: tuple, masked: bool, size: int, ids: tuple) -> jax.Array | None:
    """Which keys a query of a pair of tiles sees, bool (B or 1, 1, 1, s, t); None: all."""
    (i, j), (ids_nBs, key_ids_nBt), seen, place = pair, ids, None, jnp.arange(size)
    if masked:
        seen = ((i * size + place)[:, None] >= j * size + place)[None]
    if ids_nBs is not None:
        same = _get(ids_nBs, i)[:, :, None] == _get(key_ids_nBt, j)[:, None]
        seen = same if seen is None else seen & same
    return None if seen is None else seen[:, None, None]


def _logits(q_BKGsH: jax.Array, k_BKtH: jax.Array, seen: jax.Array | None) -> jax.Array:
    logits = _matmul("BKGsH,BKtH->BKGst", q_BKGsH, k_BKtH) * q_BKGsH.shape[-1] ** -0.5
    return logits if seen is None else logits + NO_LOGIT * jnp.logical_not(seen).astype(logits.dtype)


def _matmul(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """In the dtype of y, summed in float32."""
    return jnp.einsum(subscripts, x.astype(y.dtype), y, preferred_element_type=jnp.float32)


def _get(x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x: jax.Array, i: jax.Array, value: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, value, i, 0)
