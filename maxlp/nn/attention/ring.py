"""Attention over a sequence that is split over devices (ring attention, Liu et al. 2023, arXiv:2310.01889).

The mesh axis ``context`` of n devices splits the sequence. Queries stay where they are; keys and values go
round the ring of devices, each part sent on while the part before it is used, and each device keeps of its
queries the running maximum of the logits, the sum of exponentials under it and the weighted values. The
backward pass goes round once more: it makes the logits again, and the gradients of keys and values travel
with them. On one device, and within each, the work is cut into tiles of queries and keys, so that nothing
of the size of the square exists; tiles above the diagonal are not computed. What is done with tiles that
meet is in `models.tiles`, and for TPU in `models.flash_tile`.

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

from maxlp.nn.attention import flash_tile, tiles
from maxlp.parallel import sharding

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
    """``function(…, *arrays, …)`` of each device's rows, part of the sequence and heads."""
    mesh = jax.sharding.get_abstract_mesh()
    B, S = arrays[0].shape[:2]
    n = parts(S)
    function = functools.partial(_on_platform, functools.partial(function, causal=causal, devices=n), n)
    if mesh.empty or mesh.size == 1:
        return function(*arrays)
    rows, seq = _rows(mesh, B), AXIS if n > 1 else None
    heads = PartitionSpec(rows, seq, "tensor")
    specs = tuple(PartitionSpec(rows, seq) if x is None or x.ndim == 2 else heads for x in arrays)
    # Without check_vma: it asks to mark each zero to be varying, and the gradients here are our own.
    run = jax.shard_map(function, in_specs=specs, out_specs=(heads,) * len(results), check_vma=False)
    return run(*arrays)


def _on_platform(function: Callable, devices: int, *arrays: jax.Array | None) -> Any:
    """``function(tiles, *arrays)`` with fused tiles on TPU if they fit, and with plain ones elsewhere."""
    plain, fused = (functools.partial(function, kind) for kind in (tiles, flash_tile))
    assert arrays[0] is not None
    if not tile_size(arrays[0].shape[1], devices, flash_tile):
        return plain(*arrays)
    return jax.lax.platform_dependent(*arrays, tpu=fused, default=plain)


def _forward(
    kind: Any, q_BSNH, k_BSKH, v_BSKH, ids_BS, *, causal: bool, devices: int
) -> tuple[jax.Array, jax.Array]:
    """The output, and the logarithm of each query's sum of exponentials, float32 (B, S, N)."""
    cut, cut_ids, join = _tiling(kind, q_BSNH, k_BSKH, devices)
    q_nBKGsH, k_nBKtH, v_nBKtH = cut(q_BSNH), cut(k_BSKH)[:, :, :, 0], cut(v_BSKH)[:, :, :, 0]
    ids_nBs = cut_ids(ids_BS)

    def turn(step: Any, keys: tuple, sums: Any) -> tuple:
        k_nBKtH, v_nBKtH, key_ids_nBt = keys
        pairs, masked = _pairs(step, len(q_nBKGsH), causal, k_nBKtH), causal and _own(step)
        return kind.forward(pairs, masked, q_nBKGsH, k_nBKtH, v_nBKtH, (ids_nBs, key_ids_nBt), sums)

    out, log_sum = kind.attended(_round(turn, (k_nBKtH, v_nBKtH, ids_nBs), None, devices))
    return join(out.astype(q_BSNH.dtype)), join(log_sum)[..., 0]


