"""Which learning rates can each recipe take, and does sharpness announce a divergence? A tiny Llama.

    python benchmarks/stability_sweep.py              # run it again to continue
    python benchmarks/stability_sweep.py --only bf16 fp8_delayed
    python benchmarks/stability_sweep.py --report     # the table and the figure of what has been run

`configs/llama/tiny.py` with 2 layers on bytes, 150 steps of 256 tokens, at a constant rate after 10 steps
of warm-up, without clipping. Each recipe trains at each rate of `EXPONENTS` with each of `SEEDS`, which set
the weights and the order of the data. Rate and seed are inputs of the compiled step, so that a recipe is
compiled once; finished runs are kept as in `optimizers_fair.py`. On two shared CPU cores a run takes one to
seven seconds, the first of a recipe half a minute more.

    diverged   from some step to the end of the run, the mean of `WINDOW` losses is more than `RISE` nats
               above the lowest such mean before it, or not finite
    onset      the first step of the first of these windows
    usable     a rate at which no seed diverged, and whose mean validation loss is at most `MARGIN` nats
               above that of the recipe's best rate

Sharpness (`maxlp.families.llama.sharpness`) is measured after every step, on one validation batch. It rises
before a step if its mean over the `WINDOW` steps before it is above that over the `WINDOW` steps before
those.

Criteria, written before the runs (but for a trial of 30 steps of one layer):

1. FP8 (`fp8_current` and `fp8_delayed`) has fewer usable rates than bf16.
2. Sharpness rises before the onset in at least 3 of 4 diverged runs, and before the same steps of runs that
   did not diverge (all rates and seeds of the recipe) in at most half.
"""

import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fidelity_figures
import jax
import numpy as np
from fidelity_runs import RESULTS, Data, Trainer, Watch
from flax import nnx
from matplotlib.figure import Figure
from optimizers_fair import QUICK, Plan, command, initial_state, run_name

from maxlp.core.train_state import State
from maxlp.families.llama.sharpness import last_token, sharpness
from maxlp.parallel.batches import global_batch
from maxlp.runtime import files

EXPONENTS = tuple(range(-12, 1))  # rates 2^-12 = 0.00024 to 1
SEEDS = (1, 2, 3, 4, 5)
WINDOW, RISE, MARGIN = 10, 0.5, 0.2

BASE: dict[str, Any] = {
    "model.num_layers": 2,
    "model.vocab_size": 512,
    "data.tokenizer": "bytes",
    "data.seq_len": 32,
    "data.shuffle_tokens": 2**18,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 10,
    "optimizer.clip_norm": 0.0,
    "train.total_steps": 150,
}
RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8_delayed": {"precision.recipe": "fp8_delayed", "precision.options": {"history": 16}},
    "fp8_current": {"precision.recipe": "fp8_current"},
    # Lee et al. 2024 (arXiv:2405.18710): mantissa bits are masked, no scales.
    **{
        f"e8m{bits}": {
            "precision.recipe": "simulate",
            "precision.options": {
                "format": f"e8m{bits}",
                "granularity": "unscaled",
                "rounding": "truncate",
            },
        }
        for bits in (3, 2, 1)
    },
}


# Exponent of the rate → its runs: arrays "loss", "sharpness" (of each step) and "validation", and "onset".
Runs = dict[int, list[dict[str, Any]]]


# --- runs ---------------------------------------------------------------------------------------------


def run_recipe(recipe: str, plan: Plan, trainer: Callable[[str], Trainer], data: Data) -> None:
    """Makes the missing runs of a recipe: all rates with one seed, then those with the next."""
    watch = None
    for seed in plan.seeds:
        for exponent in plan.start:
            if plan.measured(recipe, run_name(exponent, seed)):
                continue
            start, run = time.time(), trainer(recipe)
            watch = watch or watch_sharpness(run)
            batches = data.batches(seed, run.settings.train.total_steps)
            state, records = run.train(initial_state(run, exponent, seed), batches, watch)
            loss = run.evaluate(state)["loss"]
            found = {key: records[key] for key in ("loss", "sharpness")} | {"validation": loss}
            plan.save(recipe, run_name(exponent, seed), files.finite(found))
            taken = time.time() - start
            print(f"{recipe}, rate 2^{exponent}, seed {seed}: {loss:.4f} ({taken:.0f} s)", flush=True)


