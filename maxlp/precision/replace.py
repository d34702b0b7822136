"""Replaces the matmuls of layers by those of a recipe; only runs with a recipe import this."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from maxlp.nn.layers import Linear
from maxlp.nn.stack import Part, count_layers, find_stacks, path_name
from maxlp.numerics import formats
from maxlp.precision import flax_layers, gated, smooth_swiglu
from maxlp.precision.dot import QuantDot
from maxlp.precision.inject import matmuls
from maxlp.precision.recipes import Recipe


def set_recipe(path: str, module: Any, recipe: Recipe, plain: frozenset[int], smooth: str) -> str:
    """Gives a module its recipe and returns the text to print for it.

    Args:
      plain: layers that stay in high precision, for the text.
      smooth: a form of `smooth_swiglu`.
    """
    stack, in_dim, out_dim = kernel_shape(module)
    if smooth != "none" and recipe.gemms:
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
    text = recipe.name if recipe.smooth == "none" else f"{recipe.name}, smooth {recipe.smooth}"
    return f"{text}, not in layers {' '.join(map(str, sorted(plain)))}" if plain else text


def replace_quant_dots(
    graphdef: nnx.GraphDef, state: Mapping[str, Any], make: Callable[[QuantDot, tuple[int, ...]], QuantDot]
) -> tuple[nnx.GraphDef, dict]:
    """The structure and the model state of a model with another module for each `QuantDot`.

    Args:
      state: of training; its ``params`` stay as they are.
      make: (dot, stack) to what replaces it; stack: the leading axes of a stacked kernel.
    """
    model = nnx.merge(graphdef, state["params"], state["model_state"])
    for _, module in matmuls(model):
        if isinstance(dot := module.dot_general, QuantDot):
            module.dot_general = nnx.data(make(dot, module.kernel.shape[:-2]))
    graphdef, _, model_state = nnx.split(model, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(model_state)


def kernel_shape(module: Any) -> tuple[tuple[int, ...], int, int]:
    """The axes of the stack that a kernel is in, and the sizes that its matmul sums over and keeps."""
    if isinstance(module, nnx.Einsum | nnx.LinearGeneral):
        return flax_layers.kernel_shape(module)
    *stack, in_dim, out_dim = module.kernel.shape
    return tuple(stack), in_dim, out_dim


def keep_plain(model: nnx.Module, first: int, last: int, layers: Mapping[str, frozenset[int]]) -> None:
    """Keeps matmuls in some blocks of the stacks as they were, whatever replaced them in the others.

    Args:
      first, last: blocks at either end of each stack, whose matmuls are all kept.
      layers: path of a replaced matmul → further layers in which it is kept.
    """
    found = find_stacks(model)
    if not found and (first or last):
        raise ValueError(
            f"first_blocks={first} and last_blocks={last} need a stack of nn.stack.Block, which this model "
            "does not have; use rules"
        )
    for name, blocks in found.items():
        if not any(path.startswith(f"{name}/") for path in layers):
            continue
        num_layers = count_layers(blocks)
        if first < 0 or last < 0 or first + last >= num_layers:
            raise ValueError(
                f"first_blocks={first} and last_blocks={last} leave none of the {num_layers} blocks of "
                f"{name} quantized; choose at least 0, and a sum below {num_layers}"
            )
        ends = frozenset(range(first)) | frozenset(range(num_layers - last, num_layers))
        linears = (path_name(inside) for inside, m in nnx.iter_modules(blocks) if isinstance(m, Linear))
        kept = {inside: ends | layers.get(f"{name}/{inside}", frozenset()) for inside in linears}
        blocks.parts = nnx.static(_parts(kept, num_layers))


def set_silu(model: nnx.Module, recipes: Mapping[str, Recipe]) -> None:
    """Gives gates `gated.silu` where their gradient is multiplied in FP8 with one scale.

    Args:
      recipes: of the matmuls, by path.
    """
    gates = ((path, module) for path, module in nnx.iter_modules(model) if isinstance(module, gated.Gated))
    for path, module in gates:
        recipe = recipes.get(path_name((*path, "gate_proj")), Recipe("bf16"))
        kinds = {(o.granularity, formats.get(o.format).kind) for o in recipe.operands["output_grad"]}
        if kinds == {("tensor", "float")} and module.silu is jax.nn.silu:  # not the GELU of a GeGLU
            module.silu = nnx.static(gated.silu)


def _parts(kept: Mapping[str, frozenset[int]], num_layers: int) -> tuple[Part, ...]:
    """The parts of a stack with matmuls that are kept in some layers."""
    plain = [frozenset(path for path, layers in kept.items() if i in layers) for i in range(num_layers)]
    groups = [list(group) for _, group in itertools.groupby(range(num_layers), key=plain.__getitem__)]
    return tuple(Part(group[0], group[-1] + 1, plain[group[0]]) for group in groups)
