"""How a pipeline divides layers and batch; `parallel.pipeline` runs it."""

import dataclasses
from typing import NamedTuple

from maxlp import schema
from maxlp.schema import Count


class Schedule(NamedTuple):
    """A circular pipeline schedule.

    Attributes:
      stages: the size of the mesh axis ``stage``.
      microbatches: a multiple of ``stages``, over which the waiting microbatches are spread.
      rounds: how often a microbatch passes through the stages. With several rounds a stage holds several
        groups of layers; the bubble is smaller, and more activations and weights are sent.
    """

    stages: int
    microbatches: int
    rounds: int

    @property
    def ticks(self) -> int:
        """The number of ticks; in each, every stage runs its layers of a round on one microbatch."""
        return self.rounds * self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The fraction of the ticks in which a stage is idle."""
        return (self.stages - 1) / self.ticks


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The config's ``model.pipeline`` section.

    Attributes:
      microbatches: see `Schedule`; None takes the number of stages.
      rounds: see `Schedule`.
    """

    microbatches: Count | None = None
    rounds: Count = 1

    def __post_init__(self):
        schema.check(self)

    def schedule(self, stages: int) -> Schedule:
        """The schedule for this number of stages."""
        return Schedule(stages, stages if self.microbatches is None else self.microbatches, self.rounds)
