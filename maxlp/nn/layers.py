"""Layers that Llama and CLIP share. Each parameter names its axes; ``maxlp.sharding`` places them.

Shape letters: B batch · S query length · T key length · D embed · F mlp · N query heads · K kv heads ·
H head dim · V vocab · L layers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxlp.parallel import pipeline as pipelines
from maxlp.parallel.pipeline import Pipeline
from maxlp.parallel.sharding import constrain

Axes = tuple[str | None, ...]
Draw = Callable[[jax.Array, tuple[int, ...]], jax.Array]

LINEAR_OUTPUT = "linear_output"  # names for remat policies
BLOCK_INPUT = "block_input"


def param(value: jax.Array, axes: Axes) -> nnx.Param:
    """A parameter whose dims have these logical names (no mesh is needed to create it)."""
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)


def truncated_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """float32 draws of a normal distribution, none beyond three deviations."""
    return jax.random.truncated_normal(key, -3, 3, shape, jnp.float32)


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32)


def uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """float32 draws with mean 0 and variance 1."""
    return jax.random.uniform(key, shape, jnp.float32, -(3**0.5), 3**0.5)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dot_general(
    x: jax.Array, kernel: jax.Array, dimension_numbers: Any, preferred_element_type: Any
) -> jax.Array:
    """``jax.lax.dot_general`` of an input's last axis with a kernel's first, with gradients of its own.

    They are the same up to rounding. JAX writes the kernel's gradient as (gᵀ x)ᵀ, which takes XLA twice as
    long on CPUs as xᵀ g; and after a float32 result of bfloat16 operands (the logits) it would multiply in
    float32, where this rounds g to the dtype of the operands, as for every other matmul.
    """
    return jax.lax.dot_general(x, kernel, dimension_numbers, preferred_element_type=preferred_element_type)


def _dot_general_fwd(x, kernel, dimension_numbers, preferred_element_type):
    return dot_general(x, kernel, dimension_numbers, preferred_element_type), (x, kernel)


def _dot_general_bwd(dimension_numbers, preferred_element_type, saved, g):
    x, kernel = saved
    g = g.astype(x.dtype)
    rows = tuple(range(x.ndim - 1))
    dx = jax.lax.dot_general(g, kernel, (((g.ndim - 1,), (1,)), ((), ())), preferred_element_type=x.dtype)
    dkernel = jax.lax.dot_general(x, g, ((rows, rows), ((), ())), preferred_element_type=kernel.dtype)
    return dx, dkernel


dot_general.defvjp(_dot_general_fwd, _dot_general_bwd)


def _last_with_first(x: jax.Array) -> Any:
    return ((x.ndim - 1,), (0,)), ((), ())


class Linear(nnx.Module):
    """``y = x @ kernel + bias``: every matmul with a weight goes through here.

    The kernel is ``std`` times what ``draw`` draws. ``bias`` names the axis of the bias (None: there is
    none), which is drawn uniformly with deviation ``bias_std``. ``dot_general`` is where precision enters:
    any callable with the signature of ``jax.lax.dot_general``, or an NNX module with that ``__call__``
    which then keeps its state here.
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
        self.bias = (
            None
            if bias is None
            else param((bias_std * uniform(rngs.params(), (out_dim,))).astype(param_dtype), (bias,))
        )
        self.dtype = dtype
        self.dot_general: Callable[..., jax.Array] = dot_general

    def __call__(self, x: jax.Array, preferred_element_type: Any = None) -> jax.Array:
        """``(..., in) -> (..., out)`` in ``dtype``, or in ``preferred_element_type``."""
        y = self.dot_general(
            x.astype(self.dtype),
            self.kernel[...].astype(self.dtype),
            _last_with_first(x),
            preferred_element_type=preferred_element_type or self.dtype,
        )
        if self.bias is not None:
            y += self.bias[...].astype(y.dtype)
        return checkpoint_name(y, LINEAR_OUTPUT)


class Embed(nnx.Module):
    """A table of V vectors: looked up on the way in and, when tied, the kernel of the logits."""

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
        # The ids of all rows come to each part of the table, and what was looked up goes to its row. Left
        # alone, XLA moves the table, or copies the looked-up activations to every device.
        ids_BS = constrain(ids_BS, "lookup", "lookup_seq")
        x_BSD = jnp.take(self.embedding[...].astype(self.dtype), ids_BS, axis=0)
        return constrain(x_BSD, "lookup", "lookup_seq", "embed")

    def attend(self, x_BSD: jax.Array) -> jax.Array:
        """float32 logits over the table's rows."""
        table_DV = self.embedding[...].astype(self.dtype).T
        return dot_general(x_BSD, table_DV, _last_with_first(x_BSD), jnp.float32)


