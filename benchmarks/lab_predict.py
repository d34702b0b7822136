"""Does the lab rank recipes as training does, and is its choice of what stays in high precision a good one?

    python benchmarks/lab_predict.py predict                 # before any run; commit the file it writes
    python benchmarks/lab_predict.py train --seeds 0 1 2     # 96 runs of 20 to 70 seconds
    python benchmarks/lab_predict.py choose --seeds 0 1 2    # 12 runs
    python benchmarks/lab_predict.py show

Both predictors of `maxlp.run.prediction`, the angle between gradients and the mean squared error of
Gaussian numbers, are measured once, after 30 steps in bfloat16 with seed 0, and written to
`benchmarks/results/lab_predict_prediction.json`. A recipe's gap is its validation loss after 300 steps
minus that of bfloat16 with the same seed, each model in its own precision.

`choose` compares `maxlp.run.choice`, as measured after 30 steps of the recipe with seed 0, with the first
and the last block in high precision, at no more FLOPs, for two harmful recipes.

Runs that are recorded in `benchmarks/results/fidelity_lab_*.json` are not repeated. `docs/numerics_lab.md`
has the criteria.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path

import fidelity_figures
import numpy as np
from fidelity_runs import RESULTS, ROOT, Data, Results, Trainer, run_missing, watch_nothing
from matplotlib.figure import Figure
from ml_collections import ConfigDict
from scipy.stats import spearmanr
from training import changed

from configs.llama import tiny
from maxlp.run import attribution, choice, prediction
from maxlp.run.settings import read

STEP, BATCHES = 31, 8  # where and on how many batches the prediction is measured
PREDICTION = RESULTS / "lab_predict_prediction.json"
VALIDATION_BATCHES = 64  # of 1,024 tokens

RECIPES = (
    "fp8_current",
    "fp8_rowwise",
    "fp8_switchback",
    "int8_all",
    "int8_switchback",
    "mxfp8",
    "quest",
    # a grid of exponent and mantissa bits, one scale a tensor
    *(f"simulate:format=e{x}m{y}" for x, y in ((2, 1), (2, 2), (2, 3), (3, 0), (3, 1), (3, 2), (4, 0))),
    *(f"simulate:format=e{x}m{y}" for x, y in ((4, 1), (4, 2), (4, 3), (5, 0), (5, 1), (5, 2))),
    # four bits in blocks of different sizes and scales
    "simulate:format=e2m1:granularity=row",
    *(f"mxfp8:format=float4_e2m1fn:block_size={size}" for size in (16, 32, 64)),
    "mxfp8:format=float4_e2m1fn:block_scales=float32",
    "mxfp8:format=float4_e2m1fn:grad_rounding=stochastic",
    "int8_all:format=midrise4",
    # without scales, truncated (Lee et al. 2024, arXiv:2405.18710)
    *(f"simulate:format=e8m{y}:granularity=unscaled:rounding=truncate" for y in (1, 2, 3)),
    "simulate:format=e5m2:granularity=unscaled",
)

CHOICES = RESULTS / "lab_choices.json"
HARMFUL = ("simulate:format=e2m1", "simulate:format=e3m0")


def base() -> ConfigDict:
    """The tiny Llama on bytes, in 300 steps of 1,024 tokens."""
    return changed(
        tiny.get_config(),
        {
            "model.vocab_size": 512,
            "data.tokenizer": "bytes",
            "data.seq_len": 64,
            "data.batch_size": 16,
            "data.shuffle_tokens": 2**18,
        },
    )


def changes(spec: str) -> dict:
    name, options = prediction.parse(spec)
    return {"precision.recipe": name, "precision.options": vars(options)}


def predict() -> None:
    """Writes the prediction.

    Raises:
      SystemExit: runs exist already.
    """
    if Results("lab_predict").runs:
        raise SystemExit("runs exist already; a prediction must be made before them")
    step, found = prediction.predictions(read(base()), list(RECIPES), None, STEP, BATCHES)
    print("\n".join(prediction.table(found)))
    with tempfile.TemporaryDirectory() as folder:
        PREDICTION.write_text(prediction.write(found, step, Path(folder)).read_text())


def train(seeds: list[int]) -> None:
    if not PREDICTION.exists():
        raise SystemExit("no prediction yet: run predict first")
    compare("lab_predict", {spec: changes(spec) for spec in ("bf16", *RECIPES)}, seeds)


def compare(experiment: str, variants: dict[str, dict], seeds: list[int]) -> None:
    """Trains each variant with each seed."""
    with tempfile.TemporaryDirectory() as folder:
        data = Data(base(), Path(folder), VALIDATION_BATCHES)

        def measure(run: Trainer, seed: int) -> dict[str, float]:
            batches = data.batches(seed, run.settings.train.total_steps)
            state, records = run.train(run.init(seed), batches, watch_nothing)
            return {"validation": run.evaluate(state)["loss"], "loss": records["loss"][-1]}

        run_missing(experiment, variants, seeds, data, measure)


def choose(seeds: list[int]) -> None:
    variants = {}
    for spec, patterns in choices().items():
        ends = {"precision.first_blocks": 1, "precision.last_blocks": 1}
        variants[f"{spec}, first and last block"] = changes(spec) | ends
        rules = tuple((pattern, choice.HIGH) for pattern in patterns)
        variants[f"{spec}, chosen"] = changes(spec) | {"precision.rules": rules}
    compare("lab_choose", variants, seeds)


def choices() -> dict[str, list[str]]:
    """The matmuls chosen for each harmful recipe, by patterns of paths, at the FLOPs of both outer blocks.

    Measured once, and then read from `CHOICES`.
    """
    if not CHOICES.exists():
        measured = {}
        for spec in HARMFUL:
            s = choice.check(read(changed(base(), changes(spec))), budget=0.5)
            with attribution.evaluator(s, None, STEP) as (evaluate, step):
                found = attribution.attribution(evaluate, step)
                print("\n".join(choice.table(evaluate, found, budget=0.5)), flush=True)
                costs = choice.costs(evaluate, found)
            high = choice.choose(costs, costs.flops_share(costs.end_blocks(1, 1)))
            measured[spec] = choice.rules(costs, high)
        CHOICES.write_text(json.dumps(measured, indent=1) + "\n")
    return json.loads(CHOICES.read_text())


def show() -> None:
    """Prints gaps with both predictors, their correlations, and the gaps of choices; draws the figure."""
    runs = Results("lab_predict").runs
    if not runs:
        raise SystemExit("no runs yet: run train first")
    predicted = {p["name"]: p for p in json.loads(PREDICTION.read_text())["recipes"]}
    gaps = {spec: gaps_of(runs, spec) for spec in predicted if spec in runs}
    names = sorted(gaps, key=lambda name: np.mean(gaps[name]))
    rows = [
        [
            f"`{name}`", f"{number(predicted[name]['angle']):.2e}", f"{predicted[name]['mse']:.2e}",
            f"{np.mean(gaps[name]):+.4f}", ", ".join(f"{gap:+.4f}" for gap in gaps[name]),
        ]
        for name in names
    ]  # fmt: skip
    fidelity_figures.print_table(["recipe", "1-cos", "Gaussian MSE", "gap", "each seed"], rows)
    for key in ("angle", "mse", "error", "loss"):  # the first is the prediction, the second the baseline
        values = [number(predicted[name][key]) for name in names]
        whole = spearmanr(values, [np.mean(gaps[name]) for name in names]).statistic
        print(f"Spearman of {key} with the gap, {len(names)} recipes: {whole:.3f}")
    print(f"Spearman of one seed's gaps with the mean of the others: {agreement_of_seeds(gaps):.3f}")
    draw(names, predicted, gaps)
    chosen = {spec: runs[spec] for spec in ("bf16", *HARMFUL) if spec in runs} | Results("lab_choose").runs
    rows = [
        [f"`{name}`", f"{np.mean(gap):+.4f}", ", ".join(f"{g:+.4f}" for g in gap)]
        for name in sorted(chosen)
        if name != "bf16"
        for gap in [gaps_of(chosen, name)]
    ]
    fidelity_figures.print_table(["recipe", "gap", "each seed"], rows)


def agreement_of_seeds(gaps: dict[str, list[float]]) -> float:
    """How well one seed's runs predict: the mean Spearman correlation of a seed with the others' mean."""
    seeds = np.array(list(gaps.values()))
    others = [np.delete(seeds, seed, axis=1).mean(axis=1) for seed in range(seeds.shape[1])]
    found = [spearmanr(one, rest).statistic for one, rest in zip(seeds.T, others, strict=True)]
    return float(np.mean(found))


def number(value: float | None) -> float:
    """A number of the file, where null stands for one that is not finite."""
    return math.inf if value is None else value


def gaps_of(runs: dict, spec: str) -> list[float]:
    """The gap of each seed in nats; infinite if the run diverged."""
    both = [seed for seed in sorted(runs[spec]) if seed in runs["bf16"]]
    gaps = [runs[spec][seed]["validation"] - runs["bf16"][seed]["validation"] for seed in both]
    return [gap if math.isfinite(gap) else math.inf for gap in gaps]


def draw(names: list[str], predicted: dict, gaps: dict) -> None:
    figure = Figure(figsize=(12, 4.6), layout="constrained", facecolor="white")
    titles = {
        "angle": "1 - cosine of gradients at step 31",
        "mse": "mean squared error of Gaussian numbers",
    }
    for axes, (key, title) in zip(figure.subplots(1, 2, sharey=True), titles.items(), strict=True):
        for name in names:
            axes.plot(
                [number(predicted[name][key])] * len(gaps[name]),
                gaps[name],
                "o",
                color="#2f6db3",
                alpha=0.6,
            )
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=fidelity_figures.LINEAR_BELOW)
        axes.set_xlabel(title)
        axes.set_ylabel("validation loss minus bf16, nats per byte\neach point is a seed")
    fidelity_figures.save(figure, ROOT / "docs" / "figures" / "numerics_lab_predict.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("predict", "train", "choose", "show"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    args = parser.parse_args()
    if args.action == "predict":
        predict()
    elif args.action == "show":
        show()
    else:
        {"train": train, "choose": choose}[args.action](args.seeds)


if __name__ == "__main__":
    main()
