"""The nearest settings that fit, by the closed form."""

import dataclasses
import itertools
from typing import Any

from ml_collections import ConfigDict

from maxlp.config import ConfigError
from maxlp.planning import bounds, estimate
from maxlp.planning.topologies import Topology

REMATS = ("none", "dots", "block")  # from most memory to least
MARGIN = 0.95  # of the memory: the closed form is not exact


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Changes of a config by key, the peak memory (bytes) and the seconds of a step that they leave."""

    changes: dict[str, Any]
    peak: float
    seconds: float


def changed(c: ConfigDict, changes: dict[str, Any]) -> ConfigDict:
    """A copy of the config with some values set, as ``{"model.remat": "block"}``."""
    copy: Any = c.copy_and_resolve_references()
    with copy.unlocked():
        for key, value in changes.items():
            section, name = key.split(".")
            copy[section][name] = value
    return copy


def nearest(c: ConfigDict, topology: Topology) -> list[Candidate]:
    """Settings that fit: fewest changes first, then the fastest; remat, microbatches, mesh, moments."""
    found = []
    states: dict[str | None, estimate.State] = {}
    axes = estimate.mesh_axes(c, topology.size)
    for moments, remat, tensor, factor in itertools.product(
        (None, "bfloat16"), REMATS, (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)
    ):
        changes: dict[str, Any] = {}
        if moments is not None and c.optimizer.get("mu_dtype") is None:
            changes["optimizer.mu_dtype"] = moments
        if remat != c.model.remat:
            changes["model.remat"] = remat
        if tensor != axes["tensor"]:
            changes |= {"mesh.tensor": tensor, "mesh.fsdp": -1}
        if factor != 1:
            changes["train.microbatches"] = c.train.microbatches * factor
        if not changes or (moments is not None and "optimizer.mu_dtype" not in changes):
            continue
        candidate = changed(c, changes)
        try:
            its_axes = estimate.mesh_axes(candidate, topology.size)
            if moments not in states:
                states[moments] = estimate.abstract_state(candidate, its_axes)
            state = states[moments]
            peak = sum(estimate.memory(candidate, its_axes, state, topology.chip.platform).values())
        except (ConfigError, ValueError):
            continue  # does not divide
        if peak > MARGIN * topology.chip.memory:
            continue
        work = estimate.work(candidate, its_axes, state)
        table = bounds.rows(
            estimate.collectives(candidate, its_axes), topology, its_axes, c.mesh.get("dcn_data", 1)
        )
        found.append(Candidate(changes, peak, bounds.bounds(work, table, topology).expected))
    return sorted(found, key=lambda one: (len(one.changes) - ("mesh.fsdp" in one.changes), one.seconds))
