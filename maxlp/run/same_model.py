"""Whether two configs are of models that compute the same with the same weights."""

from collections.abc import Mapping
from typing import Any

from maxlp.run import changes

# Keys of the section ``data`` that decide which tokens a text becomes: the model knows no others.
TEXT_KEYS = ("tokenizer", "lowercase", "text_len")


def model_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Each key with which one model computes something else than another -> a line with both values.

    Args:
      old, new: sections ``model``.
    """
    configs = {"model": old}, {"model": new}
    found = changes.differences(*configs)
    return {
        key: line
        for key, line in found.items()
        if changes.is_fixed(key, *configs) and not (is_initial(key, *configs) or is_training(key, *configs))
    }


def text_keys(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a section ``data`` by which the texts that a model was trained on became tokens.

    Args:
      overrides: keys and values that were set on the command line, which are not among them.
    """
    return {
        key: value
        for key, value in data.items()
        if key in TEXT_KEYS and value is not None and f"data.{key}" not in overrides
    }


def is_initial(key: str, *configs: Mapping[str, Any]) -> bool:
    """Whether a key of these configs only decides how weights begin, or the length of texts."""
    return any(changes.is_in(family.initial_keys, key) for family in changes.families_of(*configs))


def is_training(key: str, *configs: Mapping[str, Any]) -> bool:
    """Whether a key of these configs only decides how given weights are trained."""
    return any(changes.is_in(family.training_keys, key) for family in changes.families_of(*configs))
