"""Where two programs of one training step first differ by more than rounding explains.

    python -m maxlp.lab diff /tmp/run --other=model.remat=block

Each step begins from the state of run A, and both programs take the same batch. Two comparisons:

on A's inputs
    The gradients in one pass, with a tap at the input and output of each layer (`precision.taps`). Program
    B gets what A has at every tap, so that a tensor differs only if what computes it from its neighbours
    differs. Forward: the tensors; then the loss; backward: their gradients and those of the parameters.
as trained
    The gradients of all microbatches, and the step with its optimizer, from the state on.

The bound of a tensor is measured: program A runs `SEEDS` times more, with each parameter, and each value
at a tap, moved by one unit in the last place, up or down at random, in the coarser of both programs'
dtypes (see also `FLIPPING_BITS`). The largest change in these runs counts, or one unit of the tensor's own
dtype if that is more (see `_at_least_the_quartile` for amax histories); `FACTOR` times this is the bound.
It is a bound in two norms, both relative to the root mean square of A's tensor: the root mean square, and
the largest magnitude, which shows a few wrong elements among many.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core as jaxpr_core
from jax.extend import source_info_util
from jax.sharding import Mesh

import maxlp
from maxlp.core.gradients import Gradients
from maxlp.core.local_steps import LocalState
from maxlp.core.train_state import CORE, State
from maxlp.core.train_step import Step, loss_scale_of
from maxlp.nn.stack import path_name
from maxlp.parallel.batches import global_batch
from maxlp.parallel.opt_state import PerReplica
from maxlp.precision import taps
from maxlp.runtime import tree_spec

SEEDS = 4
FACTOR = 6.0
# With excess precision XLA may keep float32 between fused operations of fewer bits in one program but not
# in the other.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
# As trained, a difference in the last bit upstream can round an operand of a quantized matmul to its other
# neighbour. Moves by one float32 unit do so to so few operands that a given tensor may have none; so all
# moves are then units of bfloat16.
FLIPPING_BITS = 7
ON_INPUTS, AS_TRAINED = "on A's inputs", "as trained"
WEIGHTS = ("params", "model_state")  # parts of the state that are moved
NORMS = ("rms", "max")
# What a program returns besides the values at taps, in its order.
KINDS = ("loss", "gradient", "state", "optimizer state", "update", "parameter", "gate")
ROOT = Path(maxlp.__file__).parent.parent
PASSED = (  # primitives that move or convert what others compute
    *("name", "convert_element_type", "sharding_constraint", "layout_constraint", "reshape", "squeeze"),
    *("broadcast_in_dim", "optimization_barrier", "copy", "transpose", "concatenate"),
    "dynamic_update_slice",
)
PASSED_FILES = ("maxlp/run/difference.py", "maxlp/precision/taps.py", "maxlp/nn/stack.py")

Batch = dict[str, np.ndarray]
Given = dict[taps.Path, np.ndarray]


class TensorSite(NamedTuple):
    """A tensor; ``layer`` is None outside of stacks."""

    part: str  # of the comparison
    kind: str  # an end of a tap, "gradient of" one, or one of `KINDS`
    path: str
    layer: int | None = None

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"{self.layer}"
        return " ".join(part for part in (self.path, layer, self.kind) if part)


Tensors = dict[TensorSite, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of one tensor, in the norm in which it is larger relative to its bound.

    Attributes:
      value: relative to the root mean square of A's tensor.
      bound: `FACTOR` times what rounding does.
      norm: "rms" or "max".
    """

    site: TensorSite
    value: float
    bound: float
    norm: str

    @property
    def excess(self) -> float:
        return self.value / self.bound if math.isfinite(self.bound) else 0.0  # not NaN if both are infinite


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A training step as one of the runs computes it.

    Attributes:
      abstract: the state as shapes, dtypes and shardings.
      one_pass: gradients of the whole batch at once, for the comparison with taps.
      gradients, step: of the run, see `core.train_step`.
      bits: mantissa bits of the dtype in which it computes.
      is_quantized: whether it rounds operands to fewer bits than that.
      initial: makes its state before the first step.
    """

    graphdef: nnx.GraphDef
    abstract: State
    mesh: Mesh
    one_pass: Gradients
    gradients: Gradients
    step: Step
    bits: int
    is_quantized: bool
    initial: Callable[[], State]


# --- one program ----------------------------------------------------------------------------------------


class CompiledProgram:
    """Both forms of a program, compiled for the shapes of a batch.

    Args:
      tapped: whether to make the form with taps.
    """

    def __init__(self, program: Program, batch: Batch, tapped: bool = True):
        self.program, self.taps = program, {}
        model = nnx.merge(program.graphdef, program.abstract["params"], program.abstract["model_state"])
        self.stacks = taps.stacks(model)
        on_mesh, self.traced = global_batch(batch, program.mesh), {}
        with jax.set_mesh(program.mesh):
            if tapped:
                trace = functools.partial(_one_pass, program, batch=on_mesh)
                graphdef, self.taps = taps.with_taps(program.graphdef, program.abstract, trace)
                run = jax.jit(functools.partial(_on_inputs, program, graphdef))
                self.traced[ON_INPUTS] = run.trace(program.abstract, on_mesh, self.nothing())
            run = jax.jit(functools.partial(_as_trained, program))
            self.traced[AS_TRAINED] = run.trace(program.abstract, on_mesh)
            self.compiled = {
                part: traced.lower().compile(COMPILER_OPTIONS) for part, traced in self.traced.items()
            }

    def nothing(self) -> Given:
        """The input of taps that leaves every value as it is."""
        return {path: np.full(tap.shape, np.nan, tap.dtype) for path, tap in self.taps.items()}

    def on_inputs(self, state: State, batch: Batch, given: Given) -> tuple[Tensors, Given]:
        """The tensors in the order of the program, and the values at the taps, without the loss scale.

        Args:
          state: of A, on the host; so in `as_trained`.
        """
        state = self._state(state)
        scale = loss_scale_of(state)
        scale = 1.0 if scale is None else float(scale)
        # Blocks of a CLIP see the same values as rows of other lengths on some meshes: `encoder.join_rows`.
        given = {
            path: self._scaled(path, given[path], scale).astype(tap.dtype).reshape(tap.shape)
            for path, tap in self.taps.items()
        }
        named, own = self._run(ON_INPUTS, state, batch, given)
        own = {path: self._scaled(path, x, 1 / scale) for path, x in own.items()}
        return self._in_order(ON_INPUTS, named, own), own

    def as_trained(self, state: State, batch: Batch) -> tuple[Tensors, State]:
        """The tensors in the order of the program, and the state after the step."""
        named, new = self._run(AS_TRAINED, self._state(state), batch)
        return self._in_order(AS_TRAINED, named, {}), new

    def _run(self, part: str, state: State, batch: Batch, *inputs: Given) -> Any:
        with jax.set_mesh(self.program.mesh):
            out = self.compiled[part](state, global_batch(batch, self.program.mesh), *inputs)
            return jax.device_get(out)

    def _state(self, state: State) -> State:
        """A state on this program's mesh; parts that only this program has are as before its first step."""
        placed = {}
        for part, like in self.program.abstract.items():
            given = state.get(part)
            if part not in state or shapes(given) != shapes(like):
                assert part not in ("params", "opt_state")
                given = jax.device_get(self.initial[part])
            placed[part] = jax.tree.map(
                lambda x, to: jax.device_put(np.asarray(x).astype(to.dtype), to.sharding), given, like
            )
        return placed

    @functools.cached_property
    def initial(self) -> State:
        return self.program.initial()

    def _scaled(self, path: taps.Path, x: np.ndarray, scale: float) -> np.ndarray:
        """The values at a tap, with the gradient multiplied by a scale."""
        factors = np.array([1.0, scale], np.float32).reshape(2, *[1] * (x.ndim - 1))
        if self.taps[path].layers is not None:
            factors = factors.reshape(1, 2, *[1] * (x.ndim - 2))
        return x if scale == 1 else x.astype(np.float32) * factors

    # --- the order of the program ---

    def _in_order(self, part: str, named: Mapping[tuple[str, str], np.ndarray], own: Given) -> Tensors:
        """Forward, the loss, backward from the last layer to the first, and what the step makes of it."""
        backward = {place: i for i, place in enumerate(reversed(list(self._modules())))}
        stages = {kind: i for i, kind in enumerate(("forward", *KINDS))}
        found: list[tuple[tuple[int, int, float], TensorSite, np.ndarray]] = []  # with (stage, place, end)
        for path, x in own.items():
            end = next(end for end, name in taps.ENDS.items() if name == path[-1])
            module = path_name(path[:-1])
            for layer, (value, grad) in _by_layer(x, self.taps[path].layers):
                place = backward[module, layer]
                site = TensorSite(part, end, module, layer)
                found.append(((stages["forward"], -place, end == "output"), site, value))
                site = TensorSite(part, f"gradient of {end}", module, layer)
                found.append(((stages["gradient"], place, end == "input"), site, grad))
        for (kind, path), x in named.items():
            module, _, _ = path.rpartition("/")
            for layer, value in _by_layer(x, self._num_layers(path, x)):
                place = layer or 0
                if kind == "gradient":
                    place = backward.get((module, layer), -1)
                # A gradient is between those of its layer's output (0) and input (1) above.
                found.append(((stages[kind], place, 0.5), TensorSite(part, kind, path, layer), value))
        return {site: x for _, site, x in sorted(found, key=lambda one: one[0])}

    def _num_layers(self, path: str, x: np.ndarray) -> int | None:
        """The layers that an array holds along its first axis; None if it is not of a stack."""
        for stack, layers in self.stacks.items():
            if f"/{stack}" in f"/{path}":
                return layers if x.shape[:1] == (layers,) else None
        return None

    def _modules(self) -> Iterator[tuple[str, int | None]]:
        """Each tapped module and layer, in the order of the forward pass."""
        for layers, group in itertools.groupby(self.taps.items(), lambda item: item[1].layers):
            modules = dict.fromkeys(path_name(path[:-1]) for path, _ in group)
            for layer in _layers(layers):
                yield from ((module, layer) for module in modules)


