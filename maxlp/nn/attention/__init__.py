"""Attention by name: one signature, the fastest kernel of the platform behind it.

====== ========= ===================================== ============================================
name   platform  memory beside q, k, v and the output  limits
====== ========= ===================================== ============================================
xla    any       5/8 of the (N, S, S) probabilities    none
cudnn  gpu       none; (S, S) with segment ids         bfloat16, float16; H a multiple of 8, ≤ 256
splash tpu       none                                  S a multiple of 128
ring   any       none                                  K a multiple of the tensor axis
====== ========= ===================================== ============================================

Shape letters: B batch · S query length · T key length · N query heads · K kv heads · G = N/K · H head dim ·
s the queries of one block, for all G heads that share a key.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxlp.nn.attention.ring import ring
from maxlp.parallel import sharding

PLATFORMS: dict[str, tuple[str, ...]] = {"cudnn": ("gpu", "cuda"), "splash": ("tpu",)}


def check(name: str, platform: str) -> None:
    """Raises a ValueError if attention ``name`` does not run on ``platform`` (``jax.Device.platform``)."""
    if platform not in PLATFORMS.get(name, (platform,)):
        raise ValueError(
            f"model.attention={name!r} runs on {PLATFORMS[name][0]}, and this is {platform}; "
            "model.attention='xla' runs on any platform"
        )


def xla(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    causal: bool,
    segment_ids_BS: jax.Array | None,
) -> jax.Array:
    """Softmax in float32 over logits that exist, in plain XLA operations.

    Four blocks of queries (of at least 64), each with the keys up to its end, do 5/8 of the work of the
    whole square. That, heads before positions, and the G heads of a key as rows of one matmul make forward
    and backward take 0.55 to 0.61 (float32) and 0.52 to 0.85 (bfloat16) of the CPU time of
    ``jax.nn.dot_product_attention``, for S from 128 to 1024 and H of 32 and 64. More blocks bring no more.
    """
    B, S, N, H = q_BSNH.shape
    K = k_BSKH.shape[2]
    q_BKGSH = jnp.moveaxis(q_BSNH.reshape(B, S, K, N // K, H), 1, 3)
    k_BKSH, v_BKSH = jnp.swapaxes(k_BSKH, 1, 2), jnp.swapaxes(v_BSKH, 1, 2)
    num_blocks = math.gcd(4, S // 64) if causal and S % 64 == 0 else 1

    out = []
    for start in range(0, S, S // num_blocks):
        rows = slice(start, start + S // num_blocks)
        keys = slice(0, rows.stop if causal else S)
        q_BKsH = q_BKGSH[:, :, :, rows].reshape(B, K, -1, H)
        logits_BKsT = jnp.einsum(
            "BKsH,BKTH->BKsT", q_BKsH, k_BKSH[:, :, keys], preferred_element_type=jnp.float32
        )
        visible_BST = _visible(rows, keys, causal, segment_ids_BS)
        visible_BsT = jnp.tile(visible_BST, (1, N // K, 1))
        logits_BKsT = jnp.where(visible_BsT[:, None], logits_BKsT * H**-0.5, jnp.finfo(jnp.float32).min)
        probs_BKsT = jax.nn.softmax(logits_BKsT, axis=-1).astype(v_BSKH.dtype)
        out_BKsH = jnp.einsum("BKsT,BKTH->BKsH", probs_BKsT, v_BKSH[:, :, keys])
        out.append(out_BKsH.reshape(B, K, N // K, -1, H))
    return jnp.moveaxis(jnp.concatenate(out, axis=3), 3, 1).reshape(B, S, N, H)


def _visible(rows: slice, keys: slice, causal: bool, segment_ids_BS: jax.Array | None) -> jax.Array:
    """Which keys a query may see, bool (B or 1, S, T)."""
    visible = jnp.ones((1, rows.stop - rows.start, keys.stop - keys.start), bool)
    if causal:
        visible &= jnp.arange(rows.start, rows.stop)[:, None] >= jnp.arange(keys.start, keys.stop)
    if segment_ids_BS is not None:
        visible &= segment_ids_BS[:, rows, None] == segment_ids_BS[:, None, keys]
    return visible


def cudnn(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    causal: bool,
    segment_ids_BS: jax.Array | None,
) -> jax.Array:
    """cuDNN's flash attention (NVIDIA GPUs from Ampere on; H up to 128 before Hopper).

    Segment ids become a bias (B, 1, S, S) in the dtype of q, and older JAX also computes its gradient: the
    one place where memory grows with S². cuDNN can read packed rows by offsets instead, but only with a
    fixed largest number of documents in a row, through a private function of JAX, and JAX 0.10 gets the
    offsets of the keys wrong for K < N.

    Raises:
      ValueError: a dtype or head dim that cuDNN does not have.
    """
    H = q_BSNH.shape[-1]
    if q_BSNH.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"model.attention='cudnn' computes in bfloat16 or float16, not {q_BSNH.dtype}; set model.dtype"
        )
    if H % 8 or H > 256:
        raise ValueError(
            f"model.attention='cudnn' needs model.head_dim={H} to be a multiple of 8 and at most 256"
        )

    def attend(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS):
        mask = None
        if segment_ids_BS is not None:
            mask = segment_ids_BS[:, None, :, None] == segment_ids_BS[:, None, None, :]
        return jax.nn.dot_product_attention(
            q_BSNH, k_BSKH, v_BSKH, mask=mask, is_causal=causal, implementation="cudnn"
        )

    return _on_each_device(attend, q_BSNH, k_BSKH, v_BSKH, segment_ids_BS)


def splash(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    causal: bool,
    segment_ids_BS: jax.Array | None,
    interpret: bool = False,
) -> jax.Array:
    """JAX's splash attention, a Pallas kernel for TPU that skips the blocks above the diagonal.

    Args:
      interpret: run the kernel's program operation by operation, on any platform (for tests).

    Raises:
      ValueError: a sequence length that the kernel's blocks do not divide.
    """
    # Here because it takes half a second and only TPU runs need it.
    from jax.experimental.pallas.ops.tpu import splash_attention as kernel

    _, S, _, H = q_BSNH.shape
    if S % 128:
        raise ValueError(f"model.attention='splash' needs a sequence length that 128 divides, not {S}")
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

    return _on_each_device(attend, q_BSNH, k_BSKH, v_BSKH, segment_ids_BS)


def _on_each_device(attend: Callable[..., jax.Array], *arrays: jax.Array | None) -> jax.Array:
    """``attend`` on every device's part of the batch and the heads: XLA cannot split a custom call.

    In a pipeline, which maps over its stages, those are more rows: kernels then need no rule for the map.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return attend(*arrays)
    rows = sharding.spec("batch")[0]
    if mesh.shape["stage"] == 1:
        return _on_rows(attend, rows, *arrays)
    one_stage = jax.custom_batching.custom_vmap(functools.partial(_on_rows, attend, rows))

    @one_stage.def_vmap
    def all_stages(stages, batched, *arrays):
        assert all(jax.tree.leaves(batched))
        arrays = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
        out_BSNH = _on_rows(attend, ("stage", *rows), *arrays)
        return out_BSNH.reshape(stages, -1, *out_BSNH.shape[1:]), True

    return one_stage(*arrays)


