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
    """cuDNN's flash attention (Ampere or newer; before Hopper only for H up to 128), without segment ids.

    As a mask, segment ids would be an (S, S) bias. cuDNN can take the offsets of the documents in packed
    rows instead, but only with a fixed maximum of documents per row and through a private function of
    JAX, and JAX 0.10 computes wrong offsets of the keys for K < N.
    """
    assert segment_ids_BS is None, "see attention.refusal"

    def attend(q_BSNH, k_BSKH, v_BSKH, _):
        return jax.nn.dot_product_attention(
            q_BSNH, k_BSKH, v_BSKH, is_causal=causal, implementation="cudnn"
        )

    return on_each_device(attend, q_BSNH, k_BSKH, v_BSKH, None)
