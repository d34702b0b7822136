"""Parts of parameters and states that are treated differently: tensors by name, moments by field."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.tree_util import GetAttrKey, KeyPath

from maxlp.optim.tree_utils import matches

MOMENTS = ("mu", "nu")  # optax's field names for the first and second moment, used by all of its states


def by_target(
    pair: dict[str, optax.GradientTransformation], targets: Sequence[str]
) -> optax.GradientTransformation:
    """The first transformation for the parameters that match, the second one for all others.

    Their names are part of the state.
    """
    matching, other = pair

    def labels(params: optax.Params) -> Any:
        return jax.tree.map_with_path(lambda k, _: matching if matches(k, targets) else other, params)

    return optax.partition({**pair}, labels)


def map_moments(fn: Callable[..., Any], state: Any, is_leaf: Callable | None = None) -> Any:
    """Replaces each leaf of the moments in an optax state by `fn(moment, path, leaf)`.

    Moments are found by their field names, `MOMENTS`.

    Args:
      fn: takes the moment's name, the path of the parameter and the leaf.
      state: any optax state.
      is_leaf: as in `jax.tree.map`.
    """

    def one(path: KeyPath, leaf: Any) -> Any:
        for i, key in enumerate(path):
            if isinstance(key, GetAttrKey) and key.name in MOMENTS:
                return fn(key.name, path[i + 1 :], leaf)
        return leaf

    return jax.tree.map_with_path(one, state, is_leaf=is_leaf)
