"""Whether two configs are of models that compute the same with the same weights."""

from collections.abc import Mapping
from typing import Any

from maxlp.run import changes


def other_model(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
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


def is_initial(key: str, *configs: Mapping[str, Any]) -> bool:
    """Whether a key of these configs only decides how weights begin, or the length of texts."""
    return any(changes.is_in(family.initial_keys, key) for family in changes.families_of(*configs))


def is_training(key: str, *configs: Mapping[str, Any]) -> bool:
    """Whether a key of these configs only decides how given weights are trained."""
    return any(changes.is_in(family.training_keys, key) for family in changes.families_of(*configs))