def _layers(number: int | None) -> Iterable[int | None]:
    """The layers of a stack; the one None outside of stacks."""
    return [None] if number is None else range(number)


def _by_layer(x: np.ndarray, number: int | None) -> Iterator[tuple[int | None, np.ndarray]]:
    """Each of `_layers` with its part of an array."""
    for layer in _layers(number):
        yield layer, x if layer is None else x[layer]


def shapes(tree: Any) -> Any:
    """What two trees must share for one to take the place of the other."""
    return jax.tree.structure(tree), [x.shape for x in jax.tree.leaves(tree)]


def _named(kind: str, tree: Any) -> dict[tuple[str, str], jax.Array]:
    return {(kind, path): x for path, x in tree_spec.leaves(tree)}


def _one_pass(program: Program, graphdef: nnx.GraphDef, state: State, batch: Any) -> Any:
    return program.one_pass(graphdef, state, batch, loss_scale_of(state))


def _on_inputs(program: Program, graphdef: nnx.GraphDef, state: State, batch: Any, given: dict) -> Any:
    model_state = nnx.traversals.flatten_mapping(state["model_state"]) | given
    state = state | {"model_state": nnx.traversals.unflatten_mapping(model_state)}
    grads, model_state, metrics = _one_pass(program, graphdef, state, batch)
    flat = nnx.traversals.flatten_mapping(model_state)
    own = {path: flat.pop(path) for path in given}
    named = _named("gradient", grads) | _named("state", nnx.traversals.unflatten_mapping(flat))
    return named | {("loss", ""): metrics["loss"]}, own


