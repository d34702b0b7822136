"""The fastest settings that fit in memory, among all combinations, by the closed form (no compiler needed).

Layout (searched freely): the mesh (every size of data, fsdp, context and tensor whose product is the number
of devices), remat, the attention kernel, released gradients, `Family.search_choices`, the number of
microbatches, and the number of parts in which the loss is computed (`Family.loss_parts`). These change
speed and memory, and results only by rounding. Not searched: pipeline stages, which on the same devices
need no less memory than fsdp, and ``scan_layers``, which the closed form does not distinguish.

Numerics (offered, never chosen silently): the parameters' dtype, the moments' format, GaLore, the recipe of
the matmuls, no clipping (which released gradients need), and a smaller batch without microbatches.

The result is the fastest of all combinations, although most are not evaluated. A *cell* is a layout without
its numbers of microbatches and of parts. For any cell, closed forms have three properties, which tests
check:

1. More microbatches never take less time, so the time with one is a lower bound for the cell. Cells are
   visited in the order of this bound, and the search ends when it exceeds the time of what has been found.
2. From two microbatches on, more of them never need more memory. So it is enough to try one and the most to
   know whether any number fits, and bisection finds the fewest that fit, which are the fastest.
3. Parts of the loss do not change the time, and from two on more of them never need more memory.

A variant of the numerics whose state alone does not fit on any mesh is evaluated only if nothing fits, to
find what needs the least memory.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from maxlp import schema
from maxlp.nn import attention
from maxlp.optim.config import GaloreConfig
from maxlp.optim.tree_utils import HIDDEN_KERNELS, matches
from maxlp.parallel.sharding import abstract_mesh
from maxlp.planning.cost_model import StateShapes, cost_of, state_shapes
from maxlp.planning.roofline import Roofline, group, roofline
from maxlp.planning.topologies import Topology
from maxlp.precision import HIGH_PRECISION
from maxlp.run import constraints, presets
from maxlp.run.settings import Machine, Settings

MARGIN = 0.95  # of the memory, because the closed form is not exact
COUNT = 4  # layouts to return
FASTER = 1.03  # changes of the numerics are offered for speed if they are this much faster than any layout
REMATS = ("none", "dots", "block", "offload")
FREE_AXES = ("data", "fsdp", "context", "tensor")
NUMERICS = ("pure_bf16", "bfloat16 or 8-bit moments", "GaLore", "clipping", "a smaller batch")
SPED_UP = {"float8": "fp8_delayed", "int8": "int8_switchback"}  # dtype of the matmuls -> recipe

Changes = dict[str, Any]  # of settings by key, such as {"model.remat": "block"}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings that the closed form was evaluated for.

    Attributes:
      changes: of the config, by key.
      numerics: names of the changes that affect the results; empty for a layout.
      layout: the values of the searched settings, changed or not.
      peak: bytes in use on a device at the peak of a step.
      seconds: of a step.
      busy: seconds of a step if compute, memory, network and host traffic did not overlap.
      rate: tokens or images per second.
    """

    changes: Changes
    numerics: tuple[str, ...]
    layout: Changes
    peak: float
    seconds: float
    busy: float
    rate: float

    @property
    def order(self) -> tuple:
        """Fastest first; of equally fast ones, the least busy, the fewest changes, the least memory."""
        return _rounded(1 / self.rate), _rounded(self.busy), len(self.changes), self.peak


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
      layouts: the fastest ones that fit, none if none fits.
      numerics: if a layout fits, candidates that are faster thanks to changes of the numerics; otherwise
        the fastest candidate of each minimal set of changes with which something fits.
      smallest: if nothing fits at all, the candidate that needs the least memory.
      combinations: how many combinations the search covered.
    """

    layouts: list[Candidate]
    numerics: list[Candidate]
    smallest: Candidate | None
    combinations: int


@dataclasses.dataclass(frozen=True)
class Variant:
    """A choice of the numerics.

    Attributes:
      names: what it changes, in words for the report.
      released: only layouts with released gradients, which the changes make possible.
      smaller_batch: only batches that are smaller than the config's, without microbatches.
    """

    names: tuple[str, ...] = ()
    changes: Changes = dataclasses.field(default_factory=dict)
    released: bool = False
    smaller_batch: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """A layout without the numbers of microbatches and of parts of the loss.

    Attributes:
      settings: with the layout's changes; `_split` sets the microbatches or the smaller batch.
      splits: the numbers n, ascending, by which the config's batch can be divided: into n microbatches or,
        for a smaller batch, to 1 / n of it.
      parts: key of the setting that splits the loss, and its values: the config's, then all, ascending.
      bound: lower bound of the seconds per token or image, for all splits.
    """

    settings: Settings
    machine: Machine
    changes: Changes
    splits: list[int]
    parts: tuple[str, list[int]] | None
    bound: float


def find(s: Settings, topology: Topology) -> Found:
    """The fastest settings that fit, and what changes of the numerics would gain."""
    search = _Search(s, topology)
    layouts = search.fastest(Variant(), COUNT)
    if layouts:
        best = layouts[0].rate * FASTER
        offers = [one for v in faster_numerics(s, topology) for one in search.fastest(v, 1, above=best)]
        return Found(layouts, sorted(offers, key=lambda one: one.order), None, search.combinations)
    needed: dict[frozenset[str], Candidate] = {}
    variants = smaller_numerics(s)
    for variant in variants:
        names = frozenset(variant.names)
        if not any(fewer < names for fewer in needed):
            for one in search.fastest(variant, 1):
                needed[names] = one
    found = sorted(needed.values(), key=lambda one: (len(one.numerics), one.order))
    if not found:
        search.find_smallest([Variant(), *variants])
    return Found([], found, None if found else search.smallest, search.combinations)


def changed(s: Settings, changes: Mapping[str, Any]) -> Settings:
    """The settings with some values replaced, as ``{"model.remat": "block"}``."""
    for section, group_ in itertools.groupby(sorted(changes), key=lambda key: key.split(".")[0]):
        values = {key.split(".")[1]: changes[key] for key in group_}
        old = getattr(s, section)
        if isinstance(old, Mapping):
            s = dataclasses.replace(s, **{section: {**old, **values}})
            continue
        hints = schema.annotations(type(old))
        for name, value in values.items():
            if isinstance(value, dict) and (kind := schema.section(hints[name])):
                present = getattr(old, name)
                values[name] = dataclasses.replace(present, **value) if present else kind(**value)
        s = dataclasses.replace(s, **{section: dataclasses.replace(old, **values)})
    return s


def flags(changes: Mapping[str, Any]) -> list[str]:
    """The changes as flags of the command line."""
    flat: Changes = {}
    for key, value in changes.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": v for name, v in value.items()}
        else:
            flat[key] = value
    return [f"--config.{key}={value}" for key, value in flat.items()]


# --- numerics -------------------------------------------------------------------------------------------


def smaller_numerics(s: Settings) -> list[Variant]:
    """Combinations of changes that save memory, fewest changes first."""
    batches = [Variant(), Variant(("smaller batch",), smaller_batch=True)]
    if s.optimizer.clip_norm:  # without clipping, gradients can be released
        unclipped = {"optimizer.clip_norm": 0.0}
        batches += [
            Variant(("clip_norm=0",), unclipped, released=True),
            Variant(("clip_norm=0", "smaller batch"), unclipped, released=True, smaller_batch=True),
        ]
    variants = []
    options = [[("", {}), *one] for one in _state_numerics(s)]  # the first: as it is
    for chosen, batch in itertools.product(itertools.product(*options), batches):
        names = (*(name for name, _ in chosen if name), *batch.names)
        changes = dict(batch.changes)
        for _, values in chosen:
            changes |= values
        if names and not ("optimizer.mu_dtype" in changes and "model.param_dtype" in changes):
            variants.append(dataclasses.replace(batch, names=names, changes=changes))
    return sorted(variants, key=lambda one: len(one.names))


def faster_numerics(s: Settings, topology: Topology) -> list[Variant]:
    """Single changes that may make a step faster: of the matmuls, or to save memory for a faster layout."""
    chip = topology.chip
    parameters, moments, _ = _state_numerics(s)
    single = [*parameters, *moments]
    if set(s.matmuls.values()) == {HIGH_PRECISION}:
        faster = [recipe for dtype, recipe in SPED_UP.items() if chip.peak(dtype) > chip.peak()]
        single = [(f"precision={name}", {"precision.recipe": name}) for name in faster[:1]] + single
    return [Variant((name,), changes) for name, changes in single]


def _state_numerics(s: Settings) -> tuple[list, list, list]:
    """Lists of (name, changes) that shrink the parameters, shrink the moments, and project the moments."""
    optimizer, parameters, moments, projected = s.optimizer, [], [], []
    can_shrink = s.model.param_dtype == "float32" and s.model.dtype != "float16"
    if s.train.lora is not None:  # adapters are float32 and small
        if can_shrink:
            parameters.append(("param_dtype=bfloat16", {"model.param_dtype": "bfloat16"}))
        return parameters, moments, projected
    if can_shrink:
        parameters.append(("precision=pure_bf16", presets.PURE_BF16))
        if optimizer.mu_dtype is None:
            moments.append(("mu_dtype=bfloat16", {"optimizer.mu_dtype": "bfloat16"}))
    if optimizer.low_bit is None:
        moments.append(("low_bit=8bit", {"optimizer.low_bit": presets.LOW_BIT["8bit"]}))
    if optimizer.galore is None:
        rank = galore_rank(s)
        rate = optimizer.learning_rate / GaloreConfig.scale  # projected kernels keep theirs
        changes = {"optimizer.galore": {"rank": rank}, "optimizer.learning_rate": rate}
        projected.append((f"galore={rank}", changes))
    return parameters, moments, projected


def galore_rank(s: Settings) -> int:
    """A quarter of the width, as in GaLore's runs (arXiv:2403.03507); at most the shortest kernel side."""
    kernels = [
        leaf.shape
        for path, leaf in jax.tree.leaves_with_path(nnx.to_pure_dict(s.params))
        if matches(path, HIDDEN_KERNELS)
    ]
    sides = [min(shape[-2:]) for shape in kernels]
    return min(max(sides) // 4, min(sides))


# --- layouts --------------------------------------------------------------------------------------------


def meshes(s: Settings, topology: Topology) -> Iterator[Changes]:
    """Every mesh of the topology with the config's number of stages, as values of the section ``mesh``.

    With local steps, the number of replicas stays that of the config, because the result depends on it.
    """
    own = s.mesh.get("dcn_data", 1)
    try:
        stage, replicas, *_ = topology.machine(s).axes.values()
    except ValueError:  # the config's mesh does not exist here
        stage, replicas = s.mesh.get("stage", 1), own * s.mesh.get("data", 1)
    devices = topology.size // stage if stage > 0 and topology.size % stage == 0 else 0
    seen = set()
    for dcn in sorted({*topology.dcn_sizes}, key=lambda size: (size != own, size)):
        for data, context, tensor in itertools.product(_divisors(devices), repeat=3):
            if devices % (dcn * data * context * tensor):
                continue
            if s.train.local is not None and replicas > 0 and dcn * data != replicas:
                continue
            # Without stages, ``data`` goes over the hosts first, whatever part of it is ``dcn_data``.
            same = dcn * data, context, tensor, dcn if stage > 1 else None
            if same not in seen:
                seen.add(same)
                fsdp = devices // (dcn * data * context * tensor)
                yield dict(stage=stage, data=data, fsdp=fsdp, context=context, tensor=tensor, dcn_data=dcn)


@functools.cache
def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0] if n else []


