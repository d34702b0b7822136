"""Recipes: how the operands of a layer's matmuls are quantized, as data.

A linear layer is three matmuls (GEMMs), here with AQT's names: ``fwd`` computes the output from input and
kernel, ``dlhs`` (dgrad) the gradient of the input from output gradient and kernel, ``drhs`` (wgrad) the
gradient of the kernel from input and output gradient. A recipe gives, for each, the formats of its two
operands and which elements share a scale.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from maxlp import schema
from maxlp.numerics import formats
from maxlp.numerics.formats import BLOCK_SCALES, GRANULARITIES, MX_BLOCK
from maxlp.schema import Count, OneOf, PositiveFraction, Range

GEMMS = {  # the tensors of a layer that each matmul multiplies
    "fwd": ("input", "kernel"),
    "dlhs": ("output_grad", "kernel"),
    "drhs": ("input", "output_grad"),
}


class MatmulFormat(NamedTuple):
    """The name of a format that matmuls take, see `formats.get`."""

    def error(self, value: str) -> str | None:
        """See `schema.Rule`."""
        try:
            formats.get(value)
        except ValueError:
            return formats.UNKNOWN
        return None


FormatName = Annotated[str, MatmulFormat()]
Granularity = Annotated[str, OneOf(GRANULARITIES)]
Rounding = Annotated[str, OneOf(("nearest", "truncate", "stochastic"))]
BlockScales = Annotated[str, OneOf(BLOCK_SCALES)]
SmoothForm = Annotated[str, OneOf(("none", "channel", "balanced", "token"))]  # see `smooth_swiglu`
Clipping = Annotated[str, OneOf(("max", "gaussian"))]
Residuals = Annotated[str, OneOf(("full", "quantized"))]
Margin = Annotated[float, Range(at_least=-8, at_most=8)]  # at 8, E4M3 keeps 10 of its 18 binades


@dataclasses.dataclass(frozen=True)
class Operand:
    """How one operand of a matmul is quantized.

    Attributes:
      format: see `formats.get`.
      granularity: which elements share a scale, see `quantized.quantize`.
      delayed: the scale comes from the amax history of earlier steps (`delayed`), not from the data itself.
      power_of_two: scales of tensors and rows are rounded up to powers of two.
      clipping: see `quantized.quantize`.
      rounding: see `rounding.cast`.
      block_size, block_scales: of blocks and tiles, see `quantized.quantize`.
    """

    format: FormatName
    granularity: Granularity = "tensor"
    delayed: bool = False
    power_of_two: bool = False
    clipping: Clipping = "max"
    rounding: Rounding = "nearest"
    block_size: Count = MX_BLOCK
    block_scales: BlockScales = "up"

    @property
    def in_blocks(self) -> bool:
        """Whether the elements that share a scale are a block or a tile."""
        return self.granularity in ("block", "tile")

    @property
    def itemsize(self) -> int:
        """Bytes per element, without scales."""
        return jnp.dtype(formats.get(self.format).dtype).itemsize

    @property
    def max_code(self) -> float:
        """The largest code: that of the format if the scale is of a tensor or a row, else about 1."""
        return formats.get(self.format).max if self.granularity in ("tensor", "row") else 1.0

    @property
    def is_emulated(self) -> bool:
        """Whether no chip multiplies such blocks directly: none takes float32 scales."""
        return self.in_blocks and self.block_scales == "float32"

    def __post_init__(self):
        schema.check(self)
        if self.delayed and self.granularity != "tensor":
            raise ValueError(
                f"options.granularity={self.granularity!r} does not work with delayed scales; use "
                "'tensor' or a recipe with current scales"
            )
        if self.delayed and formats.get(self.format).kind == "int":
            raise ValueError(
                f"options.format={self.format!r} has no NaN to mark what overflows a delayed scale; use a "
                "float format or a recipe with current scales"
            )
        clipped = formats.get(self.format).clip and not (self.delayed or self.in_blocks)
        if self.clipping == "gaussian" and not clipped:
            grids = ", ".join(name for name, f in formats.FORMATS.items() if f.clip)
            raise ValueError(
                f"options.clipping='gaussian' is for current scales of tensors or rows in {grids}, not for "
                f"{_described(self)}; use 'max'"
            )


Pair = tuple[Operand, Operand] | None


def _described(operand: Operand) -> str:
    return f"{operand.format} (granularity {operand.granularity})"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How each matmul of a linear layer quantizes its operands; None multiplies in the layer's dtype.

    Attributes:
      fwd: (input, kernel).
      dlhs: (output gradient, kernel).
      drhs: (input, output gradient).
      residuals: what is saved for the backward pass: input and kernel in the layer's dtype
        (``full``), or as ``fwd`` quantized them (``quantized``: half the bytes). A kernel is always
        saved in quantized form if ``dlhs`` uses the same form.
      history: the length of the amax history of delayed scaling, in steps.
      margin: the headroom of delayed scales, which map ``amax * 2^margin`` to the format's largest number.
      cold_start: delayed scales are current ones until a nonzero amax was recorded.
      smooth: see `smooth_swiglu`.
      hadamard: both operands of ``drhs`` are rotated along the tokens first, see `quantized.rotate`. Their
        delayed scales have room for four times the amax, the most that a rotation makes of it.
      fwd_hadamard: both operands of ``fwd`` are rotated along the contracted axis, in blocks of 128
        or of the largest power of two that divides it; the backward pass rotates the gradients back.
      trust_mask: elements that ``fwd`` clips get no gradient, see `quantized.trusted`.
      keep: the share of the tokens of each sequence that ``drhs`` multiplies, see `sampling.sample`.

    Raises:
      ValueError: operands that cannot be multiplied, or invalid options.
    """

    name: str
    fwd: Pair = None
    dlhs: Pair = None
    drhs: Pair = None
    residuals: Residuals = "full"
    history: Count = 1024
    margin: Margin = 0.0
    cold_start: bool = True
    smooth: str = "none"
    hadamard: bool = False
    fwd_hadamard: bool = False
    trust_mask: bool = False
    keep: PositiveFraction = 1.0

    def __post_init__(self):
        schema.check(self)
        where = f"recipe={self.name!r}"
        for gemm, pair in self.gemms.items():
            kinds = {formats.get(operand.format).kind for operand in pair}
            blocks = {operand.block_size if operand.in_blocks else None for operand in pair}
            if len(kinds) > 1 or len(blocks) > 1:
                raise ValueError(
                    f"{where}: the operands of {gemm}, {_described(pair[0])} and {_described(pair[1])}, "
                    "must both be int, float or simulated, and both in blocks or neither; change "
                    "options.format, options.grad_format or options.granularity"
                )
            # Their product is made before it is scaled, and sums of 2^24 terms have to fit float32.
            largest = math.prod(o.max_code for o in pair)
            if largest > 2.0**104:
                raise ValueError(
                    f"{where}: products of {_described(pair[0])} and {_described(pair[1])} overflow float32"
                    f" in {gemm}; use options.granularity='unscaled' or 'block', or fewer exponent bits in "
                    "options.format and options.grad_format"
                )
            if pair[1 if gemm == "drhs" else 0].granularity == "tile":
                raise ValueError(
                    f"{where}: granularity='tile' is for kernels; use options.kernel_granularity='tile'"
                )
        for operand in self.drhs or ():
            if operand.in_blocks and formats.get(operand.format).odd:
                raise ValueError(
                    f"{where}: blocks in drhs are filled up with zeros, which {operand.format} does not "
                    "have; use options.granularity='tensor' or 'row'"
                )
        of_fwd = {(formats.get(operand.format).kind, operand.in_blocks) for operand in self.fwd or ()}
        if self.trust_mask and of_fwd - {("int", False)}:
            raise ValueError(f"{where}: trust_mask=True needs integer formats without blocks; use False")
        if self.residuals == "quantized" and self.fwd is None:
            raise ValueError(f"{where}: residuals='quantized' needs a quantized fwd; use 'full'")
        if self.keep < 1 and (self.drhs is not None or self.residuals == "quantized"):
            raise ValueError(
                f"{where}: keep={self.keep} needs a gradient of the kernel in the model's dtype; use 1, or "
                "a recipe such as wta_crs or int8_switchback with residuals='full'"
            )

    @property
    def gemms(self) -> dict[str, tuple[Operand, Operand]]:
        """The operands of each matmul that is quantized."""
        return {gemm: pair for gemm in GEMMS if (pair := getattr(self, gemm))}

    @property
    def is_plain(self) -> bool:
        """Whether the recipe changes nothing, so that a layer keeps its own ``dot_general``."""
        return not self.gemms and self.keep == 1

    @property
    def operands(self) -> dict[str, tuple[Operand, ...]]:
        """What each of the three tensors of a layer is quantized to, in the order of the matmuls."""
        uses: dict[str, tuple[Operand, ...]] = {"input": (), "kernel": (), "output_grad": ()}
        for gemm, pair in self.gemms.items():
            for tensor, operand in zip(GEMMS[gemm], pair, strict=True):
                uses[tensor] += (operand,)
        return uses

    def with_operands(self, change: Callable[[str, Operand], Operand], **fields: Any) -> "Recipe":
        """The recipe with ``change(tensor, operand)`` for each operand, and with other values of fields."""
        gemms = {
            gemm: tuple(change(tensor, operand) for tensor, operand in zip(GEMMS[gemm], pair, strict=True))
            for gemm, pair in self.gemms.items()
        }
        return dataclasses.replace(self, **gemms, **fields)

    @property
    def mantissa_bits(self) -> int:
        """Mantissa bits of the coarsest format; 23, those of float32, if nothing is quantized."""
        operands = itertools.chain(*self.gemms.values())
        return min((formats.get(operand.format).mantissa_bits for operand in operands), default=23)

    @property
    def delayed(self) -> tuple[str, ...]:
        """The tensors of a layer that have an amax history."""
        return tuple(name for name, uses in self.operands.items() if any(o.delayed for o in uses))

    @property
    def block_size(self) -> int:
        """The largest number of neighbours that share a scale, 0 if no operand is in blocks."""
        return max((o.block_size for pair in self.gemms.values() for o in pair if o.in_blocks), default=0)


