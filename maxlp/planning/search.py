"""The nearest settings that fit, by the closed form."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from maxlp.families.llama import cost as estimate
from maxlp.planning import FORMS
from maxlp.planning import roofline as bounds
from maxlp.planning.topologies import Topology
from maxlp.run.config import ConfigError

REMATS = ("none", "dots", "block")  # from most memory to least
SIZES = (1, 2, 4, 8, 16)  # of a mesh axis
FACTORS = (1, 2, 4, 8, 16, 32)  # of microbatches
KERNELS = {"cuda": ("cudnn",), "tpu": ("splash",), "cpu": ()}  # attention without an (S, S) matrix
MARGIN = 0.95  # of the memory: the closed form is not exact


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Changes of a config by key, the peak memory (bytes) and the seconds of a step that they leave."""

    changes: dict[str, Any]
    peak: float
    seconds: float

    @property
    def settings(self) -> frozenset[str]:
        """The keys that are changed, but for fsdp, which takes the devices that another axis leaves."""
        return frozenset(self.changes) - {"mesh.fsdp"}


def changed(c: ConfigDict, changes: dict[str, Any]) -> ConfigDict:
    """A copy of the config with some values set, as ``{"model.remat": "block"}``."""
    copy: Any = c.copy_and_resolve_references()
    with copy.unlocked():
        for key, value in changes.items():
            *path, name = key.split(".")
            section = copy
            for step in path:
                section = section[step]
            section[name] = value
    return copy


def nearest(c: ConfigDict, topology: Topology) -> list[Candidate]:
    """Settings that fit: fewest changes first, then the fastest.

    Of those that change the same settings only the fastest is there, and none whose settings are more than
    another's: what they add is not needed to fit. PipelineConfig stages are not tried: as `fsdp` they split the
    layers' state, but not what is at the ends, and they keep the activations of every tick.
    """
    fastest: dict[frozenset[str], Candidate] = {}
    states: dict[Any, estimate.State] = {}
    for changes in _proposals(c, topology):
        if (candidate := _tried(c, topology, changes, states)) is None:
            continue
        best = fastest.setdefault(candidate.settings, candidate)
        if candidate.seconds < best.seconds:
            fastest[candidate.settings] = candidate
    needed = [one for key, one in fastest.items() if not any(other < key for other in fastest)]
    return sorted(needed, key=lambda one: (len(one.settings), one.seconds))


def _proposals(c: ConfigDict, topology: Topology) -> Iterator[dict[str, Any]]:
    """Every combination of the choices, as the changes of the config that it takes."""
    choices = _choices(c, topology.chip.platform)
    config: Any = c.to_dict() | {"mesh": estimate.mesh_axes(c, topology.size)}
    present = {key: functools.reduce(operator.getitem, key.split("."), config) for key in choices}
    options = [dict.fromkeys((present[key], *values)) for key, values in choices.items()]
    for chosen in itertools.product(*options):
        changes = {key: value for key, value in zip(choices, chosen, strict=True) if value != present[key]}
        if changes.keys() & {"mesh.tensor", "mesh.context"}:
            changes["mesh.fsdp"] = -1
        if changes:
            yield changes


def _choices(c: ConfigDict, platform: str) -> dict[str, tuple]:
    """What each setting may be beside what it is."""
    choices: dict[str, tuple] = {
        "model.remat": REMATS,
        "model.attention": KERNELS[platform],
        "mesh.tensor": SIZES,
        "train.microbatches": tuple(n * c.train.microbatches for n in FACTORS),
    }
    if c.model.name == "clip":
        choices["loss.method"] = ("tiled",)
    elif not c.train.release_gradients:
        choices["model.attention"] += ("ring",)
        choices["mesh.context"] = SIZES
    if c.optimizer.get("mu_dtype", "") is None:
        choices["optimizer.mu_dtype"] = ("bfloat16",)
    return choices


def _tried(c: ConfigDict, topology: Topology, changes: dict, states: dict) -> Candidate | None:
    """None if the changed config does not divide, or does not fit."""
    changed_c, form = changed(c, changes), FORMS[c.model.name]
    try:
        axes = estimate.mesh_axes(changed_c, topology.size)
        mu = changes.get("optimizer.mu_dtype")
        if mu not in states:
            states[mu] = estimate.abstract_state(changed_c, axes)
        peak = sum(form.memory(changed_c, axes, states[mu], topology.chip.platform).values())
    except (ConfigError, ValueError):
        return None
    if peak > MARGIN * topology.chip.memory:
        return None
    work = form.work(changed_c, axes, states[mu], topology.chip.platform)
    found = form.collectives(changed_c, axes)
    table = bounds.rows(found, topology, axes, c.mesh.get("dcn_data", 1))
    return Candidate(changes, peak, bounds.bounds(work, table, topology).expected)
