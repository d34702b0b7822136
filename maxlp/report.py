"""Tells what a run was and how it went, from the files in its workdir alone.

    python -m maxlp.report /tmp/run
    python -m maxlp.report /tmp/run --spike=2300 --precision=float32

Prints the text and draws `loss.png` there. It reads `config.json`, `run.json`, `metrics.jsonl` and the
names of the checkpoints, and takes a run as it finds it: not begun, in progress, cut off or finished.
With --spike it runs the steps before that one again and says which tensor went first: `diagnostics.replay`.

A new section of the text is one function from a `Run` to its lines (none: nothing to say) and one entry in
`SECTIONS`; a new panel of the picture is one function and one entry in `PANELS`.
"""

import dataclasses
import datetime
import json
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging

from maxlp.monitoring.guards import read_rollbacks
from maxlp.monitoring.spikes import PRECISIONS, Policy, Spike, find_spikes
from maxlp.monitoring.watch import recorded_spikes
from maxlp.runtime import checkpoint
from maxlp.runtime.writers import format_seconds, read_jsonl

# --- What a run left ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """The files of a workdir, read; what is missing is empty."""

    workdir: Path
    config: Mapping[str, Any]
    info: Mapping[str, Any]
    records: list[dict[str, Any]]
    checkpoints: list[checkpoint.StepInfo]

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Every start of the run in order, the resumes included."""
        return self.info.get("starts", [])

    @property
    def num_params(self) -> int | None:
        """Parameters of the model, if the newest start noted them."""
        return self.starts[-1].get("num_params") if self.starts else None

    @property
    def step(self) -> int:
        """Finished updates at the last record."""
        return self.records[-1]["step"] if self.records else 0

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps (int64) and values (float64) of the records that have `name`."""
        found = [(r["step"], r[name]) for r in self.records if name in r]
        steps, values = zip(*found, strict=True) if found else ((), ())
        return np.array(steps, np.int64), np.array(values, np.float64)

    @property
    def policy(self) -> Policy:
        """What counts as a spike in this run."""
        known = {field.name for field in dataclasses.fields(Policy)}
        return Policy(**{k: v for k, v in self.config.get("spikes", {}).items() if k in known})

    def setting(self, section: str, key: str) -> Any:
        """A value of the config, or None."""
        return self.config.get(section, {}).get(key)


