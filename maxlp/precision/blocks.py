"""Matmuls of operands whose blocks share a scale, in hardware or emulated.

GPUs from Blackwell on multiply MXFP8 and NVFP4 blocks directly (`jax.nn.scaled_matmul`, which XLA
decomposes on older ones). Elsewhere the operands are dequantized first, to bfloat16 where that is exact: it
holds the 4 significant bits of E4M3 times a power of two, and the 2 of E2M1 times the 4 of an E4M3 scale.
Blocks with float32 scales have no such instruction, and are dequantized to float32. All sum in float32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlp.numerics import formats
from maxlp.numerics.formats import MX_BLOCK, Quantized
from maxlp.numerics.quantized import dequantize
from maxlp.precision.recipes import Operand
from maxlp.precision.scaled_matmul import Product, scaled_matmul


class _Instruction(NamedTuple):
    """Blocks that a GPU multiplies.

    Attributes:
      name: the key of its peak rate in `hardware.PEAK_TFLOPS`.
      formats: names of the codes' formats, which are also those of the dtypes that it takes.
      block_scales: rules of their scales, see `scales.block_scales_for`.
      scale: dtype of the scales.
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
    """Product in ``dtype`` of two arrays in blocks along the last of their contracted axes, or in tiles."""
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

    instruction = _instruction(pair) if out_sharding is None else None
    if instruction is None:
        return emulated(a, b, scale)
    formats = jnp.dtype(pair[0].format), jnp.dtype(pair[1].format)
    product = Product(dimension_numbers[0], formats, instruction.scale, dtype)
    hardware = functools.partial(scaled_matmul, product)
    return jax.lax.platform_dependent(a, b, scale, cuda=hardware, default=emulated)


def _instruction(pair: tuple[Operand, Operand]) -> _Instruction | None:
    """What multiplies two such operands on a GPU; None if they have to be dequantized."""
    return next((i for i in _INSTRUCTIONS if all(i.takes(operand) for operand in pair)), None)


def rate(pair: tuple[Operand, Operand]) -> str:
    """The key in `hardware.PEAK_TFLOPS` of the rate of a product, on a chip that has the operands' format.

    "bfloat16" if no chip has it: the values are then 16 or 32 bits wide.
    """
    if pair[0].in_blocks:
        instruction = _instruction(pair)
        return "bfloat16" if instruction is None else instruction.name
    return {"float": "float8", "int": "int8"}.get(formats.get(pair[0].format).kind, "bfloat16")


def _exact_dtype(q: Quantized, operand: Operand) -> Any:
    narrow = q.codes.dtype != jnp.float32 and not operand.is_emulated
    return jnp.bfloat16 if narrow else jnp.float32
