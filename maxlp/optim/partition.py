"""Selects what an optimizer treats differently: parameters by name, moments by the name of their field."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.tree_util import GetAttrKey, KeyPath

from maxlp.optim.tree_utils import layer_axes, matches, name_of

MOMENTS = ("mu", "nu")  # optax's field names for the first and second moment, used by all of its states


def by_target(
    pair: dict[str, optax.GradientTransformation], targets: Sequence[str]
) -> optax.GradientTransformation:
    """Applies the first transformation to the parameters that match, and the second one to all others.

    Args:
      pair: two transformations by name; their names become keys of the state.
      targets: regular expressions, see `tree_utils.matches`.
    """
    matching, other = pair

    def labels(params: optax.Params) -> Any:
        return jax.tree.map_with_path(lambda k, _: matching if matches(k, targets) else other, params)

    return optax.partition({**pair}, labels)


def check_matrices(key: str, targets: Sequence[str], params: optax.Params) -> None:
    """Checks that every target of an optimizer matches parameters, and only matrices.

    Args:
      key: of the targets in the optimizer's config.

    Raises:
      ValueError: a target that matches no parameter, or one that is not a matrix.
    """

    def is_matrix(path: KeyPath, p: jax.Array) -> bool:
        return len(p.shape) - layer_axes(path) == 2

    leaves = jax.tree.leaves_with_path(params)
    if not leaves:
        return
    examples = [path for path, p in leaves if is_matrix(path, p)] or [path for path, _ in leaves]
    for target in targets:
        if not any(matches(path, (target,)) for path, _ in leaves):
            raise ValueError(f"{key}: {target!r} matches no parameter; one is {name_of(examples[0])}")
    for path, p in leaves:
        if matches(path, targets) and not is_matrix(path, p):
            raise ValueError(
                f"{key}={tuple(targets)} matches {name_of(path)}, which is not a matrix: {p.shape}; "
                "narrow the targets"
            )


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
