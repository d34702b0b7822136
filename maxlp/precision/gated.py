"""SiLU with a gradient that XLA for Hopper computes where it is quantized.

JAX's gradient ends in a sum of two bfloat16 terms. Its amax and its quantization are two kernels at first.
Computing the sum from its three operands in both moves as many bytes as writing it once in 16 bits and
reading it twice, so XLA writes it. (The gradient of the other factor has two operands.) In float32, rounded
to bfloat16 wherever JAX rounds, the sum is twice as large, so XLA computes it in both kernels instead, and
finally merges the two.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp


@runtime_checkable
class Gated(Protocol):
    """A module that multiplies by ``silu(gate_proj(x))``, where another activation may take its place."""

    gate_proj: Callable[..., jax.Array]
    silu: Callable[[jax.Array], jax.Array]


def silu(x: jax.Array) -> jax.Array:
    """`jax.nn.silu`, on Hopper GPUs by other operations: the same numbers, bit for bit."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = "" if device is None else device.device_kind
    is_hopper = kind.startswith(("NVIDIA H", "NVIDIA GH"))  # for a B200, XLA would write more
    return _silu(x) if is_hopper and x.dtype == jnp.bfloat16 else jax.nn.silu(x)


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
