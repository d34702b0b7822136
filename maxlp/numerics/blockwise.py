"""Arrays in 4, 8 or 16 bits: codes, and one scale for a tensor or for each block of it.

    value = scale · decode(code)

The scale multiplies, so that a float code's value is its own number. It is float32, and a power of two
for the float formats: scaling is then exact, and to encode what was just decoded changes nothing.

| format        | bits | values between a block's extremes                                    |
|---------------|------|----------------------------------------------------------------------|
| float8_e4m3fn | 8    | 3 mantissa bits, ±448; steps of 6–12 % over 5 decades                |
| float8_e5m2   | 8    | 2 mantissa bits, ±57344, rounded stochastically; 12–25 % over 9 decades |
| dynamic8      | 8    | 7 decades, the largest in steps of 1.4 %, each lower one twice as coarse |
| int8, int4    | 8, 4 | evenly spaced                                                        |
| float16       | 16   | 10 mantissa bits, ±65504                                             |
| bfloat16      | 16   | 7 mantissa bits, rounded stochastically; no scale is needed          |

float8 as in Fishman et al. 2024 (arXiv:2409.12517) and float16 as in Balança et al. 2024
(arXiv:2407.17353): the scale is a power of two. dynamic8 with blocks is Dettmers et al. 2021
(arXiv:2110.02861). A value that is not zero and must not become zero (a second moment: the update is
divided by its root) is stored as the least positive value of its format.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Blocks(NamedTuple):
    """An encoded array: codes of its shape, and scales of its rank.

    The scale is (*layers, 1, …) for one scale a tensor, or has ⌈n / block⌉ entries in the last dim. The
    codes of int4 lie two in a byte, with half of the entries in the last dim.
    """

    codes: jax.Array
    scale: jax.Array


class Format(NamedTuple):
    """How numbers between -top and top become codes and back.

    encode: takes the float32 numbers, whether they have a sign, and a random key.
    decode: takes the codes and whether they have a sign.
    least: the code of the least positive value without a sign, None if there is no need for one.
    """

    top: float
    power_of_two: bool
    encode: Callable[[jax.Array, bool, Any], jax.Array]
    decode: Callable[[jax.Array, bool], jax.Array]
    least: Any = None


def encode(
    x: jax.Array,
    name: str,
    *,
    signed: bool = True,
    block_size: int = 0,
    layer_axes: int = 0,
    key: jax.Array | None = None,
) -> Blocks:
    """The array in the format `FORMATS[name]`.

    Args:
        x: any shape, computed on in float32.
        signed: False for numbers that are not negative; those that are not zero stay so.
        block_size: entries of the last dim that share a scale; 0: all of a tensor.
        layer_axes: leading axes that count tensors.
        key: for bfloat16 and float8_e5m2.
    """
    form, x = FORMATS[name], x.astype(jnp.float32)
    scale = _scale(_amax(x, block_size, layer_axes), form)
    y = x / _spread(scale, block_size, x.shape)
    codes = form.encode(jnp.clip(y, -form.top, form.top), signed, key)
    if not signed and form.least is not None:
        lost = (y > 0) & (form.decode(codes, signed) == 0)
        codes = jnp.where(lost, form.least, codes)
    return Blocks(codes, scale)


def decode(blocks: Blocks, name: str, *, signed: bool = True, block_size: int = 0) -> jax.Array:
    """The array in float32; the arguments are those of `encode`."""
    y = FORMATS[name].decode(blocks.codes, signed)
    return y * _spread(blocks.scale, block_size, y.shape)


def _amax(x: jax.Array, block_size: int, layer_axes: int) -> jax.Array:
    x = jnp.abs(x)
    if not block_size:
        return jnp.max(x, axis=tuple(range(layer_axes, x.ndim)), keepdims=True)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block_size)])
    return jnp.max(padded.reshape(*x.shape[:-1], -1, block_size), axis=-1)


def _scale(amax: jax.Array, form: Format) -> jax.Array:
    if math.isinf(form.top):
        return jnp.ones_like(amax)
    if not form.power_of_two:
        return jnp.where(amax > 0, amax / form.top, 1.0)
    # The least power of two that brings amax to top or below, from their mantissas and exponents.
    mantissa, exponent = jnp.frexp(amax)
    top_mantissa, top_exponent = math.frexp(form.top)
    exponent = exponent - top_exponent + (mantissa > top_mantissa)
    return jnp.where(amax > 0, jnp.ldexp(jnp.ones_like(amax), jnp.clip(exponent, -126, 127)), 1.0)


def _spread(scale: jax.Array, block_size: int, shape: tuple[int, ...]) -> jax.Array:
    """The scales at each entry of an array of this shape."""
    return jnp.repeat(scale, block_size, axis=-1)[..., : shape[-1]] if block_size else scale


# --- formats --------------------------------------------------------------------------------------


def _float(dtype: Any) -> Format:
    info = jnp.finfo(dtype)
    return Format(
        top=float(info.max),
        power_of_two=True,
        encode=lambda y, signed, key: y.astype(dtype),
        decode=lambda codes, signed: codes.astype(jnp.float32),
        least=np.asarray(info.smallest_subnormal, dtype),
    )


def _e5m2_encode(y: jax.Array, signed: bool, key: jax.Array) -> jax.Array:
    """To one of the two neighbours, each the likelier the nearer it is.

    A second moment decays by 1 - b2 in a step, less than half of the distance between two values: rounded
    to the nearest it would never decay. E5M2 is float16 without its last 8 bits, subnormals included.
    """
    bits = jax.lax.bitcast_convert_type(y.astype(jnp.float16), jnp.uint16)
    top = jax.lax.bitcast_convert_type(jnp.float16(jnp.finfo(jnp.float8_e5m2).max), jnp.uint16)
    sign, size = bits & 0x8000, jnp.minimum(bits & 0x7FFF, top)
    size = jnp.minimum(size + jax.random.bits(key, y.shape, jnp.uint8).astype(jnp.uint16), top) & 0xFF00
    return jax.lax.bitcast_convert_type(((sign | size) >> 8).astype(jnp.uint8), jnp.float8_e5m2)


def dynamic_values(signed: bool) -> np.ndarray:
    """The 256 values of the dynamic code in ascending order, in [-1, 1] or [0, 1].

    0, 1, and in each of the decades 10^-7…10^-6, …, 10^-1…1 the centres of equal parts: 1, 2, 4, …, 64 of
    them on either side of zero, or twice as many if there is but one side.
    """
    values = [0.0, 1.0]
    for i in range(7):
        parts = 2**i if signed else 2 ** (i + 1)
        edges = np.linspace(0.1, 1.0, parts + 1)
        centres = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*centres, *(-centres if signed else ())]
    return np.sort(np.array(values)).astype(np.float32)


def _dynamic_encode(y: jax.Array, signed: bool, key: Any) -> jax.Array:
    """The place of the nearest value in `dynamic_values`, without a search.

    On each side of zero the values are 0, then `parts` centres in decade i, then 1. So the place is
    `parts` and a linear part, as the exponent and mantissa of a float, but with decades for octaves.
    """
    del key
    size, x, parts = jnp.abs(y), jnp.abs(y), 64 if signed else 128
    place = jnp.zeros(y.shape, jnp.int32)
    above = jnp.inf
    for i in range(6, -1, -1):
        lowest = 10.0 ** (i - 6) * (0.1 + 0.45 / parts)
        highest_below = 10.0 ** (i - 7) * (1 - 0.9 / parts) if i else 0.0
        start = (lowest + highest_below) / 2  # nearer to this decade than to the one below, or to zero
        part = jnp.clip(jnp.floor((x - 0.1) / 0.9 * parts), 0, parts - 1).astype(jnp.int32)
        place = jnp.where((size >= start) & (size < above), parts + part, place)
        x, parts, above = 10.0 * x, parts // 2, start
    if not signed:
        return jnp.where(size >= 1 - 0.45 / 256, 255, jnp.maximum(place - 1, 0)).astype(jnp.uint8)
    place = jnp.where(y >= 1 - 0.45 / 128, 128, place)
    return jnp.where(y < 0, 127 - place, 127 + place).astype(jnp.uint8)


def _integer(top: int) -> Format:
    return Format(
        top=top,
        power_of_two=False,
        encode=lambda y, signed, key: jnp.round(y).astype(jnp.int8),
        decode=lambda codes, signed: codes.astype(jnp.float32),
    )


def _int4_encode(y: jax.Array, signed: bool, key: Any) -> jax.Array:
    nibbles = jnp.round(y).astype(jnp.int8).astype(jnp.uint8) & 0xF
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def _int4_decode(codes: jax.Array, signed: bool) -> jax.Array:
    nibbles = jnp.stack([codes & 0xF, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    return ((nibbles ^ 8).astype(jnp.float32)) - 8.0


def _round_stochastically(y: jax.Array, signed: bool, key: jax.Array) -> jax.Array:
    """To one of the two neighbours in bfloat16, each the likelier the nearer it is."""
    noise = jax.random.bits(key, y.shape, jnp.uint32) & 0xFFFF
    bits = (jax.lax.bitcast_convert_type(y, jnp.uint32) + noise) >> 16 << 16
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)


FORMATS = {
    "float8_e4m3fn": _float(jnp.float8_e4m3fn),
    "float8_e5m2": _float(jnp.float8_e5m2)._replace(encode=_e5m2_encode),
    "float16": _float(jnp.float16),
    "dynamic8": Format(
        top=1.0,
        power_of_two=False,
        encode=_dynamic_encode,
        decode=lambda codes, signed: jnp.asarray(dynamic_values(signed))[codes],
        least=np.uint8(1),
    ),
    "int8": _integer(127),
    "int4": Format(7, False, _int4_encode, _int4_decode),
    "bfloat16": Format(
        top=float("inf"),
        power_of_two=False,
        encode=_round_stochastically,
        decode=lambda codes, signed: codes.astype(jnp.float32),
    ),
}
