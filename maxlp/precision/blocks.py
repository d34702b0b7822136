"""Matmuls of operands with a scale per block, in hardware or emulated.

GPUs from Blackwell on multiply MXFP8 and NVFP4 operands directly (`jax.nn.scaled_matmul`, which XLA
decomposes on older ones). Not in a `jax.shard_map` over some of the mesh axes, as where replicas compute
apart: there XLA cannot partition the product over the other axes. In all other cases the operands are
dequantized first, to bfloat16 where that is exact: it holds the 4 significant bits of E4M3 times a power of
two, and the 2 of E2M1 times the 4 of an E4M3 scale. No hardware takes blocks with float32 scales, which are
dequantized to float32. All accumulate in float32.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlp.numerics import formats
from maxlp.numerics.formats import MX_BLOCK, Quantized
from maxlp.numerics.quantized import dequantize, written_once
from maxlp.precision.mesh_product import Product
from maxlp.precision.recipes import Operand


class _Instruction(NamedTuple):
    """A block-scaled matmul of GPUs.

    Attributes:
      name: the key of its peak rate in `hardware.PEAK_TFLOPS`.
      formats: the formats of codes that it takes; each is also the name of a dtype of JAX.
      block_scales: the rules by which their scales are made, see `scales.block_scales_for`.
      scale: dtype of the scales.
      block_size: neighbours that share a scale.
    """

    name: str
    formats: tuple[str, ...]
    block_scales: tuple[str, ...]
    scale: Any
    block_size: int

    def takes(self, operand: Operand) -> bool:
        return (
            operand.format in self.formats
            and operand.block_scales in self.block_scales
            and operand.block_size == self.block_size
        )


_INSTRUCTIONS = (
    _Instruction("mxfp8", ("float8_e4m3fn", "float8_e5m2"), ("up", "floor"), jnp.float8_e8m0fnu, MX_BLOCK),
    _Instruction("nvfp4", ("float4_e2m1fn",), ("e4m3",), jnp.float8_e4m3fn, 16),
)


def dot_general(
    a: Quantized,
    b: Quantized,
    pair: tuple[Operand, Operand],
    dimension_numbers: Any,
    dtype: Any,
    out_sharding: Any,
) -> jax.Array:
    """The product, in ``dtype``, of two arrays with a scale per block or tile.

    Args:
      pair: how they were quantized: in blocks along the last contracted axis, or in tiles of the last two.
    """
    scale = None
    for q in (a, b):
        if q.tensor_scale is not None:
            scale = q.tensor_scale if scale is None else scale * q.tensor_scale
    a, b = a._replace(tensor_scale=None), b._replace(tensor_scale=None)

    def emulated(a: Quantized, b: Quantized, scale: jax.Array | None) -> jax.Array:
        y = jax.lax.dot_general(
            dequantize(a, _exact_dtype(a, pair[0])),
            dequantize(b, _exact_dtype(b, pair[1])),
            dimension_numbers,
            preferred_element_type=jnp.float32,
            out_sharding=out_sharding,
        )
        return (y if scale is None else y * scale).astype(dtype)

    contracted, _ = dimension_numbers
    # XLA partitions the hardware's product over automatic mesh axes alone.
    automatic = out_sharding is None and not jax.sharding.get_abstract_mesh().manual_axes
    instruction = _instruction(pair) if automatic else None

    def hardware(a: Quantized, b: Quantized, scale: jax.Array | None) -> jax.Array:
        assert instruction is not None
        (a_codes, a_scale), (b_codes, b_scale) = (
            _blocks_last(q, axes, operand, instruction.scale)
            for q, axes, operand in zip((a, b), contracted, pair, strict=True)
        )
        result = dtype if scale is None else jnp.float32
        y = jax.nn.scaled_matmul(a_codes, b_codes, a_scale, b_scale, preferred_element_type=result)
        y = y if scale is None else (y * scale).astype(dtype)
        pairs = zip((a, b), contracted, strict=True)
        return y.reshape([q.codes.shape[i] for q, axes in pairs for i in _free(q, axes)])

    def multiply(*operands: Any) -> jax.Array:
        if instruction is None:
            return emulated(*operands)
        return jax.lax.platform_dependent(*operands, cuda=hardware, default=emulated)

    return Product(multiply, contracted, in_blocks=True)(a, b, scale)


def _free(q: Quantized, contracted: tuple[int, ...]) -> list[int]:
    return [i for i in range(q.codes.ndim) if i not in contracted]


def _blocks_last(
    q: Quantized, contracted: tuple[int, ...], operand: Operand, scale_dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Codes (1, rows, contracted) and scales (1, rows, blocks), in the layout of `jax.nn.scaled_matmul`."""
    free = _free(q, contracted)
    rows = math.prod(q.codes.shape[i] for i in free)
    scale = q.scale
    for axis in free:  # a tile has one scale for several rows
        scale = jnp.repeat(scale, q.codes.shape[axis] // scale.shape[axis], axis=axis)

    def flat(x: jax.Array) -> jax.Array:
        return x.transpose(*free, *contracted).reshape(1, rows, -1)

    codes = q.codes.astype(jnp.dtype(operand.format))
    if operand.granularity == "tile":
        # Otherwise XLA quantizes a kernel straight into the transposed layout, in several passes that write
        # parts of the conversion to 4 bits in up to 32.
        codes = written_once(codes)
    return flat(codes), flat(scale.astype(scale_dtype))


def _instruction(pair: tuple[Operand, Operand]) -> _Instruction | None:
    """The GPU's matmul of two such operands; None if they have to be dequantized."""
    return next((i for i in _INSTRUCTIONS if all(i.takes(operand) for operand in pair)), None)


def rate(pair: tuple[Operand, Operand], *, replicas_are_separate: bool = False) -> str:
    """The key in `hardware.PEAK_TFLOPS` of the rate of a product, on a chip that has the operands' format.

    "bfloat16" if no chip has it or the product does not use it, but multiplies in 16 or 32 bits.

    Args:
      replicas_are_separate: whether the product is in a `jax.shard_map` over some of the mesh axes.
    """
    if pair[0].in_blocks:
        instruction = None if replicas_are_separate else _instruction(pair)
        return "bfloat16" if instruction is None else instruction.name
    return {"float": "float8", "int": "int8"}.get(formats.get(pair[0].format).kind, "bfloat16")


def _exact_dtype(q: Quantized, operand: Operand) -> Any:
    """The narrowest dtype that holds codes times scales without rounding, float32 at most."""
    narrow = q.codes.dtype != jnp.float32 and not operand.is_emulated
    return jnp.bfloat16 if narrow else jnp.float32
