"""The sections of a report's text, written from the files of a run.

A new section is one function from a `Run` to its lines (an empty list omits the section) and one entry in
`SECTIONS`.
"""

import datetime
import math
import shlex
import shutil
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from maxlp.monitoring.rollback import read_rollbacks
from maxlp.monitoring.run_record import Run, tail
from maxlp.monitoring.spike_records import count_predicted, find_rms_spikes, suspect
from maxlp.monitoring.spikes import Spike
from maxlp.runtime.files import mirrored
from maxlp.runtime.lock import WATCH_SECONDS
from maxlp.runtime.messages import counted, format_seconds, rounded

MAX_WIDTH = 108
AT_CHANCE = 0.01  # the distance of a contrastive loss from that of equal logits
MAX_ENTRIES = 10  # of a list, such as that of the spikes

Lines = list[tuple[str, str]]  # label, text


def report_text(run: Run) -> str:
    """All sections that are not empty."""
    paragraphs = []
    for title, section in SECTIONS.items():
        if lines := section(run):
            paragraphs.append(section_text(title, lines))
    return "\n\n".join(paragraphs)


def section_text(title: str, lines: Lines) -> str:
    """A section in the width of the terminal."""
    width = 2 + max((len(label) for label, _ in lines), default=0)
    return "\n".join([title, *(_wrap(f"  {label:<{width}}", text) for label, text in lines)])


def _wrap(label: str, text: str) -> str:
    return textwrap.fill(
        text,
        min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 24)).columns),
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


# --- run and config -----------------------------------------------------------------------------------


def run_lines(run: Run) -> Lines:
    """State of the run, its first and last launches, and device, command and versions of the newest."""
    launches = []
    for i, launch in enumerate(run.launches):
        event = "restarted" if i else "started"
        if launch.get("step"):
            event = "resumed"
        end = f"; ended by {launch['ended_by']}" if "ended_by" in launch else ""
        launches.append((event, f"{launch.get('time', '?')} at step {launch.get('step', '?')}{end}"))
    if hidden := launches[1 : 1 - MAX_ENTRIES]:
        launches = [launches[0], ("", f"and {len(hidden):,} more"), *launches[1 - MAX_ENTRIES :]]
    lines = [("directory", str(run.workdir)), ("state", _state(run)), *launches]
    if run.launches:
        newest = run.launches[-1]
        device = f"{newest.get('num_devices', '?')} × {newest.get('device_kind', '?')}"
        processes = counted(newest.get("num_processes", 1), "process", "processes")
        versions = {"python": newest.get("python", "?"), **newest.get("versions", {})}
        lines += [
            ("device", f"{device}, {processes}, host {newest.get('host', '?')}"),
            ("command", newest.get("command", "?")),
            ("git", newest.get("git") or "unknown"),
            ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ]
    return lines


def _state(run: Run) -> str:
    total = run.setting("train", "total_steps")
    if not run.records:
        return "no metrics yet"
    done = run.progress
    # Only the last step has this, also of a run that ended with its data.
    ended = any(name.startswith("eval_full/") for name in run.records[-1])
    if ended or (total and done >= total):
        return f"finished, {counted(run.step, 'step')}"
    count_as = "" if done == run.step else f", which count as {done:,.0f}"  # AdaScale
    of_total = f"{count_as} of {total:,} ({done / total:.1%})" if total else ""
    age = format_seconds(max(0.0, time.time() - run.records[-1].get("time", 0.0)))
    return f"{_activity(run)} at step {run.step:,}{of_total}, last record {age} ago"


def _activity(run: Run) -> str:
    """Whether an unfinished run goes on, as far as its lock tells."""
    if mirrored(run.workdir):  # whose lock is in the bucket
        return "not finished:"
    if run.lock_age is None:
        return "stopped"
    return "in progress" if run.lock_age < WATCH_SECONDS else "killed or suspended"


def config_lines(run: Run) -> Lines:
    """The resolved config, one paragraph for each of its sections."""
    lines = []
    if run.num_params:
        lines.append(("parameters", f"{run.num_params:,}"))
    for section, values in run.config.items():
        pairs = values.items() if isinstance(values, dict) else [(section, values)]
        lines.append((section, " ".join(f"{key}={value}" for key, value in pairs if not _is_unset(value))))
    return lines


def _is_unset(value: Any) -> bool:
    """Whether a value, or every value of a nested section, is None."""
    return all(map(_is_unset, value.values())) if isinstance(value, dict) and value else value is None


# --- loss and data ------------------------------------------------------------------------------------