def load_run(workdir: str | os.PathLike[str]) -> Run:
    """Reads a workdir.

    Raises:
        ValueError: there is no such directory.
    """
    workdir = Path(workdir)
    if not workdir.is_dir():
        raise ValueError(f"{workdir} is not a directory; give the --workdir of a run")
    return Run(
        workdir=workdir,
        config=_read_json(workdir / "config.json"),
        info=_read_json(workdir / "run.json"),
        records=read_jsonl(workdir / "metrics.jsonl"),
        checkpoints=checkpoint.list_steps(workdir / "checkpoints"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


# --- Text ---------------------------------------------------------------------------------------------

Lines = list[tuple[str, str]]  # label, text


def run_lines(run: Run) -> Lines:
    """State, every start, and what the newest start ran on."""
    lines = [("directory", str(run.workdir)), ("state", _state(run))]
    for i, start in enumerate(run.starts):
        name = "resumed" if start.get("step") else "started" if i == 0 else "started anew"
        lines.append((name, f"{start.get('time', '?')} at step {start.get('step', '?')}"))
    if run.starts:
        newest = run.starts[-1]
        device = f"{newest.get('num_devices', '?')} × {newest.get('device_kind', '?')}"
        processes = _count(newest.get("num_processes", 1), "process", "processes")
        versions = {"python": newest.get("python", "?"), **newest.get("versions", {})}
        lines += [
            ("device", f"{device}, {processes}, host {newest.get('host', '?')}"),
            ("command", newest.get("command", "?")),
            ("git", newest.get("git") or "not known"),
            ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ]
    return lines


def _state(run: Run) -> str:
    total = run.setting("train", "total_steps")
    if not run.records:
        return "no metrics yet"
    if total and run.step >= total:
        return f"finished, {run.step:,} steps"
    of_total = f" of {total:,} ({run.step / total:.1%})" if total else ""
    age = format_seconds(max(0.0, time.time() - run.records[-1].get("time", 0.0)))
    return f"at step {run.step:,}{of_total}, last record {age} ago"


def config_lines(run: Run) -> Lines:
    """The resolved config, a paragraph for each section."""
    lines = []
    if run.num_params:
        lines.append(("parameters", f"{run.num_params:,}"))
    for section, values in run.config.items():
        pairs = values.items() if isinstance(values, dict) else [(section, values)]
        lines.append((section, " ".join(f"{key}={value}" for key, value in pairs if value is not None)))
    return lines


def loss_lines(run: Run) -> Lines:
    """Losses at the end and at their best, and what was seen for them."""
    lines = []
    steps, losses = run.series("train/loss")
    if len(steps):
        unit, count = _units_per_step(run)
        if count:
            lines.append((f"{unit} seen", f"{run.step * count:,}, {count:,} a step"))
        count = len(_tail(losses))
        lines.append(
            ("train/loss", f"{_tail(losses).mean():.4f}, mean of the last {_count(count, 'record')}")
        )
        if bad := steps[~np.isfinite(losses)].tolist():
            lines.append(("not finite", f"{_count(len(bad), 'record')}, the first at step {bad[0]:,}"))
    for name in ("eval/loss", "eval/bits_per_byte", "eval/perplexity"):
        steps, values = run.series(name)
        if len(steps):
            whole = _on_as_much_text_as_the_last(run, steps)
            best = _best(steps[whole], values[whole])
            lines.append((name, f"{values[-1]:.4f} at step {steps[-1]:,}{best}"))
    for name in dict.fromkeys(name for record in run.records for name in record):  # as they were written
        if name.startswith("eval/") and any(part in name for part in ("top", "recall")):
            steps, values = run.series(name)
            lines.append((name, f"{values[-1]:.2%} at step {steps[-1]:,}"))
    return lines


def _on_as_much_text_as_the_last(run: Run, steps: np.ndarray) -> np.ndarray:
    """Which evaluations compare with the last one, bool: during a run they may take a part of the text."""
    counted, tokens = run.series("eval/tokens")
    if not np.array_equal(counted, steps):
        return np.ones(len(steps), bool)
    return tokens == tokens[-1]


def _tail(losses: np.ndarray) -> np.ndarray:
    """The last tenth, at most ten records: one is too noisy to compare runs by."""
    return losses[-min(10, max(1, len(losses) // 10)) :]


def _units_per_step(run: Run) -> tuple[str, int]:
    """What throughput counts, and how many a step has (0: not known)."""
    rows, length = run.setting("data", "batch_size") or 0, run.setting("data", "seq_len")
    return ("images", rows) if length is None else ("tokens", rows * length)


def _best(steps: np.ndarray, values: np.ndarray) -> str:
    if not np.isfinite(values).any():
        return ""
    i = int(np.nanargmin(values))
    return "" if i == len(values) - 1 else f", best {values[i]:.4f} at step {steps[i]:,}"


def data_lines(run: Run) -> Lines:
    """What of the data was not used, or not as it is."""
    lines = []
    _, skipped = run.series("data/skipped")
    _, cut = run.series("data/texts_cut")
    if len(skipped):
        lines.append(("skipped", _count(int(skipped[-1]), "broken example")))
    if len(cut):
        room = run.setting("data", "text_len")
        lines.append(("texts cut", f"{cut[-1]:.1%} since the last start, longer than data.text_len={room}"))
    return lines


def speed_lines(run: Run) -> Lines:
    """Throughput, step time, MFU and memory over the records."""
    lines = []
    per_sec = f"{_units_per_step(run)[0]}_per_sec"
    for name, unit, form in ((per_sec, "", ",.0f"), ("step_time", " s", ".4g"), ("data_wait", "", ".1%")):
        _, values = run.series(f"perf/{name}")
        if len(values):
            p5, median, p95 = (f"{v:{form}}{unit}" for v in np.percentile(values, (5, 50, 95)))
            lines.append((f"perf/{name}", f"{median} median, 5th to 95th percentile {p5} to {p95}"))
    _, full = run.series("perf/mfu")
    _, causal = run.series("perf/mfu_causal")
    if len(full) and len(causal):
        _, peak = run.series("perf/peak_tflops")
        _, measured = run.series("perf/peak_measured")
        kind = "as a matmul measured here" if len(measured) and measured[-1] else "as published"
        of_peak = f"; peak {peak[-1]:,.4g} TFLOP/s a device, {kind}" if len(peak) else ""
        full, causal = np.median(full), np.median(causal)
        lines.append(("MFU", f"{full:.1%} (full attention FLOPs), {causal:.1%} (causal){of_peak}"))
    for name in sorted({name for record in run.records for name in record}):
        if name.startswith("memory/"):
            lines.append((name, f"{np.max(run.series(name)[1]):.2f} at most"))
    return lines


def spike_lines(run: Run, at_most: int = 10) -> Lines:
    """The spikes that the run wrote down; of one that wrote none, those among its logged losses."""
    recorded = [
        (Spike(*(r[key] for key in Spike._fields)), _first_tensor(r)) for r in recorded_spikes(run.workdir)
    ]
    spikes = recorded or [(s, "") for s in find_spikes(*run.series("train/loss"), run.policy)]
    lines = [
        (
            f"step {s.step:,}",
            f"loss {s.loss:.4f}, {s.sigmas:.1f} σ above the mean {s.mean:.4f} before it{first}",
        )
        for s, first in spikes[:at_most]
    ]
    lines += [("", f"and {len(spikes) - at_most} more")] if len(spikes) > at_most else []
    for r in read_rollbacks(run.workdir):
        begin, end = r["batches"]
        went = f"to step {r['to']:,}, without batches {begin + 1:,} to {end:,}"
        lines.append(("rolled back", f"from step {r['spike']['step']:,} {went}"))
    return lines


def _first_tensor(record: Mapping[str, Any]) -> str:
    if not (first := record.get("first")):
        return ""
    ahead = record["step"] - first["step"]
    return f"; first {first['tensor']}, RMS_t {first['value']:.2f} {_count(ahead, 'step')} before"


def health_lines(run: Run) -> Lines:
    """What the last measurement of `precision.health` found, a line for each tensor of a stack."""
    measured = [record for record in run.records if any(name.startswith("health/") for name in record)]
    if not measured:
        return []
    from maxlp.precision import (
        health,
    )  # imports JAX's model code: only reports with something to say need it

    return [("measured at", f"step {measured[-1]['step']:,}"), *health.record_lines(measured[-1])]


def checkpoint_lines(run: Run) -> Lines:
    """Each checkpoint that is there."""
    return [
        (f"step {c.step:,}", f"{c.status}, {c.num_bytes / 2**20:,.1f} MiB, saved {_local_time(c.saved_at)}")
        for c in run.checkpoints
    ]


def _local_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


SECTIONS: dict[str, Callable[[Run], Lines]] = {
    "Run": run_lines,
    "Config": config_lines,
    "Loss": loss_lines,
    "Data": data_lines,
    "Speed": speed_lines,
    "Spikes": spike_lines,
    "Quantization": health_lines,
    "Checkpoints": checkpoint_lines,
}


def report_text(run: Run) -> str:
    """All sections that have something to say."""
    paragraphs = []
    for title, section in SECTIONS.items():
        if lines := section(run):
            width = 2 + max(len(label) for label, _ in lines)
            indent = " " * (2 + width)
            wrapped = [
                textwrap.fill(
                    text,
                    108,
                    initial_indent=f"  {label:<{width}}",
                    subsequent_indent=indent,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
                for label, text in lines
            ]
            paragraphs.append("\n".join([title, *wrapped]))
    return "\n\n".join(paragraphs)


# --- Picture ------------------------------------------------------------------------------------------

BLUE, ORANGE, RED, GREY = "#2f6db3", "#e07b1a", "#c8322b", "#8a8a8a"


def plot_curves(workdir: str | os.PathLike[str]) -> Path | None:
    """Draws `loss.png` from the metrics; returns its path, or None if there is no training loss yet."""
    # Imported here because training imports this file, and should start without waiting for it.
    from matplotlib.figure import Figure

    run = load_run(workdir)
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
    figure.savefig(path, dpi=120)
    return path


def loss_panel(axes: Any, run: Run) -> None:
    """Training loss with its smoothed curve, evaluations, spikes."""
    steps, losses = run.series("train/loss")
    label = f"train, {_tail(losses).mean():.3f} at the end"
    _plot_smoothed(axes, steps, losses, linewidth=1.8, label=label)
    eval_steps, evals = run.series("eval/loss")
    if len(evals):
        label = f"eval, {evals[-1]:.3f} at the end"
        axes.plot(eval_steps, evals, "o-", color=ORANGE, markersize=4.5, linewidth=1.2, label=label)
    if spikes := find_spikes(steps, losses, run.policy):
        where = [s.step for s in spikes], [s.loss for s in spikes]
        axes.plot(*where, "v", color=RED, markersize=6, label=_count(len(spikes), "spike"))
    if resumes := sum(bool(start.get("step")) for start in run.starts):
        axes.plot([], [], ":", color=GREY, label=_count(resumes, "resume"))
    _log_scale(axes, losses)
    axes.set_title(run.workdir.resolve().name, loc="left", fontsize=13, fontweight="bold")
    axes.set_title(_subtitle(run), loc="right", fontsize=10, color=GREY)
    axes.set_ylabel(f"loss (nats per {_units_per_step(run)[0][:-1]})")
    axes.set_xlabel("step")
    axes.legend(frameon=False, loc="upper right")


def learning_rate_panel(axes: Any, run: Run) -> None:
    """The schedule as it was used."""
    axes.plot(*run.series("train/learning_rate"), color=BLUE)
    axes.set_title("learning rate", loc="left")
    axes.yaxis.set_major_formatter("{x:.1e}")


def grad_norm_panel(axes: Any, run: Run) -> None:
    """Global gradient norm before clipping."""
    steps, norms = run.series("train/grad_norm")
    _plot_smoothed(axes, steps, norms)
    _log_scale(axes, norms)
    axes.set_title("gradient norm", loc="left")


def throughput_panel(axes: Any, run: Run) -> None:
    """Tokens or images per second of each record."""
    unit, _ = _units_per_step(run)
    steps, values = run.series(f"perf/{unit}_per_sec")
    axes.plot(steps, values, color=BLUE)
    axes.set_title(f"{unit}/s", loc="left")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    if len(values):
        axes.set_ylim(0, 1.15 * np.max(values))


PANELS: tuple[Callable[[Any, Run], None], ...] = (learning_rate_panel, grad_norm_panel, throughput_panel)


def _subtitle(run: Run) -> str:
    unit, count = _units_per_step(run)
    seen = count * run.step
    parts = [run.setting("model", "name"), f"step {run.step:,}"]
    parts += [f"{run.num_params / 1e6:,.4g} M parameters"] if run.num_params else []
    parts += [f"{seen / 1e6:,.4g} M {unit}"] if seen else []
    return " · ".join(filter(None, parts))


def _plot_smoothed(axes: Any, steps: np.ndarray, values: np.ndarray, **style: Any) -> None:
    """The values pale, and over them the line of their running median."""
    axes.plot(steps, values, color=BLUE, alpha=0.3, linewidth=0.8)
    axes.plot(steps, smooth(values, len(values) // 40), color=BLUE, **style)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Median of a value and up to `window` on each side, finite ones only; NaN where there is none.

    A median passes over spikes. The window grows from zero at the beginning, where losses fall fast.
    """
    smoothed = np.full(len(values), np.nan)
    for i in range(len(values)):
        near = values[i - min(i, window) : i + min(i, window) + 1]
        near = near[np.isfinite(near)]
        if len(near):
            smoothed[i] = np.median(near)
    return smoothed


def _log_scale(axes: Any, values: np.ndarray) -> None:
    """A log axis with plain numbers, if the values are positive and span enough for one."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    positive = values[np.isfinite(values) & (values > 0)]
    if not len(positive) or positive.max() < 2 * positive.min():
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter("")


def _finish_axes(axes: Any, run: Run) -> None:
    """What all panels share: a light grid, no box, a line at each resume."""
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlim(left=0)
    for start in run.starts:
        if start.get("step"):
            axes.axvline(start["step"], color=GREY, linewidth=1, linestyle=":")


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "The same as DIR, as other commands have it.")
    flags.DEFINE_integer("spike", None, "Step to run up to again, from the checkpoint before it.")
    flags.DEFINE_enum("precision", "recipe", PRECISIONS, "Of --spike; recipe is what the run computed in.")


def main(argv: list[str], spike: int | None = None, precision: str = "recipe") -> None:
    """Prints the report of the workdir that the command line names, and draws its curves; or replays."""
    if len(argv) != 2:
        raise app.UsageError("give one workdir: python -m maxlp.report DIR")
    try:
        run = load_run(argv[1])
        if spike is not None:
            if spike > run.step + (run.setting("train", "log_every") or 0):
                raise ValueError(
                    f"--spike={spike} is beyond the run, whose last record is of step {run.step}"
                )
            from maxlp.monitoring.replay import replay

            logging.set_verbosity(logging.WARNING)
            replay(run.workdir, spike, precision)
            return
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(report_text(run))
    if path := plot_curves(run.workdir):
        print(f"\nCurves in {path}")


if __name__ == "__main__":
    define_flags()
    given = flags.FLAGS
    app.run(lambda argv: main(argv + [given.workdir] * bool(given.workdir), given.spike, given.precision))
