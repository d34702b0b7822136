"""Blocks stacked over layers: one scanned body, so that compile time does not grow with depth."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxlp.nn.attention import RESIDUALS
from maxlp.nn.layers import LINEAR_OUTPUT, Frozen, Linear, dot_general
from maxlp.parallel.schedule import PipelineConfig, Schedule

IS_STATE = nnx.Not(nnx.Any(nnx.Param, Frozen))  # the variables that a forward pass may change

BLOCK_INPUT = "block_input"  # a name for remat policies

_policies = jax.checkpoint_policies
REMAT_POLICIES: dict[str, Callable[..., bool] | None] = {
    "none": None,  # keep every activation
    "block": _policies.nothing_saveable,  # keep the input of a block, recompute the rest
    # keep the outputs of the weight matmuls, and what a kernel of attention needs in its backward pass
    "dots": _policies.save_only_these_names(LINEAR_OUTPUT, RESIDUALS),
    "offload": _policies.save_and_offload_only_these_names(  # like "block", with the inputs in host memory
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
# What a tick of a pipeline saves: what its layers save, so that the backward pass recomputes
# nothing but the selection of the weights of a round.
_TICK_POLICIES = {
    "block": _policies.save_only_these_names(BLOCK_INPUT),
    "dots": _policies.save_only_these_names(BLOCK_INPUT, LINEAR_OUTPUT, RESIDUALS),
    "offload": REMAT_POLICIES["offload"],
}


class Part(NamedTuple):
    """Consecutive blocks of a stack whose matmuls are alike.

    Attributes:
      start, stop: the layers.
      plain: paths, inside a block, of the `Linear` layers that use plain `dot_general` here, whatever
        replaced it.
    """

    start: int
    stop: int
    plain: frozenset[str] = frozenset()


class StackCall(NamedTuple):
    """A call of `apply_stack`, as `Block.run_stack` receives it.

    Attributes:
      blocks: the stacked module.
      x: the input of the first block.
      parts: all layers, in order.
      layer: (x, params, state, plain) of one layer to (x, new state). params and state are pure dicts, the
        layer's slices of the blocks' `nnx.Param` and of their other variables; plain is that of its `Part`.
    """

    blocks: "Block"
    x: jax.Array
    parts: tuple[Part, ...]
    layer: Callable[[jax.Array, dict, dict, frozenset[str]], tuple[jax.Array, dict]]


class Block(nnx.Module):
    """Base class of the blocks of a stack.

    Attributes:
      parts: all layers, in order; empty where they are alike.
      run_stack: if set, `apply_stack` calls it to compute the output of the whole stack, returns no
        per-layer results and writes no state. This is how a train step takes over the backward pass
        of a stack (`core.fused_backward`).
    """

    parts: tuple[Part, ...] = ()
    run_stack: Callable[[StackCall], jax.Array] | None = None


def path_name(path: tuple[Any, ...]) -> str:
    """The path of a module as text, such as ``layers/attn/q_proj``."""
    return "/".join(map(str, path))


def find_stacks(model: nnx.Module) -> dict[str, Block]:
    """The stacks of a model by `path_name`."""
    return {path_name(path): m for path, m in nnx.iter_modules(model) if isinstance(m, Block)}


def count_layers(blocks: Block) -> int:
    """The number of layers of a stack, the first dim of its parameters."""
    return jax.tree.leaves(nnx.state(blocks, nnx.Param))[0].shape[0]


def index_layer(stacks: Any, i: Any) -> Any:
    """Layer i (an int or an int scalar) of a tree of arrays (L, …)."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), stacks)


def stack(make_block: Callable[[nnx.Rngs], Block], num_layers: int, rngs: nnx.Rngs) -> Any:
    """``num_layers`` blocks as one module, whose variables have a leading ``layers`` axis."""
    vmapped = nnx.vmap(make_block, transform_metadata={nnx.PARTITION_NAME: "layers"})
    return vmapped(rngs.split(num_layers))


