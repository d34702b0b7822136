"""Llama 2, 3, 3.1 and 3.2 (Touvron et al. 2023, arXiv:2307.09288; Dubey et al. 2024, arXiv:2407.21783).

Shape letters: B batch · S query length · T cache length · D embed · F mlp · N query heads · K kv heads ·
H head dim · V vocab · L layers.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp.nn import attention, layers, stack
from maxlp.nn.attention import ring
from maxlp.parallel.pipeline import PipelineConfig
from maxlp.parallel.sharding import constrain, constrain_gradient


class RopeScaling(NamedTuple):
    """Llama 3.1's stretching of the rotary wavelengths for contexts beyond the original one."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


class Cache(NamedTuple):
    """Keys and values of every layer; slot t of a row holds the token at position t."""

    k_LBTKH: jax.Array
    v_LBTKH: jax.Array


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, c: "Llama", rngs: nnx.Rngs):
        q_dim, kv_dim = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q_proj = c.linear(c.embed_dim, q_dim, ("embed", "q_heads"), rngs)
        self.k_proj = c.linear(c.embed_dim, kv_dim, ("embed", "kv_heads"), rngs)
        self.v_proj = c.linear(c.embed_dim, kv_dim, ("embed", "kv_heads"), rngs)
        self.o_proj = c.linear(q_dim, c.embed_dim, ("q_heads", "embed"), rngs, residual=True)
        self.head_dim = c.head_dim
        self.attend = attention.ATTENTION[c.attention]

    def __call__(self, x_BSD, rope, positions_BS, segment_ids_BS, cache):
        B, S, _ = x_BSD.shape
        # Left alone, XLA on TPU moves the reshape through the matmul to the kernel; the gradient's matmul
        # keeps the flat kernel, and the backward pass gathers both.
        flat = lambda y: constrain(y, "batch", "seq", "act_heads")  # noqa: E731
        heads = lambda y: constrain(  # noqa: E731
            flat(y).reshape(B, S, -1, self.head_dim), "batch", "seq", "act_heads", None
        )
        q_BSNH = rotate(heads(self.q_proj(x_BSD)), *rope)
        k_BSKH = rotate(heads(self.k_proj(x_BSD)), *rope)
        v_BSKH = heads(self.v_proj(x_BSD))
        if cache is None:
            o_BSNH = self.attend(q_BSNH, k_BSKH, v_BSKH, causal=True, segment_ids_BS=segment_ids_BS)
        else:
            row_B1 = jnp.arange(B)[:, None]
            k_BTKH, v_BTKH = cache
            cache = (
                k_BTKH.at[row_B1, positions_BS].set(k_BSKH),
                v_BTKH.at[row_B1, positions_BS].set(v_BSKH),
            )
            o_BSNH = attention.cached(q_BSNH, *cache, positions_BS)
        return self.o_proj(flat(o_BSNH.reshape(B, S, -1))), cache


class Mlp(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, c: "Llama", rngs: nnx.Rngs):
        self.gate_proj = c.linear(c.embed_dim, c.mlp_dim, ("embed", "mlp"), rngs)
        self.up_proj = c.linear(c.embed_dim, c.mlp_dim, ("embed", "mlp"), rngs)
        self.down_proj = c.linear(c.mlp_dim, c.embed_dim, ("mlp", "embed"), rngs, residual=True)

    def __call__(self, x_BSD):
        h_BSF = jax.nn.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD)
        return self.down_proj(constrain(h_BSF, "batch", "seq", "act_mlp"))


class Block(stack.Block):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, c: "Llama", rngs: nnx.Rngs):
        self.attn_norm = layers.RMSNorm(c.embed_dim, eps=c.norm_eps, param_dtype=c.param_dtype)
        self.attn = Attention(c, rngs)
        self.mlp_norm = layers.RMSNorm(c.embed_dim, eps=c.norm_eps, param_dtype=c.param_dtype)
        self.mlp = Mlp(c, rngs)

    def __call__(self, x_BSD, rope, positions_BS, segment_ids_BS, cache):
        whole = lambda y: constrain(y, "batch", "seq", "act_embed")  # noqa: E731
        split = lambda y: constrain(  # noqa: E731
            constrain_gradient(y, "batch", "seq", "act_embed"), "batch", "act_seq", "act_embed"
        )
        with jax.named_scope("attn"):
            h_BSD = whole(self.attn_norm(x_BSD))
            h_BSD, cache = self.attn(h_BSD, rope, positions_BS, segment_ids_BS, cache)
            x_BSD = x_BSD + split(h_BSD)
        with jax.named_scope("mlp"):
            x_BSD = x_BSD + split(self.mlp(whole(self.mlp_norm(x_BSD))))
        return x_BSD, cache


