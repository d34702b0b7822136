"""How does each method cope with injected damage in a CLIP? As `spike_suite.py`, on drawn characters.

    NPROC=1 python benchmarks/spike_suite_clip.py              # run it again to continue
    NPROC=1 python benchmarks/spike_suite_clip.py --report     # tables and figure of what has been run

`configs/clip/debug.py` in the smaller size of `fidelity_clip.py`, 300 steps of 64 pairs, cosine decay,
float32, with β2 0.999 and without clipping, where a method does not set them. Seeds, stretches of damage
and measurements are those of `spike_suite.py`, with the share of wrong names (1 - zero-shot top-1) on the
validation face in place of the validation loss.

Criteria, written before any run:

1. AdaGC trains faster than StableAdamW by 25 % (Wang et al. 2025, arXiv:2502.11034): undamaged, its
   training loss (mean of 21 steps) is at or below the last one of StableAdamW with the same seed after at
   most 1 / 1.25 of the steps, on average over the seeds.
2. AdaGC is no worse in the end: its share of wrong names, on average over the seeds, is at most that of
   StableAdamW.
3. StableAdamW and AdaGC: a lower peak after images of noise than AdamW clipped by the global norm (`clip`),
   with at least 4 of 5 seeds; and after outliers in FP8. The same for Stable-SPAM; for the guard `skip`
   (`guard`), which is for bad batches, after images of noise.
4. β2 0.9 recovers from images of noise in fewer steps than 0.999 (`clip`), on average over the seeds.
5. Stable-SPAM, both guards and β2 0.9 have no price without damage: a share of wrong names at most 1 point
   above that of `clip`, on average over the seeds.
6. The guard `rollback`, as in `spike_suite.py`: a lower peak than `clip` after images of noise, with at
   least 4 of 5 seeds. Nothing is left of them in the end: a share of wrong names at most half a point above
   that of its undamaged runs, on average over the seeds.
"""

import functools
from typing import Any

import numpy as np
import spike_suite
from fidelity_clip import SMALL
from fidelity_runs import RESULTS
from optimizers_fair import Plan, command
from spike_suite import OUTLIERS, RATE_JUMP, SEEDS, Batch, Damage, Runs, Suite, final, peak, recovery

from configs.clip import debug

WINDOW = 21  # steps
FASTER = 1.25  # criterion 1
LEFT = 0.005  # share of wrong names that may remain, criterion 6
BASE: dict[str, Any] = SMALL | {
    "optimizer.schedule": "cosine",
    "optimizer.b2": 0.999,
    "train.total_steps": 300,
}
QUICK = BASE | {"train.total_steps": 280, "optimizer.warmup_steps": 2}
COMPARED = ("clip", "no clip", "stable_adamw", "adagc", "growing b2")
COMPARED += ("guard", "rollback", "stable_spam", "b2 0.9")
METHODS = {name: spike_suite.METHODS[name] for name in COMPARED}


def noise_images(batch: Batch, seed: int) -> Batch:
    """Every pixel is random."""
    image = batch["image"]
    return batch | {"image": np.random.default_rng(seed).integers(0, 256, image.shape).astype(image.dtype)}


def wrong_pairs(batch: Batch, seed: int) -> Batch:
    """Half of the captions are exchanged with each other, so that each of these gets another image."""
    text = batch["text"]
    moved = np.random.default_rng(seed).permutation(len(text))[: len(text) // 2]
    text = text.copy()
    text[moved] = text[np.roll(moved, 1)]
    return batch | {"text": text}


DAMAGES = {
    "images": Damage("noise instead of images", noise_images),
    "pairs": Damage("half of the captions are of other images", wrong_pairs),
    "rate": RATE_JUMP,
    "outliers": OUTLIERS,
}


def wrong_names(metrics: dict[str, float]) -> float:
    return 1 - metrics["zero_shot_top1"]


def time_to_reach(run: dict[str, Any], other: dict[str, Any]) -> float:
    """The share of its steps after which an undamaged run reaches the last loss of another one; else 1.

    Both losses are means of `WINDOW` steps.
    """
    means = np.convolve(run[""]["loss"], np.ones(WINDOW) / WINDOW, "valid")
    reached = np.flatnonzero(means <= np.mean(other[""]["loss"][-WINDOW:]))
    return (reached[0] + WINDOW) / len(run[""]["loss"]) if len(reached) else 1.0


def criteria(runs: Runs) -> None:
    """Prints whether the criteria are met, of the methods that have been run."""
    adagc, stable = runs.get("adagc", {}), runs.get("stable_adamw", {})
    if shared := sorted(adagc.keys() & stable.keys()):
        part = np.mean([time_to_reach(adagc[seed], stable[seed]) for seed in shared])
        met = "met" if part <= 1 / FASTER else "**not met**"
        print(f"* adagc has the last loss of stable_adamw after {part:.0%} of the steps: {met}")
        mine, theirs = (np.mean([of[seed][""]["validation"] for seed in shared]) for of in (adagc, stable))
        met = "met" if mine <= theirs else "**not met**"
        print(f"* wrong names in the end: {mine:.1%}, stable_adamw {theirs:.1%}: {met}")
    base = runs["clip"]
    for method in ("stable_adamw", "adagc", "stable_spam", "guard", "rollback"):
        own = runs.get(method, {})
        shared = sorted(own.keys() & base.keys())
        for damage, planted in (("images", DAMAGES["images"]), ("outliers", OUTLIERS)) if shared else ():
            lower = sum(peak(own[seed], damage) < peak(base[seed], damage) for seed in shared)
            print(
                f"* {method}: lower peak than clip with {lower} of {len(shared)} seeds: {planted.meaning}"
            )
    for method in ("stable_spam", "guard", "rollback", "b2 0.9"):
        if own := runs.get(method):
            price = np.mean(
                [run[""]["validation"] - base[seed][""]["validation"] for seed, run in own.items()]
            )
            print(f"* {method}: wrong names undamaged {price:+.1%} against clip")
    if own := runs.get("rollback"):
        left = np.mean([final(run, "images") for run in own.values()])
        met = "met" if left <= LEFT else "**not met**"
        print(f"* rollback: {left:+.2%} wrong names are left of noise in the end: {met}")
        spike_suite.tell_rollbacks(runs, DAMAGES, "images")
    if small := runs.get("b2 0.9"):
        taken, usual = (np.mean([recovery(run, "images") for run in of.values()]) for of in (small, base))
        met = "met" if taken < usual else "**not met**"
        print(f"* β2 0.9 recovers from noise in {taken:.1f} steps, clip in {usual:.1f}: {met}")


CLIP = Suite(DAMAGES, "wrong names", criteria)


def main() -> None:
    quick = {
        "base": QUICK,
        "start": (-9, -8),
        "budget": 3,
        "seeds": (1,),
        "validation_batches": 1,
    }
    plan = Plan(
        RESULTS / "spike_suite_clip",
        BASE,
        METHODS,
        start=(-10, -9, -8, -7),
        seeds=SEEDS,
        config=debug.get_config,
        error=wrong_names,
    )
    run = functools.partial(spike_suite.run_method, suite=CLIP)
    command(plan, __doc__, quick, run, functools.partial(spike_suite.report, suite=CLIP))


if __name__ == "__main__":
    main()
