"""Which operand of which matmul of which layer makes low precision differ from high precision.

    python -m maxlp.lab attribute /tmp/run --step=2300

On one batch, each operand that a recipe quantizes (layer; matmul ``fwd``, ``dlhs`` or ``drhs``; tensor) is
switched on alone in a model in high precision, and off alone in the model under the recipe. The switches
are inputs of one compiled program (`precision.switches`), whose memory does not grow with their number.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlp.core.gradients import Batch, Gradients
from maxlp.core.train_state import State
from maxlp.core.train_step import loss_scale_of
from maxlp.nn.stack import find_stacks
from maxlp.parallel import sharding
from maxlp.precision import switches
from maxlp.precision.health import percent
from maxlp.precision.recipes import GEMMS
from maxlp.precision.replace import replace_quant_dots
from maxlp.run.reopen import batch_of, open_or_create_run
from maxlp.run.settings import Settings
from maxlp.runtime import files

Switches = dict[str, np.ndarray]  # path → bool (…layers, 3 matmuls, 2 operands)


class Site(NamedTuple):
    """An operand of a matmul; ``layer`` is None outside of stacks."""

    path: str
    layer: int | None
    gemm: str
    tensor: str

    @property
    def index(self) -> tuple[int, ...]:
        """Where its switch is in the array of its path."""
        layer = () if self.layer is None else (self.layer,)
        return (*layer, list(GEMMS).index(self.gemm), GEMMS[self.gemm].index(self.tensor))

    def __str__(self) -> str:
        return " ".join(str(part) for part in self if part is not None)


@dataclasses.dataclass(frozen=True)
class Effect:
    """What switching a single operand on or off does.

    Attributes:
      loss_on: change of the loss with it alone on.
      error_on: ``‖g - h‖ / ‖h‖``, with g the gradients with it alone on, and h those in high precision.
      angle_on: one minus the cosine of the angle between g and h.
      matmul: relative error of the operand's own matmul with it alone on.
      saturated, underflow: shares of the operand's elements, see `precision.health`.
      loss_off: change of the recipe's loss with it alone off.
      error_off: change of the recipe's ``error`` with it alone off; negative if g then comes nearer to h.
    """

    loss_on: float
    error_on: float
    angle_on: float
    matmul: float
    saturated: float
    underflow: float
    loss_off: float
    error_off: float


@dataclasses.dataclass(frozen=True)
class Attribution:
    """The effects of all sites, and those of all switches together.

    Attributes:
      step: the step whose batch was taken.
      loss: the loss in high precision.
      loss_all: its change under the recipe.
      error_all, angle_all: of the recipe's gradients, as in `Effect`.
    """

    step: int
    loss: float
    loss_all: float
    error_all: float
    angle_all: float
    effects: Mapping[Site, Effect]

    def ranked(self, by: str = "error_on") -> list[tuple[Site, Effect]]:
        """The sites by one of their numbers, the largest first; NaN counts as infinite."""
        order = {site: np.nan_to_num(getattr(e, by), nan=np.inf) for site, e in self.effects.items()}
        return sorted(self.effects.items(), key=lambda item: -order[item[0]])


def sites_of(model: nnx.Module) -> list[Site]:
    """Every operand that a model with switches quantizes, in the order of the layers."""
    plain = {
        (f"{stack}/{path}", i)
        for stack, blocks in find_stacks(model).items()
        for part in blocks.parts
        for path in part.plain
        for i in range(part.start, part.stop)
    }
    found = []
    for path, dot in switches.switch_dots(model).items():
        layers: list[int | None] = [None]
        if dot.on.ndim > 2:
            layers = [i for i in range(dot.on.shape[0]) if (path, i) not in plain]
        found += [Site(path, layer, *kind) for layer in layers for kind in switches.switchable(dot.recipe)]
    return sorted(found, key=lambda site: -1 if site.layer is None else site.layer)


# --- one evaluation -------------------------------------------------------------------------------------


class SwitchEvaluator:
    """The loss and gradients of one batch with given switches, compiled once.

    It must be made and called with the mesh set.

    Args:
      graphdef, gradients: of the run.
      state: of the run; it does not change.
    """

    def __init__(self, graphdef: nnx.GraphDef, gradients: Gradients, state: State, batch: Batch):
        self.graphdef, model_state = replace_quant_dots(graphdef, state, switches.SwitchDot)
        self.state, self.batch = dict(state) | {"model_state": model_state}, batch
        model = nnx.merge(self.graphdef, state["params"], model_state)
        self.sites = sites_of(model)
        self.off = {path: np.zeros(dot.on.shape, bool) for path, dot in switches.switch_dots(model).items()}
        evaluate = functools.partial(_evaluate, self.graphdef, gradients)
        params, replicated = state["params"], sharding.replicated(jax.sharding.get_mesh())
        out = replicated, jax.tree.map(lambda p: p.sharding, params), replicated
        program = jax.jit(evaluate, out_shardings=out).lower(self.state, batch, self.off, params)
        self.compiled = program.compile()
        # With all switches off, the gradients do not depend on what they are compared with.
        _, self.reference, _ = self.compiled(self.state, batch, self.off, params)

    def __call__(self, on: Switches) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """``loss``, ``error`` and ``angle`` of the gradients, and the statistics of each path."""
        numbers, _, statistics = self.compiled(self.state, self.batch, on, self.reference)
        return {name: float(x) for name, x in numbers.items()}, jax.device_get(statistics)


def _evaluate(
    graphdef: nnx.GraphDef,
    gradients: Gradients,
    state: State,
    batch: Batch,
    on: dict[str, jax.Array],
    reference: dict,
) -> tuple[dict[str, jax.Array], dict, dict[str, jax.Array]]:
    model = nnx.merge(graphdef, state["params"], state["model_state"])
    for path, dot in switches.switch_dots(model).items():
        dot.on[...] = on[path]
    _, _, model_state = nnx.split(model, nnx.Param, ...)
    state = state | {"model_state": nnx.to_pure_dict(model_state)}
    grads, model_state, metrics = gradients(graphdef, state, batch, loss_scale_of(state))
    model = nnx.merge(graphdef, state["params"], model_state)
    statistics = {path: dot.statistics for path, dot in switches.switch_dots(model).items()}
    return {"loss": metrics["loss"]} | distance(grads, reference), grads, statistics


def distance(grads: dict, reference: dict) -> dict[str, jax.Array]:
    """Relative error, and one minus the cosine of the angle; scaled so that no square underflows.

    The sums are float32, and a cosine near 1 has steps of 6e-8 there. So 1 - cos is that of
    ‖g - h‖² = (‖g‖ - ‖h‖)² + 2 ‖g‖ ‖h‖ (1 - cos).
    """
    pairs = list(zip(jax.tree.leaves(grads), jax.tree.leaves(reference), strict=True))
    top = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(h)).astype(jnp.float32) for _, h in pairs])
    unit = 1 / jnp.where(top > 0, top, 1.0)

    def total(product: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        scaled = ((g.astype(jnp.float32) * unit, h.astype(jnp.float32) * unit) for g, h in pairs)
        return sum((jnp.sum(product(g, h)) for g, h in scaled), jnp.zeros(()))

    gg, hh = total(lambda g, h: g * g), total(lambda g, h: h * h)
    difference = total(lambda g, h: (g - h) ** 2)
    longer = total(lambda g, h: (g - h) * (g + h)) / (jnp.sqrt(gg) + jnp.sqrt(hh))  # ‖g‖ - ‖h‖
    angle = jnp.maximum(difference - longer**2, 0.0) / (2 * jnp.sqrt(gg * hh))
    return {"error": jnp.sqrt(difference / hh), "angle": angle}


# --- all sites ------------------------------------------------------------------------------------------


def attribution(
    evaluate: SwitchEvaluator, step: int, note: Callable[[int, int], None] = lambda *_: None
) -> Attribution:
    """The effect of every site on the batch of a step.

    Args:
      note: called with the numbers of finished and of all evaluations, first with 0.
    """
    sites = evaluate.sites
    total = 2 + 2 * len(sites)
    note(0, total)  # the first evaluation compiles
    high, _ = evaluate(evaluate.off)
    everything = {path: on.copy() for path, on in evaluate.off.items()}
    for site in sites:
        everything[site.path][site.index] = True
    low, _ = evaluate(everything)
    effects = {}
    for n, site in enumerate(sites):
        alone, statistics = evaluate(_flipped(evaluate.off, site))
        without, _ = evaluate(_flipped(everything, site))
        saturated, underflow, matmul = statistics[site.path][site.index].tolist()
        effects[site] = Effect(
            loss_on=alone["loss"] - high["loss"],
            error_on=alone["error"],
            angle_on=alone["angle"],
            matmul=matmul,
            saturated=saturated,
            underflow=underflow,
            loss_off=without["loss"] - low["loss"],
            error_off=without["error"] - low["error"],
        )
        note(2 * n + 4, total)
    return Attribution(step, high["loss"], low["loss"] - high["loss"], low["error"], low["angle"], effects)


def _flipped(on: Switches, site: Site) -> Switches:
    array = on[site.path].copy()
    array[site.index] ^= True
    return on | {site.path: array}


# --- the batch of a step --------------------------------------------------------------------------------


@contextlib.contextmanager
def evaluator(
    s: Settings, workdir: Path | None, step: int | None, *, same_precision: bool = True
) -> Iterator[tuple[SwitchEvaluator, int]]:
    """The `SwitchEvaluator` of a step's batch, in the state before that step, and the number of the step.

    Args:
      workdir: of a run; None starts a new one from the settings' seed, in a temporary folder.
      step: None takes the step after the newest checkpoint.
      same_precision: whether the settings have the recipe of the run.

    Raises:
      ValueError: no such step, or settings that do not fit the run or quantize nothing.
    """
    if s.precision.scalify != "none":
        raise ValueError(
            f"config.precision.scalify={s.precision.scalify} propagates scales through matmuls, which then "
            "have no switches; give a run or config without it"
        )
    if s.samples_tokens:
        recipe = min((s.recipe(path) for path in s.matmuls), key=lambda recipe: recipe.keep)
        raise ValueError(
            f"config.precision: recipe {recipe.name} with options.keep={recipe.keep} takes gradients of "
            "kernels from a share of the tokens, for which there is no switch; choose another recipe, as "
            "in --recipe=fp8_current"
        )
    if not any(s.recipe(path).gemms for path in s.matmuls):
        raise ValueError(
            f"config.precision.recipe={s.precision.recipe} quantizes no matmul of this run; choose another "
            "one, as in --recipe=fp8_current"
        )
    # The program has three forms of each matmul: it must not grow with depth.
    model, loss = dataclasses.replace(s.model, scan_layers=True), s.loss
    if s.recipe("lm_head").gemms:  # whose statistics are lost in chunks, see `Llama.head`
        loss = dataclasses.replace(loss, **s.family.plain_loss)
    s = dataclasses.replace(s, model=model, loss=loss)
    with open_or_create_run(s, workdir, step, same_precision=same_precision) as at:
        state, batch, step = batch_of(at, step)
        yield SwitchEvaluator(at.graphdef, at.run.gradients, state, batch), step


# --- output ---------------------------------------------------------------------------------------------

COLUMNS = ("Δloss", "error", "1-cos", "matmul", "satur.", "underfl.", "Δloss off", "error off")


def table(found: Attribution, top: int) -> Iterator[str]:
    """The ``top`` sites by the error of the gradients and by that of their own matmul, and all together.

    The numbers are below the site, whose name would leave too little room for them.
    """
    for title, by in (("by error of gradients", "error_on"), ("by error of matmul", "matmul")):
        yield title
        yield "".join(f"{name:>10}" for name in COLUMNS)
        for site, e in found.ranked(by)[:top]:
            yield str(site)
            yield (
                f"{e.loss_on:>+10.1e}{e.error_on:>10.1e}{e.angle_on:>10.1e}"
                f"{e.matmul:>10.1e}{percent(e.saturated):>10}{percent(e.underflow):>10}{e.loss_off:>+10.1e}"
                f"{e.error_off:>+10.1e}"
            )
    yield f"all {len(found.effects):,} together"
    yield f"{found.loss_all:>+10.1e}{found.error_all:>10.1e}{found.angle_all:>10.1e}"


def as_json(found: Attribution) -> dict[str, Any]:
    """The numbers of all sites, in their ranking; what is not finite is null."""
    sites = [site._asdict() | dataclasses.asdict(effect) for site, effect in found.ranked()]
    numbers = {name: value for name, value in vars(found).items() if name != "effects"}
    return files.finite(numbers | {"sites": sites})


PANELS = (  # title, number of an `Effect`, its sign
    ("error of the gradients with this operand alone in low precision", "error_on", 1),
    (
        "reduction of the recipe's error with this operand back in high precision (white: none)",
        "error_off",
        -1,
    ),
    ("error of this operand's own matmul", "matmul", 1),
)


def heat_map(found: Attribution, path: Path) -> None:
    """Draws `PANELS`: a row for each layer, a column for each operand."""
    from matplotlib.figure import Figure  # slow to import

    columns = sorted({(site.path, site.gemm, site.tensor) for site in found.effects})
    rows = sorted({-1 if site.layer is None else site.layer for site in found.effects})
    size = (4 + 0.24 * len(columns), 4.5 + len(PANELS) * max(1.0, 0.2 * len(rows)))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    all_axes = figure.subplots(len(PANELS), 1, sharex=True)
    for axes, (title, name, sign) in zip(all_axes, PANELS, strict=True):
        values = np.full((len(rows), len(columns)), np.nan)
        for site, effect in found.effects.items():
            row = rows.index(-1 if site.layer is None else site.layer)
            values[row, columns.index((site.path, site.gemm, site.tensor))] = sign * getattr(effect, name)
        _panel(axes, values)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylabel("layer")
        axes.set_yticks(
            np.arange(len(rows)) + 0.5, ["-" if row < 0 else str(row) for row in rows], fontsize=7
        )
        axes.invert_yaxis()
    labels = [f"{path.replace('layers/', '')} {gemm} {tensor}" for path, gemm, tensor in columns]
    all_axes[-1].set_xticks(np.arange(len(columns)) + 0.5, labels, rotation=90, fontsize=7)
    with files.naming(path):
        figure.savefig(path, dpi=120)


def _panel(axes: Any, values: np.ndarray) -> None:
    """The positive values in colours on a logarithmic scale of at most four decades."""
    from matplotlib.colors import LogNorm

    shown = np.where(np.isfinite(values) & (values > 0), values, np.nan)
    if np.isfinite(shown).any():
        norm = LogNorm(vmin=max(np.nanmin(shown), np.nanmax(shown) / 1e4), vmax=np.nanmax(shown))
        axes.figure.colorbar(axes.pcolormesh(shown, norm=norm, cmap="viridis"), ax=axes)


def write(found: Attribution, folder: Path) -> list[Path]:
    """Writes the numbers and the heat map; returns the paths."""
    numbers, picture = (folder / f"attribute_{found.step}.{end}" for end in ("json", "png"))
    files.write_json(numbers, as_json(found))
    heat_map(found, picture)
    return [numbers, picture]
