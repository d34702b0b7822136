"""Images and the texts that belong to them: CLIP and SigLIP."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxlp.core import gradients as gradients_lib
from maxlp.data.image_text import captions
from maxlp.families.clip.contrastive import contrastive
from maxlp.families.clip.evals.linear_probe import linear_probe as probe
from maxlp.families.clip.evals.retrieval import retrieval
from maxlp.families.clip.evals.zero_shot import zero_shot
from maxlp.nn import attention
from maxlp.parallel import sharding
from maxlp.run.config import ConfigError, bind, call

UNIT = "images"


def loss(c: ConfigDict) -> gradients_lib.PairLossFn:
    return bind(contrastive, "loss", c.loss, "image_BE", "text_BE", "scale", "bias")


def gradients(c: ConfigDict) -> gradients_lib.Gradients:
    return gradients_lib.of_pairs(loss(c), microbatches=c.train.microbatches, seed=c.train.seed)


def evaluator(c: ConfigDict, graphdef: nnx.GraphDef, data: Any) -> Callable:
    """Zero-shot classification of held-out images with labels, and retrieval among held-out pairs."""
    check_pool(c, data.tokenizer)
    encode_image, encode_text = encoders(graphdef)

    def evaluate(state: dict, batches: Callable[[], Iterable[dict]]) -> dict[str, float]:
        image, text = functools.partial(encode_image, state), functools.partial(encode_text, state)
        found = {}
        if data.classes:
            top = zero_shot(
                image,
                text,
                batches(),
                classes=data.classes,
                templates=data.templates,
                tokenize=data.encode,
                batch_size=c.data.batch_size,
            )
            found |= {f"zero_shot_{key}": value for key, value in top.items() if key != "examples"}
        return found | retrieval(image, text, batches())

    return evaluate


def linear_probe(
    graphdef: nnx.GraphDef,
    state: dict,
    train: Iterable[dict],
    heldout: Iterable[dict],
    *,
    num_classes: int,
    l2: float,
) -> dict[str, float]:
    """Accuracy of a linear classifier on the image features; see `evals.linear_probe`."""
    encode_image = functools.partial(encoders(graphdef)[0], state)
    return probe(encode_image, train, heldout, num_classes=num_classes, l2=l2)


def encoders(graphdef: nnx.GraphDef) -> tuple[Callable, Callable]:
    """Compiled functions of (state, images) and of (state, tokens) to features."""

    def model(state: dict) -> Any:
        return nnx.merge(graphdef, state["params"], state["model_state"])

    return (
        jax.jit(lambda state, image_BHWC: model(state).encode_image(image_BHWC)),
        jax.jit(lambda state, text_BS: model(state).encode_text(text_BS)),
    )


def abstract_batch(c: ConfigDict, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """uint8 pixels (B, H, W, 3) and int32 tokens (B, S)."""
    B, size = c.data.batch_size, c.data.image_size
    of = functools.partial(jax.ShapeDtypeStruct, sharding=sharding.batch_sharding(mesh))
    return {"image": of((B, size, size, 3), jnp.uint8), "text": of((B, c.data.text_len), jnp.int32)}


def vocabulary(c: ConfigDict) -> tuple[str, int]:
    return "model.text.vocab_size", c.model.text.vocab_size


def texts(c: ConfigDict) -> Iterator[str]:
    """The training captions, for a tokenizer to learn from."""
    return captions(c.data.source)


def units(c: ConfigDict) -> int:
    return c.data.batch_size


def flops(c: ConfigDict, num_params: int) -> tuple[float, float]:
    """Training FLOPs per pair, 6 for each weight that multiplies a token, with full and causal attention.

    Counted are the blocks and the patch embedding, all patches kept; the loss itself is left out.
    """
    visual, text = c.model.visual, c.model.text
    patches = (visual.image_size // visual.patch_size) ** 2
    full = 6.0 * patches * 3 * visual.patch_size**2 * visual.width
    causal = full
    for tower, tokens in ((visual, patches + (visual.pool == "cls")), (text, c.data.text_len)):
        weights = 4 * tower.width**2 + 2 * tower.width * tower.mlp_dim
        matmuls = 6 * tokens * tower.num_layers * weights
        scores = 12 * tokens**2 * tower.num_layers * tower.width
        full += matmuls + scores
        causal += matmuls + (scores / 2 if tower.get("causal") else scores)
    return full, causal


def describe(c: ConfigDict) -> str:
    return f"{c.data.batch_size:,} pairs of {c.data.image_size}² pixels and {c.data.text_len} tokens"


def check_pool(c: ConfigDict, tokenizer: Any) -> None:
    """Raises a ConfigError if the text tower would not find the end of a text."""
    text = c.model.text
    wrong_eos = text.pool == "eos" and text.eos_id != tokenizer.eos_id
    if wrong_eos or (text.pool == "argmax" and tokenizer.eos_id != tokenizer.vocab_size - 1):
        raise ConfigError(
            f"config.model.text.pool={text.pool}, eos_id={text.eos_id}: the end of a text is not found; it "
            f"is {tokenizer.eos_id} in {c.data.tokenizer}; set config.model.text.pool=eos and "
            f"config.model.text.eos_id={tokenizer.eos_id}"
        )


def check(c: ConfigDict, mesh: Mesh, matmuls: dict[str, str]) -> None:
    """Raises a ConfigError for sections that do not fit each other."""
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    jax.eval_shape(lambda x: call(contrastive, "loss", c.loss, image_BE=x, text_BE=x, scale=1, bias=0), one)
    attention.check(c.model.attention, mesh.devices.flat[0].platform)
    for axis in ("stage", "context"):
        if mesh.shape[axis] > 1:
            raise ConfigError(
                f"config.mesh.{axis}={mesh.shape[axis]} is for Llama; of CLIP, mesh.data, mesh.fsdp and "
                "mesh.tensor split the work"
            )
    if c.data.image_size != c.model.visual.image_size:
        raise ConfigError(
            f"config.data.image_size={c.data.image_size} is not "
            f"config.model.visual.image_size={c.model.visual.image_size}; make them equal"
        )
    if c.data.text_len > c.model.text.max_len:
        raise ConfigError(
            f"config.data.text_len={c.data.text_len} is beyond "
            f"config.model.text.max_len={c.model.text.max_len}"
        )
    if c.loss.kind == "sigmoid" and c.model.logit_bias is None:
        raise ConfigError("config.loss.kind=sigmoid needs a bias: set config.model.logit_bias=-10.0")
