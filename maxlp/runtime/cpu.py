"""Settings that make a run on CPUs faster and change no bit of what it computes."""

import ctypes
import os
import re
import sys

import jax

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of mallopt(3)


def configure_client(alone: bool) -> None:
    """Fits XLA's CPU client, which must not exist yet, to the number of devices that are simulated.

    One device runs each program in the thread that calls it. Several need threads of their own, which wait
    for each other in collectives: eight each, unless NPROC is set. By default each has one. A device whose
    program has independent branches (CLIP's towers) waits in one collective per branch at the same time;
    once waiting collectives occupy all threads, the program hangs.

    Args:
      alone: whether this is the only process of the run.
    """
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = int(flag[1]) if flag else jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if devices > 1:
        os.environ.setdefault("NPROC", str(8 * devices))
    elif alone and "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def is_synchronous() -> bool:
    """Whether a call of a compiled program returns when it has finished, not when it is queued."""
    return jax.default_backend() == "cpu" and not jax.config.read("jax_cpu_enable_async_dispatch")


def keep_freed_memory() -> None:
    """Makes the allocator keep what the process frees, for the next step to use.

    XLA's CPU client frees its temporaries after each program. glibc returns blocks of this size to the
    kernel, which must then fill every page with zeros again: a quarter of the CPU time of a small run. The
    process holds on to the most memory it has ever had. Does nothing without glibc, or on accelerators.
    """
    in_place = sys.platform == "linux" and jax.default_backend() == "cpu"
    if in_place and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
