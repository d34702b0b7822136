"""Llama 2, 3, 3.1 and 3.2 (Touvron et al. 2023, arXiv:2307.09288; Dubey et al. 2024, arXiv:2407.21783).

Shape letters: B batch · S query length · T cache length · D embed · F mlp · N query heads · K kv heads ·
H head dim · V vocab · L layers.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlp import schema
from maxlp.nn import attention, layers, stack
from maxlp.parallel.schedule import PipelineConfig
from maxlp.parallel.sharding import constrain, constrain_params, gather_sequence, split_sequence
from maxlp.schema import Count, OneOf, Positive, PositiveFraction, Range


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 stretches the rotary wavelengths for contexts beyond the original one."""

    factor: Annotated[float, Range(at_least=1)]
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_seq_len: Count

    def __post_init__(self):
        schema.check(self)
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be below high_freq_factor="
                f"{self.high_freq_factor}; Llama 3.1 has 1 and 4"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The config's ``model`` section of a Llama.

    Attributes:
      vocab_size, embed_dim, num_layers, num_heads, num_kv_heads, head_dim, mlp_dim: the sizes.
      max_seq_len: the longest sequence; positions stay below it.
      rope_theta: base of the rotary wavelengths.
      rope_scaling: Llama 3.1's stretching of them, or None.
      norm_eps: epsilon of the norms.
      qk_norm: RMS norms of the queries and keys of each head, before their rotation (Qwen3).
      logit_soft_cap: c, with which logits x become c · tanh(x / c), between -c and c (Gemma 2, arXiv:
        2408.00118, has 30); None leaves them as they are.
      qk_clip: τ; a head whose largest attention logit exceeds it has the kernels of its queries and keys
        scaled down (`families.llama.qk_clip`; Kimi K2 has 100). None is off.
      tie_embeddings: the logits use the embedding table.
      init_std: standard deviation of the weights. None: 1 / sqrt(inputs) for kernels, 1 for the embedding
        table (1 / sqrt(D) if tied). The two projections that write to the residual stream are scaled down
        by ``sqrt(2 L)`` (GPT-2).
      dtype: of activations and matmuls, one of `layers.DTYPES`.
      param_dtype: of the stored parameters, one of `layers.DTYPES`; float16 trains with `scalify` only.
      attention: a key of `attention.KERNELS`; "auto" is the platform's, see `attention.choose`.
      scan_layers: False unrolls the loop over layers, see `stack.apply_stack`.
      remat: a key of `stack.REMAT_POLICIES`.
      pipeline: the schedule on a mesh with stages.

    Raises:
      ValueError: an invalid size, or sizes that do not fit each other.
    """

    vocab_size: Count
    embed_dim: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    mlp_dim: Count
    max_seq_len: Count
    rope_theta: Annotated[float, Range(at_least=1)]
    rope_scaling: RopeScaling | None
    norm_eps: PositiveFraction
    tie_embeddings: bool
    init_std: Positive | None
    dtype: Annotated[str, OneOf(layers.DTYPES)]
    param_dtype: Annotated[str, OneOf(layers.DTYPES)]
    attention: Annotated[str, OneOf(attention.KERNELS)]
    scan_layers: bool
    remat: Annotated[str, OneOf(stack.REMAT_POLICIES)]
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    qk_norm: bool = False
    logit_soft_cap: Positive | None = None
    qk_clip: Positive | None = None

    def __post_init__(self):
        schema.check(self)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "change one of them"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd, but the rotary embedding rotates pairs; use an even one"
            )
        if self.qk_clip is not None and self.qk_norm:
            raise ValueError(
                f"qk_clip={self.qk_clip} has no effect with qk_norm=True, whose norms undo any scale of "
                "the kernels; unset one of them"
            )

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    def linear(self, in_dim: int, out_dim: int, axes: layers.Axes, rngs: nnx.Rngs, residual: bool = False):
        """A `Linear`; ``residual`` marks one that writes to the residual stream."""
        std = self.init_std or in_dim**-0.5
        if residual:
            std /= math.sqrt(2 * self.num_layers)
        return layers.Linear(
            in_dim,
            out_dim,
            axes=axes,
            std=std,
            dtype=jnp.dtype(self.dtype),
            param_dtype=jnp.dtype(self.param_dtype),
            rngs=rngs,
        )

    def norm(self, dim: int) -> layers.RMSNorm:
        return layers.RMSNorm(dim, eps=self.norm_eps, param_dtype=jnp.dtype(self.param_dtype))


Cache = tuple[jax.Array, jax.Array]  # k_LBTKH and v_LBTKH; slot t of a row holds the token at position t


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, optionally with norms of queries and keys."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        self.q_proj = c.linear(c.embed_dim, c.q_dim, ("embed", "q_heads"), rngs)
        self.k_proj = c.linear(c.embed_dim, c.kv_dim, ("embed", "kv_heads"), rngs)
        self.v_proj = c.linear(c.embed_dim, c.kv_dim, ("embed", "kv_heads"), rngs)
        self.o_proj = c.linear(c.q_dim, c.embed_dim, ("q_heads", "embed"), rngs, residual=True)
        self.q_norm = c.norm(c.head_dim) if c.qk_norm else None
        self.k_norm = c.norm(c.head_dim) if c.qk_norm else None
        if c.qk_clip is None:
            self.max_logits = None
        else:
            from maxlp.families.llama.qk_clip import MaxLogits  # few runs need it

            self.max_logits = MaxLogits(c.num_heads)
        self.head_dim = c.head_dim
        self.attend = attention.kernel(c.attention)

    def __call__(self, x_BSD, rope, positions_BS, segment_ids_BS, cache):
        B, S, _ = x_BSD.shape
        q_BSD, k_BSD, v_BSD = layers.apply_to_same_input(x_BSD, self.q_proj, self.k_proj, self.v_proj)
        q_BSNH = rotate(self.heads(q_BSD, self.q_norm), *rope)
        k_BSKH = rotate(self.heads(k_BSD, self.k_norm), *rope)
        v_BSKH = self.heads(v_BSD)
        if cache is None:
            if self.max_logits is not None:
                self.max_logits(q_BSNH, k_BSKH, positions_BS, segment_ids_BS)
            o_BSNH = self.attend(q_BSNH, k_BSKH, v_BSKH, causal=True, segment_ids_BS=segment_ids_BS)
        else:
            row_B1 = jnp.arange(B)[:, None]
            k_BTKH, v_BTKH = cache
            cache = (
                k_BTKH.at[row_B1, positions_BS].set(k_BSKH),
                v_BTKH.at[row_B1, positions_BS].set(v_BSKH),
            )
            o_BSNH = attention.cached(q_BSNH, *cache, positions_BS)
        return self.o_proj(_flat_heads(o_BSNH.reshape(B, S, -1))), cache

    def heads(self, y_BSD: jax.Array, norm: layers.RMSNorm | None = None) -> jax.Array:
        """(B, S, heads · H) to (B, S, heads, H), normed if there is a norm."""
        y_BSNH = _flat_heads(y_BSD).reshape(*y_BSD.shape[:2], -1, self.head_dim)
        y_BSNH = constrain(y_BSNH, "batch", "seq", "act_heads", None)
        return y_BSNH if norm is None else norm(y_BSNH)


def _flat_heads(y_BSD: jax.Array) -> jax.Array:
    # Without this constraint XLA on TPU moves the reshape through the matmul to the kernel, while the
    # gradient's matmul keeps the flat kernel, so that the backward pass gathers the kernel twice.
    return constrain(y_BSD, "batch", "seq", "act_heads")


class Mlp(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` (Shazeer 2020, arXiv:2002.05202)."""

    silu: Callable[[jax.Array], jax.Array] = staticmethod(jax.nn.silu)

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        self.gate_proj = c.linear(c.embed_dim, c.mlp_dim, ("embed", "mlp"), rngs)
        self.up_proj = c.linear(c.embed_dim, c.mlp_dim, ("embed", "mlp"), rngs)
        self.down_proj = c.linear(c.mlp_dim, c.embed_dim, ("mlp", "embed"), rngs, residual=True)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        gate_BSF, up_BSF = layers.apply_to_same_input(x_BSD, self.gate_proj, self.up_proj)
        h_BSF = self.silu(gate_BSF) * up_BSF
        return self.down_proj(constrain(h_BSF, "batch", "seq", "act_mlp"))