# FP8 scales are powers of two: in a floating-point format that costs at most one bit of range and no
# precision, and applying them is exact.
_E4M3 = Operand("float8_e4m3fn", power_of_two=True)
_E5M2 = Operand("float8_e5m2", power_of_two=True)
_E4M3_DELAYED = dataclasses.replace(_E4M3, delayed=True)
_E5M2_DELAYED = dataclasses.replace(_E5M2, delayed=True)
_E4M3_ROW = dataclasses.replace(_E4M3, granularity="row")
_E5M2_ROW = dataclasses.replace(_E5M2, granularity="row")
_INT8 = Operand("int8")
_INT8_ROW = Operand("int8", "row")
_MX = Operand("float8_e4m3fn", "block")
_E4M3_SIMULATED = Operand("e4m3")
_E4M3_240 = Operand("e4m3", power_of_two=True, delayed=True)
_E5M2_BACKWARD = Operand("e5m2", power_of_two=True, delayed=True)
_E5M2_GRAD = dataclasses.replace(_E5M2_BACKWARD, rounding="stochastic")
_E4M3_BLOCKS = Operand("float8_e4m3fn", "block", block_size=128, block_scales="float32")
_E4M3_TILES = dataclasses.replace(_E4M3_BLOCKS, granularity="tile")
_FP4 = Operand("float4_e2m1fn", "block", block_size=16, block_scales="e4m3")
_FP4_GRAD = dataclasses.replace(_FP4, rounding="stochastic")
_FP4_KERNEL = dataclasses.replace(_FP4, granularity="tile")
_MIDRISE4 = Operand("midrise4", "row", clipping="gaussian")


