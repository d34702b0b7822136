"""Ring attention: attention over a sequence that is split over devices (Liu et al. 2023, arXiv:2310.01889).

The mesh axis ``context`` splits the sequence over n devices. Queries stay on their device, while
keys and values travel around the ring of devices in n steps; the next ones are sent while the
current ones are used. As in flash attention, a device keeps for each of its queries the running
maximum of the logits, the sum of the exponentials relative to it, and the weighted sum of values.
The backward pass goes around the ring once more: it recomputes the logits, and the gradients of
keys and values travel along with the keys and values.

Within a device the work is cut into tiles of queries and keys, so that no S × S array exists; tiles
above the causal diagonal are skipped. This also serves a single device. `nn.attention.tiles`
defines what is computed for a pair of tiles, and `nn.attention.flash_tile` does it in kernels for
TPU. On NVIDIA GPUs the kernels of `nn.attention.flash` take the place of tiles: what a token sees of
the keys of a step is one interval, and a step one call.

If a causal sequence were cut into n consecutive parts, the device with the last part would have
nearly twice the average work, and all others would wait for it. `balance` therefore reorders the
sequence: of 2n chunks, device i holds the early chunk i and the late chunk 2n-1-i (as for Llama 3,
arXiv:2407.21783, section 3.3.2). With the keys of device j it computes

    j = i   late queries × early keys, and the diagonals of both chunks    (step 0)
    j < i   late queries × early keys, early queries × early keys
    j > i   late queries × early keys, late queries × late keys

since late chunks are in the reverse order of early ones. From step 1 on, that is exactly half of
all pairs of a query and a key, on every device and without a mask.

Shape letters: B batch · S length on one device · N query heads · K kv heads · G = N/K · H head dim
· D embed · n tiles · s, t queries and keys of one tile.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from maxlp.nn.attention import RESIDUALS, flash, flash_tile, intervals, tiles
from maxlp.nn.attention.intervals import Interval
from maxlp.parallel import sharding

AXIS = "context"
XLA_TILES: tiles.TileKernels = tiles
TPU_TILES: tiles.TileKernels = flash_tile


# --- the balanced order of the sequence -----------------------------------------------------------------


def ring_size(seq_len: int) -> int:
    """The number of devices that split a sequence of this (global) length in the balanced order.

    It is 1, and the sequence stays in its natural order, if there is no mesh, if the context axis
    has size 1, or if the length is not a multiple of 2 × context × stage × tensor.
    """
    n, inner = _axis_sizes(jax.sharding.get_abstract_mesh())
    return n if seq_len % (2 * n * inner) == 0 else 1


def balance(x_BS: jax.Array) -> jax.Array:
    """Tokens, positions or segment ids in the order that gives every device of a causal ring equal work.

    The identity if `ring_size` is 1. These arrays are small, and not yet split over the context axis.
    """
    B, S = x_BS.shape
    n = ring_size(S)
    if n == 1:
        return x_BS
    chunks = x_BS.reshape(B, 2, n, S // (2 * n))
    x_BS = jnp.stack([chunks[:, 0], chunks[:, 1, ::-1]], axis=2).reshape(B, S)
    return sharding.constrain(x_BS, "batch", "seq")


def unbalance(x_BSD: jax.Array) -> jax.Array:
    """Brings activations from the balanced order back to the natural one, without gathering them.

    Args:
      x_BSD: its sequence is split like the logical axis ``embed_seq``.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if ring_size(x_BSD.shape[1]) == 1:
        return x_BSD
    # Each device holds two halves (of its part), and its natural part consists of two halves of
    # even and odd position. Halves of even position form one permutation of the devices, those of
    # odd position another.
    positions = natural_positions(*_axis_sizes(mesh))
    axes = tuple(sharding.RULES["embed_seq"] or ())
    in_mesh = tuple(
        axis for axis in sharding.MESH_AXES if axis in axes
    )  # the order in which ppermute counts
    devices = np.arange(len(positions) // 2).reshape([mesh.shape[axis] for axis in in_mesh])
    device_of_part = devices.transpose([in_mesh.index(axis) for axis in axes]).ravel()

    def move(x_BsD: jax.Array) -> jax.Array:
        first, second = jnp.split(x_BsD, 2, axis=1)
        first_parity = jnp.asarray(positions[::2] % 2)[jax.lax.axis_index(axes)]
        received = []
        for parity in (0, 1):
            halves = np.flatnonzero(positions % 2 == parity)
            routes = device_of_part[halves // 2], device_of_part[positions[halves] // 2]
            sent = jnp.where(first_parity == parity, first, second)
            received.append(jax.lax.ppermute(sent, in_mesh, list(zip(*routes, strict=True))))
        return jnp.concatenate(received, axis=1)

    spec = PartitionSpec(_batch_axes(mesh, len(x_BSD)), axes, None)
    return jax.shard_map(move, in_specs=spec, out_specs=spec)(x_BSD)


def natural_positions(n: int, inner: int) -> np.ndarray:
    """The position in the natural order of every half of a device's part, in the balanced order.

    Args:
      n: the size of the context axis.
      inner: the number of devices that each of its parts is split over once more.
    """
    part, half = np.divmod(np.arange(2 * n * inner), 2 * inner)
    is_late, half = np.divmod(half, inner)
    return np.where(is_late == 0, part, 2 * n - 1 - part) * inner + half


def _axis_sizes(mesh: Any) -> tuple[int, int]:
    """The size of the ring, and of the axes that split the sequence further outside of attention."""
    return mesh.shape.get(AXIS, 1), mesh.shape.get("stage", 1) * mesh.shape.get("tensor", 1)


def _batch_axes(mesh: Any, batch_size: int) -> Any:
    """The mesh axes of the batch dim; none if they do not divide it (one prompt on eight devices)."""
    rows = sharding.spec("batch")[0]  # a replica that computes its own gradient has only its rows
    return rows if batch_size % sharding.axes_size(mesh, rows) == 0 else None


# --- attention ------------------------------------------------------------------------------------------


def ring(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    causal: bool,
    segment_ids_BS: jax.Array | None,
) -> jax.Array:
    """Attention with the softmax in float32; S is the global length, in the order of `balance`."""
    mesh = jax.sharding.get_abstract_mesh()
    assert mesh.empty or k_BSKH.shape[2] % mesh.shape["tensor"] == 0, "see attention.refusal"
    with jax.named_scope("ring"):
        return _attend(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, causal)


def _attend_fwd(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, causal):
    arrays = q_BSNH, k_BSKH, v_BSKH, segment_ids_BS
    results = _on_each_device((_forward, _flash_forward), 2, arrays, causal)
    out_BSNH, log_sum_BSN = (checkpoint_name(x, RESIDUALS) for x in results)
    return out_BSNH, (*arrays, out_BSNH, log_sum_BSN)


def _attend_bwd(causal, saved, dout_BSNH):
    return *_on_each_device((_backward, _flash_backward), 3, (*saved, dout_BSNH), causal), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, causal):
    return _attend_fwd(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, causal)[0]


_attend.defvjp(_attend_fwd, _attend_bwd)


def _on_each_device(functions: tuple, num_results: int, arrays: tuple, causal: bool) -> Any:
    """Calls a function on each device's rows, heads and part of the sequence.

    Args:
      functions: for tiles and for `nn.attention.flash`: both forward, or both backward.
    """
    mesh = jax.sharding.get_abstract_mesh()
    B, S = arrays[0].shape[:2]
    n = ring_size(S)
    function = functools.partial(_on_platform, functions, causal, n)
    if mesh.size <= 1:
        return function(*arrays)
    rows, seq = _batch_axes(mesh, B), AXIS if n > 1 else None
    heads = PartitionSpec(rows, seq, "tensor")
    specs = tuple(PartitionSpec(rows, seq) if x is None or x.ndim == 2 else heads for x in arrays)
    # check_vma would require every constant to be marked as varying, and these gradients are
    # written by hand.
    run = jax.shard_map(function, in_specs=specs, out_specs=(heads,) * num_results, check_vma=False)
    return run(*arrays)


def _on_platform(functions: tuple, causal: bool, devices: int, *arrays: jax.Array | None) -> Any:
    """Fused kernels on TPU and on NVIDIA GPUs if they support the shape, else plain tiles."""
    tiled, fused = (functools.partial(f, causal=causal, devices=devices) for f in functions)
    q_BSNH = arrays[0]
    assert q_BSNH is not None
    branches = {}
    if tile_size(q_BSNH.shape[1], devices, TPU_TILES):
        branches["tpu"] = functools.partial(tiled, TPU_TILES)
    if flash.supports(q_BSNH.shape[3], q_BSNH.dtype.itemsize):
        branches["cuda"] = fused
    return jax.lax.platform_dependent(*arrays, **branches, default=functools.partial(tiled, XLA_TILES))


# --- on one device, in tiles -----------------------------------------------------------------------------


def _forward(
    kernels: tiles.TileKernels, q_BSNH, k_BSKH, v_BSKH, ids_BS, *, causal: bool, devices: int
) -> tuple[jax.Array, jax.Array]:
    """The attention output, and the log-sum-exp of each query's logits, float32 (B, S, N)."""
    K, size = k_BSKH.shape[2], tile_size(q_BSNH.shape[1], devices, kernels)
    q_nBKGsH = _cut_heads(q_BSNH, K, size)
    k_nBKtH, v_nBKtH = (_cut_heads(x, K, size)[:, :, :, 0] for x in (k_BSKH, v_BSKH))
    ids_nBs = _cut_ids(ids_BS, size)

    def attend(step: Any, keys: tuple, accumulator: Any, *, local: bool = False) -> Any:
        k_nBKtH, v_nBKtH, key_ids_nBt = keys
        pairs = _pairs(step, len(q_nBKGsH), causal, local, k_nBKtH)
        ids = ids_nBs, key_ids_nBt
        return kernels.forward(pairs, causal and local, q_nBKGsH, k_nBKtH, v_nBKtH, ids, accumulator)

    accumulator = _around_the_ring(attend, (k_nBKtH, v_nBKtH, ids_nBs), None, devices)
    out, log_sum = kernels.finish_forward(accumulator)
    return _join_heads(out.astype(q_BSNH.dtype)), _join_heads(log_sum)[..., 0]


def _backward(
    kernels: tiles.TileKernels,
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
    K, size = k_BSKH.shape[2], tile_size(q_BSNH.shape[1], devices, kernels)
    q_nBKGsH = _cut_heads(q_BSNH, K, size)
    k_nBKtH, v_nBKtH = (_cut_heads(x, K, size)[:, :, :, 0] for x in (k_BSKH, v_BSKH))
    ids_nBs, dout_nBKGsH = _cut_ids(ids_BS, size), _cut_heads(dout_BSNH, K, size)
    delta_BSN = jnp.sum(dout_BSNH.astype(jnp.float32) * out_BSNH.astype(jnp.float32), axis=-1)
    log_sum, delta = (_cut_heads(x_BSN[..., None], K, size) for x_BSN in (log_sum_BSN, delta_BSN))

    def visit(step: Any, keys: tuple, dq: Any, local: bool) -> tuple:
        k_nBKtH, v_nBKtH, key_ids_nBt = keys
        pairs = _pairs(step, len(q_nBKGsH), causal, local, k_nBKtH)
        arrays = q_nBKGsH, k_nBKtH, v_nBKtH, (ids_nBs, key_ids_nBt), log_sum, delta, dout_nBKGsH
        return kernels.backward(pairs, causal and local, *arrays, dq)

    dq, dk, dv = _gradients_around_the_ring(visit, (k_nBKtH, v_nBKtH, ids_nBs), devices)
    dq = kernels.finish_dq(dq).astype(q_BSNH.dtype)
    return _join_heads(dq), _join_heads(dk[:, :, :, None]), _join_heads(dv[:, :, :, None])


# --- on one NVIDIA GPU -----------------------------------------------------------------------------------


def _flash_forward(
    q_BSNH, k_BSKH, v_BSKH, ids_BS, *, causal: bool, devices: int
) -> tuple[jax.Array, jax.Array]:
    """`_forward`, each step of the ring as one call of a kernel."""
    dtype = q_BSNH.dtype if devices == 1 else jnp.float32  # of what steps add up

    def attend(step: Any, keys: tuple, earlier: Any, *, local: bool = False) -> Any:
        k_BSKH, v_BSKH, key_ids_BS = keys
        of_queries, _ = _visible(step, causal, local, q_BSNH, ids_BS, key_ids_BS)
        return flash.forward(q_BSNH, k_BSKH, v_BSKH, of_queries, dtype, earlier)

    out_BSNH, log_sum_BNS = _around_the_ring(attend, (k_BSKH, v_BSKH, ids_BS), None, devices)
    return out_BSNH.astype(q_BSNH.dtype), jnp.swapaxes(log_sum_BNS, 1, 2) / flash.LOG2_E


def _flash_backward(
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
    """`_backward`, each step of the ring as two calls of kernels."""
    dtype = q_BSNH.dtype if devices == 1 else jnp.float32
    delta_BNS = jnp.einsum("BSNH,BSNH->BNS", out_BSNH, dout_BSNH, preferred_element_type=jnp.float32)
    rows = jnp.swapaxes(log_sum_BSN, 1, 2) * flash.LOG2_E, delta_BNS, dout_BSNH

    def visit(step: Any, keys: tuple, dq: Any, local: bool) -> tuple:
        k_BSKH, v_BSKH, key_ids_BS = keys
        of_queries, of_keys = _visible(step, causal, local, q_BSNH, ids_BS, key_ids_BS)
        return flash.backward(q_BSNH, k_BSKH, v_BSKH, of_queries, of_keys, *rows, dtype, dq)

    dq_BSNH, dk_BSKH, dv_BSKH = _gradients_around_the_ring(visit, (k_BSKH, v_BSKH, ids_BS), devices)
    return dq_BSNH.astype(q_BSNH.dtype), dk_BSKH, dv_BSKH


def _visible(
    step: Any,
    causal: bool,
    local: bool,
    q_BSNH: jax.Array,
    ids_BS: jax.Array | None,
    key_ids_BS: jax.Array | None,
) -> tuple[Interval, Interval]:
    """The keys of this step that each query sees, and the queries that see each of those keys.

    A device holds two chunks of the sequence, in their order. What a token sees is without gaps: a document
    of both chunks includes all that is between them.
    """
    if local:  # the keys of these very tokens
        return flash.visible(q_BSNH, ids_BS, causal)
    B, S = q_BSNH.shape[:2]
    of_queries = of_keys = intervals.everything(B, S, S)
    if causal:
        of_queries, of_keys = remote_intervals(B, S, _is_wrapped(step))
    if ids_BS is None or key_ids_BS is None:
        return of_queries, of_keys
    of_queries = intervals.intersection(of_queries, intervals.same_segment(ids_BS, key_ids_BS))
    return of_queries, intervals.intersection(of_keys, intervals.same_segment(key_ids_BS, ids_BS))


def remote_intervals(B: int, S: int, wrapped: Any) -> tuple[Interval, Interval]:
    """The causal intervals of queries and of keys in a step with the keys of another device.

    Args:
      S: tokens on a device; the first half of them is the early chunk.
      wrapped: as in `remote_pairs`.
    """
    is_late_BS = jnp.broadcast_to(jnp.arange(S) >= S // 2, (B, S))
    zeros_BS = jnp.zeros((B, S), jnp.int32)
    of_queries = zeros_BS, jnp.where(wrapped, jnp.where(is_late_BS, S, 0), S // 2)
    of_keys = zeros_BS + jnp.where(wrapped, S // 2, 0), jnp.where(wrapped, S, jnp.where(is_late_BS, 0, S))
    return of_queries, of_keys


# --- the turns of the ring -------------------------------------------------------------------------------


def _around_the_ring(attend: Callable, keys: tuple, carry: Any, devices: int) -> Any:
    """``carry = attend(step, keys, carry)`` with the keys of every device, in n steps.

    Step 0 uses the device's own keys and gets ``local=True``. The keys of the next step are sent
    while a step computes; after the last step they are not sent home.
    """
    carry = attend(0, keys, carry, local=True)
    if devices == 1:
        return carry
    keys = _send_on(keys)

    def body(step: jax.Array, keys_and_carry: tuple) -> tuple:
        keys, carry = keys_and_carry
        return _send_on(keys), attend(step, keys, carry)

    if devices > 2:
        keys, carry = jax.lax.fori_loop(1, devices - 1, body, (keys, carry))
    return attend(devices - 1, keys, carry)


def _gradients_around_the_ring(visit: Callable, keys: tuple, devices: int) -> tuple:
    """The gradient of q, accumulated, and those of k and v, summed over all devices in the dtype of k.

    Args:
      visit: (step, keys, dq of earlier steps or None, local) -> dq, and the gradients of these keys from
        this device, float32.
    """

    def attend(step: Any, keys: tuple, gradients: tuple, *, local: bool = False) -> tuple:
        dq, dkeys = gradients
        if not local:  # the kernels below do not use it, so it is sent while they run
            dkeys = _send_on(dkeys)
        dq, *new = visit(step, keys, dq, local)
        return dq, tuple(new) if local else jax.tree.map(jnp.add, dkeys, tuple(new))

    dq, dkeys = _around_the_ring(attend, keys, (None, ()), devices)
    dkeys = jax.tree.map(lambda x: x.astype(keys[0].dtype), dkeys)
    return dq, *(_send_on(dkeys) if devices > 1 else dkeys)  # they are one device short of home


def _is_wrapped(step: Any) -> jax.Array:
    """Whether the keys of a step have passed the end of the ring; see `remote_pairs`."""
    return jax.lax.axis_index(AXIS) < step


def _send_on(tree: Any) -> Any:
    """Sends each array to the next device of the ring."""
    n = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(tree, AXIS, [(i, (i + 1) % n) for i in range(n)])


# --- tiles ----------------------------------------------------------------------------------------------


def tile_size(S: int, devices: int, kernels: tiles.TileKernels = XLA_TILES) -> int:
    """The number of queries and keys in a tile of one device's S; 0 if the kernels do not support S."""
    return kernels.tile_size(S // 2 if devices > 1 else S)


def _pairs(step: Any, n: int, causal: bool, local: bool, activation: jax.Array) -> tiles.Pairs:
    """The pairs of tiles (of n each) with any visible key in a step, in the order of their query tiles."""
    if not causal:
        pairs = np.indices((n, n)).reshape(2, -1)
    elif local:
        pairs = np.tril_indices(n)
    else:
        pairs = remote_pairs(n, _is_wrapped(step))
    i, j = (jnp.asarray(x, jnp.int32) for x in pairs)
    return tiles.depend_on(activation, (i, j))


def remote_pairs(n: int, wrapped: Any) -> tuple[Any, Any]:
    """The causal pairs of tiles in a step with the keys of another device.

    Args:
      n: tiles on a device; the first half of them is the early chunk.
      wrapped: 0 for keys of a device before this one: all queries × early keys. 1 for keys that
        have passed the end of the ring and come from a device after this one: late queries × all
        keys.
    """
    keys_per_query = n // 2 + wrapped * (n // 2)
    i, j = jnp.divmod(jnp.arange(n * n // 2), keys_per_query)
    return i + wrapped * (n // 2), j


def _cut_heads(x_BSNH: jax.Array, K: int, size: int) -> jax.Array:
    """(B, S, N, H) to tiles (n, B, K, N/K, size, H)."""
    B, S, N, H = x_BSNH.shape
    return jnp.transpose(x_BSNH.reshape(B, S // size, size, K, N // K, H), (1, 0, 3, 4, 2, 5))


def _join_heads(x_nBKGsH: jax.Array) -> jax.Array:
    """The inverse of `_cut_heads`."""
    n, B, _, _, size, H = x_nBKGsH.shape
    return jnp.transpose(x_nBKGsH, (1, 0, 4, 2, 3, 5)).reshape(B, n * size, -1, H)


def _cut_ids(ids_BS: jax.Array | None, size: int) -> jax.Array | None:
    """(B, S) to tiles (n, B, size)."""
    if ids_BS is None:
        return None
    B, S = ids_BS.shape
    return jnp.swapaxes(ids_BS.reshape(B, S // size, size), 0, 1)