def loss_lines(run: Run) -> Lines:
    """Final and best losses, the amount of data seen, a CLIP's logit scale, and evaluation scores."""
    lines = []
    steps, losses = run.series("train/loss")
    if len(steps):
        if count := run.units_per_step:
            lines.append((f"{run.unit} seen", f"{run.units_seen:,} ({count:,} per step)"))
        last = tail(losses)
        what = f", mean of the last {len(last)} records" if len(last) > 1 else " in the last record"
        lines.append(("train/loss", f"{last.mean():#.5g}{what}"))
        lines += _chance_lines(run, steps[-len(last) :], last)
        if bad := steps[~np.isfinite(losses)].tolist():
            lines.append(("not finite", f"{counted(len(bad), 'record')}, the first at step {bad[0]:,}"))
    steps, scales = run.series("train/logit_scale")
    if len(steps):
        first = f" ({scales[0]:.4g} at step {steps[0]:,})" if len(steps) > 1 else ""
        lines.append(("train/logit_scale", f"{scales[-1]:.4g} at step {steps[-1]:,}{first}"))
    if skipped := int(run.series("train/skipped")[1].sum()):
        lines.append(("skipped", counted(skipped, "step")))
    for prefix in run.evaluations:
        lines += _evaluation_lines(run, prefix)
    return lines


def _chance_lines(run: Run, steps: np.ndarray, losses: np.ndarray) -> Lines:
    """Whether the last losses of a CLIP are all that of equal logits, as when all features are the same."""
    batch, warmup = run.setting("data", "batch_size"), run.setting("optimizer", "warmup_steps")
    if run.setting("loss", "kind") != "softmax" or not batch or steps[0] <= (warmup or 0):
        return []
    if not np.all(np.abs(losses - math.log(batch)) < AT_CHANCE):
        return []
    text = f"the loss is ln(data.batch_size={batch}), as if no text fitted an image better than another; "
    return [("at chance", text + "a lower learning rate or a longer warm-up may help")]


def _evaluation_lines(run: Run, prefix: str) -> Lines:
    """The last evaluation of a part of the validation data."""
    lines, part = [], run.validation_part(prefix)
    for key in ("loss", "bits_per_byte", "perplexity"):
        name = f"{prefix}/{key}"
        steps, values = run.series(name)
        if len(steps):
            comparable = _comparable_with_last(run, prefix, steps)
            shown = _perplexity if key == "perplexity" else _loss
            best = _best(steps[comparable], values[comparable], shown)
            on = f" on {part}" if comparable.all() else ""
            lines.append((name, f"{shown(values[-1])} at step {steps[-1]:,}{on}{best}"))
    for name in run.names:
        if name.startswith(f"{prefix}/") and ("top" in name or "recall" in name):
            steps, values = run.series(name)
            lines.append((name, f"{values[-1]:.2%} at step {steps[-1]:,} on {part}"))
    return lines


def _comparable_with_last(run: Run, prefix: str, steps: np.ndarray) -> np.ndarray:
    """A bool for each evaluation: whether it covered as much text as the last one.

    A resumed run may have another ``train.eval_batches``.
    """
    counted_at, tokens = run.series(f"{prefix}/tokens")
    if not np.array_equal(counted_at, steps):
        return np.ones(len(steps), bool)
    return tokens == tokens[-1]


def _loss(value: float) -> str:
    return f"{value:#.5g}"


def _perplexity(value: float) -> str:
    return rounded(value, 4)


def _best(steps: np.ndarray, values: np.ndarray, shown: Callable[[float], str]) -> str:
    if not np.isfinite(values).any():
        return ""
    i = int(np.nanargmin(values))
    return "" if i == len(values) - 1 else f", best {shown(values[i])} at step {steps[i]:,}"


def data_lines(run: Run) -> Lines:
    """Examples that were skipped or truncated."""
    lines = []
    _, skipped = run.series("data/skipped")
    _, truncated = run.series("data/texts_cut")
    if len(skipped):
        lines.append(("skipped", counted(int(skipped[-1]), "broken example")))
    for name, done in (("cut", "longer than"), ("skipped", "no answer within")):
        _, fractions = run.series(f"data/conversations_{name}")
        if len(fractions):
            limit = run.setting("data", "seq_len")
            text = f"{fractions[-1]:.1%} since the last launch ({done} data.seq_len={limit})"
            lines.append((f"conversations {name}", text))
    if len(truncated):
        limit = run.setting("data", "text_len")
        text = f"{truncated[-1]:.1%} since the last launch (longer than data.text_len={limit})"
        lines.append(("truncated texts", text))
    return lines


# --- speed --------------------------------------------------------------------------------------------


