"""`jax.nn.scaled_matmul`, the GPUs' product of blocks (from Blackwell on), split by a mesh.

JAX has a rule for meshes, but its operands have all tokens in one axis, which a split of the sequence does
not split. Where ``tensor`` splits what is summed over, as in the second matmul of Megatron's pairs and in
the input gradient of the first, each device would gather the operands and compute the whole product. Here
it multiplies its parts, and sums are scattered as the result is split, in the result's dtype.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlp.numerics.formats import Quantized
from maxlp.parallel.sharding import axes_size, axis_names


class Product(NamedTuple):
    """What is fixed when a program is traced.

    Attributes:
      contracted: the axes of each operand that are summed over, in the same order.
      formats: dtypes of the operands' codes.
      scale: dtype of their scales.
      dtype: of the result.
      batch: how many leading axes operands and result have in common, of `jax.vmap`.
    """

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    formats: tuple[Any, Any]
    scale: Any
    dtype: Any
    batch: int = 0

    def free(self, operand: int, ndim: int) -> list[int]:
        """The axes of an operand that only it and the result have."""
        return [i for i in range(self.batch, ndim) if i not in self.contracted[operand]]


def scaled_matmul(product: Product, a: Quantized, b: Quantized, scale: jax.Array | None) -> jax.Array:
    """The product of two arrays in blocks, times a scalar: the free axes of ``a``, then those of ``b``."""

    @custom_vmap
    def multiply(*operands: Any) -> jax.Array:
        return _partitioned(product, *operands)

    @multiply.def_vmap
    def _(size: int, is_batched: Any, *operands: Any) -> tuple[jax.Array, bool]:
        a, b, scale = jax.tree.map(
            lambda x, has: x if has else jnp.broadcast_to(x, (size, *x.shape)), operands, tuple(is_batched)
        )
        shifted = tuple(tuple(i + 1 for i in axes) for axes in product.contracted)
        batched = product._replace(contracted=shifted, batch=product.batch + 1)
        return scaled_matmul(batched, a, b, scale), True

    return multiply(a, b, scale)


def _on_a_device(product: Product, a: Quantized, b: Quantized, scale: jax.Array | None) -> jax.Array:
    (a_codes, a_scale), (b_codes, b_scale) = (_blocks_last(product, n, q) for n, q in enumerate((a, b)))
    dtype = product.dtype if scale is None else jnp.float32
    y = jax.nn.scaled_matmul(a_codes, b_codes, a_scale, b_scale, preferred_element_type=dtype)
    if scale is not None:
        y = (y * scale.reshape(-1, 1, 1)).astype(product.dtype)
    free = (q.codes.shape[i] for n, q in enumerate((a, b)) for i in product.free(n, q.codes.ndim))
    return y.reshape(*a.codes.shape[: product.batch], *free)


def _blocks_last(product: Product, operand: int, q: Quantized) -> tuple[jax.Array, jax.Array]:
    """(batch, rows, contracted), and a scale for each block of a row, as the GPUs' product reads them."""
    free = product.free(operand, q.codes.ndim)
    leading = math.prod(q.codes.shape[: product.batch]), math.prod(q.codes.shape[i] for i in free)
    scale = q.scale
    for axis in free:  # a tile has one scale for several rows
        scale = jnp.repeat(scale, q.codes.shape[axis] // scale.shape[axis], axis=axis)

    def flat(x: jax.Array) -> jax.Array:
        x = x.transpose(*range(product.batch), *free, *product.contracted[operand])
        return x.reshape(*leading, -1)

    return flat(q.codes.astype(product.formats[operand])), flat(scale.astype(product.scale))


# --- on a mesh ----------------------------------------------------------------------------------------


def _partition(
    product: Product, mesh: Mesh, operands: tuple[Quantized, Quantized, Any], result: Any
) -> tuple:
    """What `custom_partitioning` asks for: the mesh, the work of a device, and the shardings of both."""
    a, b, scale = operands
    splits = _splits(mesh, a), _splits(mesh, b)
    summed: tuple[str, ...] = ()
    for i, j in zip(*product.contracted, strict=True):
        # Where the operands agree each device multiplies what it has. (An axis occurs once in a split.)
        splits[0][i] = splits[1][j] = splits[0][i] if splits[0][i] == splits[1][j] else ()
        summed += splits[0][i]
    of_result = [axis_names(axes) for axes in result.sharding.spec]
    taken = {*summed}.union(*of_result)
    dims = [[(0, i), (1, i)] for i in range(product.batch)]  # where the operands have the result's
    dims += [[(n, i)] for n, q in enumerate((a, b)) for i in product.free(n, q.codes.ndim)]
    scattered = []
    for dim, places in enumerate(dims):
        n, i = places[0]
        if not of_result[dim] and taken.isdisjoint(splits[n][i]):
            of_result[dim] = splits[n][i]
            taken |= {*splits[n][i]}
        if not _in_whole_blocks(mesh, operands[n], i, of_result[dim]):
            of_result[dim] = ()
        # Sums can be scattered over the last of the axes that split a dim.
        local = tuple(name for name in of_result[dim] if name not in summed)
        scattered.append(of_result[dim][len(local) :] if of_result[dim][: len(local)] == local else ())
        of_result[dim] = local + scattered[dim]
        for n, i in places:
            splits[n][i] = local
    everywhere = tuple(name for name in summed if not any(name in axes for axes in scattered))

    def of_device(*operands: Any) -> jax.Array:
        y = _on_a_device(product, *operands)
        for dim, axes in enumerate(scattered):
            if axes:
                y = jax.lax.psum_scatter(y, axes, scatter_dimension=dim, tiled=True)
        return jax.lax.psum(y, everywhere) if everywhere else y

    def split(like: Any, axes: Sequence[tuple[str, ...]]) -> Any:
        return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec(*axes)), like)

    of_operands = split(a, splits[0]), split(b, splits[1]), split(scale, splits[0][: product.batch])
    return mesh, of_device, split(result, of_result), of_operands


def _splits(mesh: Mesh, q: Quantized) -> list[tuple[str, ...]]:
    """The mesh axes that split each axis of the codes; none where they would split a block."""
    axes = [axis_names(names) for names in q.codes.sharding.spec]
    return [names if _in_whole_blocks(mesh, q, i, names) else () for i, names in enumerate(axes)]


def _in_whole_blocks(mesh: Mesh, q: Quantized, axis: int, split: tuple[str, ...]) -> bool:
    return q.scale.shape[axis] % axes_size(mesh, split) == 0


def _rule(product: Product, mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> SdyShardingRule:
    """Which axes of operands and result are split alike, for XLA's partitioner."""
    batch = [f"batch{i}" for i in range(product.batch)]
    names = [
        [*batch, *(f"free{n}_{i}" for i in range(product.batch, operands[2 * n].rank))] for n in (0, 1)
    ]
    summed = [f"summed{i}" for i in range(len(product.contracted[0]))]
    for axes, contracted in zip(names, product.contracted, strict=True):
        for i, name in zip(contracted, summed, strict=True):
            axes[i] = name
    a, b = names
    of_result = [*batch, *(name for name in a + b if name not in batch + summed)]
    scales = [batch] * (len(operands) - 4)
    return SdyShardingRule(
        tuple(ArrayMapping(*axes) for axes in (a, a, b, b, *scales)),
        (ArrayMapping(*of_result),),
        reduction_factors=tuple(summed),
    )


_partitioned = custom_partitioning(_on_a_device, static_argnums=(0,))
_partitioned.def_partition(_partition, sharding_rule=_rule)