class Llama(nnx.Module):
    """A Llama: ``hidden`` runs the blocks, ``logits`` the head, calling the model runs both.

    Args:
      vocab_size, embed_dim, num_layers, num_heads, num_kv_heads, head_dim, mlp_dim: the sizes.
      max_seq_len: longest position the rotary embedding was made for (positions must stay below).
      rope_theta: base of the rotary wavelengths.
      rope_scaling: fields of `RopeScaling`, or None.
      norm_eps: epsilon of the norms.
      tie_embeddings: the logits use the embedding table.
      init_std: standard deviation of the weights. None: 1 / sqrt(inputs) for kernels, 1 for an embedding
        table (1 / sqrt(D) if tied). The two projections that write to the residual stream are drawn
        smaller by ``sqrt(2 L)`` (GPT-2).
      dtype: of activations and matmuls. param_dtype: of the stored parameters.
      attention: name in `attention.ATTENTION`.
      scan_layers, remat: see `stack.apply_stack` and `stack.REMAT_POLICIES`.
      pipeline: fields of `pipeline.PipelineConfig`, for a mesh with stages.

    Raises:
      ValueError: sizes that do not fit each other, unknown names.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        embed_dim: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mlp_dim: int,
        max_seq_len: int,
        rope_theta: float,
        rope_scaling: dict | None,
        norm_eps: float,
        tie_embeddings: bool,
        init_std: float | None,
        dtype: str,
        param_dtype: str,
        attention: str,
        scan_layers: bool,
        remat: str,
        rngs: nnx.Rngs,
        pipeline: dict | None = None,
    ):
        self.vocab_size = vocab_size
        self.embed_dim = embed_dim
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.mlp_dim = mlp_dim
        self.max_seq_len = max_seq_len
        self.rope_theta = rope_theta
        self.rope_scaling = None if rope_scaling is None else RopeScaling(**rope_scaling)
        self.norm_eps = norm_eps
        self.init_std = init_std
        self.dtype = jnp.dtype(dtype)
        self.param_dtype = jnp.dtype(param_dtype)
        self.attention = attention
        self.scan_layers = scan_layers
        self.remat = remat
        self.pipeline = PipelineConfig(**(pipeline or {}))
        check(self)

        self.tok_embed = layers.Embed(
            vocab_size,
            embed_dim,
            std=init_std or (embed_dim**-0.5 if tie_embeddings else 1.0),
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            rngs=rngs,
        )
        self.layers = stack.stack(lambda rngs: Block(self, rngs), num_layers, rngs)
        self.final_norm = layers.RMSNorm(embed_dim, eps=norm_eps, param_dtype=self.param_dtype)
        self.lm_head = (
            None if tie_embeddings else self.linear(embed_dim, vocab_size, ("embed", "vocab"), rngs)
        )

    def linear(self, in_dim: int, out_dim: int, axes: layers.Axes, rngs: nnx.Rngs, residual=False):
        std = self.init_std or in_dim**-0.5
        if residual:
            std /= math.sqrt(2 * self.num_layers)
        return layers.Linear(
            in_dim,
            out_dim,
            axes=axes,
            std=std,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            rngs=rngs,
        )

    def hidden(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array,
        segment_ids_BS: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Tokens to the normed output of the last block.

        With ring attention the blocks see the sequence in the order of `ring.balance`.

        Args:
          tokens_BS: int32 ids.
          positions_BS: int32, from 0 in each document.
          segment_ids_BS: int32 document of each token; tokens attend within their document only.
          cache: keys and values of earlier tokens, for generation; each row must be one document.

        Returns:
          x_BSD in ``dtype``, and the cache with these tokens written to it.
        """
        balanced = self.attention == "ring" and cache is None
        if balanced:
            tokens_BS, positions_BS, segment_ids_BS = jax.tree.map(
                ring.balance, (tokens_BS, positions_BS, segment_ids_BS)
            )
        with jax.named_scope("embed"):
            x_BSD = constrain(self.tok_embed(tokens_BS), "batch", "embed_seq", "act_embed")
        rope = rope_table(positions_BS, self.head_dim, self.rope_theta, self.rope_scaling)

        def call(block, x_BSD, of_rows, layer_cache):
            return block(x_BSD, *of_rows, layer_cache)

        with jax.named_scope("layers"):
            x_BSD, kv = stack.apply_stack(
                self.layers,
                x_BSD,
                call,
                (rope, positions_BS, segment_ids_BS),
                None if cache is None else tuple(cache),
                num_layers=self.num_layers,
                scan=self.scan_layers,
                remat=self.remat,
                pipeline=self.pipeline,
            )
        x_BSD = self.final_norm(x_BSD)
        return ring.unbalance(x_BSD) if balanced else x_BSD, None if cache is None else Cache(*kv)

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        """float32 logits_BSV of normed hidden states."""
        x_BSD = constrain(x_BSD, "batch", "ends_seq", "act_embed")
        return constrain(_head(self._head_module(), x_BSD), "batch", "ends_seq", "act_vocab")

    def head(self) -> tuple[Callable[[nnx.State, jax.Array], jax.Array], nnx.State]:
        """`logits` in two parts, a function of weights and hidden states, and the weights in ``dtype``; it
        says nothing of where rows lie."""
        graphdef, params, rest = nnx.split(self._head_module(), nnx.Param, ...)
        weights = jax.tree.map(lambda p: p.astype(self.dtype), params)
        return lambda weights, x_BSD: _head(nnx.merge(graphdef, weights, rest), x_BSD), weights

    def _head_module(self) -> nnx.Module:
        return self.tok_embed if self.lm_head is None else self.lm_head

    def __call__(self, tokens_BS, positions_BS=None, segment_ids_BS=None):
        """float32 logits_BSV; positions default to 0, 1, 2, …"""
        if positions_BS is None:
            positions_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
        return self.logits(self.hidden(tokens_BS, positions_BS, segment_ids_BS)[0])

    def init_cache(self, batch_size: int, length: int) -> Cache:
        shape = (self.num_layers, batch_size, length, self.num_kv_heads, self.head_dim)
        return Cache(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype))


