"""Does AdaScale keep the quality of a small batch when the batch grows? A tiny Llama, SGD, batches × 1 … 8.

    python benchmarks/adascale.py --seeds 0 1 2

A Llama of 2 layers and D 64 reads bytes of Python's standard library in small batches of 4 × 64 with SGD
(momentum 0.9, linear to 0, no clipping), for 800 steps. Its rate is the best of `RATES` at S = 1 with a
seed that is not used afterwards. Then, with each seed, a batch S = 2, 4, 8 times as large:

    AdaScale         the rate, warm-up and steps of the small batch; S microbatches; ends at τ = 800
    linear scaling   S times the rate, a warm-up and a run of 1/S of the steps (Goyal et al. 2017)

Two runs with AdaScale change S on the way:

    1 to 8           at τ = 400
    by the noise     every 20 steps, to the largest of 1, 2, 4, 8 that is at most the measured noise scale

All read the same stream of text. Criteria, written before the runs:

1. Equal quality: at every S the mean validation loss with AdaScale is at most 2 % above that of S = 1.
2. Fewer steps: more than 1.25 times fewer at S = 2 than at S = 1, and fewer with each doubling of S.
3. At every S at which linear scaling is more than 2 % worse than S = 1, AdaScale is better than it.
4. Where S changes, the mean validation loss is at most 2 % above that of S = 1; "by the noise" takes fewer
   steps than S = 2 and reads less text than S = 8.

Results: `benchmarks/results/fidelity_adascale.json`; finished runs are not repeated. Four minutes on two
cores.
"""

import argparse
import functools
import itertools
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from fidelity_runs import Data, Results, Trainer, digits
from training import changed

from configs.llama import tiny
from maxlp.parallel.batches import global_batch

STEPS, WARMUP, ROWS = 800, 40, 4
SCALES = (2, 4, 8)
RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
SEARCH_SEED = 100
Choose = Callable[[int, float, dict[str, Any]], int]  # finished steps, τ and the last metrics to S
BASE: dict[str, Any] = {
    "model.vocab_size": 320,
    "model.num_layers": 2,
    "model.dtype": "float32",
    "data.tokenizer": "bytes",
    "data.seq_len": 64,
    "data.batch_size": ROWS,
    "optimizer.name": "sgd",
    "optimizer.b1": 0.9,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": 0.0,
    "optimizer.warmup_steps": WARMUP,
    "train.total_steps": STEPS,
}


def variant(method: str, scale: int, rate: float) -> dict[str, Any]:
    """The changes of `BASE` for a batch that is ``scale`` times as large.

    Args:
      rate: learning rate of the small batch.
    """
    batch = {"data.batch_size": ROWS * scale}
    if method == "adascale":
        return batch | {
            "optimizer.learning_rate": rate,
            "optimizer.adascale": float(scale),
            "train.microbatches": max(2, scale),
        }
    return batch | {
        "optimizer.learning_rate": rate * scale,
        "optimizer.warmup_steps": WARMUP // scale,
        "train.total_steps": STEPS // scale,
    }


def constant(scale: int) -> Choose:
    return lambda step, progress, metrics: scale


def rising(step: int, progress: float, metrics: dict[str, Any]) -> int:
    return SCALES[-1] if progress >= STEPS / 2 else 1


class ByTheNoise:
    """Chooses, every `EVERY` steps, the largest scale that is at most the measured noise scale."""

    EVERY = 20

    def __init__(self) -> None:
        self.scale = 1

    def __call__(self, step: int, progress: float, metrics: dict[str, Any]) -> int:
        if metrics and step % self.EVERY == 0:
            self.scale = max(s for s in (1, *SCALES) if s <= max(1.0, float(metrics["noise_scale"])))
        return self.scale