def _backward(
    kind: Any,
    q_BSNH,
    k_BSKH,
    v_BSKH,
    ids_BS,
    out_BSNH,
    log_sum_BSN,
    dout_BSNH,
    *,
    causal: bool,
    devices: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v."""
    cut, cut_ids, join = _tiling(kind, q_BSNH, k_BSKH, devices)
    q_nBKGsH, k_nBKtH, v_nBKtH = cut(q_BSNH), cut(k_BSKH)[:, :, :, 0], cut(v_BSKH)[:, :, :, 0]
    ids_nBs, dout_nBKGsH = cut_ids(ids_BS), cut(dout_BSNH)
    product_BSN = jnp.sum(dout_BSNH.astype(jnp.float32) * out_BSNH.astype(jnp.float32), axis=-1)
    rows = cut(log_sum_BSN[..., None]), cut(product_BSN[..., None]), dout_nBKGsH

    def turn(step: Any, keys: tuple, sums: tuple) -> tuple:
        k_nBKtH, v_nBKtH, key_ids_nBt = keys
        dq, travelling = sums
        if not _own(step):  # not needed by this turn: it travels while the turn computes
            travelling = _shift(travelling)
        pairs, masked = _pairs(step, len(q_nBKGsH), causal, k_nBKtH), causal and _own(step)
        ids = ids_nBs, key_ids_nBt
        dq, *d_keys = kind.backward(pairs, masked, q_nBKGsH, k_nBKtH, v_nBKtH, ids, *rows, dq)
        return dq, tuple(d_keys) if _own(step) else jax.tree.map(jnp.add, travelling, tuple(d_keys))

    dq, d_keys = _round(turn, (k_nBKtH, v_nBKtH, ids_nBs), (None, ()), devices)
    d_keys = jax.tree.map(lambda x: x.astype(k_BSKH.dtype), d_keys)
    dk, dv = _shift(d_keys) if devices > 1 else d_keys  # home
    dq = kind.upright(dq).astype(q_BSNH.dtype)
    return join(dq), join(dk[:, :, :, None]), join(dv[:, :, :, None])


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


def _own(step: Any) -> bool:
    return isinstance(step, int) and step == 0


def _shift(tree: Any) -> Any:
    """Each array to the next device of the ring."""
    n = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(tree, AXIS, [(i, (i + 1) % n) for i in range(n)])


# --- tiles --------------------------------------------------------------------------------------------


def _pairs(step: Any, n: int, causal: bool, activation: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tiles of queries (of n) and of keys that meet in a turn, in the order of the former: those of which
    anything is seen."""
    if not causal:
        pairs = np.indices((n, n)).reshape(2, -1)
    elif _own(step):
        pairs = np.tril_indices(n)
    else:
        pairs = far_pairs(n, jax.lax.axis_index(AXIS) < step)
    i, j = (jnp.asarray(x, jnp.int32) for x in pairs)
    return tiles.within((i, j), activation)


def far_pairs(n: int, later: Any) -> tuple[Any, Any]:
    """The pairs of a turn with keys of another device: late queries × all keys if it is ``later`` in the
    order of early chunks, and else all queries × early keys."""
    width = n // 2 + later * (n // 2)
    i, j = jnp.divmod(jnp.arange(n * n // 2), width)
    return i + later * (n // 2), j


def tile_size(S: int, devices: int, kind: Any = tiles) -> int:
    """Queries and keys of a tile of one device's S; of `flash_tile` 0 where its kernels do not fit."""
    return kind.tile_size(S // 2 if devices > 1 else S)


def _tiling(kind: Any, q_BSNH: jax.Array, k_BSKH: jax.Array, devices: int) -> tuple:
    """Cut (B, S, heads, …) into (n, B, K, heads/K, s, …), cut (B, S) into (n, B, s), join the former."""
    B, S = q_BSNH.shape[:2]
    K, size = k_BSKH.shape[2], tile_size(S, devices, kind)

    def cut(x_BSNH: jax.Array) -> jax.Array:
        N, H = x_BSNH.shape[2:]
        return jnp.transpose(x_BSNH.reshape(B, S // size, size, K, N // K, H), (1, 0, 3, 4, 2, 5))

    def cut_ids(ids_BS: jax.Array | None) -> jax.Array | None:
        return None if ids_BS is None else jnp.swapaxes(ids_BS.reshape(B, S // size, size), 0, 1)

    def join(x_nBKGsH: jax.Array) -> jax.Array:
        return jnp.transpose(x_nBKGsH, (1, 0, 4, 2, 3, 5)).reshape(B, S, -1, x_nBKGsH.shape[-1])

    return cut, cut_ids, join
