"""Gradients of a global batch, in one forward and backward pass or in several microbatches.

Splitting a batch into microbatches saves memory and changes nothing else: the result is the gradient of the
whole batch's loss. The model's own state is combined by maximum over the microbatches (amax histories; an
average would be wrong).
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
# The loss scale is the factor of the loss in float16 training, or None; the gradients do not contain it.
Gradients = Callable[[nnx.GraphDef, State, Batch, jax.Array | None], tuple[dict, dict, Metrics]]

# Variables of the backward pass (scales of output gradients): the "gradient" of one is its new value.
OVERWRITE_WITH_GRADIENT = nnx.WithTag("overwrite_with_gradient")


def batch_gradients(loss: Loss) -> Gradients:
    """Gradients of a batch's loss in one forward and backward pass."""

    def gradients(graphdef: nnx.GraphDef, state: State, batch: Batch, loss_scale: jax.Array | None):
        forward, backward = split_model_state(graphdef, state)

        def scaled_loss(params: dict, backward: dict) -> tuple[jax.Array, tuple[Metrics, dict]]:
            model = nnx.merge(graphdef, params, forward, backward)
            value, metrics = loss(model, batch, state["step"])
            return scaled(value, loss_scale), (metrics, forward_state(model))

        both = jax.grad(scaled_loss, argnums=(0, 1), has_aux=True)
        (grads, new_backward), (metrics, new_forward) = both(state["params"], backward)
        model_state = join_trees(state["model_state"], new_forward, new_backward)
        return unscaled(grads, loss_scale), model_state, metrics

    return gradients


def token_loss(
    loss_sums: Callable[[nnx.Module, Batch], Metrics], count: Callable[[Batch], jax.Array]
) -> Loss:
    """The mean over the tokens of a batch of a loss that is a sum over them.

    Args:
      loss_sums: (model, batch) to sums over the batch: ``loss``, ``correct`` and others.
      count: the number of tokens that the loss is the mean of.
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

    Each microbatch's sum is divided by ``count`` of the whole batch.

    Args:
      microbatches: divides the rows of the batch.
      measure_noise: add the metric ``microbatch_grad_norm``, the root of the mean ‖g_i‖², where g_i is n
        times the gradient's share from microbatch i of n: their mean is the gradient of the batch.
    """
    if microbatches == 1:
        assert not measure_noise, "one gradient has no variance"
        return batch_gradients(token_loss(loss_sums, count))

    def gradients(graphdef: nnx.GraphDef, state: State, batch: Batch, loss_scale: jax.Array | None):
        total = jnp.maximum(tokens := count(batch), 1.0)
        forward, backward = split_model_state(graphdef, state)

        def share(params: dict, backward: dict, part: Batch) -> tuple[jax.Array, tuple[Metrics, dict]]:
            model = nnx.merge(graphdef, params, forward, backward)
            sums = loss_sums(model, part)
            return scaled(sums["loss"] / total, loss_scale), (sums, forward_state(model))

        def of_part(part: Batch) -> tuple[dict, tuple[Metrics, dict]]:
            both = jax.grad(share, argnums=(0, 1), has_aux=True)
            (grads, new_backward), (sums, new_forward) = both(state["params"], backward, part)
            if measure_noise:
                sums = sums | {"squares": squared_norm(grads)}
            return grads, (sums, join_trees(new_forward, new_backward))

        grads, (sums, model_state) = accumulate(of_part, state["params"], split_batch(batch, microbatches))
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
        metrics = _means(sums, tokens)
        if measure_noise:
            norm = jnp.sqrt(microbatches * sums["squares"])
            metrics["microbatch_grad_norm"] = unscaled(norm, loss_scale)
        return unscaled(grads, loss_scale), join_parts(state, model_state), metrics

    return gradients


def split_like_params(gradients: Gradients) -> Gradients:
    """Gradients that the mesh splits like their parameters, for meshes with a tensor axis.

    There XLA gathers the inputs of some matmuls to make a gradient as GaLore wants it. On others it
    scatters gradients to where the optimizer wants them, which saves moving them.
    """

    def of_batch(graphdef: nnx.GraphDef, state: State, batch: Batch, loss_scale: jax.Array | None):
        grads, model_state, metrics = gradients(graphdef, state, batch, loss_scale)
        model = nnx.merge(graphdef, grads, state["model_state"])
        grads = nnx.to_pure_dict(sharding.constrain_params(nnx.state(model, nnx.Param)))
        return grads, model_state, metrics

    return of_batch


def _means(sums: Metrics, tokens: jax.Array) -> Metrics:
    total = jnp.maximum(tokens, 1.0)
    return {"loss": sums["loss"] / total, "accuracy": sums["correct"] / total, "tokens": tokens}


def scaled(loss: jax.Array, loss_scale: jax.Array | None) -> jax.Array:
    """The loss to differentiate."""
    return loss if loss_scale is None else loss * loss_scale


def unscaled(grads: Any, loss_scale: jax.Array | None) -> Any:
    """The gradients of the loss itself; in float32, because in float16 they would underflow again."""
    if loss_scale is None:
        return grads
    inverse = 1.0 / loss_scale
    return jax.tree.map(lambda g: g.astype(jnp.float32) * inverse, grads)


def squared_norm(tree: Any) -> jax.Array:
    """The square of the global L2 norm, summed in float32 (of bfloat16 arrays too)."""
    return optax.tree.norm(optax.tree.cast(tree, jnp.float32), squared=True)


# --- microbatches ---------------------------------------------------------------------------------------


def accumulate(of_part: Callable[[Any], tuple[dict, Any]], params: dict, parts: Any) -> tuple[dict, Any]:
    """The float32 sum of the gradients of all parts, and their other results, stacked.

    Args:
      of_part: maps an entry of ``parts`` to its gradients and other results.
      parts: a tree whose leading axis counts the microbatches.
    """

    def add(total: dict, part: Any) -> tuple[dict, Any]:
        grads, rest = of_part(part)
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
    """The part of a model's state that the forward pass reads, and the part that is its own gradient."""
    model = nnx.merge(graphdef, state["params"], state["model_state"])
    _, _, backward, forward = nnx.split(model, nnx.Param, OVERWRITE_WITH_GRADIENT, ...)
    return nnx.to_pure_dict(forward), nnx.to_pure_dict(backward)


def forward_state(model: nnx.Module) -> dict:
    """The part of a model's state that the forward pass writes."""
    _, _, _, _, forward = nnx.split(model, nnx.Param, OVERWRITE_WITH_GRADIENT, Frozen, ...)
    return nnx.to_pure_dict(forward)


def join_parts(state: State, parts: dict) -> dict:
    """The model's new state, by maximum over what the microbatches wrote, stacked in ``parts``."""
    return join_trees(state["model_state"], jax.tree.map(lambda x: jnp.max(x, axis=0), parts))


def join_trees(*trees: dict) -> dict:
    """The union of nested dicts; where leaves have the same path, the last one wins."""
    flat: dict = {}
    for tree in trees:
        flat |= nnx.traversals.flatten_mapping(tree)
    return nnx.traversals.unflatten_mapping(flat)
