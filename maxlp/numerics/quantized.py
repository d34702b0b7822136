"""Operands of low-precision matmuls: values in a narrow format, and their scales."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxlp.numerics.formats import MX_BLOCK, Format
from maxlp.numerics.rounding import cast
from maxlp.numerics.scales import amax, scale_for


class Quantized(NamedTuple):
    """``values * scale``; the scale has size 1 along axes that share it, and dim / MX_BLOCK in blocks."""

    values: jax.Array
    scale: jax.Array


def quantize(
    x: jax.Array,
    to: Format,
    granularity: str,
    contract: Sequence[int],
    *,
    delayed_amax: jax.Array | None = None,
    margin: float = 0.0,
    power_of_two: bool = False,
    rounding: str = "nearest",
) -> Quantized:
    """Quantizes an operand of a matmul.

    Args:
      granularity: the elements that share a scale. ``tensor``: all; ``row``: each vector along the
        contraction (a token of the input, an output channel of the kernel), so that scales can be
        applied to the product; ``block``: `MX_BLOCK` neighbours along the last contracted axis;
        ``unscaled``: scale 1.
      contract: the axes that the matmul sums over.
      delayed_amax: a scalar to take the scale from instead of the data's own amax (``tensor``
        only).
      margin, power_of_two: see `scales.scale_for`; blocks always have powers of two, as in MX.
      rounding: see `rounding.cast`.

    Raises:
      ValueError: a contracted axis that `MX_BLOCK` does not divide; `pad_to_blocks` makes it fit.
    """
    if granularity == "unscaled":
        scale = jnp.ones((1,) * x.ndim, jnp.float32)
    elif granularity == "block":
        return _quantize_blocks(x, to, contract[-1] % x.ndim, rounding)
    else:
        axes = tuple(range(x.ndim)) if granularity == "tensor" else tuple(contract)
        largest = amax(x, axes) if delayed_amax is None else delayed_amax.reshape((1,) * x.ndim)
        scale = scale_for(largest, to, margin=margin, power_of_two=power_of_two)
    return Quantized(cast(x.astype(jnp.float32) * _inverse(scale), to, rounding), scale)


def _quantize_blocks(x: jax.Array, to: Format, axis: int, rounding: str) -> Quantized:
    if x.shape[axis] % MX_BLOCK:
        raise ValueError(
            f"block scales need a contracted axis that is a multiple of {MX_BLOCK}, got {x.shape[axis]} in "
            f"shape {x.shape}; use another size or a recipe without blocks"
        )
    x = _split_blocks(x.astype(jnp.float32), axis)
    scale = scale_for(amax(x, (axis + 1,)), to, power_of_two=True)
    values = cast(x * _inverse(scale), to, rounding)
    return Quantized(_join_blocks(values, axis), scale.squeeze(axis + 1))


def _inverse(scale: jax.Array) -> jax.Array:
    # One division per scale: XLA may or may not turn a division of every element into this, and
    # then the codes of values near a tie would depend on the program around them.
    return 1.0 / scale


def pad_to_blocks(x: jax.Array, axis: int) -> jax.Array:
    """Appends zeros up to a multiple of `MX_BLOCK`; a sum over the axis does not change."""
    axis %= x.ndim
    missing = -x.shape[axis] % MX_BLOCK
    pads = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(_with_whole_blocks(x, axis), pads) if missing else x


def dequantize(q: Quantized, dtype: Any) -> jax.Array:
    """``values * scale`` in ``dtype``; exact for power-of-two scales and a dtype as wide as the format."""
    scale = q.scale
    for axis, (size, scales) in enumerate(zip(q.values.shape, scale.shape, strict=True)):
        if scales not in (1, size):
            blocks = (*scale.shape[: axis + 1], size // scales, *scale.shape[axis + 1 :])
            scale = _join_blocks(jnp.broadcast_to(jnp.expand_dims(scale, axis + 1), blocks), axis)
    return (q.values.astype(jnp.float32) * scale).astype(dtype)


def _split_blocks(x: jax.Array, axis: int) -> jax.Array:
    """(…, n, …) to (…, n / MX_BLOCK, MX_BLOCK, …)."""
    x = _with_whole_blocks(x, axis)
    shape = (*x.shape[:axis], x.shape[axis] // MX_BLOCK, MX_BLOCK, *x.shape[axis + 1 :])
    return _reshape(x, shape, lambda spec: (*spec[: axis + 1], None, *spec[axis + 1 :]))


def _with_whole_blocks(x: jax.Array, axis: int) -> jax.Array:
    """The array, on explicit mesh axes gathered along an axis that they would split within blocks.

    On automatic mesh axes XLA exchanges what the devices need of each other's blocks.
    """
    if (sharding := explicit_sharding(x)) is None or (names := sharding.spec[axis]) is None:
        return x
    parts = math.prod(sharding.mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))
    if math.ceil(x.shape[axis] / MX_BLOCK) % parts == 0:
        return x
    spec = PartitionSpec(*sharding.spec[:axis], None, *sharding.spec[axis + 1 :])
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))


def _join_blocks(x: jax.Array, axis: int) -> jax.Array:
    """(…, blocks, m, …) to (…, blocks · m, …)."""
    shape = (*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return _reshape(x, shape, lambda spec: (*spec[: axis + 1], *spec[axis + 2 :]))


def _reshape(x: jax.Array, shape: tuple[int, ...], new_spec: Callable[[Any], tuple]) -> jax.Array:
    """Reshapes; on explicit mesh axes ``new_spec`` makes the partition of the result from that of ``x``."""
    if (sharding := explicit_sharding(x)) is None:
        return x.reshape(shape)
    spec = PartitionSpec(*new_spec(sharding.spec))
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, spec))


def explicit_sharding(x: jax.Array) -> NamedSharding | None:
    """The sharding in the type of an array on explicit mesh axes, else None."""
    sharding = jax.typeof(x).sharding
    types = sharding.mesh.axis_types
    return sharding if types and all(t == AxisType.Explicit for t in types) else None
