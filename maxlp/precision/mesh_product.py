"""Products of quantized arrays on a mesh: each device multiplies its parts, and the sums are scattered.

Where the mesh splits what a product sums over, devices add their sums. XLA adds what the matmul gives, in
int32 or float32, before scales make it the smaller result; it all-reduces where it cannot move the addition
behind the scales; and JAX's rule for `jax.nn.scaled_matmul` knows no split of the sequence, for which each
device gathers the operands and computes the whole product. Here a device applies the scales first, and the
sums are scattered as the result is split, in the result's dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxlp.numerics.formats import Quantized
from maxlp.parallel.sharding import axes_size, axis_names


class Product(NamedTuple):
    """A product of two quantized arrays.

    Attributes:
      multiply: from two `Quantized` and a scalar or None to the product: the free axes of the first
        operand, then those of the second. What it closes over is no array.
      contracted: the axes of each operand that are summed over, in the same order.
      in_blocks: whether a scale of size 1 along such an axis is that of a block, which is never split.
      batch: how many leading axes operands and result have besides, of `jax.vmap`.
    """

    multiply: Callable[[Quantized, Quantized, jax.Array | None], jax.Array]
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    in_blocks: bool
    batch: int = 0

    def __call__(self, a: Quantized, b: Quantized, scale: jax.Array | None = None) -> jax.Array:
        """What ``multiply`` gives; on GPUs computed as described above, if all mesh axes are automatic.

        XLA aborts on `custom_partitioning` in a `jax.shard_map` over some of the axes, and does not know it
        when it compiles for TPUs ahead of time.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.size <= 1 or {*mesh.axis_types} != {AxisType.Auto}:
            return self.multiply(a, b, scale)
        return jax.lax.platform_dependent(a, b, scale, cuda=self.partitioned, default=self.multiply)

    def partitioned(self, a: Quantized, b: Quantized, scale: jax.Array | None) -> jax.Array:
        @custom_vmap
        def multiply(*operands: Any) -> jax.Array:
            return _partitioned(self, *operands)

        @multiply.def_vmap
        def _(size: int, is_batched: Any, *operands: Any) -> tuple[jax.Array, bool]:
            a, b, scale = jax.tree.map(
                lambda x, has: x if has else jnp.broadcast_to(x, (size, *x.shape)),
                operands,
                tuple(is_batched),
            )
            return self._replace(batch=self.batch + 1).partitioned(a, b, scale), True

        return multiply(a, b, scale)

    def summed(self, operand: int) -> list[int]:
        return [self.batch + i for i in self.contracted[operand]]

    def free(self, operand: int, ndim: int) -> list[int]:
        """The axes of an operand that only it and the result have."""
        return [i for i in range(self.batch, ndim) if i not in self.summed(operand)]


def _on_a_device(product: Product, a: Quantized, b: Quantized, scale: jax.Array | None) -> jax.Array:
    multiply = product.multiply
    for _ in range(product.batch):
        multiply = jax.vmap(multiply)
    return multiply(a, b, scale)


def _partition(
    product: Product, mesh: Mesh, operands: tuple[Quantized, Quantized, Any], result: Any
) -> tuple:
    """What `custom_partitioning` asks for: the mesh, the work of a device, and the shardings of both."""
    a, b, scale = operands
    splits = _splits(product, mesh, a), _splits(product, mesh, b)
    summed: tuple[str, ...] = ()
    for i, j in zip(product.summed(0), product.summed(1), strict=True):
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
        if not _can_split(product, mesh, operands[n], i, of_result[dim]):
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

    def split(arrays: Any, axes: Sequence[tuple[str, ...]]) -> Any:
        def spec(shape: tuple[int, ...]) -> PartitionSpec:  # an axis of size 1 is that of a shared scale
            return PartitionSpec(*(names if n > 1 else None for n, names in zip(shape, axes, strict=True)))

        return jax.tree.map(lambda x: NamedSharding(mesh, spec(x.shape)), arrays)

    of_operands = split(a, splits[0]), split(b, splits[1]), split(scale, splits[0][: product.batch])
    return mesh, of_device, split(result, of_result), of_operands


def _splits(product: Product, mesh: Mesh, q: Quantized) -> list[tuple[str, ...]]:
    """The mesh axes that split each axis of the codes; none where they would split a block."""
    axes = [axis_names(names) for names in q.codes.sharding.spec]
    return [names if _can_split(product, mesh, q, i, names) else () for i, names in enumerate(axes)]


def _can_split(product: Product, mesh: Mesh, q: Quantized, axis: int, split: tuple[str, ...]) -> bool:
    size, codes, scales = axes_size(mesh, split), q.codes.shape[axis], q.scale.shape[axis]
    return codes % size == 0 and (scales % size == 0 or (scales == 1 and not product.in_blocks))


def _rule(product: Product, mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> SdyShardingRule:
    """Which axes of operands and result are split alike, for XLA's partitioner."""
    batch = [f"batch{i}" for i in range(product.batch)]
    summed = [f"summed{i}" for i in range(len(product.contracted[0]))]
    mappings, of_result = [], batch
    for n in (0, 1):
        codes, scales = operands[2 * n : 2 * n + 2]
        names = [f"free{n}_{i}" for i in range(codes.rank)]
        for i, name in zip([*range(product.batch), *product.summed(n)], [*batch, *summed], strict=True):
            names[i] = name
        of_result = [*of_result, *(names[i] for i in product.free(n, codes.rank))]
        shared = [f"one{n}_{i}" if size == 1 else names[i] for i, size in enumerate(scales.shape)]
        mappings += [names, shared]
    mappings += [batch] * (len(operands) - 4)
    return SdyShardingRule(
        tuple(ArrayMapping(*axes) for axes in mappings),
        (ArrayMapping(*of_result),),
        reduction_factors=tuple(summed),
    )


_partitioned = custom_partitioning(_on_a_device, static_argnums=(0,))
_partitioned.def_partition(_partition, sharding_rule=_rule)
