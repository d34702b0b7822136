"""Warnings for formats that the devices do not multiply: their matmuls are emulated and no faster."""

from collections.abc import Collection

from maxlp.precision import blocks
from maxlp.run.settings import Settings
from maxlp.runtime import hardware


def warnings(s: Settings, device_kind: str) -> list[str]:
    """A line if the devices multiply some quantized values in a wider format; none where that is unknown.

    Args:
      device_kind: as in `jax.Device`. On one without published rates, such as a CPU, nothing gains speed.
    """
    peaks = hardware.published_peaks(device_kind)
    if not peaks:
        return []
    effect = "multiplied in 16 or 32 bits, which is no faster than precision.recipe=bf16"
    if lacked := _emulated(s, peaks, replicas_are_separate=False):
        return [
            f"{device_kind} does not multiply the formats of {lacked}: the quantized values are {effect}"
        ]
    if s.replicas_are_separate and (lacked := _emulated(s, peaks, replicas_are_separate=True)):
        return [f"with precision.exchange or train.local the blocks of {lacked} are {effect}"]
    return []


def _emulated(s: Settings, peaks: Collection[str], *, replicas_are_separate: bool) -> str:
    """The recipes with such matmuls, and which these are."""
    recipes = {s.recipe(path).name: s.recipe(path).gemms for path in s.matmuls}
    emulated = {
        name: [
            gemm
            for gemm, pair in gemms.items()
            if blocks.rate(pair, replicas_are_separate=replicas_are_separate) not in {*peaks} - {"bfloat16"}
        ]
        for name, gemms in recipes.items()
    }
    return " and ".join(f"{name} ({', '.join(gemms)})" for name, gemms in emulated.items() if gemms)
