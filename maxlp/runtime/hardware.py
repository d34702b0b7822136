"""What the hardware can do and what a process uses of it: peak FLOP/s and memory."""

import re
import resource
import sys

import jax

# Published dense peaks of one JAX device in TFLOP/s, by a substring of `device_kind`; the first match
# counts, so more specific names come first. Sparsity is never counted.
# TPU: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. A TPU v4 or v5p device is a chip (two
# cores together); a TPU7x chip is two devices, so its 2307 and 4614 are halved here.
# GPU: the data sheets of A100, H100 (SXM, PCIe, NVL), H200, and of DGX and HGX B200 and GB200
# NVL72, L4, L40 and L40S, whose "with sparsity" figures are halved; NVIDIA's papers on the Ada and RTX
# Blackwell architectures for GeForce and RTX cards, at the rate with sums in float32. "mxfp8" and "nvfp4"
# are blocks of FP8 and FP4. A row has every format that the device multiplies.
PEAK_TFLOPS = {
    "TPU v4": {"bfloat16": 275, "int8": 275},
    "TPU v5 lite": {"bfloat16": 197, "int8": 394},
    "TPU v5e": {"bfloat16": 197, "int8": 394},
    "TPU v5": {"bfloat16": 459, "int8": 918},
    "TPU v6": {"bfloat16": 918, "int8": 1836},
    "TPU7x": {"bfloat16": 2307 / 2, "float8": 4614 / 2},
    "A100": {"bfloat16": 312, "int8": 624},
    "H100 PCIe": {"bfloat16": 756, "float8": 1513, "int8": 1513},
    "H100 NVL": {"bfloat16": 835, "float8": 1671, "int8": 1671},
    "H100": {"bfloat16": 989, "float8": 1979, "int8": 1979},
    "H200": {"bfloat16": 989, "float8": 1979, "int8": 1979},
    "GB200": {"bfloat16": 2500, "float8": 5000, "mxfp8": 5000, "nvfp4": 10000, "int8": 5000},
    "B200": {"bfloat16": 2250, "float8": 4500, "mxfp8": 4500, "nvfp4": 9000, "int8": 4500},
    "L40S": {"bfloat16": 362, "float8": 733, "int8": 733},
    "L40": {"bfloat16": 181, "float8": 362, "int8": 362},
    "L4": {"bfloat16": 121, "float8": 242.5, "int8": 242.5},
    "RTX 4090": {"bfloat16": 165.2, "float8": 330.3, "int8": 660.6},
    "RTX 5090": {"bfloat16": 209.5, "float8": 419, "mxfp8": 419, "nvfp4": 1676, "int8": 838},
    "RTX 6000 Ada": {"bfloat16": 364.2, "float8": 728.5, "int8": 728.5},
}
# Words that mark a slower variant of the device whose name is in its `device_kind` too.
SLOWER = re.compile(r"\b(Laptop|Max-Q|MIG|D)\b")


def published_peaks(device_kind: str) -> dict[str, float]:
    """The row of `PEAK_TFLOPS` for a kind of device, as JAX names it; empty for others, such as a CPU.

    A device with one of the words in `SLOWER` multiplies the same formats, at lower rates.
    """
    return next((peaks for kind, peaks in PEAK_TFLOPS.items() if kind in device_kind), {})


def published_flops(device_kind: str, dtype: str = "bfloat16") -> float | None:
    """Published peak matmul rate of a kind of device, in FLOP/s.

    Args:
      device_kind: the name that JAX reports.
      dtype: a name in `PEAK_TFLOPS`. Without hardware support for it the rate is that of
        bfloat16, in which such a device multiplies. "float32" is multiplied at JAX's default precision:
        in bfloat16 on TPUs and in TF32 on GPUs, at half the rate on all that the table has.

    Returns:
      The rate, or None if `PEAK_TFLOPS` does not have it, as that of a CPU.
    """
    peaks = {} if SLOWER.search(device_kind) else published_peaks(device_kind)
    if not peaks:
        return None
    tf32 = dtype == "float32" and "TPU" not in device_kind
    return 1e12 * (peaks["bfloat16"] / 2 if tf32 else peaks.get(dtype, peaks["bfloat16"]))


def host_peak() -> int:
    """The largest resident size of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # KiB, on macOS bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_metrics() -> dict[str, float]:
    """Memory use in GiB, as ``memory/`` metrics.

    The peak of this process on the host and, if the backend reports them, the values of the local
    device where each is largest.
    """
    metrics = {"memory/host_peak_gib": host_peak() / 2**30}
    stats = [s for device in jax.local_devices() if (s := device.memory_stats())]
    for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit"):
        if values := [s[name] for s in stats if name in s]:
            metrics[f"memory/device_{name.replace('bytes', 'gib')}"] = max(values) / 2**30
    return metrics
