"""The last step: the one that completes the schedule, read from the device only near the end."""

import numpy as np
import pytest

from maxlp.run.progress import Progress


class Metrics(dict):
    """Metrics of a step; counts how often the host reads them."""

    reads = 0

    def get(self, key, default=None):
        Metrics.reads += 1
        return super().get(key, default)


def last_step(progress, taus, start=0):
    return next(n for n, tau in enumerate(taus, start + 1) if progress.is_last(n, Metrics(tau=tau)))


def test_a_run_without_adascale_ends_after_its_steps():
    progress = Progress(10, 4, 4.0)
    assert [progress.is_last(n, {"loss": 1.0}) for n in range(5, 11)] == [False] * 5 + [True]
    assert progress.finished
    assert Progress(10, 10, 10.0).finished and not Progress(10, 9, 9.0).finished


def test_a_count_that_is_not_the_step_is_named_beside_it():
    assert str(Progress(10, 10, 10.0)) == "10 of 10"
    assert str(Progress(6, 3, 8.7, fastest=4.0)) == "3, which counts as 9 of 6"


@pytest.mark.parametrize("seed", range(3))
def test_the_first_step_whose_count_reaches_the_total_is_the_last(seed):
    """With any gains in [1, S]; a resumed run ends at the same step; few steps wait for the device."""
    gains = np.random.default_rng(seed).uniform(1, 8, 2000).astype(np.float32)
    gains[::7] = 0  # skipped steps
    taus = np.cumsum(gains, dtype=np.float32)
    want = int(np.argmax(taus >= 5000)) + 1
    Metrics.reads = 0
    assert last_step(Progress(5000, 0, 0.0, fastest=8.0), taus) == want
    assert Metrics.reads < 40 < want
    for cut in (1, want // 2, want - 1):
        resumed = Progress(5000, cut, float(taus[cut - 1]), fastest=8.0)
        assert not resumed.finished
        assert last_step(resumed, taus[cut:], cut) == want


def test_a_sum_that_rounding_made_larger_than_the_bound_is_noticed():
    assert last_step(Progress(16, 0, 0.0, fastest=4.0), [4.0, 8.0, 12.0, 16.0, 20.0]) == 4
    # 3 more steps of at most 4 would end at 15.99.
    assert last_step(Progress(16, 0, 3.99, fastest=4.0), [7.99, 11.99, 16.0, 20.0]) == 3
