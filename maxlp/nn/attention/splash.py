"""JAX's splash attention, a Pallas kernel for TPU. Shape letters: those of `nn.attention`."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as kernel

from maxlp.nn.attention import RESIDUALS
from maxlp.nn.attention.per_device import on_each_device


def splash(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    causal: bool,
    segment_ids_BS: jax.Array | None,
    interpret: bool = False,
) -> jax.Array:
    """Splash attention, which skips the blocks above the causal diagonal.

    Args:
      interpret: runs the kernel operation by operation, on any platform (for tests).
    """
    _, S, _, H = q_BSNH.shape
    assert S % 128 == 0, "see attention.refusal"
    block = next(size for size in (512, 256, 128) if S % size == 0)
    blocks = kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = (kernel.CausalMask if causal else kernel.FullMask)((S, S))

    def attend(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS):
        run = kernel.make_splash_mha_single_device(
            kernel.MultiHeadMask([mask] * q_BSNH.shape[2]),
            block_sizes=blocks,
            residual_checkpoint_name=RESIDUALS,
            interpret=interpret,
        )
        # The kernel does not scale. In bfloat16, H**-0.5 itself would be off by up to 0.4 %.
        q_BSNH = (q_BSNH.astype(jnp.float32) * H**-0.5).astype(q_BSNH.dtype)
        q_BNSH, k_BKSH, v_BKSH = (jnp.swapaxes(x, 1, 2) for x in (q_BSNH, k_BSKH, v_BSKH))
        ids = None
        if segment_ids_BS is not None:
            ids = kernel.SegmentIds(segment_ids_BS, segment_ids_BS)
        out_BNSH = jax.vmap(run)(q_BNSH, k_BKSH, v_BKSH, ids)
        return jnp.swapaxes(out_BNSH, 1, 2)  # pyright: ignore[reportArgumentType]

    return on_each_device(attend, q_BSNH, k_BSKH, v_BSKH, segment_ids_BS)
