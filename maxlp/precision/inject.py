"""Gives each matmul of a model its recipe, by its path."""

import fnmatch
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx

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


def matmuls(model: nnx.Module, *more: type) -> list[tuple[str, Any]]:
    """(path, module) of each `Matmul` of a model, and of ``more`` types of modules, sorted by path."""
    found: list[tuple[str, Any]] = []
    for path, module in nnx.iter_modules(model):
        if isinstance(module, (Matmul, *more)):
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
    one, matmuls in stacks of layers get ``recipe``, and all others (the head, patch embeddings,
    projections) stay in high precision; in a model without stacks, all get ``recipe``. Modules other
    than `Matmul` and `nnx.Einsum` (embeddings, norms, attention scores) do not change.

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
        dims do not divide into blocks, an einsum with batch axes, Smooth-SwiGLU without a gated product.
    """
    found = matmuls(model, nnx.Einsum)
    in_stacks = any(_kernel_shape(module)[0] for _, module in found)
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
        shape = _kernel_shape(module)
        chosen = _rule(path, rules)
        if chosen is None:
            default = min(shape[1:]) >= min_dim and (shape[0] or not in_stacks)
            chosen = recipe if default else RECIPES["bf16"]
        table[path] = HIGH_PRECISION
        if not chosen.is_plain:
            from maxlp.precision import replace

            form = smooth_swiglu if path in gated and chosen.gemms else "none"
            table[path] = replace.set_recipe(path, module, *shape, chosen, form)
    if set(table.values()) - {HIGH_PRECISION}:
        from maxlp.precision import replace

        replace.set_unquantized_blocks(model, first_blocks, last_blocks)
    return table


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _rule(path: str, rules: Rules) -> Recipe | None:
    return next((recipe for pattern, recipe in rules if _matches(path, (pattern,))), None)


def _kernel_shape(module: Any) -> tuple[tuple[int, ...], int, int]:
    """The axes of the stack that a kernel is in, and the sizes that its matmul sums over and keeps."""
    if isinstance(module, nnx.Einsum | nnx.LinearGeneral):
        from maxlp.precision import flax_layers

        return flax_layers.kernel_shape(module)
    *stack, in_dim, out_dim = module.kernel.shape
    return tuple(stack), in_dim, out_dim
