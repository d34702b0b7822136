import numpy as np
import pytest

from maxlp.data import common


@pytest.mark.parametrize("size", [1, 2, 1000, 2**16 + 3])
def test_shuffled_is_a_permutation_for_any_size(size):
    orders = [[common.shuffled(i, size, (seed, 5)) for i in range(size)] for seed in (0, 1)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert size < 1000 or np.mean(np.equal(*orders)) < 0.01


def test_the_largest_divisor_within_a_limit():
    assert [common.largest_divisor(12, limit) for limit in (1, 5, 11, 20)] == [1, 4, 6, 12]
