"""What a quantized matmul computes in, as data.

A linear layer is three matmuls (GEMMs): ``fwd`` makes the output from input and kernel, ``dlhs`` the
gradient of the input from output gradient and kernel, ``drhs`` the gradient of the kernel from input and
output gradient. A recipe names, for each, the formats of its two operands and what shares a scale.
"""

import dataclasses
from typing import Any

from maxlp.numerics import formats


@dataclasses.dataclass(frozen=True)
class Operand:
    """How one operand of a matmul is quantized.

    Attributes:
      format: see `formats.get`.
      granularity: what shares a scale, see `formats.quantize`.
      delayed: the scale comes from the history of earlier steps (`delayed`), not from the data itself.
      power_of_two: scales are powers of two.
      rounding: ``nearest`` or ``truncate``.
    """

    format: str
    granularity: str = "tensor"
    delayed: bool = False
    power_of_two: bool = False
    rounding: str = "nearest"

    def __post_init__(self):
        formats.get(self.format)
        for key, known in (("granularity", formats.GRANULARITIES), ("rounding", ("nearest", "truncate"))):
            if getattr(self, key) not in known:
                raise ValueError(f"precision {key}={getattr(self, key)!r}: one of {', '.join(known)}")
        if self.delayed and self.granularity != "tensor":
            raise ValueError(f"precision granularity={self.granularity!r}: delayed scales are per tensor")


