"""Runs the steps before a spike again and says where it began.

    python -m maxlp.report DIR --spike=2300 --precision=float32

From the checkpoint that was kept at the spike (or another one before it) and the data's position in it,
with the run's own config but for the precision. In the run's precision, on the machine of the run, the
losses are those of the run. If the spike stays away in float32, the precision made it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from maxlp.core import train_step as step
from maxlp.monitoring import guards as guard
from maxlp.monitoring import statistics
from maxlp.monitoring.spikes import PRECISIONS, Policy
from maxlp.monitoring.watch import Crossing, first_to_cross, read_record
from maxlp.parallel.batches import device_batches
from maxlp.run import build
from maxlp.run import run_dir as files
from maxlp.runtime import checkpoint

SHOWN = 3  # tensors a step


class Verdict(NamedTuple):
    """What a replay found: its losses by step, and who was first, if anyone was."""

    losses: dict[int, float]
    by_rms: dict[str, Any] | None
    by_grad_norm: dict[str, Any] | None


def replay(
    workdir: Path, spike_step: int, precision: str = "recipe", say: Callable[[str], None] = print
) -> Verdict:
    """Replays up to `spike_step`, a line for each step.

    Args:
        workdir: of the run.
        spike_step: any step; a recorded spike brings its own checkpoint.
        precision: "recipe" is the run's own; "bf16" and "float32" take all matmuls to that.
        say: where the lines go.

    Raises:
        ValueError: no such precision, no run, no data before that step.
    """
    c = with_precision(files.load_config(workdir), precision)
    c.spikes.statistics = True
    policy = build.spike_policy(c)
    mesh = build.mesh(c)
    build.check(c, mesh)
    make_model, (tx, schedule), judges = build.model(c), build.tx(c), build.judges(c)
    with jax.set_mesh(mesh), contextlib.closing(_data(c, workdir)) as batches:
        graphdef, abstract = step.abstract_state(make_model, tx, mesh, judges)
        root = _checkpoint_before(workdir, spike_step, policy)
        if root is None:
            state, start = _first_state(c, abstract, tx, judges), 0
        else:
            state, start = _restored_state(root, abstract, batches, precision)
        guard.pass_over(workdir, start, batches)
        say(f"from step {start} to {spike_step}, precision {precision}")
        train_step = step.jit_train_step(
            abstract,
            mesh,
            graphdef=graphdef,
            gradients=build.task(c).gradients(c),
            tx=tx,
            schedule=schedule,
            judges=judges,
            statistics=build.statistics(c),
        )
        seen = []
        for n, (batch, _) in enumerate(device_batches(batches, mesh, spike_step - start), start + 1):
            state, metrics = train_step(state, batch)
            tensors = {key: metrics[key] for key in ("rms", "grad_norms") if key in metrics}
            numbers = {key: statistics.numbers(jax.device_get(value)) for key, value in tensors.items()}
            seen.append({"step": n, "loss": float(metrics["loss"]), **numbers})
            say(_line(seen[-1]))
    last = seen[-policy.lead - 1 :]
    verdict = Verdict(
        {s["step"]: s["loss"] for s in seen}, first_to_cross(last, policy), first_to_stand_out(seen, policy)
    )
    for line in verdict_lines(verdict, spike_step, policy):
        say(line)
    return verdict


def with_precision(c: ConfigDict, precision: str) -> ConfigDict:
    """The config with all matmuls in one precision, or as it is."""
    if precision not in PRECISIONS:
        raise ValueError(f"{precision=} is unknown, choose one of: {', '.join(PRECISIONS)}")
    if precision != "recipe":
        c.model.dtype = {"bf16": "bfloat16", "float32": "float32"}[precision]
        c.precision.update(recipe="bf16", options=ConfigDict(), rules=(), smooth_swiglu="none")
    return c


def _data(c: ConfigDict, workdir: Path) -> Any:
    return iter(build.train_data(c, build.saved_tokenizer(c, workdir)))


def _first_state(c: ConfigDict, abstract: step.State, tx: Any, judges: step.Judges) -> step.State:
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    init = functools.partial(step.init_state, build.model(c), tx, c.train.seed, judges)
    state = jax.jit(init, out_shardings=places)()
    if c.train.init_from:
        state["params"] = checkpoint.load_params(c.train.init_from, abstract["params"])
    return state


def _restored_state(
    root: Path, abstract: step.State, batches: Any, precision: str
) -> tuple[step.State, int]:
    """The state of a checkpoint and its step; the data is brought to where it was."""
    wanted = dict(abstract)
    # What a recipe remembers (amax histories) is of no use to another.
    if precision != "recipe" and jax.tree.leaves(wanted.pop("model_state")):
        raise ValueError(f"{precision=}: this model keeps a state of its own; use precision=recipe")
    restored = checkpoint.restore(root, wanted)
    batches.set_state(restored.data_state)
    return {"model_state": abstract["model_state"]} | restored.state, restored.step


def _checkpoint_before(workdir: Path, spike_step: int, policy: Policy) -> Path | None:
    """The one that the spike's record names if it is there, or the best of all; None: the beginning."""
    named = (read_record(workdir, spike_step) or {}).get("checkpoint")
    if named and (workdir / named).is_dir():
        return workdir / named
    folders = (workdir / "checkpoints", workdir / "spikes" / "checkpoints")
    found = [c for folder in folders for c in checkpoint.list_steps(folder) if c.status == "complete"]
    earlier = sorted((c.step, c.path) for c in found if c.step < spike_step)
    before = [item for item in earlier if item[0] < spike_step - policy.lead] or earlier
    if before:
        return before[-1][1]
    if found:
        oldest = min(c.step for c in found)
        raise ValueError(f"{workdir} has no checkpoint before step {spike_step}, its oldest is of {oldest}")
    return None


