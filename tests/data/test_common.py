import numpy as np
import pytest

from maxlp.data import common


@pytest.mark.parametrize("size", [1, 2, 1000, 2**16 + 1, 2**16 + 3])
def test_shuffled_is_a_permutation_for_any_size(size):
    orders = [[common.shuffled(i, size, (seed, 5)) for i in range(size)] for seed in (0, 1)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert size < 1000 or np.mean(np.equal(*orders)) < 0.01


@pytest.mark.parametrize("size", [1000, 2**16 + 3, 10**6, 10**9])
def test_neighbours_in_an_order_are_unrelated(size):
    """Of 1,000 numbers, correlations at 256 distances are below 0.16, five standard errors."""
    order = np.array([common.shuffled(i, size, (0, 0, 0)) for i in range(1000)])
    found = np.correlate(order - order.mean(), order - order.mean(), "full")[1000:1256] / 1000
    assert np.abs(found / order.var()).max() < 0.16


def test_the_largest_divisor_within_a_limit():
    assert [common.largest_divisor(12, limit) for limit in (1, 5, 11, 20)] == [1, 4, 6, 12]


@pytest.mark.parametrize(
    ("setting", "name"),
    [("seed", "train.seed"), ("weights", "weights of data.source"), ("seq_len", "data.seq_len")],
)
def test_a_changed_setting_is_named_by_its_key_in_the_config(setting, name):
    with pytest.raises(ValueError, match=f"^{name}: 0 when the run was saved, now 1; "):
        common.check_settings({setting: 0}, {setting: 1}, allow_change=False)


@pytest.mark.parametrize("size", [common.CACHED, common.CACHED + 1])
def test_a_state_records_the_rounds_of_exactly_the_orders_that_depend_on_them(size, monkeypatch):
    order = [common.shuffled(i, size, (0, 0, 0)) for i in range(100)]
    recorded = common.shuffle_settings([5, size])
    monkeypatch.setattr(common, "ROUNDS", common.ROUNDS + 2)
    same = order == [common.shuffled(i, size, (0, 0, 0)) for i in range(100)]
    assert same == (recorded == common.shuffle_settings([5, size]))
    assert same == (size == common.CACHED)


def test_a_state_with_an_order_of_an_earlier_version_goes_on_with_a_warning(caplog):
    assert not common.shuffle_settings([5, 2**16])
    settings = {"seed": 0} | common.shuffle_settings([5, 2**16 + 1])
    assert not common.check_settings({"seed": 0}, settings, allow_change=False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "some come twice and some never" in caplog.text
    assert not common.check_settings(settings, settings, allow_change=False)
    assert len(caplog.records) == 1


def test_an_iterator_opens_its_source_once_and_closes_it():
    class Source:
        started = closed = 0

        def start_prefetch(self):
            self.started += 1

        def close(self):
            self.closed += 1

    opened = []

    class Batches(common.PrefetchingIterator):
        def _open(self):
            opened.append(Source())
            return opened[-1]

    iterator = Batches()
    iterator.close()  # nothing is open
    assert iterator.start_prefetch() is iterator.start_prefetch() is opened[0]
    iterator.close()
    iterator.start_prefetch()
    assert [(source.started, source.closed) for source in opened] == [(1, 1), (1, 0)]
