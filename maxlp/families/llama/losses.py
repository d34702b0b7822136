"""The language-model loss as pure functions of arrays.

Shape letters: B batch · S length · D embed · V vocab; C chunks of P parts with b rows and s tokens each.
"""

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp.nn.layers import over_last_dim
from maxlp.parallel import sharding

PIECES = 8  # of the logits if there is one chunk; one piece at a time is in float32

Sums = dict[str, jax.Array]
Product = Callable[[nnx.State, jax.Array], jax.Array]


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
    loss_BS = nll_BS + z_loss * jnp.square(log_z_BS) if z_loss else nll_BS  # 0 times infinity is NaN

    def total(x_BS: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mask_BS, x_BS, 0.0), dtype=jnp.float32)

    return {
        "loss": total(loss_BS),
        "nll": total(nll_BS),
        "correct": total(hit_BS),
        "tokens": jnp.sum(mask_BS, dtype=jnp.float32),
    }


def next_token_in_chunks(
    product: Product,
    weights: nnx.State,
    x_BSD: jax.Array,
    targets_BS: jax.Array,
    mask_BS: jax.Array,
    *,
    num_chunks: int,
    cap: Callable[[jax.Array], jax.Array] = lambda logits: logits,
    **terms: float,
) -> Sums:
    """`next_token` in ``num_chunks`` chunks of the sequence, so that memory never holds all logits.

    The logits of a chunk are computed once, and the gradient of the loss right after them, in the forward
    pass. (The other sums have no gradient.) The weights are gathered once. Each device accumulates their
    gradient over its own tokens in float32; the devices' sums are added once, after the last chunk.

    The forward pass knows neither the loss scale nor the number of tokens, by which the sum will be
    multiplied and divided. Without them float16 may overflow, so there the backward pass computes the
    gradient, from logits that it computes again.

    One chunk keeps the gradient of all logits, in the dtype of ``x_BSD``, and multiplies it once. Float32
    logits exist for one of `PIECES` pieces at a time.

    Args:
      product: (weights, hidden states (…, D)) to float32 logits (…, V), linear in both. It runs on the rows
        of one device and must not constrain shardings. With several chunks it gets the weights in float32,
        and casts them.
      weights: the weights of ``product``, in the dtype to gather, with their logical axes.
      num_chunks: divides S.
      cap: applied to the logits.
      terms: the keywords of `next_token`.
    """

    def loss(logits: jax.Array, *labels: jax.Array) -> tuple[jax.Array, Sums]:
        sums = next_token(cap(logits), *labels, **terms)
        return sums.pop("loss"), sums

    keep = num_chunks == 1
    n = PIECES if keep else num_chunks
    chunks = [sharding.split_chunks(a, n) for a in (x_BSD, targets_BS, mask_BS)]
    loss_sum, sums = typing.cast(tuple, _sum_of_chunks(keep, product, loss, weights, *chunks))
    return {"loss": loss_sum} | jax.lax.stop_gradient(sums)


# --- a sum over chunks whose gradient is computed in the forward pass -----------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _sum_of_chunks(keep: bool, product: Product, loss: Callable, weights: nnx.State, *chunks: jax.Array):
    """``loss(product(weights, x), *labels)``, a scalar and a dict of scalars, summed over all chunks."""
    weights_P = sharding.all_gather_params(weights)

    def of_chunk(chunk: tuple) -> tuple:
        x_PbsD, *labels_Pbs = chunk
        return loss(jax.vmap(product)(weights_P, x_PbsD), *labels_Pbs)

    return jax.tree.map(jnp.sum, jax.lax.map(of_chunk, chunks))


def _forward(keep, product, loss, *inputs):
    if any(a.dtype == jnp.float16 for a in jax.tree.leaves(inputs)):
        return _sum_of_chunks(keep, product, loss, *inputs), (None, inputs)
    differentiate = _keep_dlogits if keep else _add_dweights
    total, gradients = differentiate(product, loss, jnp.float32(1), *inputs)
    return total, (gradients, None)


def _backward(keep, product, loss, saved, cotangents):
    gradients, inputs = saved
    cotangent, _ = cotangents
    if inputs is None:
        gradients = jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), gradients)
    else:
        _, gradients = _add_dweights(product, loss, cotangent, *inputs)
    return *gradients, None, None


def _keep_dlogits(product, loss, cotangent, weights, x_CPbsD, *labels_CPbs):
    """As `_add_dweights`, from the gradient of all logits: one product for the weights and one for x."""
    weights = sharding.constrain_params(weights, gathered=True)

    def of_chunk(chunk: tuple) -> tuple:
        logits_PbsV = product(weights, chunk[0])
        value, pull, sums = jax.vjp(lambda logits: loss(logits, *chunk[1:]), logits_PbsV, has_aux=True)
        return (value, sums), pull(cotangent)[0].astype(x_CPbsD.dtype)

    parts, dlogits_CPbsV = jax.lax.map(of_chunk, (x_CPbsD, *labels_CPbs))
    logits_CPbsV, pull = jax.vjp(product, weights, x_CPbsD)  # XLA computes no logits here
    dweights, dx_CPbsD = pull(dlogits_CPbsV.astype(logits_CPbsV.dtype))
    gradients = jax.lax.optimization_barrier((sharding.constrain_params(dweights), dx_CPbsD))
    return jax.tree.map(jnp.sum, parts), gradients


def _add_dweights(product, loss, cotangent, weights, x_CPbsD, *labels_CPbs):
    """`_sum_of_chunks`, and the gradients of ``cotangent`` × its loss with respect to weights and x."""

    def add(dweights_P: nnx.State, chunk: tuple) -> tuple:
        # The gradient of a float32 weight is float32: matmuls on GPUs then add it to the sum themselves.
        wide_P = jax.tree.map(lambda w: w.astype(jnp.float32), weights_P)
        value, pull, sums = jax.vjp(
            lambda *args: loss(jax.vmap(product)(*args), *chunk[1:]), wide_P, chunk[0], has_aux=True
        )
        more_P, dx_PbsD = pull(cotangent)
        dweights_P = jax.tree.map(jnp.add, dweights_P, more_P)
        return dweights_P, ((value, sums), dx_PbsD)

    weights_P, scatter = jax.vjp(sharding.all_gather_params, weights)
    zeros_P = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), weights_P)
    dweights_P, (parts, dx_CPbsD) = jax.lax.scan(add, zeros_P, (x_CPbsD, *labels_CPbs))
    [dweights] = scatter(jax.tree.map(lambda g, w: g.astype(w.dtype), dweights_P, weights_P))
    # By default XLA would scatter the gradient after the blocks' backward pass, and keep it until then.
    return jax.tree.map(jnp.sum, parts), jax.lax.optimization_barrier((dweights, dx_CPbsD))


_sum_of_chunks.defvjp(_forward, _backward)
