"""Follows a run step by step, finds its loss spikes, and decides what is done about them."""

import collections
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlp.monitoring import statistics
from maxlp.monitoring.rollback import RollbackRequested
from maxlp.monitoring.spikes import Detector, Spike, SpikeConfig

KEPT_POSITIONS = 4  # steps; metrics reach the host a step late, and a spike needs the position before it


class Watch:
    """The spike detector of a live run, with the measurements of the last `lead` + 1 steps.

    All processes observe the same losses and therefore make the same decisions.
    """

    def __init__(self, config: SpikeConfig) -> None:
        self.config = config
        self._detector = Detector(config)
        self._steps: collections.deque[dict[str, Any]] = collections.deque(maxlen=config.lead + 1)
        self._positions: dict[int, dict[str, Any]] = {}
        self._skips_in_a_row = 0
        self._loss_scale = 0.0

    def note(self, step: int, data_state: dict[str, Any]) -> None:
        """Stores the data position after the batch of a step (0: before the first batch)."""
        self._positions[step] = data_state
        self._positions = {n: state for n, state in self._positions.items() if n >= step - KEPT_POSITIONS}

    def observe(self, step: int, values: dict[str, Any]) -> Spike | None:
        """Takes the metrics of one step, in order, and returns the spike that the step belongs to, if any.

        Args:
          step: number of finished updates.
          values: metrics on the host: "loss" and, where present, "grad_norm", "skipped" (0 or 1),
            "loss_scale" and the dicts of `statistics.tensor_statistics`.

        Raises:
          FloatingPointError: `max_actions` steps in a row were skipped.
        """
        loss = float(values["loss"])
        tensors = statistics.of_tensors(values)
        self._steps.append(
            {"step": step, "loss": loss, "grad_norm": float(values.get("grad_norm", 0.0)), **tensors}
        )
        self._count_skips(step, loss, values)
        return self._detector.observe(step, loss)

    def _count_skips(self, step: int, loss: float, values: dict[str, Any]) -> None:
        """Ends a run that no longer trains; overflows do not count while the loss scale falls."""
        before, self._loss_scale = self._loss_scale, float(values.get("loss_scale", 0.0))
        if not values.get("skipped", 0):
            self._skips_in_a_row = 0
        elif not self._loss_scale < before:
            self._skips_in_a_row += 1
        if self._skips_in_a_row >= self.config.max_actions:
            scale = f", loss scale {self._loss_scale:g}" if self._loss_scale else ""
            raise FloatingPointError(
                f"step {step}: {self._skips_in_a_row} updates in a row were skipped "
                f"(loss {loss:.4g}{scale}); lower optimizer.learning_rate, or raise spikes.max_actions"
            )

    def act(self, workdir: Path, spike: Spike, values: dict[str, Any]) -> None:
        """Records a spike where it begins, and stops or rolls back the run if the config requires it.

        Args:
          workdir: of the run.
          spike: what `observe` has just returned.
          values: the metrics given to `observe`.

        Raises:
          RollbackRequested: the guard returns the run to an earlier checkpoint.
          FloatingPointError: the loss is not finite and the step was not skipped.
        """
        from maxlp.monitoring import spike_records  # few runs have spikes

        if spike.begins:
            spike_records.save(workdir, spike, self.config, self._steps, self._positions[spike.step - 1])
        if self.config.guard == "rollback" and spike.sigmas > self.config.guard_threshold:
            raise RollbackRequested(spike, self.config)
        if not math.isfinite(spike.loss) and not values.get("skipped"):
            cause = spike_records.suspect(list(self._steps), self.config.rms_threshold)
            raise FloatingPointError(
                f"the loss of step {spike.step} is {spike.loss}{cause and f'; {cause}'}; lower "
                "optimizer.learning_rate, or set spikes.guard to skip or rollback; to replay the steps "
                f"before it: python -m maxlp.report {shlex.quote(str(workdir))} --spike={spike.step}"
            )

    def meta(self) -> dict[str, Any]:
        """What a checkpoint stores, so that a resumed run finds the same spikes and counts on."""
        skips = {"skips_in_a_row": self._skips_in_a_row, "loss_scale": self._loss_scale}
        return {"watch": {"detector": self._detector.get_state(), "steps": list(self._steps), **skips}}

    def set_meta(self, meta: Mapping[str, Any]) -> None:
        """Restores what `meta` returned; a checkpoint that lacks it changes nothing."""
        if state := meta.get("watch"):
            self._detector.set_state(state["detector"])
            self._steps.extend(state["steps"])
            self._skips_in_a_row = state.get("skips_in_a_row", 0)  # earlier versions saved neither
            self._loss_scale = state.get("loss_scale", 0.0)
