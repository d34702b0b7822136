"""The stability sweep: which runs diverge, which rates are usable, its report, and that it continues."""

import importlib
from types import ModuleType

import numpy as np
import pytest

from maxlp.runtime import files
from tests.benchmarks.quick import run_quick

STEPS = 100


@pytest.fixture
def sweep() -> ModuleType:
    return importlib.import_module("stability_sweep")


def losses(end: float, since: int = STEPS, until: int = STEPS) -> np.ndarray:
    """The loss of each step: 2 nats, and ``end`` from step ``since`` to before step ``until``."""
    steps = np.arange(STEPS)
    return np.where((steps >= since) & (steps < until), end, 2.0)


def test_a_run_diverges_from_the_step_at_which_its_loss_rises_for_good(sweep):
    assert sweep.onset(losses(9.0)) is None
    assert sweep.onset(losses(9.0, 40, 60)) is None  # a spike
    assert sweep.onset(losses(2.0 + 0.9 * sweep.RISE, 40)) is None
    # The first window that contains one loss of 9: its mean is 0.7 nats above 2.
    assert sweep.onset(losses(9.0, 60)) == 60 - sweep.WINDOW + 1
    assert sweep.onset(losses(np.nan, 60)) == 60 - sweep.WINDOW + 1
    assert sweep.onset(losses(np.nan, 0)) == 0
    assert sweep.onset(np.linspace(6.0, 2.0, STEPS)) is None
    twice = losses(9.0, 30, 50) + losses(9.0, 80) - 2.0
    assert sweep.onset(twice) == 80 - sweep.WINDOW + 1


def test_sharpness_rises_before_a_step(sweep):
    steps = np.arange(STEPS, dtype=float)
    assert sweep.rises(steps, 50) and not sweep.rises(-steps, 50)
    late = np.where(steps >= 50, 9.0, -steps)  # what comes after does not count
    assert not sweep.rises(late, 50)


def run(validation: float, curve: np.ndarray, sharpness: np.ndarray) -> dict:
    values = {"loss": curve, "sharpness": sharpness}
    return files.finite({key: value.tolist() for key, value in values.items()}) | {"validation": validation}


def test_usable_rates_and_criteria(sweep, tmp_path, capsys):
    plan = sweep.Plan(tmp_path, {}, sweep.RECIPES, (-3, -2, -1, 0), seeds=(1, 2))
    sweep.report(plan, tmp_path / "sweep.png")
    assert "not run yet: bf16" in capsys.readouterr().out
    rising, falling = np.arange(STEPS, dtype=float), -np.arange(STEPS, dtype=float)
    for recipe, diverging in (("bf16", (0,)), ("fp8_current", (-1, 0)), ("fp8_delayed", ())):
        for exponent in plan.start:
            for seed in plan.seeds:
                curve, sharp = losses(2.0), falling
                if exponent in diverging and seed == 2:
                    curve, sharp = losses(np.nan, 60), rising
                validation = 2.0 + (sweep.MARGIN + 0.1) * (exponent == -3)
                plan.save(recipe, sweep.run_name(exponent, seed), run(validation, curve, sharp))
    found = {recipe: sweep.outcomes(recipe, plan) for recipe in ("bf16", "fp8_current", "fp8_delayed")}
    assert {recipe: sweep.usable(runs) for recipe, runs in found.items()} == {
        "bf16": [-2, -1],
        "fp8_current": [-2],
        "fp8_delayed": [-2, -1, 0],
    }
    sweep.report(plan, tmp_path / "sweep.png")
    told = capsys.readouterr().out
    assert "of 4 rates 1 are usable with fp8_current, 2 with bf16: met" in told
    assert "of 4 rates 3 are usable with fp8_delayed, 2 with bf16: not met" in told
    assert "rises before 3 of 3 onsets, and before 0 of 19 of the same steps in other runs: met" in told
    assert "| bf16 | 8 of 8 | 2: 2^-2, 2^-1 | 2.300 | 2.000 | 2.000 | 2.000 (1 of 2) |" in told
    assert (tmp_path / "sweep.png").exists()


def test_a_recipe_that_always_diverges_has_no_usable_rate(sweep):
    broken = {
        "validation": np.array(np.nan),
        "onset": 0,
        "loss": losses(np.nan, 0),
        "sharpness": losses(2.0),
    }
    assert sweep.usable({-3: [broken], -2: [broken]}) == []
    assert sweep.warnings({-3: [broken]}) == ([], [])


@pytest.mark.slow
def test_the_command_runs_and_continues(tmp_path):
    """40 seconds of CPU time."""
    for printed in (8, 0):  # two rates and two seeds of two recipes; then nothing
        out = run_quick("stability_sweep", tmp_path, "--only", "bf16", "fp8_delayed")
        assert out.count(", rate 2^") == printed
