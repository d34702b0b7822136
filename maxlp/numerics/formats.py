"""Number formats: saturating casts, rounding, scales.

A quantized array is ``values * scale``: ``values`` in a narrow format, ``scale`` in float32. A scale
*multiplies* on the way back (what Transformer Engine calls ``scale_inv``), and maps the largest magnitude
it covers to the largest finite number of the format.

Two kinds of formats:

* stored ones, by the name of their JAX dtype: ``float8_e4m3fn``, ``float8_e5m2``, ``int8``. Their matmuls
  run in the format.
* simulated ones, ``eXmY`` with X exponent and Y explicit mantissa bits (IEEE: the top exponent is infinity
  and NaN) or ``eXmYfn`` (no infinity, one NaN, as in OCP's E4M3): values are rounded to the format and
  kept in a wider dtype, the matmuls run in that.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

MX_BLOCK = 32  # elements that share a scale in the OCP microscaling formats

_TINY = float(jnp.finfo(jnp.float32).tiny)  # smallest normal: what is below may be flushed to zero


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format.

    Attributes:
      exponent_bits: 0 for integers.
      mantissa_bits: explicit ones; of an integer, all but the sign.
      max: the largest finite magnitude (of int8 127: the range is kept symmetric).
      dtype: what holds the values in memory and in the matmul.
      simulated: whether ``dtype`` is wider than the format.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    dtype: Any
    simulated: bool

    @property
    def kind(self) -> str:
        """``int``, ``float`` or ``simulated``: the operands of a matmul must be of one kind."""
        return "simulated" if self.simulated else "float" if self.exponent_bits else "int"

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number."""
        return 2 - 2 ** (self.exponent_bits - 1)


_STORED = {
    "float8_e4m3fn": Format("float8_e4m3fn", 4, 3, 448.0, jnp.float8_e4m3fn, False),
    "float8_e5m2": Format("float8_e5m2", 5, 2, 57344.0, jnp.float8_e5m2, False),
    "int8": Format("int8", 0, 7, 127.0, jnp.int8, False),
}


@functools.cache
def get(name: str) -> Format:
    """The format of a name.

    Raises:
      ValueError: unknown names, and bits that do not fit a float32 (2 to 8 exponent, 0 to 23 mantissa).
    """
    if name in _STORED:
        return _STORED[name]
    match = re.fullmatch(r"e(\d+)m(\d+)(fn)?", name)
    e, m, fn = (int(match[1]), int(match[2]), bool(match[3])) if match else (0, 0, False)
    if not (2 <= e <= 8 and fn <= m <= 23 and e + fn <= 8):
        raise ValueError(
            f"precision format {name!r} is unknown; one of {', '.join(_STORED)}, or eXmY or eXmYfn with "
            "2 to 8 exponent and 0 to 23 mantissa bits for a simulated one"
        )
    bias = 2 ** (e - 1) - 1
    largest = (2 - 2.0 ** (1 - m)) * 2.0 ** (bias + 1) if fn else (2 - 2.0**-m) * 2.0**bias
    return Format(name, e, m, largest, jnp.bfloat16 if m <= 7 else jnp.float32, True)


# --- rounding -----------------------------------------------------------------------------------------


def cast(x: jax.Array, to: Format, rounding: str = "nearest", key: jax.Array | None = None) -> jax.Array:
    """``x`` rounded to a format, in ``to.dtype``; what is too large becomes ``±to.max``.

    Saturation is OCP's: infinities saturate too and NaN stays NaN. (XLA's own conversion turns 465 into an
    E4M3 NaN.) int8 has no NaN and gets 0; with a scale from the same data the scale is NaN.

    Args:
      rounding: ``nearest`` (ties to even), ``truncate`` (towards zero), or ``stochastic`` (up with the
        probability of the distance: the expectation is ``x``), which needs a ``key``.
    """
    x = jnp.clip(x.astype(jnp.float32), -to.max, to.max)
    if rounding == "nearest" and to.exponent_bits and not to.simulated:
        return x.astype(to.dtype)  # one conversion that XLA fuses and cuBLASLt recognises
    return _round(x, to, rounding, key).astype(to.dtype)


def _round(x: jax.Array, to: Format, rounding: str, key: jax.Array | None) -> jax.Array:
    """float32 ``|x| <= to.max`` to the values of a format, still in float32.

    Written with arithmetic on the bits, because XLA may drop a pair of conversions (f32 → f16 → f32).
    """
    noise = None if key is None else jax.random.bits(key, x.shape, jnp.uint32)
    if not to.exponent_bits:
        return _to_integer(x, rounding, noise)
    drop = 23 - to.mantissa_bits
    normal = x if drop == 0 else _round_mantissa(x, drop, rounding, noise)
    if to.exponent_bits == 8:
        return normal  # its subnormals are float32's, which the backends flush
    grid = 2.0 ** (to.mantissa_bits - to.min_exponent)  # subnormals are integers in units of 1/grid
    subnormal = _to_integer(x * grid, rounding, noise) / grid
    return jnp.where(jnp.abs(x) < 2.0**to.min_exponent, subnormal, normal)


def _to_integer(x: jax.Array, rounding: str, noise: jax.Array | None) -> jax.Array:
    if rounding == "nearest":
        return jnp.round(x)
    if rounding == "truncate":
        return jnp.trunc(x)
    assert noise is not None, "stochastic rounding needs a key"
    whole = jnp.floor(x)
    return whole + ((noise >> 8).astype(jnp.float32) * 2.0**-24 < x - whole)


