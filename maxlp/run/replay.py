"""Runs the steps before a loss spike again and reports which tensor diverged first, and on which data.

    python -m maxlp.report DIR --spike=2300 --precision=float32

The replay starts from the checkpoint kept for the spike, or from the newest one that is early enough, with
the data position saved in it. It uses the run's config, with the precision that the run had at these steps
(`late_phase`), or with another one on request. In the run's own precision and on the run's hardware it
repeats the losses of the run. If the spike does not recur in float32, low precision caused it.
"""

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from maxlp.core.train_state import State
from maxlp.data.tokenizers import make_tokenizer
from maxlp.monitoring import statistics
from maxlp.monitoring.batch_statistics import batch_lines, batch_statistics, text_lines
from maxlp.monitoring.spike_records import Crossing, first_to_cross
from maxlp.monitoring.spikes import Detector, SpikeConfig
from maxlp.parallel.batches import device_batches
from maxlp.precision.recipes import RecipeOptions
from maxlp.run import late_phase, run_dir
from maxlp.run.reopen import open_run
from maxlp.run.settings import Settings, read
from maxlp.run.tokenizer import saved_tokenizer
from maxlp.runtime.files import shown
from maxlp.runtime.messages import counted

PRECISIONS = {"recipe": None, "bf16": "bfloat16", "float32": "float32"}  # name: dtype of all matmuls
SHOWN_TENSORS = 3  # per step


class Finding(NamedTuple):
    """What a replay found: its losses by step, and the first tensor that diverged by either measure."""

    losses: dict[int, float]
    by_rms: Crossing | None
    by_grad_norm: Crossing | None


def replay(workdir: Path, spike_step: int, precision: str) -> Finding:
    """Replays the steps up to `spike_step` and prints a line for each.

    Args:
      workdir: of the run.
      spike_step: any step; a recorded spike has its own checkpoint.
      precision: "recipe" keeps that of the run; "bf16" and "float32" apply to all matmuls.

    Raises:
      ValueError: an unknown precision or one that the run cannot have, no run in the workdir, no checkpoint
        from before that step, or a recipe that is unknown or changes between that checkpoint and the step.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"--precision={precision} is unknown; one of {', '.join(PRECISIONS)}")
    same = precision == "recipe"
    c = late_phase.config_at(workdir, spike_step) if same else run_dir.load_config(workdir)
    s = with_precision(read(c), precision)
    lead = min(s.spikes.lead, spike_step - late_phase.last_early_step(workdir, s) - 1)
    with open_run(s, workdir, spike_step, lead, same_precision=same) as at:
        train_step = at.run.jit_step(at.graphdef, at.abstract)
        print(f"replaying steps {at.start + 1} to {spike_step}, precision {precision}")
        ahead = (batch for batch, _ in device_batches(at.batches, at.run.mesh, spike_step - at.start))
        records, held, data = [], [], {}
        for record in replay_steps(train_step, at.state, ahead, at.start + 1):
            data = record.pop("batch")
            held.append(batch_statistics(data))
            records.append(record)
    finding = examine(records, s.spikes)
    print("\n".join(finding_lines(finding, spike_step, s.spikes)))
    if records:
        tokenizer = make_tokenizer(saved_tokenizer(s.data.tokenizer, workdir))
        table = batch_lines([*finding.losses], held, s.spikes.min_history)
        texts = text_lines(data, tokenizer.decode)
        print(shown("\n".join(itertools.chain(table, texts))))
    return finding


def with_precision(s: Settings, precision: str) -> Settings:
    """The settings with all matmuls in one precision ("recipe" changes nothing), and with statistics.

    Gradients are not released, because statistics of tensors need all of them, and then the optimizer's
    state is on the device.

    Raises:
      ValueError: parameters in float16, whose gradients need scales.
    """
    s = dataclasses.replace(
        s,
        spikes=dataclasses.replace(s.spikes, statistics=True),
        train=dataclasses.replace(s.train, release_gradients=False),
        optimizer=dataclasses.replace(s.optimizer, offload=False),
    )
    dtype = PRECISIONS[precision]
    if dtype is None:
        return s
    if s.model.param_dtype == "float16":
        raise ValueError(
            f"--precision={precision} does not work with model.param_dtype=float16, whose gradients need "
            "precision.scalify; use --precision=recipe"
        )
    return without_recipe(dataclasses.replace(s, model=dataclasses.replace(s.model, dtype=dtype)))


def without_recipe(s: Settings) -> Settings:
    """The settings with all matmuls in the model's own dtype, and all gradients sent in theirs."""
    plain = dataclasses.replace(
        s.precision,
        **late_phase.WITHOUT_RECIPE,
        options=RecipeOptions(),
        high_precision_from=0,
        scalify="none",
        exchange="none",
        scatter="none",
    )
    return dataclasses.replace(s, precision=plain)


