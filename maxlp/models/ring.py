"""Attention over a sequence that is split over devices (ring attention, Liu et al. 2023, arXiv:2310.01889).

The mesh axis ``context`` of n devices splits the sequence. Queries stay where they are; keys and values go
round the ring of devices, each part sent on while the part before it is used, and each device keeps of its
queries the running maximum of the logits, the sum of exponentials under it and the weighted values. The
backward pass goes round once more: it makes the logits again, and the gradients of keys and values travel
with them. On one device, and within each, the work is cut into tiles of at most `TILE` queries and keys, so
that nothing of the size of the square exists; tiles above the diagonal are not computed.

A causal square cut into n equal parts would leave the device with the last part nearly twice the average
work, for which all wait. Hence the order of `balance`: of 2n chunks, device i holds chunks i and 2n-1-i,
early and late ones. With a part that came from device j it has to do

    j = i   queries late × keys early, and both diagonals          (the first turn)
    j < i   queries late × keys early, queries early × keys early
    j > i   queries late × keys early, queries late × keys late    (i and j are in this order for early
                                                                    chunks, and in the other for late ones)

which is half of the part's square in each turn and on each device, without a mask.

Shape letters: B batch · S length on one device · T keys of one device · N query heads · K kv heads ·
G = N/K · H head dim · D embed · n tiles · s, t queries and keys of one tile.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from maxlp import sharding

TILE = 512
NO_LOGIT = -1e30  # of a key that is not seen: its exponential is 0, and differences of two are defined
AXIS = "context"


# --- the order of a balanced sequence -----------------------------------------------------------------


def parts(seq_len: int) -> int:
    """Over how many devices a sequence of this (global) length is balanced.

    1 where it stays in its natural order: without a mesh, without a context axis, and for a length that is
    not a multiple of 2 × context × stage × tensor.
    """
    n, inner = _sizes(jax.sharding.get_abstract_mesh())
    return n if seq_len % (2 * n * inner) == 0 else 1


def balance(x_BS: jax.Array) -> jax.Array:
    """Tokens, positions or segment ids in the order in which a causal ring has equal work everywhere.

    The identity where `parts` is 1. These are small, and whole on every device of the context axis.
    """
    B, S = x_BS.shape
    n = parts(S)
    if n == 1:
        return x_BS
    chunks = x_BS.reshape(B, 2, n, S // (2 * n))
    x_BS = jnp.stack([chunks[:, 0], chunks[:, 1, ::-1]], axis=2).reshape(B, S)
    return sharding.constrain(x_BS, "batch", "seq")


def unbalance(x_BSD: jax.Array) -> jax.Array:
    """Balanced activations in natural order; every device sends two halves, and none holds more.

    The sequence is split as between embedding and blocks. Halves of the devices' parts with an even place
    in the natural order form one permutation of the devices, those with an odd place another.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if parts(x_BSD.shape[1]) == 1:
        return x_BSD
    places = natural_places(*_sizes(mesh))
    axes = tuple(sharding.RULES["embed_seq"] or ())
    in_mesh = tuple(axis for axis in sharding.MESH_AXES if axis in axes)  # as ppermute counts devices
    numbers = np.arange(len(places) // 2).reshape([mesh.shape[axis] for axis in in_mesh])
    number = numbers.transpose([in_mesh.index(axis) for axis in axes]).ravel()

    def move(x_BsD: jax.Array) -> jax.Array:
        first, second = jnp.split(x_BsD, 2, axis=1)
        parity = jnp.asarray(places[::2] % 2)[jax.lax.axis_index(axes)]  # of this device's first half
        came = []
        for slot in (0, 1):
            halves = np.flatnonzero(places % 2 == slot)
            moves = list(zip(number[halves // 2], number[places[halves] // 2], strict=True))
            came.append(jax.lax.ppermute(jnp.where(parity == slot, first, second), in_mesh, moves))
        return jnp.concatenate(came, axis=1)

    spec = PartitionSpec(_rows(mesh, len(x_BSD)), axes, None)
    return jax.shard_map(move, in_specs=spec, out_specs=spec)(x_BSD)


def natural_places(n: int, inner: int) -> np.ndarray:
    """The place in the natural order of each half of a device's part, in the balanced order.

    Args:
      inner: into how many parts the part of each of the n devices is split once more.
    """
    device, half = np.divmod(np.arange(2 * n * inner), 2 * inner)
    late, half = np.divmod(half, inner)
    return np.where(late == 0, device, 2 * n - 1 - device) * inner + half


def _sizes(mesh: Any) -> tuple[int, int]:
    """Of the axis of the ring, and of those that split the sequence further outside of attention."""
    return mesh.shape.get(AXIS, 1), mesh.shape.get("stage", 1) * mesh.shape.get("tensor", 1)


def _rows(mesh: Any, batch_size: int) -> Any:
    """The mesh axes of the batch dim; none if they do not divide it (one prompt on eight devices)."""
    return sharding.RULES["batch"] if batch_size % sharding.batch_shards(mesh) == 0 else None


# --- attention ----------------------------------------------------------------------------------------


def ring(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    causal: bool,
    segment_ids_BS: jax.Array | None,
) -> jax.Array:
    """Softmax in float32 over a sequence (global, in the order of `balance`) that is split over devices.

    Raises:
      ValueError: heads that the tensor axis does not divide.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and k_BSKH.shape[2] % mesh.shape["tensor"]:
        raise ValueError(
            f"model.attention='ring' needs model.num_kv_heads={k_BSKH.shape[2]} to be a multiple of "
            f"mesh.tensor={mesh.shape['tensor']}"
        )
    with jax.named_scope("ring"):
        return _attend(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, causal)


def _attend_fwd(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, causal):
    arrays = q_BSNH, k_BSKH, v_BSKH, segment_ids_BS
    out_BSNH, log_sum_BSN = _on_each_device(_forward, arrays, ("q", "log_sum"), causal)
    return out_BSNH, (*arrays, out_BSNH, log_sum_BSN)


def _attend_bwd(causal, saved, dout_BSNH):
    return *_on_each_device(_backward, (*saved, dout_BSNH), ("q", "q", "q"), causal), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, causal):
    return _attend_fwd(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, causal)[0]


_attend.defvjp(_attend_fwd, _attend_bwd)


def _on_each_device(function: Callable, arrays: tuple, results: tuple[str, ...], causal: bool) -> Any:
    """``function(*arrays, causal=…, devices=…)`` of each device's rows, part of the sequence and heads."""
    mesh = jax.sharding.get_abstract_mesh()
    B, S = arrays[0].shape[:2]
    n = parts(S)
    function = functools.partial(function, causal=causal, devices=n)
    if mesh.empty or mesh.size == 1:
        return function(*arrays)
    rows, seq = _rows(mesh, B), AXIS if n > 1 else None
    heads = PartitionSpec(rows, seq, "tensor")
    specs = tuple(PartitionSpec(rows, seq) if x is None or x.ndim == 2 else heads for x in arrays)
    # Without check_vma: it asks to mark each zero to be varying, and the gradients here are our own.
    run = jax.shard_map(function, in_specs=specs, out_specs=(heads,) * len(results), check_vma=False)
    return run(*arrays)


def _forward(q_BSNH, k_BSKH, v_BSKH, ids_BS, *, causal: bool, devices: int) -> tuple[jax.Array, jax.Array]:
    """The output, and the logarithm of each query's sum of exponentials, float32 (B, S, N)."""
    cut, cut_ids, join = _tiles(q_BSNH, k_BSKH, devices)
    q_nBKGsH, k_nBKtH, v_nBKtH = cut(q_BSNH), cut(k_BSKH)[:, :, :, 0], cut(v_BSKH)[:, :, :, 0]
    ids_nBs = cut_ids(ids_BS)

    def turn(step: Any, keys: tuple, sums: tuple) -> tuple:
        k_nBKtH, v_nBKtH, key_ids_nBt = keys

        def visit(sums: tuple, pair: tuple) -> tuple[tuple, None]:
            i, j = pair
            seen = _seen(pair, step, causal, q_nBKGsH.shape[-2], ids_nBs, key_ids_nBt)
            logits = _logits(_get(q_nBKGsH, i), _get(k_nBKtH, j), seen)
            best, total, out = (_get(x, i) for x in sums)
            new = jnp.maximum(best, jnp.max(logits, axis=-1))
            exp, keep = jnp.exp(logits - new[..., None]), jnp.exp(best - new)
            total = total * keep + jnp.sum(exp, axis=-1)
            out = out * keep[..., None] + _matmul("BKGst,BKtH->BKGsH", exp, _get(v_nBKtH, j))
            return tuple(_put(x, i, y) for x, y in zip(sums, (new, total, out), strict=True)), None

        return jax.lax.scan(visit, sums, _within(_pairs(step, len(q_nBKGsH), causal), keys[0]))[0]

    zeros = _zeros(q_nBKGsH)
    sums = zeros[..., 0] + NO_LOGIT, zeros[..., 0], zeros
    best, total, out = _round(turn, (k_nBKtH, v_nBKtH, ids_nBs), sums, devices)
    log_sum_BSN = join((best + jnp.log(total))[..., None])[..., 0]
    return join((out / total[..., None]).astype(q_BSNH.dtype)), log_sum_BSN


def _backward(
    q_BSNH, k_BSKH, v_BSKH, ids_BS, out_BSNH, log_sum_BSN, dout_BSNH, *, causal: bool, devices: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v; with P the probabilities, that of the logits is
    P * (dout @ vT - sum(dout * out)) (FlashAttention-2, arXiv:2307.08691, algorithm 2)."""
    cut, cut_ids, join = _tiles(q_BSNH, k_BSKH, devices)
    q_nBKGsH, k_nBKtH, v_nBKtH = cut(q_BSNH), cut(k_BSKH)[:, :, :, 0], cut(v_BSKH)[:, :, :, 0]
    ids_nBs, dout_nBKGsH = cut_ids(ids_BS), cut(dout_BSNH)
    product_BSN = jnp.sum(dout_BSNH.astype(jnp.float32) * out_BSNH.astype(jnp.float32), axis=-1)
    log_sum_nBKGs1, product_nBKGs1 = cut(log_sum_BSN[..., None]), cut(product_BSN[..., None])
    scale = q_BSNH.shape[-1] ** -0.5

    def turn(step: Any, keys: tuple, sums: tuple) -> tuple:
        k_nBKtH, v_nBKtH, key_ids_nBt = keys
        dq_nBKGsH, travelling = sums
        if not _own(step):  # not needed by this turn: it travels while the turn computes
            travelling = _shift(travelling)

        def visit(sums: tuple, pair: tuple) -> tuple[tuple, None]:
            (i, j), (dq, dk, dv) = pair, sums
            q, k, v, dout = _get(q_nBKGsH, i), _get(k_nBKtH, j), _get(v_nBKtH, j), _get(dout_nBKGsH, i)
            logits = _logits(q, k, _seen(pair, step, causal, q.shape[-2], ids_nBs, key_ids_nBt))
            prob = jnp.exp(logits - _get(log_sum_nBKGs1, i))
            dprob = _matmul("BKGsH,BKtH->BKGst", dout, v)
            dlogits = prob * (dprob - _get(product_nBKGs1, i)) * scale
            dq = _put(dq, i, _get(dq, i) + _matmul("BKGst,BKtH->BKGsH", dlogits, k))
            dk = _put(dk, j, _get(dk, j) + _matmul("BKGst,BKGsH->BKtH", dlogits, q))
            dv = _put(dv, j, _get(dv, j) + _matmul("BKGst,BKGsH->BKtH", prob, dout))
            return (dq, dk, dv), None

        zeros = _zeros(k_nBKtH)
        sums = dq_nBKGsH, zeros, zeros
        sums, _ = jax.lax.scan(visit, sums, _within(_pairs(step, len(q_nBKGsH), causal), k_nBKtH))
        dq_nBKGsH, *d_keys = sums
        return dq_nBKGsH, tuple(d_keys) if _own(step) else jax.tree.map(jnp.add, travelling, tuple(d_keys))

    dq, d_keys = _round(turn, (k_nBKtH, v_nBKtH, ids_nBs), (_zeros(q_nBKGsH), ()), devices)
    d_keys = jax.tree.map(lambda x: x.astype(k_BSKH.dtype), d_keys)
    dk, dv = _shift(d_keys) if devices > 1 else d_keys  # home
    return join(dq.astype(q_BSNH.dtype)), join(dk[:, :, :, None]), join(dv[:, :, :, None])


def _round(turn: Callable, keys: tuple, sums: Any, devices: int) -> Any:
    """``sums = turn(step, keys, sums)`` with the keys of every device, this one's own first (step 0).

    The keys of the next turn travel while a turn computes. They are not sent home.
    """
    sums = turn(0, keys, sums)
    if devices == 1:
        return sums
    keys = _shift(keys)
    if devices > 2:
        keys, sums = jax.lax.fori_loop(
            1, devices - 1, lambda step, carry: (_shift(carry[0]), turn(step, *carry)), (keys, sums)
        )
    return turn(devices - 1, keys, sums)


def _within(x: Any, activation: jax.Array) -> Any:
    """``x``, as if it depended on an activation.

    JAX computes what does not before the scan over layers, and keeps it: the masks of all pairs of tiles.
    """
    return jax.lax.optimization_barrier((x, activation))[0]


def _zeros(activation: jax.Array) -> jax.Array:
    return jnp.broadcast_to(_within(jnp.zeros((), jnp.float32), activation), activation.shape)


def _own(step: Any) -> bool:
    return isinstance(step, int) and step == 0


def _shift(tree: Any) -> Any:
    """Each array to the next device of the ring."""
    n = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(tree, AXIS, [(i, (i + 1) % n) for i in range(n)])


# --- tiles --------------------------------------------------------------------------------------------


def _pairs(step: Any, n: int, causal: bool) -> tuple[jax.Array, jax.Array]:
    """Tiles of queries (of n) and of keys that meet in a turn: those of which anything is seen."""
    if not causal:
        i, j = np.indices((n, n)).reshape(2, -1)
    elif _own(step):
        i, j = np.tril_indices(n)
    else:
        i, j = far_pairs(n, jax.lax.axis_index(AXIS) < step)
    return jnp.asarray(i), jnp.asarray(j)


def far_pairs(n: int, later: Any) -> tuple[Any, Any]:
    """The pairs of a turn with keys of another device, ``later`` in the order of early chunks or not."""
    i, j = np.indices((n // 2, n // 2)).reshape(2, -1)
    other = later * (n // 2)
    return jnp.concatenate([i + n // 2, i + other]), jnp.concatenate([j, j + other])


def _seen(pair: tuple, step: Any, causal: bool, size: int, ids_nBs: Any, key_ids_nBt: Any) -> Any:
    """Which keys a query of a pair of tiles sees, bool (B or 1, 1, 1, s, t); None: all."""
    (i, j), seen, place = pair, None, jnp.arange(size)
    if causal and _own(step):
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


def _tiles(q_BSNH: jax.Array, k_BSKH: jax.Array, devices: int) -> tuple[Callable, Callable, Callable]:
    """Cut (B, S, heads, …) into (n, B, K, heads/K, s, …), cut (B, S) into (n, B, s), join the former."""
    B, S = q_BSNH.shape[:2]
    K, size = k_BSKH.shape[2], tile_size(S, devices)

    def cut(x_BSNH: jax.Array) -> jax.Array:
        N, H = x_BSNH.shape[2:]
        return jnp.transpose(x_BSNH.reshape(B, S // size, size, K, N // K, H), (1, 0, 3, 4, 2, 5))

    def cut_ids(ids_BS: jax.Array | None) -> jax.Array | None:
        return None if ids_BS is None else jnp.swapaxes(ids_BS.reshape(B, S // size, size), 0, 1)

    def join(x_nBKGsH: jax.Array) -> jax.Array:
        return jnp.transpose(x_nBKGsH, (1, 0, 4, 2, 3, 5)).reshape(B, S, -1, x_nBKGsH.shape[-1])

    return cut, cut_ids, join


def tile_size(S: int, devices: int) -> int:
    """The largest divisor of a device's chunks of at most `TILE`; a whole chunk if that is below 64."""
    chunk = S // 2 if devices > 1 else S
    size = next(size for size in range(min(TILE, chunk), 0, -1) if chunk % size == 0)
    return size if size >= 64 else chunk


def _get(x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x: jax.Array, i: jax.Array, value: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, value, i, 0)
