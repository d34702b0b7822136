"""Smooth-SwiGLU with constant factors folded into the weights, for inference in 8 bits.

In training the factors are computed from the data, and the weights do not contain them (`smooth_swiglu`). A
runtime that quantizes an exported model does not know them: one large channel of a gated product then makes
the scale of each token large, and int8 rounds the other channels to zero. So for inference constant factors
are folded into the weights (Fishman et al. 2024, arXiv:2409.12517, section 4.4)::

    (silu(x Wgate) * (x Wup)) Wdown  =  (silu(x Wgate) * (x Wup / s)) (s Wdown)

They are those of the form ``balanced``: ``s_i = sqrt(max |h_i| / max |w_i|)``, rounded up to a power of
two, so that the function stays the same bit for bit. ``h`` is the gated product, whose largest magnitudes
are measured on data, and ``w_i`` is row i of Wdown: the spread of the channels is shared between them.

Shape letters: F channels.
"""

import fnmatch
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp.nn.layers import dot_general
from maxlp.numerics.scales import amax
from maxlp.precision.inject import matmuls
from maxlp.precision.smooth_swiglu import balanced


class ChannelAmax(nnx.Variable):
    """float32 (…, F): the largest magnitude of each channel of an input in all calls so far."""


class _WatchingDot(nnx.Module):
    """`nn.layers.dot_general` that also writes the `ChannelAmax` of its input."""

    def __init__(self, kernel_shape: tuple[int, ...]):
        self.amax = ChannelAmax(jnp.zeros(kernel_shape[:-1], jnp.float32))

    def __call__(
        self,
        x: jax.Array,
        kernel: jax.Array,
        dimension_numbers: Any,
        preferred_element_type: Any,
        shared: dict | None = None,
    ) -> jax.Array:
        amax_F = amax(x, tuple(range(x.ndim - 1))).reshape(-1)
        self.amax[...] = jnp.maximum(self.amax[...], amax_F)
        return dot_general(x, kernel, dimension_numbers, preferred_element_type)


def watch(model: nnx.Module, gated_products: Sequence[str]) -> list[str]:
    """Makes the layers of an unquantized model whose paths match the patterns write a `ChannelAmax`.

    Returns:
      their paths.
    """
    found = []
    for path, module in matmuls(model):
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in gated_products):
            module.dot_general = nnx.data(_WatchingDot(module.kernel.shape))
            found.append(path)
    return found


def folded(params: dict, model_state: dict, paths: Sequence[str]) -> dict:
    """The parameters with the factors folded into the kernels of ``up_proj`` and ``down_proj``.

    Args:
      params, model_state: of the model after `watch` and some calls.
      paths: the result of `watch`: each a ``down_proj``, beside which is an ``up_proj`` without a bias.
    """
    flatten = nnx.traversals.flatten_mapping
    flat, state = flatten(params, sep="/"), flatten(model_state, sep="/")
    for path in paths:
        up, down = f"{path.rpartition('/')[0]}/up_proj/kernel", f"{path}/kernel"
        s_F = balanced(state[f"{path}/dot_general/amax"], flat[down], flat[down].dtype)
        flat[up], flat[down] = fold(flat[up], flat[down], s_F)
    return nnx.traversals.unflatten_mapping(flat, sep="/")


def fold(up_kernel: jax.Array, down_kernel: jax.Array, s_F: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Kernels (…, D, F) and (…, F, D) with factors (…, F) folded in, which cancel in their product."""
    s_F = s_F.astype(up_kernel.dtype)
    return up_kernel / s_F[..., None, :], down_kernel * s_F[..., :, None]
