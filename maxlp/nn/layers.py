"""Layers shared by all families.

Each parameter names its logical axes, which `parallel.sharding` maps to the mesh.

Shape letters: B batch · S length · D embed · V vocab.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxlp.parallel.sharding import constrain, lookup

Axes = tuple[str | None, ...]
Draw = Callable[[jax.Array, tuple[int, ...]], jax.Array]
# (product, *operands) to product(*operands), a kernel's gradient: a sum over the rows of the global batch.
SumOverRows = Callable[..., jax.Array]

DTYPES = ("float32", "bfloat16", "float16")  # that models compute in and store
LINEAR_OUTPUT = "linear_output"  # a name for remat policies


class Frozen(nnx.Variable):
    """A parameter that is not trained: it has no gradient and no optimizer state (`nn.lora`)."""


def param(value: jax.Array, axes: Axes) -> nnx.Param:
    """A parameter whose dims have these logical names; creating it needs no mesh."""
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)


def truncated_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """float32 draws from a standard normal distribution, truncated at three standard deviations."""
    return jax.random.truncated_normal(key, -3, 3, shape, jnp.float32)


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """float32 draws from a standard normal distribution."""
    return jax.random.normal(key, shape, jnp.float32)


def uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """float32 draws from a uniform distribution with mean 0 and variance 1."""
    return jax.random.uniform(key, shape, jnp.float32, -(3**0.5), 3**0.5)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def dot_general(
    x: jax.Array, kernel: jax.Array, dimension_numbers: Any, preferred_element_type: Any,
    sum_over_rows: SumOverRows | None = None,
) -> jax.Array:  # fmt: skip
    """``jax.lax.dot_general`` of an input's last axis and a kernel's first, with a VJP of its own.

    Its gradients equal JAX's up to rounding. JAX computes the kernel's gradient as (gᵀ x)ᵀ, which takes XLA
    on CPUs twice as long as xᵀ g. If bfloat16 operands give a float32 result (the logits), JAX also
    multiplies the gradient in float32; here it is rounded to the dtype of the operands, as in every
    other matmul.

    A kernel of another dtype than the input is cast to that of the input; its gradient keeps its own.
    """
    kernel = kernel.astype(x.dtype)
    return jax.lax.dot_general(x, kernel, dimension_numbers, preferred_element_type=preferred_element_type)


def _dot_general_bwd(dimension_numbers, preferred_element_type, sum_over_rows, saved, g):
    x, kernel = saved
    g = g.astype(x.dtype)
    rows = tuple(range(x.ndim - 1))
    over_outputs = ((g.ndim - 1,), (1,)), ((), ())
    dx = jax.lax.dot_general(g, kernel.astype(x.dtype), over_outputs, preferred_element_type=x.dtype)
    how = dict(dimension_numbers=((rows, rows), ((), ())), preferred_element_type=kernel.dtype)
    product = functools.partial(jax.lax.dot_general, **how)
    return dx, product(x, g) if sum_over_rows is None else sum_over_rows(product, x, g)


dot_general.defvjp(lambda *args: (dot_general(*args), args[:2]), _dot_general_bwd)


def _last_with_first(x: jax.Array) -> Any:
    """Dimension numbers that contract the last axis of ``x`` with the first one of a kernel."""
    return ((x.ndim - 1,), (0,)), ((), ())


def logits(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """float32 ``x @ kernel``, see `dot_general`."""
    return dot_general(x, kernel, _last_with_first(x), jnp.float32)


def add_parameter(x: jax.Array, value: jax.Array) -> jax.Array:
    """``x + value`` in the dtype of x, broadcast over leading axes; added and differentiated in float32."""
    value = jnp.expand_dims(value.astype(jnp.float32), range(x.ndim - value.ndim))
    return _with_stored_gradient((x.astype(jnp.float32) + value).astype(x.dtype))


@jax.custom_vjp
def _with_stored_gradient(x: jax.Array) -> jax.Array:
    """``x``, whose gradient is materialized before anything reads it.

    Otherwise XLA for GPUs fuses it with its sum over rows (of a bias), which writes two more arrays of the
    MLP's width: a CLIP b32 took 5.50 instead of 4.91 GiB (8,192 pairs on 8 H100, compiled).
    """
    return x


_with_stored_gradient.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.optimization_barrier(g),))


def over_last_dim(vector: jax.Array, x: jax.Array) -> jax.Array:
    """A vector (D,) as (1, …, 1, D), of the rank of ``x``, so that nothing is promoted implicitly."""
    return jnp.expand_dims(vector, range(x.ndim - 1))


FOR_ADAPTERS = "for adapters"  # in ``shared`` of `apply_to_same_input`: the input that adapters read


class Linear(nnx.Module):
    """``y = x @ kernel + bias``: every matmul with a weight goes through here.

    Precision is injected by replacing the attribute ``dot_general`` with any callable of the signature
    of ``jax.lax.dot_general``, or with an NNX module that has such a ``__call__``; its state is then
    part of this module, and it also takes ``shared`` of `apply_to_same_input`. An ``adapter``, if set, adds
    its output to that of the matmul (`nn.lora`). ``sum_over_rows``, if set, is a keyword of ``dot_general``
    and computes the gradient of the kernel, summed over devices (`precision.scatter`).

    Args:
      in_dim, out_dim: the sizes of the kernel.
      axes: its logical axes.
      std: standard deviation of the initial kernel.
      dtype: of the matmul and its result.
      param_dtype: of the stored parameters.
      draw: draws the initial kernel with standard deviation 1.
      bias: the logical axis of the bias; None for no bias.
      bias_std: standard deviation of the initial bias, which is uniform.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        axes: Axes,
        std: float,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
        draw: Draw = truncated_normal,
        bias: str | None = None,
        bias_std: float = 0.0,
    ):
        kernel = std * draw(rngs.params(), (in_dim, out_dim))
        self.kernel = param(kernel.astype(param_dtype), axes)
        bias_param = None
        if bias is not None:
            bias_param = param((bias_std * uniform(rngs.params(), (out_dim,))).astype(param_dtype), (bias,))
        self.bias = bias_param  # one assignment: NNX decides at the first one whether this holds data
        self.dtype = dtype
        self.dot_general: Callable[..., jax.Array] = dot_general
        self.adapter: Callable[[jax.Array], jax.Array] | None = None
        self.sum_over_rows: SumOverRows | None = None

    def __call__(
        self, x: jax.Array, preferred_element_type: Any = None, shared: dict | None = None
    ) -> jax.Array:
        """``(..., in) -> (..., out)`` in ``dtype``, or in ``preferred_element_type``.

        Args:
          shared: the dict of `apply_to_same_input`, the same for all layers that it calls.
        """
        dot_general = self.dot_general
        if isinstance(dot_general, nnx.Module):
            dot_general = functools.partial(dot_general, shared=shared)
        if self.sum_over_rows is not None:
            dot_general = functools.partial(dot_general, sum_over_rows=self.sum_over_rows)
        y = dot_general(
            x.astype(self.dtype),
            self.kernel[...].astype(self.dtype),
            _last_with_first(x),
            preferred_element_type=preferred_element_type or self.dtype,
        )
        if self.bias is not None:
            y = add_parameter(y, self.bias[...])
        if self.adapter is not None:
            y += self.adapter(x if shared is None else shared[FOR_ADAPTERS]).astype(y.dtype)
        return checkpoint_name(y, LINEAR_OUTPUT)


