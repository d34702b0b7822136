"""Products of quantized arrays on a mesh: devices scale their partial sums and then reduce-scatter them.

Where a contracted axis is sharded, each device has a partial sum of the product. XLA's partitioner then
adds what the matmul returns, in int32 or float32, before the scales are applied and the result is cast to
fewer bits; and where it cannot move the addition past the scales it all-reduces. JAX's own partitioning of
`jax.nn.scaled_matmul` does not know a sharded sequence: each device gathers the operands and computes the
whole product. Here each device applies the scales to its partial sum and casts it, and the sum over devices
is scattered as the result is sharded.
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
      multiply: computes the product of two `Quantized`, times a scalar if the third argument is not None;
        the result has the free axes of the first operand, then those of the second. It closes over no
        arrays.
      contracted: the contracted axes of each operand, in the same order.
      in_blocks: whether operands have scales of blocks, which are never split: a scale of size 1 along an
        axis is then that of a single block.
      batch: the number of axes that `jax.vmap` has put in front of both operands and the result.
    """

    multiply: Callable[[Quantized, Quantized, jax.Array | None], jax.Array]
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    in_blocks: bool
    batch: int = 0

    def __call__(self, a: Quantized, b: Quantized, scale: jax.Array | None = None) -> jax.Array:
        """The product; on GPUs, if all mesh axes are automatic, partitioned as described above.

        XLA aborts on `custom_partitioning` in a `jax.shard_map` over some of the axes, and cannot compile
        it for TPUs ahead of time.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.size <= 1 or {*mesh.axis_types} != {AxisType.Auto}:
            return self.multiply(a, b, scale)
        return jax.lax.platform_dependent(a, b, scale, cuda=self.partitioned, default=self.multiply)

    def partitioned(self, a: Quantized, b: Quantized, scale: jax.Array | None) -> jax.Array:
        """The product with `custom_partitioning`, to which the rule of `jax.vmap` is added here."""

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
        """The contracted axes of an operand, after those of ``batch``."""
        return [self.batch + i for i in self.contracted[operand]]

    def free(self, operand: int, ndim: int) -> list[int]:
        """The axes that an operand shares with the result alone."""
        return [i for i in range(self.batch, ndim) if i not in self.summed(operand)]


def _local_product(product: Product, a: Quantized, b: Quantized, scale: jax.Array | None) -> jax.Array:
    """The product of whole arrays, or of one device's shards of them."""
    multiply = product.multiply
    for _ in range(product.batch):
        multiply = jax.vmap(multiply)
    return multiply(a, b, scale)


def _partition(
    product: Product, mesh: Mesh, operands: tuple[Quantized, Quantized, Any], result: Any
) -> tuple:
    """The mesh, the computation of one device, and the shardings of the result and of the operands.

    This is the callback of `custom_partitioning`.

    Args:
      operands, result: shapes with the shardings that XLA proposes; those returned are as close to them as
        the product allows.
    """
    a, b, scale = operands
    specs = _specs(product, mesh, a), _specs(product, mesh, b)
    summed: tuple[str, ...] = ()  # the mesh axes over whose devices partial sums are added
    for i, j in zip(product.summed(0), product.summed(1), strict=True):
        # Operands sharded alike are multiplied where they are, others are gathered along this axis. (A
        # spec contains a mesh axis only once.)
        specs[0][i] = specs[1][j] = specs[0][i] if specs[0][i] == specs[1][j] else ()
        summed += specs[0][i]
    result_axes = [axis_names(axes) for axes in result.sharding.spec]
    taken = {*summed}.union(*result_axes)
    dims = [[(0, i), (1, i)] for i in range(product.batch)]  # (operand, axis) of each axis of the result
    dims += [[(n, i)] for n, q in enumerate((a, b)) for i in product.free(n, q.codes.ndim)]
    scattered = []
    for dim, places in enumerate(dims):
        n, i = places[0]
        if not result_axes[dim] and taken.isdisjoint(specs[n][i]):
            result_axes[dim] = specs[n][i]
            taken |= {*specs[n][i]}
        if not _can_shard(product, mesh, operands[n], i, result_axes[dim]):
            result_axes[dim] = ()
        # A reduce-scatter over mesh axes splits a dim further: they must be the last ones that shard it.
        local = tuple(name for name in result_axes[dim] if name not in summed)
        scattered.append(result_axes[dim][len(local) :] if result_axes[dim][: len(local)] == local else ())
        result_axes[dim] = local + scattered[dim]
        for n, i in places:
            specs[n][i] = local
    all_reduced = tuple(name for name in summed if not any(name in axes for axes in scattered))

    def local_product(*operands: Any) -> jax.Array:
        y = _local_product(product, *operands)
        for dim, axes in enumerate(scattered):
            if axes:
                y = jax.lax.psum_scatter(y, axes, scatter_dimension=dim, tiled=True)
        return jax.lax.psum(y, all_reduced) if all_reduced else y

    def shardings(arrays: Any, axes: Sequence[tuple[str, ...]]) -> Any:
        def spec(shape: tuple[int, ...]) -> PartitionSpec:  # along an axis of size 1 a scale is shared
            return PartitionSpec(*(names if n > 1 else None for n, names in zip(shape, axes, strict=True)))

        return jax.tree.map(lambda x: NamedSharding(mesh, spec(x.shape)), arrays)

    scale_shardings = shardings(scale, specs[0][: product.batch])
    operand_shardings = shardings(a, specs[0]), shardings(b, specs[1]), scale_shardings
    return mesh, local_product, shardings(result, result_axes), operand_shardings


def _specs(product: Product, mesh: Mesh, q: Quantized) -> list[tuple[str, ...]]:
    """The mesh axes over which each axis of the codes is sharded; none where they would split a block."""
    axes = [axis_names(names) for names in q.codes.sharding.spec]
    return [names if _can_shard(product, mesh, q, i, names) else () for i, names in enumerate(axes)]


def _can_shard(product: Product, mesh: Mesh, q: Quantized, axis: int, names: tuple[str, ...]) -> bool:
    """Whether mesh axes divide an axis of the codes into parts that contain whole blocks."""
    size, codes, scales = axes_size(mesh, names), q.codes.shape[axis], q.scale.shape[axis]
    return codes % size == 0 and (scales % size == 0 or (scales == 1 and not product.in_blocks))


def _rule(product: Product, mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> SdyShardingRule:
    """Which axes of operands and result are sharded alike, for XLA's partitioner (Shardy)."""
    batch = [f"batch{i}" for i in range(product.batch)]
    summed = [f"summed{i}" for i in range(len(product.contracted[0]))]
    mappings, result_axes = [], batch
    for n in (0, 1):
        codes, scales = operands[2 * n : 2 * n + 2]
        names = [f"free{n}_{i}" for i in range(codes.rank)]
        for i, name in zip([*range(product.batch), *product.summed(n)], [*batch, *summed], strict=True):
            names[i] = name
        result_axes = [*result_axes, *(names[i] for i in product.free(n, codes.rank))]
        shared = [f"one{n}_{i}" if size == 1 else names[i] for i, size in enumerate(scales.shape)]
        mappings += [names, shared]
    mappings += [batch] * (len(operands) - 4)
    return SdyShardingRule(
        tuple(ArrayMapping(*axes) for axes in mappings),
        (ArrayMapping(*result_axes),),
        reduction_factors=tuple(summed),
    )


_partitioned = custom_partitioning(_local_product, static_argnums=(0,))
_partitioned.def_partition(_partition, sharding_rule=_rule)
