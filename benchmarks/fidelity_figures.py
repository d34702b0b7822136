"""Tables and figures of the measurements of `fidelity.py`.

python benchmarks/fidelity.py precision --draw
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from maxlp.monitoring import spikes
from maxlp.monitoring.spike_records import PredictedSpikes, count_predicted, find_rms_spikes, find_spikes
from maxlp.runtime.messages import counted

# variant → seed → measurements, of which "validation" is the validation loss
Runs = dict[str, dict[str, dict[str, Any]]]

COLORS = ["#2f6db3", "#e07b1a", "#3a9a5c", "#c8322b", "#7d5ba6", "#1aa3b0", "#8a6d3b", "#d45d9e", "#555555"]
COLORS += ["#9ac43c", "#222a6b", "#e3b505", "#b0a8d8"]
BROKEN = [start + i for start in (120, 165, 210, 255) for i in range(4)]  # steps with random tokens
LINEAR_BELOW = 0.01  # nats per token; differences are drawn on a log scale above
WARMED_UP = 60  # the first step that can count as a spike
POLICY = spikes.SpikeConfig()  # as in training: 3.2 σ above the mean of 64 losses; RMS_t above 1.8


def show(experiment: str, runs: Runs, folder: Path, baseline: Runs) -> None:
    """Prints the table and draws `folder/fidelity_<experiment>.png`.

    Args:
      baseline: the variant to compare with, if the experiment does not contain it itself.
    """
    runs = baseline | runs
    if not runs:
        return
    figure = Figure(figsize=(12, 4.6), layout="constrained", facecolor="white")
    SHOW[experiment](runs, figure)
    save(figure, folder / f"fidelity_{experiment}.png")


# --- validation loss relative to the first variant ----------------------------------------------------


def compared(runs: Runs, figure: Figure) -> None:
    base_name, base = next(iter(runs.items()))
    rows = []
    for name, seeds in runs.items():
        losses = np.array([run["validation"] for run in seeds.values()])
        both = [seed for seed in seeds if seed in base]
        differences = np.array([seeds[seed]["validation"] - base[seed]["validation"] for seed in both])
        row = [name, str(len(losses)), plus_minus(losses)]
        if name == base_name or not both:
            row += ["", "", ""]
        else:
            relative = math.exp(differences.mean()) - 1
            row += [plus_minus(differences, "+.4f"), signed(differences), f"{100 * relative:+.2f} %"]
        rows.append(row)
    header = ["variant", "seeds", "validation loss", f"minus {base_name}", "of each seed", "perplexity"]
    print_table(header, rows)

    left, right = figure.subplots(1, 2, width_ratios=[1.6, 1])
    for color, (name, seeds) in zip(COLORS, list(runs.items())[1:], strict=False):
        both = [seed for seed in seeds if seed in base]
        if not both:
            continue
        curves = np.array([running(np.subtract(seeds[s]["loss"], base[s]["loss"])) for s in both])
        left.plot(curves.mean(0), color=color, label=f"{name}, {counted(len(both), 'seed')}")
        left.fill_between(
            range(curves.shape[1]), curves.min(0), curves.max(0), color=color, alpha=0.15, lw=0
        )
        held = [seeds[s]["validation"] - base[s]["validation"] for s in both]
        right.plot(held, [name] * len(held), "o", color=color, alpha=0.8)
    left.axhline(0, color="black", linewidth=0.8)
    left.set_yscale("symlog", linthresh=LINEAR_BELOW)
    right.axvline(0, color="black", linewidth=0.8)
    left.set_title(f"training loss minus that of {base_name}, mean of 21 steps", loc="left")
    left.set_xlabel("step")
    left.set_ylabel(
        f"nats per token (symlog: linear below {LINEAR_BELOW})\nline: mean of the seeds; band: range"
    )
    legend_below(figure, left)
    right.set_title(f"validation loss minus that of {base_name}", loc="left")
    right.invert_yaxis()


# --- spikes -------------------------------------------------------------------------------------------


def loss_spikes(run: dict) -> list[int]:
    """Steps of the loss spikes after the warm-up, without those at broken batches."""
    losses = np.array(run["loss"])
    steps = np.arange(len(losses))[WARMED_UP - POLICY.min_history :]
    steps = np.setdiff1d(steps, BROKEN if "rms_hidden" in run else [])
    return [spike.step for spike in find_spikes(steps, losses[steps], POLICY)]


def after_effect(run: dict) -> float:
    """Mean loss of the 8 batches after each stretch of broken ones, minus that of the 16 before it."""
    loss = np.array(run["loss"])
    before = [loss[i - 16 : i].mean() for i in BROKEN if i - 1 not in BROKEN]
    after = [loss[i + 1 : i + 9].mean() for i in BROKEN if i + 1 not in BROKEN]
    return float(np.mean(after) - np.mean(before))


def rms_spikes(run: dict) -> list[int]:
    """Steps at which the largest RMS_t of the kernels in the blocks begins to stand out."""
    rms = np.array(run["rms_hidden"])
    begin = WARMED_UP - POLICY.lead
    return find_rms_spikes(np.arange(begin, len(rms)), rms[begin:], POLICY)


def predicted(loss_steps: list[int], rms_steps: list[int], steps: int, begin: int) -> PredictedSpikes:
    """How many loss spikes follow an RMS_t spike, in the steps from ``begin`` on."""
    return count_predicted(
        [step - begin for step in loss_steps], [step - begin for step in rms_steps], steps - begin, POLICY
    )


def optimizers(runs: Runs, figure: Figure) -> None:
    rows = []
    for name, seeds in runs.items():
        counts = [len(loss_spikes(run)) for run in seeds.values()]
        predictions = [
            predicted(loss_spikes(run), rms_spikes(run), len(run["loss"]), WARMED_UP)
            for run in seeds.values()
            if "rms_hidden" in run
        ]
        row = [name, str(len(seeds)), plus_minus(np.array([run["validation"] for run in seeds.values()]))]
        row += [f"{sum(counts)} ({', '.join(map(str, counts))})"]
        if predictions:
            hits, chance = sum(f.predicted for f in predictions), sum(f.by_chance for f in predictions)
            row += [plus_minus(np.array([after_effect(run) for run in seeds.values()]), "+.3f")]
            row += [f"{hits} of {sum(counts)}", f"{chance:.1f}"]
            row += [f"{max(max(run['rms_hidden'][WARMED_UP:]) for run in seeds.values()):.1f}"]
        rows.append(row + [""] * (8 - len(row)))
    header = ["optimizer", "seeds", "validation loss", "loss spikes (each seed)", "after-effect"]
    print_table([*header, "after an RMS_t spike", "by chance", "largest RMS_t"], rows)

    figure.set_size_inches(12, 7)
    runs = {name: seeds for name, seeds in runs.items() if "rms_hidden" in next(iter(seeds.values()))}
    below = draw_spikes(figure, runs, "rms_hidden", loss_spikes, BROKEN, "random tokens")
    below[0].set_ylabel("largest RMS_t of the kernels in the blocks (log)")


# --- Smooth-SwiGLU ------------------------------------------------------------------------------------


def smooth_swiglu(runs: Runs, figure: Figure) -> None:
    base = runs["bf16"]
    amax = [s["amax"] for run in runs.get("fp8_delayed", {}).values() for s in run["stages"] if "amax" in s]
    num_stages = len(next(iter(base.values()))["stages"])
    size = np.array(amax).reshape(-1, num_stages).mean(0) if amax else 16.0 ** np.arange(num_stages)
    rows = []
    left, right = figure.subplots(1, 2)
    for color, (name, seeds) in zip(COLORS, runs.items(), strict=False):
        held = {s: np.array([stage["validation"] for stage in run["stages"]]) for s, run in seeds.items()}
        if name == "bf16":
            values = np.array(list(held.values()))
            rows.append([f"{name} (the loss itself)", *[f"{v:.3f}" for v in values.mean(0)]])
            continue
        differences = np.array(
            [held[s] - [stage["validation"] for stage in base[s]["stages"]] for s in held if s in base]
        )
        rows.append([name, *[plus_minus(column, "+.3f") for column in differences.T]])
        left.plot(
            size,
            np.maximum(differences.mean(0), 1e-4),
            "o-",
            color=color,
            label=f"{name}, {counted(len(differences), 'seed')}",
            markersize=4,
        )
        curves = []
        for s, run in seeds.items():
            train = [np.concatenate([stage["loss"] for stage in r["stages"]]) for r in (run, base[s])]
            curves.append(train[0] - train[1])
        right.plot(np.mean(curves, 0), color=color, linewidth=1)
    print_table(["largest product of the gates", *[f"{x:.1e}" for x in size]], rows)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("largest product of the gates (log)")
    left.set_title("validation loss minus that of bf16", loc="left")
    left.set_ylabel("nats per token, mean of the seeds (log; at least 1e-4)")
    legend_below(figure, left)
    right.set_xlabel("step; the aligned channel grows 16-fold every 15 steps")
    right.set_title("training loss minus that of bf16", loc="left")


# --- error of the weight gradient ---------------------------------------------------------------------


def weight_gradient(runs: Runs, figure: Figure) -> None:
    table: dict[tuple[str, str], dict[int, float]] = {}
    for key, seeds in runs.items():
        recipe, kind, tokens = key.split(", ")
        mean = float(np.mean([run["error"] for run in seeds.values()]))
        table.setdefault((kind, recipe), {})[int(tokens.removeprefix("2^"))] = mean
    exponents = sorted({e for row in table.values() for e in row})
    rows = [[k, r, *[f"{row[e]:.4f}" for e in exponents]] for (k, r), row in table.items()]
    print_table(["data", "recipe", *[f"2^{e} tokens" for e in exponents]], rows)
    kinds = list(dict.fromkeys(kind for kind, _ in table))
    for axes, kind in zip(
        figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0], kinds, strict=True
    ):
        recipes = [recipe for k, recipe in table if k == kind]
        for color, recipe in zip(COLORS, recipes, strict=False):
            row = table[kind, recipe]
            axes.plot(
                [2.0**e for e in row], list(row.values()), "o-", color=color, label=recipe, markersize=4
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(kind, loc="left")
        axes.set_xlabel("tokens summed over (log)")
    figure.axes[0].set_ylabel("relative error of the kernel's gradient (log)")
    legend_below(figure, figure.axes[0])


SHOW: dict[str, Callable[[Runs, Figure], None]] = {
    "precision": compared,
    "recipes": compared,
    "nvfp4": compared,
    "nvfp4_tokens": compared,
    "scalify": compared,
    "optimizers": optimizers,
    "smooth_swiglu": smooth_swiglu,
    "weight_gradient": weight_gradient,
}


# --- helpers ------------------------------------------------------------------------------------------


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend for the figure, where there is no data: the entries of these axes."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(len(labels), int(13 * figure.get_figwidth() / (max(map(len, labels)) + 6)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def draw_spikes(
    figure: Figure,
    runs: Runs,
    rms: str,
    find: Callable[[dict[str, Any]], list[int]],
    damaged: list[int],
    damage: str,
) -> list[Axes]:
    """Draws the training losses of each variant with the spikes marked, and RMS_t below them.

    Args:
      rms: the key of RMS_t in a run.
      find: the steps of the spikes of a run.
      damaged, damage: the steps to shade, and what happened in them.

    Returns:
      The axes of RMS_t of each variant.
    """
    grid = figure.subplots(2, len(runs), sharex=True, sharey="row", squeeze=False)
    for (top, bottom), (name, seeds) in zip(grid.T, runs.items(), strict=True):
        for color, (seed, run) in zip(COLORS, sorted(seeds.items()), strict=False):
            top.plot(run["loss"], color=color, linewidth=0.9, label=f"seed {seed}")
            where = find(run)
            top.plot(where, [run["loss"][i] for i in where], "v", color=color, markersize=6)
            bottom.plot(run[rms], color=color, linewidth=0.9)
        bottom.axhline(POLICY.rms_threshold, color="black", linewidth=0.8, linestyle=":")
        for axes in (top, bottom):
            shade(axes, damaged, damage)
        top.set_title(name, loc="left")
        bottom.set_yscale("log")
        bottom.set_xlabel("step")
    grid[0, 0].set_ylabel("training loss, spikes marked")
    legend_below(figure, grid[0, 0])
    return list(grid[1])


def shade(axes: Axes, steps: list[int], label: str) -> None:
    """Shades each stretch of successive steps."""
    begins = [step for step in steps if step - 1 not in steps]
    ends = [step for step in steps if step + 1 not in steps]
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        axes.axvspan(
            begin - 0.5, end + 0.5, color="#c8322b", alpha=0.15, lw=0, label=None if number else label
        )


def save(figure: Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.grid(True, color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def running(values: np.ndarray, half: int = 10) -> np.ndarray:
    """The mean of each value and up to ``half`` neighbors on each side."""
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def plus_minus(values: np.ndarray, form: str = ".4f") -> str:
    """Mean ± sample standard deviation."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{values.mean():{form}} ± {values.std(ddof=1):{form.lstrip('+')}}"


def signed(values: np.ndarray) -> str:
    return ", ".join(f"{v:+.4f}" for v in values)


def print_table(header: list[str], rows: list[list[str]]) -> None:
    print(f"| {' | '.join(header)} |")
    print(f"|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
