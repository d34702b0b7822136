"""The image tower: a Vision Transformer as CLIP and SigLIP train it.

Dosovitskiy et al. 2020 (arXiv:2010.11929), Radford et al. 2021 (arXiv:2103.00020), Zhai et al. 2023
(arXiv:2303.15343).

Shape letters: B batch · P patches · S positions (the patches and the class token) · D embed · C channels ·
N heads · H head dim · E joint dim.
"""

import dataclasses
import math
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp.families.clip.encoder import Attention, Encoder, Mlp, check_tower
from maxlp.nn import layers
from maxlp.nn.attention.dense import dense
from maxlp.parallel.sharding import constrain
from maxlp.schema import Count, OneOf, Range

POOLS = ("cls", "gap", "map")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisualConfig:
    """The config's ``model.visual`` section.

    Attributes:
      image_size: pixels along each side of an image.
      patch_size: pixels along each side of a patch; divides image_size.
      width, num_layers, num_heads, mlp_dim: sizes of the blocks.
      pool: "cls" (a class token), "gap" (the mean of all positions) or "map" (attention, see `MapPool`).
      pre_norm: a norm in front of the blocks.
      patch_bias: a bias in the patch embedding.
      proj: a projection to the joint features; without it their dim is the width.
      patch_dropout: fraction of the patches that are left out in training.

    Raises:
      ValueError: an invalid size, or sizes that do not fit each other.
    """

    image_size: Count
    patch_size: Count
    width: Count
    num_layers: Count
    num_heads: Count
    mlp_dim: Count
    pool: Annotated[str, OneOf(POOLS)]
    pre_norm: bool
    patch_bias: bool
    proj: bool
    patch_dropout: Annotated[float, Range(at_least=0, below=1)]
    causal: ClassVar[bool] = False

    def __post_init__(self):
        check_tower(self)
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size={self.image_size} is not a multiple of patch_size={self.patch_size}; change "
                "one of them"
            )

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def class_tokens(self) -> int:
        """1 or 0."""
        return int(self.pool == "cls")

    @property
    def train_seq_len(self) -> int:
        """Positions in the blocks during training."""
        return self.class_tokens + num_kept(self.num_patches, self.patch_dropout)

    @property
    def pool_products(self) -> tuple[int, int]:
        """Multiplications by weights, and those of attention, that `MapPool` needs for an image."""
        if self.pool != "map":
            return 0, 0
        tokens, D = self.train_seq_len, self.width
        return 2 * D * ((tokens + 1) * D + self.mlp_dim), 2 * tokens * D


class ImageTower(nnx.Module):
    """Normalized images to joint features."""

    def __init__(self, encoder: Encoder, rngs: nnx.Rngs):
        c, e = encoder.sizes, encoder
        self.config, self.encoder = c, e
        num_pixels, position_std = 3 * c.patch_size**2, c.width**-0.5
        draw, std = layers.truncated_normal, num_pixels**-0.5
        if e.model.init == "clip":
            draw, std = layers.uniform, (3 * num_pixels) ** -0.5
        bias = "norm" if c.patch_bias else None
        self.patch_embed = e.linear(
            num_pixels, c.width, ("patch", "embed"), rngs, draw=draw, std=std, bias=bias
        )
        self.class_embed = (
            e.vectors(layers.normal, position_std, (c.width,), rngs) if c.class_tokens else None
        )
        positions = (c.num_patches + c.class_tokens, c.width)
        self.pos_embed = e.vectors(layers.normal, position_std, positions, rngs)
        self.pre_norm = e.norm(c.width) if c.pre_norm else None
        self.layers = e.make_blocks(rngs)
        self.final_norm = e.norm(c.width)
        self.map_pool = MapPool(e, rngs) if c.pool == "map" else None
        self.proj = e.projection(rngs) if c.proj else None

    def __call__(self, image_BHWC: jax.Array, draws_BP: jax.Array | None = None) -> jax.Array:
        """float32 features (B, E) of float images; without draws no patch is dropped."""
        size = self.config.image_size
        if image_BHWC.shape[1:] != (size, size, 3):
            raise ValueError(
                f"images of {' × '.join(map(str, image_BHWC.shape[1:]))} do not match "
                f"model.visual.image_size={size} with 3 channels"
            )
        with jax.named_scope("patches"):
            x_BSD = self.embed(image_BHWC, draws_BP)
        x_BSD = self.encoder.run(self.layers, x_BSD)
        with jax.named_scope("pool"):
            x_BD = self.pool(x_BSD)
            if self.proj is not None:
                x_BD = self.proj(x_BD, preferred_element_type=jnp.float32)
        return x_BD.astype(jnp.float32)

    def embed(self, image_BHWC: jax.Array, draws_BP: jax.Array | None) -> jax.Array:
        """The input of the blocks x_BSD."""
        c = self.config
        x_BSD = self.patch_embed(patches(image_BHWC, c.patch_size))
        if self.class_embed is not None:
            class_B1D = layers.over_last_dim(self.class_embed[...].astype(jnp.float32), x_BSD)
            class_B1D = jnp.broadcast_to(class_B1D, (x_BSD.shape[0], 1, x_BSD.shape[2])).astype(x_BSD.dtype)
            x_BSD = jnp.concatenate([class_B1D, x_BSD], axis=1)
        x_BSD = layers.add_parameter(x_BSD, self.pos_embed[...])
        if c.patch_dropout and draws_BP is not None:
            x_BSD = drop_patches(x_BSD, c.patch_dropout, draws_BP, first=c.class_tokens)
        return x_BSD if self.pre_norm is None else self.pre_norm(x_BSD)

    def pool(self, x_BSD: jax.Array) -> jax.Array:
        """One vector x_BD for each image, from the output of the blocks."""
        if self.config.pool == "cls":
            return self.final_norm(x_BSD[:, :1])[:, 0]
        x_BSD = self.final_norm(x_BSD)
        return jnp.mean(x_BSD, axis=1) if self.map_pool is None else self.map_pool(x_BSD)


