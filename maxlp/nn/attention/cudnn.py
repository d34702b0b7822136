"""cuDNN's flash attention for NVIDIA GPUs, on Hopper or newer also for rows of packed documents.

As a mask, documents would be an (S, S) bias. Instead, cuDNN reads q, k and v as ragged arrays: it is given
the length of each document and the offset of its first element, and skips what lies between documents in
both passes. The number of documents is part of the program, and memory is reserved for that many of length
S (`workspace`), so the loader has to bound it (``data.max_documents``).

JAX's function for this layout is private, computes wrong offsets of keys for K < N in 0.10, and leaves its
residuals without a name for remat policies. So its primitives are bound here, with offsets of our own.

Shape letters: B batch · S length · T = B·S tokens · N query heads · K kv heads · H head dim · M documents
of a row at most, padding included · D = B·M documents.
"""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlp.nn.attention import RESIDUALS, Use
from maxlp.nn.attention.per_device import on_each_device

# Parts of `jax.Device.device_kind`: GPUs on which cuDNN has the packed layout, and heads above 128.
HOPPER_OR_NEWER = "H100", "H200", "B200", "B300"
MAX_DOCUMENTS = 16  # in a row; in its backward pass, cuDNN reserves memory for each as if it filled the row


def cudnn(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    causal: bool,
    segment_ids_BS: jax.Array | None,
) -> jax.Array:
    """cuDNN's flash attention, for at most `MAX_DOCUMENTS` documents per row; undefined for more."""
    return on_each_device(lambda *arrays: _attend(*arrays, causal), q_BSNH, k_BSKH, v_BSKH, segment_ids_BS)


def refusal(key: str, use: Use, heads: int, device_kind: str) -> str | None:
    """See `attention.refusal`.

    Args:
      key: the key of the config and its value, for the message.
      heads: N on one device.
    """
    is_hopper = any(name in device_kind for name in HOPPER_OR_NEWER)
    if use.packed and not is_hopper:
        return (
            f"{key} keeps the documents of a packed row apart on {', '.join(HOPPER_OR_NEWER)}, not on "
            f"{device_kind}; use model.attention=flash"
        )
    if use.packed and not 1 <= (use.max_documents or 0) <= MAX_DOCUMENTS:
        return (
            f"{key} keeps at most {MAX_DOCUMENTS} documents of a packed row apart, but "
            f"data.max_documents={use.max_documents}; set data.max_documents={MAX_DOCUMENTS} or use "
            "model.attention=flash"
        )
    if use.packed and use.rows * use.seq_len * heads * use.head_dim >= 2**31:  # offsets are int32
        return (
            f"{key} takes fewer than 2^31 elements of packed queries at once, not {use.rows} rows × "
            f"{use.seq_len} × {heads} heads × {use.head_dim}; raise train.microbatches or use "
            "model.attention=flash"
        )
    if use.seq_len % 2:
        return f"{key} needs an even sequence length, not {use.seq_len}; use model.attention=flash"
    if use.dtype not in ("bfloat16", "float16"):
        return f"{key} computes in bfloat16 or float16, not {use.dtype}; set model.dtype to one of them"
    largest = 256 if is_hopper else 128
    if use.head_dim % 8 or use.head_dim > largest:
        return (
            f"{key} needs a head dim that is a multiple of 8 and at most {largest} on {device_kind}, not "
            f"{use.head_dim}; use model.attention=flash or xla"
        )
    return None


def workspace(elements: float, packed: bool) -> float:
    """Bytes of workspace of cuDNN's backward pass, which only a compilation on a GPU with cuDNN shows.

    It sums the gradient of q in float32, for every document as if it had the length of a row: ``dQ_accum``
    of cuDNN's frontend, whose bound by the number of tokens (``max_total_seq_len_q``) XLA does not set.

    Args:
      elements: how many q has.
    """
    return 4 * elements * (MAX_DOCUMENTS + 1 if packed else 1)