# --- what is said -------------------------------------------------------------------------------------


def _line(seen: dict[str, Any]) -> str:
    parts = [f"step {seen['step']}  loss {seen['loss']:.4f}"]
    for key, title in (("rms", "RMS_t"), ("grad_norms", "gradient norm")):
        if key in seen:
            top = statistics.largest(seen[key], SHOWN)
            parts.append(f"{title} " + ", ".join(f"{name} {value:.3g}" for name, value in top))
    return "  ".join(parts)


def first_to_stand_out(steps: list[dict[str, Any]], policy: Policy) -> dict[str, Any] | None:
    """The first tensor whose gradient norm stands out of its own before, as a loss does of its own.

    Looked for in the last `lead` + 1 of the steps; of several at a step the one by most deviations.

    Returns:
        A `Crossing` as a dict, its value in deviations, or None.
    """
    names = list(steps[0]["grad_norms"]) if steps else []
    norms = np.array([[s["grad_norms"][name] for name in names] for s in steps])
    for i in range(max(policy.min_history, len(steps) - policy.lead - 1), len(steps)):
        before = norms[max(0, i - policy.window) : i]
        std = before.std(axis=0)
        sigmas = (norms[i] - before.mean(axis=0)) / np.where(std > 0, std, np.inf)
        sigmas = np.where(np.isfinite(norms[i]), sigmas, np.inf)
        if (sigmas > policy.threshold).any():
            worst = int(np.argmax(sigmas))
            return Crossing(names[worst], steps[i]["step"], float(sigmas[worst]))._asdict()
    return None


def verdict_lines(verdict: Verdict, spike_step: int, policy: Policy) -> Iterator[str]:
    """Which layer and which tensor went first."""
    what = {
        "RMS_t": (verdict.by_rms, f"above {policy.rms_threshold:g}", "RMS_t {:.3g}"),
        "gradient norm": (
            verdict.by_grad_norm,
            f"{policy.threshold:g} σ above its own before",
            "{:.3g} σ",
        ),
    }
    for name, (found, rule, form) in what.items():
        if found is None:
            yield f"first by {name}: none was {rule} in the {policy.lead} steps before"
        else:
            ahead = spike_step - found["step"]
            value = form.format(found["value"])
            yield f"first by {name}: {found['tensor']} at step {found['step']}, {ahead} before ({value})"
