"""Spontaneous outliers: what is measured of a SwiGLU, the criteria, and that the program continues."""

import dataclasses
import importlib
from types import ModuleType

import numpy as np
import pytest

from tests.benchmarks.quick import run_quick


@pytest.fixture
def outliers() -> ModuleType:
    return importlib.import_module("outliers")


def test_cosines_weighted_by_the_norms(outliers):
    gate = np.array([[3.0, 0.0], [0.0, 1.0]])  # channels of norm 3 and 1
    up = np.array([[-2.0, 1.0], [0.0, 1.0]])  # opposite, and at 45 degrees
    found = outliers.cosines(gate, up)
    root = np.sqrt(0.5)
    assert found["longest"] == pytest.approx(1.0)
    assert found["mean"] == pytest.approx((6 + root * np.sqrt(2)) / (6 + np.sqrt(2)))
    assert outliers.cosines(gate, up / [8, 1])["longest"] == pytest.approx(root)


def test_the_largest_input_of_the_down_projection(outliers):
    rng = np.random.default_rng(0)
    x, gate, up = (rng.standard_normal(shape) for shape in ((1, 5, 4), (4, 8), (4, 8)))
    expected = np.abs(x @ gate / (1 + np.exp(-x @ gate)) * (x @ up)).max()
    # Products in float32.
    assert outliers.hidden_amax({"gate_proj": gate, "up_proj": up}, x) == pytest.approx(expected, rel=1e-5)
    assert outliers.hidden_amax({"up_proj": up}, 100 * x) == pytest.approx((100 * x @ up).max(), rel=1e-5)


def of_run(end: float, product: list[float], error: float, saturated: list[float]) -> dict:
    cosines = [0.2, 0.92, end, end]
    curves = {"product": product, "saturated": saturated, "loss": [1.0] * 4, "magnitude": [1.0] * 4}
    return curves | {"mean": cosines, "longest": cosines, "error": error, "overshoot": 1.0}


def test_the_criteria(outliers, tmp_path, capsys):
    base = dataclasses.asdict(outliers.Setting())
    plan = outliers.Plan(tmp_path, base, outliers.VARIANTS, seeds=(1, 2))
    outliers.report(plan, tmp_path / "figure.png")
    assert "not run yet: swiglu, swiglu_no_l2" in capsys.readouterr().out
    none, large, small = [0.0] * 4, [0.0, 2e-5, 2e-5, 4e-5], [0.0, 0.0, 1e-5, 1e-5]
    runs = {
        "swiglu": of_run(0.99, [2.0, 5.0, 9.0, 12.0], 0.1, none),
        "swiglu_no_l2": of_run(0.95, [2.0] * 4, 0.1, none),
        "swiglu_fp8_delayed": of_run(0.99, [2.0] * 4, 0.11, large),
        "swiglu_fp8_delayed_channel": of_run(0.99, [2.0] * 4, 0.1005, none),
        "gelu": of_run(0.99, [1.0, 1.0, 2.0, 2.5], 0.1, none),
        "gelu_fp8_delayed": of_run(0.99, [1.0] * 4, 0.1, small),
    }
    for seed in plan.seeds:
        for variant, values in runs.items():
            plan.save(variant, f"seed{seed}", values)
    outliers.report(plan, tmp_path / "figure.png")
    told = capsys.readouterr().out
    assert told.count(": met") == 5 and "not met" not in told
    assert "1 in 100,000 from step 100, 100, aligned from step 100, 100, then 3, 3 times" in told
    early = [2e-5, *large[1:]]
    for variant, changes, name in (
        ("swiglu_no_l2", {"mean": [0.2, 0.9, 0.99, 0.995]}, "alignment"),
        ("swiglu", {"product": [3.0, 5.0, 9.0, 12.0]}, "growth"),
        ("swiglu_fp8_delayed", {"saturated": early}, "saturation"),
        ("gelu_fp8_delayed", {"saturated": large}, "saturation"),
        ("swiglu_fp8_delayed", {"error": 0.104}, "damage"),
        ("swiglu_fp8_delayed_channel", {"saturated": [0, 1e-7, 0, 0]}, "cure"),
    ):
        both = {name: [values, values] for name, values in runs.items()}
        told = outliers.criteria(both | {variant: [runs[variant], runs[variant] | changes]})
        assert [line.partition(":")[0] for line in told if line.endswith(": not met")] == [f"* {name}"]
    assert (tmp_path / "figure.png").exists()


@pytest.mark.slow
def test_the_command_runs_and_continues(tmp_path):
    """20 seconds of CPU time."""
    for printed in (6, 0):  # one seed of each variant; then nothing
        out = run_quick("outliers", tmp_path)
        assert out.count(", seed 1: error") == printed and "* alignment: mean cosine" in out