def apply_stack(
    blocks: Block,
    x: jax.Array,
    call: Callable[[Any, jax.Array, Any, Any], tuple[jax.Array, Any]],
    per_row: Any = None,
    per_layer: Any = None,
    *,
    num_layers: int,
    scan: bool,
    remat: str,
    pipeline: PipelineConfig | None = None,
) -> tuple[jax.Array, Any]:
    """Runs stacked blocks: ``x, out = call(block, x, per_row, per_layer[i])`` for each layer i.

    State that the blocks change (FP8 scales) is written back to ``blocks``.

    On a mesh with stages the blocks run as a pipeline, unless ``per_layer`` is given (the cache of
    generation) or the batch does not divide into microbatches.

    Args:
      per_row: arrays with the batch axis of ``x`` first; in a pipeline, a call gets the rows of its
        microbatch.
      per_layer: arrays with the layers axis first.
      num_layers: L.
      scan: True scans over the layers, so that compile time does not grow with depth. False unrolls
        the loop, for debugging and for small models. A pipeline scans in any case.
      remat: a key of `REMAT_POLICIES`.
      pipeline: the schedule on a mesh with stages.

    Returns:
      ``x`` after the last block, and the stacked ``out`` of all blocks (None from a pipeline).
    """
    graphdef, params, frozen, state = nnx.split(blocks, nnx.Param, Frozen, ...)
    parts = blocks.parts or (Part(0, num_layers),)

    def layer(
        x: jax.Array,
        params: Any,
        frozen: Any,
        state: Any,
        rows: Any,
        extra: Any,
        plain: frozenset[str] = frozenset(),
    ) -> Any:
        block = nnx.merge(graphdef, params, frozen, state)
        x = checkpoint_name(x, BLOCK_INPUT)
        x, out = call(_without_quantization(block, plain) if plain else block, x, rows, extra)
        new = nnx.state(block, IS_STATE)
        return x, (nnx.merge_state(state, new) if plain else new, out)

    if blocks.run_stack is not None:

        def layer_of_call(
            x: jax.Array, params: dict, state: dict, plain: frozenset[str]
        ) -> tuple[jax.Array, dict]:
            x, (new, _) = layer(x, params, nnx.State({}), state, per_row, None, plain)
            return x, nnx.to_pure_dict(new)

        return blocks.run_stack(StackCall(blocks, x, parts, layer_of_call)), None

    outs, alike = None, not any(part.plain for part in parts)
    schedule = _pipeline_schedule(pipeline, len(x)) if per_layer is None else None
    if schedule is not None:
        assert alike, "see run.constraints"
        x, new_state = _in_pipeline(layer, x, per_row, (params, frozen), state, schedule, remat)
    elif scan and num_layers > 1 and alike:

        def body(x: jax.Array, of_layer: tuple) -> tuple[jax.Array, Any]:
            params, frozen, state, extra = of_layer
            return layer(x, params, frozen, state, per_row, extra)

        body = _remat(REMAT_POLICIES, remat)(body)
        x, (new_state, outs) = jax.lax.scan(body, x, (params, frozen, state, per_layer))
    else:

        def layer_of_part(
            x: jax.Array, i: Any, params: Any, rest: Any, plain: frozenset[str]
        ) -> tuple[jax.Array, Any]:
            return layer(x, params, index_layer(frozen, i), rest[0], per_row, rest[1], plain)

        x, (new_state, outs) = _in_parts(layer_of_part, x, params, (state, per_layer), parts, scan, remat)
    nnx.update(blocks, new_state)
    return x, outs


def _pipeline_schedule(pipeline: PipelineConfig | None, batch_size: int) -> Schedule | None:
    """The schedule on the current mesh; None without stages, or if it does not divide the batch."""
    stages = jax.sharding.get_abstract_mesh().shape.get("stage", 1)
    if stages == 1:
        return None
    schedule = (pipeline or PipelineConfig()).schedule(stages)
    return None if batch_size % schedule.microbatches else schedule


def _in_pipeline(
    layer: Callable, x: jax.Array, per_row: Any, weights: Any, state: Any, schedule: Schedule, remat: str
) -> tuple[jax.Array, Any]:
    from maxlp.parallel import pipeline  # only meshes with stages need it

    def layer_of_microbatch(x: jax.Array, weights: Any, state: Any, rows: Any) -> tuple[jax.Array, Any]:
        x, (state, _) = layer(x, *weights, state, rows, None)
        return x, state

    return pipeline.run(
        layer_of_microbatch,
        x,
        per_row,
        weights,
        state,
        schedule=schedule,
        remat=_remat(REMAT_POLICIES, remat),
        remat_tick=_remat(_TICK_POLICIES, remat),
    )


def _in_parts(
    layer: Callable, x: jax.Array, params: Any, rest: Any, parts: tuple[Part, ...], scan: bool, remat: str
) -> Any:
    """Runs the parts of a stack, each in a loop of its own.

    A condition inside a single loop would synchronize a GPU with the host at every layer, and would
    keep the activations of both branches.

    No loop slices its part out of the stacked weights, which would copy them, and no gradients of
    parts are joined, which would copy those. Every loop reads from the whole stacks, and carries them
    through unchanged for the sake of their gradient: in the backward pass this is one buffer, into
    which each layer writes its own gradient. (If the loops only read the stacks, JAX would add a
    gradient of the whole size in every iteration.)
    """
    carry, outs = (x, params), []
    for start, stop, plain in parts:

        def at_index(x: jax.Array, i: Any, taken: Any, rest: Any, plain=plain) -> Any:
            # Recomputation reads the layer from the stack, so that remat saves an index, not weights.
            here = index_layer(jax.lax.stop_gradient(params), i)
            return layer(x, i, jax.tree.map(_with_gradient_of, here, taken), rest, plain)

        scanned = scan and stop - start > 1
        at_index = _remat(REMAT_POLICIES, remat, prevent_cse=not scanned)(at_index)

        def body(carry: Any, xs: Any, at_index=at_index) -> tuple[Any, Any]:
            (x, stacks), (i, rest) = carry, xs
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
    """The stacks, and layer i of them.

    Each layer must be taken only once, because its gradient is written to its place, not added.
    """
    return stacks, index_layer(stacks, i)


def _take_fwd(stacks: Any, i: Any) -> tuple[Any, Any]:
    return _take(stacks, i), i


def _take_bwd(i: Any, gradients: tuple[Any, Any]) -> tuple[Any, None]:
    write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
    return jax.tree.map(write, *gradients), None


_take.defvjp(_take_fwd, _take_bwd)


@jax.custom_jvp
def _with_gradient_of(value: jax.Array, other: jax.Array) -> jax.Array:
    """``value``, whose gradient goes to ``other``."""
    return value


_with_gradient_of.defjvp(lambda primals, tangents: (primals[0], tangents[1]))


def _remat(policies: dict, name: str, prevent_cse: bool = False) -> Callable[[Callable], Callable]:
    if name == "none":
        return lambda function: function
    return functools.partial(jax.checkpoint, policy=policies[name], prevent_cse=prevent_cse)


def _without_quantization(block: nnx.Module, paths: frozenset[str]) -> nnx.Module:
    """The block with plain `dot_general` in the layers at these paths, in place; their state is dropped."""
    for path, module in nnx.iter_modules(block):
        if isinstance(module, Linear) and path_name(path) in paths:
            module.dot_general = nnx.static(dot_general)
    return block
