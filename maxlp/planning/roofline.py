"""A lower bound of a step's time: FLOPs, bytes and collectives over the published speeds of the chip."""

import collections
import dataclasses
from collections.abc import Mapping

from maxlp.planning.cost_model import Work
from maxlp.planning.hlo import Collective
from maxlp.planning.topologies import Topology, axis_bandwidth


@dataclasses.dataclass(frozen=True)
class CollectiveGroup:
    """All collectives of one kind over the same mesh axes, of one device and step.

    Attributes:
      times: how many there are.
      sent: bytes sent.
      overlapped: bytes of those that other work can hide.
      seconds: at the speed of the links.
    """

    kind: str
    axes: tuple[str, ...]
    times: int
    sent: float
    overlapped: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of a step.

    Attributes:
      compute: matmuls at the peak of their dtype, recomputation included.
      memory: traffic at the bandwidth of the chip's memory.
      network: all collectives at the speed of their links.
      exposed: the collectives that nothing hides.
      host: traffic with the host's memory at the bandwidth to it; 0 where that is not published.
    """

    compute: float
    memory: float
    network: float
    exposed: float
    host: float = 0.0

    @property
    def least(self) -> float:
        """The seconds if everything else is hidden behind the slowest resource."""
        return max(self.compute, self.memory, self.network, self.host)

    @property
    def expected(self) -> float:
        """The seconds if everything but the exposed collectives is hidden behind the slowest resource."""
        return max(self.compute, self.memory, self.network - self.exposed, self.host) + self.exposed

    @property
    def limit(self) -> str:
        """The slowest resource: "compute", "memory", "network" or "host"."""
        return max(("compute", "memory", "network", "host"), key=lambda name: getattr(self, name))


def group(
    found: list[Collective], topology: Topology, mesh: Mapping[str, int], dcn: int = 1
) -> list[CollectiveGroup]:
    """Collectives by kind and axes, the slowest first.

    Args:
      dcn: ``mesh.dcn_data`` of the config.
    """
    grouped = collections.defaultdict(list)
    for one in found:
        grouped[one.kind, one.axes].append(one)
    result = []
    for (kind, axes), members in grouped.items():
        sent = sum(one.sent for one in members)
        overlapped = sum(one.sent for one in members if one.overlapped)
        seconds = sent / axis_bandwidth(topology, dict(mesh), axes, dcn, kind)
        times = sum(one.times for one in members)
        result.append(CollectiveGroup(kind, axes, times, sent, overlapped, seconds))
    return sorted(result, key=lambda row: -row.seconds)


def roofline(work: Work, groups: list[CollectiveGroup], topology: Topology) -> Roofline:
    """The seconds of a step with this work and these collectives."""
    chip = topology.chip
    exposed = sum(row.seconds * (1 - row.overlapped / row.sent) for row in groups if row.sent)
    return Roofline(
        compute=sum(flops / chip.peak(dtype) for dtype, flops in work.flops.items()),
        memory=work.bytes / chip.hbm,
        network=sum(row.seconds for row in groups),
        exposed=exposed,
        host=work.host / chip.host if chip.host else 0.0,
    )
