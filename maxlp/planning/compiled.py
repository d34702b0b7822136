"""The memory and the collectives of a train step, from the compiler.

The step is the one that `maxlp.train` compiles, from the same functions, for devices that are not
available. The compiler is the real one (libtpu's, or XLA's for CUDA). Without a device it cannot measure:
XLA's GPU autotuning is off, so that its choice of matmul kernels may differ on a real machine.
"""

import collections
import dataclasses
import importlib.metadata
import re
import time
from pathlib import Path
from typing import Any

import jax

from maxlp.core.train_step import jit_step
from maxlp.planning import hlo
from maxlp.planning.topologies import compiler_of
from maxlp.run.experiment import Experiment
from maxlp.runtime.hardware import host_peak


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      arguments: the state and the batch, which exist before and after the step.
      outputs: results that do not reuse the memory of an argument (metrics).
      temporaries: what the step needs in addition, as one block with the gaps between its arrays.
      code: the program itself (TPU).
      live: the largest sum in use at one moment, where the compiler reports it; less than what it
        reserves.
      host: arguments and temporaries in the host's memory.
      preallocates: whether a launch allocates the whole block of temporaries, as on GPUs.
    """

    arguments: float
    outputs: float
    temporaries: float
    code: float = 0.0
    live: float = 0.0
    host: float = 0.0
    preallocates: bool = False

    @property
    def peak(self) -> float:
        """Bytes in use at the worst moment, program included."""
        return self.live + self.code if self.live else self.reserved

    @property
    def reserved(self) -> float:
        """The peak and the gaps in the block of temporaries."""
        return self.arguments + self.outputs + self.temporaries + self.code

    @property
    def needs(self) -> float:
        """Bytes that must be free for the step to run."""
        return self.reserved if self.preallocates else self.peak


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A train step for a topology.

    Attributes:
      memory: None if the compiler refused a program that does not fit, and reported only its peak.
      peak: bytes on one device at the worst moment.
      kernels: number of custom kernels in the program, by name.
      seconds: of lowering and compilation.
      host_memory: the largest resident size of this process so far, in bytes.
    """

    memory: Memory | None
    peak: float
    collectives: list[hlo.Collective]
    kernels: dict[str, int]
    seconds: float
    host_memory: float

    @property
    def needs(self) -> float:
        """Bytes that must be free on one device, see `Memory.needs`."""
        return self.peak if self.memory is None else self.memory.needs

    def fits(self, memory: float) -> bool:
        """Whether it runs in this many bytes; the compiler for GPUs does not refuse what is too large."""
        return self.memory is not None and self.needs <= memory


def compile_step(run: Experiment, hlo_file: str | None = None) -> Compiled:
    """Compiles the train step of an experiment for its devices, real or not.

    Args:
      hlo_file: where to write the compiled program as text.
    """
    platform = run.machine.platform
    with jax.set_mesh(run.mesh):
        graphdef, abstract = run.abstract_state()
        function = jit_step(run.step, graphdef, abstract, run.mesh)
        start = time.perf_counter()
        traced = function.trace(abstract, run.abstract_batch())
        lowered = traced.lower(lowering_platforms=("cuda" if platform == "gpu" else platform,))
        try:
            done = _compile(lowered)
        except jax.errors.JaxRuntimeError as error:
            return Compiled(None, _needed(error), [], {}, time.perf_counter() - start, host_peak())
    seconds = time.perf_counter() - start
    text = done.as_text()
    assert text is not None
    if hlo_file:
        Path(hlo_file).write_text(text, encoding="utf-8")
    memory = read_memory(done, platform)
    found = hlo.collectives(text, dict(run.mesh.shape))
    return Compiled(memory, memory.peak, found, kernels(text), seconds, host_peak())


def _compile(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles the step, without Triton matmuls where they fail.

    Without autotuning, XLA for GPUs finds no tile sizes for some matmuls that it assigns to Triton (heads
    of 50 positions); those programs are compiled with cuBLAS alone.
    """
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "find output tile sizes" not in str(error):
            raise
        return lowered.compile({"xla_gpu_enable_triton_gemm": False})


def read_memory(done: jax.stages.Compiled, platform: str) -> Memory:
    """The memory of a compiled program, as its compiler reports it."""
    m: Any = done.memory_analysis()
    on_host = m.host_argument_size_in_bytes
    # Meaningless on CPUs. Other compilers count arguments in the host's memory, but no temporaries there.
    live = 0 if platform == "cpu" else getattr(m, "peak_memory_in_bytes", on_host) - on_host
    return Memory(
        arguments=m.argument_size_in_bytes,
        outputs=max(0, m.output_size_in_bytes - m.alias_size_in_bytes),
        temporaries=m.temp_size_in_bytes,
        code=m.generated_code_size_in_bytes,
        live=live,
        host=on_host + m.host_temp_size_in_bytes,
        preallocates=platform in ("cuda", "gpu"),
    )


def versions(platform: str) -> str:
    """Versions of JAX and of the compiler, on which all results depend."""
    package = compiler_of(platform)
    return f"jax {jax.__version__}, {package} {importlib.metadata.version(package)}"


def _needed(error: jax.errors.JaxRuntimeError) -> float:
    """The bytes that a program would need, from the TPU compiler's refusal; re-raises other errors."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    text = str(error)
    match = re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", text) or re.search(
        r"\(([\d.]+)([KMGT]?)\) exceeds available HBM", text
    )
    if match is None:
        raise error
    return float(match[1]) * units[match[2]]


def kernels(text: str) -> dict[str, int]:
    """Custom calls by target, without those that are internal to XLA."""
    targets = re.findall(r'custom_call_target="([^"]+)"', text)
    return dict(collections.Counter(filter(hlo.is_kernel, targets)))
