"""Replaces the ``dot_general`` of layers by that of a recipe; only runs with a recipe import this."""

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
    """Gives a module its recipe, in place.

    Args:
      plain: layers that stay in high precision, for the text.
      smooth: a form of `smooth_swiglu`.

    Returns:
      a description for printing: the name of the recipe, the form, and the layers without it.

    Raises:
      ValueError: blocks of the recipe that do not divide the kernel, or an einsum with batch axes.
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
    if not plain:
        return text
    numbers = " ".join(str(layer) for layer in sorted(plain))
    return f"{text}, not in layers {numbers}"


def replace_quant_dots(
    graphdef: nnx.GraphDef, state: Mapping[str, Any], make: Callable[[QuantDot, tuple[int, ...]], QuantDot]
) -> tuple[nnx.GraphDef, dict]:
    """Replaces each `QuantDot` of a model by a subclass of it, such as one that records statistics.

    Args:
      graphdef, state: structure and training state of the model; they do not change.
      make: (dot, stack) to the new module; stack: the leading axes of a stacked kernel.

    Returns:
      the new structure, and the new model state as a dict.
    """
    model = nnx.merge(graphdef, state["params"], state["model_state"])
    for _, module in matmuls(model):
        if isinstance(dot := module.dot_general, QuantDot):
            module.dot_general = nnx.data(make(dot, module.kernel.shape[:-2]))
    graphdef, _, model_state = nnx.split(model, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(model_state)


def kernel_shape(module: Any) -> tuple[tuple[int, ...], int, int]:
    """The shape of the stack that a kernel is in, and the input and output dims of its matmul."""
    if isinstance(module, nnx.Einsum | nnx.LinearGeneral):
        return flax_layers.kernel_shape(module)
    *stack, in_dim, out_dim = module.kernel.shape
    return tuple(stack), in_dim, out_dim


def keep_plain(model: nnx.Module, first: int, last: int, layers: Mapping[str, frozenset[int]]) -> None:
    """Keeps matmuls in high precision in some blocks of the stacks.

    Args:
      first, last: numbers of blocks at either end of each stack that keep all of their matmuls.
      layers: path of a replaced matmul → further layers that keep it.

    Raises:
      ValueError: no stack, or no block between the first and last ones.
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
    """Gives gates `gated.silu` if their gradient is quantized to FP8 with per-tensor scales.

    Args:
      recipes: path of a matmul → its recipe.
    """
    gates = ((path, module) for path, module in nnx.iter_modules(model) if isinstance(module, gated.Gated))
    for path, module in gates:
        recipe = recipes.get(path_name((*path, "gate_proj")), Recipe("bf16"))
        kinds = {(o.granularity, formats.get(o.format).kind) for o in recipe.operands["output_grad"]}
        if kinds == {("tensor", "float")} and module.silu is jax.nn.silu:  # not the GELU of a GeGLU
            module.silu = nnx.static(gated.silu)


def _parts(kept: Mapping[str, frozenset[int]], num_layers: int) -> tuple[Part, ...]:
    """The runs of consecutive layers with the same matmuls in high precision.

    Args:
      kept: path of a matmul inside of a block → the layers that keep it.
    """
    plain = [frozenset(path for path, layers in kept.items() if i in layers) for i in range(num_layers)]
    groups = [list(group) for _, group in itertools.groupby(range(num_layers), key=plain.__getitem__)]
    return tuple(Part(group[0], group[-1] + 1, plain[group[0]]) for group in groups)