def _on_rows(
    attend: Callable[..., jax.Array], rows: Any, q_BSNH, k_BSKH, v_BSKH, segment_ids_BS
) -> jax.Array:
    mesh = jax.sharding.get_abstract_mesh()
    heads = PartitionSpec(rows, None, sharding.RULES["act_heads"], None)
    for x in (q_BSNH, k_BSKH):
        try:
            NamedSharding(mesh, heads).shard_shape(x.shape)
        except ValueError:
            raise ValueError(
                f"attention: (batch, seq, heads, head_dim)={x.shape} does not split as {heads} over the "
                f"mesh {dict(mesh.shape)}; choose sizes that divide, or model.attention='xla'"
            ) from None
    specs = (heads, heads, heads, PartitionSpec(rows, None))
    # Without check_vma: the kernels do not say over which axes their outputs vary.
    run = jax.shard_map(attend, in_specs=specs, out_specs=heads, check_vma=False)
    return run(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS)


ATTENTION: dict[str, Callable[..., jax.Array]] = {
    "xla": xla,
    "cudnn": cudnn,
    "splash": splash,
    "ring": ring,
}


def cached(q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BS: jax.Array) -> jax.Array:
    """Attention of new tokens to a key/value cache whose slot t holds the token at position t."""
    slots_T = jnp.arange(k_BTKH.shape[1])
    mask_B1ST = slots_T <= positions_BS[:, None, :, None]
    return jax.nn.dot_product_attention(q_BSNH, k_BTKH, v_BTKH, mask=mask_B1ST, implementation="xla")
