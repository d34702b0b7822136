import json
import math

import numpy as np
import pytest

from maxlp.monitoring.spike_records import count_predicted, find_rms_spikes, find_spikes
from maxlp.monitoring.spikes import Detector, SpikeConfig
from tests.monitoring.fixtures import noisy


def test_a_resumed_detector_finds_the_same_spikes():
    losses = noisy()
    losses[[100, 105, 200]] += 1.0
    losses[150] = math.nan
    whole, resumed, found = Detector(SpikeConfig()), Detector(SpikeConfig()), []
    for i, loss in enumerate(losses):
        found.append((whole.observe(i, loss), resumed.observe(i, loss)))
        state = json.loads(json.dumps(resumed.get_state()))
        resumed = Detector(SpikeConfig())
        resumed.set_state(state)
    found = [(a, b) for a, b in found if a or b]
    assert [(a.step, a.begins) for a, _ in found] == [(100, True), (105, False), (150, True), (200, True)]
    assert all(str(a) == str(b) for a, b in found)  # as text, since NaN differs from itself
    assert found[2][0].sigmas == math.inf


def test_a_spike_is_above_the_threshold_of_a_sufficient_history():
    """Losses of 1 and 3 in turn have a mean of 2 and a standard deviation of 1."""

    def after(number, loss, spread=1.0):
        detector = Detector(SpikeConfig(threshold=3.0, min_history=16))
        assert not any(detector.observe(i, 2 + spread * (-1) ** i) for i in range(number))
        return detector.observe(number, loss)

    assert after(16, 5.0) is None and after(16, 5.5) == (16, 5.5, 2.0, 3.5, True)
    assert after(15, 1e6) is None and after(16, 1e6, spread=0.0) is None
    assert after(0, math.inf) is not None


def test_a_persistent_change_of_level_is_soon_no_spike():
    """Losses that stand out are among those that the next ones are compared with."""
    detector, losses = Detector(SpikeConfig(window=16)), [*noisy(40), *(noisy(40) + 3)]
    found = [i for i, loss in enumerate(losses) if detector.observe(i, loss)]
    # One of 16 such losses leaves the next one √15 = 3.9 standard deviations above the mean, two √7 = 2.6.
    assert found == [40, 41]


def test_spikes_that_follow_closely_are_one():
    detector = Detector(SpikeConfig(merge_steps=10))
    begins = [detector.observe(step, math.nan).begins for step in (0, 10, 20, 31, 42, 43)]
    assert begins == [True, False, False, True, True, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(guard="stop"), "guard='stop' is unknown; one of off, skip, rollback"),
        (dict(window=8), "window=8 must be at least min_history=16"),
        (dict(statistics=False, update_ratios=True), "update_ratios=True needs statistics=True"),
        (dict(threshold=0.0), r"threshold=0.0 must be above 0"),
        (dict(lead=0), "lead=0 must be at least 1"),
    ],
)
def test_invalid_configs(changes, message):
    with pytest.raises(ValueError, match=message):
        SpikeConfig(**changes)


# --- Among recorded losses ----------------------------------------------------------------------------


@pytest.fixture
def descent():
    rng = np.random.default_rng(0)
    steps = 10 * np.arange(1, 1001)
    return steps, 2 + 3 * np.exp(-steps / 2000) + 0.05 * rng.uniform(-1, 1, len(steps))


def test_a_run_without_spikes_has_none(descent):
    assert find_spikes(*descent, SpikeConfig()) == []


def test_planted_spikes_are_found_once_each(descent):
    steps, losses = descent
    losses[[300, 301, 600]] += 0.5
    losses[450] = np.nan
    found = find_spikes(steps, losses, SpikeConfig())
    assert [s.step for s in found] == [steps[300], steps[600]]
    before = losses[300 - 64 : 300]
    assert found[0].loss == losses[300]
    assert found[0].mean == pytest.approx(before.mean())
    assert found[0].sigmas == pytest.approx((losses[300] - before.mean()) / before.std())
    assert len(find_spikes(steps, losses, SpikeConfig(merge_steps=0))) == 3
    assert find_spikes(steps, losses, SpikeConfig(threshold=100)) == []
    assert find_spikes(steps, losses, SpikeConfig(min_history=700, window=700)) == []
    late = slice(290, None)  # the first spike has ten losses before it
    assert [s.step for s in find_spikes(steps[late], losses[late], SpikeConfig())] == [steps[600]]


# --- Of RMS_t -----------------------------------------------------------------------------------------


def test_rms_spikes_are_found_where_they_begin():
    rms = np.ones(100)
    rms[[20, 21, 25, 60]] = 2.0
    assert find_rms_spikes(np.arange(100), rms, SpikeConfig()) == [20, 60]
    assert find_rms_spikes(np.arange(100), rms, SpikeConfig(rms_threshold=2.5)) == []
    rms[40] = np.nan
    assert find_rms_spikes(np.arange(100), rms, SpikeConfig()) == [20, 40, 60]


def test_predicted_spikes_are_counted_and_those_by_chance():
    # RMS_t spikes at 10 and 50: steps 11..18 and 51..58 follow them, 16 of 100.
    assert count_predicted([18, 19, 51, 50], [10, 50], 100, SpikeConfig()) == (4, 2, 4 * 0.16)
    assert count_predicted([18, 19], [10, 50], 100, SpikeConfig()) == (2, 1, 2 * 0.16)
    assert count_predicted([18], [], 100, SpikeConfig()) == (1, 0, 0.0)
