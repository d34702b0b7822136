"""Gradients of a global batch, in one forward and backward pass or in several microbatches.

Splitting a batch into microbatches saves memory and changes nothing else: the result is the gradient of the
whole batch's loss. The model state that microbatches write is combined by maximum, because the amax of a
batch is the largest amax of its microbatches.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxlp.core.train_state import State
from maxlp.nn.layers import Frozen
from maxlp.parallel import sharding

Batch = dict[str, jax.Array]
Metrics = dict[str, Any]
# (model, batch, step) to the mean loss of the batch and scalar metrics, "loss" among them.
Loss = Callable[[nnx.Module, Batch, jax.Array], tuple[jax.Array, Metrics]]
# (structure, state, batch, loss scale) to the gradients of params, the new model_state and the metrics.
# The loss scale is None except in float16 training; the gradients are already divided by it.
Gradients = Callable[[nnx.GraphDef, State, Batch, jax.Array | None], tuple[dict, dict, Metrics]]

# Variables that the backward pass writes (amax histories of output gradients). A backward pass returns only
# gradients, so it returns the new value of such a variable as its "gradient", which then overwrites it.
OVERWRITE_WITH_GRADIENT = nnx.WithTag("overwrite_with_gradient")


def batch_gradients(loss: Loss) -> Gradients:
    """Gradients of a batch's loss in one forward and backward pass."""

    def gradients(graphdef: nnx.GraphDef, state: State, batch: Batch, loss_scale: jax.Array | None):
        forward, backward = split_model_state(graphdef, state)

        def scaled_loss(params: dict, backward: dict) -> tuple[jax.Array, tuple[Metrics, dict]]:
            model = nnx.merge(graphdef, params, forward, backward)
            value, metrics = loss(model, batch, state["step"])
            return scaled(value, loss_scale), (metrics, forward_state(model))

        grad_fn = jax.grad(scaled_loss, argnums=(0, 1), has_aux=True)
        (grads, new_backward), (metrics, new_forward) = grad_fn(state["params"], backward)
        model_state = join_trees(state["model_state"], new_forward, new_backward)
        return unscaled(grads, loss_scale), model_state, metrics

    return gradients


def token_loss(
    loss_sums: Callable[[nnx.Module, Batch], Metrics], count: Callable[[Batch], jax.Array]
) -> Loss:
    """The mean loss per token of a batch, from sums over its tokens.

    Args:
      loss_sums: (model, batch) to sums over the batch: ``loss``, ``correct`` and others.
      count: batch to the number of tokens to divide by, a float32 scalar.
    """

    def loss(model: nnx.Module, batch: Batch, step: jax.Array) -> tuple[jax.Array, Metrics]:
        del step
        metrics = _means(loss_sums(model, batch), count(batch))
        return metrics["loss"], metrics

    return loss


def token_gradients(
    loss_sums: Callable[[nnx.Module, Batch], Metrics],
    count: Callable[[Batch], jax.Array],
    *,
    microbatches: int = 1,
    measure_noise: bool = False,
) -> Gradients:
    """Gradients of `token_loss`, which takes the same arguments.

    Each microbatch's sum is divided by ``count`` of the whole batch, so that all tokens weigh the same.

    Args:
      microbatches: their number, which divides that of the batch's rows.
      measure_noise: adds the metric ``microbatch_grad_norm``, the square root of the mean ‖g_i‖². g_i is n
        times what microbatch i of n adds to the gradient: the mean of all g_i is the batch's gradient.
    """
    if microbatches == 1:
        assert not measure_noise, "one gradient has no variance"
        return batch_gradients(token_loss(loss_sums, count))

    def gradients(graphdef: nnx.GraphDef, state: State, batch: Batch, loss_scale: jax.Array | None):
        tokens = count(batch)
        total = jnp.maximum(tokens, 1.0)
        forward, backward = split_model_state(graphdef, state)

        def share(params: dict, backward: dict, part: Batch) -> tuple[jax.Array, tuple[Metrics, dict]]:
            model = nnx.merge(graphdef, params, forward, backward)
            sums = loss_sums(model, part)
            return scaled(sums["loss"] / total, loss_scale), (sums, forward_state(model))

        def part_gradients(part: Batch) -> tuple[dict, tuple[Metrics, dict]]:
            grad_fn = jax.grad(share, argnums=(0, 1), has_aux=True)
            (grads, new_backward), (sums, new_forward) = grad_fn(state["params"], backward, part)
            if measure_noise:
                sums = sums | {"squares": squared_norm(grads)}
            return grads, (sums, join_trees(new_forward, new_backward))

        parts = split_batch(batch, microbatches)
        grads, (sums, model_state) = accumulate(part_gradients, state["params"], parts)
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
        metrics = _means(sums, tokens)
        if measure_noise:
            norm = jnp.sqrt(microbatches * sums["squares"])
            metrics["microbatch_grad_norm"] = unscaled(norm, loss_scale)
        return unscaled(grads, loss_scale), join_model_states(state, model_state), metrics

    return gradients


