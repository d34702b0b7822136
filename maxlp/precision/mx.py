"""Matmuls of blocks that share a power-of-two scale (OCP MX), in hardware or emulated.

GPUs from Blackwell on multiply MXFP8 blocks directly (`jax.nn.scaled_matmul`, which XLA decomposes
on older ones). Elsewhere the operands are dequantized to bfloat16 first, which is exact: it holds
the 4 significant bits of E4M3 times a power of two. Both sum in float32.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from maxlp.numerics.quantized import Quantized, dequantize


def dot_general(a: Quantized, b: Quantized, dimension_numbers: Any, out_sharding: Any) -> jax.Array:
    """float32 product of two arrays in blocks along the last of their contracted axes."""

    def emulated(a: Quantized, b: Quantized) -> jax.Array:
        return jax.lax.dot_general(
            dequantize(a, _exact_dtype(a)),
            dequantize(b, _exact_dtype(b)),
            dimension_numbers,
            preferred_element_type=jnp.float32,
            out_sharding=out_sharding,
        )

    def hardware(a: Quantized, b: Quantized) -> jax.Array:
        (axes_a, axes_b), _ = dimension_numbers
        free = [a.values.shape[i] for i in _free(a, axes_a)] + [b.values.shape[i] for i in _free(b, axes_b)]
        a, b = _blocks_last(a, axes_a), _blocks_last(b, axes_b)
        y = jax.nn.scaled_matmul(a.values, b.values, a.scale, b.scale, preferred_element_type=jnp.float32)
        return y.reshape(free)

    if a.values.dtype != jnp.float8_e4m3fn or out_sharding is not None:
        return emulated(a, b)
    return jax.lax.platform_dependent(a, b, cuda=hardware, default=emulated)


def _free(q: Quantized, contracted: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for i in range(q.values.ndim) if i not in contracted)


def _blocks_last(q: Quantized, contracted: tuple[int, ...]) -> Quantized:
    """(1, rows, contracted) with E8M0 scales, the layout of `jax.nn.scaled_matmul`."""
    free = _free(q, contracted)
    rows = math.prod(q.values.shape[i] for i in free)

    def flat(x: jax.Array) -> jax.Array:
        return x.transpose(*free, *contracted).reshape(1, rows, -1)

    return Quantized(flat(q.values), flat(q.scale).astype(jnp.float8_e8m0fnu))


def _exact_dtype(q: Quantized) -> Any:
    return jnp.float32 if q.values.dtype == jnp.float32 else jnp.bfloat16
