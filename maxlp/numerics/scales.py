"""Scales, which map the largest magnitude of an array to the largest number of a format.

A quantized array is ``values * scale``: the scale multiplies in dequantization (Transformer Engine
calls it ``scale_inv``). Scales are float32. Multiplying by a power of two rounds nothing, so that
quantizing a dequantized array again changes nothing.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxlp.numerics.formats import Format

_TINY = float(jnp.finfo(jnp.float32).tiny)  # smallest normal: what is below may be flushed to zero


def amax(x: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
    """float32 ``max |x|`` over the axes (kept, with size 1) or, by default, of everything (a scalar)."""
    return jnp.max(jnp.abs(x), axis=axes, keepdims=axes is not None).astype(jnp.float32)


def scale_for(amax: jax.Array, to: Format, *, margin: float = 0.0, power_of_two: bool = False) -> jax.Array:
    """The scale that maps ``amax * 2^margin`` to ``to.max``.

    A power of two is rounded up so that nothing saturates: ``2^ceil(log2(amax / max))``, the rule
    for MX of Mishra et al. 2025 (arXiv:2506.08027). The scale of zeros is 1. A non-finite amax is
    returned as it is, so that non-finite data gives a non-finite product as it does in bfloat16.
    """
    if power_of_two:
        scale = ceil_power_of_two(amax, to.max / 2.0**margin)
    else:
        scale = jnp.maximum(amax * (2.0**margin / to.max), _TINY)
    return jnp.where(amax == 0, 1.0, scale)


def ceil_power_of_two(x: jax.Array, top: float = 1.0) -> jax.Array:
    """The smallest normal power of two ``s`` with ``x <= s * top``, for float32 ``x > 0``; exact.

    NaN and infinity are returned as they are.
    """
    bits, top_bits = jax.lax.bitcast_convert_type(x, jnp.uint32), int(np.float32(top).view(np.uint32))
    mantissa, top_mantissa = bits & 0x7FFFFF, top_bits & 0x7FFFFF
    exponent = (bits >> 23).astype(jnp.int32) - (top_bits >> 23) + 127 + (mantissa > top_mantissa)
    power = jnp.clip(exponent, 1, 255).astype(jnp.uint32) << 23
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(power, jnp.float32), x)
