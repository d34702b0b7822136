"""What the compiler says of a train step: the memory it will take and the collectives it will run.

The step is the one that `maxlp.train` compiles, from the same functions, for devices that are not here. The
compiler is the real one (libtpu's, or XLA's for CUDA); what it cannot do without a device is to measure:
XLA's GPU autotuning is off, so its choice of matmul kernels may differ on a real machine.
"""

import contextlib
import dataclasses
import importlib.metadata
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from ml_collections import ConfigDict

from maxlp.core import train_step as step
from maxlp.planning import hlo
from maxlp.run import build

PLATFORMS: dict[str, str] = {"gpu": "cuda"}  # what JAX lowers for, where it is not the platform's own name


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    arguments: the state and the batch, which are there before and after.
    outputs: results that take no argument's place (metrics).
    temporaries: what the step needs beside them, one block as large as its worst moment.
    code: the program itself (TPU).
    live: the largest sum that is in use at one moment, where the compiler tells: below what it reserves.
    host: temporaries in the host's memory.
    """

    arguments: float
    outputs: float
    temporaries: float
    code: float = 0.0
    live: float = 0.0
    host: float = 0.0

    @property
    def peak(self) -> float:
        """What is in use at the worst moment, and the program."""
        return (self.live or self.arguments + self.outputs + self.temporaries) + self.code


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A train step for a topology.

    memory: None if the compiler found that it does not fit, and said only how much it needs.
    peak: bytes on one device at the worst moment.
    kernels: custom kernels in the program by name, how many of each.
    host_memory: the largest resident size of this process so far, in bytes.
    """

    memory: Memory | None
    peak: float
    collectives: list[hlo.Collective]
    kernels: dict[str, int]
    seconds: float
    host_memory: float


def compile_step(c: ConfigDict, devices: Sequence[jax.Device], hlo_file: str | None = None) -> Compiled:
    """Compiles the config's train step for these devices, real or not.

    Args:
      hlo_file: where to write the compiled program as text.

    Raises:
      ValueError: a config that cannot work on them.
    """
    mesh = build.mesh(c, devices)
    build.check(c, mesh)
    platform = str(devices[0].platform)
    with jax.set_mesh(mesh), _cudnn_without_a_library(platform):
        graphdef, abstract = step.abstract_state(build.model(c), build.tx(c)[0], mesh, build.judges(c))
        function = build.train_step(c, graphdef, abstract, mesh)
        start = time.perf_counter()
        traced = function.trace(abstract, build.task(c).abstract_batch(c, mesh))
        lowered = traced.lower(lowering_platforms=(PLATFORMS.get(platform, platform),))
        try:
            done = _compile(lowered)
        except jax.errors.JaxRuntimeError as error:
            return Compiled(None, _needed(error), [], {}, time.perf_counter() - start, host_memory())
    seconds = time.perf_counter() - start
    text = done.as_text()
    assert text is not None
    if hlo_file:
        Path(hlo_file).write_text(text)
    memory = read_memory(done, platform)
    return Compiled(
        memory,
        memory.peak,
        hlo.collectives(text, dict(mesh.shape)),
        kernels(text),
        seconds,
        host_memory(),
    )


def _compile(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Without autotuning XLA for GPUs finds no tiles for some matmuls that it gave to Triton (heads of 50
    positions): those programs are compiled with cuBLAS alone."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "find output tile sizes" not in str(error):
            raise
        return lowered.compile({"xla_gpu_enable_triton_gemm": False})


def read_memory(done: jax.stages.Compiled, platform: str) -> Memory:
    m: Any = done.memory_analysis()
    return Memory(
        arguments=m.argument_size_in_bytes,
        outputs=max(0, m.output_size_in_bytes - m.alias_size_in_bytes),
        temporaries=m.temp_size_in_bytes,
        code=m.generated_code_size_in_bytes,
        live=0 if platform == "cpu" else getattr(m, "peak_memory_in_bytes", 0),  # a CPU's means nothing
        host=m.host_temp_size_in_bytes,
    )


def versions(platform: str) -> str:
    """Of JAX and of the compiler, which decides everything here."""
    package = "libtpu" if platform == "tpu" else "jax-cuda13-plugin"
    return f"jax {jax.__version__}, {package} {importlib.metadata.version(package)}"


def _needed(error: jax.errors.JaxRuntimeError) -> float:
    """The bytes that a program would need, from the TPU compiler's refusal; other errors go on."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    text = str(error)
    match = re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", text) or re.search(
        r"\(([\d.]+)([KMGT]?)\) exceeds available HBM", text
    )
    if match is None:
        raise error
    return float(match[1]) * units[match[2]]


def kernels(text: str) -> dict[str, int]:
    """Custom calls by target, those with which XLA talks to itself left out."""
    own = {"AllocateBuffer", "AsyncCollectiveStart", "AsyncCollectiveDone", "ConcatBitcast", "Sharding"}
    counts: dict[str, int] = {}
    for target in re.findall(r'custom_call_target="([^"]+)"', text):
        if target not in own and not target.startswith("Assume"):
            counts[target] = counts.get(target, 0) + 1
    return counts


def host_memory() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextlib.contextmanager
def _cudnn_without_a_library(platform: str) -> Iterator[None]:
    """Lets cuDNN attention be compiled: JAX would ask the library, which is not here, for its version."""
    if platform not in ("gpu", "cuda"):
        yield
        return
    from jax._src.cudnn import fused_attention_stablehlo as fused

    with mock.patch.object(fused, "check_cudnn_version", lambda: 92800):
        yield
