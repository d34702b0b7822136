"""SiLU with a gradient that XLA for Hopper GPUs fuses with its quantization.

The amax of a gradient and its quantization are two kernels at first. The gradient of SiLU ends in a sum
that is made from three operands. If the sum is bfloat16, as JAX computes it, writing it once and reading it
twice moves as many bytes as computing it in both kernels, and XLA writes it. If it is float32, it is twice
as large: XLA computes it in both kernels instead, and finally merges the two. So here it is float32,
rounded to bfloat16 wherever JAX rounds. (The gradient of the other factor of a SwiGLU has two operands.)
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
    """`jax.nn.silu`, bit for bit, on Hopper GPUs with the gradient that is described above."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = "" if device is None else device.device_kind
    is_hopper = kind.startswith(("NVIDIA H", "NVIDIA GH"))  # on a B200, XLA would write more to memory
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
    """float32 rounded to bfloat16, still as float32; unlike a pair of casts, XLA never drops this."""
    return jax.lax.reduce_precision(x, 8, 7)


_silu.defvjp(_forward, _backward)
