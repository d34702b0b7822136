"""CLIP (Radford et al. 2021, arXiv:2103.00020) and SigLIP (Zhai et al. 2023, arXiv:2303.15343).

Two towers that meet in one space of unit vectors. Shape letters: B batch · S text length · D embed ·
E joint dim · C channels.
"""

import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp.families.clip import vit
from maxlp.nn import attention as attentions
from maxlp.nn import layers, stack

TEXT_POOLS = ("argmax", "eos", "last")
MAX_LOGIT_SCALE = math.log(100)


class TextTower(nnx.Module):
    """Token ids to joint features; arguments as `CLIP` describes them."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_len: int,
        width: int,
        num_layers: int,
        num_heads: int,
        mlp_dim: int,
        causal: bool,
        pool: str,
        eos_id: int | None,
        proj_bias: bool,
        embed_dim: int,
        rngs: nnx.Rngs,
        **common,
    ):
        if pool not in TEXT_POOLS:
            raise ValueError(f"model.text.pool={pool!r} is unknown; one of {', '.join(TEXT_POOLS)}")
        if pool == "eos" and eos_id is None:
            raise ValueError("model.text.eos_id is not set, and model.text.pool='eos' looks for it")
        sizes = dict(width=width, num_layers=num_layers, num_heads=num_heads, mlp_dim=mlp_dim)
        c = self.encoder = vit.Encoder(tower="text", causal=causal, **sizes, **common)
        self.max_len, self.pool, self.eos_id = max_len, pool, eos_id

        of_clip = c.init == "clip"
        self.tok_embed = layers.Embed(
            vocab_size,
            width,
            std=0.02 if of_clip else width**-0.5,
            dtype=c.dtype,
            param_dtype=c.param_dtype,
            rngs=rngs,
        )
        self.pos_embed = c.vectors(layers.normal, 0.01 if of_clip else width**-0.5, (max_len, width), rngs)
        self.layers = c.stack(rngs)
        self.final_norm = c.norm(width)
        self.proj = c.linear(
            width,
            embed_dim,
            ("embed", "joint"),
            rngs,
            draw=layers.normal,
            std=width**-0.5,
            bias="joint" if proj_bias else None,
        )

    def __call__(self, text_BS: jax.Array) -> jax.Array:
        """float32 features (B, E)."""
        length = text_BS.shape[1]
        if length > self.max_len:
            raise ValueError(f"texts of {length} tokens are longer than model.text.max_len={self.max_len}")
        with jax.named_scope("embed"):
            x_BSD = self.tok_embed(text_BS)
            x_BSD += self.pos_embed[:length].astype(x_BSD.dtype)
        x_BSD = self.encoder.run(self.layers, x_BSD)
        with jax.named_scope("pool"):
            x_BD = jnp.take_along_axis(x_BSD, self.pool_index(text_BS)[:, None, None], axis=1)[:, 0]
            return self.proj(self.final_norm(x_BD), preferred_element_type=jnp.float32)

    def pool_index(self, text_BS: jax.Array) -> jax.Array:
        """The position, for each text, whose output stands for all of it."""
        if self.pool == "argmax":
            return jnp.argmax(text_BS, axis=-1)
        if self.pool == "eos":
            return jnp.argmax(text_BS == self.eos_id, axis=-1)
        return jnp.full(text_BS.shape[:1], text_BS.shape[1] - 1)


class CLIP(nnx.Module):
    """An image tower and a text tower, whose features are compared.

    Args:
      embed_dim: E, of the features.
      visual: image_size, patch_size, width, num_layers, num_heads and mlp_dim;
        pool: "cls" (a class token), "gap" (mean of the patches) or "map" (attention, `vit.MapPool`);
        pre_norm: a norm in front of the blocks; patch_bias: a bias in the patch embedding;
        proj: a projection to E, without which the width has to be E;
        patch_dropout: share of the patches left out in training.
      text: vocab_size, max_len, width, num_layers, num_heads and mlp_dim;
        causal: a token sees those before it only;
        pool: the token that stands for a text, "argmax" (of the highest id: the end of a text in OpenAI's
        vocabulary), "eos" (the first with eos_id) or "last"; eos_id: None unless the pool is "eos";
        proj_bias: a bias in the projection to E.
      act: name in `vit.ACTIVATIONS`; a property of the weights, which no file can be trusted to tell.
      norm_eps: epsilon of the norms.
      layer_scale: what the gains of the residual branches start at (0.0 is a start at the identity);
        None is none.
      qk_norm: norms of queries and keys.
      init: of the weights, "clip" (OpenAI's and open_clip's) or "siglip" (big_vision's).
      logit_scale, logit_bias: what the temperature's logarithm and the bias of the logits start at; None is
        no bias.
      image_mean, image_std: of the channels, for pixels in [0, 1].
      dtype: of activations and matmuls. param_dtype: of the stored parameters.
      attention: name in `attention.ATTENTION`.
      scan_layers, remat: see `stack.apply_stack` and `stack.REMAT_POLICIES`.

    Raises:
      ValueError: sizes that do not fit each other, unknown names.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        visual: dict,
        text: dict,
        act: str,
        norm_eps: float,
        layer_scale: float | None,
        qk_norm: bool,
        init: str,
        logit_scale: float,
        logit_bias: float | None,
        image_mean: tuple,
        image_std: tuple,
        dtype: str,
        param_dtype: str,
        attention: str,
        scan_layers: bool,
        remat: str,
        rngs: nnx.Rngs,
    ):
        for name, value, known in (
            ("act", act, vit.ACTIVATIONS),
            ("init", init, vit.INITS),
            ("attention", attention, attentions.ATTENTION),
            ("remat", remat, stack.REMAT_POLICIES),
        ):
            if value not in known:
                raise ValueError(f"model.{name}={value!r} is unknown; one of {', '.join(known)}")
        common = dict(
            embed_dim=embed_dim,
            act=act,
            norm_eps=norm_eps,
            layer_scale=layer_scale,
            qk_norm=qk_norm,
            init=init,
            dtype=jnp.dtype(dtype),
            param_dtype=jnp.dtype(param_dtype),
            attention=attention,
            scan_layers=scan_layers,
            remat=remat,
            rngs=rngs,
        )
        self.visual = _tower(vit.ImageTower, "visual", visual, common)
        self.text = _tower(TextTower, "text", text, common)
        self.logit_scale = layers.param(jnp.asarray(logit_scale, param_dtype), ())
        self.logit_bias = (
            None if logit_bias is None else layers.param(jnp.asarray(logit_bias, param_dtype), ())
        )
        self.image_mean, self.image_std = tuple(image_mean), tuple(image_std)

    def encode_image(self, image_BHWC: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """float32 unit vectors (B, E).

        Args:
          image_BHWC: uint8 pixels, or floats that are normalised already.
          dropout_key: draws the patches that are left out; None keeps all.
        """
        if image_BHWC.dtype == jnp.uint8:
            mean, std = jnp.asarray(self.image_mean), jnp.asarray(self.image_std)
            image_BHWC = (image_BHWC.astype(jnp.float32) / 255 - mean) / std
        with jax.named_scope("visual"):
            return normalize(self.visual(image_BHWC, dropout_key))

    def encode_text(self, text_BS: jax.Array) -> jax.Array:
        """float32 unit vectors (B, E) of int32 ids, of which there may be fewer than ``max_len`` a text."""
        with jax.named_scope("text"):
            return normalize(self.text(text_BS))

    def temperature(self) -> tuple[jax.Array, jax.Array]:
        """What turns a cosine into a logit: float32 (scale, bias), the scale at most 100."""
        scale = jnp.exp(_capped(self.logit_scale[...].astype(jnp.float32)))
        bias = jnp.zeros(()) if self.logit_bias is None else self.logit_bias[...].astype(jnp.float32)
        return scale, bias


def normalize(x_BE: jax.Array) -> jax.Array:
    """Unit vectors; zero stays zero, and has a gradient."""
    return x_BE * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x_BE), axis=-1, keepdims=True), 1e-24))


@jax.custom_vjp
def _capped(logit_scale: jax.Array) -> jax.Array:
    """The parameter or its largest value. Beyond that only a gradient that leads back gets through: were
    there none, a parameter that momentum carried beyond the cap would stay there for good."""
    return jnp.minimum(logit_scale, MAX_LOGIT_SCALE)


def _capped_fwd(logit_scale):
    return _capped(logit_scale), logit_scale


def _capped_bwd(logit_scale, g):
    return (jnp.where((logit_scale < MAX_LOGIT_SCALE) | (g > 0), g, 0),)


_capped.defvjp(_capped_fwd, _capped_bwd)


def _tower(kind: type, section: str, sizes: dict, common: dict[str, Any]) -> Any:
    known = set(inspect.signature(kind.__init__).parameters) - {"self", "common", *common}
    for key in sorted(set(sizes) ^ known):
        what = "unknown" if key in sizes else "missing"
        raise ValueError(f"model.{section}.{key} is {what}; keys: {', '.join(sorted(known))}")
    return kind(**sizes, **common)
