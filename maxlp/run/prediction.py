"""Which recipe will cost the least loss: a ranking from the gradients of a few batches.

    python -m maxlp.lab predict /tmp/run --recipes=fp8_current,int8_all,simulate:format=e3m1

A recipe is measured by the angle between the gradient of all batches together and that of the same weights
in high precision: an error that differs from batch to batch averages out there, as it does in training,
and one that every batch repeats does not. (The relative error counts a gradient of another length too,
which Adam divides out again.) Beside it is what the format alone says, without model and data: the mean
squared error of Gaussian numbers, from which scaling laws for compressed representations derive a format's
capacity.
"""

import ast
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp.core.gradients import Gradients
from maxlp.core.train_state import State, abstract_model, shardings
from maxlp.core.train_step import loss_scale_of
from maxlp.parallel.batches import device_batches
from maxlp.precision import RECIPES, RecipeOptions, make_recipe
from maxlp.precision.gaussian_error import gaussian_mse
from maxlp.run.attribution import distance
from maxlp.run.experiment import resolve_settings
from maxlp.run.reopen import batch_of, open_or_create_run
from maxlp.run.replay import without_recipe
from maxlp.run.settings import Settings
from maxlp.runtime import files


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is known of a recipe before a run.

    Attributes:
      name: as `parse` takes it.
      angle: one minus the cosine of the angle between the summed gradients g and h of the batches, under
        the recipe and in high precision; the recipes are ranked by it.
      error: ``‖g - h‖ / ‖h‖``.
      loss: change of the mean loss of the batches.
      mse: see `gaussian_error.gaussian_mse`.
    """

    name: str
    angle: float
    error: float
    loss: float
    mse: float


def parse(spec: str) -> tuple[str, RecipeOptions]:
    """The recipe and the options of a spec, such as ``simulate:format=e3m1:granularity=row``.

    Raises:
      ValueError: an unknown recipe or option, or a value that does not fit.
    """
    name, *pairs = spec.split(":")
    names, values = [field.name for field in dataclasses.fields(RecipeOptions)], {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in names:
            raise ValueError(
                f"--recipes: {pair!r} of {spec!r} is not OPTION=VALUE; options are {', '.join(names)}"
            )
        values[key] = _literal(value)
    try:
        make_recipe(name, **values)
    except ValueError as error:
        raise ValueError(f"--recipes: {spec!r}: {error}") from None
    return name, RecipeOptions(**values)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def with_recipe(s: Settings, name: str, options: RecipeOptions | None = None) -> Settings:
    """The settings with another recipe, its own options and no rules."""
    options = RecipeOptions() if options is None else options
    precision = dataclasses.replace(s.precision, recipe=name, options=options, rules=())
    return dataclasses.replace(s, precision=precision)


def with_spec(s: Settings, spec: str) -> Settings:
    """The settings with the recipe of a spec, see `parse`; its delayed scales begin as current ones."""
    name, options = parse(spec)
    # Histories are empty here: with `cold_start=False` all scales would be 1, as in a run's first step.
    return with_recipe(s, name, dataclasses.replace(options, cold_start=None))


def fitting(s: Settings) -> list[str]:
    """The names of the recipes that fit the model's sizes."""

    def fits(name: str) -> bool:
        try:
            return with_recipe(s, name).is_quantized
        except ValueError:
            return False

    return [name for name in RECIPES if fits(name)]


# --- the statistic --------------------------------------------------------------------------------------


