"""cuDNN's flash attention, for NVIDIA GPUs."""

import jax

from maxlp.nn.attention.per_device import on_each_device


def cudnn(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    causal: bool,
    segment_ids_BS: jax.Array | None,
) -> jax.Array:
    """cuDNN's flash attention (from Ampere on; H up to 128 before Hopper).

    Segment ids become a bias (B, 1, S, S) in the dtype of q, and older JAX also computes its gradient: this
    is the one place where memory grows with S². cuDNN can read packed rows by offsets instead, but only
    with a fixed maximum of documents in a row, through a private function of JAX, and JAX 0.10 gets the
    offsets of the keys wrong for K < N.
    """

    def attend(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS):
        mask = None
        if segment_ids_BS is not None:
            mask = segment_ids_BS[:, None, :, None] == segment_ids_BS[:, None, None, :]
        return jax.nn.dot_product_attention(
            q_BSNH, k_BSKH, v_BSKH, mask=mask, is_causal=causal, implementation="cudnn"
        )

    return on_each_device(attend, q_BSNH, k_BSKH, v_BSKH, segment_ids_BS)
