"""The suite of injected damage: what it damages, and what it measures."""

import importlib
from types import ModuleType, SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.monitoring.spikes import SpikeConfig
from maxlp.precision import make_recipe
from maxlp.precision.dot import QuantDot
from tests.benchmarks.quick import run_quick


@pytest.fixture
def suite() -> ModuleType:
    return importlib.import_module("spike_suite")


def outcomes(suite: ModuleType, excess: np.ndarray, validation: float) -> dict:
    sound = {"validation": 3.0, "loss": [4.0] * 300}
    hurt = {"validation": validation, "loss": list(4.0 + excess)}
    return {"exponent": -6, "": sound} | dict.fromkeys(suite.DAMAGES, hurt)


def test_all_steps_are_trained_once_and_the_stretches_are_damaged(suite):
    found = list(suite.segments(300))
    assert [step for steps, _ in found for step in steps] == list(range(300))
    assert [steps for steps, is_damaged in found if is_damaged] == suite.STRETCHES


def test_damage_is_in_the_tokens_or_in_half_of_the_targets(suite):
    tokens = np.arange(8 * 65, dtype=np.int32).reshape(8, 65)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": np.ones((8, 64), bool)}
    random = suite.with_random_tokens(batch, 3)
    assert (random["tokens"][:, 1:] == random["targets"][:, :-1]).all()  # still the next token
    assert (random["tokens"] == batch["tokens"]).mean() < 0.05
    noisy = suite.random_targets(batch, 3)
    assert noisy["tokens"] is batch["tokens"]
    kept = (noisy["targets"] == batch["targets"]).mean()
    assert abs(kept - 0.5) < 5 * 0.5 / 512**0.5  # five standard deviations of 512 coins
    assert (noisy["targets"] == suite.random_targets(batch, 3)["targets"]).all()


def test_an_outlier_changes_nothing_without_quantization_and_hides_everything_in_fp8(suite):
    rng = np.random.default_rng(0)
    x_BSK, w_KN = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 3, 16), (16, 8)))

    def product(recipe: str) -> np.ndarray:
        dot = suite.OutlierDot(QuantDot(make_recipe(recipe)))
        return np.array(dot(jnp.array(x_BSK), jnp.array(w_KN), (((2,), (0,)), ((), ()))))

    np.testing.assert_allclose(product("bf16"), x_BSK @ w_KN, rtol=0, atol=1e-5)  # 16 terms of about 1
    assert not product("fp8_current").any()


def test_a_rollback_returns_to_a_saved_state_and_skips_the_batches_around_the_damage(suite, monkeypatch):
    """Damage begins at batches 120 and 165; the newest old enough states are those before 110 and 150."""
    trained = []

    def train(state, batches, watch):
        (batch,) = batches
        trained.append(batch["number"])
        return {"updates": state["updates"] + 1}, {"loss": [4.0 + batch["number"] % 3 + 50 * batch["hurt"]]}

    guard = SpikeConfig(guard="rollback", rewind_steps=suite.REWIND)
    settings = SimpleNamespace(spikes=guard, train=SimpleNamespace(total_steps=160))
    run = SimpleNamespace(settings=settings, train=train, evaluate=lambda state: state["updates"])
    data = SimpleNamespace(batches=lambda seed, steps: [dict(number=i, hurt=0) for i in range(steps)])
    plan = SimpleNamespace(error=int)
    monkeypatch.setattr(suite, "initial_state", lambda *_: {"updates": jnp.zeros((), int)})
    monkeypatch.setattr(suite, "with_rate", lambda state, rate: state)
    damage = suite.Damage("50 nats", lambda batch, seed: batch | {"hurt": 1})
    found = suite.train_with_rollbacks(run, None, -6, 1, damage, data, plan)
    assert found["validation"] == 160, "as many updates as without a rollback"
    assert found["rollbacks"] == 2
    assert trained == [*range(121), *range(130, 166), *range(170, 200)]
    assert [i for i, loss in enumerate(found["loss"]) if loss is None] == [*range(121, 130)]
    assert suite.difference({"": found, "x": found}, "x").shape == (160,)


def test_peak_recovery_and_the_end_are_differences_to_the_undamaged_run(suite):
    excess = np.zeros(300)
    for stretch in suite.STRETCHES:
        excess[stretch.start : stretch.stop] = 50.0  # the damaged steps themselves do not count
        excess[stretch.stop : stretch.stop + 10] = 0.5
    run = outcomes(suite, excess, 3.25)
    assert suite.peak(run, "tokens") == pytest.approx(0.5) and suite.final(run, "tokens") == 0.25
    assert suite.recovery(run, "tokens") == 10  # then 5 differences without any of the 10 are below 0.05
    excess[200:] = np.nan
    diverged = outcomes(suite, excess, float("inf"))
    assert suite.peak(diverged, "tokens") == pytest.approx((0.5 + 0.5 + 100 + 100) / 4)
    assert suite.recovery(diverged, "tokens") == (10 + 10 + suite.LONGEST + suite.LONGEST) / 4


def test_a_rollback_that_leaves_nothing_only_lags(suite):
    """Each rollback skips `SKIP` batches, beginning ten before the stretch."""
    undamaged = 4.0 - 0.01 * np.arange(300)
    damaged = undamaged.astype(object)
    for i, stretch in enumerate(suite.STRETCHES, 1):
        begin = stretch.start - 10 + suite.SKIP
        damaged[stretch.start + 1 : begin] = None
        damaged[begin:] = undamaged[begin - i * suite.SKIP : len(undamaged) - i * suite.SKIP]
    run = {"": {"loss": list(undamaged)}, "tokens": {"loss": list(damaged)}}
    assert suite.difference_by_updates(run, "tokens") == pytest.approx(0, abs=1e-12)  # float64
    np.testing.assert_allclose(suite.peaks(run, "tokens"), [0.2, 0.4, 0.6, 0.8])


def test_the_report_has_a_table_for_each_damage_and_the_criteria(suite, tmp_path, capsys):
    plan = suite.Plan(tmp_path, suite.BASE, suite.METHODS, seeds=(1, 2))
    suite.report(plan, tmp_path / "spikes.png", suite=suite.LLAMA)
    assert "not run yet" in capsys.readouterr().out
    excess = np.where(np.isin(np.arange(300), np.concatenate(suite.STRETCHES) + 4), 1.0, 0.0)
    for method, size in {"clip": 1.0, "stable_adamw": 0.5, "adagc": 0.25, "stable_spam": 2.0}.items():
        for seed in plan.seeds:
            plan.save(method, f"seed{seed}", outcomes(suite, size * excess, 3.0))
    suite.report(plan, tmp_path / "spikes.png", suite=suite.LLAMA)
    told = capsys.readouterr().out
    assert all(f"| {damage.meaning} | peak |" in told for damage in suite.DAMAGES.values())
    assert "adagc: lower peak with 2 of 2 seeds, after outliers 2; undamaged +0.00%" in told
    assert "stable_spam: lower peak with 0 of 2 seeds" in told


@pytest.mark.slow
def test_the_command_runs_and_continues(tmp_path):
    """30 seconds of CPU time."""
    for printed in (8, 0):  # three rates and a seed for each of two methods; then nothing
        assert run_quick("spike_suite", tmp_path, "--only", "clip", "guard").count(", rate 2^") == printed
