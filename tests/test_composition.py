"""Every pair of features is in a row that a test runs, or a rule refuses it with a reason."""

import itertools

import pytest

from tests import composition
from tools import composition as page

# What a family refuses whatever else is chosen.
REFUSED = {
    ("clip", name) for name in ("stage", "context", "adascale", "qk_clip", "exchange", "local steps")
}


@pytest.mark.slow
@pytest.mark.parametrize("family", composition.FAMILIES)
def test_every_pair_runs_or_is_refused_with_a_reason(family):
    rows = composition.rows(family, "full") + composition.rows(family, "slow")
    for pair, message in composition.pairs(family).items():
        covered = any(set(pair) <= set(row) for row in rows)
        assert covered == (message is None), pair
    assert all(composition.num_devices(row) <= composition.DEVICES for row in rows)
    assert {len(row) for row in rows} != {2}, "rows combine more than a pair"


def test_every_feature_is_in_the_table():
    names = [f.name for f in composition.FEATURES]
    assert len(set(names)) == len(names)
    for family, f in itertools.product(composition.FAMILIES, composition.FEATURES):
        alone = composition.refusal(family, (f.name,))
        assert alone is None or (family, f.name) in REFUSED, alone


@pytest.mark.full
def test_the_page_is_printed_from_the_table():
    assert composition.PAGE.read_text() == page.text()