def speed_lines(run: Run) -> Lines:
    """Throughput, step time, MFU and memory over all records."""
    lines = []
    per_sec = f"{run.unit}_per_sec"
    for name, unit, form in ((per_sec, "", ",.0f"), ("step_time", " s", ".4g"), ("data_wait", "", ".1%")):
        _, values = run.series(f"perf/{name}")
        if len(values):
            p5, median, p95 = (f"{v:{form}}{unit}" for v in np.percentile(values, (5, 50, 95)))
            lines.append((f"perf/{name}", f"median {median}, 5th to 95th percentile {p5} to {p95}"))
    lines += _mfu_lines(run)
    for name in sorted(run.names):
        if name.startswith("memory/"):
            lines.append((name, f"maximum {np.max(run.series(name)[1]):.2f}"))
    return lines


def _mfu_lines(run: Run) -> Lines:
    _, full = run.series("perf/mfu")
    _, causal = run.series("perf/mfu_causal")
    _, peak = run.series("perf/peak_tflops")
    if not (len(full) and len(causal) and len(peak)):
        return []
    text = f"{np.median(full):.1%} (full attention FLOPs), {np.median(causal):.1%} (causal)"
    return [("MFU", f"{text}; peak {rounded(peak[-1], 4)} TFLOP/s per device")]


# --- spikes, quantization, checkpoints ----------------------------------------------------------------


def spike_lines(run: Run) -> Lines:
    """The spikes of the run, with the first tensors to stand out, the rollbacks, and how to see more."""
    spikes = run.spikes
    tensors = {record["step"]: _first_tensor(record) for record in run.spike_records}
    lines = [(f"step {s.step:,}", _spike_text(s) + tensors.get(s.step, "")) for s in spikes[:MAX_ENTRIES]]
    if hidden := spikes[MAX_ENTRIES:]:
        lines.append(("", f"and {len(hidden):,} more"))
    lines += _lead_lines(run, spikes)
    for entry in read_rollbacks(run.workdir):
        begin, end = entry["batches"]
        steps = f"from step {entry['spike']['step']:,} to step {entry['to']:,}"
        lines.append(("rolled back", f"{steps}, skipping batches {begin + 1:,} to {end:,}"))
    if run.spike_records:  # each has kept its checkpoint
        command = f"python -m maxlp.report {shlex.quote(str(run.workdir))}"
        lines.append(("replay", f"{command} --spike={run.spike_records[-1]['step']}"))
    return lines


def _lead_lines(run: Run, spikes: Sequence[Spike]) -> Lines:
    """How often RMS_t rose before the loss did; only of a run whose records have every step."""
    steps, rms = run.series("train/rms/max")
    whole = run.setting("train", "log_every") == 1 and not read_rollbacks(run.workdir)  # which undo steps
    if not spikes or not len(steps) or not whole:
        return []
    policy = run.spike_config
    rms_spikes = find_rms_spikes(steps, rms, policy)
    found = count_predicted([spike.step for spike in spikes], rms_spikes, run.step, policy)
    text = (
        f"{found.predicted} of {counted(found.loss_spikes, 'spike')} came 1 to {policy.lead} steps after "
        f"the largest RMS_t rose above {policy.rms_threshold:g} ({found.by_chance:.1f} would by chance)"
    )
    return [("led by RMS_t", text)]


def _spike_text(spike: Spike) -> str:
    return f"loss {spike.loss:#.5g}, {spike.sigmas:.1f} σ above the preceding mean {spike.mean:#.5g}"


def _first_tensor(record: Mapping[str, Any]) -> str:
    if not math.isfinite(record["loss"]):
        cause = suspect(record.get("steps", []), record["policy"]["rms_threshold"])
        return f"; {cause}" if cause else ""
    if not (first := record.get("first")):
        return ""
    ahead = record["step"] - first["step"]
    when = f"{counted(ahead, 'step')} earlier" if ahead else "in the same step"
    return f"; first tensor {first['tensor']}, RMS_t {first['value']:.2f}, {when}"


def gradient_lines(run: Run) -> Lines:
    """The tensors whose gradient was zero in all of the last records.

    They are frozen or cut off from the loss, or their gradients are below the smallest number of a dtype.
    """
    return _always_zero(run, "train/grad_norms/")


def update_lines(run: Run) -> Lines:
    """The first and the last update relative to the size of its tensor, and the tensors without updates.

    A tensor with a wrong learning rate stands out, most of all in the first: later its size has adapted.
    """
    prefix = "train/update_ratios/"
    if not (records := run.records_with(prefix)):
        return []
    first, last = records[0], records[-1]
    when = f"at step {last['step']:,}{_rate(last)}"
    lines = [("‖update‖ / ‖weight‖", f"{when}, and in brackets at step {first['step']:,}{_rate(first)}")]
    of_first, of_last = _ranges_over_layers(first, prefix), _ranges_over_layers(last, prefix)
    lines += [(path, f"{ratios} ({of_first.get(path, 'unknown')})") for path, ratios in of_last.items()]
    return lines + _always_zero(run, prefix)


