"""Attention by name: one signature, the fastest kernel of the platform behind it.

Shape letters: B batch · S query length · T key length · N query heads · K kv heads · H head dim.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def xla(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    causal: bool,
    segment_ids_BS: jax.Array | None,
) -> jax.Array:
    """Runs everywhere; holds the (S, S) logits of every head."""
    mask = None
    if segment_ids_BS is not None:
        mask = segment_ids_BS[:, None, :, None] == segment_ids_BS[:, None, None, :]
    return jax.nn.dot_product_attention(
        q_BSNH, k_BSKH, v_BSKH, mask=mask, is_causal=causal, implementation="xla"
    )


ATTENTION: dict[str, Callable[..., jax.Array]] = {"xla": xla}


def cached(
    q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BS: jax.Array
) -> jax.Array:
    """Attention of new tokens to a key/value cache whose slot t holds the token at position t."""
    slots_T = jnp.arange(k_BTKH.shape[1])
    mask_B1ST = slots_T <= positions_BS[:, None, :, None]
    return jax.nn.dot_product_attention(
        q_BSNH, k_BTKH, v_BTKH, mask=mask_B1ST, implementation="xla"
    )
