"""Losses as pure functions of arrays.

Shape letters: B batch · S length · C chunks · D embed · V vocab.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxlp import sharding


def cross_entropy(logits_BSV: jax.Array, targets_BS: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Per token, each (B, S): cross-entropy in nats, log-partition, and whether the target came first.

    The target's logit is a masked sum and not a gather: with V split over devices it stays local. It comes
    first if no logit is larger, which needs only the maximum that the partition is computed with anyway.
    """
    logits_BSV = logits_BSV.astype(jnp.float32)
    max_BS = jax.lax.stop_gradient(jnp.max(logits_BSV, axis=-1))
    log_z_BS = jnp.log(jnp.sum(jnp.exp(logits_BSV - max_BS[..., None]), axis=-1)) + max_BS
    is_target = jnp.arange(logits_BSV.shape[-1]) == targets_BS[..., None]
    target_BS = jnp.sum(jnp.where(is_target, logits_BSV, 0.0), axis=-1)
    return log_z_BS - target_BS, log_z_BS, target_BS >= max_BS


def next_token(
    logits_fn: Callable[[jax.Array], jax.Array],
    x_BSD: jax.Array,
    targets_BS: jax.Array,
    mask_BS: jax.Array,
    *,
    num_chunks: int,
    z_loss: float,
) -> dict[str, jax.Array]:
    """Sums over the unmasked tokens of a language-model loss, in ``num_chunks`` pieces of the sequence.

    Only one chunk's logits (B, S/num_chunks, V) exist at a time: the backward pass recomputes them. Where
    the sequence is split over devices, a chunk takes a part of every device's.

    Args:
      logits_fn: hidden states (B, s, D) to float32 logits (B, s, V).
      num_chunks: divides S; 1 keeps the logits.
      z_loss: weight of ``log(Z)^2``, which keeps logits from drifting (PaLM, arXiv:2204.02311).

    Returns:
      float32 scalars: ``loss`` (with z-loss), ``nll`` (nats), ``correct`` (greedy hits), ``tokens``.
    """

    def piece(x_BsD: jax.Array, targets_Bs: jax.Array, mask_Bs: jax.Array) -> dict[str, jax.Array]:
        nll_Bs, log_z_Bs, hit_Bs = cross_entropy(logits_fn(x_BsD), targets_Bs)
        total = lambda v: jnp.sum(jnp.where(mask_Bs, v, 0.0), dtype=jnp.float32)  # noqa: E731
        return {
            "loss": total(nll_Bs + z_loss * jnp.square(log_z_Bs)),
            "nll": total(nll_Bs),
            "correct": total(hit_Bs),
            "tokens": jnp.sum(mask_Bs, dtype=jnp.float32),
        }

    if num_chunks == 1:
        return piece(x_BSD, targets_BS, mask_BS)
    B, S = targets_BS.shape
    assert S % num_chunks == 0, "checked with the config"
    parts = sharding.seq_shards(S // num_chunks)

    def cut(a: jax.Array) -> jax.Array:
        names = [None] * (a.ndim - 2)
        a = jnp.moveaxis(a.reshape(B, parts, num_chunks, -1, *a.shape[2:]), 2, 0)
        if parts > 1:
            a = sharding.constrain(a, None, "batch", "ends_seq", None, *names)
        return a.reshape(num_chunks, B, -1, *a.shape[4:])

    chunks = tuple(map(cut, (x_BSD, targets_BS, mask_BS)))

    def body(sums: dict[str, jax.Array], chunk: tuple) -> tuple[dict[str, jax.Array], None]:
        return jax.tree.map(jnp.add, sums, jax.checkpoint(piece)(*chunk)), None

    zeros = {k: jnp.zeros((), jnp.float32) for k in ("loss", "nll", "correct", "tokens")}
    return jax.lax.scan(body, zeros, chunks)[0]
