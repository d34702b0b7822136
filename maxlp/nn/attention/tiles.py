"""The tiles of ring attention: what an implementation provides, and one in plain XLA operations.

A device's queries and keys are cut into n tiles each. In every step of the ring,
`nn.attention.ring` lists the pairs of tiles (i, j) whose queries i attend to keys j; the functions
here visit those pairs and accumulate. This implementation runs on any platform and for any shape.
`nn.attention.flash_tile` has fused kernels for TPU.

Shape letters: B batch · K kv heads · G query heads per kv head · H head dim · n tiles · s, t
queries and keys of one tile.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

MAX_TILE_SIZE = 512
MASKED_LOGIT = -1e30  # its exponential is 0, and unlike with -inf the difference of two is not NaN

Pairs = tuple[jax.Array, jax.Array]  # int32 indices of the query tile and of the key tile of each pair
SegmentIds = tuple[jax.Array | None, jax.Array | None]  # (n, B, s) of queries and (n, B, t) of keys


class TileKernels(Protocol):
    """An implementation of ring attention's tiles: this module, or `flash_tile`.

    Both passes accumulate over several calls, one for each step of the ring. The layout of an
    accumulator is the implementation's own; None is an empty one.
    """

    def tile_size(self, length: int) -> int:
        """Queries or keys in a tile: a divisor of ``length``, or 0 if it has no suitable one."""
        ...

    def forward(
        self,
        pairs: Pairs,
        causal: bool,
        q_nBKGsH: jax.Array,
        k_nBKtH: jax.Array,
        v_nBKtH: jax.Array,
        segment_ids: SegmentIds,
        accumulator: Any,
    ) -> Any:
        """Continues the online softmax of all queries over the keys of more pairs of tiles.

        Args:
          pairs: in the order of their query tiles.
          causal: applies the causal mask. Query tile i and key tile i then hold the same positions.
          accumulator: the result of an earlier call, or None.

        Returns:
          the accumulator: of each query the largest logit, the sum of the exponentials relative to
          it, and the sum of the values weighted by them.
        """
        ...

    def finish_forward(self, accumulator: Any) -> tuple[jax.Array, jax.Array]:
        """The output (n, B, K, G, s, H) and the logits' log-sum-exp (n, B, K, G, s, 1), float32."""
        ...

    def backward(
        self,
        pairs: Pairs,
        causal: bool,
        q_nBKGsH: jax.Array,
        k_nBKtH: jax.Array,
        v_nBKtH: jax.Array,
        segment_ids: SegmentIds,
        log_sum: jax.Array,
        delta: jax.Array,
        dout: jax.Array,
        dq: Any,
    ) -> tuple[Any, jax.Array, jax.Array]:
        """The gradients of more pairs of tiles, float32.

        With P the attention probabilities, the gradient of the logits is ``P * (dout @ v.T - delta)``
        (FlashAttention-2, arXiv:2307.08691, algorithm 2).

        Args:
          pairs, causal: as in `forward`.
          log_sum: from `finish_forward`, over the keys of all steps.
          delta: ``sum(dout * out)`` of each query, (n, B, K, G, s, 1).
          dout: the gradient of the output, (n, B, K, G, s, H).
          dq: the accumulator that an earlier call returned, or None.

        Returns:
          dq with these pairs added, and the gradients of k and v from these pairs alone.
        """
        ...

    def finish_dq(self, dq: Any) -> jax.Array:
        """The accumulated gradient of q as (n, B, K, G, s, H)."""
        ...


# --- the plain implementation: see `TileKernels` for all arguments ----------------------------------------


def tile_size(length: int) -> int:
    """The largest divisor up to `MAX_TILE_SIZE`, or the whole length if that divisor is below 64."""
    size = next(size for size in range(min(MAX_TILE_SIZE, length), 0, -1) if length % size == 0)
    return size if size >= 64 else length


def forward(
    pairs: Pairs, causal: bool, q_nBKGsH, k_nBKtH, v_nBKtH, segment_ids: SegmentIds, accumulator: Any
) -> tuple:
    """`TileKernels.forward`; the accumulator is (maximum_nBKGs, total_nBKGs, out_nBKGsH)."""
    if accumulator is None:
        out = float32_zeros_like(q_nBKGsH)
        accumulator = out[..., 0] + MASKED_LOGIT, out[..., 0], out

    def visit(accumulator: tuple, pair: Pairs) -> tuple[tuple, None]:
        i, j = pair
        visible = _visible(pair, causal, q_nBKGsH.shape[-2], segment_ids)
        logits = _logits(_get(q_nBKGsH, i), _get(k_nBKtH, j), visible)
        old_maximum, total, out = (_get(x, i) for x in accumulator)
        maximum = jnp.maximum(old_maximum, jnp.max(logits, axis=-1))
        weights, rescale = jnp.exp(logits - maximum[..., None]), jnp.exp(old_maximum - maximum)
        total = total * rescale + jnp.sum(weights, axis=-1)
        out = out * rescale[..., None] + _matmul("BKGst,BKtH->BKGsH", weights, _get(v_nBKtH, j))
        new = (maximum, total, out)
        return tuple(_set(x, i, y) for x, y in zip(accumulator, new, strict=True)), None

    return jax.lax.scan(visit, accumulator, pairs)[0]