def watch_sharpness(run: Trainer) -> Watch:
    """The sharpness of the first validation batch, in the recipe's own precision."""
    batch = global_batch(run.data.validation_batches[0], run.mesh)

    @jax.jit
    def measure(params: Any, model_state: Any) -> dict[str, jax.Array]:
        model = nnx.merge(run.graphdef, params, model_state)
        return {"sharpness": sharpness(*last_token(model, batch))}

    def watch(state: State) -> dict[str, jax.Array]:
        with jax.set_mesh(run.mesh):
            return measure(state["params"], state["model_state"])

    return watch


# --- evaluation of the runs ---------------------------------------------------------------------------


def onset(losses: np.ndarray) -> int | None:
    """The onset of a divergence, as defined at the top of the file; None for a run that did not diverge.

    Args:
      losses: of each step, NaN where not finite.
    """
    means = np.convolve(np.where(np.isnan(losses), np.inf, losses), np.ones(WINDOW) / WINDOW, "valid")
    above = means > np.minimum.accumulate(means) + RISE
    above |= np.isinf(means)
    if not above[-1]:
        return None
    return 0 if above.all() else int(np.flatnonzero(~above)[-1]) + 1


def rises(sharpnesses: np.ndarray, step: int) -> bool:
    """Whether sharpness rises before a step, as defined at the top of the file.

    Args:
      step: at least two windows after the first.
    """
    before, last = sharpnesses[step - 2 * WINDOW : step].reshape(2, WINDOW).mean(1)
    return bool(last > before)


def outcomes(recipe: str, plan: Plan) -> Runs:
    """The finished runs."""
    found: Runs = {}
    for exponent in plan.start:
        for seed in plan.seeds:
            if run := plan.measured(recipe, run_name(exponent, seed)):
                arrays = {key: np.array(run[key], float) for key in ("loss", "sharpness", "validation")}
                found.setdefault(exponent, []).append(arrays | {"onset": onset(arrays["loss"])})
    return found


def usable(runs: Runs) -> list[int]:
    """The exponents of the usable rates, as defined at the top of the file."""
    sound = {
        exponent: float(np.mean([run["validation"] for run in of_rate]))
        for exponent, of_rate in runs.items()
        if all(run["onset"] is None for run in of_rate)
    }
    best = min((loss for loss in sound.values() if math.isfinite(loss)), default=math.inf)
    return [exponent for exponent, loss in sound.items() if loss <= best + MARGIN and math.isfinite(loss)]


def warnings(runs: Runs) -> tuple[list[bool], list[bool]]:
    """Whether sharpness rises before each onset, and before the same steps of runs that did not diverge."""
    every = [run for of_rate in runs.values() for run in of_rate]
    late = [run for run in every if run["onset"] is not None and run["onset"] >= 2 * WINDOW]
    others = [run for run in every if run["onset"] is None]
    diverged = [rises(run["sharpness"], run["onset"]) for run in late]
    return diverged, [rises(other["sharpness"], run["onset"]) for run in late for other in others]


# --- the report ---------------------------------------------------------------------------------------


def report(plan: Plan, figure: Path) -> None:
    """Prints the table of the recipes that have been run and whether the criteria are met, and draws."""
    found = {recipe: runs for recipe in plan.methods if (runs := outcomes(recipe, plan))}
    missing = [recipe for recipe in plan.methods if recipe not in found]
    if missing:
        print("not run yet: " + ", ".join(missing))
    if not found:
        return
    header = ["recipe", "runs", "usable rates", *(f"2^{exponent}" for exponent in plan.start)]
    fidelity_figures.print_table(header, [row(recipe, runs, plan) for recipe, runs in found.items()])
    print("\nAt each rate: validation loss, mean of the seeds (diverged runs).\n")
    print("\n".join(criteria(found)))
    draw(found, figure)


