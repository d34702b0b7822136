"""Whether two configs are of models that compute the same with the same weights."""

from collections.abc import Mapping
from typing import Any

from maxlp.run import changes

# Keys of the model that only decide how its weights begin, how they are trained, or how long a text may be.
TRAINING = (
    *("model.init", "model.init_std", "model.logit_scale", "model.logit_bias", "model.layer_scale"),
    *("model.visual.patch_dropout", "model.max_seq_len", "model.qk_clip"),
)


def other_model(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Each key with which one model computes something else than another -> a line with both values.

    Args:
      old, new: sections ``model``.
    """
    found = changes.differences({"model": old}, {"model": new})
    return {k: line for k, line in found.items() if changes.is_fixed(k) and not is_training(k)}


def is_training(key: str) -> bool:
    """Whether a key of the model is not about what it computes with given weights; see `TRAINING`."""
    return changes.is_in(TRAINING, key)