def apply_to_same_input(x: jax.Array, *linears: Linear) -> list[jax.Array]:
    """The output of each layer for the same ``x``, which quantized ``dot_general``s quantize only once.

    The gradients of ``x`` from all adapters are added first, and then to those from the kernels. With a
    tensor axis, the latter are partial sums, which XLA adds on each device before it reduces them over the
    devices. Those from adapters are complete: one of them in between would split that into two reductions.
    """
    # Read first, because JAX adds gradients in the reverse order of what reads ``x``.
    shared: dict = {FOR_ADAPTERS: _with_own_gradient(x)}
    return [linear(x, shared=shared) for linear in linears]


@jax.custom_vjp
def _with_own_gradient(x: jax.Array) -> jax.Array:
    """``x``; the gradients of what reads the result are added up before they join others of ``x``."""
    return x


_with_own_gradient.defvjp(lambda x: (x, None), lambda _, g: (g,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def take_rows(num_rows: int, table_VD: jax.Array, ids_BS: jax.Array) -> jax.Array:
    """Rows of a table (V, D) with V = ``num_rows``; the gradients of a row are summed in float32.

    JAX adds them one by one in the table's dtype: in bfloat16, the sum of 4,096 ones stops at 256.
    """
    return lookup(table_VD, ids_BS)


def _take_rows_bwd(num_rows, ids_BS, g_BSD):
    sums_VD = jnp.zeros((num_rows, g_BSD.shape[-1]), jnp.float32).at[ids_BS].add(g_BSD.astype(jnp.float32))
    return sums_VD.astype(g_BSD.dtype), None


take_rows.defvjp(lambda *args: (take_rows(*args), args[-1]), _take_rows_bwd)


class Embed(nnx.Module):
    """A table of V vectors, looked up at the input; if tied, also the kernel of the logits."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        std: float,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        table = std * jax.random.normal(rngs.params(), (vocab_size, dim), jnp.float32)
        self.embedding = param(table.astype(param_dtype), ("vocab", "embed"))
        self.dtype = dtype

    def __call__(self, ids_BS: jax.Array) -> jax.Array:
        # Each shard of the table gets the ids of all rows, and its vectors are sent to the devices of those
        # rows, over one mesh axis after the other. By default XLA moves the table, and over two axes at
        # once it copies the vectors to every device.
        ids_BS = constrain(ids_BS, "lookup", "lookup_seq")
        table_VD = self.embedding[...].astype(self.dtype)
        x_BSD: jax.Array = take_rows(table_VD.shape[0], table_VD, ids_BS)
        x_BSD = constrain(x_BSD, "lookup", "lookup_seq", "embed")
        x_BSD = constrain(x_BSD, "lookup", "sent_seq", "sent_embed")
        return constrain(x_BSD, "lookup", "embed_seq", "sent_embed")

    def attend(self, x_BSD: jax.Array) -> jax.Array:
        """float32 logits over the table's rows."""
        return logits(x_BSD, self.embedding[...].astype(self.dtype).T)


def unmarked(x: jax.Array) -> jax.Array:
    """``x``. In norms, `precision.scalify` replaces this with a function that rescales the gradient."""
    return x


class RMSNorm(nnx.Module):
    """``x / rms(x) * scale``, computed in float32 (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, dim: int, *, eps: float, param_dtype: jnp.dtype):
        self.scale = param(jnp.ones((dim,), param_dtype), ("norm",))
        self.eps = eps
        self.mark_input = unmarked

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = self.mark_input(x).astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        scale = over_last_dim(self.scale[...].astype(jnp.float32), x)
        return (x32 * inverse_rms * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """``(x - mean(x)) / std(x) * scale + bias``, computed in float32 (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, dim: int, *, eps: float, param_dtype: jnp.dtype):
        self.scale = param(jnp.ones((dim,), param_dtype), ("norm",))
        self.bias = param(jnp.zeros((dim,), param_dtype), ("norm",))
        self.eps = eps
        self.mark_input = unmarked

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = self.mark_input(x).astype(jnp.float32)
        x32 -= jnp.mean(x32, axis=-1, keepdims=True)
        inverse_std = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        scale, bias = (over_last_dim(p[...].astype(jnp.float32), x) for p in (self.scale, self.bias))
        return (x32 * inverse_std * scale + bias).astype(x.dtype)


class LayerScale(nnx.Module):
    """``x * scale``: a learned gain for each channel of a residual branch.

    Touvron et al. 2021 (arXiv:2103.17239) start it small, Wortsman et al. 2023 (arXiv:2304.13013) at zero.
    """

    def __init__(self, dim: int, value: float, *, param_dtype: jnp.dtype):
        self.scale = param(jnp.full((dim,), value, param_dtype), ("norm",))

    def __call__(self, x: jax.Array) -> jax.Array:
        # In float32, so that the gradient of the scale is summed over tokens in float32 too.
        scale = over_last_dim(self.scale[...].astype(jnp.float32), x)
        return (x.astype(jnp.float32) * scale).astype(x.dtype)