@functools.cache
def _fused() -> Any:
    """JAX's private module of cuDNN's primitives, imported only for a model that uses them."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, causal):
    return _attend_fwd(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, causal)[0]


def _attend_fwd(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, causal):
    documents = None if segment_ids_BS is None else Documents.of(segment_ids_BS)
    operands, parameters = _ragged(q_BSNH, k_BSKH, documents, causal)
    out_BSNH, log_sum = _fused()._dot_product_attention_fwd_p.bind(
        q_BSNH, k_BSKH, v_BSKH, *operands, **parameters, is_training=True
    )
    log_sum_BNS = log_sum if documents is None else documents.joined(log_sum)
    out_BSNH = checkpoint_name(out_BSNH, RESIDUALS)
    log_sum_BNS = checkpoint_name(log_sum_BNS, RESIDUALS)
    return out_BSNH, (q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, out_BSNH, log_sum_BNS)


def _attend_bwd(causal, saved, dout_BSNH):
    q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, out_BSNH, log_sum_BNS = saved
    documents = None if segment_ids_BS is None else Documents.of(segment_ids_BS)
    operands, parameters = _ragged(q_BSNH, k_BSKH, documents, causal)
    log_sum = log_sum_BNS if documents is None else documents.split(log_sum_BNS)
    rows = log_sum, out_BSNH, dout_BSNH
    gradients = _fused()._dot_product_attention_bwd_p.bind(
        q_BSNH, k_BSKH, v_BSKH, *operands, *rows, **parameters
    )
    return *gradients, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _ragged(q_BSNH, k_BSKH, documents, causal) -> tuple[list[jax.Array], dict[str, Any]]:
    """The operands behind q, k and v, and the parameters, of both of JAX's primitives."""
    none = jnp.zeros(0, q_BSNH.dtype)
    lengths, offsets, mask = [none] * 2, [none] * 2, "CAUSAL" if causal else "NO_MASK"
    if documents is not None:
        lengths = [documents.lengths_BM] * 2
        offsets = [documents.offsets(q_BSNH), documents.offsets(k_BSKH)]
        mask = "PADDING_CAUSAL" if causal else "PADDING"
    parameters = dict(
        scale=q_BSNH.shape[-1] ** -0.5,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),  # no bias, no gradient of one
        mask_type=_fused().MaskType[mask],
        layout=_fused().AttentionLayout.BTNH.value,
        sliding_window_length=None,
    )
    of_0_12 = "score_mod_name", "score_mod_jaxpr"
    known = inspect.signature(_fused()._dot_product_attention_fwd_cuda_lowering).parameters
    parameters |= dict.fromkeys(name for name in of_0_12 if name in known)
    bias, page_tables = none, [none] * 2
    return [bias, *lengths, *offsets, *page_tables], parameters


# --- documents of packed rows -----------------------------------------------------------------------------


class Documents(NamedTuple):
    """Where the documents of all rows are, one row after the other.

    Padding is a document too, so that every output is defined. Behind the last document there are empty
    ones, at the end of the tokens.

    Attributes:
      number_BS: of the document of each token, from 0 over all rows.
      starts: int32 (D + B,), the first token of each document among all T.
    """

    number_BS: jax.Array
    starts: jax.Array

    @classmethod
    def of(cls, segment_ids_BS: jax.Array) -> "Documents":
        B, S = segment_ids_BS.shape
        is_first_BS = jnp.ones((B, S), bool).at[:, 1:].set(segment_ids_BS[:, 1:] != segment_ids_BS[:, :-1])
        number_T = jnp.cumsum(is_first_BS.ravel(), dtype=jnp.int32) - 1
        # How many tokens are in earlier documents. Comparisons need no scatter, which GPUs are slow at.
        earlier = number_T[None] < jnp.arange(B * (MAX_DOCUMENTS + 2))[:, None]
        return cls(number_T.reshape(B, S), jnp.sum(earlier, axis=1, dtype=jnp.int32))

    @property
    def lengths_BM(self) -> jax.Array:
        B = self.number_BS.shape[0]
        return jnp.diff(self.starts)[: B * (MAX_DOCUMENTS + 1)].reshape(B, -1)

    def offsets(self, x_BSNH: jax.Array) -> jax.Array:
        """The offset of each document's first element in the memory of an array, int32 (B, M + 1)."""
        B, S, N, H = x_BSNH.shape
        assert B * S * N * H < 2**31, "see attention.refusal"
        return (self.starts * (N * H)).reshape(B, -1)

    def joined(self, x_DNS: jax.Array) -> jax.Array:
        """Values of tokens in the layout of documents, (D, N, S), in that of rows: (B, N, S)."""
        B, S = self.number_BS.shape
        place_BS = jnp.arange(B * S).reshape(B, S) - self.starts[self.number_BS]
        heads_1N1 = jnp.arange(x_DNS.shape[1])[None, :, None]
        return x_DNS[self.number_BS[:, None], heads_1N1, place_BS[:, None]]

    def split(self, x_BNS: jax.Array) -> jax.Array:
        """The inverse of `joined`; past the end of a document are values of other documents."""
        B, N, S = x_BNS.shape
        starts_D = self.starts[: B * (MAX_DOCUMENTS + 1)]
        token_D1S = jnp.minimum(starts_D[:, None, None] + jnp.arange(S)[None, None], B * S - 1)
        return x_BNS[token_D1S // S, jnp.arange(N)[None, :, None], token_D1S % S]