class Block(stack.Block):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        self.attn_norm = c.norm(c.embed_dim)
        self.attn = Attention(c, rngs)
        self.mlp_norm = c.norm(c.embed_dim)
        self.mlp = Mlp(c, rngs)

    def __call__(self, x_BSD, rope, positions_BS, segment_ids_BS, cache):
        with jax.named_scope("attn"):
            h_BSD = gather_sequence(self.attn_norm(x_BSD))
            h_BSD, cache = self.attn(h_BSD, rope, positions_BS, segment_ids_BS, cache)
            x_BSD = x_BSD + split_sequence(h_BSD)
        with jax.named_scope("mlp"):
            h_BSD = gather_sequence(self.mlp_norm(x_BSD))
            x_BSD = x_BSD + split_sequence(self.mlp(h_BSD))
        return x_BSD, cache


class Llama(nnx.Module):
    """A Llama: ``hidden`` runs the blocks, ``logits`` the head; calling the model runs both."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        self.order = nnx.static(attention.sequence_order(c.attention))
        tied = c.embed_dim**-0.5 if c.tie_embeddings else 1.0
        self.tok_embed = layers.Embed(
            c.vocab_size,
            c.embed_dim,
            std=c.init_std or tied,
            dtype=jnp.dtype(c.dtype),
            param_dtype=jnp.dtype(c.param_dtype),
            rngs=rngs,
        )
        self.layers = stack.stack(lambda rngs: Block(c, rngs), c.num_layers, rngs)
        self.final_norm = c.norm(c.embed_dim)
        self.lm_head = (
            None if c.tie_embeddings else c.linear(c.embed_dim, c.vocab_size, ("embed", "vocab"), rngs)
        )

    def hidden(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array,
        segment_ids_BS: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Tokens to the normed output of the last block.

        Args:
          tokens_BS: int32 ids.
          positions_BS: int32, from 0 in each document.
          segment_ids_BS: int32 document of each token; tokens attend within their document only.
          cache: keys and values of earlier tokens, for generation; each row must be one document.

        Returns:
          x_BSD in ``dtype``, and the cache with these tokens written to it.
        """
        c = self.config
        order = self.order if cache is None else None
        if order is not None:
            tokens_BS, positions_BS, segment_ids_BS = jax.tree.map(
                order.balance, (tokens_BS, positions_BS, segment_ids_BS)
            )
        with jax.named_scope("embed"):
            x_BSD = constrain(self.tok_embed(tokens_BS), "batch", "embed_seq", "act_embed")
        cos, sin = rope_table(positions_BS, c.head_dim, c.rope_theta, c.rope_scaling)
        if not c.scan_layers:  # a loop, which XLA does not fuse into each layer to compute it again
            cos, sin = jax.lax.map(lambda is_sin: jnp.where(is_sin, sin, cos), jnp.array([False, True]))
        with jax.named_scope("layers"):
            x_BSD, new_cache = stack.apply_stack(
                self.layers,
                x_BSD,
                lambda block, x_BSD, per_row, cache: block(x_BSD, *per_row, cache),
                per_row=((cos, sin), positions_BS, segment_ids_BS),
                per_layer=cache,
                num_layers=c.num_layers,
                scan=c.scan_layers,
                remat=c.remat,
                pipeline=c.pipeline,
            )
        x_BSD = self.final_norm(x_BSD)
        return x_BSD if order is None else order.unbalance(x_BSD), new_cache

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        """float32 logits_BSV of normed hidden states."""
        x_BSD = constrain(x_BSD, "batch", "logits_seq", "act_embed")
        logits_BSV = self.cap(_product(self._head_module(), x_BSD))
        return constrain(logits_BSV, "batch", "logits_seq", "act_vocab")

    def cap(self, logits_BSV: jax.Array) -> jax.Array:
        soft_cap = self.config.logit_soft_cap
        return logits_BSV if soft_cap is None else soft_cap * jnp.tanh(logits_BSV / soft_cap)

    def head(self) -> tuple[Callable[[nnx.State, jax.Array], jax.Array], nnx.State]:
        """Uncapped `logits` as a function of (weights, hidden states) without sharding constraints, and the
        weights in ``dtype``. State that the head writes, such as its health, is dropped.

        Frozen weights are gathered here: inside of the function every chunk of the loss would gather them.
        """
        graphdef, params, frozen, rest = nnx.split(self._head_module(), nnx.Param, layers.Frozen, ...)
        weights, frozen = jax.tree.map(lambda p: p.astype(self.config.dtype), (params, frozen))
        rest = jax.lax.stop_gradient((constrain_params(frozen, gathered=True), rest))
        is_plain = self.has_plain_head

        def product(weights: nnx.State, x: jax.Array) -> jax.Array:
            head = nnx.merge(graphdef, weights, *rest, copy=True)
            if not is_plain:
                return _product(head, x)
            # Not cast before the matmul, so that the gradient has the dtype of the weights, see `losses`.
            return layers.logits(x, head.embedding[...].T if self.lm_head is None else head.kernel[...])

        return product, weights

    @property
    def has_plain_head(self) -> bool:
        """Whether the head is trained, without a recipe, in a dtype that has the range of float32."""
        head = self._head_module()
        plain = isinstance(head, layers.Embed) or head.dot_general is layers.dot_general
        return plain and not nnx.state(head, layers.Frozen) and self.config.dtype != "float16"

    def _head_module(self) -> layers.Embed | layers.Linear:
        return self.tok_embed if self.lm_head is None else self.lm_head

    def __call__(self, tokens_BS, positions_BS=None, segment_ids_BS=None) -> jax.Array:
        """float32 logits_BSV; positions default to 0, 1, 2, …"""
        if positions_BS is None:
            positions_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
        return self.logits(self.hidden(tokens_BS, positions_BS, segment_ids_BS)[0])

    def init_cache(self, batch_size: int, length: int) -> Cache:
        c = self.config
        shape = (c.num_layers, batch_size, length, c.num_kv_heads, c.head_dim)
        return jnp.zeros(shape, c.dtype), jnp.zeros(shape, c.dtype)


