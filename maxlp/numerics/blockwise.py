"""Optimizer states in 4, 8 or 16 bits: codes, and one scale for a tensor or for each block of it.

    value = scale · decode(code)

Codes are numbers in one of the `formats.STATES`. bfloat16 and float8_e5m2 are rounded stochastically, and
so are unsigned numbers (second moments) in float8_e4m3fn and float16: a second moment loses the share
1 - b2 in a step, and rounded to nearest it would never change where that is less than half the distance to
the next value. Signed numbers in these two, and all in dynamic8, companded8, int8 and int4, are rounded to
nearest.

Scales are float32. Those of floats are powers of two (Fishman et al. 2024, arXiv:2409.12517, for
float8; Balança et al. 2024, arXiv:2407.17353, for float16), so that encoding a decoded array again
changes nothing; bfloat16 has a scale of 1. dynamic8 with blocks is Dettmers et al. 2021
(arXiv:2110.02861), companded8 with blocks of 32 is FlashOptim (Ortiz et al. 2026, arXiv:2602.23349),
except for its float16 scales, which underflow in small blocks.

Nothing here compares float32 arrays with zero. XLA would broadcast that zero to the shape of the array and
merge it with the zeros from which a scan accumulates gradients, and the step would keep it in memory.
"""

import jax
import jax.numpy as jnp
import numpy as np

from maxlp.numerics.formats import FORMATS, Format, Quantized
from maxlp.numerics.rounding import cast, drop_bits
from maxlp.numerics.scales import scale_for

SMALLEST_NORMAL = 1 << 23  # the bits of float32's; XLA may treat subnormals as zero


def encode(
    x: jax.Array,
    name: str,
    *,
    signed: bool = True,
    block_size: int = 0,
    layer_axes: int = 0,
    key: jax.Array | None = None,
) -> Quantized:
    """Encodes an array in a format of `formats.STATES`.

    Args:
      x: any shape, computed on in float32.
      signed: False for numbers that are never negative. Normal ones above zero are then stored as at least
        the smallest positive value of the format, because an update is divided by the root of a second
        moment. (bfloat16 has the range of float32 and needs no such bound.)
      block_size: entries of the last dim that share a scale; 0 for one scale per tensor.
      layer_axes: the number of leading axes that stack tensors.
      key: random key, needed where rounding is stochastic.

    Returns:
      codes in the shape of ``x`` (half as long in 4 bits), and float32 scales.
    """
    to, x = FORMATS[name], x.astype(jnp.float32)
    scale = _scale(_amax(x, block_size, layer_axes), to)
    # Below, nonzero entries are told from zeros. Where the scale is large, x / scale may underflow, so that
    # they are told apart in 2^100 x / scale. (To compare x itself would take memory: 1.3 GB in the step of
    # a Llama 7B with GaLore, as compiled.)
    unit = jnp.where(scale >= 1, jnp.float32(2.0**-100), 1.0)
    in_unit = x / _spread(scale * unit, block_size, x.shape)
    codes = _to_codes(in_unit * _spread(unit, block_size, x.shape), to, signed, key)
    smallest = _smallest_code(to)
    if not signed and smallest is not None:
        codes = jnp.where((_bits(in_unit) >= SMALLEST_NORMAL) & (_bits(codes) == 0), smallest, codes)
    return Quantized(codes, scale)


def decode(quantized: Quantized, name: str, *, signed: bool = True, block_size: int = 0) -> jax.Array:
    """The array in float32; the arguments are those of `encode`."""
    y = _from_codes(quantized.codes, FORMATS[name], signed)
    return y * _spread(quantized.scale, block_size, y.shape)


# --- scales -------------------------------------------------------------------------------------------


def _amax(x: jax.Array, block_size: int, layer_axes: int) -> jax.Array:
    x = jnp.abs(x)
    if not block_size:
        return jnp.max(x, axis=tuple(range(layer_axes, x.ndim)), keepdims=True)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block_size)])
    return jnp.max(padded.reshape(*x.shape[:-1], -1, block_size), axis=-1)


def _scale(amax: jax.Array, to: Format) -> jax.Array:
    if not to.needs_scale:
        return jnp.ones_like(amax)
    # A finite scale, so that one non-finite entry does not make the whole tensor NaN.
    return scale_for(jnp.nan_to_num(amax, nan=0.0, posinf=1.0), to, power_of_two=to.kind == "float")


def _spread(scale: jax.Array, block_size: int, shape: tuple[int, ...]) -> jax.Array:
    """The scales at each entry of an array of this shape."""
    return jnp.repeat(scale, block_size, axis=-1)[..., : shape[-1]] if block_size else scale


# --- codes --------------------------------------------------------------------------------------------


def _to_codes(y: jax.Array, to: Format, signed: bool, key: jax.Array | None) -> jax.Array:
    if to.needs_scale:
        y = jnp.clip(y, -to.max, to.max)
    if to.kind == "dynamic":
        return _dynamic_codes(y, signed)
    if to.kind == "companded":
        return _companded_codes(y, signed)
    if to.stochastic or (to.kind == "float" and not signed):
        return _stochastic(y, to, key)
    codes = cast(y, to)
    return _pack(codes) if to.bits == 4 else codes


