"""Smooth-SwiGLU (Fishman et al. 2024, arXiv:2409.12517): keeps the outliers of a gated product out of FP8.

SwiGLU is quadratic in a channel whose gate and up weights align, which happens in some channels after long
training. With a delayed scale for the whole product this channel then saturates, and with a current one the
other channels are flushed to zero. Here channels are divided by powers of two ``s`` before quantization,
and the rows of the down projection's kernel are multiplied by them. Without quantization the function and
every gradient would be unchanged bit for bit.

``s`` is computed from the product, in the ``dot_general`` of the down projection. The paper applies it to
the output of the up projection. A power of two gives the same at either place, and here models do not
depend on it. A channel has one ``s`` for all data-parallel devices; tensor parallelism shards the channels.

Which form helps, measured on the product of 1024 channels, one of them aligned, 512 tokens, E4M3
per tensor for product and kernel. Relative error of the contribution of the *other* channels to
the output (total error in brackets; "jump": the history is from before the channel aligned)::

    largest   none,     none,      channel,   balanced,  token,
    product   current   jump       jump       current    current
    1.2e1     0.037     0.037      0.037      0.038      0.037
    1.6e2     0.037     (0.57)     0.037      0.038      0.037
    2.5e3     0.038     (0.98)     0.037      0.038      0.037
    4.0e4     0.086     (1.00)     0.059      0.038      0.040
    6.4e5     0.66      (1.00)     0.71       0.038      0.17
    1.0e7     1.00      (1.00)     1.00       0.039      0.51

* ``channel``, the paper's: ``s = max |h_i|``. Nothing saturates, but the outlier moves into the kernel,
  whose scale must be current; beyond a spread of about 1e4 the other rows of the kernel are flushed to
  zero.
* ``balanced``: ``s = sqrt(max |h_i| / max |w_i|)`` shares the spread between product and kernel (as
  in SmoothQuant, Xiao et al. 2022, arXiv:2211.10438), both with current scales. It holds
  everywhere.
* ``token``: one factor per token, which the output is multiplied by. This is what the authors'
  published code does (there it is the maximum of the linear branch; here of the product, which is
  what is quantized). It evens out the magnitudes of tokens, not those of channels.

Shape letters: K channels of the product.
"""

import dataclasses

import jax
import jax.numpy as jnp

from maxlp import schema
from maxlp.numerics.scales import amax, ceil_power_of_two
from maxlp.precision.recipes import Operand, Recipe, SmoothForm

# Form → the tensors whose scales must be current, because their amax jumps with the factors.
_CURRENT = {"none": (), "channel": ("kernel",), "balanced": ("input", "kernel"), "token": ()}


def smooth(recipe: Recipe, form: str) -> Recipe:
    """The recipe of a down projection, with current scales where smoothing makes them jump.

    Raises:
      ValueError: a form that is no `SmoothForm`.
    """
    schema.check_value("smooth_swiglu", form, SmoothForm)

    def changed(tensor: str, operand: Operand) -> Operand:
        return dataclasses.replace(operand, delayed=operand.delayed and tensor not in _CURRENT[form])

    return recipe.with_operands(changed, smooth=form)


def factors(x: jax.Array, kernel: jax.Array, form: str) -> jax.Array:
    """The divisors of ``x`` (…, K), powers of two: float32 (K,), or (…, 1) for ``token``; 1 for zeros."""
    x, kernel = jax.lax.stop_gradient((x, kernel))
    if form == "token":
        return _power_of_two(amax(x, (x.ndim - 1,)), x.dtype)
    amax_K = amax(x, tuple(range(x.ndim - 1))).reshape(-1)
    return _power_of_two(amax_K, x.dtype) if form == "channel" else balanced(amax_K, kernel, x.dtype)


def balanced(amax_K: jax.Array, kernel: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The factors (…, K) of the form ``balanced``, for a kernel (…, K, N); float32."""
    return _power_of_two(jnp.sqrt(amax_K / amax(kernel, (kernel.ndim - 1,)).squeeze(-1)), dtype)


def _power_of_two(s: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``s`` rounded up, in the range in which ``dtype`` also has the inverse (in float16 up to 2^15)."""
    top = 2.0 ** min(60, jnp.finfo(dtype).maxexp - 1)
    usable = (s > 0) & jnp.isfinite(s)
    return ceil_power_of_two(jnp.where(usable, jnp.clip(s, 1 / top, top), 1.0))
