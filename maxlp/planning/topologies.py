"""The machines that a plan can be made for, by name, with their published memory and speeds.

A topology is ``CHIP:SHAPE`` or ``CHIP:SHAPE*SLICES``. The shape of a TPU topology is its torus in chips
(``v5p:8x16x16``, ``v5e:16x16*2``); that of a GPU topology is hosts × GPUs per host (``h100:64x8``). A chip
is one JAX device, except that a TPU7x chip is two.

Sources: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; NVIDIA's data sheets of A100, H100 SXM, H200
SXM, HGX B200 and L4; the DGX A100, H100, H200 and B200 user guides for the network (one adapter per GPU);
NVIDIA's architecture papers of Ada and of RTX Blackwell for the cards without NVLink. Peak FLOP/s are in
`hardware.PEAK_TFLOPS`. TPU memory is the limit that the compiler enforces.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import re

import jax
import numpy as np
from jax.experimental import topologies

from maxlp.run.settings import Machine, Settings
from maxlp.runtime import hardware

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device and its share of the links.

    Attributes:
      kind: as in `jax.Device.device_kind`.
      platform: "tpu" or "cuda".
      memory: bytes that a program may use.
      hbm: bandwidth of that memory in bytes/s.
      links: bytes/s that a device sends to its neighbours (ICI, all links together; NVLink).
      network: bytes/s that a device sends to other slices (TPU) or hosts (GPU).
      host: bytes/s between the device and the memory of its host (PCIe); 0 if it is not published.
      torus: number of dimensions of the ICI torus; 0 for GPUs.
      per_chip: JAX devices per chip.
      wraps: a torus dimension closes to a ring if it is a multiple of this.
      pod: number of chips in the largest slice (TPU).
    """

    kind: str
    platform: str
    memory: float
    hbm: float
    links: float
    network: float
    host: float = 0.0
    torus: int = 0
    per_chip: int = 1
    wraps: int = 0
    pod: int = 0

    def peak(self, dtype: str = "bfloat16") -> float:
        """Peak FLOP/s of dense matmuls in a dtype of `hardware.PEAK_TFLOPS`."""
        flops = hardware.published_flops(self.kind, dtype)
        assert flops is not None, f"hardware.PEAK_TFLOPS has no row for {self.kind}"
        return flops


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Device properties that the GPU compiler uses, from CUDA's device queries and programming guide.

    Attributes:
      cores: multiprocessors.
      cache: bytes of the L2 cache.
      capability: compute capability.
      memory: bytes.
      clock: GHz.
      threads, shared: of a multiprocessor: the most threads, and bytes of shared memory. A block can have
        all but 1 KiB of the latter.
    """

    cores: int
    cache: int
    capability: tuple[int, int]
    memory: int
    clock: float = 1.98
    threads: int = 2048
    shared: int = 233472


# Where the B200's are not published (threads, shared memory), the H100's are used.
GPUS = {
    "a100_40gb": Gpu(108, 41943040, (8, 0), 42298834944, clock=1.41, shared=167936),
    "a100": Gpu(108, 41943040, (8, 0), 84987740160, clock=1.41, shared=167936),
    "h100": Gpu(132, 52428800, (9, 0), 84929347584),
    "h200": Gpu(132, 62914560, (9, 0), 150754820096),
    "b200": Gpu(148, 132644864, (10, 0), 192265846784),
    # 24 GB; the driver reports 22.0 GiB of the L4, whose memory has error correction
    "l4": Gpu(58, 50331648, (8, 9), int(22.0 * GIB), clock=2.04, threads=1536, shared=102400),
    "rtx4090": Gpu(128, 75497472, (8, 9), int(23.64 * GIB), clock=2.52, threads=1536, shared=102400),
    # 32 GB
    "rtx5090": Gpu(170, 100663296, (12, 0), int(31.36 * GIB), clock=2.41, threads=1536, shared=102400),
    # 48 GB, with error correction
    "rtx6000ada": Gpu(142, 100663296, (8, 9), int(44.4 * GIB), clock=2.505, threads=1536, shared=102400),
}


def _usable(name: str) -> float:
    """Bytes that a program gets: 95 % of what the driver reports (XLA_CLIENT_MEM_FRACTION=0.95).

    The CUDA context and NCCL's buffers take the rest.
    """
    return 0.95 * GPUS[name].memory


# The documentation's bidirectional figures of ICI, NVLink and PCIe are halved; TPU7x's figures are for half
# a chip. TPU v4's network is not documented, so v5p's is used. PCIe is 4.0 x16, or 5.0 x16 from H100 on and
# for the RTX 5090. Cards without NVLink send to each other through it; their hosts' network is that of the
# largest L4 machine of Google Cloud (g2-standard-96: 100 Gb/s for 8 GPUs).
PCIE_4, PCIE_5, SHARED_100_GBIT = 32e9, 64e9, 12.5e9 / 8
CHIPS: dict[str, Chip] = {
    "v4": Chip("TPU v4", "tpu", 30.75 * GIB, 1.228e12, 300e9, 6.25e9, torus=3, wraps=4, pod=4096),
    "v5e": Chip("TPU v5 lite", "tpu", 15.75 * GIB, 0.819e12, 200e9, 3.125e9, torus=2, wraps=16, pod=256),
    "v5p": Chip("TPU v5", "tpu", 95.73 * GIB, 2.765e12, 600e9, 6.25e9, torus=3, wraps=4, pod=6144),
    "v6e": Chip("TPU v6 lite", "tpu", 31.24 * GIB, 1.638e12, 400e9, 12.5e9, torus=2, wraps=16, pod=256),
    "v7x": Chip(
        "TPU7x", "tpu", 94.74 * GIB, 3.690e12, 300e9, 6.25e9, torus=3, per_chip=2, wraps=4, pod=9216
    ),
    "a100_40gb": Chip("NVIDIA A100-SXM4-40GB", "cuda", _usable("a100_40gb"), 1.555e12, 300e9, 25e9, PCIE_4),
    "a100": Chip("NVIDIA A100-SXM4-80GB", "cuda", _usable("a100"), 2.039e12, 300e9, 25e9, PCIE_4),
    "h100": Chip("NVIDIA H100 80GB HBM3", "cuda", _usable("h100"), 3.352e12, 450e9, 50e9, PCIE_5),
    "h200": Chip("NVIDIA H200", "cuda", _usable("h200"), 4.8e12, 450e9, 50e9, PCIE_5),
    "b200": Chip("NVIDIA B200", "cuda", _usable("b200"), 8.0e12, 900e9, 50e9, PCIE_5),
    "l4": Chip("NVIDIA L4", "cuda", _usable("l4"), 0.300e12, PCIE_4, SHARED_100_GBIT, PCIE_4),
    "rtx4090": Chip(
        "NVIDIA GeForce RTX 4090", "cuda", _usable("rtx4090"), 1.008e12, PCIE_4, SHARED_100_GBIT, PCIE_4
    ),
    "rtx5090": Chip(
        "NVIDIA GeForce RTX 5090", "cuda", _usable("rtx5090"), 1.792e12, PCIE_5, SHARED_100_GBIT, PCIE_5
    ),
    "rtx6000ada": Chip(
        "NVIDIA RTX 6000 Ada Generation",
        "cuda",
        _usable("rtx6000ada"),
        0.960e12,
        PCIE_4,
        SHARED_100_GBIT,
        PCIE_4,
    ),
}
ALIASES = {"tpu7x": "v7x", "v5": "v5p"}
EXAMPLES = {
    "v4": "2x2x4 … 12x16x16",
    "v5e": "1x1 … 16x16",
    "v5p": "2x2x1 … 16x16x24",
    "v6e": "1x1 … 16x16",
    "v7x": "2x2x1 … 16x16x24",
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A number of chips and how they are connected.

    Attributes:
      shape: chips along each torus dimension, or (hosts, GPUs per host).
      slices: number of such tori or sets of hosts, which only the slow network connects.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def size(self) -> int:
        """The number of JAX devices."""
        return math.prod(self.shape) * self.chip.per_chip * self.slices

    def machine(self, s: Settings) -> Machine:
        """The mesh of these settings on this topology.

        Raises:
          ConfigError: sizes that the topology does not have.
        """
        return s.machine(self.size, self.chip.platform, self.dcn_sizes, self.chip.kind)

    @property
    def dcn_sizes(self) -> tuple[int, ...]:
        """The sizes that ``mesh.dcn_data`` can have, as in `sharding.dcn_sizes`."""
        return (self.slices,) if self.chip.torus else (1, self.slices * self.shape[0])

    @property
    def chip_name(self) -> str:
        """The key of the chip in `CHIPS`."""
        return next(name for name, chip in CHIPS.items() if chip is self.chip)


MAX_DEVICES = 2**20  # more than any cluster has; the search tries every divisor of the number


def parse(name: str) -> Topology:
    """A topology from its name; this needs no compiler.

    Raises:
      ValueError: an invalid name.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)(?:\*(\d+))?", name)
    known = f"one of {', '.join(CHIPS)}"
    if match is None:
        raise ValueError(
            f"topology {name!r} is not CHIP:SHAPE, such as v5p:4x4x8, v5e:16x16*2 or h100:8x8; CHIP is "
            f"{known}"
        )
    chip_name = ALIASES.get(match[1], match[1])
    if chip_name not in CHIPS:
        raise ValueError(f"topology {name!r}: chip {match[1]!r} is unknown; {known}")
    chip = CHIPS[chip_name]
    shape, slices = tuple(int(n) for n in match[2].split("x")), int(match[3] or 1)
    if len(shape) != (chip.torus or 2) or not all(shape) or not slices:
        form = f"{chip.torus} torus dimensions" if chip.torus else "HOSTSxGPUS"
        example = f"{chip_name}:{'x'.join('4' * (chip.torus or 2))}"
        raise ValueError(
            f"topology {name!r}: the shape of {chip_name} must be {form}, all at least 1, as in {example}"
        )
    if chip.pod and math.prod(shape) > chip.pod:
        raise ValueError(
            f"topology {name!r}: a slice of {chip_name} has at most {chip.pod} chips; use SHAPE*SLICES"
        )
    if (count := math.prod(shape) * slices) > MAX_DEVICES:
        raise ValueError(f"topology {name!r} has {count:,} devices; give at most {MAX_DEVICES:,}")
    return Topology(name, chip, shape, slices)


