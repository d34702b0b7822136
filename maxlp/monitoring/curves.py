"""Draws `loss.png` from the files of a run: losses, learning rate, gradient norm, throughput.

A new panel is one function and one entry in `PANELS`.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maxlp.monitoring.run_record import Run, tail
from maxlp.monitoring.spikes import Spike
from maxlp.runtime.files import naming
from maxlp.runtime.messages import counted, rounded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEGEND_COLUMNS = 3
SMOOTHED_POINTS = 2000  # of a curve: more than the picture has columns of pixels
BLUE, ORANGE, RED, GREY = "#2f6db3", "#e07b1a", "#c8322b", "#8a8a8a"


def plot_curves(run: Run) -> Path | None:
    """Draws `loss.png`; returns its path, or None if no training loss has been recorded yet."""
    from matplotlib.figure import Figure  # slow to import; training needs it only at the end

    if not len(run.series("train/loss")[0]):
        return None
    rows = math.ceil(len(PANELS) / 3)
    figure = Figure(figsize=(12, 4.6 + 2.4 * rows), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(1 + rows, 3, height_ratios=[2.2] + [1] * rows)
    loss_panel(figure.add_subplot(grid[0, :]), run)
    for i, panel in enumerate(PANELS):
        panel(figure.add_subplot(grid[1 + i // 3, i % 3]), run)
    for axes in figure.axes:
        _finish_axes(axes, run)
    path = run.workdir / "loss.png"
    with naming(path), warnings.catch_warnings(action="ignore"):  # of characters that the font lacks
        figure.savefig(path, dpi=120)
    return path


# --- panels -------------------------------------------------------------------------------------------


def loss_panel(axes: "Axes", run: Run) -> None:
    """Training loss with its smoothed curve, evaluation losses, spikes; the legend is above the data."""
    steps, losses = run.series("train/loss")
    label = f"train, {tail(losses).mean():#.4g} at the end"
    _plot_smoothed(axes, steps, losses, linewidth=1.8, label=label)
    for prefix, style in zip(run.evaluations, ("o-", "D"), strict=False):
        eval_steps, evals = run.series(f"{prefix}/loss")
        if len(evals):
            label = f"{prefix} ({run.validation_part(prefix)}), {evals[-1]:#.4g} at the end"
            axes.plot(eval_steps, evals, style, color=ORANGE, markersize=4.5, linewidth=1.2, label=label)
    _mark_spikes(axes, run.spikes, run.spike_config.merge_steps)
    if resumes := sum(bool(launch.get("step")) for launch in run.launches):
        axes.plot([], [], ":", color=GREY, label=counted(resumes, "resume"))
    scale = _log_scale(axes, losses)
    _, labels = axes.get_legend_handles_labels()
    above = 10 + 15 * math.ceil(len(labels) / LEGEND_COLUMNS)  # points, for the legend
    name = axes.set_title(run.workdir.resolve().name, loc="left", fontsize=13, fontweight="bold", pad=above)
    name.set_parse_math(False)
    axes.set_title(_subtitle(run), loc="right", fontsize=10, color=GREY, pad=above)
    axes.set_ylabel(f"loss (nats per {run.unit[:-1]}{scale})")
    axes.set_xlabel("step")
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.3}
    axes.legend(frameon=False, ncols=LEGEND_COLUMNS, fontsize=9, **place)


def learning_rate_panel(axes: "Axes", run: Run) -> None:
    """The learning rate of each recorded step."""
    axes.plot(*run.series("train/learning_rate"), color=BLUE)
    axes.set_title("learning rate", loc="left")
    axes.yaxis.set_major_formatter("{x:.1e}")


def grad_norm_panel(axes: "Axes", run: Run) -> None:
    """Global gradient norm before clipping."""
    steps, norms = run.series("train/grad_norm")
    _plot_smoothed(axes, steps, norms)
    axes.set_title(f"gradient norm{_log_scale(axes, norms)}", loc="left")


def throughput_panel(axes: "Axes", run: Run) -> None:
    """Tokens or images per second of each record."""
    steps, values = run.series(f"perf/{run.unit}_per_sec")
    axes.plot(steps, values, color=BLUE)
    axes.set_title(f"{run.unit}/s", loc="left")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    if len(values):
        axes.set_ylim(0, 1.15 * np.max(values))


PANELS: tuple[Callable[["Axes", Run], None], ...] = (learning_rate_panel, grad_norm_panel, throughput_panel)


# --- parts of panels ----------------------------------------------------------------------------------


def _subtitle(run: Run) -> str:
    seen = run.units_seen
    parts = [run.setting("model", "name"), f"step {run.step:,}"]
    if run.num_params:
        parts.append(f"{rounded(run.num_params / 1e6, 4)} M parameters")
    if seen:
        parts.append(f"{rounded(seen / 1e6, 4)} M {run.unit}")
    return " · ".join(filter(None, parts))


def _plot_smoothed(axes: "Axes", steps: np.ndarray, values: np.ndarray, **style: Any) -> None:
    """The values in a pale colour, and their running median over them."""
    axes.plot(steps, values, color=BLUE, alpha=0.3, linewidth=0.8)
    at = np.unique(np.linspace(0, len(values) - 1, min(len(values), SMOOTHED_POINTS)).astype(np.int64))
    axes.plot(steps[at], smooth(values, len(values) // 40, at), color=BLUE, **style)


def smooth(values: np.ndarray, window: int, at: np.ndarray) -> np.ndarray:
    """Running median of each value and up to `window` finite ones on each side; NaN where there is none.

    A median ignores spikes. The window grows from zero at the beginning, where losses fall fast.

    Args:
      at: (n,), the indices of the values to smooth.

    Returns:
      (n,) medians.
    """
    smoothed = np.full(len(at), np.nan)
    for n, i in enumerate(at):
        near = values[i - min(i, window) : i + min(i, window) + 1]
        near = near[np.isfinite(near)]
        if len(near):
            smoothed[n] = np.median(near)
    return smoothed


def _mark_spikes(axes: "Axes", spikes: Sequence[Spike], merge_steps: int) -> None:
    """Shades the steps that count as part of each spike, and marks where finite ones begin."""
    for spike in spikes:
        end = spike.step + merge_steps
        axes.axvspan(spike.step, end, facecolor=RED, edgecolor=RED, alpha=0.15, linewidth=1, zorder=0)
    points = [(spike.step, spike.loss) for spike in spikes if math.isfinite(spike.loss)]
    if spikes:
        label = f"{counted(len(spikes), 'spike')} (shaded: {merge_steps} steps each)"
        axes.plot(*np.array(points or [(math.nan, math.nan)]).T, "v", color=RED, markersize=6, label=label)


def _log_scale(axes: "Axes", values: np.ndarray) -> str:
    """A log axis labelled with plain numbers, if the positive values span at least a factor of two.

    Returns:
      What to add to the label of the axis.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator

    positive = values[np.isfinite(values) & (values > 0)]
    if not len(positive) or positive.max() < 2 * positive.min():
        return ""
    axes.set_yscale("log")
    subs = (1, 1.5, 2, 3, 4, 6, 8) if positive.max() < 100 * positive.min() else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter("")
    return ", log scale"


def _finish_axes(axes: "Axes", run: Run) -> None:
    """What all panels share: a light grid, no box, a line at each resume."""
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlim(left=0)
    for launch in run.launches:
        if launch.get("step"):
            axes.axvline(launch["step"], color=GREY, linewidth=1, linestyle=":")
