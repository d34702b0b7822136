"""How good is each optimizer at its own best learning rate? A tiny Llama on real text, seed by seed.

    python benchmarks/optimizers_fair.py              # 50 minutes of CPU time; run it again to continue
    python benchmarks/optimizers_fair.py --report     # the table and the figure of what has been run
    python benchmarks/optimizers_fair.py --quick --out=/tmp/fair --only adamw galore_d2     # half a minute

Every method is `configs/llama/tiny.py` (344,000 parameters, 300 steps of 1,024 tokens, linear decay) in
float32 with the few changed values of `METHODS`. The rules are the same for all of them:

* The rates are powers of two. With seed 0, each method runs those of `START`. As long as the best rate is
  at an end of what has been run, the next one beyond that end is run, up to `BUDGET` runs. "Best" is the
  lowest validation loss. A best rate at an end when the budget is spent is marked in the table.
* At its best rate each method runs with the new seeds 1, 2 and 3, which set the weights and the order of
  the data. All methods share them, so the differences to AdamW are those of runs with the same seed.
* The cost of a step is measured in alternation with AdamW: `ROUNDS` times `GAP` steps of each. A block of
  `GAP` steps has one new subspace of GaLore and five of SOAP's refreshes. CPU time is measured, so that
  other programs on the machine disturb little; the matrices are so small that optimizers cost far more here
  than in large models: for those see `optimizers.py`.

Learning rate and seed are inputs of the compiled step (the rate as a hyperparameter injected by optax), so
that each method is compiled once. Each finished run is one JSON file, replaced atomically; killed at any
moment, the program continues with the run that was cut off. A run whose file has other settings is made
again. Runs are not mapped over seeds with `jax.vmap`: that would compute the refreshes of GaLore and SOAP
at every step, since a condition that is mapped computes both branches.

Criteria, written before the runs, of the means over the new seeds:

1. GaLore with ranks d/2 and d/4: a perplexity at most 5 % above that of full rank (AdamW).
2. Moments in 8 bits, FP8 and companded 8 bits: a loss at most 0.5 % above that of float32 (AdamW).
3. StableAdamW, on data without damage: a loss at most 0.5 % above that of AdamW.
4. Muon with 8-bit moments: a loss at most 0.5 % above Muon's. FlashOptim's AdamW (bfloat16 parameters with
   an int8 residual, companded moments, bfloat16 activations): at most 0.5 % above AdamW's.
5. AdamP where the kernels of queries and keys are scale-invariant (QK norm), with and without weight decay:
   a loss not above AdamW's. Without decay the norm of these kernels grows less than with AdamW, at every
   rate that both were searched at, and at AdamW's best rate at most half as much.
6. bfloat16 parameters (and activations) with Kahan sums, or with a float16 master copy and FP8 moments as
   in FP8-LM and Fishman et al.: a loss at most 0.5 % above that of float32 (AdamW).
"""

import argparse
import copy
import dataclasses
import functools
import itertools
import json
import math
import operator
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fidelity_figures
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fidelity_runs import RESULTS, ROOT, Data, Trainer, digits, watch_nothing
from matplotlib.figure import Figure
from ml_collections import ConfigDict
from training import changed

from configs.llama import tiny
from maxlp import optim
from maxlp.core.train_state import State, num_params
from maxlp.optim.tree_utils import state_bytes
from maxlp.run.experiment import Experiment
from maxlp.run.presets import LOW_BIT
from maxlp.runtime.files import read_json, write_text

START = (-8, -7, -6, -5)  # exponents of the first rates: 2^-8 = 0.0039 is that of configs/llama/tiny.py
BUDGET = 8  # runs of a search
SEARCH_SEED, SEEDS = 0, (1, 2, 3)
GAP, ROUNDS = 50, 5
REFERENCE = "adamw"