def devices(topology: Topology) -> list[jax.Device]:
    """Devices to compile for, which need not exist and on which nothing can run.

    Raises:
      ValueError: the compiler is not installed, or does not support this shape.
    """
    compile_without_devices()
    package = compiler_of(topology.chip.platform)
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        raise ValueError(
            f"compiling for {topology.name} needs {package}, which is not installed: pip install "
            "'maxlp[aot]' (Linux), or add --estimate_only"
        )
    try:
        described = _tpu(topology) if topology.chip.torus else _gpu(topology)
        return list(described.devices)
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"topology {topology.name!r}: the compiler rejects it: {reason}") from error


def compiler_of(platform: str) -> str:
    """The package with the compiler for a platform, "tpu" or "cuda"."""
    return "libtpu" if platform == "tpu" else "jax-cuda13-plugin"


def compile_without_devices() -> None:
    """Hides the machine's own accelerators from this process, and stops libtpu from looking for a TPU."""
    jax.config.update("jax_platforms", "cpu")
    for key, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
    }.items():
        os.environ.setdefault(key, value)


def _tpu(topology: Topology) -> topologies.TopologyDescription:
    name = "tpu7x" if topology.chip_name == "v7x" else topology.chip_name
    options: dict = {}
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if topology.chip_name == "v4":
        options["chip_config_name"] = "megacore"  # a chip's two cores as one device
    if math.prod(topology.shape) < 4:
        options["chips_per_host_bounds"] = (*topology.shape, 1, 1)[:3]
    shape = "x".join(map(str, topology.shape))
    return topologies.get_topology_desc(f"{name}:{shape}", platform="tpu", **options)