def _from_codes(codes: jax.Array, to: Format, signed: bool) -> jax.Array:
    if to.kind == "dynamic":
        return jnp.asarray(dynamic_values(signed))[codes]
    if to.kind == "companded":
        return _expanded(codes.astype(jnp.float32), signed)
    return (_unpack(codes) if to.bits == 4 else codes).astype(jnp.float32)


def _smallest_code(to: Format) -> np.ndarray | None:
    """The code of the smallest positive value; None for bfloat16, and for int4, which stores no moments."""
    if not to.needs_scale or to.bits == 4:
        return None
    is_float = to.kind == "float"
    return np.asarray(jnp.finfo(to.dtype).smallest_subnormal if is_float else 1, to.dtype)


def _bits(x: jax.Array) -> jax.Array:
    """The bits of x as signed integers, which are positive where x is."""
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))


def _stochastic(y: jax.Array, to: Format, key: jax.Array | None) -> jax.Array:
    """float32 rounded to one of its two neighbours in the format; nothing is rounded to nearest before."""
    assert key is not None, f"{to.name} is rounded stochastically and needs a key"
    if to.needs_scale:
        return cast(y, to, "stochastic", key)
    noise = jax.random.bits(key, y.shape, jnp.uint32)  # infinity stays, where `cast` would saturate
    return drop_bits(y, 16, "stochastic", noise & 0xFFFF).astype(to.dtype)


def _pack(codes: jax.Array) -> jax.Array:
    """int8 (…, n) of 4 bits each to uint8 (…, n / 2)."""
    nibbles = codes.astype(jnp.uint8) & 0xF
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def _unpack(codes: jax.Array) -> jax.Array:
    """uint8 (…, n / 2) to int8 (…, n)."""
    nibbles = jnp.stack([codes & 0xF, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    return (nibbles ^ 8).astype(jnp.int8) - 8


def dynamic_values(signed: bool) -> np.ndarray:
    """The 256 values of dynamic8 in ascending order, in [-1, 1] or [0, 1], as float32.

    They are 0, 1, and in each of the decades 10^-7…10^-6, …, 10^-1…1 the centres of equal parts: 1, 2, 4,
    …, 64 of them on either side of zero, or twice as many without a sign.
    """
    values = [0.0, 1.0]
    for i in range(7):
        parts = 2**i if signed else 2 ** (i + 1)
        edges = np.linspace(0.1, 1.0, parts + 1)
        centres = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*centres, *(-centres if signed else ())]
    return np.sort(np.array(values)).astype(np.float32)


def _dynamic_codes(y: jax.Array, signed: bool) -> jax.Array:
    """The index of the nearest value in `dynamic_values`, without a search.

    On each side of zero the values are 0, then `parts` centres in decade i, then 1. So the index is
    the sum of `parts` and a linear term, like exponent and mantissa of a float, with decades in
    place of octaves.
    """
    size, x, parts = jnp.abs(y), jnp.abs(y), 64 if signed else 128
    place = jnp.zeros(y.shape, jnp.int32)
    above = jnp.inf
    for i in range(6, -1, -1):
        lowest = 10.0 ** (i - 6) * (0.1 + 0.45 / parts)
        highest_below = 10.0 ** (i - 7) * (1 - 0.9 / parts) if i else 0.0
        start = (lowest + highest_below) / 2  # nearer to this decade than to the one below, or to zero
        part = jnp.clip(jnp.floor((x - 0.1) / 0.9 * parts).astype(jnp.int32), 0, parts - 1)
        place = jnp.where((size >= start) & (size < above), parts + part, place)
        x, parts, above = 10.0 * x, parts // 2, start
    if not signed:
        return jnp.where(size >= 1 - 0.45 / 256, 255, jnp.maximum(place - 1, 0)).astype(jnp.uint8)
    place = jnp.where(y >= 1 - 0.45 / 128, 128, place)
    return jnp.where(jnp.signbit(y), 127 - place, 127 + place).astype(jnp.uint8)


def _companded_codes(y: jax.Array, signed: bool) -> jax.Array:
    """uint8 codes of numbers in [-1, 1] or [0, 1]; companding gives small numbers the finer steps.

    FlashOptim's two functions: normalized softsign for momentum, and for second moments the root, which is
    what an update is divided by.
    """
    z = 127 + 127 * 2 * y / (1 + jnp.abs(y)) if signed else 255 * jnp.sqrt(y)
    return jnp.round(z).astype(jnp.uint8)


def _expanded(codes: jax.Array, signed: bool) -> jax.Array:
    """The inverse of `_companded_codes`, of float32 codes."""
    if not signed:
        return jnp.square(codes / 255)
    z = (codes - 127) / 127
    return z / (2 - jnp.abs(z))
