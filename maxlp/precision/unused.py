"""Finds precision settings that have no effect on a run."""

import dataclasses
from collections.abc import Mapping

from maxlp.precision import PrecisionConfig
from maxlp.precision.recipes import RECIPES, Operand, RecipeOptions, make_recipe


def refusal(p: PrecisionConfig, matmuls: Mapping[str, str]) -> str | None:
    """The message about the first setting without effect; None if there is none.

    Args:
      matmuls: path of each matmul of the model → its recipe, from `apply`.
    """
    unused = unused_options(p.recipe, p.options)
    if unused:
        key, reason = next(iter(unused.items()))
        return (
            f"precision.options.{key}={getattr(p.options, key)!r} has no effect with precision.recipe="
            f"{p.recipe}: {reason} (and precision.rules take none); leave it unset or choose another recipe"
        )
    if p.make(p.recipe).is_plain and p.min_dim:
        return (
            f"precision.min_dim={p.min_dim} has no effect with precision.recipe={p.recipe}, which "
            "changes no matmul; set it to 0 or choose another recipe"
        )
    if p.recipe == "bf16" and p.rules and all(p.make(name).is_plain for _, name in p.rules):
        return (
            f"precision.rules={p.rules} have no effect: they and precision.recipe=bf16 keep every matmul "
            "in the model's dtype; set them to () or choose another recipe"
        )
    used = {name.split(", ")[0] for name in matmuls.values()}
    if p.recipe not in used and not p.make(p.recipe).is_plain:
        return (
            f"precision.recipe={p.recipe} has no effect: precision.min_dim={p.min_dim}, precision.rules, "
            f"first_blocks={p.first_blocks} and last_blocks={p.last_blocks} leave it no matmul; change "
            "these, or set it to bf16"
        )
    form = p.smooth_swiglu
    if form == "none" or any(f"smooth {form}" in name.split(", ") for name in matmuls.values()):
        return None
    return (
        f"precision.smooth_swiglu={form} has no effect: no matmul of a gated product is quantized; set it "
        "to none or choose another precision.recipe"
    )


def unused_options(name: str, options: RecipeOptions) -> dict[str, str]:
    """Those of the options that change nothing in the recipe of that name: option → the reason."""
    recipe = make_recipe(name, **vars(options))
    operands = [operand for uses in recipe.operands.values() for operand in uses]
    found = {}
    for key in (field.name for field in dataclasses.fields(options)):
        if getattr(options, key) is None:
            continue
        if key == "keep":
            if recipe.keep == 1 and RECIPES[name].keep == 1:
                found[key] = "that recipe keeps every token"
        elif not operands:
            found[key] = "that recipe quantizes no matmul"
        elif key in ("history", "margin", "cold_start") and not recipe.delayed:
            found[key] = "that recipe has no delayed scales"
        elif key == "power_of_two" and all(o.in_blocks or o.granularity == "unscaled" for o in operands):
            found[key] = "that recipe has no scales of tensors or rows"
        elif key in ("block_size", "block_scales") and not recipe.block_size:
            found[key] = "that recipe has no blocks"
        elif key in ("grad_format", "grad_rounding") and not recipe.operands["output_grad"]:
            found[key] = "that recipe does not quantize gradients"
        elif key in ("fwd_hadamard", "trust_mask") and recipe.fwd is None:
            found[key] = "that recipe does not quantize the forward pass"
        elif key == "trust_mask" and recipe.trust_mask and not any(_clips(o) for o in recipe.fwd or ()):
            found[key] = "that recipe clips nothing"
        elif key == "hadamard" and recipe.drhs is None:
            found[key] = "that recipe does not quantize the gradient of the kernel"
    return found


def _clips(operand: Operand) -> bool:
    return operand.delayed or operand.clipping != "max"
