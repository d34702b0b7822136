"""The transformer blocks that the image tower and the text tower of a CLIP share.

Shape letters: B batch · S positions · D embed · F mlp · N heads · H head dim · L layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp import schema
from maxlp.nn import attention, layers, stack
from maxlp.parallel import sharding
from maxlp.parallel.sharding import constrain, gather_sequence, split_sequence

if TYPE_CHECKING:
    from maxlp.families.clip.model import CLIPConfig


def quick_gelu(x: jax.Array) -> jax.Array:
    """The approximation of GELU that OpenAI's weights were trained with."""
    return x * jax.nn.sigmoid(1.702 * x)


def gelu(x: jax.Array) -> jax.Array:
    """GELU with the error function, computed in float32 and rounded once to the dtype of x.

    From bfloat16 operations, each of which rounds, XLA for GPUs would make two kernels: the first one
    writes the argument of the error function to memory.
    """
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "quick_gelu": quick_gelu,
}


# --- initial values -------------------------------------------------------------------------------------


class Init(NamedTuple):
    """How the kernels of a block are drawn: ``draw`` times the standard deviation of each kind.

    The biases of the MLP are drawn uniformly; those of attention are zero.
    """

    draw: layers.Draw
    qkv: float
    out: float
    up: float
    down: float
    up_bias: float
    down_bias: float


def _clip_visual(D: int, F: int, L: int) -> Init:
    # PyTorch's defaults: Xavier over the joint (3D, D) kernel of q, k and v, Kaiming elsewhere.
    wide, narrow = (3 * D) ** -0.5, (3 * F) ** -0.5
    return Init(layers.uniform, (2 * D) ** -0.5, wide, wide, narrow, wide, narrow)


def _clip_text(D: int, F: int, L: int) -> Init:
    residual = D**-0.5 * (2 * L) ** -0.5
    biases = (3 * D) ** -0.5, (3 * F) ** -0.5
    return Init(layers.normal, D**-0.5, residual, (2 * D) ** -0.5, residual, *biases)


def _siglip(D: int, F: int, L: int) -> Init:
    mlp = (2 / (D + F)) ** 0.5
    return Init(layers.uniform, D**-0.5, D**-0.5, mlp, mlp, 1e-6, 1e-6)


# Name of the scheme -> tower -> a function of (D, F, L) to the initial values of its blocks.
INITS: dict[str, dict[str, Callable[[int, int, int], Init]]] = {
    "clip": {"visual": _clip_visual, "text": _clip_text},
    "siglip": {"visual": _siglip, "text": _siglip},
}


# --- an encoder -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """Makes and runs the blocks of one tower.

    Attributes:
      model: the config of the whole model.
      tower: "visual" or "text".
    """

    model: "CLIPConfig"
    tower: str

    @property
    def sizes(self) -> Any:
        """The tower's own section of the config."""
        return getattr(self.model, self.tower)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.model.dtype)

    @property
    def param_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.model.param_dtype)

    @property
    def block_init(self) -> Init:
        c = self.sizes
        return INITS[self.model.init][self.tower](c.width, c.mlp_dim, c.num_layers)

    def linear(self, in_dim: int, out_dim: int, axes: layers.Axes, rngs: nnx.Rngs, **how) -> layers.Linear:
        return layers.Linear(
            in_dim, out_dim, axes=axes, dtype=self.dtype, param_dtype=self.param_dtype, rngs=rngs, **how
        )

    def norm(self, dim: int) -> layers.LayerNorm:
        return layers.LayerNorm(dim, eps=self.model.norm_eps, param_dtype=self.param_dtype)

    def branch_scale(self) -> layers.LayerScale | None:
        """The learned gain of a residual branch."""
        if self.model.layer_scale is None:
            return None
        return layers.LayerScale(self.sizes.width, self.model.layer_scale, param_dtype=self.param_dtype)

    def projection(self, rngs: nnx.Rngs, bias: str | None = None) -> layers.Linear:
        """The projection of the pooled output to the joint features."""
        D, E = self.sizes.width, self.model.embed_dim
        return self.linear(D, E, ("embed", "joint"), rngs, draw=layers.normal, std=D**-0.5, bias=bias)

    def vectors(self, draw: layers.Draw, std: float, shape: tuple[int, ...], rngs: nnx.Rngs) -> nnx.Param:
        """Learned vectors of the residual stream: position embeddings, a class token."""
        values = std * draw(rngs.params(), shape)
        return layers.param(values.astype(self.param_dtype), (*(None,) * (len(shape) - 1), "norm"))

    def make_blocks(self, rngs: nnx.Rngs) -> "Block":
        return stack.stack(lambda rngs: Block(self, rngs), self.sizes.num_layers, rngs)

    def run(self, blocks: "Block", x_BSD: jax.Array) -> jax.Array:
        S = x_BSD.shape[1]
        with jax.named_scope("layers"):
            y_BSD = stack.apply_stack(
                blocks,
                split_sequence(join_rows(x_BSD)),
                lambda block, x_BSD, *_: (block(x_BSD, S), None),
                num_layers=self.sizes.num_layers,
                scan=self.model.scan_layers,
                remat=self.model.remat,
            )[0]
            return y_BSD.reshape(x_BSD.shape)


