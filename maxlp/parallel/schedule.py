"""How a pipeline cuts layers and batch; `parallel.pipeline` runs it."""

import dataclasses
from typing import NamedTuple

import jax


class Schedule(NamedTuple):
    """A circular pipeline schedule.

    stages: devices along the mesh axis ``stage``.
    microbatches: a multiple of the stages: the microbatches that wait are spread over them.
    rounds: how often a microbatch passes through the stages. With more rounds a stage holds several
      groups of layers, the bubble is smaller, and more activations and weights are sent.
    """

    stages: int
    microbatches: int
    rounds: int

    @property
    def ticks(self) -> int:
        """Steps of the schedule: in each, every stage runs its layers on one microbatch."""
        return self.rounds * self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The fraction of the ticks in which a stage is idle."""
        return (self.stages - 1) / self.ticks


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The config's ``model.pipeline`` section.

    microbatches: see `Schedule`; None takes as many as there are stages.
    rounds: see `Schedule`.
    """

    microbatches: int | None = None
    rounds: int = 1

    def __post_init__(self):
        for key in ("microbatches", "rounds"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise ValueError(f"{key}={value} must be at least 1")

    def schedule(self, stages: int) -> Schedule:
        return Schedule(stages, stages if self.microbatches is None else self.microbatches, self.rounds)

    def in_mesh(self, batch_size: int) -> Schedule | None:
        """The schedule on the current mesh; None without stages, or for a batch that does not divide."""
        mesh = jax.sharding.get_abstract_mesh()
        schedule = self.schedule(1 if mesh.empty else mesh.shape.get("stage", 1))
        return schedule if schedule.stages > 1 and batch_size % schedule.microbatches == 0 else None
