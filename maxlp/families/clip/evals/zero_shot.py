"""Zero-shot classification: images by the names of the classes (CLIP, arXiv:2103.00020, §3.1).

Shape letters: B batch · S text length · E joint dim · C classes · N prompts.
"""

from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxlp.families.clip.evals import features


def zero_shot(
    encode_image: features.Encode,
    encode_text: features.Encode,
    batches: Iterable[dict],
    *,
    classes: Sequence[str],
    templates: Sequence[str],
    tokenize: Callable[[list[str]], np.ndarray],
    batch_size: int,
) -> dict[str, float]:
    """How often the text of an image's class is the nearest one, or one of the five nearest.

    Args:
      encode_image: images (B, H, W, 3) to features (B, E), of any positive scale.
      encode_text: int32 (B, S) to features (B, E).
      batches: with `image`, `label` int32 (B,), an index into ``classes``, and `mask` bool (B,). Rows with
        a false mask, or a label that is not an index, are not counted.
      classes, templates: class c is described by ``template.format(c)`` for each template.
      tokenize: texts to int32 (N, S).
      batch_size: number of prompts that all devices encode at once.

    Returns:
      top1 and top5 in [0, 1], and examples. Classes that tie with an image's own count against it.

    Raises:
      ValueError: a template without a place for the class, or no image with a label.
    """
    class_CE = class_embeddings(encode_text, classes, templates, tokenize, batch_size)
    class_CE = features.replicate(class_CE)
    total = dict.fromkeys(("top1", "top5", "examples"), 0.0)
    for batch in batches:  # one at a time, see `features.collect`
        image_BE = encode_image(batch["image"])
        sums = jax.device_get(_count(image_BE, class_CE, batch["label"], batch["mask"]))
        total = {key: value + float(sums[key]) for key, value in total.items()}
    if not total["examples"]:
        raise ValueError("the validation data has no image with a label among data.classes; check both")
    return {key: total[key] / total["examples"] for key in ("top1", "top5")} | {
        "examples": total["examples"]
    }


def class_embeddings(
    encode_text: features.Encode,
    classes: Sequence[str],
    templates: Sequence[str],
    tokenize: Callable[[list[str]], np.ndarray],
    batch_size: int,
) -> np.ndarray:
    """The normalized mean of the normalized embeddings of each class's prompts, float32 (C, E).

    Raises:
      ValueError: a template without a place for the name of the class.
    """
    for template in templates:
        if template.format("") == template:
            raise ValueError(f"template {template!r} has no {{}} for the name of the class; add one")
    prompts = [template.format(name) for name in classes for template in templates]
    class_of_N = np.repeat(np.arange(len(classes)), len(templates))
    sum_CE: np.ndarray | None = None
    for start in range(0, len(prompts), batch_size):
        some = prompts[start : start + batch_size]
        tokens_NS = tokenize(some + some[-1:] * (batch_size - len(some)))  # one shape: compiled once
        text_NE = encode_text(features.split_rows(tokens_NS))
        text_NE = jax.device_get(features.replicate(text_NE))[: len(some)]
        if sum_CE is None:
            sum_CE = np.zeros((len(classes), text_NE.shape[1]))
        np.add.at(sum_CE, class_of_N[start : start + batch_size], _unit(text_NE))
    if sum_CE is None:
        found = f"{len(classes)} classes and {len(templates)} templates"
        raise ValueError(f"no prompts from {found}; set data.classes and data.templates")
    return _unit(sum_CE).astype(np.float32)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@jax.jit
def _count(
    image_BE: jax.Array, class_CE: jax.Array, label_B: jax.Array, mask_B: jax.Array
) -> dict[str, jax.Array]:
    """The number of hits and of counted examples of a batch."""
    score_BC = jnp.einsum("be,ce->bc", image_BE, class_CE, precision=jax.lax.Precision.HIGHEST)
    rank_B = features.ranks(score_BC, label_B)
    counted_B = mask_B & (label_B >= 0) & (label_B < len(class_CE))
    return {
        "top1": jnp.sum(counted_B & (rank_B < 1)),
        "top5": jnp.sum(counted_B & (rank_B < 5)),
        "examples": jnp.sum(counted_B),
    }