def _rate(record: Mapping[str, float]) -> str:
    rate = record.get("train/learning_rate")
    return "" if rate is None else f" (learning rate {rate:.3g})"


def _ranges_over_layers(record: Mapping[str, float], prefix: str) -> dict[str, str]:
    """The least and the largest value of each tensor's layers."""
    found: dict[str, list[float]] = {}
    for tensor in _tensors(record, prefix):
        path, _, layer = tensor.rpartition("/")
        found.setdefault(path if layer.isdigit() else tensor, []).append(record[prefix + tensor])
    ends = {path: [f"{end(values):.1e}" for end in (min, max)] for path, values in found.items()}
    return {path: " to ".join(dict.fromkeys(each)) for path, each in ends.items()}


def _always_zero(run: Run, prefix: str) -> Lines:
    """The tensors for which the metrics with this prefix were zero in all of the last records."""
    records = run.records_with(prefix)[-MAX_ENTRIES:]
    tensors = _tensors(records[-1], prefix) if records else []
    zero = [tensor for tensor in tensors if all(r.get(prefix + tensor) == 0 for r in records)]
    if not zero:
        return []
    more = f" and {len(zero) - MAX_ENTRIES:,} more" if len(zero) > MAX_ENTRIES else ""
    last = f"{len(records)} records" if len(records) > 1 else "record"
    return [("zero", f"{', '.join(zero[:MAX_ENTRIES])}{more}, in the last {last}")]


def _tensors(record: Mapping[str, float], prefix: str) -> list[str]:
    """The tensors with a metric of this prefix, which also has the largest of them as ``max``."""
    names = (name for name in record if name.startswith(prefix) and name != f"{prefix}max")
    return [name.removeprefix(prefix) for name in names]


def health_lines(run: Run) -> Lines:
    """The last measurement of `precision.health`, one line for each tensor of a stack."""
    measured = run.records_with("health/")
    if not measured:
        return []
    from maxlp.precision import health  # imports Flax, which few reports need

    return [("measured at", f"step {measured[-1]['step']:,}"), *health.record_lines(measured[-1])]


def magnitude_lines(run: Run) -> Lines:
    """The last measurement of `precision.magnitudes`, and the first: one line for each stack of blocks."""
    records = run.records_with("magnitude/")
    if not records:
        return []
    first, last = _magnitudes(records[0]), _magnitudes(records[-1])
    lines = [
        ("mean |x|", f"at step {records[-1]['step']:,}, and at step {records[0]['step']:,} in brackets")
    ]
    for path, values in last.items():
        before = first.get(path, values)
        largest = int(np.argmax(values))
        text = (
            f"{values[0]:.3g} ({before[0]:.3g}) after the first block, {values[-1]:.3g} ({before[-1]:.3g})"
        )
        lines.append((path, f"{text} after the last, at most {values[largest]:.3g} (block {largest})"))
    return lines


def _magnitudes(record: Mapping[str, float]) -> dict[str, list[float]]:
    """The values of all blocks of each stack, which a record has in order."""
    found: dict[str, list[float]] = {}
    for name, value in record.items():
        if name.startswith("magnitude/"):
            found.setdefault(name.removeprefix("magnitude/").rpartition("/")[0], []).append(value)
    return found


def checkpoint_lines(run: Run) -> Lines:
    """The checkpoints that exist; of many that are complete, the oldest and the newest."""
    complete = [c for c in run.checkpoints if c.status == "complete"]
    hidden = set(complete[1 : 1 - MAX_ENTRIES])
    lines = [
        (f"step {c.step:,}", f"{c.status}, {c.num_bytes / 2**20:,.1f} MiB, saved {_local_time(c.saved_at)}")
        for c in run.checkpoints
        if c not in hidden
    ]
    if hidden:
        lines.append(("", f"and {len(hidden):,} more that are complete"))
    return lines


def _local_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


SECTIONS: dict[str, Callable[[Run], Lines]] = {
    "Run": run_lines,
    "Config": config_lines,
    "Loss": loss_lines,
    "Data": data_lines,
    "Speed": speed_lines,
    "Spikes": spike_lines,
    "Gradients": gradient_lines,
    "Updates": update_lines,
    "Quantization": health_lines,
    "Outputs of the blocks": magnitude_lines,
    "Checkpoints": checkpoint_lines,
}