def train(trainer: Callable[[int], Trainer], choose: Choose, seed: int, data: Data) -> dict[str, Any]:
    """Trains to the end of the schedule, or until the loss is not finite.

    Args:
      trainer: of batches that are a number of times (the scale) as large as the small batch.
      choose: the scale of the next step.

    Returns:
      The validation loss, the number of steps, the small batches read (``read``), and of every tenth step
      AdaScale's gain and the scale.
    """
    small = data.batches(seed, STEPS * max(SCALES))
    run = trainer(choose(0, 0.0, {}))
    state, total, gains, scales = run.init(seed), run.settings.train.total_steps, [], []
    progress, step, read, metrics = 0.0, 0, 0, {}
    while progress < total:
        scale = choose(step, progress, metrics)
        run, part = trainer(scale), small[read : read + scale]
        batch = {key: np.concatenate([rows[key] for rows in part]) for key in part[0]}
        state, metrics = run.step(state, global_batch(batch, run.mesh))
        step, read = step + 1, read + scale
        progress = float(metrics.get("tau", step))
        gains.append(digits(metrics.get("gain", 1.0)))
        scales.append(scale)
        if not math.isfinite(metrics["loss"]):
            return {"loss": math.inf, "steps": step, "gains": gains}
    measured = {"loss": run.evaluate(state)["loss"], "steps": step, "gains": gains[::10]}
    return measured | {"read": read, "scales": scales[::10]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    results = Results("adascale")
    with tempfile.TemporaryDirectory() as folder:
        data = Data(changed(tiny.get_config(), BASE), Path(folder), validation_batches=64)
    for rate in RATES:
        measure(results, f"search {rate:g}", "linear", 1, rate, [SEARCH_SEED], data)
    best = min(RATES, key=lambda rate: results.runs[f"search {rate:g}"][str(SEARCH_SEED)]["loss"])
    print(f"rate {best:g}")
    measure(results, "S = 1", "linear", 1, best, seeds, data)
    for scale, method in itertools.product(SCALES, ("adascale", "linear")):
        measure(results, f"S = {scale}, {method}", method, scale, best, seeds, data)
    trainer = functools.cache(lambda scale: Trainer(variant("adascale", scale, best), data))
    add_missing(results, "S = 1 to 8, adascale", trainer, lambda: rising, seeds, data)
    add_missing(results, "S by the noise, adascale", trainer, ByTheNoise, seeds, data)
    print(table(results, seeds))


def measure(
    results: Results, name: str, method: str, scale: int, rate: float, seeds: list[int], data: Data
) -> None:
    """Makes the runs with one scale that the results lack."""
    trainer = functools.cache(lambda scale: Trainer(variant(method, scale, rate), data))
    add_missing(results, name, trainer, lambda: constant(scale), seeds, data)


def add_missing(
    results: Results,
    name: str,
    trainer: Callable[[int], Trainer],
    make_choice: Callable[[], Choose],
    seeds: list[int],
    data: Data,
) -> None:
    """Makes the runs of a name that the results lack."""
    for seed in seeds:
        if results.has(name, seed):
            continue
        start = time.time()
        results.add(name, seed, train(trainer, make_choice(), seed, data))
        measured = results.runs[name][str(seed)]
        seconds = time.time() - start
        print(f"{name}, seed {seed}: {measured['loss']:.4f} in {measured['steps']} steps ({seconds:.0f} s)")


def text_read(name: str, run: dict[str, Any]) -> int:
    """How many small batches a run has read."""
    return run.get("read") or run["steps"] * int(
        name.split()[2].rstrip(",")
    )  # before results had it, scales were constant


def table(results: Results, seeds: list[int]) -> str:
    """The table: means over the seeds ± standard deviation, relative to the mean of S = 1."""
    lines = ["| run | validation loss | against S = 1 | steps | mean gain | text read |"]
    lines.append("|---" * 6 + "|")
    base = np.array([results.runs["S = 1"][str(seed)]["loss"] for seed in seeds])
    for name, runs in results.runs.items():
        if not name.startswith("S "):
            continue
        loss = np.array([runs[str(seed)]["loss"] for seed in seeds])
        steps = np.mean([runs[str(seed)]["steps"] for seed in seeds])
        cells = [name, "diverges", "", "", "", ""]
        if np.isfinite(loss).all():
            cells[1:3] = f"{loss.mean():.3f} ± {loss.std():.3f}", f"{loss.mean() / base.mean() - 1:+.1%}"
            read = np.mean([text_read(name, runs[str(seed)]) for seed in seeds])
            cells[3], cells[5] = f"{steps:.0f}", f"× {read / STEPS:.2g}"
        if "adascale" in name:
            cells[4] = f"{STEPS / steps:.2f}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
