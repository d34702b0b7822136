import numpy as np
import pytest

from maxlp.optim.schedules import SCHEDULES, fitting_warmup, make_schedule, takes

ROUNDING = 1e-6  # of rates, which are float32 after a few operations
BASE = dict(learning_rate=1.0, warmup_steps=3, total_steps=11, final_lr_fraction=0.1, decay_fraction=0.2)


def values(name, **changes):
    schedule = make_schedule(name, **BASE | changes)
    return np.array([schedule(step) for step in range(13)])


def test_warmup_rises_evenly_to_the_peak_and_wastes_no_step():
    for name in SCHEDULES:
        np.testing.assert_allclose(values(name)[:4], [0.25, 0.5, 0.75, 1.0], rtol=ROUNDING)
        assert make_schedule(name, **BASE | {"warmup_steps": 0})(0) == 1.0


def test_linear_is_a_line():
    # Of numbers of up to 1, each rounded twice to float32.
    np.testing.assert_allclose(np.diff(values("linear")[3:12]), -0.9 / 8, rtol=0, atol=4 * 2.0**-24)


def test_cosine_is_the_closed_form():
    progress = np.minimum(np.arange(3, 13) - 3, 8) / 8
    expected = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * progress))
    np.testing.assert_allclose(values("cosine")[3:], expected, rtol=ROUNDING)


def test_wsd_stays_then_falls_linearly():
    # A decay over 4/11 of 11 steps starts at step 7 and ends at step 11.
    got = values("wsd", decay_fraction=4 / 11)
    np.testing.assert_allclose(got[3:8], 1.0, rtol=ROUNDING)
    np.testing.assert_allclose(got[7:], [1, 0.775, 0.55, 0.325, 0.1, 0.1], rtol=ROUNDING)


def test_constant_stays():
    assert (values("constant")[3:] == 1.0).all()


def test_whether_a_schedule_has_a_decay_follows_from_its_arguments(monkeypatch):
    """So `decay_fraction` sets and checks that of a new one too."""
    monkeypatch.setitem(SCHEDULES, "own", lambda peak, decay_steps: lambda step: peak * decay_steps)
    assert [name for name in SCHEDULES if takes(name, "decay_steps")] == ["wsd", "own"]
    assert values("own", decay_fraction=4 / 11)[5] == 4
    with pytest.raises(ValueError, match=r"^decay_fraction=0.9 is 10 steps"):
        values("own", decay_fraction=0.9)


@pytest.mark.parametrize("warmup_steps", [20, 21, 2000])
def test_a_warmup_that_is_not_shorter_than_the_run_takes_a_tenth_of_it(warmup_steps):
    for name in SCHEDULES:
        got = values(name, warmup_steps=warmup_steps, total_steps=20)
        np.testing.assert_array_equal(got, values(name, warmup_steps=2, total_steps=20))
    assert fitting_warmup(19, 20) == 19 and fitting_warmup(1, 1) == 0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("wsd", {"decay_fraction": 0.9}, r"decay_fraction=0.9 is 10 steps .* between warmup_steps=3 and"),
        (
            "wsd",
            {"decay_fraction": 1.0, "warmup_steps": 5000},
            r"between warmup_steps=5000 \(shortened to 1\) and total_steps=11",
        ),
        ("wsd", {"decay_fraction": 0.0}, r"decay_fraction=0.0 is 0 steps"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(name, **BASE | changes)


def test_a_decay_takes_at_least_a_step_and_at_most_what_the_warmup_leaves():
    for fraction, decay_steps in [(1 / 11, 1), (8 / 11, 8)]:
        expected = 1 - 0.9 * np.clip(np.arange(3, 13) - (11 - decay_steps), 0, decay_steps) / decay_steps
        np.testing.assert_allclose(values("wsd", decay_fraction=fraction)[3:], expected, rtol=ROUNDING)
    for name in SCHEDULES:
        if not takes(name, "decay_steps"):
            np.testing.assert_array_equal(values(name, decay_fraction=0.9), values(name))


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_multiples_of_the_learning_rate(name):
    """The final rate is a fraction of the peak, not a number of its own."""
    np.testing.assert_allclose(values(name, learning_rate=1e-3), 1e-3 * values(name), rtol=ROUNDING)
