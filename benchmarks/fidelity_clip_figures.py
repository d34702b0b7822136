"""Tables and figures of the measurements of `fidelity_clip.py`.

python benchmarks/fidelity_clip.py precision spikes layer_scale --draw
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fidelity_figures import (
    COLORS,
    POLICY,
    Runs,
    draw_spikes,
    legend_below,
    plus_minus,
    predicted,
    print_table,
    running,
    save,
)
from matplotlib.figure import Figure

from maxlp.monitoring import spike_records, spikes
from maxlp.runtime.messages import counted

SHIFTS, GROWTH = (130, 200), 30.0  # at each of these steps the gradients grow by this factor
STEADY = 60  # the first step that can count as a spike
LARGE = dataclasses.replace(POLICY, rms_threshold=5.0)  # chosen after the runs: see docs/fidelity.md
AFTER = 16  # steps over which losses are averaged, before and after a shift


def show(experiment: str, runs: Runs, folder: Path) -> None:
    """Prints the tables and draws `folder/fidelity_clip_<experiment>.png`."""
    if runs:
        figure = Figure(figsize=(12, 4.6), layout="constrained", facecolor="white")
        SHOW[experiment](runs, figure)
        save(figure, folder / f"fidelity_clip_{experiment}.png")


# --- top-1 in every precision -------------------------------------------------------------------------


def precision(runs: Runs, figure: Figure) -> None:
    base = runs["float32"]
    left, right = figure.subplots(1, 2, width_ratios=[1.6, 1])
    rows = []
    for color, (name, seeds) in zip(COLORS, runs.items(), strict=False):
        top1, top5 = (
            np.array([100 * run[key] for _, run in sorted(seeds.items())]) for key in ("top1", "top5")
        )
        right.plot(top1, [name] * len(top1), "o", color=color, alpha=0.8)
        row = [name, plus_minus(top1, ".1f"), ", ".join(f"{t:.1f}" for t in top1), plus_minus(top5, ".1f")]
        both = sorted(seed for seed in seeds if seed in base and name != "float32")
        if both:
            differences = np.array([100 * (seeds[s]["top1"] - base[s]["top1"]) for s in both])
            row += [plus_minus(differences, "+.1f"), ", ".join(f"{d:+.1f}" for d in differences)]
            curves = np.array([running(np.subtract(seeds[s]["loss"], base[s]["loss"]), 2) for s in both])
            steps = 20 * np.arange(1, curves.shape[1] + 1)
            left.plot(steps, curves.mean(0), color=color, label=f"{name}, {counted(len(both), 'seed')}")
            left.fill_between(steps, curves.min(0), curves.max(0), color=color, alpha=0.15, lw=0)
        rows.append(row + [""] * (6 - len(row)))
    header = ["variant", "top-1 (%)", "each seed", "top-5 (%)", "top-1 minus float32", "each seed"]
    print_table(header, rows)
    left.axhline(0, color="black", linewidth=0.8)
    left.set_title("training loss minus that of float32", loc="left")
    left.set_xlabel("step")
    left.set_ylabel("running mean of 5 records\nline: mean of the seeds; band: range")
    legend_below(figure, left)
    right.set_title("top-1 on the validation typeface, %", loc="left")
    right.invert_yaxis()


# --- spikes -------------------------------------------------------------------------------------------


def loss_spikes(run: dict[str, Any]) -> list[int]:
    losses = np.array(run["loss"])
    steps = np.arange(STEADY - POLICY.min_history, len(losses))
    return [spike.step for spike in spike_records.find_spikes(steps, losses[steps], POLICY)]


def rms_spikes(rms: list[float], policy: spikes.SpikeConfig) -> list[int]:
    steps = np.arange(STEADY - policy.lead, len(rms))
    return spike_records.find_rms_spikes(steps, np.array(rms)[steps], policy)


def lasting(losses: list[float], shift: int) -> float:
    """The mean loss in the steps after a shift, minus that in the steps before it."""
    loss = np.array(losses)
    return float(loss[shift + 1 : shift + 1 + AFTER].mean() - loss[shift - AFTER : shift].mean())


def shifts(runs: Runs, figure: Figure) -> None:
    rows = []
    for name, seeds in runs.items():
        found = {seed: loss_spikes(run) for seed, run in sorted(seeds.items())}
        row = [name, f"{sum(map(len, found.values()))} ({', '.join(str(len(f)) for f in found.values())})"]
        for policy in (POLICY, LARGE):
            predictions = [
                predicted(found[s], rms_spikes(run["rms_patch"], policy), len(run["loss"]), STEADY)
                for s, run in sorted(seeds.items())
            ]
            row += [f"{sum(f.predicted for f in predictions)} of {sum(f.loss_spikes for f in predictions)}"]
            row += [f"{sum(f.by_chance for f in predictions):.1f}"]
        rises = [[lasting(run["loss"], shift) for run in seeds.values()] for shift in SHIFTS]
        row += [", ".join(f"{np.mean(values):+.2f}" for values in rises)]
        row += [plus_minus(np.array([*final_loss(seeds).values()]), ".2f")]
        rows.append(row)
    header = ["optimizer", "loss spikes (each seed)"]
    for policy in (POLICY, LARGE):
        header += [f"preceded by RMS_t > {policy.rms_threshold}", "by chance"]
    print_table([*header, "the shifts raise the loss by", "final loss"], rows)

    figure.set_size_inches(14, 7)
    below = draw_spikes(figure, runs, "rms_patch", loss_spikes, [*SHIFTS], f"gradients × {GROWTH:g}")
    below[0].set_ylim(0.1, 20)
    below[0].set_ylabel("RMS_t of the patch embedding (log)")


# --- layer-scale --------------------------------------------------------------------------------------

FORMS = ("float32", "fp8_current", "e3m1")


def layer_scale(runs: Runs, figure: Figure) -> None:
    rows = []
    left, right = figure.subplots(1, 2)
    common = set.intersection(*(set(seeds) for seeds in runs.values()))
    for name, seeds in runs.items():
        form, start = name.split(", ")
        color, line = COLORS[FORMS.index(form)], "-" if start == "from zero" else "--"
        last, base = final_loss(seeds), final_loss(runs.get(f"float32, {start}", {}))
        over = [100 * (last[seed] / base[seed] - 1) for seed in last if seed in base and form != "float32"]
        row = [form, start, str(len(last)), plus_minus(np.array([*last.values()]), ".2f")]
        row += [", ".join(f"{percent:+.1f} %" for percent in over)]
        row += [plus_minus(np.array([100 * run["top1"] for run in seeds.values()]), ".1f")]
        sizes = {key: np.mean([run["after"][key] for run in seeds.values()], 0) for key in ("mean", "max")}
        row += [f"{sizes['mean'][0]:.2f}, {sizes['mean'][-1]:.2f}", f"{sizes['max'][-1]:.1f}"]
        rows.append(row)
        drawn = [seeds[seed] for seed in common]
        curve = np.mean([running(np.array(run["loss"]), 4) for run in drawn], 0)
        left.plot(curve, line, color=color, label=f"{name}, mean of {counted(len(drawn), 'seed')}")
        size_L = np.mean([run["after"]["mean"] for run in drawn], 0)
        right.plot(np.arange(1, len(size_L) + 1), size_L, f"o{line}", color=color, markersize=4)
    header = ["format", "layer-scale", "seeds", "final loss", "relative to float32, each seed", "top-1 (%)"]
    print_table([*header, r"mean of \|x\| after the first and the last block", r"largest \|x\|"], rows)
    left.set_title("training loss, running mean of 9 steps; common seeds", loc="left")
    left.set_xlabel("step")
    legend_below(figure, left)
    right.set_title("mean of |x| after each block, at the end of training", loc="left")
    right.set_ylabel("log scale")
    right.set_yscale("log")
    right.set_xlabel("block of the image tower")


def final_loss(seeds: dict[str, dict]) -> dict[str, float]:
    return {seed: float(np.mean(run["loss"][-AFTER:])) for seed, run in sorted(seeds.items())}


SHOW: dict[str, Callable[[Runs, Figure], None]] = {
    "precision": precision,
    "spikes": shifts,
    "layer_scale": layer_scale,
    "layer_scale_deep": layer_scale,
}