def _same(name: str, operand: Operand) -> Recipe:
    return Recipe(name, (operand, operand), (operand, operand), (operand, operand))


_ALL = (
    Recipe("bf16"),  # every matmul in the model's own dtype
    # The formats of Micikevicius et al. 2022 (arXiv:2209.05433); scales from the history, as in
    # Transformer Engine.
    Recipe(
        "fp8_delayed",
        fwd=(_E4M3_DELAYED, _E4M3_DELAYED),
        dlhs=(_E5M2_DELAYED, _E4M3_DELAYED),
        drhs=(_E4M3_DELAYED, _E5M2_DELAYED),
        residuals="quantized",
    ),
    # Fishman et al. 2024 (arXiv:2409.12517) on Gaudi 2: E4M3 up to 240, and E5M2 × E5M2; simulated.
    Recipe(
        "fp8_gaudi",
        fwd=(_E4M3_240, _E4M3_240),
        dlhs=(_E5M2_GRAD, _E5M2_BACKWARD),
        drhs=(_E5M2_BACKWARD, _E5M2_GRAD),
    ),
    Recipe(
        "fp8_current",
        fwd=(_E4M3, _E4M3),
        dlhs=(_E5M2, _E4M3),
        drhs=(_E4M3, _E5M2),
        residuals="quantized",
    ),
    # torchao's two row-wise recipes: E4M3 throughout.
    _same("fp8_rowwise", _E4M3_ROW),
    Recipe("fp8_rowwise_with_gw_hp", fwd=(_E4M3_ROW, _E4M3_ROW), dlhs=(_E4M3_ROW, _E4M3)),
    # Wortsman et al. 2023 (arXiv:2304.13013): drhs sums over all tokens of a batch, too many terms for the
    # noise of 8 bits, and stays in 16. The paper simulates FP8 with its own tables of values.
    Recipe("fp8_switchback", fwd=(_E4M3_ROW, _E4M3), dlhs=(_E5M2_ROW, _E4M3)),
    Recipe("int8_switchback", fwd=(_INT8_ROW, _INT8), dlhs=(_INT8_ROW, _INT8)),
    # Memory-efficient: int8 residuals, drhs from the dequantized input.
    Recipe("int8_switchback_m", fwd=(_INT8_ROW, _INT8), dlhs=(_INT8_ROW, _INT8), residuals="quantized"),
    # Vector-wise: the kernel too has a scale per row.
    Recipe("int8_switchback_q", fwd=(_INT8_ROW, _INT8_ROW), dlhs=(_INT8_ROW, _INT8_ROW)),
    _same("int8_all", _INT8_ROW),  # the paper's baseline (LLM.int8() without outliers)
    _same("mxfp8", _MX),  # Mishra et al. 2025 (arXiv:2506.08027)
    # DeepSeek-V3 (arXiv:2412.19437): activations and gradients in 1 × 128, kernels in 128 × 128.
    Recipe(
        "fp8_blocks",
        fwd=(_E4M3_BLOCKS, _E4M3_TILES),
        dlhs=(_E4M3_BLOCKS, _E4M3_TILES),
        drhs=(_E4M3_BLOCKS, _E4M3_BLOCKS),
    ),
    # NVIDIA's recipe (arXiv:2509.25149), whose last blocks stay in high precision: `last_blocks`.
    Recipe(
        "nvfp4",
        fwd=(_FP4, _FP4_KERNEL),
        dlhs=(_FP4_GRAD, _FP4_KERNEL),
        drhs=(_FP4, _FP4_GRAD),
        hadamard=True,
    ),
    # Panferov et al. 2025 (arXiv:2502.05003), W4A4: dlhs and drhs take what fwd quantized, in 16 bits.
    Recipe("quest", fwd=(_MIDRISE4, _MIDRISE4), residuals="quantized", fwd_hadamard=True, trust_mask=True),
    # Liu et al. 2023 (arXiv:2305.15265): drhs sums over a sample of the tokens.
    Recipe("wta_crs", keep=0.3),
    _same("simulate", _E4M3_SIMULATED),
)
RECIPES = {recipe.name: recipe for recipe in _ALL}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Changes to a recipe; None keeps the recipe's own value.

    Attributes:
      residuals, history, margin, cold_start, hadamard, fwd_hadamard, trust_mask, keep: fields of `Recipe`.
      format: format of all operands, except output gradients if ``grad_format`` is set.
      grad_format: format of output gradients.
      granularity, power_of_two, clipping, rounding, block_size, block_scales: fields of `Operand`, for all
        operands.
      kernel_granularity: granularity of kernels.
      grad_rounding: rounding of output gradients.

    Raises:
      ValueError: a value that no operand accepts.
    """

    residuals: Residuals | None = None
    history: Count | None = None
    margin: Margin | None = None
    cold_start: bool | None = None
    format: FormatName | None = None
    grad_format: FormatName | None = None
    granularity: Granularity | None = None
    power_of_two: bool | None = None
    clipping: Clipping | None = None
    rounding: Rounding | None = None
    block_size: Count | None = None
    block_scales: BlockScales | None = None
    kernel_granularity: Granularity | None = None
    grad_rounding: Rounding | None = None
    hadamard: bool | None = None
    fwd_hadamard: bool | None = None
    trust_mask: bool | None = None
    keep: PositiveFraction | None = None

    def __post_init__(self):
        schema.check(self)

    def of_operand(self, tensor: str) -> dict[str, Any]:
        """The options that replace fields of the `Operand` of a tensor."""
        fields = self._given(*_names_shared_with(Operand))
        if tensor == "kernel":
            fields |= self._given(granularity="kernel_granularity")
        if tensor == "output_grad":
            fields |= self._given(format="grad_format", rounding="grad_rounding")
        return fields

    @property
    def of_recipe(self) -> dict[str, Any]:
        """The options that replace fields of `Recipe`."""
        return self._given(*_names_shared_with(Recipe))

    def _given(self, *names: str, **renamed: str) -> dict[str, Any]:
        """The options that are set, by field: of the same name, or as ``renamed`` says (field=option)."""
        options = {name: name for name in names} | renamed
        values = {name: getattr(self, option) for name, option in options.items()}
        return {name: value for name, value in values.items() if value is not None}


def _names_shared_with(other: type) -> list[str]:
    of_other = {field.name for field in dataclasses.fields(other)}
    return [field.name for field in dataclasses.fields(RecipeOptions) if field.name in of_other]


def make_recipe(name: str, **options: Any) -> Recipe:
    """Returns a recipe of `RECIPES` with some of its fields and operands changed.

    Args:
      options: those of `RecipeOptions`, such as ``history=16``.

    Raises:
      ValueError: an unknown recipe, or options that do not fit it.
    """
    schema.check_value("recipe", name, Annotated[str, OneOf(RECIPES)])
    changes = RecipeOptions(**options)

    def changed(tensor: str, operand: Operand) -> Operand:
        return dataclasses.replace(operand, **changes.of_operand(tensor))

    return RECIPES[name].with_operands(changed, **changes.of_recipe)