def finish_forward(accumulator: tuple) -> tuple[jax.Array, jax.Array]:
    """`TileKernels.finish_forward`."""
    maximum, total, out = accumulator
    return out / total[..., None], (maximum + jnp.log(total))[..., None]


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
    """`TileKernels.backward`; dq is (n, B, K, G, s, H)."""
    scale = q_nBKGsH.shape[-1] ** -0.5

    def visit(gradients: tuple, pair: Pairs) -> tuple[tuple, None]:
        (i, j), (dq, dk, dv) = pair, gradients
        q, k, v, dout_i = _get(q_nBKGsH, i), _get(k_nBKtH, j), _get(v_nBKtH, j), _get(dout, i)
        logits = _logits(q, k, _visible(pair, causal, q.shape[-2], segment_ids))
        probs = jnp.exp(logits - _get(log_sum, i))
        dprobs = _matmul("BKGsH,BKtH->BKGst", dout_i, v)
        dlogits = probs * (dprobs - _get(delta, i)) * scale
        dq = _set(dq, i, _get(dq, i) + _matmul("BKGst,BKtH->BKGsH", dlogits, k))
        dk = _set(dk, j, _get(dk, j) + _matmul("BKGst,BKGsH->BKtH", dlogits, q))
        dv = _set(dv, j, _get(dv, j) + _matmul("BKGst,BKGsH->BKtH", probs, dout_i))
        return (dq, dk, dv), None

    zeros = float32_zeros_like(k_nBKtH)
    gradients = float32_zeros_like(q_nBKGsH) if dq is None else dq, zeros, zeros
    return jax.lax.scan(visit, gradients, pairs)[0]


def finish_dq(dq: jax.Array) -> jax.Array:
    """`TileKernels.finish_dq`."""
    return dq


# --- shared with the kernels ------------------------------------------------------------------------------


def dot(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    """The contraction of one axis of each matrix, accumulated in float32."""
    dims = (((x_axis,), (y_axis,)), ((), ()))
    return jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def depend_on(activation: jax.Array, x: Any) -> Any:
    """``x``, computed as if it depended on an activation.

    JAX hoists what depends on no activation out of the scan over layers and keeps it in memory:
    here the masks of all pairs of tiles.
    """
    return jax.lax.optimization_barrier((x, activation))[0]


def float32_zeros_like(activation: jax.Array) -> jax.Array:
    """float32 zeros in the shape of an activation; see `depend_on`."""
    zero = depend_on(activation, jnp.zeros((), jnp.float32))
    return jnp.broadcast_to(zero, activation.shape)


# --- one pair of tiles ------------------------------------------------------------------------------------


def _visible(pair: Pairs, causal: bool, size: int, segment_ids: SegmentIds) -> jax.Array | None:
    """The keys that each query of a pair attends to, bool (B or 1, 1, 1, s, t); None without any mask."""
    (i, j), (query_ids_nBs, key_ids_nBt) = pair, segment_ids
    visible, offset = None, jnp.arange(size)
    if causal:
        visible = (i * size + offset)[None, :, None] >= (j * size + offset)[None, None, :]
    if query_ids_nBs is not None:
        assert key_ids_nBt is not None
        same = _get(query_ids_nBs, i)[:, :, None] == _get(key_ids_nBt, j)[:, None]
        visible = same if visible is None else visible & same
    return None if visible is None else visible[:, None, None]


def _logits(q_BKGsH: jax.Array, k_BKtH: jax.Array, visible: jax.Array | None) -> jax.Array:
    logits = _matmul("BKGsH,BKtH->BKGst", q_BKGsH, k_BKtH) * q_BKGsH.shape[-1] ** -0.5
    if visible is None:
        return logits
    return logits + MASKED_LOGIT * jnp.logical_not(visible).astype(logits.dtype)


def _matmul(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """An einsum in the dtype of y, accumulated in float32."""
    return jnp.einsum(subscripts, x.astype(y.dtype), y, preferred_element_type=jnp.float32)


def _get(x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _set(x: jax.Array, i: jax.Array, value: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, value, i, 0)
