"""How does each method cope with injected damage? A tiny Llama on real text, five seeds.

    python benchmarks/spike_suite.py              # 75 minutes of CPU time; run it again to continue
    python benchmarks/spike_suite.py --report     # the tables and the figure of what has been run

`configs/llama/tiny.py` with 2 layers and 512 tokens a step, in float32, with β2 0.999 and without clipping,
where a method does not set them. Each method trains at its own best rate on sound data, searched as in
`optimizers_fair.py`. Then each of five new seeds trains five times, from the same weights on the same
batches: undamaged, and with one of `DAMAGES` in the steps of `STRETCHES`. What is reported is the
difference to the undamaged run of the same method and seed, in nats per token:

    peak       the largest difference of the training loss in the 16 steps after a stretch, on average
    recovery   steps after a stretch until the mean of 5 differences is below `RECOVERED`; at most `LONGEST`
    spikes     loss spikes as `maxlp.monitoring.spikes` defines them, at steps that are not damaged
    in the end the difference of the validation loss

Criteria, written before the runs, against AdamW clipped by the global norm (`clip`):

1. StableAdamW, AdaGC and Stable-SPAM: a lower peak after random tokens, with at least 4 of 5 seeds.
2. AdaGC recovers from random tokens sooner than StableAdamW, on average over the seeds.
3. None of the three costs more than 0.5 % of the validation loss without damage.
4. `qk_norm` and `qk_clip`: a lower peak after ten times the rate, with at least 4 of 5 seeds.
5. β2 0.9 recovers from random tokens sooner than 0.999 (`clip`), on average over the seeds, because it
   forgets them in fewer steps (Wortsman et al. 2023).
6. As 1, after outliers in FP8.
7. The guard `rollback`: a lower peak after random tokens with at least 4 of 5 seeds, for at most 0.5 % of
   the validation loss without damage. It returns to the state of `REWIND` steps before, or more, and skips
   `SKIP` batches; a skipped batch counts as one without a difference. The number of updates stays the same.

`spike_suite_clip.py` does the same with a CLIP.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fidelity_figures
import jax
import jax.numpy as jnp
import numpy as np
from fidelity_runs import RESULTS, Data, Trainer, random_rows, watch_nothing, with_random_tokens
from flax import nnx
from matplotlib.figure import Figure
from optimizers_fair import (
    QUICK,
    Plan,
    command,
    initial_state,
    named,
    search,
    with_rate,
    with_rate_in_state,
)

from maxlp.monitoring import rollback, spike_records, spikes
from maxlp.precision.dot import QuantDot
from maxlp.run.experiment import Experiment

SEEDS = (1, 2, 3, 4, 5)
STRETCHES = [range(start, start + 4) for start in (120, 165, 210, 255)]
JUMP = 10.0
OUTLIER = 2.0**20  # chosen with seed 0: with 2^16 the loss peaks half as high
RECOVERED, LONGEST = 0.05, 40
REWIND, SKIP = 10, 20  # steps and batches; see criterion 7

BASE: dict[str, Any] = {
    "model.dtype": "float32",
    "model.num_layers": 2,
    "data.seq_len": 64,
    "optimizer.b2": 0.999,
    "optimizer.clip_norm": 0.0,
}
CLIP = {"optimizer.clip_norm": 1.0}
METHODS: dict[str, dict[str, Any]] = {
    "clip": CLIP,
    "no clip": {},
    "stable_adamw": named("stable_adamw"),
    "adagc": CLIP | {"optimizer.adagc": {"ratio": 1.05}},
    "stable_spam": named("stable_spam", reset_every=100),
    "guard": CLIP | {"spikes.guard": "skip"},
    "rollback": CLIP
    | {"spikes.guard": "rollback", "spikes.rewind_steps": REWIND, "spikes.skip_batches": SKIP},
    "growing b2": named("stable_adamw", decay_rate=0.5),  # 1 - t^-0.5
    "b2 0.98": CLIP | {"optimizer.b2": 0.98},
    "b2 0.9": CLIP | {"optimizer.b2": 0.9},
    "b2 0.5": CLIP | {"optimizer.b2": 0.5},
    "qk_norm": CLIP | {"model.qk_norm": True},
    "qk_clip 20": CLIP | {"model.qk_clip": 20.0},
    "soft cap 30": CLIP | {"model.logit_soft_cap": 30.0},
}
Batch = dict[str, np.ndarray]
Runs = dict[str, dict[int, dict[str, Any]]]  # method, seed


# --- damage -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Damage:
    """A kind of damage, injected in the steps of `STRETCHES`.

    Attributes:
      meaning: a description for the tables.
      of_batch: maps (batch, seed) to a damaged batch; None for no damage to batches.
      of_rate: factor on the learning rate.
      of_matmuls: whether matmuls are in FP8, with an outlier in each input (`OutlierDot`).
    """

    meaning: str
    of_batch: Callable[[Batch, int], Batch] | None = None
    of_rate: float = 1.0
    of_matmuls: bool = False


@dataclasses.dataclass(frozen=True)
class Suite:
    """The damages and criteria of a family.

    Attributes:
      damages: by name.
      measure: name of the error on the validation data.
      criteria: prints the numbers that the criteria compare, of the methods that have been run.
    """

    damages: dict[str, Damage]
    measure: str
    criteria: Callable[[Runs], None]


def random_targets(batch: Batch, seed: int) -> Batch:
    """Half of the targets are random."""
    rng = np.random.default_rng(seed)
    random, targets = random_rows(batch, rng)[:, 1:], batch["targets"]
    return batch | {"targets": np.where(rng.random(targets.shape) < 0.5, random, targets)}


class OutlierDot(nnx.Module):
    """`QuantDot` with the input's first channel times `OUTLIER`, and the kernel's first row divided by it.

    Without quantization this changes nothing. With one scale per tensor all other channels and that row
    round to zero, so that the product is zero.
    """

    def __init__(self, dot: QuantDot):
        self.dot = dot

    def __call__(self, x: jax.Array, kernel: jax.Array, *args: Any, shared: Any = None, **kwargs: Any):
        size_K = jnp.ones(x.shape[-1], x.dtype).at[0].set(OUTLIER)
        x = x * jnp.expand_dims(size_K, range(x.ndim - 1))
        return self.dot(x, kernel / size_K[:, None], *args, **kwargs)


def with_outliers(run: Experiment) -> Experiment:
    """The experiment with an `OutlierDot` in place of each `QuantDot`."""

    def make_model(rngs: nnx.Rngs) -> nnx.Module:
        model = run.make_model(rngs)
        for _, module in list(nnx.iter_modules(model)):
            if isinstance(dot := getattr(module, "dot_general", None), QuantDot):
                module.dot_general = nnx.data(OutlierDot(dot))
        return model

    return dataclasses.replace(run, make_model=make_model)


RATE_JUMP = Damage(f"{JUMP:g} times the rate", of_rate=JUMP)
OUTLIERS = Damage("FP8 with outliers", of_matmuls=True)
DAMAGES = {
    "tokens": Damage("random tokens instead of text", with_random_tokens),
    "labels": Damage("half of the targets are random", random_targets),
    "rate": RATE_JUMP,
    "outliers": OUTLIERS,
}
UNDAMAGED = Damage("undamaged")


# --- runs ---------------------------------------------------------------------------------------------


def segments(steps: int) -> Iterator[tuple[range, bool]]:
    """Divides all steps into ranges, in order; yields each with whether it is damaged."""
    begin = 0
    for stretch in STRETCHES:
        yield range(begin, stretch.start), False
        yield stretch, True
        begin = stretch.stop
    yield range(begin, steps), False


def train(
    run: Trainer, fp8: Trainer | None, exponent: int, seed: int, damage: Damage, data: Data, plan: Plan
) -> dict[str, Any]:
    """Trains with the damage; returns the error on the validation data and the training losses.

    Args:
      fp8: the trainer for steps with damaged matmuls; its state has the structure of that of ``run``.
    """
    steps = run.settings.train.total_steps
    batches = data.batches(seed, steps)
    state, losses = initial_state(run, exponent, seed), []
    for stretch, is_damaged in segments(steps):
        part = batches[stretch.start : stretch.stop]
        planted = damage if is_damaged else UNDAMAGED
        if planted.of_batch is not None:
            part = [planted.of_batch(batch, i) for i, batch in zip(stretch, part, strict=True)]
        state = with_rate(state, 2.0**exponent * planted.of_rate)
        if part:
            trainer = fp8 if planted.of_matmuls else run
            state, records = trainer.train(state, part, watch_nothing)
            losses += [round(loss, 4) for loss in records["loss"]]
    return {"validation": plan.error(run.evaluate(state)), "loss": losses}


def train_with_rollbacks(
    run: Trainer, fp8: Trainer | None, exponent: int, seed: int, damage: Damage, data: Data, plan: Plan
) -> dict[str, Any]:
    """As `train`, with the guard `rollback`, for which a copy of the state is kept every `REWIND` steps.

    Damage and the losses of the result are counted by batch, not by step; the loss of a skipped batch is
    None.
    """
    config, steps = run.settings.spikes, run.settings.train.total_steps
    batches, damaged = data.batches(seed, 2 * steps), {*itertools.chain(*STRETCHES)}
    state, detector = initial_state(run, exponent, seed), spikes.Detector(config)
    saved, losses, step, actions = {}, [], 0, 0
    while step < steps:
        n = len(losses)
        if step % REWIND == 0:
            saved[step] = jax.tree.map(jnp.copy, state), detector.get_state(), n
        planted, batch = damage if n in damaged else UNDAMAGED, batches[n]
        if planted.of_batch is not None:
            batch = planted.of_batch(batch, n)
        trainer = fp8 if planted.of_matmuls else run
        assert trainer is not None
        state, records = trainer.train(
            with_rate(state, 2.0**exponent * planted.of_rate), [batch], watch_nothing
        )
        losses.append(round(records["loss"][0], 4))
        step += 1
        spike = detector.observe(step, losses[-1])
        if spike is None or spike.sigmas <= config.guard_threshold or actions == config.max_actions:
            continue
        actions += 1
        target = rollback.rollback_target([*saved][1:], step, REWIND)
        kept, found, begin = saved[target]
        state = jax.tree.map(jnp.copy, kept)
        detector.set_state(found)
        losses += [None] * (begin + max(SKIP, step - target) - len(losses))
        step, saved = target, {n: one for n, one in saved.items() if n <= target}
    return {"validation": plan.error(run.evaluate(state)), "loss": losses[:steps], "rollbacks": actions}


def run_method(
    method: str, plan: Plan, trainer: Callable[[str], Trainer], data: Data, *, suite: Suite
) -> None:
    """Makes the missing runs of a method."""
    best = search(method, plan, trainer, data)

    @functools.cache
    def fp8() -> Trainer:
        changes = plan.methods[method] | {"precision.recipe": "fp8_current"}
        return Trainer(changes, data, lambda run: with_rate_in_state(with_outliers(run)))

    for seed in plan.seeds:
        outcomes = plan.measured(method, f"seed{seed}") or {"exponent": best}
        missing = {n: d for n, d in ({"": UNDAMAGED} | suite.damages).items() if n not in outcomes}
        if not missing:
            continue
        for name, damage in missing.items():
            quantized = fp8() if damage.of_matmuls else None
            method_train = train_with_rollbacks if method == "rollback" else train
            outcomes[name] = method_train(trainer(method), quantized, best, seed, damage, data, plan)
        plan.save(method, f"seed{seed}", outcomes)
        losses = ", ".join(f"{name or 'undamaged'} {outcomes[name]['validation']:.4f}" for name in missing)
        print(f"{method}, rate 2^{best}, seed {seed}: {losses}", flush=True)


# --- the report ---------------------------------------------------------------------------------------


def difference(run: dict[str, Any], damage: str) -> np.ndarray:
    """Training losses minus those of the undamaged run.

    A difference that is not finite counts as 100, and as 0 where one of the runs has skipped the batch.
    """
    own, base = (np.array(run[name]["loss"], dtype=object) for name in (damage, ""))
    skipped = (own == None) | (base == None)  # noqa: E711
    own, base = (np.where(skipped, 0.0, losses).astype(np.float64) for losses in (own, base))
    return np.nan_to_num(own - base, nan=100.0, posinf=100.0)


def difference_by_updates(run: dict[str, Any], damage: str) -> float:
    """The mean difference after the stretches to the undamaged loss after the same number of updates.

    For runs of `rollback` that roll back once for each stretch: each rollback skips `SKIP` batches.
    """
    own, base = (np.array(run[name]["loss"], np.float64) for name in (damage, ""))
    ends = [*(stretch.start for stretch in STRETCHES[1:]), len(own)]
    found = []
    for i, (stretch, end) in enumerate(zip(STRETCHES, ends, strict=True), 1):
        batches = np.arange(stretch.start + 1, end)
        batches = batches[np.isfinite(own[batches])]
        found.append(own[batches].mean() - base[batches - i * SKIP].mean())
    return float(np.mean(found))


def peaks(run: dict[str, Any], damage: str) -> np.ndarray:
    excess = difference(run, damage)
    return np.array([excess[stretch.stop :][:16].max() for stretch in STRETCHES])


def peak(run: dict[str, Any], damage: str) -> float:
    return float(peaks(run, damage).mean())


def recovery(run: dict[str, Any], damage: str) -> float:
    excess = difference(run, damage)
    taken = []
    for stretch in STRETCHES:
        after = excess[stretch.stop :][: LONGEST + 4]
        means = np.convolve(after, np.ones(5) / 5, "valid")
        taken.append(next((i for i, mean in enumerate(means) if mean < RECOVERED), LONGEST))
    return float(np.mean(taken))


def num_spikes(run: dict[str, Any], damage: str) -> int:
    losses, policy = np.array(run[damage]["loss"], np.float64), fidelity_figures.POLICY
    begin = fidelity_figures.WARMED_UP - policy.min_history
    skipped = [i for i, loss in enumerate(run[damage]["loss"]) if loss is None]
    steps = np.setdiff1d(np.arange(begin, len(losses)), np.concatenate([*STRETCHES, skipped]))
    return len(spike_records.find_spikes(steps, losses[steps], policy))


def final(run: dict[str, Any], damage: str) -> float:
    return run[damage]["validation"] - run[""]["validation"]


def report(plan: Plan, figure: Path, *, suite: Suite) -> None:
    """Prints a table of the undamaged runs, one of each damage, and the criteria; draws the figure."""
    runs = {}
    for method in plan.methods:
        found = {seed: run for seed in plan.seeds if (run := plan.measured(method, f"seed{seed}"))}
        if found:
            runs[method] = found
    if "clip" not in runs:
        print("not run yet: clip, with which the others are compared")
        return
    base = runs["clip"]
    rows = []
    for method, seeds in runs.items():
        loss = np.array([run[""]["validation"] for run in seeds.values()])
        excess = np.array(
            [run[""]["validation"] - base[seed][""]["validation"] for seed, run in seeds.items()]
        )
        rate = f"2^{next(iter(seeds.values()))['exponent']}"
        cells = [fidelity_figures.plus_minus(loss), fidelity_figures.plus_minus(excess, "+.4f")]
        rows.append([method, rate, *cells, str(sum(num_spikes(run, "") for run in seeds.values()))])
    fidelity_figures.print_table(["undamaged", "rate", suite.measure, "minus clip", "spikes"], rows)
    for name, damage in suite.damages.items():
        print()
        rows = [damage_row(method, seeds, name) for method, seeds in runs.items()]
        fidelity_figures.print_table([damage.meaning, "peak", "recovery", "spikes", "in the end"], rows)
    print()
    suite.criteria(runs)
    draw(runs, figure, suite.damages)


def damage_row(method: str, seeds: dict[int, dict[str, Any]], damage: str) -> list[str]:
    peaks, steps, finals = (
        np.array([f(run, damage) for run in seeds.values()]) for f in (peak, recovery, final)
    )
    count, plus_minus = sum(num_spikes(run, damage) for run in seeds.values()), fidelity_figures.plus_minus
    return [
        method,
        plus_minus(peaks, "+.3f"),
        plus_minus(steps, ".1f"),
        str(count),
        plus_minus(finals, "+.4f"),
    ]


def criteria(runs: Runs) -> None:
    """Prints the numbers that the criteria compare, of the methods that have been run."""
    for method in ("stable_adamw", "adagc", "stable_spam"):
        if method not in runs:
            print(f"* {method}: not run yet")
            continue
        own, base = runs[method], runs["clip"]
        lower, in_fp8 = (
            sum(peak(own[seed], damage) < peak(base[seed], damage) for seed in own)
            for damage in ("tokens", "outliers")
        )
        price = price_undamaged(own, base)
        steps = np.mean([recovery(run, "tokens") for run in own.values()])
        print(
            f"* {method}: lower peak with {lower} of {len(own)} seeds, after outliers {in_fp8}; "
            f"undamaged {price:+.2%}; recovers in {steps:.1f} steps"
        )
    if own := runs.get("rollback"):
        base = runs["clip"]
        lower = sum(peak(own[seed], "tokens") < peak(base[seed], "tokens") for seed in own)
        price = price_undamaged(own, base)
        print(f"* rollback: lower peak with {lower} of {len(own)} seeds; undamaged {price:+.2%}")
        tell_rollbacks(runs, DAMAGES, "tokens")
    for method in ("qk_norm", "qk_clip 20"):
        own = runs.get(method, {})
        lower = sum(peak(own[seed], "rate") < peak(runs["clip"][seed], "rate") for seed in own)
        print(f"* {method}: lower peak after {RATE_JUMP.meaning} with {lower} of {len(own)} seeds")
    if "b2 0.9" in runs:
        steps = (np.mean([recovery(run, "tokens") for run in runs[m].values()]) for m in ("b2 0.9", "clip"))
        print("* β2 0.9 recovers from random tokens in {:.1f} steps, 0.999 in {:.1f}".format(*steps))


def price_undamaged(own: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> float:
    """By how much the undamaged validation loss of a method is above that of another, with its seeds."""
    mine, theirs = (sum(of[seed][""]["validation"] for seed in own) for of in (own, base))
    return mine / theirs - 1


def tell_rollbacks(runs: Runs, damages: Iterable[str], damage: str) -> None:
    """Prints how often `rollback` rolls back, the peaks after each stretch, and whether it only lags."""
    own = runs["rollback"]
    counts = (f"{sum(run[name]['rollbacks'] for run in own.values())} {name}" for name in damages)
    print(f"* rollbacks, {len(STRETCHES)} stretches with {len(own)} seeds:", ", ".join(counts))
    for method in ("rollback", "clip"):
        means = np.mean([peaks(run, damage) for run in runs[method].values()], axis=0)
        print(f"* {method}, {damage}: peaks after the stretches", *(f"{mean:+.3f}" for mean in means))
    each = [run for run in own.values() if run[damage]["rollbacks"] == len(STRETCHES)]
    if each:
        found = np.array([difference_by_updates(run, damage) for run in each])
        mean = fidelity_figures.plus_minus(found, "+.3f")
        print(f"* rollback, {damage}: {mean} nats after as many updates, with {len(each)} seeds")


def draw(runs: Runs, path: Path, damages: dict[str, Damage]) -> None:
    """Draws the differences of the training loss: lines are means of the seeds, bands their range."""
    shown = [m for m in ("clip", "no clip", "stable_adamw", "adagc", "stable_spam", "guard") if m in runs]
    figure = Figure(figsize=(13, 8.4), layout="constrained", facecolor="white")
    for axes, (name, damage) in zip(figure.subplots(2, 2).flat, damages.items(), strict=True):
        for color, method in zip(fidelity_figures.COLORS, shown, strict=False):
            curves = np.array([difference(run, name) for run in runs[method].values()])[:, 110:]
            steps = np.arange(curves.shape[1]) + 110
            axes.plot(steps, curves.mean(0), color=color, label=method, linewidth=1)
            axes.fill_between(steps, curves.min(0), curves.max(0), color=color, alpha=0.12, lw=0)
        fidelity_figures.shade(axes, [step for stretch in STRETCHES for step in stretch], "damaged")
        axes.set_yscale("symlog", linthresh=0.1)
        axes.set_title(damage.meaning, loc="left")
        axes.set_xlabel("step")
    figure.axes[0].set_ylabel("training loss minus the undamaged run's\n(nats; symlog, linear below 0.1)")
    fidelity_figures.legend_below(figure, figure.axes[0])
    fidelity_figures.save(figure, path)


LLAMA = Suite(DAMAGES, "validation loss", criteria)


# --- the command --------------------------------------------------------------------------------------


def main() -> None:
    quick = {
        "base": BASE | QUICK | {"train.total_steps": 280},
        "start": (-7, -6),
        "budget": 3,
        "seeds": (1,),
        "validation_batches": 2,
    }
    plan = Plan(RESULTS / "spike_suite", BASE, METHODS, seeds=SEEDS)
    run, tell = (functools.partial(function, suite=LLAMA) for function in (run_method, report))
    command(plan, __doc__, quick, run, tell)


if __name__ == "__main__":
    main()
