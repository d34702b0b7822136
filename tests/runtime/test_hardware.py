"""Peak FLOP/s and memory of devices."""

import types

import jax
import numpy as np
import pytest

from maxlp.runtime import hardware


@pytest.mark.parametrize(
    ("kind", "dtype", "tflops"),
    [
        ("TPU v4", "bfloat16", 275),
        ("TPU v5 lite", "bfloat16", 197),
        ("TPU v5", "int8", 918),
        ("TPU v5p", "bfloat16", 459),
        ("TPU v6 lite", "float8", 918),
        ("TPU7x", "float8", 2307),
        ("TPU7x", "bfloat16", 1153.5),  # of one of the two devices of a chip
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 80GB HBM3", "float8", 1979),
        ("NVIDIA GH200 480GB", "bfloat16", 989),
        ("NVIDIA GB200", "bfloat16", 2500),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA B200", "mxfp8", 4500),
        ("NVIDIA H200", "mxfp8", 989),  # which XLA dequantizes there
        ("NVIDIA GeForce RTX 5090", "nvfp4", 1676),
        ("NVIDIA A100-SXM4-80GB", "float32", 156),  # TF32
        ("TPU v4", "float32", 275),  # rounded to bfloat16
    ],
)
def test_device_kinds_find_their_published_peak(kind, dtype, tflops):
    assert hardware.published_flops(kind, dtype) == 1e12 * tflops


@pytest.mark.parametrize(
    "kind",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    ],
)
def test_a_slower_device_has_the_formats_but_not_the_peaks_of_the_one_it_is_named_after(kind):
    assert hardware.published_flops(kind) is None and hardware.published_peaks(kind)


def test_an_unknown_device_has_no_published_peak():
    assert hardware.published_flops("cpu") is None and hardware.published_peaks("cpu") == {}


def test_host_memory_is_that_of_this_process():
    before = hardware.memory_metrics()["memory/host_peak_gib"]
    block = np.ones(2**27, np.int8)  # 1/8 GiB, touched
    after = hardware.memory_metrics()["memory/host_peak_gib"]
    assert 0.01 < before <= after < 1000
    assert block.nbytes / 2**30 < after


def test_device_memory_is_that_of_the_fullest_device(monkeypatch):
    stats = [{"bytes_in_use": 2**30, "bytes_limit": 2**34}, {"bytes_in_use": 3 * 2**30}, None]
    devices = [types.SimpleNamespace(memory_stats=lambda s=s: s) for s in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    got = hardware.memory_metrics()
    del got["memory/host_peak_gib"]
    assert got == {"memory/device_gib_in_use": 3.0, "memory/device_gib_limit": 16.0}
