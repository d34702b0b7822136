"""Gradients of a global batch, in one forward and backward pass or in several.

Both functions here return a `Gradients`: (graphdef, state, batch) to the gradients of the parameters, the
model's new state and scalar metrics, among them ``loss``. Splitting a batch into microbatches saves memory
and changes nothing else: what comes back are the gradients of the whole batch's loss.

The model's own state is combined by maximum over the microbatches (amax histories; an average would be
wrong).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxlp.parallel import sharding

State = dict[str, Any]
Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]
Features = tuple[jax.Array, jax.Array]  # image_BE, text_BE
LossFn = Callable[[nnx.Module, Batch], Sums]
PairLossFn = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], Sums]
Gradients = Callable[[nnx.GraphDef, State, Batch], tuple[dict, dict, dict[str, jax.Array]]]

# State of the backward pass (scales of output gradients), which only the cotangents see.
OVERWRITE_WITH_GRADIENT = nnx.WithTag("overwrite_with_gradient")


def of_sums(loss_fn: LossFn, weight: Callable[[Batch], jax.Array], *, microbatches: int = 1) -> Gradients:
    """Gradients of a loss that is a sum over parts of the batch (tokens), divided by their number.

    Args:
      loss_fn: sums over a batch: ``loss``, ``correct`` and others.
      weight: number of the parts in a batch. Each microbatch's sum is divided by the whole batch's.
      microbatches: divides the rows of the batch.
    """

    def gradients(graphdef: nnx.GraphDef, state: State, batch: Batch):
        count = jnp.maximum(weight(batch), 1.0)
        forward, backward = split_state(graphdef, state)

        def mean_loss(params: dict, backward: dict, part: Batch) -> tuple[jax.Array, tuple[Sums, dict]]:
            model = nnx.merge(graphdef, params, forward, backward)
            sums = loss_fn(model, part)
            return scaled(state, sums["loss"] / count), (sums, forward_state(model))

        def of_part(part: Batch) -> tuple[dict, tuple[Sums, dict]]:
            both = jax.grad(mean_loss, argnums=(0, 1), has_aux=True)
            (grads, new_backward), (sums, new_forward) = both(state["params"], backward, part)
            return grads, (sums, join(new_forward, new_backward))

        if microbatches == 1:
            grads, (sums, model_state) = of_part(batch)
        else:
            grads, (sums, model_state) = accumulate(of_part, state["params"], split(batch, microbatches))
            sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
            model_state = jax.tree.map(lambda x: jnp.max(x, axis=0), model_state)
        metrics = {"loss": sums["loss"] / count, "accuracy": sums["correct"] / count, "tokens": count}
        return unscaled(state, grads), model_state, metrics

    return gradients


def of_pairs(loss_fn: PairLossFn, *, microbatches: int = 1, seed: int = 0) -> Gradients:
    """Gradients of a loss in which every image of the batch meets every text (CLIP).

    In several microbatches the features of all are computed first and kept, then the loss's gradient with
    respect to them, and in a second pass the encoders' gradients from that: exactly those of the whole
    batch, with one microbatch's activations in memory (Gao et al. 2021, arXiv:2101.06983).

    Args:
      loss_fn: (image_BE, text_BE, scale, bias) to the sums ``loss``, ``correct`` and ``examples``.
      seed: of the choice of patches that are dropped.
    """

    def gradients(graphdef: nnx.GraphDef, state: State, batch: Batch):
        params = state["params"]
        forward, backward = split_state(graphdef, state)
        key = jax.random.fold_in(jax.random.key(seed), state["step"])

        def encode(params: dict, backward: dict, part: Batch, index: Any) -> tuple[Features, dict]:
            model = nnx.merge(graphdef, params, forward, backward)
            image_BE = model.encode_image(part["image"], jax.random.fold_in(key, index))
            return (image_BE, model.encode_text(part["text"])), forward_state(model)

        def mean_loss(params: dict, features: Features) -> tuple[jax.Array, Sums]:
            temperature = nnx.merge(graphdef, params, forward, backward).temperature()
            sums = loss_fn(*features, *temperature)
            return scaled(state, sums["loss"] / sums["examples"]), sums

        def in_one() -> tuple[dict, dict, Sums]:
            def loss(params: dict, backward: dict) -> tuple[jax.Array, tuple[Sums, dict]]:
                features, new_forward = encode(params, backward, batch, 0)
                value, sums = mean_loss(params, features)
                return value, (sums, new_forward)

            both = jax.grad(loss, argnums=(0, 1), has_aux=True)
            (grads, new_backward), (sums, new_forward) = both(params, backward)
            return grads, join(new_forward, new_backward), sums

        def in_parts() -> tuple[dict, dict, Sums]:
            parts = split(batch, microbatches), jnp.arange(microbatches)
            _, kept = jax.lax.scan(lambda _, part: (None, encode(params, backward, *part)[0]), None, parts)
            of_loss = jax.grad(mean_loss, argnums=(0, 1), has_aux=True)
            (head_grads, feature_grads), sums = of_loss(params, jax.tree.map(unsplit, kept))

            def of_part(part_and_grads: Any) -> tuple[dict, dict]:
                part, feature_grads = part_and_grads

                def product(params: dict, backward: dict) -> tuple[jax.Array, dict]:
                    features, new_forward = encode(params, backward, *part)
                    return jnp.asarray(optax.tree.vdot(features, feature_grads)), new_forward

                both = jax.grad(product, argnums=(0, 1), has_aux=True)
                (grads, new_backward), new_forward = both(params, backward)
                return grads, join(new_forward, new_backward)

            grads, model_state = accumulate(of_part, params, (parts, split(feature_grads, microbatches)))
            grads = jax.tree.map(lambda a, g: a + g.astype(a.dtype), grads, head_grads)
            return grads, jax.tree.map(lambda x: jnp.max(x, axis=0), model_state), sums

        grads, model_state, sums = in_one() if microbatches == 1 else in_parts()
        count = sums["examples"]
        metrics = {"loss": sums["loss"] / count, "accuracy": sums["correct"] / count, "examples": count}
        return unscaled(state, grads), model_state, metrics

    return gradients


def scaled(state: State, loss: jax.Array) -> jax.Array:
    """The loss to differentiate: times the scale, in a training state that has one (float16)."""
    return loss * state["loss_scale"]["scale"] if "loss_scale" in state else loss


def unscaled(state: State, grads: dict) -> dict:
    """The gradients of the loss itself; in float32, for in float16 they would vanish again."""
    if "loss_scale" not in state:
        return grads
    inverse = 1.0 / state["loss_scale"]["scale"]
    return jax.tree.map(lambda g: g.astype(jnp.float32) * inverse, grads)


def accumulate(of_part: Callable[[Any], tuple[dict, Any]], params: dict, parts: Any) -> tuple[dict, Any]:
    """The float32 sum of the gradients of all parts (leading axis), and the stacked rest."""

    def add(total: dict, part: Any) -> tuple[dict, Any]:
        grads, rest = of_part(part)
        return jax.tree.map(lambda a, g: a + g.astype(a.dtype), total, grads), rest

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return jax.lax.scan(add, zeros, parts)


def split_state(graphdef: nnx.GraphDef, state: State) -> tuple[dict, dict]:
    """A model's state that the forward pass writes, and that whose gradient is its new value."""
    model = nnx.merge(graphdef, state["params"], state["model_state"])
    _, _, backward, _ = nnx.split(model, nnx.Param, OVERWRITE_WITH_GRADIENT, ...)
    return forward_state(model), nnx.to_pure_dict(backward)


def forward_state(model: nnx.Module) -> dict:
    _, _, _, forward = nnx.split(model, nnx.Param, OVERWRITE_WITH_GRADIENT, ...)
    return nnx.to_pure_dict(forward)


def join(*states: dict) -> dict:
    flat = [nnx.traversals.flatten_mapping(state) for state in states]
    return nnx.traversals.unflatten_mapping(functools.reduce(dict.__or__, flat))


def split(batch: Any, n: int) -> Any:
    """Arrays (B, …) to (n, B/n, …). Part i takes rows i, n+i, 2n+i, …: each device keeps its own rows."""

    def one(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x.reshape(x.shape[0] // n, n, *x.shape[1:]), 1, 0)
        return sharding.constrain(x, None, "batch", *[None] * (x.ndim - 2))

    return jax.tree.map(one, batch)


def unsplit(x: jax.Array) -> jax.Array:
    """(n, B/n, …) to (B, …): the inverse of `split`."""
    x = jnp.moveaxis(x, 0, 1)
    return sharding.constrain(x.reshape(-1, *x.shape[2:]), "batch", *[None] * (x.ndim - 2))
