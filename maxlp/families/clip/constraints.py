"""Rules for the settings of a CLIP, besides those of `run.constraints`."""

import dataclasses

from maxlp.data.sources import KINDS
from maxlp.data.specs import split_options
from maxlp.run.settings import Machine, Settings

OF_FILES = ("classes", "templates", "templates_file", "crop_scale", "max_pixels")  # keys of `data`


def stages_are_not_used(s: Settings, machine: Machine) -> str | None:
    """A pipeline runs one program on all stages; a CLIP has two stacks of different shapes."""
    return _not_used("stage", machine)


def context_is_not_used(s: Settings, machine: Machine) -> str | None:
    """The context axis is for long causal sequences; a CLIP's are short, and images are not causal."""
    return _not_used("context", machine)


def _not_used(axis: str, machine: Machine) -> str | None:
    if machine.axes[axis] == 1:
        return None
    return (
        f"mesh.{axis}={machine.axes[axis]} cannot split a CLIP; set it to 1 and use mesh.data, mesh.fsdp "
        "and mesh.tensor"
    )


def images_fit_model(s: Settings, machine: Machine) -> str | None:
    """The position embeddings are made for one size of images."""
    if s.data.image_size == s.model.visual.image_size:
        return None
    return (
        f"data.image_size={s.data.image_size} differs from model.visual.image_size="
        f"{s.model.visual.image_size}; set both to the same value"
    )


def texts_fit_model(s: Settings, machine: Machine) -> str | None:
    """The text tower has position embeddings for max_len tokens."""
    if s.data.text_len <= s.model.text.max_len:
        return None
    return (
        f"data.text_len={s.data.text_len} is above model.text.max_len={s.model.text.max_len}, the number "
        "of position embeddings; lower it"
    )


def adascale_is_not_used(s: Settings, machine: Machine) -> str | None:
    """AdaScale assumes one loss for all batch sizes; a contrastive loss depends on the batch size."""
    if s.optimizer.adascale is None:
        return None
    return (
        f"optimizer.adascale={s.optimizer.adascale} needs a loss that is a mean over examples, and the "
        "contrastive loss compares all pairs of a batch; unset it"
    )


def exchange_is_not_used(s: Settings, machine: Machine) -> str | None:
    """A contrastive loss compares the rows of all replicas: it is not a sum of per-replica losses."""
    if s.train.local is not None:
        key, off = f"train.local.steps={s.train.local.steps}", "unset it"
    elif s.precision.exchange != "none":
        key, off = f"precision.exchange={s.precision.exchange}", "set it to none"
    else:
        return None
    return (
        f"{key} needs a loss that is a sum over rows, and the contrastive loss compares all pairs of a "
        f"batch; {off}"
    )


def sigmoid_has_bias(s: Settings, machine: Machine) -> str | None:
    """Without a bias, B² - B negatives dominate the sigmoid loss at the start (arXiv:2303.15343, §3.2)."""
    if s.loss.kind != "sigmoid" or s.model.logit_bias is not None:
        return None
    return "loss.kind=sigmoid needs a bias of the logits; set model.logit_bias=-10.0"


def pairs_are_compared(s: Settings, machine: Machine) -> str | None:
    """The softmax over a single pair is 1, whatever the model: the loss is 0 and has no gradient."""
    if s.loss.kind != "softmax" or s.data.batch_size > 1:
        return None
    return (
        f"data.batch_size={s.data.batch_size} leaves loss.kind=softmax no other pair to compare; raise it, "
        "or set loss.kind=sigmoid and model.logit_bias=-10.0"
    )


def sharpness_is_not_measured(s: Settings, machine: Machine) -> str | None:
    """Sharpness is measured in the logits of a next token; a CLIP predicts none."""
    if not s.precision.sharpness_every:
        return None
    return (
        f"precision.sharpness_every={s.precision.sharpness_every} needs a model that predicts tokens, and "
        "a CLIP does not; set it to 0"
    )


def drawn_images_are_complete(s: Settings, machine: Machine) -> str | None:
    """Drawn images have their size, names and sentences; what is for image files would be ignored."""
    data, defaults = s.data, {field.name: field.default for field in dataclasses.fields(s.data)}
    heads = [split_options(spec)[0] for spec in (data.source, data.validation_source or data.source)]
    if not all(head in KINDS and KINDS[head].drawn for head in heads):
        return None
    key = next((key for key in OF_FILES if getattr(data, key) != defaults[key]), None)
    if key is None:
        return None
    return f"data.{key}={getattr(data, key)} has no effect on data.source={data.source}; unset it"


RULES = (
    stages_are_not_used,
    context_is_not_used,
    images_fit_model,
    texts_fit_model,
    adascale_is_not_used,
    exchange_is_not_used,
    sigmoid_has_bias,
    pairs_are_compared,
    sharpness_is_not_measured,
    drawn_images_are_complete,
)