class _Search:
    """The search for one config on one topology, with caches that its variants share.

    Attributes:
      smallest: the candidate with the least memory among those found not to fit.
      combinations: how many have been covered so far.
    """

    def __init__(self, s: Settings, topology: Topology):
        self._base, self._topology, self._cost = s, topology, cost_of(s)
        self._limit = MARGIN * topology.chip.memory
        self._states: dict[Any, StateShapes] = {}
        self.smallest: Candidate | None = None
        self.combinations = 0
        self._meshes = list(self._possible_meshes())
        try:
            self._axes = topology.machine(s).axes
        except ValueError:
            self._axes = {}  # the config's mesh does not exist here

    def fastest(self, variant: Variant, count: int, above: float = 0.0) -> list[Candidate]:
        """The fastest candidates of a variant that fit, at most one of each cell.

        For a variant with a smaller batch, those with the largest batch that fits.

        Args:
          count: how many at most.
          above: only those with a higher rate than this.
        """
        if self._least_held(variant) > self._limit:
            return []
        cells = sorted(self._cells(variant), key=lambda cell: cell.bound)
        if variant.smaller_batch:
            return self._largest_batches(cells, variant)[:count]
        found: list[Candidate] = []
        for cell in cells:
            slowest = found[-1].order[0] if len(found) == count else math.inf
            if cell.bound > slowest * (1 + 1e-6) or cell.bound * above > 1:
                break
            candidate = self._fastest_of(cell, variant)
            if candidate is not None and candidate.rate > above:
                found = sorted([*found, candidate], key=lambda one: one.order)[:count]
        return found

    def find_smallest(self, variants: list[Variant]) -> None:
        """Looks for the least memory also among variants whose state alone does not fit."""
        measured = [(self._least_held(variant), variant) for variant in variants]
        for held, variant in sorted(measured, key=lambda one: one[0]):
            if math.isinf(held) or (self.smallest is not None and held > self.smallest.peak):
                break
            if held > self._limit:
                for cell in self._cells(variant):
                    self._fastest_of(cell, variant)

    def _least_held(self, variant: Variant) -> float:
        """The fewest bytes that the state of a variant takes on any mesh; infinity if it cannot run."""
        if not self._meshes:
            return math.inf
        try:
            s = changed(self._base, variant.changes)
            state = self._state(s)
        except ValueError:  # an optimizer or a model that the variant is not for
            return math.inf
        held = [_held(state, machine) for _, machine in self._meshes]
        return min((one for one in held if one is not None), default=math.inf)

    def _possible_meshes(self) -> Iterator[tuple[Changes, Machine]]:
        """The meshes whose devices can share the batch and every parameter, for all variants."""
        for mesh in meshes(self._base, self._topology):
            machine = self._topology.machine(dataclasses.replace(self._base, mesh=mesh))
            if self._base.data.batch_size % machine.batch_shards:
                continue
            if constraints.mesh_divides_params(self._base, machine) is None:
                yield mesh, machine

    def _largest_batches(self, cells: list[Cell], variant: Variant) -> list[Candidate]:
        """The candidates with the largest batch that fits, the fastest first."""
        found: list[Candidate] = []
        fewest = max((cell.splits[-1] for cell in cells), default=0)
        for cell in cells:
            shorter = dataclasses.replace(cell, splits=[n for n in cell.splits if n <= fewest])
            one = self._fastest_of(shorter, variant) if shorter.splits else None
            if one is None:
                continue
            split = self._base.data.batch_size // one.changes["data.batch_size"]
            found = [*(found if split == fewest else []), one]
            fewest = split
        return sorted(found, key=lambda one: one.order)

    def _cells(self, variant: Variant) -> Iterator[Cell]:
        s = changed(self._base, variant.changes)
        state, rows = self._state(s), self._choices(s, variant)
        for mesh, machine in self._meshes:
            held = _held(state, machine)
            if held is None or (self.smallest and held > max(self._limit, self.smallest.peak)):
                continue
            on_mesh = dataclasses.replace(s, mesh=mesh)
            for row in _distinct_kernels(on_mesh, machine, rows):
                if (cell := self._cell(on_mesh, machine, row, variant)) is not None:
                    yield cell

    def _choices(self, s: Settings, variant: Variant) -> list[Changes]:
        """Every combination of the choices besides the mesh."""
        choices = {"model.attention": (), **s.family.search_choices}
        options = {key: list(dict.fromkeys((_value(s, key), *values))) for key, values in choices.items()}
        if attention.AUTO not in options["model.attention"]:
            options["model.attention"].append(attention.AUTO)
        offered = [one for one in REMATS if one != "offload" or self._topology.chip.host]
        remats = list(dict.fromkeys((s.model.remat, *offered)))
        saved = [] if variant.released else [(False, remat) for remat in remats]
        saved.append((True, s.model.remat))  # saves only the inputs of the blocks, whatever remat says
        combinations = []
        for (released, remat), values in itertools.product(saved, itertools.product(*options.values())):
            chosen = {"model.remat": remat, "train.release_gradients": released}
            combinations.append(chosen | dict(zip(options, values, strict=True)))
        return combinations

    def _cell(self, s: Settings, machine: Machine, row: Changes, variant: Variant) -> Cell | None:
        """The cell of these choices; None if they cannot be combined."""
        released = row["train.release_gradients"]
        splits = _divisors(s.data.batch_size // machine.batch_shards)
        if s.optimizer.adascale is not None:  # compares the gradients of the config's microbatches
            splits = [n for n in splits if n == s.train.microbatches]
        if variant.smaller_batch:
            splits = splits[1:]
        elif released:
            splits = splits[:1]
        if not splits:
            return None
        s = changed(s, row)
        first = _split(s, splits[0], variant)
        if not _accepted(first, machine):
            return None
        if machine.axes["stage"] > 1:
            splits = [n for n in splits if _accepted(_split(s, n, variant), machine)]
        parts = s.family.loss_parts(s.data, machine.axes) if s.family.loss_parts else None
        if parts is not None:
            key, values = parts
            parts = key, list(dict.fromkeys((_value(s, key), *values)))
        bound = self._time(first, machine).expected / first.family.units_per_step(first.data)
        self.combinations += len(splits) * (len(parts[1]) if parts else 1)
        return Cell(s, machine, row, splits, parts, bound)

    def _fastest_of(self, cell: Cell, variant: Variant) -> Candidate | None:
        """The candidate of a cell with the fewest splits that fit; None if none does."""
        splits = cell.splits

        @functools.cache
        def fits(n: int) -> Candidate | None:
            return self._fitting(cell, n, variant)

        low, high = 1, len(splits) - 1
        if fits(splits[0]) is None and (high < 1 or fits(splits[high]) is None):
            return None
        if fits(splits[0]) is not None:
            high = 0
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(splits[middle]) else (middle + 1, high)
        return fits(splits[high])

    def _fitting(self, cell: Cell, n: int, variant: Variant) -> Candidate | None:
        """The candidate of a cell with n splits; the loss in the config's parts or the fewest that fit."""
        s = _split(cell.settings, n, variant)
        state = self._state(s)
        key, values = cell.parts or ("", [0])

        def with_parts(value: int) -> Settings:
            return changed(s, {key: value}) if key else s

        @functools.cache
        def peak(value: int) -> float:
            if value != values[0] and not _accepts_parts(cell, value):
                return math.inf
            return sum(self._cost.memory(with_parts(value), cell.machine, state).values())

        # The config's value, one part and the most decide; see the module's third property.
        deciding = (values[0], min(values), max(values))
        chosen = next((value for value in deciding if peak(value) <= self._limit), None)
        if chosen is None:
            least = min(deciding, key=peak)
            if self.smallest is None or peak(least) < self.smallest.peak:
                self.smallest = self._candidate(with_parts(least), cell, variant, peak(least))
            return None
        if chosen not in (values[0], min(values)):  # the most parts: fewer may be enough
            chosen = next(value for value in sorted(values[1:]) if peak(value) <= self._limit)
        return self._candidate(with_parts(chosen), cell, variant, peak(chosen))

    def _candidate(self, s: Settings, cell: Cell, variant: Variant, peak: float) -> Candidate:
        time = self._time(s, cell.machine)
        keys = [*cell.changes, "train.microbatches", *([cell.parts[0]] if cell.parts else [])]
        layout = {key: _value(s, key) for key in keys}
        changes = dict(variant.changes)
        names = variant.names
        if variant.smaller_batch:
            changes["data.batch_size"] = s.data.batch_size
            names = tuple(f"batch_size={s.data.batch_size}" if n == "smaller batch" else n for n in names)
        changes |= {key: value for key, value in layout.items() if value != _value(self._base, key)}
        dcn_data = self._base.mesh.get("dcn_data", 1)
        if (dict(self._axes), dcn_data) != (dict(cell.machine.axes), s.mesh["dcn_data"]):
            free = {**s.mesh, "fsdp": -1}
            changes |= {f"mesh.{k}": v for k, v in free.items() if v != self._base.mesh.get(k, 1)}
        layout = {"mesh": dict(cell.machine.axes), **layout, "kernel": s.on(cell.machine).model.attention}
        rate = s.family.units_per_step(s.data) / time.expected
        busy = time.compute + time.memory + time.network + time.host
        return Candidate(changes, names, layout, peak, time.expected, busy, rate)

    def _time(self, s: Settings, machine: Machine) -> Roofline:
        found, dcn = self._cost.collectives(s, machine), s.mesh.get("dcn_data", 1)
        groups = group(found, self._topology, machine.axes, dcn)
        return roofline(self._cost.work(s, machine, self._state(s)), groups, self._topology)

    def _state(self, s: Settings) -> StateShapes:
        """The state as shapes, cached: of the layout it depends only on released gradients."""
        optimizer = dataclasses.replace(s.optimizer, clip_norm=0.0)
        released = s.train.release_gradients  # then the devices do not share the layers of SOAP
        key = s.model.dtype, s.model.param_dtype, repr(optimizer), s.precision, released
        if key not in self._states:
            chip = self._topology.chip
            one = Machine(dict.fromkeys(("stage", *FREE_AXES), 1), chip.platform, chip.kind)
            self._states[key] = state_shapes(s, one)
        return self._states[key]


def _distinct_kernels(s: Settings, machine: Machine, rows: list[Changes]) -> Iterator[Changes]:
    """The choices without duplicates: of two names that stand for the same attention kernel, the first."""
    kernels: dict[str, str] = {}
    for name in dict.fromkeys(row["model.attention"] for row in rows):
        if name == "ring" and s.model.attention != "ring" and machine.axes["context"] == 1:
            continue  # nothing is passed around
        kernels.setdefault(changed(s, {"model.attention": name}).on(machine).model.attention, name)
    return (row for row in rows if row["model.attention"] in kernels.values())


def _split(s: Settings, n: int, variant: Variant) -> Settings:
    """The settings with n microbatches, or with 1 / n of the batch in one pass."""
    if variant.smaller_batch:
        return changed(s, {"data.batch_size": s.data.batch_size // n, "train.microbatches": 1})
    return changed(s, {"train.microbatches": n})


def _rounded(seconds: float) -> float:
    """To six digits, so that sums in another order are equal."""
    return float(f"{seconds:.6g}")


def _held(state: StateShapes, machine: Machine) -> float | None:
    """Bytes of parameters and optimizer state on a device; None if the mesh does not divide a parameter."""
    mesh = abstract_mesh(machine.axes)
    try:
        return state.bytes_on(mesh, "params") + state.bytes_on(mesh, "opt_state")
    except ValueError:
        return None


@functools.lru_cache(maxsize=4096)
def _accepts_parts(cell: Cell, value: int) -> bool:
    """Whether the loss of a cell can have this number of parts."""
    assert cell.parts is not None
    return _accepted(changed(cell.settings, {cell.parts[0]: value}), cell.machine)


def _accepted(s: Settings, machine: Machine) -> bool:
    try:
        constraints.check(s, machine)
    except ValueError:
        return False
    return True


def _value(s: Settings, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(s, section), name)
