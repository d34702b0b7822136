"""Gradients of kernels reduce-scattered over ``fsdp`` in 8 bits.

Every device has a gradient of the whole kernel, from its own rows of the batch, and keeps a shard of the
sum. By default XLA reduce-scatters them in the dtype of the matmuls. Here

    quantize    the device's gradient, with a float32 scale for each block of values
    all-to-all  shard i of every gradient to device i, in 8 bits
    sum         of the shards in float32; then over ``data``, as by default

as in ZeRO++ (Wang et al. 2023, arXiv:2306.10209). Error feedback, as in `parallel.exchange`, would keep an
error for each value of the whole model on every device, which is the memory that FSDP saves. Rounding is
stochastic instead: it is unbiased, so that small values are not lost in every step.

Letters: D devices of ``data`` · F of ``fsdp`` · K, N dims of a kernel, one of them padded to blocks.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from maxlp.nn.layers import Linear
from maxlp.nn.stack import find_stacks
from maxlp.numerics.formats import FORMATS, Quantized
from maxlp.numerics.quantized import dequantize, quantize
from maxlp.parallel import exchange, sharding


def set_format(model: nnx.Module, format_name: str) -> None:
    """Makes the kernels in a model's blocks reduce-scatter their gradients in a format, in place."""
    for blocks in find_stacks(model).values():
        for _, linear in nnx.iter_modules(blocks):
            if isinstance(linear, Linear):
                axes = linear.kernel.get_metadata("out_sharding")
                linear.sum_over_rows = nnx.static(Scatter(format_name, axes[-2:]))


def block_size(dim: int) -> int:
    """How many values of a device's part of a dim share a scale, at most `exchange.BLOCK`.

    There are as few blocks as that allows. They are equally long, so that fewer zeros than blocks pad the
    part: full blocks would pad 300 values to 512.
    """
    return math.ceil(dim / math.ceil(dim / exchange.BLOCK))


def num_bytes(dim: int, format_name: str) -> float:
    """Bytes of a device's part of a dim, with padding and scales, as they are sent once."""
    size = block_size(dim)
    return math.ceil(dim / size) * (size * FORMATS[format_name].bits / 8 + 4)


@dataclasses.dataclass(frozen=True)
class Scatter:
    """A `layers.SumOverRows` that reduce-scatters the devices' gradients of a kernel (K, N).

    Attributes:
      format_name: in `formats.FORMATS`; it has 8 bits.
      axes: the logical axes of the kernel; the mesh axis ``fsdp`` splits one of them.
    """

    format_name: str
    axes: tuple[str, str]

    def __call__(self, product: Callable[..., jax.Array], *operands: Any) -> jax.Array:
        """``product(*operands)``, (K, N): a sum over the rows of the batch.

        Args:
          operands: trees of arrays. The batch is the first dim of all but scalars and scales of all rows.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.shape["fsdp"] == 1:
            return product(*operands)
        data = None if "data" in mesh.manual_axes else "data"  # manual axes: this is one replica's program
        D, F = 1 if data is None else mesh.shape["data"], mesh.shape["fsdp"]
        parts = sharding.axes_size(mesh, sharding.RULES[self.axes[self._whole]])
        leaves, structure = jax.tree.flatten(operands)
        has_rows = [x.ndim > 0 and x.shape[0] > 1 for x in leaves]

        def split(x: jax.Array) -> jax.Array:
            rows_of_devices = x.reshape(D, F, -1, *x.shape[1:])
            return jax.lax.with_sharding_constraint(rows_of_devices, PartitionSpec(data, "fsdp"))

        def device_gradient(*leaves: jax.Array) -> Quantized:
            return self._quantize(product(*structure.unflatten(leaves)), parts)

        mapped = [0 if has else None for has in has_rows]
        leaves = [split(x) if has else x for x, has in zip(leaves, has_rows, strict=True)]
        gradients_DFKN = jax.vmap(jax.vmap(device_gradient, mapped), mapped)(*leaves)
        received = jax.tree.map(lambda x: self._all_to_all(x, data), gradients_DFKN)
        sum_DKN = jnp.sum(dequantize(received, jnp.float32), axis=1)
        kernel = jax.eval_shape(product, *operands)
        part_size = kernel.shape[self._whole] // parts
        sum_DKN = _resize_parts(sum_DKN, self._whole + 1, parts, part_size)  # without the padding of blocks
        return jax.lax.reduce(sum_DKN.astype(kernel.dtype), jnp.zeros((), kernel.dtype), jax.lax.add, (0,))

    def _quantize(self, gradient_KN: jax.Array, parts: int) -> Quantized:
        """Quantizes in blocks along the dim that is not scattered, none of which ``tensor`` splits."""
        part_size = gradient_KN.shape[self._whole] // parts
        size = block_size(part_size)
        padded_KN = _resize_parts(gradient_KN, self._whole, parts, part_size + -part_size % size)
        return quantize(
            padded_KN,
            FORMATS[self.format_name],
            "block",
            (self._whole,),
            rounding="stochastic",
            block_size=size,
            block_scales="float32",
        )

    def _all_to_all(self, x_DFKN: jax.Array, data: str | None) -> jax.Array:
        """Reshards from the devices that computed the values to those that sum them.

        Values are sent as int8 bits, because XLA sends 8-bit floats in 16 bits where a device lacks them.
        """
        kernel_axes = sharding.spec(*self.axes)
        before = [None if dim == self._scattered else axis for dim, axis in enumerate(kernel_axes)]
        sent_as = jnp.int8 if x_DFKN.dtype.itemsize == 1 else x_DFKN.dtype
        sent = jax.lax.bitcast_convert_type(x_DFKN, sent_as)
        for spec in (PartitionSpec(data, "fsdp", *before), PartitionSpec(data, None, *kernel_axes)):
            sent = jax.lax.with_sharding_constraint(sent, spec)
        return jax.lax.bitcast_convert_type(sent, x_DFKN.dtype)

    @property
    def _scattered(self) -> int:
        """The dim of the kernel that is sharded over ``fsdp``."""
        return ["fsdp" in sharding.axis_names(sharding.RULES[axis]) for axis in self.axes].index(True)

    @property
    def _whole(self) -> int:
        """The other one, along which the blocks lie."""
        return 1 - self._scattered


def _resize_parts(x: jax.Array, axis: int, parts: int, size: int) -> jax.Array:
    """Resizes each of the parts of an axis: pads it with zeros at its end, or truncates it."""
    shape = x.shape
    x = x.reshape(*shape[:axis], parts, -1, *shape[axis + 1 :])
    change = [(0, size - n if i == axis + 1 else 0, 0) for i, n in enumerate(x.shape)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), change).reshape(*shape[:axis], -1, *shape[axis + 1 :])
