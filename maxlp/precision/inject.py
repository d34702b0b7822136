"""Gives each matmul of a model its recipe, by its path."""

import fnmatch
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
from flax import nnx

from maxlp.nn.stack import Block
from maxlp.precision.recipes import RECIPES, Recipe

HIGH_PRECISION = "high precision"

Rules = tuple[tuple[str, Recipe], ...]


@runtime_checkable
class Matmul(Protocol):
    """A module that multiplies the last axis of its input by a kernel, such as `nnx.Linear`.

    The kernel is (…, in, out), with the axes of a stack of layers in front.
    """

    kernel: nnx.Param
    dot_general: Callable[..., jax.Array]


def matmuls(model: nnx.Module) -> list[tuple[str, Matmul]]:
    """(path, module) of each `Matmul` of a model, sorted by path."""
    found: list[tuple[str, Matmul]] = []
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Matmul):
            found.append(("/".join(map(str, path)), module))
    return sorted(found, key=lambda item: item[0])


def inject(
    model: nnx.Module,
    recipe: Recipe,
    *,
    rules: Rules = (),
    first_blocks: int = 0,
    last_blocks: int = 0,
    min_dim: int = 0,
    smooth_swiglu: str = "none",
    gated_products: tuple[str, ...] = (),
) -> dict[str, str]:
    """Replaces ``dot_general`` in the matmuls of a model, in place.

    The first rule whose pattern matches a module's path (``layers/mlp/down_proj``) decides. Without
    one, matmuls in stacks of blocks get ``recipe``, and all others (the head, patch embeddings,
    projections) stay in high precision. Modules other than `Matmul` (embeddings, norms, attention
    scores) do not change.

    Patterns have the wildcards of `fnmatch`; ``*`` matches across ``/``.

    Args:
      rules: (pattern, recipe) pairs.
      first_blocks, last_blocks: blocks at either end of each stack that stay in high precision.
      min_dim: a kernel with a smaller dim than this stays in high precision (unless a rule matches
        it): small matmuls lose more time to quantization than they gain.
      smooth_swiglu: a form of `precision.smooth_swiglu`.
      gated_products: patterns of the layers whose input is a gated product, which Smooth-SwiGLU
        acts on.

    Returns:
      path → name of the recipe.

    Raises:
      ValueError: a pattern that matches nothing, a stack without a quantized block, a kernel whose
        dims do not divide into blocks, Smooth-SwiGLU without a gated product.
    """
    found = matmuls(model)
    paths = [path for path, _ in found]
    for pattern, _ in rules:
        if not any(_matches(path, (pattern,)) for path in paths):
            raise ValueError(
                f"rules: pattern {pattern!r} matches no matmul; use one of the paths {', '.join(paths)}"
            )
    gated = {path for path in paths if _matches(path, gated_products)}
    if smooth_swiglu != "none" and not gated:
        raise ValueError(
            f"smooth_swiglu={smooth_swiglu!r} needs a gated product, which this model does not have; "
            "set it to 'none'"
        )
    table = {}
    for path, module in found:
        chosen = _choose(path, module, recipe, rules, min_dim)
        if path in gated and chosen.gemms:
            chosen = _smooth(chosen, smooth_swiglu)
        table[path] = _set_recipe(path, module, chosen)
    if set(table.values()) - {HIGH_PRECISION}:
        set_unquantized_blocks(model, first_blocks, last_blocks)
    return table


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _choose(path: str, module: Matmul, recipe: Recipe, rules: Rules, min_dim: int) -> Recipe:
    for pattern, of_rule in rules:
        if _matches(path, (pattern,)):
            return of_rule
    *stack, in_dim, out_dim = module.kernel.shape
    return recipe if stack and min(in_dim, out_dim) >= min_dim else RECIPES["bf16"]


def _smooth(recipe: Recipe, form: str) -> Recipe:
    from maxlp.precision import smooth_swiglu

    return smooth_swiglu.smooth(recipe, form)


def _set_recipe(path: str, module: Matmul, recipe: Recipe) -> str:
    """Gives a module its recipe and returns the name to print for it."""
    if not recipe.gemms:
        return HIGH_PRECISION
    *stack, in_dim, out_dim = module.kernel.shape
    if (size := recipe.block_size) and (in_dim % size or out_dim % size):
        raise ValueError(
            f"recipe={recipe.name!r}: the kernel of {path} is {in_dim} × {out_dim}, which blocks of "
            f"{size} do not divide; change its size or add a rule with another recipe for it"
        )
    from maxlp.precision.dot import QuantDot

    module.dot_general = nnx.data(QuantDot(recipe, tuple(stack)))
    return recipe.name if recipe.smooth == "none" else f"{recipe.name}, smooth {recipe.smooth}"


def set_unquantized_blocks(model: nnx.Module, first: int, last: int) -> None:
    """Leaves so many blocks at the ends of each stack unquantized; raises a ValueError if none remains."""
    for path, blocks in nnx.iter_modules(model):
        if not isinstance(blocks, Block):
            continue
        num_layers = jax.tree.leaves(nnx.state(blocks, nnx.Param))[0].shape[0]
        if first < 0 or last < 0 or first + last >= num_layers:
            raise ValueError(
                f"first_blocks={first} and last_blocks={last} leave none of the {num_layers} blocks of "
                f"{'/'.join(map(str, path))} quantized; choose at least 0, and a sum below {num_layers}"
            )
        blocks.unquantized_blocks = (first, last)