# --- the steps ----------------------------------------------------------------------------------------


def replay_steps(
    train_step: jax.stages.Wrapped, state: State, batches: Iterable[Any], first: int
) -> Iterator[dict[str, Any]]:
    """Trains on the batches and prints a line for each step, the first of which has the number `first`.

    Yields:
      {"step": int, "loss": float, "rms": numbers by tensor, "grad_norms": numbers by tensor, "batch":
      arrays by name}; "rms" is absent if the optimizer does not define it.
    """
    for n, batch in enumerate(batches, first):
        data = jax.device_get(batch)
        state, metrics = train_step(state, batch)
        metrics = jax.device_get(metrics)
        record = {"step": n, "loss": float(metrics["loss"]), **statistics.of_tensors(metrics)}
        print(step_line(record))
        yield record | {"batch": data}


def step_line(record: dict[str, Any]) -> str:
    """The loss of a step, and its largest tensors by either measure, in at most 80 columns."""
    lines = [f"step {record['step']}  loss {record['loss']:#.5g}"]
    for key, title in (("rms", "RMS_t"), ("grad_norms", "gradient norm")):
        if key in record:
            largest = statistics.largest(record[key], SHOWN_TENSORS)
            text = f"{title} " + ", ".join(f"{name}\0{value:.3g}" for name, value in largest)
            lines += textwrap.wrap(text, 80, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines).replace("\0", " ")


# --- what diverged first ------------------------------------------------------------------------------


def examine(records: list[dict[str, Any]], config: SpikeConfig) -> Finding:
    """Finds the first tensor that diverged in the last `lead` + 1 of the replayed steps."""
    return Finding(
        losses={record["step"]: record["loss"] for record in records},
        by_rms=first_to_cross(records[-config.lead - 1 :], config.rms_threshold),
        by_grad_norm=first_to_stand_out(records, config),
    )


def first_to_stand_out(records: list[dict[str, Any]], config: SpikeConfig) -> Crossing | None:
    """The first tensor whose gradient norm spikes, by the definition used for the loss, or is not finite.

    Searches the last `lead` + 1 steps. Of several tensors in one step it takes the one with the most
    standard deviations, which are the value of the `Crossing`.
    """
    detectors = {name: Detector(config) for name in (records[0]["grad_norms"] if records else ())}
    for i, record in enumerate(records):
        norms = record["grad_norms"]
        found = {name: of.observe(record["step"], norms[name]) for name, of in detectors.items()}
        sigmas = {name: spike.sigmas for name, spike in found.items() if spike is not None}
        if sigmas and i >= len(records) - config.lead - 1:
            worst = max(sigmas, key=sigmas.__getitem__)
            others = sum(map(math.isinf, sigmas.values())) - 1  # not finite either
            tensor = worst + (f" and {counted(others, 'other')}" if others > 0 else "")
            return Crossing(tensor, record["step"], sigmas[worst])
    return None


def finding_lines(finding: Finding, spike_step: int, config: SpikeConfig) -> Iterator[str]:
    """Which tensor of which layer diverged first, by RMS_t and by gradient norm, in at most 80 columns."""
    num_before = len(finding.losses) - 1
    no_rms = f"no tensor was above {config.rms_threshold:g} in the {config.lead} steps before the spike"
    no_norm = (
        f"no tensor was {config.threshold:g} σ above its preceding mean in the {config.lead} steps before "
        "the spike"
    )
    if num_before < config.min_history:
        no_norm = (
            f"unknown, because a mean takes spikes.min_history={config.min_history} steps and the replay "
            f"has {counted(num_before, 'step')} before the spike"
        )
    for name, first, none, form in (
        ("RMS_t", finding.by_rms, no_rms, "RMS_t {:.3g}"),
        ("gradient norm", finding.by_grad_norm, no_norm, "{:.3g} σ"),
    ):
        text = none
        if first is not None:
            ahead = spike_step - first.step
            when = f"{ahead} before the spike" if ahead else "that of the spike"
            value = form.format(first.value) if np.isfinite(first.value) else "not finite"
            text = f"{first.tensor} at step {first.step}, {when} ({value})"
        yield textwrap.fill(f"first by {name}: {text}", 80, subsequent_indent="  ", break_on_hyphens=False)
