"""Flash attention for NVIDIA GPUs, in Pallas (Triton): no array grows with S², and no mask is stored.

The forward pass is one kernel, the backward pass two, one for dq and one for dk and dv (Dao 2023,
arXiv:2307.08691). A program of a kernel owns a block of queries (or of keys) of one head and walks over the
blocks of keys (or of queries) between the least and the largest bound of its intervals. What lies between
two documents is therefore skipped in both passes, and only blocks at the ends of an interval are masked.
The gradient of a key is summed over its G query heads within one program, so that results are
deterministic. Arrays keep the layout of the model, and grouped keys are read where they are: nothing is
transposed, repeated or padded.

Logits are in base 2 (multiplied by log2 e), because the exponential of the hardware is 2^x.

Shape letters: B batch · S query length · T key length · N query heads · K kv heads · G = N/K · H head dim ·
P the power of two above H · s, t queries and keys of one block.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlp.nn.attention import FLASH_ROW_BYTES, RESIDUALS, intervals
from maxlp.nn.attention.intervals import Interval
from maxlp.nn.attention.per_device import on_each_device
from maxlp.nn.attention.tiles import MASKED_LOGIT, dot

INTERPRET = False  # runs the kernels operation by operation, on any platform (for tests)
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The sizes of one kernel.

    Attributes:
      own: rows of the block that a program owns: queries, or keys for dk and dv.
      other: rows of a block that it walks over: keys, or queries for dk and dv.
      warps: of a program.
      stages: how many of the other blocks are loaded ahead (Triton's software pipeline).
    """

    own: int
    other: int
    warps: int
    stages: int


# Whether shared memory is large -> the bytes of one head of a token, at most -> the blocks of each kernel.
# They are not tuned on a device: they compile for every GPU of `planning.topologies`.
BLOCKS: dict[bool, dict[int, dict[str, Blocks]]] = {
    True: {
        256: dict(forward=Blocks(128, 64, 8, 3), dq=Blocks(128, 64, 8, 2), dkv=Blocks(64, 128, 8, 2)),
        512: dict(forward=Blocks(64, 32, 4, 2), dq=Blocks(64, 32, 4, 2), dkv=Blocks(32, 64, 4, 2)),
    },
    False: {
        256: dict(forward=Blocks(128, 64, 8, 2), dq=Blocks(128, 32, 8, 2), dkv=Blocks(64, 64, 8, 2)),
        512: dict(forward=Blocks(64, 32, 4, 2), dq=Blocks(64, 16, 4, 2), dkv=Blocks(32, 32, 4, 2)),
    },
}
# At least 164 KiB of shared memory on a multiprocessor; others have 100.
LARGE_SHARED_MEMORY = "A100", "H100", "H200", "B200", "B300"


def supports(head_dim: int, itemsize: int) -> bool:
    """Whether there are blocks for heads of this size in a dtype with this number of bytes."""
    return head_dim * itemsize <= FLASH_ROW_BYTES


