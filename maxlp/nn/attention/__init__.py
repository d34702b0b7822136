"""Attention by name: several kernels with one signature.

====== ======== ================================ =================================================
name   platform memory besides q, k, v, output   limits
====== ======== ================================ =================================================
xla    any      5/8 of (N, S, S) probabilities   none
flash  gpu      none                             H at most 256 in 16 bits and 128 in 32
cudnn  gpu      `cudnn.workspace`                S even; H a multiple of 8 and at most 256, before
                                                 Hopper 128; bfloat16 or float16; documents bounded
                                                 per row, and none before Hopper
splash tpu      none                             S a multiple of 128
ring   any      none                             none; the only one that can split S
====== ======== ================================ =================================================

All but xla need K to be a multiple of the mesh's tensor axis. ``auto`` is one of these, see `choose`.

A kernel takes q_BSNH, k_BSKH, v_BSKH and the keywords ``causal`` and ``segment_ids_BS`` (int32 or
None: tokens attend to their own segment only; along a row ids increase, and 0 for padding is at its
end, see `data.packing`), and returns o_BSNH in the dtype of q.

Shape letters: B batch · S query length · T key length · N query heads · K kv heads · H head dim.
"""

import dataclasses
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

AUTO = "auto"
FLASH_ROW_BYTES = 512  # bytes of one head of a token, at most
RESIDUALS = "attention_residuals"  # a name for remat policies: what the backward pass of a kernel needs
KERNELS = {
    AUTO: "maxlp.nn.attention.dense:dense",  # before the machine is known: runs everywhere
    "xla": "maxlp.nn.attention.dense:dense",
    "flash": "maxlp.nn.attention.flash:flash",
    "cudnn": "maxlp.nn.attention.cudnn:cudnn",
    "splash": "maxlp.nn.attention.splash:splash",
    "ring": "maxlp.nn.attention.ring:ring",
}
PLATFORMS: dict[str, tuple[str, ...]] = {
    "flash": ("gpu", "cuda"),
    "cudnn": ("gpu", "cuda"),
    "splash": ("tpu",),
}
# `auto` takes the first of these that accepts the model. The order has not been measured here: cuDNN's
# kernels have been published as 1.7 to 2.3 times as fast as FlashAttention-2 on H100
# (https://github.com/huggingface/transformers/pull/48163).
FASTEST = "splash", "cudnn", "flash"


def kernel(name: str) -> Callable[..., jax.Array]:
    """The attention function of a key of `KERNELS`, imported on demand."""
    return pkgutil.resolve_name(KERNELS[name])


class SequenceOrder(NamedTuple):
    """Functions that bring a sequence into a kernel's order and back.

    Attributes:
      balance: x_BS (tokens, positions, segment ids) from the natural order; see `ring.balance`.
      unbalance: x_BSD (activations) back to the natural order; see `ring.unbalance`.
    """

    balance: Callable[[jax.Array], jax.Array]
    unbalance: Callable[[jax.Array], jax.Array]


def sequence_order(name: str) -> SequenceOrder | None:
    """The order in which this kernel reads the sequence; None for the natural order."""
    if name != "ring":
        return None
    from maxlp.nn.attention import ring

    return SequenceOrder(ring.balance, ring.unbalance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """How a model uses attention, for `refusal`.

    Attributes:
      seq_len: S.
      num_heads: N.
      kv_heads: K, which divides N.
      head_dim: H.
      dtype: of q, k and v.
      packed: rows hold several documents, told apart by segment ids.
      max_documents: how many at most; None for any number.
      rows: that one device processes at once.
    """

    seq_len: int
    num_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    packed: bool
    max_documents: int | None = None
    rows: int = 1


def choose(uses: Sequence[Use], axes: Mapping[str, int], platform: str, device_kind: str) -> str:
    """The kernel that ``auto`` stands for.

    It is ring if the mesh splits the sequence, otherwise the first of `FASTEST` that accepts all uses, and
    xla if none does.

    Args:
      axes: the size of every mesh axis.
      platform, device_kind: as in `jax.Device`.
    """
    if axes["context"] > 1:
        return "ring"
    for name in FASTEST:
        if all(refusal(name, use, axes, platform, device_kind) is None for use in uses):
            return name
    return "xla"


def refusal(name: str, use: Use, axes: Mapping[str, int], platform: str, device_kind: str) -> str | None:
    """Why a kernel cannot be used and what to do instead, in one line; None if it can be used.

    Args:
      axes: the size of every mesh axis.
      platform, device_kind: as in `jax.Device`.
    """
    key = f"model.attention={name}"
    if platform not in PLATFORMS.get(name, (platform,)):
        return f"{key} runs on {PLATFORMS[name][0]}, not on {platform}; use model.attention=xla"
    if axes["context"] > 1 and name != "ring":
        return (
            f"{key} cannot split the sequence over mesh.context={axes['context']}; use model.attention=ring"
        )
    if name != "xla" and use.kv_heads % axes["tensor"]:
        return (
            f"{key} needs a number of key/value heads that is a multiple of "
            f"mesh.tensor={axes['tensor']}, not {use.kv_heads}; use model.attention=xla or another mesh"
        )
    if name == "splash" and use.seq_len % 128:
        return (
            f"{key} needs a sequence length that is a multiple of 128, not {use.seq_len}; use "
            "model.attention=xla or another length"
        )
    if name == "flash" and use.head_dim * jnp.dtype(use.dtype).itemsize > FLASH_ROW_BYTES:
        return (
            f"{key} needs a head dim of at most {FLASH_ROW_BYTES // jnp.dtype(use.dtype).itemsize} in "
            f"{use.dtype}, not {use.head_dim}; use model.attention=xla or ring"
        )
    if name == "cudnn":
        from maxlp.nn.attention import cudnn  # few runs need it

        return cudnn.refusal(key, use, use.num_heads // axes["tensor"], device_kind)
    return None


def cached(q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BS: jax.Array) -> jax.Array:
    """Attention of new tokens to a key/value cache whose slot t holds the token at position t."""
    slots_T = jnp.arange(k_BTKH.shape[1])
    mask_B1ST = slots_T[None, None, None] <= positions_BS[:, None, :, None]
    return jax.nn.dot_product_attention(q_BSNH, k_BTKH, v_BTKH, mask=mask_B1ST, implementation="xla")
