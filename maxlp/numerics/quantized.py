"""Operands of low-precision matmuls: values in a narrow format, and their scales."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxlp.numerics.formats import MX_BLOCK, Format, Quantized
from maxlp.numerics.rounding import cast
from maxlp.numerics.scales import amax, block_scales_for, rms, scale_for

HADAMARD = 16  # neighbours that `rotate` mixes, by default
LARGE_HADAMARD = 128  # the same for operands of the forward pass


def quantize(
    x: jax.Array,
    to: Format,
    granularity: str,
    contract: Sequence[int],
    *,
    delayed_amax: jax.Array | None = None,
    margin: float = 0.0,
    power_of_two: bool = False,
    clipping: str = "max",
    rounding: str = "nearest",
    block_size: int = MX_BLOCK,
    block_scales: str = "up",
) -> Quantized:
    """Quantizes an operand of a matmul.

    Args:
      granularity: the elements that share a scale. ``tensor``: all; ``row``: each vector along the
        contracted axes (a token of the input, an output channel of the kernel), so that scales can be
        applied to the product; ``block``: neighbours along the last contracted axis; ``tile``: squares of
        the last two axes; ``unscaled``: scale 1.
      contract: the axes that the matmul contracts.
      delayed_amax: a scalar to take the scale from instead of the data's own amax (``tensor``
        only).
      margin, power_of_two: see `scales.scale_for`; not for blocks and tiles.
      clipping: magnitudes are clipped at the largest one (``max``), or where the squared error of Gaussian
        data is least (``gaussian``, see `formats.Format`); ``tensor`` and ``row`` only.
      rounding: see `rounding.cast`. The key of ``stochastic`` is made from the data, so that no state has
        to be kept, and a repeated step rounds alike.
      block_size: the number of elements in a block, and along each side of a tile.
      block_scales: of blocks and tiles, see `scales.block_scales_for`.

    Returns:
      codes in ``to.dtype`` and the shape of ``x``, with their scales.

    Raises:
      ValueError: an axis that ``block_size`` does not divide; `pad_to_blocks` makes it fit.
    """
    if granularity in ("block", "tile"):
        axes = (contract[-1] % x.ndim,) if granularity == "block" else (x.ndim - 2, x.ndim - 1)
        return _quantize_blocks(x, to, axes, rounding, block_size, block_scales)
    if granularity == "unscaled":
        scale = jnp.ones((1,) * x.ndim, jnp.float32)
        x = jnp.where(jnp.isfinite(x), x, jnp.nan)  # infinity would saturate, and a scale of 1 hides it
    else:
        axes = tuple(range(x.ndim)) if granularity == "tensor" else tuple(contract)
        largest = amax(x, axes) if delayed_amax is None else delayed_amax.reshape((1,) * x.ndim)
        if clipping == "gaussian":
            largest = to.clip * rms(x, axes)
        scale = scale_for(largest, to, margin=margin, power_of_two=power_of_two)
    key = key_from(x) if rounding == "stochastic" else None
    values = cast(x.astype(jnp.float32) * _inverse(scale), to, rounding, key)
    return Quantized(values, scale)


def _quantize_blocks(
    x: jax.Array, to: Format, axes: tuple[int, ...], rounding: str, size: int, rule: str
) -> Quantized:
    if any(x.shape[axis] % size for axis in axes):
        raise ValueError(
            f"blocks of {size} do not divide axes {axes} of an array of shape {x.shape}; use another size "
            "or a recipe without blocks"
        )
    key = key_from(x) if rounding == "stochastic" else None
    sharding, x = explicit_sharding(x), x.astype(jnp.float32)
    for axis in reversed(axes):
        x = _split_blocks(x, axis, size)
    inside = tuple(axis + 1 + i for i, axis in enumerate(axes))  # where the elements of a block are now
    scale, tensor_scale = block_scales_for(amax(x, inside), to, rule)
    values = cast(x * _inverse(scale if tensor_scale is None else scale * tensor_scale), to, rounding, key)
    for axis in axes:
        values, scale = _join_blocks(values, axis), scale.squeeze(axis + 1)
    if sharding is not None:  # blocks may have been gathered
        values = jax.sharding.reshard(values, sharding)
    return Quantized(values, scale, tensor_scale)


def key_from(x: jax.Array) -> jax.Array:
    """A random key that depends on the data alone."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    # Integer sums that wrap around are the same in every order of summation, and so on every mesh.
    return jax.random.fold_in(jax.random.key(0), jnp.sum(bits, dtype=jnp.uint32))


def rotate(x: jax.Array, axis: int, size: int = HADAMARD, *, random_signs: bool = True) -> jax.Array:
    """Multiplies blocks of ``size`` neighbours along an axis by an orthogonal matrix; the dtype stays.

    It is a Hadamard matrix, by default with rows of random sign, which spreads an outlier over its block.
    The signs are always the same, so that a product of two arrays that contracts the axis changes only by
    rounding if both are rotated.
    """
    axis %= x.ndim
    split = _split_blocks(x, axis, size)
    signs = jnp.asarray(_hadamard(size, random_signs), x.dtype)
    mixed = jnp.tensordot(split, signs, axes=(axis + 1, 0), preferred_element_type=jnp.float32)
    mixed = (mixed / math.sqrt(size)).astype(x.dtype)
    return _join_blocks(jnp.moveaxis(mixed, -1, axis + 1), axis)