def shard_like_params(gradients: Gradients) -> Gradients:
    """Gradients that are sharded like their parameters, for meshes with a tensor axis.

    There, XLA would shard some gradients as GaLore's projection needs them, and gather the inputs of their
    matmuls for that. On other meshes the choice is better left to XLA, which reduce-scatters gradients
    straight to the sharding that the optimizer needs.
    """

    def sharded(graphdef: nnx.GraphDef, state: State, batch: Batch, loss_scale: jax.Array | None):
        grads, model_state, metrics = gradients(graphdef, state, batch, loss_scale)
        model = nnx.merge(graphdef, grads, state["model_state"])
        grads = nnx.to_pure_dict(sharding.constrain_params(nnx.state(model, nnx.Param)))
        return grads, model_state, metrics

    return sharded


def _means(sums: Metrics, tokens: jax.Array) -> Metrics:
    total = jnp.maximum(tokens, 1.0)
    return {"loss": sums["loss"] / total, "accuracy": sums["correct"] / total, "tokens": tokens}


def scaled(loss: jax.Array, loss_scale: jax.Array | None) -> jax.Array:
    """The loss times the loss scale: what is differentiated."""
    return loss if loss_scale is None else loss * loss_scale


def unscaled(grads: Any, loss_scale: jax.Array | None) -> Any:
    """The gradients divided by the loss scale, in float32: in float16 they would underflow again."""
    if loss_scale is None:
        return grads
    inverse = 1.0 / loss_scale
    return jax.tree.map(lambda g: g.astype(jnp.float32) * inverse, grads)


def squared_norm(tree: Any) -> jax.Array:
    """The square of the global L2 norm, summed in float32 (of bfloat16 arrays too)."""
    return optax.tree.norm(optax.tree.cast(tree, jnp.float32), squared=True)


# --- microbatches ---------------------------------------------------------------------------------------


def accumulate(
    gradients_of: Callable[[Any], tuple[dict, Any]], params: dict, parts: Any
) -> tuple[dict, Any]:
    """The float32 sum of the gradients of all parts, and their other results, stacked.

    Args:
      gradients_of: maps an entry of ``parts`` to its gradients and other results.
      parts: a tree of arrays whose leading axis is that of the microbatches.
    """

    def add(total: dict, part: Any) -> tuple[dict, Any]:
        grads, rest = gradients_of(part)
        return jax.tree.map(lambda a, g: a + g.astype(a.dtype), total, grads), rest

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return jax.lax.scan(add, zeros, parts)


def split_batch(batch: Any, n: int) -> Any:
    """Arrays (B, …) to (n, B/n, …), as `sharding.split_rows` does."""

    def one(x: jax.Array) -> jax.Array:
        x = sharding.split_rows(x, n)
        return sharding.constrain(x, None, "batch", *[None] * (x.ndim - 2))

    return jax.tree.map(one, batch)


def join_batch(x: jax.Array) -> jax.Array:
    """(n, B/n, …) to (B, …): the inverse of `split_batch`."""
    x = jnp.moveaxis(x, 0, 1)
    return sharding.constrain(x.reshape(-1, *x.shape[2:]), "batch", *[None] * (x.ndim - 2))


# --- the model's own state -------------------------------------------------------------------------------


def split_model_state(graphdef: nnx.GraphDef, state: State) -> tuple[dict, dict]:
    """The state of a model that its forward pass reads, and its `OVERWRITE_WITH_GRADIENT` variables."""
    model = nnx.merge(graphdef, state["params"], state["model_state"])
    _, _, backward, forward = nnx.split(model, nnx.Param, OVERWRITE_WITH_GRADIENT, ...)
    return nnx.to_pure_dict(forward), nnx.to_pure_dict(backward)


def forward_state(model: nnx.Module) -> dict:
    """The part of a model's state that the forward pass writes."""
    _, _, _, _, forward = nnx.split(model, nnx.Param, OVERWRITE_WITH_GRADIENT, Frozen, ...)
    return nnx.to_pure_dict(forward)


def join_model_states(state: State, parts: dict) -> dict:
    """The new model_state, with the maximum over what the microbatches wrote, stacked in ``parts``."""
    return join_trees(state["model_state"], jax.tree.map(lambda x: jnp.max(x, axis=0), parts))


def join_trees(*trees: dict) -> dict:
    """The union of nested dicts; where leaves have the same path, the last one wins."""
    flat: dict = {}
    for tree in trees:
        flat |= nnx.traversals.flatten_mapping(tree)
    return nnx.traversals.unflatten_mapping(flat)
