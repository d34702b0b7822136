"""Scales, which map the amax (largest magnitude) of an array to the largest number of a format.

A quantized array is ``values * scale``: the scale multiplies in dequantization (Transformer Engine
calls it ``scale_inv``). Scales are float32. Multiplying by a power of two rounds nothing, so that
quantizing a dequantized array again changes nothing.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxlp.numerics.formats import FORMATS, Format

_E4M3 = FORMATS["float8_e4m3fn"]
_TINY = float(jnp.finfo(jnp.float32).tiny)  # the smallest normal: subnormals may be flushed to zero


def amax(x: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
    """float32 ``max |x|`` over the axes (kept, with size 1) or, by default, over all (a scalar).

    It is NaN if an element is.
    """
    largest = functools.partial(jnp.max, axis=axes, keepdims=axes is not None)

    def of_bits(x: jax.Array) -> jax.Array:
        # The bits of magnitudes, as integers, have the same order, and those of NaN are the largest.
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        return jax.lax.bitcast_convert_type(largest(bits), jnp.float32)

    # On CPUs XLA's maximum loses NaN in float32 arrays of a few thousand numbers. On GPUs it does not, and
    # XLA fuses it with more than a maximum of integers.
    magnitudes = jnp.abs(x.astype(jnp.float32))
    return jax.lax.platform_dependent(magnitudes, cpu=of_bits, default=largest)


def rms(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """float32 root mean square over the axes (kept, with size 1)."""
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=axes, keepdims=True))


def scale_for(amax: jax.Array, to: Format, *, margin: float = 0.0, power_of_two: bool = False) -> jax.Array:
    """The float32 scale that maps ``amax * 2^margin`` to ``to.max``, in the shape of ``amax``.

    A power of two is rounded up so that nothing saturates: ``2^ceil(log2(amax / max))``, the rule
    for MX of Mishra et al. 2025 (arXiv:2506.08027). If the amax is 0 the scale is 1, or almost 0 for a
    format without a zero. If the amax is not finite it is the scale, so that non-finite data gives a
    non-finite product, as it does in bfloat16.
    """
    if power_of_two:
        scale = ceil_power_of_two(amax, to.max / 2.0**margin)
    else:
        scale = jnp.maximum(amax * (2.0**margin / to.max), _TINY)
    return jnp.where(amax == 0, _TINY if to.odd else 1.0, scale)


def ceil_power_of_two(x: jax.Array, top: float = 1.0) -> jax.Array:
    """The smallest normal power of two ``s`` with ``x <= s * top``, for float32 ``x > 0``; exact.

    NaN and infinity are returned as they are.
    """
    bits, top_bits = jax.lax.bitcast_convert_type(x, jnp.uint32), int(np.float32(top).view(np.uint32))
    mantissa, top_mantissa = bits & 0x7FFFFF, top_bits & 0x7FFFFF
    exponent = (bits >> 23).astype(jnp.int32) - (top_bits >> 23) + 127 + (mantissa > top_mantissa)
    power = jnp.clip(exponent, 1, 255).astype(jnp.uint32) << 23
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(power, jnp.float32), x)


def block_scales_for(amaxes: jax.Array, to: Format, rule: str) -> tuple[jax.Array, jax.Array | None]:
    """The float32 scales of blocks, and the scale of the whole tensor, a scalar, or None if there is none.

    Args:
      amaxes: float32, the largest magnitude of each block.
      rule: ``up``: the power of two of `scale_for`, with which nothing saturates. ``floor``: the power of
        two of the OCP MX specification, ``2^(floor(log2(amax)) - floor(log2(max)))``, with which the
        largest elements may saturate. ``float32``: not rounded (DeepSeek-V3, arXiv:2412.19437). ``e4m3``:
        rounded to E4M3, times a float32 scale of the tensor that maps its amax to the product of the
        largest numbers of E4M3 and ``to`` (NVFP4, arXiv:2509.25149). Where a block's scale is rounded down,
        its largest elements saturate: they lose up to 1/17, or more if the scale is subnormal in E4M3.
    """
    if rule == "floor":
        return jnp.where(amaxes == 0, 1.0, _floor_power_of_two(amaxes, to.max)), None
    if rule != "e4m3":
        return scale_for(amaxes, to, power_of_two=rule == "up"), None
    # Times the smallest scale of a block, 2^-9, it must be a normal number too.
    of_tensor = jnp.maximum(scale_for(amax(amaxes) / _E4M3.max, to), _TINY * 2.0**9)
    # Scales too small for E4M3 become its smallest number. NaN and infinity pass into the tensor's scale.
    exact = jnp.nan_to_num(amaxes / (to.max * of_tensor), nan=1.0)
    rounded = exact.astype(_E4M3.dtype).astype(jnp.float32)
    return jnp.clip(rounded, 2.0**-9, _E4M3.max), of_tensor


def _floor_power_of_two(x: jax.Array, top: float) -> jax.Array:
    """``2^(floor(log2(x)) - floor(log2(top)))``, at least the smallest normal, for ``x > 0``; exact."""
    exponent = (jax.lax.bitcast_convert_type(x, jnp.uint32) >> 23).astype(jnp.int32)
    exponent -= int(np.floor(np.log2(top)))
    power = jnp.clip(exponent, 1, 254).astype(jnp.uint32) << 23
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(power, jnp.float32), x)
