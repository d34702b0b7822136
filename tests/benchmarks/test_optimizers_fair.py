"""The fair comparison of optimizers: its search, what it repeats, and that the rate is an input."""

import dataclasses
import importlib
from types import ModuleType

import pytest

from tests.benchmarks.quick import run_quick


@pytest.fixture
def fair() -> ModuleType:
    return importlib.import_module("optimizers_fair")


@pytest.mark.parametrize(
    ("best", "chosen", "runs"),
    [(-7, -7, 4), (-5, -5, 5), (-3, -3, 7), (-10, -10, 7), (5, -1, 8), (-20, -12, 8)],
)
def test_a_search_extends_its_grid_within_the_budget(fair, best, chosen, runs):
    losses: dict[int, float] = {}
    while (exponent := fair.next_exponent(losses, (-8, -7, -6, -5), 8)) is not None:
        assert exponent not in losses
        losses[exponent] = abs(exponent - best) + 3.0
    assert fair.best_exponent(losses) == chosen and len(losses) == runs
    assert sorted(losses) == list(range(min(losses), max(losses) + 1))


def test_rates_that_diverge_are_not_chosen(fair):
    losses = {-8: 4.0, -7: 3.0, -6: float("inf"), -5: float("inf")}
    assert fair.best_exponent(losses) == -7 and fair.next_exponent(losses, (-8, -7, -6, -5), 8) is None
    losses = dict.fromkeys((-8, -7, -6, -5), float("inf"))
    assert fair.next_exponent(losses, (-8, -7, -6, -5), 8) == -9


def test_runs_of_other_settings_do_not_count(fair, tmp_path):
    plan = fair.Plan(tmp_path, {"model.dtype": "float32"}, start=(-2, -1, 0), seeds=(1, 2))
    for exponent, loss in ((-2, 3.0), (-1, 2.0), (0, float("inf"))):
        assert plan.finals("lion") == {}
        plan.save("lion", fair.run_name(exponent, 0), {"validation": loss})
    assert plan.losses("lion") == {-2: 3.0, -1: 2.0, 0: float("inf")} and plan.losses("adamw") == {}
    plan.save("lion", fair.run_name(-1, 2), {"validation": 2.5})
    assert plan.finals("lion").keys() == {2}
    assert dataclasses.replace(plan, base={"model.dtype": "bfloat16"}).losses("lion") == {}


def test_criteria_compare_the_same_seeds_with_the_reference(fair, tmp_path, capsys):
    plan = fair.Plan(tmp_path, {}, start=(-2, -1, 0), seeds=(1, 2))
    excess = {"adamw": 0.0, "stable_adamw": 0.02, "galore_d2": 0.04, "galore_d4": 0.06}
    for method, more in excess.items():
        for exponent in (-2, -1, 0):
            plan.save(method, fair.run_name(exponent, 0), {"validation": 3.0 + abs(exponent + 1)})
        for seed in (1, 2):
            values = {"validation": seed + more, "loss": [4.0, 3.0]}
            plan.save(method, fair.run_name(-1, seed), values)
    fair.report(plan, tmp_path / "curves.png")
    told = capsys.readouterr().out
    assert "| adamw | 2^-1 | 2^-2 … 2^0 | 1.5000 ± 0.7071 |" in told and "| soap | not run |" in told
    assert "galore_d2: perplexity +4.08%, at most +5.0%: met (2 seeds)" in told
    assert "galore_d4: perplexity +6.18%, at most +5.0%: **not met** (2 seeds)" in told
    assert "stable_adamw: loss +1.33%, at most +0.5%: **not met** (2 seeds)" in told
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_rate_is_an_input_of_the_step(fair, tmp_path):
    """The same losses as with the rate in the config, bit for bit: both are float32."""
    base = fair.BASE | fair.QUICK
    data = fair.Data(fair.changed(fair.tiny.get_config(), base), tmp_path, 1)
    batches = data.batches(1, 3)
    run = fair.Trainer({}, data, fair.with_rate_in_state)
    for exponent in (-7, -4):
        fixed = fair.Trainer({"optimizer.learning_rate": 2.0**exponent}, data)
        expected, _ = fixed.train(fixed.init(1), batches, fair.watch_nothing)
        state, _ = run.train(fair.initial_state(run, exponent, 1), batches, fair.watch_nothing)
        assert fixed.evaluate(expected) == run.evaluate(state), exponent


@pytest.mark.slow
def test_a_second_call_runs_only_what_is_missing(tmp_path):
    """40 seconds of CPU time."""
    first = run_quick("optimizers_fair", tmp_path, "--only", "adamw", "galore_d2")
    assert first.count(", seed ") == 10 and first.count("× adamw's step") == 2
    lost = tmp_path / "galore_d2" / "rate-5_seed2.json"
    before, times = lost.read_text(), {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/*.json")}
    lost.unlink()
    second = run_quick("optimizers_fair", tmp_path, "--only", "adamw", "galore_d2")
    assert second.count(", seed ") == 1 and lost.read_text() == before
    assert {p for p, time in times.items() if p.stat().st_mtime_ns != time} == {lost}
    assert "| galore_d2 | 2^-5 |" in run_quick("optimizers_fair", tmp_path, "--report")