def _round_mantissa(x: jax.Array, drop: int, rounding: str, noise: jax.Array | None) -> jax.Array:
    """Clears the ``drop`` lowest mantissa bits of float32 after adding what the rounding asks for."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    mask = jnp.uint32(2**drop - 1)
    if rounding == "nearest":
        bits += (mask >> 1) + ((bits >> drop) & 1)
    elif rounding == "stochastic":
        assert noise is not None, "stochastic rounding needs a key"
        bits += noise >> (32 - drop)
    rounded = jax.lax.bitcast_convert_type(bits & ~mask, jnp.float32)
    return jnp.where(jnp.isnan(x), x, rounded)


# --- scales -------------------------------------------------------------------------------------------


def amax(x: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
    """float32 ``max |x|`` over the axes (kept, with size 1) or, by default, of everything (a scalar)."""
    return jnp.max(jnp.abs(x), axis=axes, keepdims=axes is not None).astype(jnp.float32)


def scale_for(amax: jax.Array, to: Format, *, margin: float = 0.0, power_of_two: bool = False) -> jax.Array:
    """The scale that maps ``amax * 2^margin`` to ``to.max``.

    A power of two is rounded up (nothing saturates): ``2^ceil(log2(amax / max))``, the rule for MX of
    Mishra et al. 2025 (arXiv:2506.08027). All-zero data gets 1; NaN and infinity give themselves, so that
    non-finite data gives a non-finite product as it does in bfloat16.
    """
    scale = jnp.maximum(amax * (2.0**margin / to.max), _TINY)
    scale = jnp.where(amax == 0, 1.0, scale)
    return ceil_power_of_two(scale) if power_of_two else scale


def ceil_power_of_two(x: jax.Array) -> jax.Array:
    """The smallest power of two that is at least ``x``, for normal positive float32; exact."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    rounded = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x)


def _inverse(scale: jax.Array) -> jax.Array:
    # One division per scale: XLA may turn a division of every element into this, or not, and then the
    # codes of values near a tie would depend on the program around them.
    return 1.0 / scale


# --- quantized arrays ---------------------------------------------------------------------------------


class Quantized(NamedTuple):
    """``values * scale``; the scale has size 1 along axes that share it, and dim / MX_BLOCK in blocks."""

    values: jax.Array
    scale: jax.Array


GRANULARITIES = ("unscaled", "tensor", "row", "block")


def quantize(
    x: jax.Array,
    to: Format,
    granularity: str,
    contract: Sequence[int],
    *,
    seen: jax.Array | None = None,
    margin: float = 0.0,
    power_of_two: bool = False,
    rounding: str = "nearest",
) -> Quantized:
    """Quantizes an operand of a matmul.

    Args:
      granularity: what shares a scale. ``tensor``: everything; ``row``: each vector along the contraction
        (a token of the input, an output channel of the kernel), so that scales can be applied to the
        product; ``block``: `MX_BLOCK` neighbours along the last contracted axis; ``unscaled``: scale 1.
      contract: the axes that the matmul sums over.
      seen: the amax to scale for instead of the data's own, a scalar (``tensor`` only).
      margin, power_of_two: see `scale_for`; blocks always have powers of two, as MX does.
      rounding: see `cast`.

    Raises:
      ValueError: a contracted axis that `MX_BLOCK` does not divide.
    """
    if granularity == "unscaled":
        scale = jnp.ones((1,) * x.ndim, jnp.float32)
    elif granularity == "block":
        return _quantize_blocks(x, to, contract[-1] % x.ndim, rounding)
    else:
        axes = tuple(range(x.ndim)) if granularity == "tensor" else tuple(contract)
        seen = amax(x, axes) if seen is None else seen.reshape((1,) * x.ndim)
        scale = scale_for(seen, to, margin=margin, power_of_two=power_of_two)
    return Quantized(cast(x.astype(jnp.float32) * _inverse(scale), to, rounding), scale)


def _quantize_blocks(x: jax.Array, to: Format, axis: int, rounding: str) -> Quantized:
    if x.shape[axis] % MX_BLOCK:
        raise ValueError(
            f"block scales need a contracted axis of a multiple of {MX_BLOCK}, got {x.shape[axis]} in "
            f"shape {x.shape}; use another size or a recipe without blocks"
        )
    x = _split_blocks(x.astype(jnp.float32), axis)
    scale = scale_for(amax(x, (axis + 1,)), to, power_of_two=True)
    values = cast(x * _inverse(scale), to, rounding)
    return Quantized(_join_blocks(values, axis), scale.squeeze(axis + 1))


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
    shape = (*x.shape[:axis], x.shape[axis] // MX_BLOCK, MX_BLOCK, *x.shape[axis + 1 :])
    if (sharding := explicit_sharding(x)) is None:
        return x.reshape(shape)
    axes = (*sharding.spec[: axis + 1], None, *sharding.spec[axis + 1 :])
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, PartitionSpec(*axes)))


def _join_blocks(x: jax.Array, axis: int) -> jax.Array:
    """(…, blocks, m, …) to (…, blocks · m, …)."""
    shape = (*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    if (sharding := explicit_sharding(x)) is None:
        return x.reshape(shape)
    axes = (*sharding.spec[: axis + 1], *sharding.spec[axis + 2 :])
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, PartitionSpec(*axes)))


def explicit_sharding(x: jax.Array) -> NamedSharding | None:
    """The sharding in the type of an array on explicit axes; None elsewhere."""
    sharding = jax.typeof(x).sharding
    types = sharding.mesh.axis_types
    return sharding if types and all(t == AxisType.Explicit for t in types) else None
