"""What a spike is: one definition, recorded with the run.

The numbers are parameters because the published ones could not be confirmed. Wortsman et al. 2023
(arXiv:2304.13013) are said to count a loss spike at 3.2 running deviations above the running mean and an
RMS spike at 2.3; the authors' training code saves its state at RMS_t > 1.8. Their finding is that RMS_t
spikes come 1 to 8 steps before the loss does.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

GUARDS = ("off", "skip", "rollback")
PRECISIONS = ("recipe", "bf16", "float32")  # of a replay


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """What counts as a spike and what is done about it: the config's ``spikes`` section.

    window: how many finite losses before one make its mean and deviation.
    threshold: a loss spikes at this many deviations above the mean.
    min_history: losses before which nothing counts.
    merge_steps: spikes up to this many steps after another belong to it.
    rms_threshold: a tensor spikes at this RMS_t.
    lead: steps before a loss spike in which RMS_t spikes foretell it.
    guard: "off"; "skip" does not apply the update of a step whose loss or gradient norm is not finite or
        stands out; "rollback" goes back to a checkpoint before such a loss and past the data around it.
    guard_threshold: the guard acts at this many deviations: more than are noise.
    rewind_steps: "rollback" takes a checkpoint at least this much older than the spike, if there is one.
    skip_batches: "rollback" passes over this many batches, and at least over that of the spike (PaLM,
        Chowdhery et al. 2022, section 5.1: about 100 steps back, 200 to 500 batches passed over).
    max_actions: after this many skips in a row, or rollbacks in all, the run stops with an error.

    Raises:
        ValueError: a value that cannot be.
    """

    window: int = 64
    threshold: float = 3.2
    min_history: int = 16
    merge_steps: int = 10
    rms_threshold: float = 1.8
    lead: int = 8
    guard: str = "off"
    guard_threshold: float = 6.0
    rewind_steps: int = 100
    skip_batches: int = 200
    max_actions: int = 10

    def __post_init__(self) -> None:
        if self.guard not in GUARDS:
            raise ValueError(f"guard={self.guard!r} is unknown, choose one of: {', '.join(GUARDS)}")
        for key in ("threshold", "guard_threshold", "rms_threshold"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key}={getattr(self, key)} must be positive")
        least = {"min_history": 1, "lead": 1, "max_actions": 1, "merge_steps": 0, "rewind_steps": 0}
        for key, bound in (least | {"skip_batches": 0, "window": self.min_history}).items():
            if getattr(self, key) < bound:
                raise ValueError(f"{key}={getattr(self, key)} must be at least {bound}")


class Spike(NamedTuple):
    """A loss that stands out of those before it, `sigmas` above their `mean`; does the spike begin here?"""

    step: int
    loss: float
    mean: float
    sigmas: float
    begins: bool = True


class Detector:
    """Sees a run's losses one by one; stopped and resumed, it sees the same spikes."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._losses: collections.deque[float] = collections.deque(maxlen=policy.window)
        self._last: int | None = None  # step of the last loss that stood out

    def observe(self, step: int, loss: float) -> Spike | None:
        """The spike, if this loss is in one; a loss that is not finite always is."""
        spike = self._stands_out(step, loss)
        if math.isfinite(loss):
            self._losses.append(loss)
        if spike is None:
            return None
        merged = self._last is not None and step - self._last <= self._policy.merge_steps
        self._last = step
        return spike._replace(begins=not merged)

    def _stands_out(self, step: int, loss: float) -> Spike | None:
        before = np.array(self._losses, np.float64)
        mean = float(before.mean()) if len(before) else math.nan
        if not math.isfinite(loss):
            return Spike(step, loss, mean, math.inf)
        std = float(before.std()) if len(before) >= self._policy.min_history else 0.0
        if std == 0 or loss <= mean + self._policy.threshold * std:
            return None
        return Spike(step, loss, mean, (loss - mean) / std)

    def get_state(self) -> dict[str, Any]:
        """JSON-able."""
        return {"losses": list(self._losses), "last": self._last}

    def set_state(self, state: dict[str, Any]) -> None:
        self._losses = collections.deque(state["losses"], maxlen=self._policy.window)
        self._last = state["last"]


def find_spikes(steps: np.ndarray, losses: np.ndarray, policy: Policy | None = None) -> list[Spike]:
    """The spikes of finished steps, by the definition of `Policy`.

    Args:
        steps: (n,), rising. Steps that are missing (a log of every tenth) are missing in the window too.
        losses: (n,); those that are not finite are left out.
        policy: None for its defaults.
    """
    detector, finite = Detector(policy or Policy()), np.isfinite(losses)
    pairs = zip(steps[finite].tolist(), losses[finite].tolist(), strict=True)
    seen = [detector.observe(step, loss) for step, loss in pairs]
    return [spike for spike in seen if spike is not None and spike.begins]


def find_rms_spikes(steps: np.ndarray, rms: np.ndarray, policy: Policy | None = None) -> list[int]:
    """The steps at which the RMS_t of one tensor begins to be above `rms_threshold`; arguments as above."""
    policy = policy or Policy()
    found, last = [], -math.inf
    for step in steps[rms > policy.rms_threshold].tolist():
        if step - last > policy.merge_steps:
            found.append(step)
        last = step
    return found


class Foretold(NamedTuple):
    """How many loss spikes followed an RMS spike, and how many would have if they came at random."""

    loss_spikes: int
    foretold: int
    by_chance: float


def foretold(
    loss_spikes: Sequence[int], rms_spikes: Sequence[int], steps: int, policy: Policy | None = None
) -> Foretold:
    """Whether RMS spikes come 1 to `lead` steps before loss spikes.

    Args:
        loss_spikes, rms_spikes: their steps.
        steps: of the run. By chance a loss spike falls on the share of them that follow an RMS spike.
    """
    lead = (policy or Policy()).lead
    after = {step + i for step in rms_spikes for i in range(1, lead + 1)}
    hits = sum(step in after for step in loss_spikes)
    share = sum(step <= steps for step in after) / max(steps, 1)
    return Foretold(len(loss_spikes), hits, share * len(loss_spikes))