def _blocks_of_device() -> dict[int, dict[str, Blocks]]:
    """The blocks for the devices of the current mesh, which need not exist; small ones without a mesh."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    is_large = device is not None and any(name in device.device_kind for name in LARGE_SHARED_MEMORY)
    return BLOCKS[is_large]


def flash(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    causal: bool,
    segment_ids_BS: jax.Array | None,
) -> jax.Array:
    """Flash attention of any length, for segment ids as in `nn.attention`."""
    return on_each_device(lambda *arrays: _attend(*arrays, causal), q_BSNH, k_BSKH, v_BSKH, segment_ids_BS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, causal):
    return _attend_fwd(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, causal)[0]


def _attend_fwd(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, causal):
    of_queries, _ = visible(q_BSNH, segment_ids_BS, causal)
    out_BSNH, log_sum_BNS = forward(q_BSNH, k_BSKH, v_BSKH, of_queries, q_BSNH.dtype)
    out_BSNH = checkpoint_name(out_BSNH, RESIDUALS)
    log_sum_BNS = checkpoint_name(log_sum_BNS, RESIDUALS)
    return out_BSNH, (q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, out_BSNH, log_sum_BNS)


def _attend_bwd(causal, saved, dout_BSNH):
    q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, out_BSNH, log_sum_BNS = saved
    delta_BNS = jnp.einsum("BSNH,BSNH->BNS", out_BSNH, dout_BSNH, preferred_element_type=jnp.float32)
    of_queries, of_keys = visible(q_BSNH, segment_ids_BS, causal)
    rows = log_sum_BNS, delta_BNS, dout_BSNH
    gradients = backward(q_BSNH, k_BSKH, v_BSKH, of_queries, of_keys, *rows, q_BSNH.dtype)
    return *gradients, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def visible(q_BSNH: jax.Array, segment_ids_BS: jax.Array | None, causal: bool) -> tuple[Interval, Interval]:
    """The keys that each query sees, and the queries that see each key, in self-attention."""
    B, S = q_BSNH.shape[:2]
    if causal:
        of_queries, of_keys = intervals.up_to_itself(B, S), intervals.from_itself(B, S)
    else:
        of_queries = of_keys = intervals.everything(B, S, S)
    if segment_ids_BS is None:
        return of_queries, of_keys
    same = intervals.same_segment(segment_ids_BS, segment_ids_BS)
    return intervals.intersection(of_queries, same), intervals.intersection(of_keys, same)


# --- the kernels ------------------------------------------------------------------------------------------


def forward(
    q_BSNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    of_queries: Interval,
    dtype: Any,
    earlier: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The output (B, S, N, H) in this dtype, and the logits' log-sum-exp in base 2, float32 (B, N, S).

    A query without keys gets an output of 0 and a log-sum-exp below every other.

    Args:
      earlier: the result for other keys, which is continued in place.
    """
    sizes = _Sizes.of(q_BSNH, k_BTKH)
    blocks = sizes.blocks("forward", sizes.S, sizes.T)
    at = _QuerySpecs(sizes, blocks)
    inputs = [
        (q_BSNH, at.rows),
        (k_BTKH, at.keys),
        (v_BTKH, at.keys),
        *((x, at.bounds) for x in of_queries),
    ]
    outputs = [
        (jax.ShapeDtypeStruct(q_BSNH.shape, dtype), at.rows),
        (jax.ShapeDtypeStruct((sizes.B, sizes.N, sizes.S), jnp.float32), at.scalars),
    ]
    if earlier is not None:
        inputs += zip(earlier, (at.rows, at.scalars), strict=True)
    return _call(_forward_kernel, sizes, blocks, at.grid, inputs, outputs, earlier or ())


