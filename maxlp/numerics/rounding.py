"""Rounding to number formats: to nearest, towards zero, or stochastic.

Floats are rounded by arithmetic on their bits, because XLA may drop a pair of conversions
(f32 → f16 → f32).
"""

import zlib

import jax
import jax.numpy as jnp

from maxlp.numerics.formats import Format


def cast(x: jax.Array, to: Format, rounding: str = "nearest", key: jax.Array | None = None) -> jax.Array:
    """Rounds to a format, in ``to.dtype``, and saturates: magnitudes beyond ``to.max`` become ``±to.max``.

    As in the OCP specification, infinities saturate too, and NaN stays NaN. (XLA's own conversion turns
    465 into an E4M3 NaN.) Integers have no NaN: it becomes 0, and is visible only in a scale from the same
    data, which is NaN.

    Args:
      x: any shape, computed on in float32.
      to: a float, int or simulated format.
      rounding: ``nearest`` (ties to even), ``truncate`` (towards zero; without a zero, to ±1 between them)
        or ``stochastic`` (to one of the two neighbours, with probability proportional to proximity: the
        expectation is ``x``).
      key: random key; only for ``stochastic``.
    """
    x = jnp.clip(x.astype(jnp.float32), -to.max, to.max)
    if rounding == "nearest" and to.kind == "float":
        return x.astype(to.dtype)  # one conversion that XLA fuses and cuBLASLt recognizes
    noise = None if key is None else jax.random.bits(key, x.shape, jnp.uint32)
    return _round(x, to, rounding, noise).astype(to.dtype)


def key_for(key: jax.Array, name: str) -> jax.Array:
    """The random key of one tensor, which depends on its name and not on what else is rounded.

    So the rounding is the same if an optimizer gets a part of the parameters at a time, as in
    `core.fused_backward`.
    """
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def drop_bits(x: jax.Array, drop: int, rounding: str, noise: jax.Array | None) -> jax.Array:
    """Rounds away the ``drop`` lowest mantissa bits of float16 or float32 numbers, in the same dtype.

    Subnormals lose the same bits. A magnitude may be rounded up to infinity; NaN stays NaN.

    Args:
      rounding: as in `cast`.
      noise: for ``stochastic``, random integers of ``drop`` bits, in the shape of ``x``.
    """
    dtype = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, dtype)
    mask = dtype.type(2**drop - 1)
    if rounding == "nearest":
        bits += (mask >> 1) + ((bits >> drop) & 1)
    elif rounding == "stochastic":
        assert noise is not None, "stochastic rounding needs a key"
        bits += noise.astype(dtype)
    rounded = jax.lax.bitcast_convert_type(bits & ~mask, x.dtype)
    return jnp.where(jnp.isnan(x), x, rounded)


def _round(x: jax.Array, to: Format, rounding: str, noise: jax.Array | None) -> jax.Array:
    """Rounds float32 ``|x| <= to.max`` to a format, still in float32; noise: uint32 like ``x``, or None."""
    if to.odd:  # ±1 are next to zero, which is not a value: what lies between is truncated to them
        start = jnp.where(x < 0, -1.0, 1.0) if rounding == "truncate" else -1.0
        return 2 * _to_integer((x - start) / 2, rounding, noise) + start
    if not to.exponent_bits:
        return _to_integer(x, rounding, noise)
    drop = 23 - to.mantissa_bits
    normal = x
    if drop:
        normal = drop_bits(x, drop, rounding, None if noise is None else noise >> (32 - drop))
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
