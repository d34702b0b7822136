"""Low precision: what the matmuls of a model compute in.

Models know nothing of it. `apply` puts a `QuantDot` in the place of ``dot_general`` in the layers that a
recipe is for; which layers, is decided by their paths.
"""

import fnmatch
from typing import Any

import jax
from flax import nnx

from maxlp.nn.stack import Block
from maxlp.numerics import formats
from maxlp.precision import smooth_swiglu as smooth_swiglu_module
from maxlp.precision.dot import QuantDot
from maxlp.precision.loss_scale import DynamicLossScale
from maxlp.precision.recipes import RECIPES, Operand, Recipe, make_recipe

__all__ = ["RECIPES", "DynamicLossScale", "Operand", "QuantDot", "Recipe", "apply", "inject", "make_recipe"]

HIGH_PRECISION = "high precision"


def apply(
    model: nnx.Module,
    *,
    recipe: str,
    options: dict,
    rules: tuple,
    first_blocks: int,
    last_blocks: int,
    min_dim: int,
    smooth_swiglu: str,
) -> dict[str, str]:
    """Gives a model's matmuls their recipes, in place; the ``precision`` section of a config.

    Args:
      recipe: name in `RECIPES`, for all layers that no rule names. ``bf16`` leaves the model's own dtype.
      options: of `make_recipe`, for that recipe.
      rules, first_blocks, last_blocks, min_dim, smooth_swiglu: see `inject`; a rule's recipe is a name.

    Returns:
      the recipe of each matmul by path, for printing.

    Raises:
      ValueError: in one line, whatever cannot work.
    """
    named = tuple((pattern, make_recipe(name)) for pattern, name in rules)
    return inject(
        model,
        make_recipe(recipe, **options),
        rules=named,
        first_blocks=first_blocks,
        last_blocks=last_blocks,
        min_dim=min_dim,
        smooth_swiglu=smooth_swiglu,
    )


def inject(
    model: nnx.Module,
    recipe: Recipe,
    *,
    rules: tuple[tuple[str, Recipe], ...] = (),
    first_blocks: int = 0,
    last_blocks: int = 0,
    min_dim: int = 0,
    smooth_swiglu: str = "none",
) -> dict[str, str]:
    """Replaces ``dot_general`` in the modules that have one and a ``kernel``, in place.

    The first rule whose pattern matches a module's path (``layers/mlp/down_proj``) decides. Where none
    does, matmuls in stacks of blocks get ``recipe``, and all others (the head, patch embeddings,
    projections) stay in high precision. What is not a matmul with a kernel (embeddings, norms, attention
    scores) has no ``dot_general`` and stays as it is.

    Args:
      rules: (pattern, recipe), with the wildcards of `fnmatch`: ``*`` matches across ``/``.
      first_blocks, last_blocks: blocks at either end of each stack that stay in high precision.
      min_dim: a kernel with a smaller dim than this stays in high precision (unless a rule names it):
        small matmuls lose more time to quantizing than they win.
      smooth_swiglu: form of `precision.smooth_swiglu`, for the quantized layers called ``down_proj``.

    Returns:
      path → name of the recipe.

    Raises:
      ValueError: a pattern that matches nothing, a stack of which no block is left, a kernel whose dims do
        not divide into blocks.
    """
    table: dict[str, str] = {}
    unused = {pattern for pattern, _ in rules}
    for path, module in _matmuls(model):
        stack = module.kernel.shape[:-2]
        chosen = next((r for pattern, r in rules if fnmatch.fnmatchcase(path, pattern)), None)
        unused -= {pattern for pattern, _ in rules if fnmatch.fnmatchcase(path, pattern)}
        if chosen is None:
            large = min(module.kernel.shape[-2:]) >= min_dim
            chosen = recipe if stack and large else RECIPES["bf16"]
        if chosen.fwd or chosen.dlhs or chosen.drhs:
            _check_blocks(path, module.kernel.shape[-2:], chosen)
            if path.endswith("/down_proj"):
                chosen = smooth_swiglu_module.smooth(chosen, smooth_swiglu)
            module.dot_general = nnx.data(QuantDot(chosen, stack))
            table[path] = (
                chosen.name if chosen.smooth == "none" else f"{chosen.name}, smooth {chosen.smooth}"
            )
        else:
            table[path] = HIGH_PRECISION
    if unused:
        raise ValueError(
            f"precision.rules: pattern {min(unused)!r} matches no matmul; paths: {', '.join(sorted(table))}"
        )
    if set(table.values()) != {HIGH_PRECISION}:
        _set_unquantized_blocks(model, first_blocks, last_blocks)
    return table


def _set_unquantized_blocks(model: nnx.Module, first: int, last: int) -> None:
    for path, blocks in nnx.iter_modules(model):
        if not isinstance(blocks, Block):
            continue
        num_layers = jax.tree.leaves(nnx.state(blocks, nnx.Param))[0].shape[0]
        if first < 0 or last < 0 or first + last >= num_layers:
            raise ValueError(
                f"precision.first_blocks={first} and precision.last_blocks={last} leave none of the "
                f"{num_layers} blocks of {'/'.join(map(str, path))}; lower them"
            )
        blocks.unquantized_blocks = (first, last)


def _matmuls(model: nnx.Module) -> list[tuple[str, Any]]:
    """(path, module) of all modules that multiply by a kernel through a ``dot_general`` of their own."""
    found = [
        ("/".join(map(str, path)), module)
        for path, module in nnx.iter_modules(model)
        if hasattr(module, "dot_general") and hasattr(module, "kernel")
    ]
    return sorted(found, key=lambda item: item[0])


def _check_blocks(path: str, dims: tuple[int, int], recipe: Recipe) -> None:
    if recipe.in_blocks and any(dim % formats.MX_BLOCK for dim in dims):
        raise ValueError(
            f"precision recipe {recipe.name!r}: {path} is {dims[0]} × {dims[1]}, which blocks "
            f"of {formats.MX_BLOCK} do not divide; use other sizes or a rule with another recipe for it"
        )
