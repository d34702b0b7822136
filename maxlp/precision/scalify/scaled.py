"""Arrays with a power of two beside them: the values that `scalify` computes with."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

ZERO = -10_000  # the exponent of zeros, below all others
MASK = 2.0**100  # constants from here on stand for infinity, as in the logits of masked tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled:
    """``data * 2**exponent``.

    Attributes:
      data: a floating-point array, best with a root mean square near 1.
      exponent: int32 scalar: the scale is always a power of two.
    """

    data: jax.Array
    exponent: jax.Array


@dataclasses.dataclass(frozen=True)
class Constant:
    """A floating-point array filled with one number that is known when the program is traced.

    0 and infinity are the same under any scale, so that ``where(mask, x, 0)`` keeps the scale of ``x``.
    """

    number: float
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def fits_any_scale(self) -> bool:
        return self.number == 0 or not abs(self.number) < MASK

    def array(self) -> jax.Array:
        return jnp.full(self.shape, self.number, self.dtype)


Value = Scaled | Constant | jax.Array  # the last: integers, and floats whose scale is 1


def is_float(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def scale(x: jax.Array) -> Scaled:
    """An array as `Scaled`, with data of the same dtype whose root mean square is in [1, 2)."""
    return rescale(Scaled(x, jnp.int32(0)))


def unscale(tree):
    """A tree with every `Scaled` as a float32 array."""

    def is_scaled(x) -> bool:
        return isinstance(x, Scaled)

    return jax.tree.map(lambda x: value(x) if is_scaled(x) else x, tree, is_leaf=is_scaled)


def rescale(x: Scaled) -> Scaled:
    """The same values, with data whose root mean square is in [1, 2); infinities stay.

    Zeros get the exponent `ZERO`: with any other one a sum with them could lose what is added to them.
    """
    wide = x.data.astype(jnp.float32)
    amax = jnp.max(jnp.abs(wide))  # first by this exponent, so that no square overflows or vanishes
    top = _floor_log2(amax)
    mean_square = jnp.mean(jnp.square(shift(wide, -top)))
    n = top + (_floor_log2(mean_square) >> 1)
    n = jnp.where(jnp.isfinite(amax) & (amax > 0), n, 0)
    return Scaled(shift(x.data, -n), jnp.where(amax == 0, ZERO, x.exponent + n))


def shift(data: jax.Array, n: jax.Array | int) -> jax.Array:
    """``data * 2**n``, for n in [-126, 127], rounded once to the dtype of ``data``."""
    bits = (jnp.clip(n, -126, 127).astype(jnp.int32) + 127) << 23
    return (data.astype(jnp.float32) * jax.lax.bitcast_convert_type(bits, jnp.float32)).astype(data.dtype)


def _floor_log2(x: jax.Array) -> jax.Array:
    """``floor(log2(x))`` as int32, exact for normal float32 numbers above 0."""
    return (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) - 127


def as_scaled(x: Value) -> Scaled:
    """Any float as `Scaled`: a plain array gets the scale 1, a scalar or constant that of its magnitude."""
    if isinstance(x, Scaled):
        return x
    if isinstance(x, Constant):
        exponent = _constant_exponent(x.number)
        data = math.ldexp(x.number, -exponent) if x.number else 0.0
        return Scaled(jnp.full(x.shape, data, x.dtype), jnp.int32(exponent))
    return scale(x) if x.ndim == 0 else Scaled(x, jnp.int32(0))


def _constant_exponent(number: float) -> int:
    """The nearest power: 0.999 is 0.999, not 1.998 / 2, which would make a moving average's data grow."""
    if number == 0:
        return ZERO
    return round(math.log2(abs(number))) if math.isfinite(number) else 0


def array(x: Value) -> jax.Array:
    """A value that is not `Scaled` as an array."""
    assert not isinstance(x, Scaled)
    return x.array() if isinstance(x, Constant) else x


def value(x: Value) -> jax.Array:
    """The values with their scale applied; floats in float32, since 16 bits may not hold them."""
    if isinstance(x, Scaled):
        return shift(x.data.astype(jnp.float32), x.exponent)
    x = array(x)
    return x.astype(jnp.float32) if is_float(x.dtype) else x


def align(*values: Value) -> tuple[list[jax.Array], jax.Array]:
    """The data of all values under their largest exponent, so that none overflows, and that exponent.

    It is also the scale of a sum of two, ``√(s1² + s2²)`` rounded down to a power of two: that is the
    larger of s1 and s2.
    """
    free = [isinstance(x, Constant) and x.fits_any_scale for x in values]
    scaled = [as_scaled(x) for x in values]
    exponents = [s.exponent for s, is_free in zip(scaled, free, strict=True) if not is_free]
    exponent = jnp.max(jnp.stack(exponents))
    data = [
        array(x) if is_free else shift(s.data, s.exponent - exponent)
        for x, s, is_free in zip(values, scaled, free, strict=True)
    ]
    return data, exponent
