"""Records of the spikes of a run: what is needed to understand and replay each.

    spikes/2300.json         the preceding losses, RMS_t and gradient norms of the last steps, the first
                             tensor above the threshold, the data position just before that batch, the
                             checkpoint to start from
    spikes/checkpoints/2000  that checkpoint, as hard links: it stays when the run deletes its own copy
                             (checkpoints-1 after a rollback)

`python -m maxlp.report DIR --spike=2300` replays it. Spikes without a record are found among the losses and
the RMS_t that the run has logged.
"""

import math
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from maxlp.data import merge_states
from maxlp.monitoring import statistics
from maxlp.monitoring.rollback import kept_checkpoints, read_rollbacks
from maxlp.monitoring.spikes import Detector, Spike, SpikeConfig
from maxlp.runtime import checkpoint, distributed
from maxlp.runtime.files import mirrored, read_json, write_json

_NUMBER, _NONE = (int, float), type(None)
_FIELDS = {  # of a record; see `save`
    "step": int,
    **dict.fromkeys(("loss", "mean", "sigmas"), _NUMBER),
    "begins": bool,
    "policy": {"rms_threshold": _NUMBER},
    "checkpoint": (str, _NONE),
    "data_state": {"step": int},
    "first": ({"tensor": str, "step": int, "value": _NUMBER}, _NONE),
    "steps": [{"step": int, "rms": (dict, _NONE), "grad_norms": (dict, _NONE)}],
}


class Crossing(NamedTuple):
    """The first tensor above a threshold in the steps before a spike."""

    tensor: str
    step: int
    value: float


def first_to_cross(steps: Iterable[dict[str, Any]], threshold: float) -> Crossing | None:
    """The first tensor whose RMS_t exceeds the threshold; the largest of several in one step.

    Args:
      steps: in order, each {"step": …, "rms": numbers by tensor}.
      threshold: of RMS_t; NaN counts as above it.
    """
    for record in steps:
        crossed = {name: x for name, x in record.get("rms", {}).items() if not x <= threshold}
        if crossed:
            name, value = statistics.largest(crossed)[0]
            return Crossing(name, record["step"], value)
    return None


def suspect(steps: Sequence[dict[str, Any]], threshold: float) -> str:
    """Names the tensor that probably made the last loss infinite or NaN; "" where no tensors are measured.

    A non-finite loss makes most gradients of its step non-finite too, so earlier steps are searched first.

    Args:
      steps: in order, each {"step": …, "rms": …, "grad_norms": …}, the latter two numbers by tensor.
      threshold: of RMS_t.
    """
    before = steps[:-1]
    last = steps[-1] if steps else {}
    if first := first_to_cross(before, threshold):
        found = f"{first.value:.3g} at step {first.step}"
        return f"{first.tensor} was the first with RMS_t above {threshold}: {found}"
    norms = last.get("grad_norms", {})
    finite = {name: norm for name, norm in norms.items() if math.isfinite(norm)}
    if finite:
        others = [name for name in norms if name not in finite]
        return f"the gradient of {others[0]} is not finite either" if others else ""
    if before and (norms := before[-1].get("grad_norms")):
        name, norm = statistics.largest(norms)[0]
        return f"{name} had the largest gradient in the step before, of norm {norm:.3g}"
    return ""


def save(
    workdir: Path,
    spike: Spike,
    config: SpikeConfig,
    steps: Iterable[dict[str, Any]],
    data_state: dict[str, Any],
) -> None:
    """Writes ``spikes/<step>.json``; all processes call this.

    Args:
      steps: the last ones, as in `suspect`.
      data_state: this process's position in the data just before the batch of the spike.
    """
    data_state = merge_states(distributed.gather_json(data_state))
    if not distributed.is_primary():
        return
    steps, start = list(steps), keep_checkpoint(workdir, spike.step, config.lead)
    first = first_to_cross(steps, config.rms_threshold)
    record = {
        **spike._asdict(),
        "policy": vars(config),
        "checkpoint": None if start is None else str(start.relative_to(workdir)),
        "data_state": data_state,
        "first": None if first is None else first._asdict(),
        "steps": steps,
    }
    path = workdir / "spikes" / f"{spike.step}.json"
    path.parent.mkdir(exist_ok=True)
    write_json(path, record)