class RMSNorm(nnx.Module):
    """``x / rms(x) * scale``, computed in float32 (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, dim: int, *, eps: float, param_dtype: jnp.dtype):
        self.scale = param(jnp.ones((dim,), param_dtype), ("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return (x32 * inverse_rms * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """``(x - mean(x)) / std(x) * scale + bias``, computed in float32 (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, dim: int, *, eps: float, param_dtype: jnp.dtype):
        self.scale = param(jnp.ones((dim,), param_dtype), ("norm",))
        self.bias = param(jnp.zeros((dim,), param_dtype), ("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 -= jnp.mean(x32, axis=-1, keepdims=True)
        inverse_std = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        scale, bias = self.scale[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        return (x32 * inverse_std * scale + bias).astype(x.dtype)


class LayerScale(nnx.Module):
    """``x * scale``: a learned gain for each channel of a residual branch (Touvron et al. 2021,
    arXiv:2103.17239). It starts small, or at zero as in Wortsman et al. 2023 (arXiv:2304.13013)."""

    def __init__(self, dim: int, value: float, *, param_dtype: jnp.dtype):
        self.scale = param(jnp.full((dim,), value, param_dtype), ("norm",))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale[...].astype(x.dtype)


# --- many blocks as one -------------------------------------------------------------------------------

_policies = jax.checkpoint_policies
REMAT_POLICIES: dict[str, Callable[..., bool] | None] = {
    "none": None,  # keep every activation
    "block": _policies.nothing_saveable,  # keep the input of a block, recompute the rest
    "dots": _policies.save_only_these_names(LINEAR_OUTPUT),  # keep the outputs of the weight matmuls
    "offload": _policies.save_and_offload_only_these_names(  # as block, the inputs wait in host memory
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
# What a tick of a pipeline keeps besides, so that only its choice of weights is repeated.
_TICK_POLICIES = {
    "block": _policies.save_only_these_names(BLOCK_INPUT),
    "dots": _policies.save_only_these_names(BLOCK_INPUT, LINEAR_OUTPUT),
    "offload": REMAT_POLICIES["offload"],
}


def stack(make_block: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """``num_layers`` blocks as one module whose leaves have a leading ``layers`` axis.

    Its ``plain_ends`` (first, last) are numbers of blocks at either end whose `Linear` layers use plain
    `dot_general`, whatever was put in its place.
    """
    vmapped = nnx.vmap(make_block, transform_metadata={nnx.PARTITION_NAME: "layers"})
    blocks = vmapped(rngs.split(num_layers))
    blocks.plain_ends = (0, 0)
    return blocks


def apply_stack(
    blocks: nnx.Module,
    x: jax.Array,
    call: Callable[[Any, jax.Array, Any, Any], tuple[jax.Array, Any]],
    per_row: Any = None,
    per_layer: Any = None,
    *,
    num_layers: int,
    scan: bool,
    remat: str,
    pipeline: Pipeline | None = None,
) -> tuple[jax.Array, Any]:
    """Sends ``x`` through stacked blocks: ``x, out = call(block, x, per_row, per_layer[i])`` for layer i.

    One scanned body keeps compile time independent of depth; the unrolled form is for debugging and for
    small models. Whatever state the blocks change (FP8 scales) is written back to ``blocks``.

    On a mesh with stages the blocks run as a pipeline, unless there is something ``per_layer`` (the cache
    of generation) or the batch does not divide into microbatches.

    Args:
      per_row: arrays with the batch axis of ``x`` in front; in a pipeline a call gets its microbatch's.
      per_layer: arrays with the layers axis in front.
      pipeline: how, on a mesh with stages.

    Returns:
      ``x`` after the last block, and the stacked ``out`` of all blocks (None from a pipeline).
    """
    graphdef, params, state = nnx.split(blocks, nnx.Param, ...)

    def layer(x: jax.Array, params: Any, state: Any, rows: Any, at: Any, plain=False) -> tuple[Any, Any]:
        block = nnx.merge(graphdef, params, state)
        x = checkpoint_name(x, BLOCK_INPUT)
        x, out = call(_plain(block) if plain else block, x, rows, at)
        return x, (state if plain else nnx.state(block, nnx.Not(nnx.Param)), out)

    schedule = (pipeline or Pipeline()).in_mesh(x.shape[0]) if per_layer is None else None
    if schedule is not None:
        assert blocks.plain_ends == (0, 0), "checked with the config"

        def of_microbatch(x: jax.Array, params: Any, state: Any, rows: Any) -> tuple[jax.Array, Any]:
            x, (state, _) = layer(x, params, state, rows, None)
            return x, state

        x, new_state = pipelines.run(
            of_microbatch,
            x,
            per_row,
            params,
            state,
            schedule=schedule,
            remat=_remat(REMAT_POLICIES, remat),
            remat_tick=_remat(_TICK_POLICIES, remat),
        )
        outs = None
    elif scan and num_layers > 1 and blocks.plain_ends == (0, 0):
        body = _remat(REMAT_POLICIES, remat)(lambda x, at: layer(x, at[0], at[1], per_row, at[2]))
        x, (new_state, outs) = jax.lax.scan(body, x, (params, state, per_layer))
    else:

        def of_part(x: jax.Array, params: Any, rest: Any, plain: bool) -> tuple[jax.Array, Any]:
            return layer(x, params, rest[0], per_row, rest[1], plain)

        first, last = blocks.plain_ends
        cuts = (0, first, num_layers - last, num_layers)
        x, (new_state, outs) = _in_parts(of_part, x, params, (state, per_layer), cuts, scan, remat)
    nnx.update(blocks, new_state)
    return x, outs


def _in_parts(
    layer: Callable, x: jax.Array, params: Any, rest: Any, cuts: Any, scan: bool, remat: str
) -> Any:
    """The plain ends of a stack and what is between them, as loops of their own.

    (A condition inside one loop would stop a GPU at every layer to ask, and keep the activations of both
    branches.) A part that is cut out of the stacked weights would be a copy of them, and the gradients of
    the parts would be joined in yet another. So every loop reads from the whole stacks; and these pass
    through all loops once more, unchanged, for their gradient alone: backwards it is one buffer, into which
    each layer writes its own. (To stacks that a loop only reads, JAX adds a gradient of the whole size in
    every iteration.)
    """
    carry, outs = (x, params), []
    for start, stop, plain in zip(cuts[:-1], cuts[1:], (True, False, True), strict=True):
        if start == stop:
            continue

        def at_index(x: jax.Array, i: Any, taken: Any, rest: Any, plain=plain) -> tuple[jax.Array, Any]:
            # What is recomputed reads the layer itself, so that it keeps an index, and not the layer.
            here = jax.tree.map(lambda stack: _index(stack, i), jax.lax.stop_gradient(params))
            return layer(x, jax.tree.map(_with_gradient_of, here, taken), rest, plain)

        scanned = scan and stop - start > 1
        at_index = _remat(REMAT_POLICIES, remat, prevent_cse=not scanned)(at_index)

        def body(carry: Any, at: Any, at_index=at_index) -> tuple[Any, Any]:
            (x, stacks), (i, rest) = carry, at
            stacks, taken = _take(stacks, i)
            x, out = at_index(x, i, taken, rest)
            return (x, stacks), out

        part = jnp.arange(start, stop), jax.tree.map(lambda leaf, s=slice(start, stop): leaf[s], rest)
        carry, out = (jax.lax.scan if scanned else _unrolled)(body, carry, part)
        outs.append(out)
    return carry[0], jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outs)


def _unrolled(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
    """`jax.lax.scan` without a loop."""
    ys = []
    for i in range(len(jax.tree.leaves(xs)[0])):
        carry, y = body(carry, jax.tree.map(lambda leaf, i=i: leaf[i], xs))
        ys.append(y)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *ys)


@jax.custom_vjp
def _take(stacks: Any, i: Any) -> tuple[Any, Any]:
    """The stacks, and layer i of them. Each may be taken once: its gradient is written, not added."""
    return stacks, jax.tree.map(lambda stack: _index(stack, i), stacks)


def _take_bwd(i: Any, gradients: tuple[Any, Any]) -> tuple[Any, None]:
    write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
    return jax.tree.map(write, *gradients), None


_take.defvjp(lambda stacks, i: (_take(stacks, i), i), _take_bwd)


@jax.custom_jvp
def _with_gradient_of(value: jax.Array, other: jax.Array) -> jax.Array:
    """``value``, whose gradient goes to ``other``."""
    return value


_with_gradient_of.defjvp(lambda primals, tangents: (primals[0], tangents[1]))


def _index(stack: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)


def _remat(policies: dict, name: str, prevent_cse: bool = False) -> Callable[[Callable], Callable]:
    if name == "none":
        return lambda function: function
    return functools.partial(jax.checkpoint, policy=policies[name], prevent_cse=prevent_cse)


def _plain(block: nnx.Module) -> nnx.Module:
    for _, module in nnx.iter_modules(block):
        if isinstance(module, Linear):
            module.dot_general = nnx.static(dot_general)
    return block
