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
    """cuDNN's flash attention (Ampere or newer; before Hopper only for H up to 128).

    Segment ids become a bias (B, 1, S, S) in the dtype of q, and older versions of JAX also compute
    its gradient: only here memory grows with S². cuDNN could take the offsets of the documents in
    packed rows instead, but only with a fixed maximum of documents per row and through a private
    function of JAX, and JAX 0.10 computes wrong offsets of the keys for K < N.
    """

    def attend(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS):
        mask = None
        if segment_ids_BS is not None:
            mask = segment_ids_BS[:, None, :, None] == segment_ids_BS[:, None, None, :]
        return jax.nn.dot_product_attention(
            q_BSNH, k_BSKH, v_BSKH, mask=mask, is_causal=causal, implementation="cudnn"
        )

    return on_each_device(attend, q_BSNH, k_BSKH, v_BSKH, segment_ids_BS)
