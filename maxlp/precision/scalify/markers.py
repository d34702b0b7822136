"""Markers in a model that `scalify` acts on; in other programs they are identities.

They are named values (`jax.ad_checkpoint.checkpoint_name`), which JAX can differentiate, transform and
compile without further rules.
"""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

RESCALE = "scalify_rescale_l2"
FP8 = {f"scalify_{name}": name for name in ("float8_e4m3fn", "float8_e5m2")}  # marker → format


@jax.custom_vjp
def dynamic_rescale_l2_grad(x: jax.Array) -> jax.Array:
    """Returns ``x``, and rescales its gradient: under `scalify` the data gets a root mean square near 1.

    For the input of norms (Balança et al. 2024, arXiv:2407.17353, section 4).
    """
    return x


def _rescale_fwd(x):
    return x, None


def _rescale_bwd(_, g):
    return (checkpoint_name(g, RESCALE),)


dynamic_rescale_l2_grad.defvjp(_rescale_fwd, _rescale_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def fp8_dot_general(
    x: jax.Array, kernel: jax.Array, dimension_numbers: Any, preferred_element_type: Any
) -> jax.Array:
    """`nn.layers.dot_general`; under `scalify` of E4M3 inputs and kernels and E5M2 output gradients."""
    x, kernel = _e4m3(x), _e4m3(kernel)
    return jax.lax.dot_general(x, kernel, dimension_numbers, preferred_element_type=preferred_element_type)


def _dot_fwd(x, kernel, dimension_numbers, preferred_element_type):
    return fp8_dot_general(x, kernel, dimension_numbers, preferred_element_type), (x, kernel)


def _dot_bwd(dimension_numbers, preferred_element_type, saved, g):
    x, kernel = saved
    g = checkpoint_name(g.astype(x.dtype), "scalify_float8_e5m2")
    rows = tuple(range(x.ndim - 1))
    over_outputs, over_rows = (((g.ndim - 1,), (1,)), ((), ())), ((rows, rows), ((), ()))
    dx = jax.lax.dot_general(g, _e4m3(kernel), over_outputs, preferred_element_type=x.dtype)
    dkernel = jax.lax.dot_general(_e4m3(x), g, over_rows, preferred_element_type=kernel.dtype)
    return dx, dkernel


fp8_dot_general.defvjp(_dot_fwd, _dot_bwd)


def _e4m3(x: jax.Array) -> jax.Array:
    return checkpoint_name(x, "scalify_float8_e4m3fn")
