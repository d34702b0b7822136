"""Formats that the devices of a run lack: their matmuls are emulated and gain no speed."""

from maxlp.precision import blocks
from maxlp.run.settings import Settings
from maxlp.runtime import hardware


def warnings(s: Settings, device_kind: str) -> list[str]:
    """A line if the devices multiply some quantized values in a wider format; none where that is unknown.

    Args:
      device_kind: as in `jax.Device`. On one without published rates, such as a CPU, nothing gains speed.
    """
    peaks = hardware.published_peaks(device_kind)
    recipes = {s.recipe(path).name: s.recipe(path).gemms for path in s.matmuls}
    emulated = {
        name: [gemm for gemm, pair in gemms.items() if blocks.rate(pair) not in peaks.keys() - {"bfloat16"}]
        for name, gemms in recipes.items()
    }
    lacked = " and ".join(f"{name} ({', '.join(gemms)})" for name, gemms in emulated.items() if gemms)
    if not peaks or not lacked:
        return []
    return [
        f"{device_kind} does not multiply the formats of {lacked}: the quantized values are multiplied in "
        "16 or 32 bits, which is no faster than precision.recipe=bf16"
    ]