def row(recipe: str, runs: Runs, plan: Plan) -> list[str]:
    chosen, cells = usable(runs), []
    for exponent in plan.start:
        of_rate = runs.get(exponent, [])
        count = sum(run["onset"] is not None for run in of_rate)
        loss = f"{np.mean([run['validation'] for run in of_rate]):.3f}" if of_rate else ""
        cells.append(f"{loss} ({count} of {len(of_rate)})" if count else loss)
    share = f"{sum(map(len, runs.values()))} of {len(plan.start) * len(plan.seeds)}"
    span = f"{len(chosen)}: " + ", ".join(f"2^{exponent}" for exponent in chosen) if chosen else "none"
    return [recipe, share, span, *cells]


def criteria(found: dict[str, Runs]) -> list[str]:
    lines = []
    for recipe in ("fp8_current", "fp8_delayed"):
        if {recipe, "bf16"} <= found.keys():
            both = found[recipe].keys() & found["bf16"].keys()
            own, base = (len(both.intersection(usable(found[name]))) for name in (recipe, "bf16"))
            met = "met" if own < base else "not met"
            lines.append(f"* of {len(both)} rates {own} are usable with {recipe}, {base} with bf16: {met}")
    pairs = zip(*[warnings(runs) for runs in found.values()], strict=True)
    diverged, others = (list(itertools.chain(*flags)) for flags in pairs)
    if not diverged:
        return [*lines, "* sharpness: no run diverged late enough"]
    met = np.mean(diverged) >= 0.75 and (not others or np.mean(others) <= 0.5)
    counts = [f"{sum(flags)} of {len(flags)}" for flags in (diverged, others)]
    return [
        *lines,
        f"* sharpness rises before {counts[0]} onsets, and before {counts[1]} of the same steps "
        f"in other runs: {'met' if met else 'not met'}",
    ]


def draw(found: dict[str, Runs], path: Path) -> None:
    """Share of diverged runs, and validation losses with the usable rates marked, over the rate."""
    figure = Figure(figsize=(12, 4.4), layout="constrained", facecolor="white")
    shares, losses = figure.subplots(1, 2)
    for color, (recipe, runs) in zip(fidelity_figures.COLORS, found.items(), strict=False):
        exponents = sorted(runs)
        diverged = [np.mean([run["onset"] is not None for run in runs[exponent]]) for exponent in exponents]
        means = np.array([np.mean([run["validation"] for run in runs[exponent]]) for exponent in exponents])
        chosen = np.isin(exponents, usable(runs))
        shares.plot(exponents, diverged, color=color, marker="o", alpha=0.7, label=recipe)
        losses.plot(exponents, means, color=color, linewidth=1, alpha=0.7)
        losses.plot(np.array(exponents)[chosen], means[chosen], "o", color=color)
    shares.set(xlabel="learning rate, log2", ylabel="share of diverged runs", ylim=(-0.03, 1.03))
    losses.set(xlabel="learning rate, log2", ylabel="validation loss, nats per byte\n(dots: usable rates)")
    losses.set_yscale("log")
    fidelity_figures.legend_below(figure, shares)
    fidelity_figures.save(figure, path)


def main() -> None:
    quick = {"base": BASE | QUICK | {"train.total_steps": 30}, "start": (-7, -1), "seeds": (1, 2)}
    plan = Plan(RESULTS / "stability_sweep", BASE, RECIPES, EXPONENTS, seeds=SEEDS, validation_batches=32)
    command(plan, __doc__, quick | {"validation_batches": 2}, run_recipe, report)


if __name__ == "__main__":
    main()