def _gpu(topology: Topology) -> topologies.TopologyDescription:
    gpu = GPUS[topology.chip_name]
    major, minor = gpu.capability
    config = f"""
        gpu_device_info {{
          threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: {gpu.threads}
          shared_memory_per_block: 49152  shared_memory_per_core: {gpu.shared}
          shared_memory_per_block_optin: {gpu.shared - 1024}
          core_count: {gpu.cores}  fpus_per_core: 128  clock_rate_ghz: {gpu.clock}
          block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
          memory_bandwidth: {int(topology.chip.hbm)}  l2_cache_size: {gpu.cache}
          device_memory_size: {gpu.memory}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          registers_per_core_limit: 65536  registers_per_block_limit: 65536
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        runtime_version {{ major: 13 minor: 0 patch: 0 }}
        device_description_str: "{topology.chip.kind}"
    """
    hosts, gpus = topology.shape
    grid = f"{topology.slices}x{hosts}x{gpus}"
    return topologies.get_topology_desc("", platform="cuda", target_config=config, topology=grid)


def listing() -> str:
    """The text that ``--list_topologies`` prints."""
    lines = [
        f"{'chip':10} {'shapes':18}  memory  bf16 peak  bandwidth   links  network",
        f"{'':29}     GiB    TFLOP/s       GB/s    GB/s     GB/s",
    ]
    for name, chip in CHIPS.items():
        shapes = EXAMPLES.get(name, "HOSTSxGPUS")
        lines.append(
            f"{name:10} {shapes:18} {chip.memory / GIB:7.1f} {chip.peak() / 1e12:10.0f} "
            f"{chip.hbm / 1e9:10.0f} {chip.links / 1e9:7.0f} {chip.network / 1e9:8.1f}"
        )
    lines.append(
        "Several slices: SHAPE*SLICES, e.g. v5e:16x16*2. All figures are per JAX device and direction."
    )
    return "\n".join(lines)