BASE: dict[str, Any] = {"model.dtype": "float32"}
QUICK: dict[str, Any] = {
    "model.num_layers": 1,
    "data.source": "stdlib?validation=0.002",
    "data.seq_len": 32,
    "optimizer.warmup_steps": 2,
    "train.total_steps": 8,
}
VALIDATION_BATCHES = 64  # of 1,024 tokens each, the same for all runs


def galore(rank: int, **options: Any) -> dict[str, Any]:
    return {"optimizer.galore": {"rank": rank, "update_proj_gap": GAP} | options}


def named(name: str, **options: Any) -> dict[str, Any]:
    return {"optimizer.name": name} | ({"optimizer.options": options} if options else {})


PURE_BF16 = {"model.dtype": "bfloat16", "model.param_dtype": "bfloat16"}
QK_NORM = {"model.qk_norm": True}
NO_DECAY = QK_NORM | {"optimizer.weight_decay": 0.0}
# Method → changes of the config. D is 64.
METHODS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "galore_d2": galore(32),
    "galore_d4": galore(16),
    "galore_d4_alpha_eighth": galore(16, scale=0.125),
    "galore_d4_alpha_half": galore(16, scale=0.5),
    "galore_d4_alpha_one": galore(16, scale=1.0),
    "galore_d4_randomized": galore(16, basis="randomized"),
    "galore_d4_gap6": galore(16, basis="randomized", update_proj_gap=6),
    "stable_adamw": named("stable_adamw"),
    "adamw_8bit": {"optimizer.low_bit": LOW_BIT["8bit"]},
    "adamw_fp8": {"optimizer.low_bit": LOW_BIT["fp8"]},
    "adamw_companded": {"optimizer.low_bit": LOW_BIT["companded"]},
    "muon": named("muon"),
    "apollo": named("apollo", rank=16, update_proj_gap=GAP),
    "apollo_mini": named("apollo_mini", update_proj_gap=GAP),
    "lion": named("lion"),
    "normuon": named("normuon"),
    "schedule_free": named("schedule_free_adamw") | {"optimizer.schedule": "constant"},
    "adamp": named("adamp"),
    "pure_bf16": PURE_BF16 | {"optimizer.param_rounding": "stochastic"},
    "soap": named("soap"),
    "muon_8bit": named("muon") | {"optimizer.low_bit": LOW_BIT["8bit"]},
    "flash_adamw": PURE_BF16
    | {"optimizer.param_rounding": "residual", "optimizer.low_bit": LOW_BIT["companded"]},
    "kahan": PURE_BF16 | {"optimizer.param_rounding": "kahan"},
    "float16_master": PURE_BF16
    | {"optimizer.param_rounding": "float16_master", "optimizer.low_bit": LOW_BIT["fp8"]},
    "qk_norm": QK_NORM,
    "qk_norm_adamp": QK_NORM | named("adamp"),
    "qk_norm_no_decay": NO_DECAY,
    "qk_norm_no_decay_adamp": NO_DECAY | named("adamp"),
}
# Method → what is compared, the largest excess over another method, and this method (by default AdamW).
CRITERIA: dict[str, tuple] = {
    "galore_d2": ("perplexity", 0.05),
    "galore_d4": ("perplexity", 0.05),
    "galore_d4_alpha_eighth": ("perplexity", 0.05),
    "galore_d4_alpha_half": ("perplexity", 0.05),
    "galore_d4_alpha_one": ("perplexity", 0.05),
    "adamw_8bit": ("loss", 0.005),
    "adamw_fp8": ("loss", 0.005),
    "adamw_companded": ("loss", 0.005),
    "stable_adamw": ("loss", 0.005),
    "muon_8bit": ("loss", 0.005, "muon"),
    "flash_adamw": ("loss", 0.005),
    "kahan": ("loss", 0.005),
    "float16_master": ("loss", 0.005),
    "qk_norm_adamp": ("loss", 0.0, "qk_norm"),
    "qk_norm_no_decay_adamp": ("loss", 0.0, "qk_norm_no_decay"),
}


