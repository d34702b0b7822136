"""How long a step takes at least: FLOPs, bytes and collectives over the published speeds of the chip."""

import collections
import dataclasses

from maxlp.families.llama.cost import Work
from maxlp.planning.hlo import Collective
from maxlp.planning.topologies import Topology, axis_bandwidth


@dataclasses.dataclass(frozen=True)
class Row:
    """All collectives of one kind over the same mesh axes: bytes that one device sends, and seconds."""

    kind: str
    axes: tuple[str, ...]
    times: int
    sent: float
    overlapped: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Seconds of a step.

    compute: matmuls at the peak of their dtype, recomputation included.
    memory: bytes at the bandwidth of the chip's memory.
    network: all collectives at the speed of their links.
    exposed: those of them that nothing hides.
    """

    compute: float
    memory: float
    network: float
    exposed: float

    @property
    def least(self) -> float:
        """Everything hidden behind the slowest."""
        return max(self.compute, self.memory, self.network)

    @property
    def expected(self) -> float:
        """Collectives that nothing hides come on top; the rest hides behind the slowest."""
        return max(self.compute, self.memory, self.network - self.exposed) + self.exposed

    @property
    def limit(self) -> str:
        return max(("compute", "memory", "network"), key=lambda name: getattr(self, name))


def rows(found: list[Collective], topology: Topology, mesh: dict[str, int], dcn: int = 1) -> list[Row]:
    """Collectives by kind and axes, the slowest first."""
    grouped = collections.defaultdict(list)
    for one in found:
        grouped[one.kind, one.axes].append(one)
    result = []
    for (kind, axes), group in grouped.items():
        sent = sum(one.sent for one in group)
        overlapped = sum(one.sent for one in group if one.overlapped)
        seconds = sent / axis_bandwidth(topology, mesh, axes, dcn)
        result.append(Row(kind, axes, sum(one.times for one in group), sent, overlapped, seconds))
    return sorted(result, key=lambda row: -row.seconds)


def bounds(work: Work, table: list[Row], topology: Topology) -> Bounds:
    chip = topology.chip
    exposed = sum(row.seconds * (1 - row.overlapped / row.sent) for row in table if row.sent)
    return Bounds(
        compute=sum(flops / chip.peak(dtype) for dtype, flops in work.flops.items()),
        memory=work.bytes / chip.hbm,
        network=sum(row.seconds for row in table),
        exposed=exposed,
    )
