"""The language-model loss as pure functions of arrays.

Shape letters: B batch · S length · D embed · V vocab; C chunks of P parts with b rows and s tokens each.
"""

import functools
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp.nn.layers import over_last_dim
from maxlp.parallel import sharding

Sums = dict[str, jax.Array]


def cross_entropy(logits_BSV: jax.Array, targets_BS: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Per token, each (B, S): cross-entropy in nats, log-partition, and whether the target is the argmax.

    The target's logit is a masked sum rather than a gather, which stays local when V is split over devices.
    The target is the argmax if no logit is larger, which needs only the maximum that the partition uses.
    """
    logits_BSV = logits_BSV.astype(jnp.float32)
    max_BS = jax.lax.stop_gradient(jnp.max(logits_BSV, axis=-1))
    log_z_BS = jnp.log(jnp.sum(jnp.exp(logits_BSV - max_BS[..., None]), axis=-1)) + max_BS
    is_target = over_last_dim(jnp.arange(logits_BSV.shape[-1]), logits_BSV) == targets_BS[..., None]
    target_BS = jnp.sum(jnp.where(is_target, logits_BSV, 0.0), axis=-1)
    return log_z_BS - target_BS, log_z_BS, target_BS >= max_BS


def next_token(logits_BSV: jax.Array, targets_BS: jax.Array, mask_BS: jax.Array, *, z_loss: float) -> Sums:
    """Sums over the unmasked tokens of a language-model loss.

    Args:
      z_loss: weight of ``log(Z)^2``, which keeps logits from drifting (PaLM, arXiv:2204.02311).

    Returns:
      float32 scalars: ``loss`` (with z-loss), ``nll`` (nats), ``correct`` (greedy hits), ``tokens``.
    """
    nll_BS, log_z_BS, hit_BS = cross_entropy(logits_BSV, targets_BS)

    def total(x_BS: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mask_BS, x_BS, 0.0), dtype=jnp.float32)

    return {
        "loss": total(nll_BS + z_loss * jnp.square(log_z_BS)),
        "nll": total(nll_BS),
        "correct": total(hit_BS),
        "tokens": jnp.sum(mask_BS, dtype=jnp.float32),
    }


def next_token_in_chunks(
    logits_fn: Callable[[nnx.State, jax.Array], jax.Array],
    weights: nnx.State,
    x_BSD: jax.Array,
    targets_BS: jax.Array,
    mask_BS: jax.Array,
    *,
    num_chunks: int,
    z_loss: float,
) -> Sums:
    """`next_token` in ``num_chunks`` chunks of the sequence, so that memory never holds all logits.

    The logits of a chunk are computed once, and the gradient of the loss right after them, in the forward
    pass. (The other sums have no gradient.) The weights are gathered once. Each device accumulates their
    gradient over its own tokens in float32; the devices' sums are added once, after the last chunk.

    The forward pass knows neither the loss scale nor the number of tokens, by which the sum will be
    multiplied and divided. Without them float16 may overflow, so there the backward pass computes the
    gradient, from logits that it computes again.

    Args:
      logits_fn: (weights, hidden states (b, s, D)) to float32 logits (b, s, V). It runs on the rows of one
        device and must not constrain shardings.
      weights: the weights of ``logits_fn``, in the dtype to gather, with their logical axes.
      num_chunks: divides S.
    """

    def loss(weights: Any, x_bsD: jax.Array, *labels_bs: jax.Array) -> tuple[jax.Array, Sums]:
        sums = next_token(logits_fn(weights, x_bsD), *labels_bs, z_loss=z_loss)
        return sums.pop("loss"), sums

    chunks = [sharding.split_chunks(a, num_chunks) for a in (x_BSD, targets_BS, mask_BS)]
    loss_sum, sums = typing.cast(tuple, _sum_of_chunks(loss, weights, *chunks))
    return {"loss": loss_sum} | jax.lax.stop_gradient(sums)


# --- a sum over chunks whose gradient is computed in the forward pass -----------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_chunks(loss: Callable, weights: nnx.State, x_CPbsD: jax.Array, *labels_CPbs: jax.Array) -> Any:
    """``loss(weights, x, *labels)``, a scalar and a dict of scalars, summed over C chunks and P parts."""

    def add(total: Any, chunk: tuple) -> tuple[Any, None]:
        return _plus(total, jax.vmap(loss)(weights_P, *chunk)), None

    weights_P = sharding.all_gather_params(weights)
    return jax.lax.scan(add, _zeros(loss, weights_P, x_CPbsD, labels_CPbs), (x_CPbsD, *labels_CPbs))[0]


def _forward(loss, weights, x_CPbsD, *labels_CPbs):
    inputs = weights, x_CPbsD, *labels_CPbs
    if any(a.dtype == jnp.float16 for a in jax.tree.leaves((weights, x_CPbsD))):
        return _sum_of_chunks(loss, *inputs), (None, inputs)
    total, gradients = _with_gradients(loss, jnp.float32(1), *inputs)
    return total, (gradients, None)


def _backward(loss, saved, cotangents):
    gradients, inputs = saved
    if inputs is not None:
        _, gradients = _with_gradients(loss, cotangents[0], *inputs)
    else:
        gradients = jax.tree.map(lambda g: (g * cotangents[0]).astype(g.dtype), gradients)
    return *gradients, None, None


def _with_gradients(
    loss: Callable, cotangent: jax.Array, weights: nnx.State, x_CPbsD: jax.Array, *labels_CPbs: jax.Array
) -> tuple[Any, Any]:
    """`_sum_of_chunks`, and the gradients of ``cotangent`` × its loss with respect to weights and x."""

    def of_part(weights: nnx.State, x_bsD: jax.Array, *labels_bs: jax.Array) -> tuple:
        value, pull, sums = jax.vjp(lambda *args: loss(*args, *labels_bs), weights, x_bsD, has_aux=True)
        return (value, sums), pull(cotangent)

    def add(carry: tuple, chunk: tuple) -> tuple[tuple, jax.Array]:
        total, dweights_P = carry
        out, (more_P, dx_PbsD) = jax.vmap(of_part)(weights_P, *chunk)
        dweights_P = jax.tree.map(lambda a, g: a + g.astype(a.dtype), dweights_P, more_P)
        return (_plus(total, out), dweights_P), dx_PbsD

    weights_P, scatter = jax.vjp(sharding.all_gather_params, weights)
    zeros_P = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), weights_P)
    start = _zeros(loss, weights_P, x_CPbsD, labels_CPbs), zeros_P
    (total, dweights_P), dx_CPbsD = jax.lax.scan(add, start, (x_CPbsD, *labels_CPbs))
    [dweights] = scatter(jax.tree.map(lambda g, w: g.astype(w.dtype), dweights_P, weights_P))
    # By default XLA would scatter the gradient after the blocks' backward pass, and keep it until then.
    return total, jax.lax.optimization_barrier((dweights, dx_CPbsD))


_sum_of_chunks.defvjp(_forward, _backward)


def _zeros(loss: Callable, weights_P: nnx.State, x_CPbsD: jax.Array, labels_CPbs: tuple) -> Any:
    of_chunk = jax.eval_shape(jax.vmap(loss), weights_P, x_CPbsD[0], *(a[0] for a in labels_CPbs))
    return jax.tree.map(lambda s: jnp.zeros((), s.dtype), of_chunk)


def _plus(total: Any, parts_P: Any) -> Any:
    return jax.tree.map(lambda a, b: a + jnp.sum(b), total, parts_P)