# --- learning rates -----------------------------------------------------------------------------------


def next_exponent(losses: dict[int, float], start: tuple[int, ...], budget: int) -> int | None:
    """The exponent of the rate to run next, or None at the end of the search.

    Args:
      losses: validation losses by exponent, of the runs so far.
    """
    for exponent in start:
        if exponent not in losses:
            return exponent
    best, low, high = best_exponent(losses), min(losses), max(losses)
    if len(losses) >= budget or low < best < high:
        return None
    return low - 1 if best == low else high + 1


def best_exponent(losses: dict[int, float]) -> int:
    """The exponent with the lowest loss; of equals, the smallest rate."""
    return min(sorted(losses), key=losses.__getitem__)


def with_rate_in_state(run: Experiment) -> Experiment:
    """The experiment with the peak learning rate as part of the optimizer state instead of a constant."""
    s = run.settings

    def make(learning_rate: Any) -> optax.GradientTransformation:
        config = copy.copy(s.optimizer)
        object.__setattr__(config, "learning_rate", learning_rate)  # traced: its range cannot be checked
        return optim.make_tx(config, total_steps=s.train.total_steps).tx

    tx = optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(learning_rate=1.0)
    return dataclasses.replace(run, tx=tx, step=functools.partial(run.step, tx=tx))


def initial_state(run: Trainer, exponent: int, seed: int) -> State:
    """The state before the first step, of a trainer that was adapted by `with_rate_in_state`."""
    return with_rate(run.init(seed), 2.0**exponent)


def with_rate(state: State, rate: float) -> State:
    """The state with another peak learning rate."""
    injected = state["opt_state"]
    array = jax.device_put(jnp.float32(rate), injected.hyperparams["learning_rate"].sharding)
    return state | {"opt_state": injected._replace(hyperparams={"learning_rate": array})}


