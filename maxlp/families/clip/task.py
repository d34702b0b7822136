"""Contrastive learning on pairs of images and texts.

Shape letters: B batch · H, W height and width · C channels · S text length · E joint dim.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp.data import image_text
from maxlp.data.image_text import ImageTextDataConfig
from maxlp.data.tokenizers import Tokenizer
from maxlp.families import Evaluate, Family
from maxlp.families.clip.constraints import RULES
from maxlp.families.clip.contrastive import ContrastiveConfig
from maxlp.families.clip.evals.linear_probe import linear_probe as fit_linear_probe
from maxlp.families.clip.evals.retrieval import retrieval
from maxlp.families.clip.evals.zero_shot import zero_shot
from maxlp.families.clip.gradients import batch_loss, loss_gradients
from maxlp.families.clip.model import CLIP, CLIPConfig, TextConfig
from maxlp.nn.attention import Use
from maxlp.run.config import ConfigError

# --- evaluation -----------------------------------------------------------------------------------------


def evaluator(
    graphdef: nnx.GraphDef,
    model: CLIPConfig,
    data: ImageTextDataConfig,
    loss: ContrastiveConfig,
    validation: image_text.ImageTextDataset,
) -> Evaluate:
    """Zero-shot classification of images with labels, and retrieval among pairs, on validation data.

    Raises:
      ConfigError: the text tower would not find the end of a text.
    """
    check_pool(model.text, validation.tokenizer, data.tokenizer)
    encode_image, encode_text = encoders(graphdef)

    def evaluate(state: dict, batches: Callable[[], Iterable[dict]]) -> dict[str, float]:
        image, text = functools.partial(encode_image, state), functools.partial(encode_text, state)
        if not validation.classes:
            return retrieval(image, text, batches())
        encoded: list[dict] = []  # each image is read and encoded once

        def encode() -> Iterator[dict]:
            for batch in batches():
                encoded.append(batch | {"image": image(batch["image"])})
                yield encoded[-1]

        top = zero_shot(
            lambda image_BE: image_BE,
            text,
            encode(),
            classes=validation.classes,
            templates=validation.templates,
            tokenize=validation.encode,
            batch_size=data.batch_size,
        )
        results = {f"zero_shot_{key}": value for key, value in top.items() if key != "examples"}
        return results | retrieval(lambda image_BE: image_BE, text, encoded)

    return evaluate


def check_pool(text: TextConfig, tokenizer: Tokenizer, spec: str) -> None:
    """Checks that the text tower pools the token that ends a text.

    Args:
      spec: names the tokenizer in the message.

    Raises:
      ConfigError: it pools another token.
    """
    wrong_eos = text.pool == "eos" and text.eos_id != tokenizer.eos_id
    if wrong_eos or (text.pool == "argmax" and tokenizer.eos_id != tokenizer.vocab_size - 1):
        raise ConfigError(
            f"config.model.text.pool={text.pool} with eos_id={text.eos_id} misses the end of a text, id "
            f"{tokenizer.eos_id} in {spec}; set config.model.text.pool=eos and "
            f"config.model.text.eos_id={tokenizer.eos_id}"
        )


def linear_probe(
    graphdef: nnx.GraphDef,
    state: dict,
    train: Iterable[dict],
    validation: Iterable[dict],
    *,
    num_classes: int,
    l2: float,
) -> dict[str, float]:
    """Accuracy of a linear classifier on the image features; see `evals.linear_probe`."""
    encode_image, _ = encoders(graphdef)
    encode_image = functools.partial(encode_image, state)
    return fit_linear_probe(encode_image, train, validation, num_classes=num_classes, l2=l2)


def encoders(graphdef: nnx.GraphDef) -> tuple[Callable, Callable]:
    """Compiled functions of (state, images) and of (state, tokens) to features."""

    def model(state: dict) -> CLIP:
        return nnx.merge(graphdef, state["params"], state["model_state"])

    return (
        jax.jit(lambda state, image_BHWC: model(state).encode_image(image_BHWC)),
        jax.jit(lambda state, text_BS: model(state).encode_text(text_BS)),
    )


# --- the rest of the contract ---------------------------------------------------------------------------


def batch_shapes(data: ImageTextDataConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """uint8 pixels (B, H, W, 3) and int32 tokens (B, S)."""
    B, size = data.batch_size, data.image_size
    return {
        "image": jax.ShapeDtypeStruct((B, size, size, 3), jnp.uint8),
        "text": jax.ShapeDtypeStruct((B, data.text_len), jnp.int32),
    }


def flops_per_unit(
    model: CLIPConfig, data: ImageTextDataConfig, num_params: int, frozen: bool = False
) -> tuple[float, float]:
    """Training FLOPs per pair with (full, causal) attention: 6 for each weight that multiplies a token.

    Frozen weights need 4. The patch embedding counts with all patches, blocks and pooling with those that
    are kept. Projections and the loss are not counted.
    """
    visual, text = model.visual, model.text
    per_weight = 4.0 if frozen else 6.0
    full = per_weight * visual.num_patches * 3 * visual.patch_size**2 * visual.width
    weights, scores = visual.pool_products
    full += per_weight * weights + 6 * scores
    causal = full
    for tower, tokens in ((visual, visual.train_seq_len), (text, data.text_len)):
        weights = 4 * tower.width**2 + 2 * tower.width * tower.mlp_dim
        matmuls = per_weight * tokens * tower.num_layers * weights
        scores = 12 * tokens**2 * tower.num_layers * tower.width
        full += matmuls + scores
        causal += matmuls + (scores / 2 if tower.causal else scores)
    return full, causal


def attention_uses(model: CLIPConfig, data: ImageTextDataConfig) -> tuple[Use, ...]:
    towers = (model.visual, model.visual.train_seq_len), (model.text, data.text_len)
    return tuple(
        Use(
            seq_len=length,
            num_heads=tower.num_heads,
            kv_heads=tower.num_heads,
            head_dim=tower.width // tower.num_heads,
            dtype=model.dtype,
            packed=False,
        )
        for tower, length in towers
    )


def tokenizer_texts(data: ImageTextDataConfig, seed: int) -> Iterator[str]:
    """The training captions."""
    return image_text.captions(data)


def make_data(model: CLIPConfig, data: ImageTextDataConfig, **how: Any) -> image_text.ImageTextDataset:
    return image_text.make_data(data, preprocessing=model.preprocessing, **how)


def describe_batch(data: ImageTextDataConfig) -> str:
    return f"{data.batch_size:,} pairs of {data.image_size}² pixels and {data.text_len} tokens"


FAMILY = Family(
    name="clip",
    Model=CLIPConfig,
    Data=ImageTextDataConfig,
    Loss=ContrastiveConfig,
    make_model=CLIP,
    make_data=make_data,
    loss=batch_loss,
    gradients=loss_gradients,
    evaluator=evaluator,
    batch_shapes=batch_shapes,
    unit="images",
    units_per_step=lambda data: data.batch_size,
    flops_per_unit=flops_per_unit,
    attention_uses=attention_uses,
    rules=RULES,
    vocabulary=lambda model: ("model.text.vocab_size", model.text.vocab_size),
    tokenizer_texts=tokenizer_texts,
    gated_products=("*/mlp/down_proj",),
    describe_batch=describe_batch,
    search_choices={"loss.method": ("tiled", "sharded")},
    linear_probe=linear_probe,
    free_keys=(
        "loss.method",
        "loss.tile_size",
        "data.num_threads",
        "data.max_broken",
        "data.validation_source",
    ),
    initial_keys=("model.init", "model.logit_scale", "model.logit_bias", "model.layer_scale"),
    training_keys=("model.visual.patch_dropout",),
    plain_loss={"method": "plain"},
)