def _as_trained(program: Program, state: State, batch: Any) -> tuple[dict, State]:
    grads, model_state, metrics = program.gradients(program.graphdef, state, batch, loss_scale_of(state))
    new, _ = program.step(program.graphdef, state, batch)

    def change(new: jax.Array, old: jax.Array) -> jax.Array:
        return new.astype(jnp.float32) - old.astype(jnp.float32)

    named = {("loss", ""): metrics["loss"]} | _named("gradient", grads) | _named("state", model_state)
    named |= _named("optimizer state", new["opt_state"])
    named |= _named("update", jax.tree.map(change, new["params"], state["params"]))
    named |= _named("parameter", new["params"])
    gates = {name: new[name] for name in new.keys() - {*CORE}}
    return named | _named("gate", gates), new


# --- two programs ---------------------------------------------------------------------------------------


class Recorded(NamedTuple):
    """A step of program A, with which other programs are compared.

    Attributes:
      state, batch: before the step, on the host.
      given: the values at A's taps; {} without taps.
      tensors: in the order of the program.
      spread: of each tensor, how far rounding moves it, in both `norms`.
    """

    state: State
    batch: Batch
    given: Given
    tensors: Tensors
    spread: dict[TensorSite, np.ndarray]


def compare(
    a: CompiledProgram, b: CompiledProgram, state: State, batch: Batch, seed: int = 0
) -> tuple[list, State]:
    """The differences of one step, in the order of the program, and A's state after the step.

    Args:
      state: of A, on the host.
      seed: of the movements by one unit in the last place.
    """
    bits = min(a.program.bits, b.program.bits)
    is_quantized = a.program.is_quantized or b.program.is_quantized
    recorded, new = record(a, state, batch, seed, bits, is_quantized)
    return differences(recorded, b), new


