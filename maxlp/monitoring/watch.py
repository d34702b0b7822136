"""Follows a run step by step, and writes down what is known when it spikes.

    spikes/2300.json         the loss before, RMS_t and gradient norms of the last steps, which tensor was
                             first, the data's position just before that batch, the checkpoint to begin from
    spikes/checkpoints/2000  that checkpoint, by hard links: it stays when the run deletes its own

`python -m maxlp.report DIR --spike 2300` replays it.
"""

import collections
import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from maxlp.data import merge_states
from maxlp.monitoring import statistics
from maxlp.monitoring.guards import RolledBack
from maxlp.monitoring.spikes import Detector, Policy, Spike
from maxlp.runtime import checkpoint, distributed, files


class Crossing(NamedTuple):
    """The first tensor above the threshold in the steps before a spike."""

    tensor: str
    step: int
    value: float


class Watch:
    """The spike detector of a live run, and its memory of the last `lead` + 1 steps.

    All processes see the same losses and come to the same decision.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._detector = Detector(policy)
        self._steps: collections.deque[dict[str, Any]] = collections.deque(maxlen=policy.lead + 1)
        self._positions: dict[int, dict[str, Any]] = {}
        self._skips_in_a_row = 0

    def note(self, step: int, data_state: dict[str, Any]) -> None:
        """Remembers where the data stands after the batch of a step (0: at the start)."""
        self._positions[step] = data_state
        self._positions = {n: state for n, state in self._positions.items() if n >= step - 4}

    def observe(self, step: int, values: dict[str, Any]) -> Spike | None:
        """Takes the metrics of a step, in order; returns the spike it is in, if it is.

        Args:
            step: finished updates.
            values: on the host: "loss", and what there is of "grad_norm", "skipped" (0 or 1) and of
                `statistics.tensor_statistics`.

        Raises:
            FloatingPointError: `max_actions` steps in a row were skipped.
        """
        loss = float(values["loss"])
        known = {key: statistics.numbers(values[key]) for key in ("rms", "grad_norms") if key in values}
        self._steps.append(
            {"step": step, "loss": loss, "grad_norm": float(values.get("grad_norm", 0.0)), **known}
        )
        self._skips_in_a_row = self._skips_in_a_row + 1 if values.get("skipped", 0) else 0
        if self.policy.guard == "skip" and self._skips_in_a_row >= self.policy.max_actions:
            raise FloatingPointError(
                f"step {step}: {self._skips_in_a_row} updates in a row were skipped (loss {loss:.4g}); "
                "lower optimizer.learning_rate, or raise spikes.max_actions"
            )
        return self._detector.observe(step, loss)

    def act(self, workdir: Path, spike: Spike, values: dict[str, Any]) -> None:
        """Writes down a spike where it begins, and ends this life of the run if it has to.

        Args:
            values: those of `observe`.

        Raises:
            RolledBack: the policy is to go back.
            FloatingPointError: the loss is not finite, and its step counted.
        """
        if spike.begins:
            self.save(workdir, spike)
        if self.acts_on(spike):
            raise RolledBack(spike)
        if not math.isfinite(spike.loss) and not values.get("skipped"):
            raise FloatingPointError(f"the loss of step {spike.step} is {spike.loss}")

    def acts_on(self, spike: Spike) -> bool:
        """Whether the run is to be rolled back."""
        return self.policy.guard == "rollback" and spike.sigmas > self.policy.guard_threshold

    def save(self, workdir: Path, spike: Spike) -> None:
        """Writes ``spikes/<step>.json`` of what `observe` has just returned; called by all processes."""
        data_state = merge_states(distributed.gather_json(self._positions[spike.step - 1]))
        if not distributed.is_primary():
            return
        begin = keep_checkpoint(workdir, spike.step, self.policy.lead)
        record = {
            **spike._asdict(),
            "policy": vars(self.policy),
            "checkpoint": None if begin is None else str(begin.relative_to(workdir)),
            "data_state": data_state,
            "first": first_to_cross(self._steps, self.policy),
            "steps": list(self._steps),
        }
        path = workdir / "spikes" / f"{spike.step}.json"
        path.parent.mkdir(exist_ok=True)
        files.write_json(path, record)

    def meta(self) -> dict[str, Any]:
        """What a checkpoint keeps: a resumed run sees the same spikes."""
        return {"watch": self.get_state()}

    def get_state(self) -> dict[str, Any]:
        """JSON-able."""
        return {"detector": self._detector.get_state(), "steps": list(self._steps)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._detector.set_state(state["detector"])
        self._steps.extend(state["steps"])


def first_to_cross(steps: Iterable[dict[str, Any]], policy: Policy) -> dict[str, Any] | None:
    """The first tensor with an RMS_t above `rms_threshold`; of several at a step the largest.

    Args:
        steps: rising, each {"step": …, "rms": numbers by tensor}.

    Returns:
        A `Crossing` as a dict, or None.
    """
    for seen in steps:
        crossed = {name: x for name, x in seen.get("rms", {}).items() if not x <= policy.rms_threshold}
        if crossed:
            name, value = statistics.largest(crossed)[0]
            return Crossing(name, seen["step"], value)._asdict()
    return None


def keep_checkpoint(workdir: Path, spike_step: int, lead: int) -> Path | None:
    """The checkpoint to replay from, kept under ``spikes/checkpoints`` where the file system has links.

    The newest that is at least `lead` steps older than the spike, or else the newest before it, or None.
    """
    found = [c for c in checkpoint.list_steps(workdir / "checkpoints") if c.status == "complete"]
    earlier = [c for c in found if c.step < spike_step]
    if not earlier:
        return None
    chosen = ([c for c in earlier if c.step <= spike_step - lead - 1] or earlier)[-1].path
    kept = workdir / "spikes" / "checkpoints" / chosen.name
    if not kept.exists():
        part = kept.with_name(f"{kept.name}.unfinished")
        try:
            shutil.copytree(chosen, part, copy_function=os.link)
            part.rename(kept)
        except (OSError, shutil.Error):
            shutil.rmtree(part, ignore_errors=True)
            return chosen
    return kept


def read_record(workdir: Path, step: int) -> dict[str, Any] | None:
    """What `Watch.save` wrote of a spike, or None."""
    path = workdir / "spikes" / f"{step}.json"
    return json.loads(path.read_text()) if path.exists() else None


def recorded_spikes(workdir: Path) -> list[dict[str, Any]]:
    """The records of a run in order of their steps."""
    steps = sorted(int(path.stem) for path in (workdir / "spikes").glob("*.json") if path.stem.isdigit())
    return [record for step in steps if (record := read_record(workdir, step))]
