"""The suite of injected damage for CLIP: what it damages, its criteria, and that it runs."""

import importlib
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture
def suite() -> ModuleType:
    return importlib.import_module("spike_suite_clip")


def test_damage_is_in_all_images_or_in_half_of_the_captions(suite):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (8, 4, 4, 3)).astype(np.uint8)
    batch = {"image": image, "text": np.arange(8 * 5, dtype=np.int32).reshape(8, 5)}
    noisy = suite.noise_images(batch, 3)
    assert noisy["text"] is batch["text"] and noisy["image"].dtype == np.uint8
    assert (noisy["image"] == image).mean() < 0.1
    swapped = suite.wrong_pairs(batch, 3)
    assert swapped["image"] is image
    assert (swapped["text"] != batch["text"]).all(axis=1).sum() == 4
    assert sorted(swapped["text"][:, 0]) == sorted(batch["text"][:, 0])  # each caption is still there once
    assert (batch["text"] == np.arange(8 * 5).reshape(8, 5)).all()


def run(losses: np.ndarray, validation: float = 0.3) -> dict:
    names = ("", "images", "pairs", "rate", "outliers")
    return {name: {"loss": list(losses), "validation": validation} for name in names}


def test_the_time_to_reach_a_loss_is_a_part_of_the_steps(suite):
    falling = np.linspace(4, 1, 300)
    slow, fast, bad = (run(losses) for losses in (falling, np.maximum(2 * falling - 4, 1), falling + 1))
    assert suite.time_to_reach(slow, slow) == 1.0
    # Twice as steep: after half of the steps, and ten more for half a window.
    assert suite.time_to_reach(fast, slow) == pytest.approx(0.5, abs=0.04)
    assert suite.time_to_reach(bad, slow) == 1.0


def test_the_report_judges_the_claim(suite, tmp_path, capsys):
    falling = np.linspace(4, 1, 300)
    plan = suite.Plan(tmp_path, suite.BASE, suite.METHODS, seeds=(1, 2))
    runs = dict(clip=run(falling), stable_adamw=run(falling))
    runs["adagc"] = run(np.maximum(2 * falling - 4, 1), 0.25)
    runs["rollback"] = {name: one | {"rollbacks": 0} for name, one in run(falling).items()}
    runs["rollback"]["images"]["validation"] = 0.31
    for method, one in runs.items():
        for seed in plan.seeds:
            plan.save(method, f"seed{seed}", {"exponent": -9} | one)
    suite.spike_suite.report(plan, tmp_path / "figure.png", suite=suite.CLIP)
    told = capsys.readouterr().out
    assert "| undamaged | rate | wrong names | minus clip | spikes |" in told
    assert "| noise instead of images | peak |" in told
    assert "% of the steps: met" in told
    assert "wrong names in the end: 25.0%, stable_adamw 30.0%: met" in told
    assert "rollback: +1.00% wrong names are left of noise in the end: **not met**" in told
    assert "0 images, 0 pairs, 0 rate, 0 outliers" in told


@pytest.mark.slow
def test_a_method_is_searched_and_damaged(suite, tmp_path, monkeypatch, capsys):
    """40 seconds of CPU time."""
    arguments = ["spike_suite_clip.py", "--quick", f"--out={tmp_path}", "--only", "clip"]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr(suite.spike_suite, "STRETCHES", [range(2, 4)])
    base = suite.BASE | {"train.total_steps": 6, "data.batch_size": 8, "optimizer.warmup_steps": 1}
    monkeypatch.setattr(suite, "QUICK", base)
    suite.main()
    assert capsys.readouterr().out.count("clip, rate 2^") == 4  # three rates and a seed