def _product(head: layers.Embed | layers.Linear, x_BSD: jax.Array) -> jax.Array:
    if isinstance(head, layers.Embed):
        return head.attend(x_BSD)
    return head(x_BSD, preferred_element_type=jnp.float32)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Radians per position of each pair, float64 (H/2,).

    ``theta^(-2i/H)`` (Su et al. 2021, arXiv:2104.09864). With scaling (Llama 3.1), wavelengths above
    ``original / low_freq_factor`` grow by ``factor``, those below ``original / high_freq_factor`` stay, and
    those between are interpolated.
    """
    freqs = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return freqs
    turns = scaling.original_max_seq_len * freqs / (2 * np.pi)  # in the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return keep * freqs + (1 - keep) * freqs / scaling.factor


def rope_table(
    positions_BS: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position × `rope_frequencies`, float32 ``(B, S, 1, H/2)``.

    In float32 the product at position 131,071 would be wrong by up to 0.008 rad, and by more where a device
    computes powers less exactly. Here a frequency is a fixed-point number of 48 bits of a turn, and its
    product with the position is exact modulo one turn. What remains is the rounding of an angle in
    [-π, π) to float32, below 7e-7 rad for every position below 2^17.
    """
    turns_H = np.rint(rope_frequencies(head_dim, theta, scaling) / (2 * np.pi) * 2.0**48).astype(np.uint64)
    high, low = (jnp.asarray(x, jnp.uint32)[None, None, None] for x in (turns_H >> 16, turns_H & 0xFFFF))
    position = positions_BS[:, :, None, None].astype(jnp.uint32)
    carry = (position & 0xFFFF) * low
    units = position * high + (position >> 16) * low + (carry >> 16)  # of 2^-32 turns; drops whole turns
    units = jax.lax.bitcast_convert_type(units, jnp.int32).astype(jnp.float32)  # from half a turn back
    angles = (units + (carry & 0xFFFF).astype(jnp.float32) * 2.0**-16) * (2 * np.pi * 2.0**-32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BSNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + H/2), as Hugging Face's weights pair them; computed in float32."""
    a, b = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSNH.dtype)