def predictions(
    s: Settings,
    specs: list[str],
    workdir: Path | None,
    step: int | None,
    num_batches: int,
    note: Callable[[int, int], None] = lambda *_: None,
) -> tuple[int, list[Prediction]]:
    """The number of the step, and the predictions, the smallest angle first.

    Delayed scales are measured as current ones.

    Args:
      specs: of recipes, see `parse`.
      workdir, step: the weights are those before the step, trained in high precision if there is no run;
        see `attribution.evaluator`.
      num_batches: those of this step and of the next ones.
      note: called with the numbers of finished and of all recipes, first with 0.

    Raises:
      ValueError: adapters, a recipe that does not fit the run, or a run without such a step.
    """
    if s.train.lora is not None:  # `_gradient` makes the state besides the parameters anew
        raise ValueError(
            f"config.train.lora.rank={s.train.lora.rank}: predict is for models without adapters; give "
            "such a run or config"
        )
    if s.precision.scalify != "none":
        raise ValueError(
            f"config.precision.scalify={s.precision.scalify}: predict compares recipes, and none can be "
            "combined with it; give a run or config without it"
        )
    if not specs:
        p = s.precision
        raise ValueError(
            "no recipe quantizes a matmul of this run with config.precision.first_blocks="
            f"{p.first_blocks}, last_blocks={p.last_blocks} and min_dim={p.min_dim}; lower them"
        )
    # What replicas and shards send loses the same under every recipe, and has no part in the comparison.
    exact = dataclasses.replace(s.precision, exchange="none", scatter="none", high_precision_from=0)
    s = dataclasses.replace(s, precision=exact)
    chosen = {spec: with_spec(s, spec) for spec in specs}
    for spec, low in chosen.items():
        if not low.is_quantized:
            raise ValueError(f"--recipes: {spec!r} quantizes no matmul of this run; leave it out")
    plain = without_recipe(s)
    with open_or_create_run(plain, workdir, step, same_precision=False) as at:
        state, first, step = batch_of(at, step)
        more = device_batches(at.batches, at.run.mesh, num_batches - 1)
        batches = [first, *(batch for batch, _ in more)]
        note(0, len(chosen))
        high, high_loss = _gradient(plain, state, batches)
        found = []
        for n, (spec, low) in enumerate(chosen.items(), 1):
            grads, loss = _gradient(low, state, batches)
            numbers = {name: float(x) for name, x in jax.jit(distance)(grads, high).items()}
            change, mse = float(loss - high_loss), gaussian_mse(low.precision.make(low.precision.recipe))
            found.append(Prediction(spec, numbers["angle"], numbers["error"], change, mse))
            note(n, len(chosen))
    return step, sorted(found, key=lambda p: p.angle if math.isfinite(p.angle) else math.inf)


def _gradient(s: Settings, state: State, batches: list[Any]) -> tuple[dict, jax.Array]:
    """The sum of the gradients of the batches under the settings, and the mean loss."""
    run = resolve_settings(s)
    graphdef, abstract = abstract_model(run.make_model, run.mesh)

    def model_state() -> dict:
        _, _, rest = nnx.split(run.make_model(nnx.Rngs(0)), nnx.Param, ...)
        return nnx.to_pure_dict(rest)

    fresh = jax.jit(model_state, out_shardings=shardings(abstract["model_state"]))()
    state = state | {"model_state": fresh}
    add = jax.jit(functools.partial(_add, graphdef, run.gradients), donate_argnums=2)
    total = jax.tree.map(jnp.zeros_like, state["params"]), jnp.zeros(())
    for batch in batches:
        total = add(state, batch, total)
    grads, loss = total
    return grads, loss / len(batches)


def _add(
    graphdef: nnx.GraphDef,
    gradients: Gradients,
    state: State,
    batch: Any,
    total: tuple[dict, jax.Array],
) -> tuple[dict, jax.Array]:
    sum_grads, sum_loss = total
    grads, _, metrics = gradients(graphdef, state, batch, loss_scale_of(state))
    return jax.tree.map(jnp.add, sum_grads, grads), sum_loss + metrics["loss"]


# --- output ---------------------------------------------------------------------------------------------


def table(found: list[Prediction]) -> Iterator[str]:
    """A row for each recipe: the ranking by the angle, and that by the Gaussian error.

    The numbers are below the recipes if one of their names leaves too little of 80 columns for them.
    """
    header = f"{'rank':>6}{'1-cos':>10}{'error':>10}{'Δloss':>10}{'rank':>8}{'Gauss MSE':>11}"
    width = max(len("recipe"), *(len(p.name) for p in found))
    fits = width + len(header) <= 80

    def row(name: str, numbers: str) -> str:
        return f"{name:<{width}}{numbers}" if fits else f"{name}\n{numbers}"

    yield row("recipe", header)
    by_mse = sorted(p.mse for p in found)
    for rank, p in enumerate(found, 1):
        numbers = f"{rank:>6}{p.angle:>10.1e}{p.error:>10.1e}{p.loss:>+10.1e}"
        yield row(p.name, f"{numbers}{by_mse.index(p.mse) + 1:>8}{p.mse:>11.1e}")


def write(found: list[Prediction], step: int, folder: Path) -> Path:
    """Writes the predictions as JSON, what is not finite as null; returns the path."""
    path = folder / f"predict_{step}.json"
    recipes = [dataclasses.asdict(p) for p in found]
    files.write_json(path, files.finite({"step": step, "recipes": recipes}))
    return path
