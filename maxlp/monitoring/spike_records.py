"""What is known about spikes: the tensors behind them, and the records that `watch.Watch` wrote."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging

from maxlp.monitoring import statistics
from maxlp.runtime.files import read_json

_NUMBER, _NONE = (int, float), type(None)
_FIELDS = {  # of a record; see `watch.Watch.save`
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


def read_record(workdir: Path, step: int) -> dict[str, Any] | None:
    """What `Watch.save` wrote about the spike at a step; None if there was no spike."""
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
