"""What is done about a spike: skip the step on the device, or go back on the host.

Skip. A batch that makes the loss or the gradient infinite, or far larger than in the steps before, takes
no part: `step.train_step` leaves parameters, model state and optimizer state as they were. That is decided
on the device, so that the host need not wait for a step before it starts the next. What is remembered are
the losses and norms of the last `window` steps, a part of the training state (and of its checkpoints),
and the skipped ones are among them: a level that stays is soon accepted.

Rollback. A spike that comes from a long history of steps is not cured by leaving out its last one. PaLM
(Chowdhery et al. 2022, section 5.1) restarted from a checkpoint about 100 steps before and passed over
the batches around the spike; the same batches from another state made no spike.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxlp.monitoring.spikes import Policy, Spike
from maxlp.runtime import checkpoint, distributed, files

State = dict[str, Any]


# --- skip: inside the compiled step -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SkipGuard:
    """A `step.Judge`: a step counts whose loss and gradient norm are finite and like those before."""

    policy: Policy

    def init(self) -> State:
        return {
            "seen": jnp.zeros((), jnp.int32),  # finite steps
            "values": jnp.zeros(
                (2, self.policy.window), jnp.float32
            ),  # losses and gradient norms, in a ring
        }

    def judge(self, remembered: State, metrics: State) -> tuple[jax.Array, State, State]:
        """(verdict, what to remember, no metrics)."""
        new = jnp.stack([metrics["loss"], metrics["grad_norm"]]).astype(jnp.float32)
        seen, values = remembered["seen"], remembered["values"]
        count = jnp.minimum(seen, self.policy.window)
        there = jnp.arange(self.policy.window) < count
        mean = jnp.sum(jnp.where(there, values, 0), axis=1) / jnp.maximum(count, 1)
        above = jnp.where(there, values - mean[:, None], 0)
        std = jnp.sqrt(jnp.sum(jnp.square(above), axis=1) / jnp.maximum(count, 1))
        stands_out = (new > mean + self.policy.guard_threshold * std) & (std > 0)
        finite = jnp.isfinite(new).all()
        counts = finite & ~(stands_out.any() & (count >= self.policy.min_history))
        written = values.at[:, seen % self.policy.window].set(new)
        return counts, {"seen": seen + finite, "values": jnp.where(finite, written, values)}, {}


def judges(policy: Policy) -> dict[str, SkipGuard]:
    """What a policy adds to the judges of `step.train_step`."""
    return {"guard": SkipGuard(policy)} if policy.guard == "skip" else {}


# --- rollback: between two lives of the training loop -------------------------------------------------


class RolledBack(Exception):
    """Raised by a training loop that has spiked; its caller rolls back and trains again."""

    def __init__(self, spike: Spike) -> None:
        super().__init__(f"the loss of step {spike.step} is {spike.loss:.4g}")
        self.spike = spike


def roll_back(workdir: Path, spike: Spike, policy: Policy) -> str:
    """Makes the next start of a run begin before a spike and pass over the data around it.

    Checkpoints from the spike on, and those less than `rewind_steps` before it, are renamed to
    ``<step>.rolled_back`` (they stay for good); with no older one the oldest before the spike is taken, or
    none: the beginning. `spikes/rollbacks.json` says what the data passes over. Called by all processes,
    with the run's checkpointer closed.

    Returns:
        A line for the user.

    Raises:
        FloatingPointError: the run was rolled back `max_actions` times already.
    """
    rollbacks = read_rollbacks(workdir)
    if len(rollbacks) >= policy.max_actions:
        raise FloatingPointError(
            f"the loss of step {spike.step} is {spike.loss:.4g} after {len(rollbacks)} rollbacks: lower "
            "optimizer.learning_rate or optimizer.b2, or raise spikes.max_actions"
        )
    found = [c for c in checkpoint.list_steps(workdir / "checkpoints") if c.status == "complete"]
    earlier = [c.step for c in found if c.step < spike.step]
    enough = [step for step in earlier if step <= spike.step - policy.rewind_steps]
    target = max(enough) if enough else min(earlier, default=0)
    begin = data_position(workdir, target, rollbacks)
    past = begin + max(policy.skip_batches, spike.step - target)
    distributed.barrier("before rollback")  # all have read what is renamed and written below
    if distributed.is_primary():
        for c in found:
            if c.step > target:
                c.path.rename(_free(c.path.with_name(f"{c.step}.rolled_back")))
        entry = {"spike": spike._asdict(), "to": target, "batches": [begin, past]}
        (workdir / "spikes").mkdir(exist_ok=True)
        files.write_json(workdir / "spikes" / "rollbacks.json", [*rollbacks, entry])
    distributed.barrier("after rollback")
    return (
        f"step {spike.step}: loss {spike.loss:.4g}, {spike.sigmas:.1f} σ above the mean before it; back to "
        f"step {target}, without its batches {begin + 1} to {past}"
    )


def pass_over(workdir: Path, step: int, batches: Iterator[Any]) -> int:
    """Draws the batches that rollbacks to this step, or before it, leave out; returns how many.

    Args:
        step: of the restored state, 0 for a fresh one.
        batches: where that state's data stands; ``get_state()["step"]`` counts its batches.
    """
    past = max((entry["batches"][1] for entry in read_rollbacks(workdir) if entry["to"] <= step), default=0)
    count = 0
    while batches.get_state()["step"] < past:
        next(batches)
        count += 1
    return count


def read_rollbacks(workdir: Path) -> list[dict[str, Any]]:
    """Every rollback of a run: its spike, the step it went to, the range of batches that it left out."""
    path = workdir / "spikes" / "rollbacks.json"
    return json.loads(path.read_text()) if path.exists() else []


def data_position(workdir: Path, step: int, rollbacks: list[dict[str, Any]]) -> int:
    """Batches drawn when training goes on from a step: those of its checkpoint and those passed over."""
    record = workdir / "checkpoints" / str(step) / "checkpoint.json"
    drawn = json.loads(record.read_text())["data_state"]["step"] if record.exists() else 0
    return max([drawn, *(entry["batches"][1] for entry in rollbacks if entry["to"] <= step)])


def _free(path: Path) -> Path:
    names = (path.with_name(f"{path.name}{suffix}") for suffix in ("", *(f"-{i}" for i in range(2, 1000))))
    return next(name for name in names if not name.exists())