Pair = tuple[Operand, Operand] | None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The three matmuls of a linear layer; None is a matmul in the layer's own dtype.

    Attributes:
      fwd: (input, kernel). dlhs: (output gradient, kernel). drhs: (input, output gradient).
      residuals: what waits for the backward pass: input and kernel in the layer's dtype (``full``), or as
        ``fwd`` quantized them (``quantized``: half the bytes). A kernel is always kept as quantized if
        ``dlhs`` takes it so.
      history: steps that a delayed scale looks back on; 1 is the most recent only.
      margin: a delayed scale leaves ``2^margin`` of head-room.
      cold_start: delayed scales are current ones until something was seen.
      smooth: see `smooth_swiglu`.
    """

    name: str
    fwd: Pair = None
    dlhs: Pair = None
    drhs: Pair = None
    residuals: str = "full"
    history: int = 1024
    margin: float = 0.0
    cold_start: bool = True
    smooth: str = "none"

    def __post_init__(self):
        where = f"precision recipe {self.name!r}"
        for gemm in ("fwd", "dlhs", "drhs"):
            kinds = {formats.get(operand.format).kind for operand in getattr(self, gemm) or ()}
            blocks = {operand.granularity == "block" for operand in getattr(self, gemm) or ()}
            if len(kinds) > 1 or len(blocks) > 1:
                raise ValueError(f"{where}: the operands of {gemm} must both be int, float or simulated, "
                                 "and both in blocks or neither")  # fmt: skip
        if self.residuals not in ("full", "quantized"):
            raise ValueError(f"{where}: residuals={self.residuals!r} must be 'full' or 'quantized'")
        if self.residuals == "quantized" and self.fwd is None:
            raise ValueError(f"{where}: residuals='quantized' needs a quantized fwd")
        if self.delayed and self.history < 1:
            raise ValueError(f"{where}: history={self.history}: delayed scaling needs 1 step or more")

    @property
    def operands(self) -> dict[str, tuple[Operand, ...]]:
        """What each of the three tensors of a layer is quantized to, in the order of the matmuls."""
        uses = {
            "input": (self.fwd and self.fwd[0], self.drhs and self.drhs[0]),
            "kernel": (self.fwd and self.fwd[1], self.dlhs and self.dlhs[1]),
            "output_grad": (self.dlhs and self.dlhs[0], self.drhs and self.drhs[1]),
        }
        return {name: tuple(operand for operand in pair if operand) for name, pair in uses.items()}

    @property
    def delayed(self) -> tuple[str, ...]:
        """Which of the three tensors of a layer have a history."""
        return tuple(name for name, uses in self.operands.items() if any(o.delayed for o in uses))

    @property
    def in_blocks(self) -> bool:
        gemms = (self.fwd, self.dlhs, self.drhs)
        return any(o.granularity == "block" for pair in gemms if pair for o in pair)


# FP8 scales are powers of two: of a floating format that costs at most one bit of range and no
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


def _same(name: str, operand: Operand, **options: Any) -> Recipe:
    return Recipe(name, (operand, operand), (operand, operand), (operand, operand), **options)


RECIPES = {
    "bf16": Recipe("bf16"),  # every matmul in the model's dtype, whatever that is
    # Micikevicius et al. 2022 (arXiv:2209.05433) formats; scales from the history, as Transformer Engine.
    "fp8_delayed": Recipe(
        "fp8_delayed",
        fwd=(_E4M3_DELAYED, _E4M3_DELAYED),
        dlhs=(_E5M2_DELAYED, _E4M3_DELAYED),
        drhs=(_E4M3_DELAYED, _E5M2_DELAYED),
        residuals="quantized",
    ),
    "fp8_current": Recipe(
        "fp8_current",
        fwd=(_E4M3, _E4M3),
        dlhs=(_E5M2, _E4M3),
        drhs=(_E4M3, _E5M2),
        residuals="quantized",
    ),
    # torchao's two row-wise recipes: E4M3 throughout.
    "fp8_rowwise": _same("fp8_rowwise", _E4M3_ROW),
    "fp8_rowwise_with_gw_hp": Recipe(
        "fp8_rowwise_with_gw_hp", fwd=(_E4M3_ROW, _E4M3_ROW), dlhs=(_E4M3_ROW, _E4M3)
    ),
    # Wortsman et al. 2023 (arXiv:2304.13013): the gradient of the kernel sums over all tokens of a batch,
    # too many for 8 bits, and stays in 16. In the paper FP8 is a simulation with its own value tables.
    "fp8_switchback": Recipe(
        "fp8_switchback",
        fwd=(_E4M3_ROW, _E4M3),
        dlhs=(_E5M2_ROW, _E4M3),
    ),
    "int8_switchback": Recipe("int8_switchback", fwd=(_INT8_ROW, _INT8), dlhs=(_INT8_ROW, _INT8)),
    "int8_switchback_m": Recipe(  # memory-efficient: int8 residuals, drhs from the dequantized input
        "int8_switchback_m", fwd=(_INT8_ROW, _INT8), dlhs=(_INT8_ROW, _INT8), residuals="quantized"
    ),
    "int8_switchback_q": Recipe(  # vector-wise: the kernel too has a scale per row
        "int8_switchback_q", fwd=(_INT8_ROW, _INT8_ROW), dlhs=(_INT8_ROW, _INT8_ROW)
    ),
    "int8_all": _same("int8_all", _INT8_ROW),  # the paper's baseline (LLM.int8() without outliers)
    "mxfp8": _same("mxfp8", _MX),  # Mishra et al. 2025 (arXiv:2506.08027)
    "simulate": _same("simulate", _E4M3_SIMULATED),
}


def make_recipe(name: str, **options: Any) -> Recipe:
    """A recipe of `RECIPES` with some of its data replaced.

    Args:
      options: fields of `Recipe` (``history=16``); fields of `Operand`, for all operands (``power_of_two``,
        ``granularity``, ``rounding``); ``format`` of inputs and kernels, ``grad_format`` of gradients.

    Raises:
      ValueError: unknown names, options or values, with what is possible.
    """
    if name not in RECIPES:
        raise ValueError(f"precision recipe {name!r} is unknown; one of {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    of_operands = ("format", "grad_format", "granularity", "power_of_two", "rounding")
    of_recipe = ("residuals", "history", "margin", "cold_start")
    for key in options:
        if key not in of_operands + of_recipe:
            known = ", ".join(of_recipe + of_operands)
            raise ValueError(f"precision recipe {name!r}: option {key!r} is unknown; options: {known}")
    changes = {key: value for key, value in options.items() if key in of_operands}
    grad_format = changes.pop("grad_format", changes.get("format"))
    gemms = {}
    for gemm, grad_at in (("fwd", None), ("dlhs", 0), ("drhs", 1)):
        pair = list(getattr(recipe, gemm) or ())
        for i, operand in enumerate(pair):
            new = dict(changes, format=grad_format) if i == grad_at and grad_format else changes
            pair[i] = dataclasses.replace(operand, **new)
        gemms[gemm] = tuple(pair) or None
    return dataclasses.replace(recipe, **gemms, **{k: v for k, v in options.items() if k in of_recipe})
