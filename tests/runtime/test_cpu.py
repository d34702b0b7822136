"""What a run on CPUs sets before it starts."""

import os
import subprocess
import sys

import jax
import pytest

from maxlp.runtime import cpu


@pytest.fixture
def updates(monkeypatch):
    """The changes of JAX's config that are asked for."""
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.delenv("JAX_CPU_ENABLE_ASYNC_DISPATCH", raising=False)
    updates = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    return updates


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, "32"),
        ({"XLA_FLAGS": ""}, "64"),  # of JAX_NUM_CPU_DEVICES=8
        ({"NPROC": "5"}, "5"),
    ],
)
def test_simulated_devices_get_more_threads(updates, monkeypatch, environment, threads):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cpu.configure_client(alone=True)
    assert os.environ["NPROC"] == threads
    assert not updates, "their programs wait for each other, so each needs a thread"


def test_one_device_runs_programs_in_the_calling_thread_unless_it_waits_for_others(updates, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    cpu.configure_client(alone=False)
    assert not updates
    cpu.configure_client(alone=True)
    assert updates == {"jax_cpu_enable_async_dispatch": False}
    updates.clear()
    monkeypatch.setenv("JAX_CPU_ENABLE_ASYNC_DISPATCH", "1")  # the user's choice
    cpu.configure_client(alone=True)
    assert not updates
    assert "NPROC" not in os.environ


PAGE_FAULTS = """
import resource
import numpy as np
from maxlp.runtime import cpu

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2**23)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = [faults_of_a_step() for _ in range(2)][1]
cpu.keep_freed_memory()
print(usual, [faults_of_a_step() for _ in range(2)][1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_freed_memory_is_used_again_without_page_faults():
    done = subprocess.run([sys.executable, "-c", PAGE_FAULTS], capture_output=True, text=True, check=True)
    usual, kept = map(int, done.stdout.split())
    assert kept < usual / 10