def _hadamard(size: int, random_signs: bool) -> np.ndarray:
    """Sylvester's (size, size) matrix of 1 and -1, with its rows times random signs."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.random.default_rng(0).choice((-1.0, 1.0), size) if random_signs else np.ones(size)
    return signs[:, None] * matrix


def trusted(x: jax.Array, q: Quantized, to: Format) -> jax.Array:
    """``x``, but without a gradient where ``q`` clips it by more than half a step of the grid.

    QuEST's trust estimator (arXiv:2502.05003), for integer formats with one scale per tensor or row.
    """
    in_steps = jnp.abs(x.astype(jnp.float32)) * _inverse(q.scale)
    return jnp.where(in_steps <= to.max + (1.0 if to.odd else 0.5), x, jax.lax.stop_gradient(x))


def _inverse(scale: jax.Array) -> jax.Array:
    # One division per scale, and elements are multiplied. XLA may or may not turn a division of every
    # element into this, so that the codes of values near a tie would depend on the program around them.
    return 1.0 / scale


def rounded_in_float32(x: jax.Array) -> jax.Array:
    """A bfloat16 array in float32, from which XLA may drop the cast that made it: readers round it again.

    For a kernel, stored in float32 and cast to bfloat16: if the GPU's cache has room for the bfloat16 copy,
    XLA would write it, and read it twice, for the amaxes and for the codes. Not for float16, whose
    subnormal numbers `reduce_precision` makes zero.
    """
    bits = jnp.finfo(jnp.bfloat16)
    return jax.lax.reduce_precision(x.astype(jnp.float32), bits.nexp, bits.nmant)


def row_major(x: jax.Array) -> jax.Array:
    """Constrains an array to row-major layout; a no-op on several devices.

    Otherwise XLA gives a whole stack of kernels the layout that the 8-bit matmul of one layer prefers, and
    copies all float32 weights to it in each step. (On a mesh the SPMD partitioner would gather an array
    whose layout is constrained.)
    """
    if jax.sharding.get_abstract_mesh().size > 1:
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def written_once(values: jax.Array) -> jax.Array:
    """Makes XLA write quantized values once, row-major, and transpose the 8-bit values where it needs to.

    One pass over the data then quantizes it and computes its amax, which XLA does not fuse with a
    transposed write. (With ``cold_start`` the scale may need this amax, so that the data is read twice.)
    """
    return jax.lax.optimization_barrier(row_major(values))


def pad_to_blocks(x: jax.Array, axis: int, size: int = MX_BLOCK) -> jax.Array:
    """Appends zeros to an axis up to a multiple of ``size``, which changes no sum over the axis."""
    axis %= x.ndim
    missing = -x.shape[axis] % size
    pads = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(_with_whole_blocks(x, axis, size), pads) if missing else x


def dequantize(q: Quantized, dtype: Any) -> jax.Array:
    """The array in ``dtype``; exact for power-of-two scales and a dtype as wide as the format."""
    scale = q.scale if q.tensor_scale is None else q.scale * q.tensor_scale
    for axis, (size, scales) in enumerate(zip(q.codes.shape, scale.shape, strict=True)):
        if scales not in (1, size):
            blocks = (*scale.shape[: axis + 1], size // scales, *scale.shape[axis + 1 :])
            scale = _join_blocks(jnp.broadcast_to(jnp.expand_dims(scale, axis + 1), blocks), axis)
    return (q.codes.astype(jnp.float32) * scale).astype(dtype)


def _split_blocks(x: jax.Array, axis: int, size: int) -> jax.Array:
    """(…, n, …) to (…, n / size, size, …)."""
    x = _with_whole_blocks(x, axis, size)
    shape = (*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
    return _reshape(x, shape, lambda spec: (*spec[: axis + 1], None, *spec[axis + 1 :]))


def _with_whole_blocks(x: jax.Array, axis: int, size: int) -> jax.Array:
    """The array, gathered along an axis if explicit mesh axes shard it in parts with incomplete blocks.

    On automatic mesh axes XLA exchanges the missing pieces of blocks between devices.
    """
    sharding = explicit_sharding(x)
    if sharding is None or sharding.spec[axis] is None:
        return x
    names = sharding.spec[axis]
    names = (names,) if isinstance(names, str) else names
    parts = math.prod(sharding.mesh.shape[name] for name in names)
    if math.ceil(x.shape[axis] / size) % parts == 0:
        return x
    spec = PartitionSpec(*sharding.spec[:axis], None, *sharding.spec[axis + 1 :])
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))


def _join_blocks(x: jax.Array, axis: int) -> jax.Array:
    """(…, blocks, m, …) to (…, blocks · m, …)."""
    shape = (*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return _reshape(x, shape, lambda spec: (*spec[: axis + 1], *spec[axis + 2 :]))


def _reshape(x: jax.Array, shape: tuple[int, ...], new_spec: Callable[[Any], tuple]) -> jax.Array:
    """Reshapes; on explicit mesh axes ``new_spec`` maps the spec of ``x`` to that of the result."""
    if (sharding := explicit_sharding(x)) is None:
        return x.reshape(shape)
    spec = PartitionSpec(*new_spec(sharding.spec))
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, spec))


def explicit_sharding(x: jax.Array) -> NamedSharding | None:
    """The sharding that an array's type carries on explicit mesh axes, else None."""
    sharding = jax.typeof(x).sharding
    types = sharding.mesh.axis_types
    return sharding if types and all(t == AxisType.Explicit for t in types) else None