# --- runs ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """The runs of a benchmark and the folder of their results.

    Attributes:
      out: the folder of the results, with a subfolder for each method.
      base: changes of the config that all methods share.
      methods: further changes of each method.
      config: `configs/llama/tiny.py`, or another one.
      error: the number to minimize, from the metrics of an evaluation.
      start, budget, seeds, rounds, gap: as the constants of this module.
    """

    out: Path
    base: dict[str, Any]
    methods: dict[str, dict[str, Any]] = dataclasses.field(default_factory=lambda: METHODS)
    start: tuple[int, ...] = START
    budget: int = BUDGET
    seeds: tuple[int, ...] = SEEDS
    rounds: int = ROUNDS
    gap: int = GAP
    validation_batches: int = VALIDATION_BATCHES
    config: Callable[[], ConfigDict] = tiny.get_config
    error: Callable[[dict[str, float]], float] = operator.itemgetter("loss")

    def measured(self, method: str, name: str) -> dict[str, Any] | None:
        """The finished measurement of this name; None if there is none with the present settings."""
        found = read_json(self._path(method, name), remedy="delete it")
        return found if found and found["changes"] == self._changes(method) else None

    def save(self, method: str, name: str, values: dict[str, Any]) -> None:
        path = self._path(method, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"changes": self._changes(method), "jax": jax.__version__}
        write_text(path, json.dumps(header | values, separators=(",", ":")) + "\n")

    def losses(self, method: str) -> dict[int, float]:
        """The validation loss by exponent, of the search so far."""
        found: dict[int, float] = {}
        exponent = next_exponent(found, self.start, self.budget)
        while exponent is not None and (run := self.measured(method, run_name(exponent, SEARCH_SEED))):
            found[exponent] = run["validation"]
            exponent = next_exponent(found, self.start, self.budget)
        return found

    def finals(self, method: str) -> dict[int, dict[str, Any]]:
        """The runs at the best rate by seed; {} before the search has ended."""
        losses = self.losses(method)
        if not losses or next_exponent(losses, self.start, self.budget) is not None:
            return {}
        name = functools.partial(run_name, best_exponent(losses))
        runs = {seed: self.measured(method, name(seed)) for seed in self.seeds}
        return {seed: run for seed, run in runs.items() if run}

    def _path(self, method: str, name: str) -> Path:
        return self.out / method / f"{name}.json"

    def _changes(self, method: str) -> dict[str, Any]:
        return json.loads(json.dumps(self.base | self.methods[method]))


def run_name(exponent: int, seed: int) -> str:
    return f"rate{exponent}_seed{seed}"


def run_method(method: str, plan: Plan, trainer: Callable[[str], Trainer], data: Data) -> None:
    """Makes the missing measurements of a method: the search, the new seeds, the cost."""
    best = search(method, plan, trainer, data)
    for seed in plan.seeds:
        if not plan.measured(method, run_name(best, seed)):
            run_once(method, best, seed, plan, trainer(method), data)
    if not plan.measured(method, "cost"):
        cost = measure_cost(trainer(method), trainer(REFERENCE), best, plan, data)
        plan.save(method, "cost", cost)
        print(f"{method}: {np.median(cost['ratios']):.2f} × {REFERENCE}'s step", flush=True)


def search(method: str, plan: Plan, trainer: Callable[[str], Trainer], data: Data) -> int:
    """Makes the missing runs of the search; returns the exponent of the best rate."""
    losses = plan.losses(method)
    while (exponent := next_exponent(losses, plan.start, plan.budget)) is not None:
        losses[exponent] = run_once(method, exponent, SEARCH_SEED, plan, trainer(method), data)
    return best_exponent(losses)


def run_once(method: str, exponent: int, seed: int, plan: Plan, run: Trainer, data: Data) -> float:
    """Trains and saves one run; returns its validation loss, infinite if the run diverged."""
    start = time.time()
    batches = data.batches(seed, run.settings.train.total_steps)
    state = initial_state(run, exponent, seed)
    scale_invariant = method.startswith("qk_norm")
    before = query_key_norm(state) if scale_invariant else 0.0
    state, records = run.train(state, batches, watch_nothing)
    loss = plan.error(run.evaluate(state))
    loss = loss if math.isfinite(loss) else math.inf
    kept = {} if seed == SEARCH_SEED else {"loss": records["loss"]}
    if scale_invariant:
        kept["growth"] = digits(query_key_norm(state) / before)
    plan.save(method, run_name(exponent, seed), {"validation": loss} | kept)
    print(f"{method}, rate 2^{exponent}, seed {seed}: {loss:.4f} ({time.time() - start:.0f} s)", flush=True)
    return loss


def query_key_norm(state: State) -> float:
    """The norm of the kernels of queries and keys, of all layers together."""
    attention = state["params"]["layers"]["attn"]
    return float(optax.global_norm([attention[name]["kernel"] for name in ("q_proj", "k_proj")]))


def measure_cost(run: Trainer, reference: Trainer, exponent: int, plan: Plan, data: Data) -> dict[str, Any]:
    """CPU time of blocks of steps, relative to alternating ones of the reference; bytes of the state."""
    batches = data.batches(SEARCH_SEED, run.settings.train.total_steps)[: plan.gap]
    states = {one: initial_state(one, exponent, SEARCH_SEED) for one in (run, reference)}
    size = state_bytes(states[run]["opt_state"].inner_state)
    parameters = num_params(states[run]["params"])
    ratios, seconds = [], []
    for _ in range(plan.rounds):
        taken = {}
        for one in (run, reference):
            begin = time.process_time()
            states[one], _ = one.train(states[one], batches, watch_nothing)
            taken[one] = time.process_time() - begin
        ratios.append(digits(taken[run] / taken[reference]))
        seconds.append(digits(taken[run] / len(batches)))
    return {"ratios": ratios, "cpu_seconds": seconds, "state_bytes": size, "parameters": parameters}


# --- the report ---------------------------------------------------------------------------------------


def report(plan: Plan, figure: Path) -> None:
    """Prints the table and whether the criteria are met, and draws the training losses."""
    base = plan.finals(REFERENCE)
    if not base:
        print(f"{REFERENCE} has not been run yet")
        return
    rows, criteria = [], []
    for method in METHODS:
        finals = plan.finals(method)
        shared = sorted(finals.keys() & base.keys())
        if not shared:
            rows.append([method, "not run", *[""] * 6])
            continue
        loss = np.array([finals[seed]["validation"] for seed in shared])
        reference = np.array([base[seed]["validation"] for seed in shared])
        rows.append(row(method, plan, loss, reference))
        if method in CRITERIA:
            criteria += criterion(method, plan)
    header = ["method", "rate", "search", "validation loss", f"minus {REFERENCE}", "perplexity"]
    fidelity_figures.print_table([*header, "CPU time of a step", "state, bytes/parameter"], rows)
    print("\n" + "\n".join(criteria) + "\n")
    growth_table(plan)
    draw({method: runs for method in METHODS if (runs := plan.finals(method))}, figure)


def row(method: str, plan: Plan, loss: np.ndarray, reference: np.ndarray) -> list[str]:
    losses, cost = plan.losses(method), plan.measured(method, "cost")
    best, low, high = best_exponent(losses), min(losses), max(losses)
    edge = "" if low < best < high else ", at the end"
    cells = [method, f"2^{best}", f"2^{low} … 2^{high}{edge}"]
    cells += [fidelity_figures.plus_minus(loss), "", ""]
    if method != REFERENCE:
        cells[4] = fidelity_figures.plus_minus(loss - reference, "+.4f")
        cells[5] = f"{100 * math.expm1((loss - reference).mean()):+.1f} %"
    if not cost:
        return [*cells, "", ""]
    state = f"{cost['state_bytes'] / cost['parameters']:.2f}"
    return [*cells, f"× {np.median(cost['ratios']):.2f}", state]


def criterion(method: str, plan: Plan) -> list[str]:
    """Whether the criterion is met with the seeds that both methods have run, as a line; [] without any."""
    measure, limit, other = (*CRITERIA[method], REFERENCE)[:3]
    finals, base = plan.finals(method), plan.finals(other)
    shared = sorted(finals.keys() & base.keys())
    if not shared:
        return []
    loss, reference = (np.array([of[seed]["validation"] for seed in shared]) for of in (finals, base))
    excess = loss.mean() / reference.mean() - 1
    if measure == "perplexity":
        excess = math.expm1((loss - reference).mean())
    met = "met" if excess <= limit else "**not met**"
    versus = "" if other == REFERENCE else f" against {other}"
    return [
        f"* {method}: {measure} {excess:+.2%}{versus}, at most {limit:+.1%}: {met} ({len(shared)} seeds)"
    ]


def growth_table(plan: Plan) -> None:
    """How much the norm of the kernels of queries and keys grows, by rate with the search's seed."""
    methods = [method for method in METHODS if method.startswith("qk_norm") and plan.losses(method)]
    if not methods:
        return
    exponents = sorted({exponent for method in methods for exponent in plan.losses(method)})
    rows = []
    for method in methods:
        runs = [plan.measured(method, run_name(exponent, SEARCH_SEED)) for exponent in exponents]
        cells = [f"× {run['growth']:.2f}" if run else "" for run in runs]
        finals = np.array([run["growth"] for run in plan.finals(method).values()])
        rows.append([method, *cells, f"× {fidelity_figures.plus_minus(finals, '.2f')}"])
    fidelity_figures.print_table(["growth", *[f"2^{e}" for e in exponents], "new seeds, best rate"], rows)


