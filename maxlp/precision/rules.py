"""Which recipe each matmul gets, and in which layers; only runs with a recipe import this."""

import fnmatch
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from flax import nnx

from maxlp.nn.layers import Linear
from maxlp.nn.stack import find_stacks
from maxlp.precision.inject import Rules
from maxlp.precision.recipes import RECIPES, Recipe
from maxlp.precision.replace import kernel_shape


class Chosen(NamedTuple):
    """What rules choose for a matmul.

    Attributes:
      recipe: of the matmul.
      plain: the layers of its stack in which it stays in high precision.
    """

    recipe: Recipe
    plain: frozenset[int] = frozenset()


def choose(
    model: nnx.Module,
    matmuls: Mapping[str, Any],
    recipe: Recipe,
    rules: Rules,
    min_dim: int,
    ends: tuple[int, int],
) -> dict[str, Chosen]:
    """The recipe of each matmul: of the first rule that matches it, or ``recipe`` where `inject` says so.

    Args:
      matmuls: path → module of the model.
      ends: the numbers of first and last blocks that stay in high precision.

    Raises:
      ValueError: a pattern that matches no matmul, or only those blocks; two recipes for the layers of a
        matmul.
    """
    shapes = {path: kernel_shape(module) for path, module in matmuls.items()}
    in_stacks = any(stack for stack, *_ in shapes.values())
    layers = _paths_of_layers(model, matmuls)
    names_between = [names[ends[0] : len(names) - ends[1]] for names in layers.values()]
    for pattern, wanted in rules:
        if not fnmatch.filter(itertools.chain(matmuls, *layers.values()), pattern):
            example = f" or, for a layer, {next(iter(layers.values()))[0]}" if layers else ""
            raise ValueError(
                f"rules: pattern {pattern!r} matches no matmul; use one of the paths "
                f"{', '.join(matmuls)}{example}"
            )
        if not wanted.is_plain and not fnmatch.filter(itertools.chain(matmuls, *names_between), pattern):
            raise ValueError(
                f"rules: pattern {pattern!r} matches only blocks that first_blocks={ends[0]} and "
                f"last_blocks={ends[1]} keep in high precision; lower these, or name other layers"
            )
    found = {}
    for path, (stack, *dims) in shapes.items():
        default = recipe if min(dims) >= min_dim and (stack or not in_stacks) else RECIPES["bf16"]
        found[path] = _choose_for_matmul(path, layers.get(path, [path]), rules, default)
        between = range(ends[0], len(layers.get(path, ())) - ends[1])
        if between and found[path].plain.issuperset(between):
            found[path] = Chosen(RECIPES["bf16"])
    return found


def _paths_of_layers(model: nnx.Module, matmuls: Mapping[str, Any]) -> dict[str, list[str]]:
    """The path of each `Linear` in a stack of blocks → its paths with the index of a layer."""
    stacks = find_stacks(model)
    return {
        path: [f"{stack}/{i}{path.removeprefix(stack)}" for i in range(module.kernel.shape[0])]
        for path, module in matmuls.items()
        for stack in stacks
        if isinstance(module, Linear) and path.startswith(f"{stack}/")
    }


def _choose_for_matmul(path: str, layers: list[str], rules: Rules, default: Recipe) -> Chosen:
    def recipe_of(layer: str) -> Recipe:
        names = (path, layer)
        found = (r for pattern, r in rules if any(fnmatch.fnmatchcase(name, pattern) for name in names))
        return next(found, default)

    recipes = [recipe_of(layer) for layer in layers]
    low = list(dict.fromkeys(recipe for recipe in recipes if not recipe.is_plain))
    if len(low) > 1:  # also of one name, with other options
        names = " and ".join(recipe.name for recipe in low)
        raise ValueError(
            f"rules: the layers of {path} have the recipes {names}; choose one of them, and bf16 for the "
            "other layers"
        )
    plain = frozenset(i for i, recipe in enumerate(recipes) if recipe.is_plain)
    return Chosen(low[0], plain) if low else Chosen(recipes[0])
