"""SiLU with a gradient that XLA computes where it is quantized.

JAX adds two bfloat16 terms. XLA for GPUs weighs what reading the three operands of this sum in each of the
kernels that need it would cost: as much as writing it once in 16 bits. It writes it, and another kernel
quantizes it. In float32, with a rounding to bfloat16 wherever JAX rounds, the sum is twice as large, and
XLA computes it in the kernels that quantize it and take its amax, which are one in the end.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp


@runtime_checkable
class Gated(Protocol):
    """A module that multiplies by ``silu(gate_proj(x))``."""

    gate_proj: Callable[..., jax.Array]
    silu: Callable[[jax.Array], jax.Array]


def silu(x: jax.Array) -> jax.Array:
    """As `jax.nn.silu`, and its gradient is the same to the bit."""
    return _silu(x) if x.dtype == jnp.bfloat16 else jax.nn.silu(x)


@jax.custom_vjp
def _silu(x: jax.Array) -> jax.Array:
    return _forward(x)[0]


def _forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    s = jax.nn.sigmoid(x)
    return x * s, (x, s)


def _backward(residuals: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array]:
    x, s, g = (_rounded(a.astype(jnp.float32)) for a in (*residuals, g))
    slope = _rounded(s * _rounded(1.0 - s))
    return ((_rounded(g * s) + _rounded(_rounded(x * g) * slope)).astype(jnp.bfloat16),)


def _rounded(x: jax.Array) -> jax.Array:
    """To bfloat16, in float32; unlike two casts, XLA never leaves this out."""
    return jax.lax.reduce_precision(x, 8, 7)


_silu.defvjp(_forward, _backward)