def draw(runs: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    """Training losses minus AdamW's with the same seed: lines are means of the seeds, bands their range."""
    base, others = runs[REFERENCE], [method for method in runs if method != REFERENCE]
    num_rows, columns = max(math.ceil(len(others) / 4), 1), 4
    figure = Figure(figsize=(13, 2.3 * num_rows + 0.8), layout="constrained", facecolor="white")
    panels = figure.subplots(num_rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, method in itertools.zip_longest(panels.flat, others):
        if method is None:
            axes.set_visible(False)
            continue
        excess = [np.subtract(run["loss"], base[s]["loss"]) for s, run in runs[method].items() if s in base]
        curves = np.array([fidelity_figures.running(one) for one in excess])
        axes.plot(curves.mean(0), color="#2f6db3", linewidth=1.2)
        axes.fill_between(range(curves.shape[1]), curves.min(0), curves.max(0), color="#2f6db3", alpha=0.2)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_title(method, loc="left")
        axes.set_ylim(-0.4, 0.4)
    figure.supxlabel("step")
    figure.supylabel(
        f"training loss minus that of {REFERENCE} (nats, mean of 21 steps)\nband: range of the seeds"
    )
    fidelity_figures.save(figure, path)


# --- the command --------------------------------------------------------------------------------------


def trainers(plan: Plan, data: Data) -> Callable[[str], Trainer]:
    """Compiles a method when it is first needed, and keeps it and the reference."""

    @functools.lru_cache(maxsize=2)
    def trainer(method: str) -> Trainer:
        return Trainer(plan.methods[method], data, with_rate_in_state)

    return trainer


def parse(plan: Plan, doc: str, quick: dict[str, Any]) -> tuple[Plan, list[str], Path]:
    """The command line: the plan, the methods to run (none with `--report`) and the file of the figure.

    Args:
      plan: the runs; its folder is the default of `--out`.
      quick: what `--quick` replaces in the plan.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the results; with --quick there is no default")
    parser.add_argument(
        "--only",
        nargs="+",
        default=list(plan.methods),
        choices=plan.methods,
        metavar="METHOD",
        help="all by default",
    )
    parser.add_argument("--report", action="store_true", help="run nothing; print and draw the results")
    parser.add_argument("--quick", action="store_true", help="few steps: only checks that it runs")
    args = parser.parse_args()
    if args.quick and not args.out:
        parser.error("--quick needs --out=FOLDER, so that it does not mix with the results")
    figure = args.out / "figure.png" if args.out else ROOT / "docs" / "figures" / f"{plan.out.name}.png"
    plan = dataclasses.replace(plan, out=args.out or plan.out, **(quick if args.quick else {}))
    return plan, [] if args.report else args.only, figure


def command(
    plan: Plan,
    doc: str,
    quick: dict[str, Any],
    run: Callable[[str, Plan, Callable[[str], Trainer], Data], None],
    report: Callable[[Plan, Path], None],
) -> None:
    """The command, also of `spike_suite.py`, `spike_suite_clip.py` and `stability_sweep.py`.

    Args:
      plan, quick: as in `parse`.
      run: makes the missing measurements of a method.
      report: prints the results, and draws into a file.
    """
    plan, methods, figure = parse(plan, doc, quick)
    if methods:
        with tempfile.TemporaryDirectory() as folder:
            data = Data(changed(plan.config(), plan.base), Path(folder), plan.validation_batches)
            trainer = trainers(plan, data)
            for method in methods:
                run(method, plan, trainer, data)
    report(plan, figure)


def main() -> None:
    quick = {
        "base": BASE | QUICK,
        "start": (-7, -6),
        "budget": 3,
        "seeds": (1, 2),
        "rounds": 1,
        "gap": 4,
        "validation_batches": 2,
    }
    command(Plan(RESULTS / "optimizers_fair", BASE), __doc__, quick, run_method, report)


if __name__ == "__main__":
    main()
