"""A train step that never holds the gradients of all layers at once.

Where the optimizer treats each tensor independently, a layer can be updated as soon as the backward pass
has its gradient, which is then freed (gradient release; Lv et al. 2023, arXiv:2306.09782, and the
per-layer updates of GaLore). This saves the memory of the gradients of all stacked layers but one. The
result equals that of `train_step.train_step`, up to rounding.

    forward    scan over the layers, keeping the input of each
    backward   scan over the layers in reverse: recompute the layer, its gradient, its update in place

The model runs with its stacks cut out: what leads to the inputs of the stacks, and what follows their
outputs, are two functions of all other parameters. (No stack may depend on another one's output.)

An optimizer that rounds stochastically draws the same noise for every layer of a stack, because its
random key is derived from the count of updates, which all calls in a step share. Each layer's rounding is
unbiased nevertheless.

What needs all gradients at once cannot be combined with this: clipping by the global norm, microbatches,
pipeline stages, gates. `run.constraints` refuses those.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.tree_util import DictKey, KeyPath

from maxlp.core.gradients import (
    OVERWRITE_WITH_GRADIENT,
    Batch,
    Loss,
    Metrics,
    forward_state,
    join_trees,
    split_model_state,
    squared_norm,
)
from maxlp.core.train_state import State
from maxlp.core.train_step import AfterUpdate, OptimizerMetrics, keep_update, nothing
from maxlp.nn.stack import StackCall, find_stacks, index_layer

StackPath = tuple[str, ...]  # where a stack is in the model: ("layers",), ("visual", "layers")


def train_step(
    graphdef: nnx.GraphDef,
    state: State,
    batch: Batch,
    *,
    loss: Loss,
    tx: optax.GradientTransformation,
    optimizer_metrics: OptimizerMetrics = nothing,
    after_update: AfterUpdate = keep_update,
) -> tuple[State, Metrics]:
    """One update from a global batch.

    Args:
      loss: as in `gradients.batch_gradients`.
      tx: treats each tensor independently. It is called once for each layer, as a stack of one, and once
        for all other parameters.
      optimizer_metrics, after_update: as in `train_step.train_step`.

    Returns:
      the new state, and the metrics of `train_step.train_step` without those of gates and statistics.
    """
    params, opt_state = state["params"], state["opt_state"]
    cut = _CutModel(graphdef, state, batch, loss)
    _, backward = split_model_state(graphdef, state)
    outer = _without(params, cut.stacks)

    x, inputs_vjp = jax.vjp(cut.inputs, outer, backward)
    calls = cut.calls(outer, backward)  # XLA removes what this computes a second time
    with jax.named_scope("layers"):
        passes = {path: _forward(call._replace(x=x[path])) for path, call in calls.items()}
    y = {path: done.y for path, done in passes.items()}
    value, loss_vjp, (metrics, new_forward) = jax.vjp(cut.loss_of, outer, backward, y, has_aux=True)
    grads, new_backward, dy = loss_vjp(jnp.ones_like(value))

    released = {}
    with jax.named_scope("layers"):
        for path, call in calls.items():
            mine = {"params": _only(params, path), "opt_state": _prune(opt_state, params, _only, path)}
            released[path] = _backward(call, passes[path], dy[path], mine, path, tx)
    more_grads, more_backward = inputs_vjp({path: done.dx for path, done in released.items()})
    grads = jax.tree.map(jnp.add, grads, more_grads)
    # A variable of the backward pass is used before or after the stacks, not both: one "gradient" is zero.
    new_backward = jax.tree.map(jnp.maximum, new_backward, more_backward)

    rest = {"params": outer, "opt_state": _prune(opt_state, params, _without, cut.stacks)}
    rest = _updated(tx, grads, rest)
    new_params = join_trees(rest["params"], *(done.stacks["params"] for done in released.values()))
    squares = [squared_norm(grads), *(done.square for done in released.values())]
    new_stacks = [_at(path, done.model_state) for path, done in released.items()]
    model_state = join_trees(new_forward, new_backward, *new_stacks)
    new_params, corrections = after_update(new_params, model_state)
    new_opt_state = _join_opt_states(opt_state, rest["opt_state"], released)
    norm = {"grad_norm": jnp.sqrt(sum(squares))}
    return {
        "params": new_params,
        "model_state": model_state,
        "opt_state": new_opt_state,
        "step": state["step"] + 1,
    }, metrics | corrections | norm | optimizer_metrics(new_opt_state)


# --- the model without its stacks -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _CutModel:
    """A model whose stacks do not run, as functions of the parameters outside of them (``outer``)."""

    graphdef: nnx.GraphDef
    state: State
    batch: Batch
    loss: Loss

    @property
    def stacks(self) -> list[StackPath]:
        model = nnx.merge(self.graphdef, self.state["params"], self.state["model_state"])
        return [tuple(name.split("/")) for name in find_stacks(model)]

    def inputs(self, outer: dict, backward: dict) -> dict[StackPath, jax.Array]:
        """The inputs of the stacks."""
        return {path: call.x for path, call in self.calls(outer, backward).items()}

    def calls(self, outer: dict, backward: dict) -> dict[StackPath, StackCall]:
        """The calls of the stacks."""
        found = {}

        def record(path: StackPath, call: StackCall) -> jax.Array:
            found[path] = call
            return jnp.zeros_like(call.x)

        self._run(outer, backward, record)
        return found

    def loss_of(self, outer: dict, backward: dict, outputs: dict) -> tuple[jax.Array, tuple[Metrics, dict]]:
        """The loss for given outputs of the stacks, and (metrics, new state of the forward pass)."""
        model, (value, metrics) = self._run(outer, backward, lambda path, _: outputs[path])
        return value, (metrics, forward_state(model))

    def _run(
        self, outer: dict, backward: dict, run_stack: Callable[[StackPath, StackCall], jax.Array]
    ) -> tuple[nnx.Module, tuple[jax.Array, Metrics]]:
        forward, _ = split_model_state(self.graphdef, self.state)
        params = join_trees(self.state["params"], outer)
        model = nnx.merge(self.graphdef, params, forward, backward)
        for name, blocks in find_stacks(model).items():
            blocks.run_stack = nnx.static(functools.partial(run_stack, tuple(name.split("/"))))
        return model, self.loss(model, self.batch, self.state["step"])


# --- the stacks -----------------------------------------------------------------------------------------


class _Forward(NamedTuple):
    """The forward pass of a stack: its output, the inputs of the layers by part, the stacked new state."""

    y: jax.Array
    inputs: list[jax.Array]
    model_state: dict


class _Backward(NamedTuple):
    """The backward pass of a stack, with its updates.

    Attributes:
      dx: gradient of the stack's input.
      stacks: its new ``params`` and ``opt_state``.
      model_state: of the stack alone.
      square: squared norm of its gradients.
    """

    dx: jax.Array
    stacks: State
    model_state: dict
    square: jax.Array


def _forward(call: StackCall) -> _Forward:
    params, backward, forward = _variables(call)
    state, x, inputs, states = join_trees(forward, backward), call.x, [], []
    for start, stop, plain in call.parts:

        def body(x: jax.Array, i: jax.Array, plain=plain) -> tuple[jax.Array, tuple]:
            y, new_state = call.layer(x, index_layer(params, i), index_layer(state, i), plain)
            return y, (x, new_state)

        x, (x_before, new_state) = jax.lax.scan(body, x, jnp.arange(start, stop))
        inputs.append(x_before)
        states.append(new_state)
    return _Forward(x, inputs, jax.tree.map(lambda *parts: jnp.concatenate(parts), *states))


def _backward(
    call: StackCall,
    done: _Forward,
    dy: jax.Array,
    stacks: State,
    path: StackPath,
    tx: optax.GradientTransformation,
) -> _Backward:
    _, backward, forward = _variables(call)
    carry, new_backward, squares = (dy, stacks), [], []
    for (start, stop, plain), inputs in zip(call.parts[::-1], done.inputs[::-1], strict=True):

        def body(carry: tuple, at: tuple, plain=plain) -> tuple[tuple, tuple]:
            (dy, stacks), (i, x) = carry, at
            mine = _layer(stacks, path, i)

            def layer(params: dict, backward: dict, x: jax.Array) -> jax.Array:
                return call.layer(x, params, join_trees(index_layer(forward, i), backward), plain)[0]

            params = jax.tree.map(lambda p: p[0], _get(mine["params"], path))
            _, vjp = jax.vjp(layer, params, index_layer(backward, i), x)
            grads, new_backward, dx = vjp(dy)
            grads = _at(path, jax.tree.map(lambda g: g[None], grads))
            stacks = _with_layer(stacks, _updated(tx, grads, mine), path, i)
            return (dx, stacks), (new_backward, squared_norm(grads))

        carry, (new, square) = jax.lax.scan(body, carry, (jnp.arange(start, stop), inputs), reverse=True)
        new_backward.insert(0, new)
        squares.append(jnp.sum(square))
    new_backward = jax.tree.map(lambda *parts: jnp.concatenate(parts), *new_backward)
    return _Backward(*carry, join_trees(done.model_state, new_backward), jnp.stack(squares).sum())


def _variables(call: StackCall) -> tuple[dict, dict, dict]:
    """Parameters, state of the backward pass and state of the forward pass of stacked blocks."""
    _, *variables = nnx.split(call.blocks, nnx.Param, OVERWRITE_WITH_GRADIENT, ...)
    params, backward, forward = map(nnx.to_pure_dict, variables)
    return params, backward, forward


def _updated(tx: optax.GradientTransformation, grads: dict, mine: State) -> State:
    with jax.named_scope("optimizer"):
        updates, opt_state = tx.update(grads, mine["opt_state"], mine["params"])
        return {"params": optax.apply_updates(mine["params"], updates), "opt_state": opt_state}


# --- parts of trees -------------------------------------------------------------------------------------


def _get(tree: dict, path: StackPath) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _at(path: StackPath, value: Any) -> dict:
    """``value`` as the only entry of nested dicts."""
    for key in reversed(path):
        value = {key: value}
    return value


def _only(tree: dict, path: StackPath) -> dict:
    return _at(path, _get(tree, path))


def _without(tree: dict, paths: Iterable[StackPath]) -> dict:
    for path in paths:
        head, *rest = path
        pruned = _without(tree[head], [tuple(rest)]) if rest else {}
        tree = {k: v for k, v in tree.items() if k != head} | ({head: pruned} if pruned else {})
    return tree


def _prune(opt_state: Any, params: dict, prune: Callable[[dict, Any], dict], paths: Any) -> Any:
    """An optimizer state with ``prune(node, paths)`` for every tree in it that has the parameters' keys."""

    def is_like_params(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == params.keys()

    def one(node: Any) -> Any:
        return prune(node, paths) if is_like_params(node) else node

    return jax.tree.map(one, opt_state, is_leaf=is_like_params)


def _belongs(leaf: KeyPath, path: StackPath) -> bool:
    """Whether a leaf of a state belongs to a stack; counters, which all parameters share, do not."""
    keys = tuple(DictKey(key) for key in path)
    return any(leaf[i : i + len(keys)] == keys for i in range(len(leaf)))


def _layer(stacks: State, path: StackPath, i: jax.Array) -> State:
    """Layer i as a stack of one; leaves that all layers share are unchanged."""

    def one(leaf: KeyPath, x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, i, 1) if _belongs(leaf, path) else x

    return jax.tree.map_with_path(one, stacks)


def _with_layer(stacks: State, new: State, path: StackPath, i: jax.Array) -> State:
    """Writes layer i in place; leaves that all layers share keep their old value for the other layers."""

    def one(leaf: KeyPath, x: jax.Array, layer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, layer, i, 0) if _belongs(leaf, path) else x

    return jax.tree.map_with_path(one, stacks, new)


def _join_opt_states(opt_state: Any, rest: Any, released: dict[StackPath, _Backward]) -> Any:
    """The whole state from its parts; leaves that all parameters share come from ``rest``."""
    new = dict(jax.tree.flatten_with_path(rest)[0])
    for path, done in released.items():
        leaves = jax.tree.flatten_with_path(done.stacks["opt_state"])[0]
        new |= {leaf: x for leaf, x in leaves if _belongs(leaf, path)}
    return jax.tree.map_with_path(lambda leaf, _: new[leaf], opt_state)