class MapPool(nnx.Module):
    """Multi-head attention pooling: one learned query, then an MLP (Lee et al. 2018, arXiv:1810.00825)."""

    def __init__(self, c: Encoder, rngs: nnx.Rngs):
        D = c.sizes.width
        self.probe = c.vectors(layers.uniform, (2 / (1 + D)) ** 0.5, (1, D), rngs)
        self.attn = Attention(c, rngs)
        self.mlp_norm = c.norm(D)
        self.mlp = Mlp(c, rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """The pooled vectors x_BD."""
        B, S, D = x_BSD.shape
        attn = self.attn
        # Rounded after the copies are made, so that their gradients are summed in float32.
        probe_B1D = jnp.broadcast_to(self.probe[...].astype(jnp.float32), (B, 1, D)).astype(x_BSD.dtype)
        q_B1NH = attn.heads(attn.q_proj(probe_B1D), 1, attn.q_norm)
        k_BSNH = attn.heads(attn.k_proj(x_BSD), S, attn.k_norm)
        v_BSNH = attn.heads(attn.v_proj(x_BSD), S)
        o_B1NH = dense(q_B1NH, k_BSNH, v_BSNH, causal=False, segment_ids_BS=None)
        h_B1D = attn.o_proj(o_B1NH.reshape(B, 1, D))
        return (h_B1D + self.mlp(self.mlp_norm(h_B1D)))[:, 0]


def patches(image_BHWC: jax.Array, size: int) -> jax.Array:
    """Cuts images into squares and flattens each: (B, P, size · size · C), row by row."""
    B, H, W, C = image_BHWC.shape
    grid = image_BHWC.reshape(B, H // size, size, W // size, size, C)
    return grid.swapaxes(2, 3).reshape(B, (H // size) * (W // size), size * size * C)


def num_kept(num_patches: int, rate: float) -> int:
    """How many of an image's patches are kept when this fraction is dropped: at least one."""
    return max(1, int(num_patches * (1 - rate)))


def drop_patches(x_BSD: jax.Array, rate: float, draws_BP: jax.Array, first: int) -> jax.Array:
    """Drops random patches of each image, without rescaling the others (FLIP, arXiv:2212.00794).

    Args:
      rate: the fraction to drop, see `num_kept`.
      draws_BP: an independent random number for each patch; those with the largest are kept.
      first: number of tokens at the start that are not patches and are kept.
    """
    kept = num_kept(x_BSD.shape[1] - first, rate)
    _, index_BP = jax.lax.top_k(constrain(draws_BP, "batch", "seq"), kept)
    x_BPD = jnp.take_along_axis(x_BSD[:, first:], index_BP[:, :, None], axis=1)
    return jnp.concatenate([x_BSD[:, :first], x_BPD], axis=1)


def resize_pos_embed(pos_SD: jax.Array, num_patches: int, first: int) -> jax.Array:
    """Resizes position embeddings to another number of patches: bicubic, antialiased, on the square grid.

    Args:
      pos_SD: float32 embeddings.
      first: positions at the start that belong to no patch (the class token); they do not change.

    Raises:
      ValueError: either number of patches is not a square.
    """
    old, new = math.isqrt(len(pos_SD) - first), math.isqrt(num_patches)
    if old**2 != len(pos_SD) - first or new**2 != num_patches:
        raise ValueError(f"{len(pos_SD) - first} or {num_patches} patches do not form a square grid")
    grid_PPD = pos_SD[first:].reshape(old, old, -1)
    grid_PPD = jax.image.resize(grid_PPD, (new, new, grid_PPD.shape[-1]), "cubic", antialias=True)
    return jnp.concatenate([pos_SD[:first], grid_PPD.reshape(num_patches, -1)])
