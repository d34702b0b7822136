"""Peak FLOP/s and memory of devices."""

import itertools
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
    ],
)
def test_device_kinds_find_their_published_peak(kind, dtype, tflops):
    assert hardware.published_flops(kind, dtype) == 1e12 * tflops
    device = types.SimpleNamespace(device_kind=kind, platform="gpu")
    assert hardware.peak_flops(device, dtype) == (1e12 * tflops, False)


def test_an_unknown_device_has_no_published_peak():
    assert hardware.published_flops("cpu") is None


def test_cpu_peak_is_measured_once_and_shared_by_simulated_devices(monkeypatch):
    peak = hardware.peak_flops()
    assert peak.measured
    assert 1e9 < peak.flops * jax.local_device_count() < 1e14
    assert hardware.peak_flops() == peak
    hardware._measured_flops.cache_clear()
    monkeypatch.setattr(jax, "local_device_count", lambda backend: 10**6)
    assert hardware.peak_flops().flops < peak.flops / 100
    hardware._measured_flops.cache_clear()


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


def test_the_measured_rate_counts_a_product_and_a_sum_for_each_term(monkeypatch):
    """Each of the matmuls takes 0.1 s."""
    ticks = itertools.count(0, 0.1)
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(jax, "local_device_count", lambda backend: 2)
    got = hardware._measured_flops.__wrapped__(jax.devices()[0])
    assert got == pytest.approx(2 * 1024**3 / 0.1 / 2)
