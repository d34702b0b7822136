"""Replaces the matmuls of layers by those of a recipe; only runs with a recipe import this."""

from typing import Any

import jax
from flax import nnx

from maxlp.nn.stack import Block
from maxlp.precision import flax_layers, smooth_swiglu
from maxlp.precision.dot import QuantDot
from maxlp.precision.recipes import Recipe


def set_recipe(
    path: str, module: Any, stack: tuple[int, ...], in_dim: int, out_dim: int, recipe: Recipe, smooth: str
) -> str:
    """Gives a module its recipe and returns the name to print for it.

    Args:
      stack, in_dim, out_dim: see `flax_layers.kernel_shape`.
      smooth: a form of `smooth_swiglu`.
    """
    if smooth != "none":
        recipe = smooth_swiglu.smooth(recipe, smooth)
    if (size := recipe.block_size) and (in_dim % size or out_dim % size):
        raise ValueError(
            f"recipe={recipe.name!r}: the kernel of {path} is {in_dim} × {out_dim}, which blocks of "
            f"{size} do not divide; change its size or add a rule with another recipe for it"
        )
    dot = QuantDot(recipe, stack)
    if isinstance(module, nnx.Einsum | nnx.LinearGeneral):
        flax_layers.set_dot(path, module, dot)
    else:
        module.dot_general = nnx.data(dot)
    return recipe.name if recipe.smooth == "none" else f"{recipe.name}, smooth {recipe.smooth}"


def set_unquantized_blocks(model: nnx.Module, first: int, last: int) -> None:
    """Keeps the matmuls at either end of each stack of blocks as they were."""
    stacks = [(path, module) for path, module in nnx.iter_modules(model) if isinstance(module, Block)]
    if not stacks and (first or last):
        raise ValueError(
            f"first_blocks={first} and last_blocks={last} need a stack of nn.stack.Block, which this model "
            "does not have; use rules"
        )
    for path, blocks in stacks:
        num_layers = jax.tree.leaves(nnx.state(blocks, nnx.Param))[0].shape[0]
        if first < 0 or last < 0 or first + last >= num_layers:
            raise ValueError(
                f"first_blocks={first} and last_blocks={last} leave none of the {num_layers} blocks of "
                f"{'/'.join(map(str, path))} quantized; choose at least 0, and a sum below {num_layers}"
            )
        blocks.unquantized_blocks = (first, last)