def record(
    a: CompiledProgram, state: State, batch: Batch, seed: int, bits: int, is_quantized: bool
) -> tuple[Recorded, State]:
    """A step of a program, what rounding does to it, and the state after it.

    Args:
      state, seed: as in `compare`.
      bits, is_quantized: see `Program`; of the coarser one that will be compared.
    """
    rngs = [np.random.default_rng((seed, i)) for i in range(SEEDS)]

    def moved(bits: int) -> Iterator[State]:
        return (_moved(state, bits, rng) for rng in rngs)

    given, tensors, spread = {}, {}, {}
    if a.taps:
        _, given = a.on_inputs(state, batch, a.nothing())
        tensors, _ = a.on_inputs(state, batch, given)
        runs = (
            a.on_inputs(one, batch, nudged(given, bits, rng))[0]
            for one, rng in zip(moved(bits), rngs, strict=True)
        )
        spread = _spread(tensors, runs)
    trained, new = a.as_trained(state, batch)
    if is_quantized:
        bits = min(bits, FLIPPING_BITS)
    runs = (a.as_trained(one, batch)[0] for one in moved(bits))
    spread |= _at_least_the_quartile(_spread(trained, runs))
    return Recorded(state, batch, given, tensors | trained, spread), new


def _moved(state: State, bits: int, rng: np.random.Generator) -> State:
    """The state with `nudged` weights; with local steps also those of each replica, which take the step."""
    state = state | {part: nudged(state[part], bits, rng) for part in WEIGHTS}
    if not isinstance(local := state["opt_state"], LocalState):
        return state
    own = local.replicas.state
    replicas = PerReplica(own | {"params": nudged(own["params"], bits, rng)})
    return state | {"opt_state": local._replace(replicas=replicas)}