def checkpoint_before(
    infos: Iterable[checkpoint.StepInfo], spike_step: int, lead: int
) -> checkpoint.StepInfo | None:
    """The newest complete checkpoint more than `lead` steps before a spike, else the newest before it."""
    earlier = [info for info in infos if info.status == "complete" and info.step < spike_step]
    early_enough = [info for info in earlier if info.step < spike_step - lead]
    return max(early_enough or earlier, key=lambda info: info.step, default=None)


def keep_checkpoint(workdir: Path, spike_step: int, lead: int) -> Path | None:
    """Protects the checkpoint to replay from against deletion.

    Returns:
      Its hard-linked copy in ``spikes/checkpoints``; the checkpoint itself where the file system has no
      hard links; None without a checkpoint from before the spike.
    """
    chosen = checkpoint_before(checkpoint.list_steps(workdir / "checkpoints"), spike_step, lead)
    if chosen is None:
        return None
    kept = kept_checkpoints(workdir, len(read_rollbacks(workdir))) / chosen.path.name
    if not kept.exists():
        part = kept.with_name(f"{kept.name}.unfinished")
        shutil.rmtree(part, ignore_errors=True)  # of a run that was killed here
        try:
            shutil.copytree(chosen.path, part, copy_function=os.link)
            if mirror := mirrored(kept):  # of the arrays
                mirror.copy(chosen.path, kept)
            part.rename(kept)
        except (OSError, shutil.Error):
            shutil.rmtree(part, ignore_errors=True)
            return chosen.path
    return kept


def read_record(workdir: Path, step: int) -> dict[str, Any] | None:
    """What `save` wrote about the spike at a step; None if there was no spike."""
    remedy = "put back a good copy, or delete it: only this spike can then not be replayed"
    return read_json(workdir / "spikes" / f"{step}.json", fields=_FIELDS, remedy=remedy)


def recorded_spikes(workdir: Path) -> list[dict[str, Any]]:
    """The spike records of a run in the order of their steps; a damaged one is named and left out."""
    steps = sorted(int(path.stem) for path in (workdir / "spikes").glob("*.json") if path.stem.isdigit())
    found = []
    for step in steps:
        try:
            found.append(read_record(workdir, step))
        except ValueError as error:
            logging.warning("%s", error)
    return [record for record in found if record]


# --- among recorded numbers -----------------------------------------------------------------------------


def find_spikes(steps: np.ndarray, losses: np.ndarray, config: SpikeConfig) -> list[Spike]:
    """The spikes among recorded losses, each where it begins.

    Args:
      steps: (n,), rising. If only every tenth step was logged, the window spans ten times as many steps.
      losses: (n,); losses that are not finite are ignored.
      config: the definition of a spike.
    """
    detector, finite = Detector(config), np.isfinite(losses)
    pairs = zip(steps[finite].tolist(), losses[finite].tolist(), strict=True)
    found = [detector.observe(step, loss) for step, loss in pairs]
    return [spike for spike in found if spike is not None and spike.begins]


def find_rms_spikes(steps: np.ndarray, rms: np.ndarray, config: SpikeConfig) -> list[int]:
    """The steps at which the RMS_t of one tensor begins to exceed `rms_threshold`.

    Args:
      steps: (n,), rising.
      rms: (n,), RMS_t of the tensor at these steps; NaN counts as above the threshold.
      config: the definition of a spike.
    """
    found, last = [], -math.inf
    for step in steps[~(rms <= config.rms_threshold)].tolist():
        if step - last > config.merge_steps:
            found.append(step)
        last = step
    return found


class PredictedSpikes(NamedTuple):
    """How many loss spikes followed an RMS_t spike, and how many would by chance."""

    loss_spikes: int
    predicted: int
    by_chance: float


def count_predicted(
    loss_spikes: Sequence[int], rms_spikes: Sequence[int], num_steps: int, config: SpikeConfig
) -> PredictedSpikes:
    """Counts the loss spikes that come 1 to `lead` steps after an RMS_t spike.

    Args:
      loss_spikes: steps at which the loss spikes.
      rms_spikes: steps at which RMS_t spikes.
      num_steps: length of the run. A loss spike at a random step would be predicted with a probability
        equal to the fraction of these steps that follow an RMS_t spike.
      config: the definition of a spike.
    """
    followers = {step + i for step in rms_spikes for i in range(1, config.lead + 1)}
    predicted = sum(step in followers for step in loss_spikes)
    fraction = sum(step <= num_steps for step in followers) / max(num_steps, 1)
    return PredictedSpikes(len(loss_spikes), predicted, fraction * len(loss_spikes))
