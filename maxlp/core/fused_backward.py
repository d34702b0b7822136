"""A train step in which the gradients of all layers never exist together.

Where the optimizer treats each tensor by itself, a layer can be updated as soon as the backward pass has
its gradient, which is then forgotten (gradient release; Lv et al. 2023, arXiv:2306.09782, and the per-layer
updates of GaLore). Memory falls by the size of the gradients, but for one layer and the embeddings. The
result is that of `step.train_step`, to rounding.

    forward    scan over the layers, keeping the input of each
    backward   scan over the layers in reverse: the layer's forward again, its gradient, its update in place

What looks at all gradients at once cannot be done: clipping by the global norm, microbatches, judges.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.tree_util import DictKey, KeyPath

from maxlp.core.gradients import Batch, LossFn, State
from maxlp.families.llama.model import rope_table
from maxlp.parallel import sharding


def train_step(
    state: State,
    batch: Batch,
    *,
    graphdef: nnx.GraphDef,
    loss_fn: LossFn,
    weight: Callable[[Batch], jax.Array],
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
) -> tuple[State, dict[str, jax.Array]]:
    """One update of a Llama from a global batch of packed text.

    Args:
      state: as of `step.init_state`, and in no way another.
      loss_fn, weight: as in `gradients.of_sums`.
      tx: treats each tensor by itself. It is called once for each layer, which it sees as a stack of one.

    Returns:
      the new state, and the metrics of `step.train_step` but for param_norm.

    Raises:
      ValueError: a model that is not a Llama of equal blocks, or that keeps a state of its own.
    """
    params, opt_state = state["params"], state["opt_state"]
    outer = {key: value for key, value in params.items() if key != "layers"}
    whole = nnx.merge(graphdef, params, state["model_state"])
    _check(whole, state)
    blocks, _, _ = nnx.split(whole.layers, nnx.Param, ...)
    positions_BS, segment_ids_BS = batch["positions"], batch["segment_ids"]
    rope = rope_table(positions_BS, whole.head_dim, whole.rope_theta, whole.rope_scaling)
    count = jnp.maximum(weight(batch), 1.0)

    def model(outer: dict) -> nnx.Module:
        return nnx.merge(graphdef, {**outer, "layers": params["layers"]}, {})

    def embed(outer: dict) -> jax.Array:
        return sharding.constrain(model(outer).tok_embed(batch["tokens"]), "batch", "act_seq", "act_embed")

    def block(layer: dict, x_BSD: jax.Array) -> jax.Array:
        return nnx.merge(blocks, layer)(x_BSD, rope, positions_BS, segment_ids_BS, None)[0]

    def mean_loss(outer: dict, x_BSD: jax.Array) -> tuple[jax.Array, dict]:
        tail: Any = _Tail(model(outer), x_BSD)
        sums = loss_fn(tail, batch)
        return sums["loss"] / count, sums

    x_BSD, embed_vjp = jax.vjp(embed, outer)
    x_BSD, inputs_LBSD = jax.lax.scan(lambda x, layer: (block(layer, x), x), x_BSD, params["layers"])
    loss, tail_vjp, sums = jax.vjp(mean_loss, outer, x_BSD, has_aux=True)
    outer_grads, dx_BSD = tail_vjp(jnp.ones_like(loss))

    def backward(carry: tuple, i: jax.Array) -> tuple[tuple, jax.Array]:
        dx_BSD, stacks = carry
        mine = _layer(stacks, i)
        layer = jax.tree.map(lambda p: p[0], mine["params"]["layers"])
        _, vjp = jax.vjp(block, layer, inputs_LBSD[i])
        grads, dx_BSD = vjp(dx_BSD)
        grads = {"layers": jax.tree.map(lambda g: g[None], grads)}
        new = _updated(tx, grads, mine)
        return (dx_BSD, _with_layer(stacks, new, i)), optax.tree.norm(grads, squared=True)

    with jax.named_scope("layers"):
        stacks = {"params": {"layers": params["layers"]}, "opt_state": _part(opt_state, params, {"layers"})}
        order = jnp.arange(whole.num_layers)
        (dx_BSD, stacks), squares = jax.lax.scan(backward, (dx_BSD, stacks), order, reverse=True)
    outer_grads = jax.tree.map(jnp.add, outer_grads, embed_vjp(dx_BSD)[0])
    rest = _updated(tx, outer_grads, {"params": outer, "opt_state": _part(opt_state, params, outer.keys())})
    metrics = {
        "loss": loss,
        "accuracy": sums["correct"] / count,
        "tokens": count,
        "grad_norm": jnp.sqrt(jnp.sum(squares) + optax.tree.norm(outer_grads, squared=True)),
        "learning_rate": jnp.asarray(schedule(state["step"]), jnp.float32),
    }
    return {
        "params": rest["params"] | stacks["params"],
        "model_state": state["model_state"],
        "opt_state": _joined(opt_state, stacks["opt_state"], rest["opt_state"]),
        "step": state["step"] + 1,
    }, metrics


class _Tail:
    """What a loss sees of a model whose blocks have run."""

    def __init__(self, model: nnx.Module, x_BSD: jax.Array):
        self.hidden = lambda *_: (model.final_norm(x_BSD), None)
        self.logits, self.head = model.logits, model.head


def _check(model: nnx.Module, state: State) -> None:
    if not hasattr(model, "tok_embed"):
        raise ValueError(f"layer-wise updates are for Llama, not for {type(model).__name__}")
    if jax.tree.leaves(state["model_state"]) or model.layers.unquantized_blocks != (0, 0):
        raise ValueError(
            "layer-wise updates need equal blocks without a state: set precision.first_blocks=0 and "
            "precision.last_blocks=0, and take no delayed scaling"
        )
    if extra := state.keys() - {"params", "model_state", "opt_state", "step"}:
        raise ValueError(f"layer-wise updates cannot wait for a verdict on the step: {', '.join(extra)}")


def _updated(tx: optax.GradientTransformation, grads: dict, mine: State) -> State:
    with jax.named_scope("optimizer"):
        updates, opt_state = tx.update(grads, mine["opt_state"], mine["params"])
        return {"params": optax.apply_updates(mine["params"], updates), "opt_state": opt_state}


# --- parts of an optimizer's state: it has trees like the parameters, and numbers that all share --------


def _part(opt_state: Any, params: dict, keys: Any) -> Any:
    """The state of those parameters alone."""
    is_like_params = lambda node: isinstance(node, dict) and node.keys() == params.keys()  # noqa: E731
    prune = lambda node: {k: node[k] for k in keys} if is_like_params(node) else node  # noqa: E731
    return jax.tree.map(prune, opt_state, is_leaf=is_like_params)


def _stacked(path: KeyPath) -> bool:
    return DictKey("layers") in path


def _layer(stacks: State, i: jax.Array) -> State:
    """Layer i as a stack of one; what is shared as it is."""

    def one(path: KeyPath, x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, i, 1) if _stacked(path) else x

    return jax.tree.map_with_path(one, stacks)


def _with_layer(stacks: State, new: State, i: jax.Array) -> State:
    """Writes layer i in place; what is shared stays old, for the other layers."""

    def one(path: KeyPath, x: jax.Array, layer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, layer, i, 0) if _stacked(path) else x

    return jax.tree.map_with_path(one, stacks, new)


def _joined(opt_state: Any, layers: Any, rest: Any) -> Any:
    """The whole state of its two parts; what is shared is that of the rest, which ran last."""
    new = dict(jax.tree.flatten_with_path(rest)[0])
    new |= {path: x for path, x in jax.tree.flatten_with_path(layers)[0] if _stacked(path)}
    return jax.tree.map_with_path(lambda path, _: new[path], opt_state)