def nudged(tree: Any, bits: int, rng: np.random.Generator) -> Any:
    """Every number moved by one unit in its last place, up or down at random.

    Args:
      bits: of the mantissa whose last place it is, if the number's own has more.
    """

    def one(x: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        wide = x.astype(np.float32)
        _, exponent = np.frexp(wide)
        unit = np.ldexp(np.float32(1), exponent - 1 - min(bits, jnp.finfo(x.dtype).nmant))
        signs = rng.integers(0, 2, x.shape, np.int8) * np.float32(2) - 1
        return np.where(np.isfinite(wide) & (wide != 0), wide + signs * unit, wide).astype(x.dtype)

    return jax.tree.map(one, tree)


def _spread(base: Tensors, runs: Iterable[Tensors]) -> dict[TensorSite, np.ndarray]:
    """How far each tensor is from some runs at most, in both norms."""
    spread = {site: np.zeros(2) for site in base}
    for run in runs:
        spread = {site: np.maximum(found, norms(base[site], run[site])) for site, found in spread.items()}
    return spread


def _at_least_the_quartile(spread: dict[TensorSite, np.ndarray]) -> dict[TensorSite, np.ndarray]:
    """The spreads, with those of amax histories at least the lower quartile of their tensor's.

    A step adds one number to a history, the largest of a tensor. A few runs can all leave such a number
    where it is, although rounding moves it by a tenth in others; they leave few of them.
    """
    histories: dict[str, list[np.ndarray]] = {}
    for site, found in spread.items():
        if site.path.endswith("_amax_history") and np.isfinite(found).all():  # not of zeros
            histories.setdefault(site.path.rpartition("/")[2], []).append(found)
    least = {name: np.quantile(found, 0.25, axis=0, method="lower") for name, found in histories.items()}
    return {
        site: np.maximum(found, least.get(site.path.rpartition("/")[2], 0))
        for site, found in spread.items()
    }


def differences(recorded: Recorded, b: CompiledProgram) -> list[Difference]:
    """How program B differs in a recorded step, in the order of the program."""
    state, batch, given, base, spread = recorded
    on_inputs: Tensors = {}
    if given:
        on_inputs, _ = b.on_inputs(state, batch, given)
    as_trained, _ = b.as_trained(state, batch)
    return _differences(base, on_inputs | as_trained, spread)


def _differences(
    base: Tensors, other: Tensors, spread: Mapping[TensorSite, np.ndarray]
) -> list[Difference]:
    found = []
    for site in [site for site in base if site in other and site.kind != "parameter"]:
        values = norms(base[site], other[site].reshape(base[site].shape))
        # An update is no more exact than the parameters between which it is the difference.
        whole = site._replace(kind="parameter") if site.kind == "update" else site
        units = [_unit(base[one], other[one], base[site]) for one in (site, whole)]
        bounds = FACTOR * np.maximum(spread[site], np.maximum(*units))
        with np.errstate(invalid="ignore"):  # inf / inf: A has zeros, and any move changes them
            larger = int(np.argmax(values / bounds))
        found.append(Difference(site, float(values[larger]), float(bounds[larger]), NORMS[larger]))
    return found


def norms(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The root mean square and the largest magnitude of b - a, relative to the root mean square of a."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    rms, _ = _sizes(a)
    with np.errstate(invalid="ignore", divide="ignore"):
        d = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, b - a)
        found = np.array([np.sqrt(np.mean(d**2)), np.max(np.abs(d), initial=0)]) / rms
    return np.nan_to_num(found, nan=np.inf, posinf=np.inf) if d.any() else np.zeros(2)


def _sizes(x: np.ndarray) -> np.ndarray:
    """The root mean square and the largest magnitude of the finite numbers of an array."""
    x = np.asarray(x, np.float64)
    x = x[np.isfinite(x)]
    return np.array([np.sqrt(np.mean(x**2)), np.max(np.abs(x))]) if x.size else np.zeros(2)


def _unit(a: np.ndarray, b: np.ndarray, relative_to: np.ndarray) -> np.ndarray:
    """One unit in the last place of a, in the coarser dtype of a and b, as `norms` of another array."""
    kinds = [x.dtype for x in (a, b) if jnp.issubdtype(x.dtype, jnp.inexact)]
    unit = 2.0 ** -min([jnp.finfo(kind).nmant for kind in kinds], default=23)
    rms, _ = _sizes(relative_to)
    return unit * (_sizes(a) / rms if rms else np.ones(2))


# --- the operation --------------------------------------------------------------------------------------


def source(compiled: CompiledProgram, site: TensorSite) -> str:
    """The file, line and function of the operation that makes a tensor; "" if it is not found."""
    jaxpr = compiled.traced[site.part].jaxpr.jaxpr
    if site.kind in KINDS:
        outputs = jax.tree.leaves_with_path(compiled.traced[site.part].out_info)
        key = jax.tree_util.DictKey((site.kind, site.path))
        [index] = [i for i, (path, _) in enumerate(outputs) if path[1:] == (key,)]
        eqn = _producer(jaxpr, jaxpr.outvars[index])
    else:
        end = site.kind.removeprefix("gradient of ")
        name = taps.mark(tuple(site.path.split("/")), end)
        if site.kind != end:
            name += " gradient"
        eqn = _named_equation(jaxpr, name)
    return f"{_line(eqn)}: {eqn.primitive.name}" if eqn is not None and _line(eqn) else ""


def _line(eqn: Any) -> str:
    line = source_info_util.summarize(eqn.source_info).removeprefix(f"{ROOT}/")
    return line.rpartition("/site-packages/")[2].replace(".<locals>", "").replace(".<lambda>", "")


def _producer(jaxpr: Any, var: Any) -> Any:
    """The equation that computes a variable, in loops and calls too; None if none has a line."""
    made = [(eqn, index) for eqn in jaxpr.eqns for index, out in enumerate(eqn.outvars) if out is var]
    if not made:
        return None
    [(eqn, index)] = made
    if all(isinstance(operand, jaxpr_core.Literal) for operand in eqn.invars):
        return None
    for inner in jaxpr_core.jaxprs_in_params(eqn.params):
        if len(inner.outvars) == len(eqn.outvars):
            found = _producer(inner, inner.outvars[index])
            if found is not None:
                return found
    if eqn.primitive.name not in PASSED and _line(eqn) and not _line(eqn).startswith(PASSED_FILES):
        return eqn
    for operand in eqn.invars:
        found = _producer(jaxpr, operand)
        if found is not None:
            return found
    return None


def _named_equation(jaxpr: Any, name: str) -> Any:
    """The equation that computes what has this name."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name" and eqn.params["name"] == name:
            return _producer(jaxpr, eqn.invars[0])
        for inner in jaxpr_core.jaxprs_in_params(eqn.params):
            if (found := _named_equation(inner, name)) is not None:
                return found
    return None