# --- bandwidth of mesh axes -----------------------------------------------------------------------------


def axis_bandwidth(
    topology: Topology, mesh: dict[str, int], axes: tuple[str, ...], dcn: int = 1, kind: str = "all-gather"
) -> float:
    """Upper bound of the bytes/s that a device sends in a collective over some mesh axes.

    A mesh axis along a torus dimension uses links in both directions, or half of them if the dimension does
    not close to a ring. `mesh_utils` maps mesh axes to torus dimensions; here the last axis takes the
    fewest dimensions that hold it and the others share the rest, which is what `mesh_utils` does for common
    shapes. On GPUs, the members of a group that are on one host use all their network adapters together,
    since a ring leaves the host once for all of them; in a permute or an all-to-all each device sends for
    itself, in the latter only what is for other hosts.

    Args:
      mesh: axis sizes in the order of the mesh, slowest first; GPUs are in the mesh host by host.
      axes: the mesh axes over which the collective runs.
      dcn: number of slices or hosts that the ``data`` axis spans over the network.
      kind: of the collective, one of `hlo.KINDS`.
    """
    involved = [a for a in mesh if a in axes and mesh[a] > 1]
    if not involved:
        return math.inf
    if dcn > 1 and "data" in involved and topology.chip.torus:
        return topology.chip.network
    if topology.chip.torus:
        return topology.chip.links * _torus_share(topology, mesh, involved)
    n, on_host = _group_size(topology, tuple(mesh.items()), tuple(involved), dcn)
    if on_host == n:
        return topology.chip.links
    together = {"collective-permute": 1, "all-to-all": (n - 1) / (n - on_host)}.get(kind, on_host)
    return min(topology.chip.links, topology.chip.network * together)


@functools.lru_cache(maxsize=2**14)
def _group_size(
    topology: Topology, mesh: tuple[tuple[str, int], ...], involved: tuple[str, ...], dcn: int
) -> tuple[int, int]:
    """The GPUs of a group, and the fewest of one that are on the same host."""
    names, sizes = zip(*mesh, strict=True)
    hosts = np.arange(topology.size) // topology.shape[1]
    if dcn > 1:  # only ``data`` leaves a host, see `sharding.make_mesh`
        data = names.index("data")
        inside = (*sizes[:data], sizes[data] // dcn, *sizes[data + 1 :])
        hosts = np.moveaxis(hosts.reshape(dcn, *inside), 0, data)
    others = [i for i, name in enumerate(names) if name not in involved]
    groups = np.moveaxis(hosts.reshape(sizes), others, range(len(others)))
    groups = groups.reshape(math.prod(sizes[i] for i in others), -1)
    apart = groups + topology.size * np.arange(len(groups))[:, None]
    return groups.shape[1], int(np.unique(apart, return_counts=True)[1].min())


def _torus_share(topology: Topology, mesh: dict[str, int], involved: list[str]) -> float:
    """The fraction of a chip's links that these mesh axes use."""
    dims = sorted((d for d in topology.shape if d > 1), reverse=True)
    if not dims:
        return 1.0
    rings = {d: 1.0 if d % topology.chip.wraps == 0 else 0.5 for d in dims}
    whole = [a for a in mesh if mesh[a] > 1]
    if involved == whole:
        return sum(rings[d] for d in dims) / topology.chip.torus
    # The fastest axis takes the fewest dimensions that hold it; a part of a dimension is not a ring.
    inner, left = mesh[whole[-1]], list(dims)
    taken: list[float] = []
    while inner > 1 and left:
        d = next((d for d in reversed(left) if d >= inner), left[0])
        left.remove(d)
        taken.append(rings[d] if d <= inner else 0.5)
        inner = math.ceil(inner / d)
    rest = [rings[d] for d in left] or [0.5]
    share = sum(taken if involved == whole[-1:] else rest)
    return share / topology.chip.torus