def check_tower(config: Any) -> None:
    """Checks a tower's config.

    Raises:
      ValueError: a value that does not fit its annotation, or heads that do not divide the width.
    """
    schema.check(config)
    if config.width % config.num_heads:
        raise ValueError(
            f"num_heads={config.num_heads} does not divide width={config.width}; change one of them"
        )


def join_rows(x_BSD: jax.Array) -> jax.Array:
    """(B, S, D) to (B/n, n · S, D), with the least n that lets the tensor axis split the n · S positions.

    Without it, matmuls add their outputs with all-reduces, which send twice as much: the towers of a CLIP
    have 77, 50 or 257 positions. n is 1 where it does not divide the rows of a device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x_BSD
    (B, S, D), parts = x_BSD.shape, sharding.axes_size(mesh, sharding.spec("act_seq")[0])
    n = parts // math.gcd(S, parts)
    rows = n * sharding.axes_size(mesh, sharding.spec("batch")[0])
    return x_BSD if B % rows else x_BSD.reshape(B // n, n * S, D)


# --- blocks ---------------------------------------------------------------------------------------------


class Attention(nnx.Module):
    """Multi-head attention, optionally with norms of queries and keys (ViT-22B, arXiv:2302.05442)."""

    def __init__(self, c: Encoder, rngs: nnx.Rngs):
        D, N, init = c.sizes.width, c.sizes.num_heads, c.block_init
        into = dict(draw=init.draw, std=init.qkv)
        self.q_proj = c.linear(D, D, ("embed", "q_heads"), rngs, bias="q_heads", **into)
        self.k_proj = c.linear(D, D, ("embed", "kv_heads"), rngs, bias="kv_heads", **into)
        self.v_proj = c.linear(D, D, ("embed", "kv_heads"), rngs, bias="kv_heads", **into)
        self.o_proj = c.linear(D, D, ("q_heads", "embed"), rngs, bias="norm", draw=init.draw, std=init.out)
        self.q_norm = c.norm(D // N) if c.model.qk_norm else None
        self.k_norm = c.norm(D // N) if c.model.qk_norm else None
        self.num_heads = N
        self.causal = c.sizes.causal
        self.attend = attention.kernel(c.model.attention)

    def heads(self, y_BSD: jax.Array, S: int, norm: layers.LayerNorm | None = None) -> jax.Array:
        """N · H features of B rows, possibly joined, to (B, S, N, H), normed if there is a norm."""
        y_BSNH = y_BSD.reshape(-1, S, self.num_heads, y_BSD.shape[-1] // self.num_heads)
        y_BSNH = y_BSNH if norm is None else norm(y_BSNH)
        return constrain(y_BSNH, "batch", "seq", "act_heads", None)

    def __call__(self, x_BSD: jax.Array, S: int) -> jax.Array:
        """The output for rows of S positions, which `join_rows` may have joined."""
        q_BSD, k_BSD, v_BSD = layers.apply_to_same_input(x_BSD, self.q_proj, self.k_proj, self.v_proj)
        q_BSNH = self.heads(q_BSD, S, self.q_norm)
        k_BSNH = self.heads(k_BSD, S, self.k_norm)
        v_BSNH = self.heads(v_BSD, S)
        o_BSNH = self.attend(q_BSNH, k_BSNH, v_BSNH, causal=self.causal, segment_ids_BS=None)
        return self.o_proj(o_BSNH.reshape(x_BSD.shape))


class Mlp(nnx.Module):
    """``down(act(up(x)))``."""

    def __init__(self, c: Encoder, rngs: nnx.Rngs):
        D, F, init = c.sizes.width, c.sizes.mlp_dim, c.block_init
        up = dict(bias="mlp", draw=init.draw, std=init.up, bias_std=init.up_bias)
        down = dict(bias="norm", draw=init.draw, std=init.down, bias_std=init.down_bias)
        self.up_proj = c.linear(D, F, ("embed", "mlp"), rngs, **up)
        self.down_proj = c.linear(F, D, ("mlp", "embed"), rngs, **down)
        self.act = ACTIVATIONS[c.model.act]

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        up_BSF = self.up_proj(x_BSD)
        # The backward pass computes it again from its input; JAX would save three to five arrays of a GELU.
        act_BSF = jax.checkpoint(self.act, prevent_cse=False)(up_BSF)
        return self.down_proj(constrain(act_BSF, "batch", "seq", "act_mlp"))


class Block(stack.Block):
    """Attention and MLP, each behind a norm and around a residual, optionally with layer-scales."""

    def __init__(self, c: Encoder, rngs: nnx.Rngs):
        self.attn_norm = c.norm(c.sizes.width)
        self.attn = Attention(c, rngs)
        self.mlp_norm = c.norm(c.sizes.width)
        self.mlp = Mlp(c, rngs)
        self.attn_scale = c.branch_scale()
        self.mlp_scale = c.branch_scale()

    def __call__(self, x_BSD: jax.Array, S: int) -> jax.Array:
        with jax.named_scope("attn"):
            h_BSD = split_sequence(self.attn(gather_sequence(self.attn_norm(x_BSD)), S))
            x_BSD += h_BSD if self.attn_scale is None else self.attn_scale(h_BSD)
        with jax.named_scope("mlp"):
            h_BSD = split_sequence(self.mlp(gather_sequence(self.mlp_norm(x_BSD))))
            return x_BSD + (h_BSD if self.mlp_scale is None else self.mlp_scale(h_BSD))
