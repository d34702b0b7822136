"""QK-clip: scales down the kernels of queries and keys whose attention logits grew too large.

Muon lets the logits of a few heads grow without bound. After each update, QK-clip of Kimi K2 (2025,
arXiv:2507.20534, algorithm 1) takes the largest logit that each head h had in that step's forward pass::

    S_h = max q_i · k_j / √H      over the pairs (i, j) of the batch that attend to each other
    γ_h = min(1, τ / S_h)
    W_q^h ← √γ_h W_q^h,  W_k^h ← √γ_h W_k^h         keys of one head
    W_q^h ← γ_h W_q^h                               keys that several heads share (GQA)

so that the same batch would have no logit above τ, but for what the update itself added. Shared keys stay
as they are, as the paper's shared rotary keys do: to scale them would change heads whose logits are small.
The optimizer's moments are not scaled.

S_h is exact. No attention kernel returns it, so that it costs one more product of queries and keys in the
forward pass (none in the backward pass), in blocks of keys of which one exists at a time.

Shape letters: B batch · S query length · T key length · N query heads · K kv heads · G = N/K · H head dim ·
t keys of one block · D embed · L layers.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp.core.gradients import Metrics
from maxlp.parallel.sharding import constrain

BLOCK = 128  # keys


class LargestOfStep(nnx.Variable):
    """float32 (N,), written by the forward pass; microbatches are combined by maximum."""


class MaxLogits(nnx.Module):
    """Records the largest attention logit of each head; for the arguments see `max_logits`."""

    def __init__(self, num_heads: int):
        self.largest_N = LargestOfStep(jnp.zeros(num_heads))

    def __call__(
        self,
        q_BSNH: jax.Array,
        k_BSKH: jax.Array,
        positions_BS: jax.Array,
        segment_ids_BS: jax.Array | None,
    ) -> None:
        self.largest_N[...] = max_logits(q_BSNH, k_BSKH, positions_BS, segment_ids_BS)


def max_logits(
    q_BSNH: jax.Array, k_BSKH: jax.Array, positions_BS: jax.Array, segment_ids_BS: jax.Array | None
) -> jax.Array:
    """The largest logit of each head over a batch, float32 (N,); 0 where all are negative.

    Which key a query attends to follows from positions and segments, so that the tokens may be in any
    order (`nn.attention.SequenceOrder`). Padding (segment 0) does not count.

    Args:
      q_BSNH, k_BSKH: after their rotation.
      positions_BS: from 0 in each document.
      segment_ids_BS: document of each token; None for one document in a row.
    """
    B, S, N, H = q_BSNH.shape
    K = k_BSKH.shape[2]
    q_BSNH, k_BSKH = jax.lax.stop_gradient((q_BSNH, k_BSKH))
    q_BKGSH = jnp.moveaxis(q_BSNH.reshape(B, S, K, N // K, H), 1, 3)
    ids_BS = jnp.ones_like(positions_BS) if segment_ids_BS is None else segment_ids_BS
    # Every device has the keys of all of its rows, and the queries of its part of the sequence.
    k_BTKH = constrain(k_BSKH, "batch", None, "act_heads", None)

    def block(largest_BKGS: jax.Array, keys: tuple) -> tuple[jax.Array, None]:
        k_BtKH, positions_Bt, ids_Bt = keys
        logits = jnp.einsum("BKGSH,BtKH->BKGSt", q_BKGSH, k_BtKH, preferred_element_type=jnp.float32)
        visible_BSt = (ids_BS[:, :, None] == ids_Bt[:, None]) & (ids_Bt[:, None] > 0)
        visible_BSt &= positions_BS[:, :, None] >= positions_Bt[:, None]
        logits = jnp.where(visible_BSt[:, None, None], logits, 0.0)
        return jnp.maximum(largest_BKGS, jnp.max(logits, axis=-1)), None

    keys = tuple(_in_blocks(x) for x in (k_BTKH, positions_BS, ids_BS))
    largest_BKGS, _ = jax.lax.scan(block, jnp.zeros(q_BKGSH.shape[:-1], jnp.float32), keys)
    return jnp.max(largest_BKGS, axis=(0, 3)).reshape(N) * H**-0.5


def _in_blocks(x: jax.Array) -> jax.Array:
    """(B, T, …) to (T/t, B, t, …), filled up with zeros, which as segment ids are padding."""
    B, T = x.shape[:2]
    x = jnp.pad(x, [(0, 0), (0, -T % BLOCK), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(x.reshape(B, -1, BLOCK, *x.shape[2:]), 1, 0)


def clip(params: dict, model_state: dict, *, threshold: float) -> tuple[dict, Metrics]:
    """The parameters with clipped kernels of queries and keys; a `core.train_step.AfterUpdate`.

    Heads whose largest logit is not finite are left as they are.

    Returns:
      the parameters, and the metrics ``max_attention_logit`` (of all heads) and ``clipped_heads``.
    """
    attn = params["layers"]["attn"]
    largest_LN = model_state["layers"]["attn"]["max_logits"]["largest_N"]
    is_large_LN = jnp.isfinite(largest_LN) & (largest_LN > threshold)
    factor_LN = jnp.where(is_large_LN, threshold / largest_LN, 1.0)
    q_LDQ, k_LDK = attn["q_proj"]["kernel"], attn["k_proj"]["kernel"]
    if q_LDQ.shape == k_LDK.shape:  # as many heads
        root_LN = jnp.sqrt(factor_LN)
        new = {"q_proj": _scaled(q_LDQ, root_LN), "k_proj": _scaled(k_LDK, root_LN)}
    else:
        new = {"q_proj": _scaled(q_LDQ, factor_LN)}
    attn = attn | {name: attn[name] | {"kernel": kernel} for name, kernel in new.items()}
    metrics = {
        "max_attention_logit": jnp.max(largest_LN),
        "clipped_heads": jnp.sum(is_large_LN, dtype=jnp.float32),
    }
    return params | {"layers": params["layers"] | {"attn": attn}}, metrics


def _scaled(kernel_LDQ: jax.Array, factor_LN: jax.Array) -> jax.Array:
    factor_LQ = jnp.repeat(factor_LN, kernel_LDQ.shape[-1] // factor_LN.shape[-1], axis=-1)
    return kernel_LDQ * factor_LQ[:, None]
