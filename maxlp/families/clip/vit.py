"""The Vision Transformer as CLIP and SigLIP train it, and the blocks that their text towers share with it.

Dosovitskiy et al. 2020 (arXiv:2010.11929), Radford et al. 2021 (arXiv:2103.00020), Zhai et al. 2023
(arXiv:2303.15343).

Shape letters: B batch · P patches · S positions (P and the class token; a text's length) · D embed ·
F mlp · N heads · H head dim · C channels · E joint dim · L layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp.nn import attention, layers, stack
from maxlp.parallel.sharding import constrain

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),  # of OpenAI's weights
}


class Init(NamedTuple):
    """How the kernels of a block are drawn, and the standard deviation of each kind."""

    draw: layers.Draw
    qkv: float
    out: float
    up: float
    down: float
    up_bias: float
    down_bias: float


def _clip_visual(D: int, F: int, L: int) -> Init:
    # What PyTorch does unasked: Xavier over the joint (3D, D) kernel of q, k and v, Kaiming elsewhere.
    wide, narrow = (3 * D) ** -0.5, (3 * F) ** -0.5
    return Init(layers.uniform, (2 * D) ** -0.5, wide, wide, narrow, wide, narrow)


def _clip_text(D: int, F: int, L: int) -> Init:
    residual = D**-0.5 * (2 * L) ** -0.5
    biases = (3 * D) ** -0.5, (3 * F) ** -0.5
    return Init(layers.normal, D**-0.5, residual, (2 * D) ** -0.5, residual, *biases)


def _siglip(D: int, F: int, L: int) -> Init:
    mlp = (2 / (D + F)) ** 0.5
    return Init(layers.uniform, D**-0.5, D**-0.5, mlp, mlp, 1e-6, 1e-6)


INITS: dict[str, dict[str, Callable[[int, int, int], Init]]] = {
    "clip": {"visual": _clip_visual, "text": _clip_text},
    "siglip": {"visual": _siglip, "text": _siglip},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """What the blocks of a tower are made of; see `clip.CLIP` for the meaning of each field."""

    tower: str  # "visual" or "text"
    width: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    causal: bool
    act: str
    norm_eps: float
    layer_scale: float | None
    qk_norm: bool
    init: str
    dtype: jnp.dtype
    param_dtype: jnp.dtype
    attention: str
    scan_layers: bool
    remat: str

    def __post_init__(self):
        if self.width % self.num_heads:
            raise ValueError(
                f"model.{self.tower}.num_heads={self.num_heads} does not divide "
                f"model.{self.tower}.width={self.width}"
            )

    @property
    def draws(self) -> Init:
        return INITS[self.init][self.tower](self.width, self.mlp_dim, self.num_layers)

    def linear(self, in_dim: int, out_dim: int, axes: layers.Axes, rngs: nnx.Rngs, **how) -> layers.Linear:
        return layers.Linear(
            in_dim, out_dim, axes=axes, dtype=self.dtype, param_dtype=self.param_dtype, rngs=rngs, **how
        )

    def norm(self, dim: int) -> layers.LayerNorm:
        return layers.LayerNorm(dim, eps=self.norm_eps, param_dtype=self.param_dtype)

    def vectors(self, draw: layers.Draw, std: float, shape: tuple[int, ...], rngs: nnx.Rngs) -> nnx.Param:
        """Learned vectors of the residual stream: positions, a class token."""
        values = std * draw(rngs.params(), shape)
        return layers.param(values.astype(self.param_dtype), (*(None,) * (len(shape) - 1), "norm"))

    def stack(self, rngs: nnx.Rngs) -> nnx.Module:
        return stack.stack(lambda rngs: Block(self, rngs), self.num_layers, rngs)

    def run(self, blocks: nnx.Module, x_BSD: jax.Array) -> jax.Array:
        with jax.named_scope("layers"):
            return stack.apply_stack(
                blocks,
                constrain(x_BSD, "batch", "act_seq", "act_embed"),
                lambda block, x_BSD, *_: (block(x_BSD), None),
                num_layers=self.num_layers,
                scan=self.scan_layers,
                remat=self.remat,
            )[0]


class Attention(nnx.Module):
    """Multi-head attention, with norms of queries and keys if asked for.

    (Dehghani et al. 2023, arXiv:2302.05442.)
    """

    def __init__(self, c: Encoder, rngs: nnx.Rngs):
        D = c.width
        into = dict(draw=c.draws.draw, std=c.draws.qkv)
        self.q_proj = c.linear(D, D, ("embed", "q_heads"), rngs, bias="q_heads", **into)
        self.k_proj = c.linear(D, D, ("embed", "kv_heads"), rngs, bias="kv_heads", **into)
        self.v_proj = c.linear(D, D, ("embed", "kv_heads"), rngs, bias="kv_heads", **into)
        self.o_proj = c.linear(
            D, D, ("q_heads", "embed"), rngs, bias="norm", draw=c.draws.draw, std=c.draws.out
        )
        self.q_norm = c.norm(D // c.num_heads) if c.qk_norm else None
        self.k_norm = c.norm(D // c.num_heads) if c.qk_norm else None
        self.num_heads = c.num_heads
        self.causal = c.causal
        self.attend = attention.ATTENTION[c.attention]

    def heads(self, y_BSD: jax.Array, norm: layers.LayerNorm | None = None) -> jax.Array:
        y_BSNH = y_BSD.reshape(*y_BSD.shape[:2], self.num_heads, -1)
        y_BSNH = y_BSNH if norm is None else norm(y_BSNH)
        return constrain(y_BSNH, "batch", "seq", "act_heads", None)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        q_BSNH = self.heads(self.q_proj(x_BSD), self.q_norm)
        k_BSNH = self.heads(self.k_proj(x_BSD), self.k_norm)
        v_BSNH = self.heads(self.v_proj(x_BSD))
        o_BSNH = self.attend(q_BSNH, k_BSNH, v_BSNH, causal=self.causal, segment_ids_BS=None)
        return self.o_proj(o_BSNH.reshape(x_BSD.shape))


class Mlp(nnx.Module):
    """``down(act(up(x)))``."""

    def __init__(self, c: Encoder, rngs: nnx.Rngs):
        D, F, draws = c.width, c.mlp_dim, c.draws
        up = dict(bias="mlp", draw=draws.draw, std=draws.up, bias_std=draws.up_bias)
        down = dict(bias="norm", draw=draws.draw, std=draws.down, bias_std=draws.down_bias)
        self.up_proj = c.linear(D, F, ("embed", "mlp"), rngs, **up)
        self.down_proj = c.linear(F, D, ("mlp", "embed"), rngs, **down)
        self.act = ACTIVATIONS[c.act]

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return self.down_proj(constrain(self.act(self.up_proj(x_BSD)), "batch", "seq", "act_mlp"))


class Block(stack.Block):
    """Attention and MLP, each behind a norm, in front of a layer-scale and around a residual."""

    def __init__(self, c: Encoder, rngs: nnx.Rngs):
        self.attn_norm = c.norm(c.width)
        self.attn = Attention(c, rngs)
        self.mlp_norm = c.norm(c.width)
        self.mlp = Mlp(c, rngs)
        scale = functools.partial(layers.LayerScale, c.width, param_dtype=c.param_dtype)
        self.attn_scale = None if c.layer_scale is None else scale(c.layer_scale)
        self.mlp_scale = None if c.layer_scale is None else scale(c.layer_scale)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        whole = lambda y: constrain(y, "batch", "seq", "act_embed")  # noqa: E731
        split = lambda y: constrain(y, "batch", "act_seq", "act_embed")  # noqa: E731
        with jax.named_scope("attn"):
            h_BSD = split(self.attn(whole(self.attn_norm(x_BSD))))
            x_BSD += h_BSD if self.attn_scale is None else self.attn_scale(h_BSD)
        with jax.named_scope("mlp"):
            h_BSD = split(self.mlp(whole(self.mlp_norm(x_BSD))))
            return x_BSD + (h_BSD if self.mlp_scale is None else self.mlp_scale(h_BSD))


class MapPool(nnx.Module):
    """Pools by attention from one learned query, then an MLP (Lee et al. 2018, arXiv:1810.00825)."""

    def __init__(self, c: Encoder, rngs: nnx.Rngs):
        self.probe = c.vectors(layers.uniform, (2 / (1 + c.width)) ** 0.5, (1, c.width), rngs)
        self.attn = Attention(c, rngs)
        self.mlp_norm = c.norm(c.width)
        self.mlp = Mlp(c, rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        B, _, D = x_BSD.shape
        attn = self.attn
        probe_B1D = jnp.broadcast_to(self.probe[...].astype(x_BSD.dtype), (B, 1, D))
        q_B1NH = attn.heads(attn.q_proj(probe_B1D), attn.q_norm)
        k_BSNH = attn.heads(attn.k_proj(x_BSD), attn.k_norm)
        o_B1NH = jax.nn.dot_product_attention(q_B1NH, k_BSNH, attn.heads(attn.v_proj(x_BSD)))
        h_B1D = attn.o_proj(o_B1NH.reshape(B, 1, D))
        return (h_B1D + self.mlp(self.mlp_norm(h_B1D)))[:, 0]


POOLS = ("cls", "gap", "map")


class ImageTower(nnx.Module):
    """Normalised images to joint features; arguments as `clip.CLIP` describes them."""

    def __init__(
        self,
        *,
        image_size: int,
        patch_size: int,
        width: int,
        num_layers: int,
        num_heads: int,
        mlp_dim: int,
        pool: str,
        pre_norm: bool,
        patch_bias: bool,
        proj: bool,
        patch_dropout: float,
        embed_dim: int,
        rngs: nnx.Rngs,
        **common,
    ):
        if pool not in POOLS:
            raise ValueError(f"model.visual.pool={pool!r} is unknown; one of {', '.join(POOLS)}")
        if image_size % patch_size:
            raise ValueError(
                f"model.visual.image_size={image_size} is not a multiple of "
                f"model.visual.patch_size={patch_size}"
            )
        if not 0 <= patch_dropout < 1:
            raise ValueError(f"model.visual.patch_dropout={patch_dropout} must be in [0, 1)")
        if not proj and width != embed_dim:
            raise ValueError(
                f"model.visual.proj=False needs model.visual.width={width} to be "
                f"model.embed_dim={embed_dim}"
            )
        sizes = dict(width=width, num_layers=num_layers, num_heads=num_heads, mlp_dim=mlp_dim)
        c = self.encoder = Encoder(tower="visual", causal=False, **sizes, **common)
        self.image_size, self.patch_size, self.pool = image_size, patch_size, pool
        self.patch_dropout = patch_dropout

        num_patches, num_pixels = (image_size // patch_size) ** 2, 3 * patch_size**2
        draw, std = layers.truncated_normal, num_pixels**-0.5
        if c.init == "clip":
            draw, std = layers.uniform, (3 * num_pixels) ** -0.5
        bias = "norm" if patch_bias else None
        self.patch_embed = c.linear(
            num_pixels, width, ("patch", "embed"), rngs, draw=draw, std=std, bias=bias
        )
        has_class = pool == "cls"
        self.class_embed = c.vectors(layers.normal, width**-0.5, (width,), rngs) if has_class else None
        self.pos_embed = c.vectors(layers.normal, width**-0.5, (num_patches + has_class, width), rngs)
        self.pre_norm = c.norm(width) if pre_norm else None
        self.layers = c.stack(rngs)
        self.final_norm = c.norm(width)
        self.map_pool = MapPool(c, rngs) if pool == "map" else None
        self.proj = (
            c.linear(width, embed_dim, ("embed", "joint"), rngs, draw=layers.normal, std=width**-0.5)
            if proj
            else None
        )

    def __call__(self, image_BHWC: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """float32 features (B, E) of float images; without a key no patch is dropped."""
        if image_BHWC.shape[1:] != (self.image_size, self.image_size, 3):
            raise ValueError(
                f"images of {' × '.join(map(str, image_BHWC.shape[1:]))} are not of "
                f"model.visual.image_size={self.image_size} with 3 channels"
            )
        with jax.named_scope("patches"):
            x_BSD = self.patch_embed(patches(image_BHWC, self.patch_size))
            if self.class_embed is not None:
                class_D = self.class_embed[...].astype(x_BSD.dtype)
                class_B1D = jnp.broadcast_to(class_D, (x_BSD.shape[0], 1, class_D.size))
                x_BSD = jnp.concatenate([class_B1D, x_BSD], axis=1)
            x_BSD += self.pos_embed[...].astype(x_BSD.dtype)
            if self.patch_dropout and dropout_key is not None:
                first = int(self.class_embed is not None)
                x_BSD = drop_patches(x_BSD, self.patch_dropout, dropout_key, first)
            if self.pre_norm is not None:
                x_BSD = self.pre_norm(x_BSD)
        x_BSD = self.encoder.run(self.layers, x_BSD)
        with jax.named_scope("pool"):
            x_BSD = self.final_norm(x_BSD[:, :1] if self.pool == "cls" else x_BSD)
            x_BD = x_BSD[:, 0] if self.pool == "cls" else jnp.mean(x_BSD, axis=1)
            if self.map_pool is not None:
                x_BD = self.map_pool(x_BSD)
            if self.proj is not None:
                x_BD = self.proj(x_BD, preferred_element_type=jnp.float32)
        return x_BD.astype(jnp.float32)


def patches(image_BHWC: jax.Array, size: int) -> jax.Array:
    """Images cut into squares, each flattened: (B, P, size · size · C), rows of patches first."""
    B, H, W, C = image_BHWC.shape
    grid = image_BHWC.reshape(B, H // size, size, W // size, size, C)
    return grid.swapaxes(2, 3).reshape(B, (H // size) * (W // size), size * size * C)


def drop_patches(x_BSD: jax.Array, rate: float, key: jax.Array, first: int) -> jax.Array:
    """Keeps a random share ``1 - rate`` of each image's patches (at least one), and the ``first`` tokens.

    Nothing is rescaled (Li et al. 2022, arXiv:2212.00794). Each image of the global batch has draws of its
    own, the same on any mesh.
    """
    B, S, _ = x_BSD.shape
    kept = max(1, int((S - first) * (1 - rate)))
    draws_BP = constrain(jax.random.uniform(key, (B, S - first)), "batch", "seq")
    _, index_BP = jax.lax.top_k(draws_BP, kept)
    x_BPD = jnp.take_along_axis(x_BSD[:, first:], index_BP[:, :, None], axis=1)
    return jnp.concatenate([x_BSD[:, :first], x_BPD], axis=1)


def resize_pos_embed(pos_SD: jax.Array, num_patches: int, first: int) -> jax.Array:
    """Position embeddings for another number of patches: bicubic and antialiased over the square grid.

    Args:
      first: positions at the start that belong to no patch (the class token) and stay.

    Raises:
      ValueError: either number of patches is not a square.
    """
    old, new = math.isqrt(len(pos_SD) - first), math.isqrt(num_patches)
    if old**2 != len(pos_SD) - first or new**2 != num_patches:
        raise ValueError(f"{len(pos_SD) - first} or {num_patches} patches are no square grid")
    grid_PPD = pos_SD[first:].reshape(old, old, -1)
    grid_PPD = jax.image.resize(grid_PPD, (new, new, grid_PPD.shape[-1]), "cubic", antialias=True)
    return jnp.concatenate([pos_SD[:first], grid_PPD.reshape(num_patches, -1)])
