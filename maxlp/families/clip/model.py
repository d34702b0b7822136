"""CLIP (Radford et al. 2021, arXiv:2103.00020) and SigLIP (Zhai et al. 2023, arXiv:2303.15343).

An image tower and a text tower map into one space of unit vectors. Shape letters: B batch · S text length ·
D embed · E joint dim · C channels.
"""

import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp import schema
from maxlp.data import images
from maxlp.families.clip.encoder import ACTIVATIONS, INITS, Encoder, check_tower
from maxlp.families.clip.vit import ImageTower, VisualConfig
from maxlp.nn import attention, layers, stack
from maxlp.schema import Count, CountOrZero, Fraction, NotNegative, OneOf, PositiveFraction, Range

TEXT_POOLS = ("argmax", "eos", "last")
MAX_LOGIT_SCALE = math.log(100)
ChannelStd = PositiveFraction  # of pixels in [0, 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The config's ``model.text`` section.

    Attributes:
      vocab_size: number of token ids.
      max_len: the longest text.
      width, num_layers, num_heads, mlp_dim: sizes of the blocks.
      causal: a token attends only to itself and to those before it.
      pool: the token whose output represents the text: "argmax" (the highest id, the end of a text in
        OpenAI's vocabulary), "eos" (the first with eos_id) or "last".
      eos_id: the token id that ends a text, for pool="eos"; no effect with others.
      proj_bias: a bias in the projection to the joint features.

    Raises:
      ValueError: an invalid size, or sizes that do not fit each other.
    """

    vocab_size: Count
    max_len: Count
    width: Count
    num_layers: Count
    num_heads: Count
    mlp_dim: Count
    causal: bool
    pool: Annotated[str, OneOf(TEXT_POOLS)]
    eos_id: CountOrZero | None
    proj_bias: bool

    def __post_init__(self):
        check_tower(self)
        if self.eos_id is not None and self.eos_id >= self.vocab_size:
            raise ValueError(
                f"eos_id={self.eos_id} must be below vocab_size={self.vocab_size}; change one of them"
            )
        if self.pool == "eos" and self.eos_id is None:
            raise ValueError("pool='eos' needs eos_id; set it to the token id that ends a text")
        if self.pool != "eos":  # no effect; as formats of weights, which then have no such id
            object.__setattr__(self, "eos_id", None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPConfig:
    """The config's ``model`` section of a CLIP or SigLIP.

    Attributes:
      embed_dim: E, dim of the joint features.
      visual, text: the towers.
      act: a key of `encoder.ACTIVATIONS`; a property of weights that checkpoints record unreliably.
      norm_eps: epsilon of the norms.
      layer_scale: initial gain of the residual branches (0.0 makes every block the identity); None
        omits the gains.
      qk_norm: norms of queries and keys.
      init: initial values of the weights, "clip" (OpenAI's and open_clip's) or "siglip" (big_vision's).
      logit_scale: initial logarithm of the factor of the logits, at most log(100). Without logit_bias the
        factor never exceeds 100.
      logit_bias: initial bias of the logits; None omits it.
      image_mean, image_std: of each channel, for pixels in [0, 1].
      image_resize, image_interpolation: how images become square, in training and evaluation; see
        `images.Preprocessing`.
      dtype: of activations and matmuls, one of `layers.DTYPES`.
      param_dtype: of the stored parameters, one of `layers.DTYPES`; float16 trains with `scalify` only.
      attention: a key of `attention.KERNELS`; "auto" is the platform's, see `attention.choose`.
      scan_layers: False unrolls the loop over layers, see `stack.apply_stack`.
      remat: a key of `stack.REMAT_POLICIES`.

    Raises:
      ValueError: an invalid size or name, or sizes that do not fit each other.
    """

    embed_dim: Count
    visual: VisualConfig
    text: TextConfig
    act: Annotated[str, OneOf(ACTIVATIONS)]
    norm_eps: PositiveFraction
    layer_scale: NotNegative | None
    qk_norm: bool
    init: Annotated[str, OneOf(INITS)]
    logit_scale: Annotated[float, Range(at_least=-MAX_LOGIT_SCALE, at_most=MAX_LOGIT_SCALE)]
    logit_bias: float | None
    image_mean: tuple[Fraction, Fraction, Fraction]
    image_std: tuple[ChannelStd, ChannelStd, ChannelStd]
    image_resize: Annotated[str, OneOf(images.RESIZE_MODES)] = "shortest"
    image_interpolation: Annotated[str, OneOf(images.INTERPOLATIONS)] = "bicubic"
    dtype: Annotated[str, OneOf(layers.DTYPES)]
    param_dtype: Annotated[str, OneOf(layers.DTYPES)]
    attention: Annotated[str, OneOf(attention.KERNELS)]
    scan_layers: bool
    remat: Annotated[str, OneOf(stack.REMAT_POLICIES)]

    def __post_init__(self):
        schema.check(self)
        if not self.visual.proj and self.visual.width != self.embed_dim:
            raise ValueError(
                f"visual.proj=False needs visual.width={self.visual.width} to equal "
                f"embed_dim={self.embed_dim}; change one of them, or set visual.proj=True"
            )

    @property
    def preprocessing(self) -> images.Preprocessing:
        return images.Preprocessing(self.image_resize, self.image_interpolation)


class TextTower(nnx.Module):
    """Token ids to joint features."""

    def __init__(self, encoder: Encoder, rngs: nnx.Rngs):
        c, e = encoder.sizes, encoder
        self.config, self.encoder = c, e
        token_std, position_std = (0.02, 0.01) if e.model.init == "clip" else (c.width**-0.5, c.width**-0.5)
        self.tok_embed = layers.Embed(
            c.vocab_size, c.width, std=token_std, dtype=e.dtype, param_dtype=e.param_dtype, rngs=rngs
        )
        self.pos_embed = e.vectors(layers.normal, position_std, (c.max_len, c.width), rngs)
        self.layers = e.make_blocks(rngs)
        self.final_norm = e.norm(c.width)
        self.proj = e.projection(rngs, bias="joint" if c.proj_bias else None)

    def __call__(self, text_BS: jax.Array) -> jax.Array:
        """float32 features (B, E)."""
        length = text_BS.shape[1]
        if length > self.config.max_len:
            raise ValueError(
                f"texts of {length} tokens are longer than model.text.max_len={self.config.max_len}"
            )
        with jax.named_scope("embed"):
            x_BSD = self.tok_embed(text_BS)
            x_BSD = layers.add_parameter(x_BSD, self.pos_embed[:length])
        x_BSD = self.encoder.run(self.layers, x_BSD)
        with jax.named_scope("pool"):
            x_BD = jnp.take_along_axis(x_BSD, self.pool_index(text_BS)[:, None, None], axis=1)[:, 0]
            return self.proj(self.final_norm(x_BD), preferred_element_type=jnp.float32)

    def pool_index(self, text_BS: jax.Array) -> jax.Array:
        """For each text, the position whose output represents it."""
        if self.config.pool == "argmax":
            return jnp.argmax(text_BS, axis=-1)
        if self.config.pool == "eos":
            return jnp.argmax(text_BS == self.config.eos_id, axis=-1)
        return jnp.full(text_BS.shape[:1], text_BS.shape[1] - 1)


class CLIP(nnx.Module):
    """An image tower and a text tower whose features are compared."""

    def __init__(self, config: CLIPConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        param_dtype = jnp.dtype(c.param_dtype)
        self.visual = ImageTower(Encoder(model=c, tower="visual"), rngs)
        self.text = TextTower(Encoder(model=c, tower="text"), rngs)
        self.logit_scale = layers.param(jnp.asarray(c.logit_scale, param_dtype), ())
        self.logit_bias = (
            None if c.logit_bias is None else layers.param(jnp.asarray(c.logit_bias, param_dtype), ())
        )

    def encode_image(self, image_BHWC: jax.Array, draws_BP: jax.Array | None = None) -> jax.Array:
        """float32 unit vectors (B, E).

        Args:
          image_BHWC: uint8 pixels, or floats that are normalized already.
          draws_BP: a random number for each patch, see `vit.drop_patches`; None keeps all patches.
        """
        if image_BHWC.dtype == jnp.uint8:
            statistics = (self.config.image_mean, self.config.image_std)
            mean, std = (layers.over_last_dim(jnp.asarray(s), image_BHWC) for s in statistics)
            image_BHWC = (image_BHWC.astype(jnp.float32) / 255 - mean) / std
        with jax.named_scope("visual"):
            return normalize(self.visual(image_BHWC, draws_BP))

    def encode_text(self, text_BS: jax.Array) -> jax.Array:
        """float32 unit vectors (B, E) of int32 token ids; S may be less than ``max_len``."""
        with jax.named_scope("text"):
            return normalize(self.text(text_BS))

    def scale_and_bias(self) -> tuple[jax.Array, jax.Array]:
        """float32 scalars that turn a cosine into a logit: scale · cosine + bias.

        Without a bias the scale is at most 100, as in CLIP. SigLIP's has no bound: a published one is 112.
        """
        log_scale = self.logit_scale[...].astype(jnp.float32)
        if self.logit_bias is None:
            return jnp.exp(_capped(log_scale)), jnp.zeros(())
        return jnp.exp(log_scale), self.logit_bias[...].astype(jnp.float32)


def normalize(x_BE: jax.Array) -> jax.Array:
    """Unit vectors. Zero stays zero and has a finite gradient."""
    return x_BE * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x_BE), axis=-1, keepdims=True), 1e-24))


@jax.custom_vjp
def _capped(logit_scale: jax.Array) -> jax.Array:
    """``min(logit_scale, MAX_LOGIT_SCALE)``. Beyond the cap only gradients that lower the parameter pass.

    With no gradient at all, a parameter that momentum has carried beyond the cap would never come back.
    """
    return jnp.minimum(logit_scale, MAX_LOGIT_SCALE)


def _capped_fwd(logit_scale):
    return _capped(logit_scale), logit_scale


def _capped_bwd(logit_scale, g):
    return (jnp.where((logit_scale < MAX_LOGIT_SCALE) | (g > 0), g, 0),)


_capped.defvjp(_capped_fwd, _capped_bwd)
