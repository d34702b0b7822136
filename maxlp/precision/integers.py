"""Matmuls of integers whose sums int32 can hold."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from maxlp.numerics import formats

INT32_MAX = 2**31 - 1


def dot_general(a: jax.Array, b: jax.Array, pair, numbers, out_sharding) -> jax.Array:
    """The matmul of integers in int32; in float32 if a sum could be too large for int32.

    The contracted axes are then split into parts, whose sums are exact in int32 and added in float32. The
    parts are batch axes: a mesh that shards a contracted axis shards its parts, so that no operand moves.

    Args:
      a, b: codes, of any shape.
      pair: how they are quantized; the largest numbers of both formats tell how many products int32 holds.
      numbers: the dimension numbers of `jax.lax.dot_general`.
      out_sharding: that of the result, where the mesh has explicit axes.
    """
    multiply = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.int32)
    axes_a, axes_b = numbers[0]
    sizes = [a.shape[axis] for axis in axes_a]
    limit = INT32_MAX // math.prod(int(formats.get(operand.format).max) for operand in pair)
    if math.prod(sizes) <= limit:
        return multiply(a, b, numbers, out_sharding=out_sharding)
    parts, n = _parts(sizes, limit), len(sizes)

    def split(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
        """Moves the contracted axes to the front: first the parts of all, then what one part contains."""
        x = jnp.moveaxis(x, axes, range(n))
        of_axes = [k for size, many in zip(sizes, parts, strict=True) for k in (many, size // many)]
        x = x.reshape(*of_axes, *x.shape[n:])
        return jnp.moveaxis(x, range(0, 2 * n, 2), range(n))

    def sum_of_parts(a: jax.Array, b: jax.Array) -> jax.Array:
        batch, contracted = tuple(range(n)), tuple(range(n, 2 * n))
        products = multiply(split(a, axes_a), split(b, axes_b), ((contracted, contracted), (batch, batch)))
        return products.astype(jnp.float32).sum(batch)

    if out_sharding is None:
        return sum_of_parts(a, b)
    with_auto_axes: Any = jax.sharding.auto_axes(sum_of_parts, out_sharding=out_sharding)
    return with_auto_axes(a, b)


def _parts(sizes: list[int], limit: int) -> tuple[int, ...]:
    """The number of parts of each axis such that a part of all axes has at most ``limit`` entries.

    It is the fewest that divide the axes, and of the first one, the rows, where there is a choice: meshes
    rarely shard the others.
    """
    divisors = ([k for k in range(1, size + 1) if size % k == 0] for size in sizes)
    fewest = math.prod(sizes) / limit
    enough = (parts for parts in itertools.product(*divisors) if math.prod(parts) >= fewest)
    return min(enough, key=lambda parts: (math.prod(parts), parts[1:]))
