"""The nearest settings that fit, by the closed form."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from maxlp.planning.cost_model import StateShapes, cost_of, state_shapes
from maxlp.planning.roofline import group, roofline
from maxlp.planning.topologies import Topology
from maxlp.run import constraints
from maxlp.run.settings import Settings

REMATS = ("none", "dots", "block")  # from most memory to least
SIZES = (1, 2, 4, 8, 16)  # of a mesh axis
FACTORS = (1, 2, 4, 8, 16, 32)  # of microbatches
KERNELS = {"cuda": ("cudnn",), "tpu": ("splash",)}  # attention without an (S, S) matrix
MARGIN = 0.95  # of the memory, because the closed form is not exact


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Changes of a config by key, with the peak memory (bytes) and the seconds of a step that result."""

    changes: dict[str, Any]
    peak: float
    seconds: float

    @property
    def settings(self) -> frozenset[str]:
        """The keys that change, except fsdp, which takes the devices that the other axes leave."""
        return frozenset(self.changes) - {"mesh.fsdp"}


def changed(s: Settings, changes: Mapping[str, Any]) -> Settings:
    """The settings with some values replaced, as ``{"model.remat": "block"}``."""
    for key, value in changes.items():
        section, name = key.split(".")
        old = getattr(s, section)
        new = dict(old, **{name: value}) if section == "mesh" else dataclasses.replace(old, **{name: value})
        s = dataclasses.replace(s, **{section: new})
    return s


def nearest(s: Settings, topology: Topology) -> list[Candidate]:
    """Settings that fit: fewest changes first, then the fastest.

    Of the candidates that change the same settings only the fastest is returned, and none that changes a
    superset of another's settings, because the additional changes are not needed to fit. Pipeline stages
    are not tried: like ``fsdp`` they split the layers' state, but not what is outside the layers, and they
    keep the activations of every tick.
    """
    fastest: dict[frozenset[str], Candidate] = {}
    states: dict[Any, StateShapes] = {}
    for changes in _proposals(s, topology):
        if (candidate := _try(s, topology, changes, states)) is None:
            continue
        best = fastest.setdefault(candidate.settings, candidate)
        if candidate.seconds < best.seconds:
            fastest[candidate.settings] = candidate
    needed = [one for key, one in fastest.items() if not any(other < key for other in fastest)]
    return sorted(needed, key=lambda one: (len(one.settings), one.seconds))


def _proposals(s: Settings, topology: Topology) -> Iterator[dict[str, Any]]:
    """Every combination of the choices, as changes of the settings."""
    choices = _choices(s, topology.chip.platform)
    axes = topology.machine(s).axes
    resolved = dataclasses.replace(s, mesh=dict(axes))
    present = {key: _value(resolved, key) for key in choices}
    options = [dict.fromkeys((present[key], *values)) for key, values in choices.items()]
    for chosen in itertools.product(*options):
        changes = {key: value for key, value in zip(choices, chosen, strict=True) if value != present[key]}
        if changes.keys() & {"mesh.tensor", "mesh.context"}:
            changes["mesh.fsdp"] = -1
        if changes:
            yield changes


def _value(s: Settings, key: str) -> Any:
    section, name = key.split(".")
    return s.mesh[name] if section == "mesh" else getattr(getattr(s, section), name)


def _choices(s: Settings, platform: str) -> dict[str, tuple]:
    """The values to try for each setting besides its present one."""
    choices: dict[str, tuple] = {
        "model.remat": REMATS,
        "model.attention": KERNELS[platform],
        "mesh.tensor": SIZES,
        "train.microbatches": tuple(n * s.train.microbatches for n in FACTORS),
    }
    choices |= s.family.search_choices
    if "mesh.context" in choices:
        choices["model.attention"] += ("ring",)
    if s.optimizer.mu_dtype is None:
        choices["optimizer.mu_dtype"] = ("bfloat16",)
    return choices


def _try(s: Settings, topology: Topology, changes: dict, states: dict) -> Candidate | None:
    """The candidate for these changes; None if they violate a constraint or do not fit in memory."""
    s, cost = changed(s, changes), cost_of(s)
    try:
        machine = topology.machine(s)
        constraints.check(s, machine)
        mu = changes.get("optimizer.mu_dtype")
        if mu not in states:
            states[mu] = state_shapes(s, machine)
        peak = sum(cost.memory(s, machine, states[mu]).values())
    except ValueError:
        return None
    if peak > MARGIN * topology.chip.memory:
        return None
    groups = group(cost.collectives(s, machine), topology, machine.axes, s.mesh.get("dcn_data", 1))
    time = roofline(cost.work(s, machine, states[mu]), groups, topology)
    return Candidate(changes, peak, time.expected)