def backward(
    q_BSNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    of_queries: Interval,
    of_keys: Interval,
    log_sum_BNS: jax.Array,
    delta_BNS: jax.Array,
    dout_BSNH: jax.Array,
    dtype: Any,
    dq_BSNH: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v in this dtype.

    Args:
      of_queries, of_keys: the same mask, from both sides.
      log_sum_BNS: as from `forward`, over all keys of the softmax; these may be some of them.
      delta_BNS: ``sum(dout * out)`` of each query.
      dq_BSNH: the gradient of q from other keys, to which this one is added in place.
    """
    sizes = _Sizes.of(q_BSNH, k_BTKH)
    blocks = sizes.blocks("dq", sizes.S, sizes.T)
    at = _QuerySpecs(sizes, blocks)
    arrays = q_BSNH, k_BTKH, v_BTKH, dout_BSNH, log_sum_BNS, delta_BNS
    specs = at.rows, at.keys, at.keys, at.rows, at.scalars, at.scalars
    inputs = [*zip(arrays, specs, strict=True), *((x, at.bounds) for x in of_queries)]
    outputs = [(jax.ShapeDtypeStruct(q_BSNH.shape, dtype), at.rows)]
    earlier = () if dq_BSNH is None else (dq_BSNH,)
    inputs += [(x, at.rows) for x in earlier]
    (dq,) = _call(_dq_kernel, sizes, blocks, at.grid, inputs, outputs, earlier)

    blocks = sizes.blocks("dkv", sizes.T, sizes.S)
    at = _KeySpecs(sizes, blocks)
    specs = at.queries, at.rows, at.rows, at.queries, at.scalars, at.scalars
    inputs = [*zip(arrays, specs, strict=True), *((x, at.bounds) for x in of_keys)]
    outputs = [(jax.ShapeDtypeStruct(k_BTKH.shape, dtype), at.rows)] * 2
    dk_BTKH, dv_BTKH = _call(_dkv_kernel, sizes, blocks, at.grid, inputs, outputs)
    return dq, dk_BTKH, dv_BTKH


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The sizes of a call; see the letters above."""

    B: int
    S: int
    T: int
    N: int
    K: int
    H: int
    itemsize: int

    @classmethod
    def of(cls, q_BSNH: jax.Array, k_BTKH: jax.Array) -> "_Sizes":
        B, S, N, H = q_BSNH.shape
        return cls(B, S, k_BTKH.shape[1], N, k_BTKH.shape[2], H, q_BSNH.dtype.itemsize)

    @property
    def G(self) -> int:
        return self.N // self.K

    @property
    def P(self) -> int:
        return _power_of_two(self.H)

    def blocks(self, kernel: str, own: int, other: int) -> Blocks:
        """The blocks of a kernel, not longer than the sequences that they cut."""
        of_device = _blocks_of_device()
        limit = min(limit for limit in of_device if limit >= self.P * self.itemsize)
        blocks = of_device[limit][kernel]
        lengths = min(blocks.own, _power_of_two(own)), min(blocks.other, _power_of_two(other))
        return Blocks(*lengths, blocks.warps, blocks.stages)


def _power_of_two(size: int) -> int:
    """The smallest one that is not below ``size``; at least 16, the smallest dim that tensor cores take."""
    return max(16, 1 << (size - 1).bit_length())


class _QuerySpecs:
    """What a program with a block of queries of one head reads and writes; the grid is (blocks, B, N)."""

    def __init__(self, sizes: _Sizes, blocks: Blocks):
        from jax.experimental import pallas as pl  # takes half a second to import

        G, P, T = sizes.G, sizes.P, _whole_blocks(sizes.T, blocks.other)
        self.grid = pl.cdiv(sizes.S, blocks.own), sizes.B, sizes.N
        self.rows = pl.BlockSpec((None, blocks.own, None, P), lambda i, b, n: (b, i, n, 0))
        self.keys = pl.BlockSpec((None, T, None, P), lambda i, b, n: (b, 0, n // G, 0))
        self.scalars = pl.BlockSpec((None, None, blocks.own), lambda i, b, n: (b, n, i))
        self.bounds = pl.BlockSpec((None, blocks.own), lambda i, b, n: (b, i))


class _KeySpecs:
    """What a program with a block of keys of one head reads and writes; the grid is (blocks, B, K)."""

    def __init__(self, sizes: _Sizes, blocks: Blocks):
        from jax.experimental import pallas as pl

        G, P, S = sizes.G, sizes.P, _whole_blocks(sizes.S, blocks.other)
        self.grid = pl.cdiv(sizes.T, blocks.own), sizes.B, sizes.K
        self.rows = pl.BlockSpec((None, blocks.own, None, P), lambda j, b, k: (b, j, k, 0))
        self.queries = pl.BlockSpec((None, S, G, P), lambda j, b, k: (b, 0, k, 0))
        self.scalars = pl.BlockSpec((None, G, S), lambda j, b, k: (b, k, 0))
        self.bounds = pl.BlockSpec((None, blocks.own), lambda j, b, k: (b, j))


def _whole_blocks(length: int, size: int) -> int:
    return -(-length // size) * size


def _call(
    kernel: Callable,
    sizes: _Sizes,
    blocks: Blocks,
    grid: tuple,
    inputs: list,
    outputs: list,
    earlier: tuple = (),
) -> Any:
    """Runs a kernel.

    Args:
      inputs, outputs: (array or its shape, spec).
      earlier: the last of the inputs, which the outputs overwrite.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    arrays, in_specs = zip(*inputs, strict=True)
    shapes, out_specs = zip(*outputs, strict=True)

    @functools.wraps(kernel)  # profiles show its name
    def run(*refs: Any) -> None:
        kernel(_Program(sizes, blocks), *refs)

    return pl.pallas_call(
        run,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=shapes,
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        input_output_aliases={len(arrays) - len(earlier) + i: i for i in range(len(earlier))},
        interpret=INTERPRET,
        name=kernel.__name__.strip("_"),
    )(*arrays)


# --- what a program computes ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Program:
    """Loads, stores and loops of one program.

    Arrays are read and written by whole blocks, whose rows and columns beyond the array are masked. Triton
    takes one index per reference: head and rows are selected together, not one after the other.
    """

    sizes: _Sizes
    blocks: Blocks

    @property
    def scale(self) -> float:
        return self.sizes.H**-0.5

    def own(self, ref: Any, length: int, other: Any = 0) -> jax.Array:
        """The program's own rows (size, P), or its own scalars (size,), one for each row."""
        mask = self._mask(ref.shape, self._own_start, length)
        return _load(ref, (slice(None),) * len(ref.shape), mask, other)

    def store(self, ref: Any, x: jax.Array, length: int) -> None:
        """Writes the program's own rows or scalars."""
        from jax.experimental.pallas import triton

        mask = self._mask(ref.shape, self._own_start, length)
        triton.store(ref, x.astype(ref.dtype), mask=mask)

    def block(self, ref: Any, i: Any, length: int, masked: bool, *head: Any) -> jax.Array:
        """Block i of the other side's rows (size, P), or of its scalars (size,); see `walk`.

        Args:
          head: the index of the head, if the reference has several.
        """
        from jax.experimental import pallas as pl

        size, rank = self.blocks.other, len(ref.shape) - len(head)
        is_rows = rank == 2
        shape = (size, ref.shape[-1]) if is_rows else (size,)
        rows = pl.ds(i * size, size)
        at = (rows, *head, slice(None)) if is_rows else (*head, rows)
        # A block that is not masked is seen whole, so it ends before the array does.
        mask = self._mask(shape, i * size, length if masked else None)
        return _load(ref, at, mask, 0)

    def walk(self, lo: jax.Array, hi: jax.Array, body: Callable, carry: Any) -> Any:
        """``carry = body(masked, i, carry)`` for every block i that any of the own rows sees.

        masked is False where all of them see the whole block.
        """
        size = self.blocks.other
        first, end = jnp.min(lo) // size, (jnp.max(hi) + size - 1) // size
        whole = jnp.clip((jnp.max(lo) + size - 1) // size, first, jnp.maximum(first, end))
        whole_end = jnp.clip(jnp.min(hi) // size, whole, jnp.maximum(whole, end))
        for start, stop, masked in (
            (first, whole, True),
            (whole, whole_end, False),
            (whole_end, end, True),
        ):
            carry = jax.lax.fori_loop(start, stop, functools.partial(body, masked), carry)
        return carry

    def logits(self, own: jax.Array, other: jax.Array, bounds: tuple, i: Any, masked: bool) -> jax.Array:
        """The logits of the own rows and block i of the other side, in base 2."""
        logits = dot(own, other, 1, 1) * (self.scale * LOG2_E)
        if not masked:
            return logits
        lo, hi = bounds
        at = i * self.blocks.other + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        return jnp.where((lo[:, None] <= at) & (at < hi[:, None]), logits, MASKED_LOGIT)

    @property
    def _own_start(self) -> Any:
        from jax.experimental import pallas as pl

        return pl.program_id(0) * self.blocks.own

    def _mask(self, shape: tuple[int, ...], start: Any, length: int | None) -> jax.Array | None:
        """Selects rows below ``length``, counted from ``start``, and columns below H; None selects all."""
        masks = []
        if length is not None and length % shape[0]:
            masks.append(start + jax.lax.broadcasted_iota(jnp.int32, shape, 0) < length)
        if len(shape) == 2 and self.sizes.H < self.sizes.P:
            masks.append(jax.lax.broadcasted_iota(jnp.int32, shape, 1) < self.sizes.H)
        return functools.reduce(jnp.logical_and, masks) if masks else None


def _load(ref: Any, at: tuple, mask: jax.Array | None, other: Any) -> jax.Array:
    from jax.experimental.pallas import triton

    return triton.load(ref.at[at], mask=mask, other=None if mask is None else other)


def _forward_kernel(program: _Program, q, k, v, lo, hi, *refs) -> None:
    *earlier, out, log_sum = refs
    S, T = program.sizes.S, program.sizes.T
    q_sP = program.own(q, S)
    bounds = program.own(lo, S, intervals.EMPTY[0]), program.own(hi, S, intervals.EMPTY[1])

    def visit(masked: bool, j: Any, carry: tuple) -> tuple:
        old_s, total_s, out_sP = carry
        logits_st = program.logits(q_sP, program.block(k, j, T, masked), bounds, j, masked)
        maximum_s = jnp.maximum(old_s, jnp.max(logits_st, axis=1))
        weights_st, rescale_s = jnp.exp2(logits_st - maximum_s[:, None]), jnp.exp2(old_s - maximum_s)
        total_s = total_s * rescale_s + jnp.sum(weights_st, axis=1)
        v_tP = program.block(v, j, T, masked)
        return (
            maximum_s,
            total_s,
            out_sP * rescale_s[:, None] + dot(weights_st.astype(v.dtype), v_tP, 1, 0),
        )

    if earlier:  # as if the earlier keys were one, with their output as its value
        out_sP, maximum_s = (program.own(x, S) for x in earlier)
        total_s = jnp.ones_like(maximum_s)
    else:  # above the masked logits, so that their weights are 0 even if there are no others
        maximum_s = jnp.full(q_sP.shape[:1], MASKED_LOGIT / 2, jnp.float32)
        total_s, out_sP = jnp.zeros_like(maximum_s), jnp.zeros(q_sP.shape, jnp.float32)
    carry = maximum_s, total_s, out_sP
    maximum_s, total_s, out_sP = program.walk(*bounds, visit, carry)
    total_s = jnp.where(total_s == 0, 1.0, total_s)
    program.store(out, out_sP / total_s[:, None], S)
    program.store(log_sum, maximum_s + jnp.log2(total_s), S)


def _dq_kernel(program: _Program, q, k, v, dout, log_sum, delta, lo, hi, *refs) -> None:
    *earlier, dq = refs
    S, T = program.sizes.S, program.sizes.T
    q_sP, dout_sP = program.own(q, S), program.own(dout, S)
    log_sum_s, delta_s = program.own(log_sum, S), program.own(delta, S)
    bounds = program.own(lo, S, intervals.EMPTY[0]), program.own(hi, S, intervals.EMPTY[1])

    def visit(masked: bool, j: Any, dq_sP: jax.Array) -> jax.Array:
        k_tP = program.block(k, j, T, masked)
        probs_st = jnp.exp2(program.logits(q_sP, k_tP, bounds, j, masked) - log_sum_s[:, None])
        dprobs_st = dot(dout_sP, program.block(v, j, T, masked), 1, 1)
        dlogits_st = probs_st * (dprobs_st - delta_s[:, None])
        return dq_sP + dot(dlogits_st.astype(k.dtype), k_tP, 1, 0)

    dq_sP = program.walk(*bounds, visit, jnp.zeros(q_sP.shape, jnp.float32))
    dq_sP *= program.scale
    for x in earlier:
        dq_sP += program.own(x, S)
    program.store(dq, dq_sP, S)


def _dkv_kernel(program: _Program, q, k, v, dout, log_sum, delta, lo, hi, dk, dv) -> None:
    S, T = program.sizes.S, program.sizes.T
    k_tP, v_tP = program.own(k, T), program.own(v, T)
    bounds = program.own(lo, T, intervals.EMPTY[0]), program.own(hi, T, intervals.EMPTY[1])

    def of_head(g: Any, carry: tuple) -> tuple:
        def visit(masked: bool, i: Any, carry: tuple) -> tuple:
            dk_tP, dv_tP = carry
            q_sP, dout_sP = program.block(q, i, S, masked, g), program.block(dout, i, S, masked, g)
            log_sum_s, delta_s = (program.block(x, i, S, masked, g) for x in (log_sum, delta))
            probs_ts = jnp.exp2(program.logits(k_tP, q_sP, bounds, i, masked) - log_sum_s[None])
            dv_tP += dot(probs_ts.astype(dout.dtype), dout_sP, 1, 0)
            dlogits_ts = probs_ts * (dot(v_tP, dout_sP, 1, 1) - delta_s[None])
            return dk_tP + dot(dlogits_ts.astype(q.dtype), q_sP, 1, 0), dv_tP

        return program.walk(*bounds, visit, carry)

    zeros = jnp.zeros(k_tP.shape, jnp.float32)
    dk_tP, dv_tP = jax.lax.fori_loop(0, program.sizes.G, of_head, (zeros, zeros))
    program.store(dk, dk_tP * program.scale, T)
    program.store(dv, dv_tP, T)
