"""A guard against loss spikes that returns the run to an earlier checkpoint.

If many steps led to a spike, leaving out the last of them does not prevent it. PaLM (arXiv:2204.02311,
section 5.1) restarted from a checkpoint about 100 steps earlier and skipped the batches around the
spike; the same batches did not cause a spike when training reached them from another state.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from maxlp.monitoring.spikes import Spike, SpikeConfig
from maxlp.runtime import checkpoint, distributed
from maxlp.runtime.files import move, read_json, unused_path, write_json


class RollbackRequested(Exception):
    """Raised inside a training loop at a spike; its caller rolls the run back and trains again."""

    def __init__(self, spike: Spike, config: SpikeConfig) -> None:
        super().__init__(f"the loss of step {spike.step} is {spike.loss:.4g}")
        self.spike = spike
        self.config = config


def roll_back(workdir: Path, spike: Spike, config: SpikeConfig) -> str:
    """Makes the next launch of a run begin before a spike and skip the batches around it.

    Checkpoints newer than the one chosen by `rollback_target` are renamed to ``<step>.rolled_back`` and
    never deleted. `spikes/rollbacks.json` records the batches to skip. All processes call this, with the
    run's checkpointer closed.

    Returns:
      A line for the user.

    Raises:
      FloatingPointError: the run was rolled back `max_actions` times already.
    """
    rollbacks = read_rollbacks(workdir)
    if len(rollbacks) >= config.max_actions:
        raise FloatingPointError(
            f"the loss of step {spike.step} is {spike.loss:.4g} and all {len(rollbacks)} rollbacks of "
            f"spikes.max_actions={config.max_actions} are used up; lower optimizer.learning_rate or "
            "optimizer.b2, or raise spikes.max_actions"
        )
    infos = [info for info in checkpoint.list_steps(workdir / "checkpoints") if info.status == "complete"]
    target = rollback_target([info.step for info in infos], spike.step, config.rewind_steps)
    begin = batches_drawn(workdir, target, rollbacks)
    # An earlier rollback to a step between the two has moved the batch of the spike further from `begin`.
    newest = max((info.step for info in infos if info.step < spike.step), default=0)
    of_spike = batches_drawn(workdir, newest, rollbacks) + spike.step - newest
    end = max(begin + config.skip_batches, of_spike)
    distributed.barrier("before rollback")  # all processes have read what the primary one changes below
    if distributed.is_primary():
        for info in infos:
            if info.step > target:
                move(info.path, unused_path(info.path.with_name(f"{info.step}.rolled_back")))
        entry = {"spike": spike._asdict(), "to": target, "batches": [begin, end]}
        (workdir / "spikes").mkdir(exist_ok=True)
        write_json(_rollbacks_path(workdir), [*rollbacks, entry])
    distributed.barrier("after rollback")
    return (
        f"rolled back from step {spike.step} (loss {spike.loss:.4g}, {spike.sigmas:.1f} σ above the "
        f"preceding mean) to step {target}; batches {begin + 1} to {end} are skipped"
    )


def rollback_target(steps: Sequence[int], spike_step: int, rewind_steps: int) -> int:
    """The step of the checkpoint to return to; 0 stands for the beginning of the run.

    Args:
      steps: steps of the complete checkpoints.
      spike_step: step of the spike.
      rewind_steps: how much older than the spike the checkpoint should be. The newest checkpoint that is
        old enough is chosen, or else the oldest one from before the spike.
    """
    earlier = [step for step in steps if step < spike_step]
    old_enough = [step for step in earlier if step <= spike_step - rewind_steps]
    return max(old_enough) if old_enough else min(earlier, default=0)


def kept_checkpoints(workdir: Path, rollbacks: int) -> Path:
    """The folder of checkpoints kept for spikes after this many rollbacks, each of which repeats steps."""
    return workdir / "spikes" / (f"checkpoints-{rollbacks}" if rollbacks else "checkpoints")


def skip_excluded_batches(
    workdir: Path, step: int, batches: Iterator[Any], before: int = sys.maxsize
) -> None:
    """Draws and discards the batches that rollbacks to this step, or to an earlier one, exclude.

    Args:
      workdir: of the run.
      step: of the restored state, 0 for a fresh one.
      batches: the data iterator, restored with that state; ``get_state()["step"]`` counts its batches.
      before: a number of batches; a rollback that excludes later ones has not happened yet.

    Raises:
      ValueError: the data ends before the last excluded batch.
    """
    ends = [entry["batches"][1] for entry in read_rollbacks(workdir) if entry["to"] <= step]
    end = max((end for end in ends if end <= before), default=0)
    while batches.get_state()["step"] < end:
        if next(batches, None) is None:
            raise ValueError(
                f"{_rollbacks_path(workdir)} excludes all batches up to {end}, but the data ends before; "
                "raise config.data.num_epochs, or lower spikes.skip_batches before the next rollback"
            )


def set_spikes_aside(workdir: Path) -> None:
    """Renames the records of spikes and rollbacks of an earlier run to ``spikes.old``.

    Which batches a rollback excludes is a fact about one sequence of updates. All processes call this when
    another run begins in the workdir.
    """
    if distributed.is_primary() and (workdir / "spikes").exists():
        kept = unused_path(workdir / "spikes.old")
        move(workdir / "spikes", kept)
        distributed.print_primary(f"the spikes and rollbacks of an earlier run are now in {kept}")
    distributed.barrier("spikes set aside")


def read_rollbacks(workdir: Path) -> list[dict[str, Any]]:
    """All rollbacks of a run: the spike, the step it returned to, and the range of excluded batches."""
    path = _rollbacks_path(workdir)
    remedy = "put back a good copy, or delete it: the run may then train on batches that it had excluded"
    fields = {"to": int, "batches": [int, int], "spike": {"step": int}}
    return read_json(path, [], kind=list, fields=fields, remedy=remedy)


def batches_drawn(workdir: Path, step: int, rollbacks: list[dict[str, Any]]) -> int:
    """How many batches a run that restarts at this step has drawn or skipped before its first update."""
    record = workdir / "checkpoints" / str(step) / "checkpoint.json"
    fields = {"data_state": {"step": int}}
    drawn = read_json(record, fields=fields)["data_state"]["step"] if record.exists() else 0
    return max([drawn, *(entry["batches"][1] for entry in rollbacks if entry["to"] <= step)])


def _rollbacks_path(workdir: Path) -> Path:
    return workdir / "spikes" / "rollbacks.json"