def _head(module: nnx.Module, x_BSD: jax.Array) -> jax.Array:
    if isinstance(module, layers.Embed):
        return module.attend(x_BSD)
    return module(x_BSD, preferred_element_type=jnp.float32)


def rope_table(
    positions_BS: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position × frequency, float32 ``(B, S, 1, H/2)``.

    Frequencies are ``theta^(-2i/H)`` (Su et al. 2021, arXiv:2104.09864). With scaling (Llama 3.1),
    wavelengths above ``original / low_freq_factor`` grow by ``factor``, those below
    ``original / high_freq_factor`` stay, and the ones between are blended.
    """
    freqs = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        turns = scaling.original_max_seq_len * freqs / (2 * jnp.pi)  # in the original context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = jnp.clip((turns - low) / (high - low), 0, 1)
        freqs = keep * freqs + (1 - keep) * freqs / scaling.factor
    angles = positions_BS[:, :, None, None].astype(jnp.float32) * freqs
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BSNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + H/2), the pairing of the Hugging Face weights; computed in float32."""
    a, b = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSNH.dtype)


def check(c: Llama) -> None:
    """Raises a ValueError that names the first size or name that cannot work."""
    if c.num_heads % c.num_kv_heads:
        raise ValueError(
            f"model.num_heads={c.num_heads} is not a multiple of model.num_kv_heads={c.num_kv_heads}"
        )
    if c.head_dim % 2:
        raise ValueError(f"model.head_dim={c.head_dim} is odd; rotary embedding turns pairs")
    for name, value, known in (
        ("attention", c.attention, attention.ATTENTION),
        ("remat", c.remat, stack.REMAT_POLICIES),
    ):
        if value not in known:
            raise ValueError(f"model.{name}={value!r} is unknown; one of {', '.join(known)}")


def num_params(model: nnx.Module) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
