"""Gives each matmul of a model the recipe that rules choose by its path."""

import fnmatch
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx

from maxlp.nn.stack import path_name
from maxlp.precision.recipes import Recipe

HIGH_PRECISION = "high precision"

Rules = tuple[tuple[str, Recipe], ...]


@runtime_checkable
class Matmul(Protocol):
    """A module that multiplies the last axis of its input by a kernel, such as `nnx.Linear`.

    The kernel is (…, in, out), with the axes of a stack of layers in front.
    """

    kernel: nnx.Param
    dot_general: Callable[..., jax.Array]


def matmuls(model: nnx.Module, *more: type) -> list[tuple[str, Any]]:
    """(path, module) of each `Matmul` of a model, and of ``more`` types of modules, sorted by path."""
    found = [(path_name(path), m) for path, m in nnx.iter_modules(model) if isinstance(m, (Matmul, *more))]
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
    """Replaces ``dot_general`` in the matmuls of a model by those of recipes, in place.

    The first rule whose pattern matches a module's path (``layers/mlp/down_proj``), or its path with the
    index of a layer (``layers/3/mlp/down_proj``, for that layer), decides. Where none matches, matmuls in
    stacks of layers get ``recipe``, and all others (the head, patch embeddings, projections) stay in high
    precision; in a model without stacks, all get ``recipe``. Modules other than `Matmul` and `nnx.Einsum`
    (embeddings, norms, attention scores) do not change.

    A stack of layers is one module, so each of its matmuls can have only one recipe besides high precision.
    In the compiled program a stack is one loop for each run of consecutive layers with the same recipes.

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
      ValueError: a pattern that matches no matmul, or only blocks that stay in high precision; a stack
        without a quantized block; two recipes for the layers of a matmul; a kernel whose dims the recipe's
        blocks do not divide; an einsum with batch axes; Smooth-SwiGLU without a gated product.
    """
    found = matmuls(model, nnx.Einsum)
    gated = {path for path, _ in found if any(fnmatch.fnmatchcase(path, p) for p in gated_products)}
    if smooth_swiglu != "none" and not gated:
        raise ValueError(
            f"smooth_swiglu={smooth_swiglu!r} needs a gated product, which this model does not have; "
            "set it to 'none'"
        )
    table = {path: HIGH_PRECISION for path, _ in found}
    if recipe.is_plain and not rules:
        return table
    from maxlp.precision import replace  # only runs with a recipe need these two
    from maxlp.precision.rules import choose

    chosen = choose(model, dict(found), recipe, rules, min_dim, (first_blocks, last_blocks))
    low = {path: c for path, c in chosen.items() if not c.recipe.is_plain}
    for path, module in found:
        if path in low:
            form = smooth_swiglu if path in gated else "none"
            table[path] = replace.set_recipe(path, module, low[path].recipe, low[path].plain, form)
    if low:
        replace.keep_plain(model, first_blocks, last_blocks, {path: c.plain for path, c in low.items()})
        replace.set_silu(model, {path: c.recipe for path, c in low.items()})
    return table
