"""Low precision: the formats in which the matmuls of a model compute.

Models do not depend on this package. `apply` selects layers by their paths and replaces their
``dot_general`` by the `QuantDot` of a recipe.
"""

import dataclasses
from typing import Annotated

from flax import nnx

from maxlp import schema
from maxlp.precision.inject import HIGH_PRECISION, Matmul, inject
from maxlp.precision.loss_scale import DynamicLossScale
from maxlp.precision.recipes import RECIPES, Operand, Recipe, RecipeOptions, SmoothForm, make_recipe
from maxlp.schema import CountOrZero, OneOf

__all__ = [
    "HIGH_PRECISION",
    "RECIPES",
    "DynamicLossScale",
    "Matmul",
    "Operand",
    "PrecisionConfig",
    "Recipe",
    "RecipeOptions",
    "apply",
    "inject",
    "make_recipe",
]


RecipeName = Annotated[str, OneOf(RECIPES)]
SentFormat = Annotated[str, OneOf(("none", "int8", "float8_e4m3fn"))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The ``precision`` section of a config.

    Attributes:
      recipe: name in `RECIPES`, for all layers without a rule. ``bf16`` keeps the model's own dtype.
      options: changes to that recipe.
      rules: (pattern, name of a recipe) pairs, see `inject`.
      first_blocks, last_blocks, min_dim, smooth_swiglu: see `inject`.
      high_precision_from: the number of steps after which the run continues with ``bf16``; 0 for never.
      loss_scale: dynamic loss scale of a float16 run, None for no scale.
      health_every, sharpness_every, magnitudes_every: steps between measurements of `health`, of the
        loss's sharpness (`families.Family`), of `magnitudes`; 0 for none.
      scalify: ``fp16``, or ``fp8`` in transformer blocks: a scale for every array (`precision.scalify`).
      exchange: format in which replicas exchange gradients (`parallel.exchange`); ``none``: their dtype.
      scatter: format in which gradients are scattered over ``fsdp`` (`precision.scatter`), or ``none``.

    Raises:
      ValueError: an unknown name or an invalid value; the message starts with the key.
    """

    recipe: RecipeName
    options: RecipeOptions
    rules: tuple[tuple[str, RecipeName], ...]
    first_blocks: CountOrZero
    last_blocks: CountOrZero
    min_dim: CountOrZero
    smooth_swiglu: SmoothForm
    high_precision_from: CountOrZero = 0
    loss_scale: DynamicLossScale | None = None
    health_every: CountOrZero = 0
    sharpness_every: CountOrZero = 0
    magnitudes_every: CountOrZero = 0
    scalify: Annotated[str, OneOf(("none", "fp16", "fp8"))] = "none"
    exchange: SentFormat = "none"
    scatter: SentFormat = "none"

    def __post_init__(self):
        schema.check(self)
        self.make(self.recipe)  # raises a ValueError

    @property
    def measures(self) -> bool:
        """Whether a run makes any of the measurements of `run.measurements`."""
        return any((self.health_every, self.sharpness_every, self.magnitudes_every))

    def make(self, name: str) -> Recipe:
        """The recipe of this name, with `options` if it is `recipe`, in rules too."""
        options = vars(self.options) if name == self.recipe else {}
        return make_recipe(name, **options)


def apply(model: nnx.Module, config: PrecisionConfig, *, gated_products: tuple[str, ...]) -> dict[str, str]:
    """Gives a model's matmuls their recipes, or marks it for `scalify`, in place.

    Args:
      gated_products: patterns of the layers whose input is a gated product, see `inject`.

    Returns:
      path → name of what the matmul computes in, for printing.

    Raises:
      ValueError: a config that does not fit the model, see `inject`.
    """
    if config.scalify != "none":
        from maxlp.precision import scalify  # few runs need it

        return scalify.mark(model, config.scalify == "fp8", config.first_blocks, config.last_blocks)
    if config.scatter != "none":
        from maxlp.precision import scatter  # few runs need it

        scatter.set_format(model, config.scatter)
    return inject(
        model,
        config.make(config.recipe),
        rules=tuple((pattern, config.make(name)) for pattern, name in config.rules),
        first_blocks=config.first_blocks,
        last_blocks=config.last_blocks,
        min_dim=config.min_dim,
        smooth_swiglu=config.smooth_swiglu,
        gated_products=gated_products,
    )
