"""Every pair of features is in a row that a test runs, or a rule refuses it with a reason."""

import itertools

import pytest

from maxlp.optim import OPTIMIZERS, OptimizerConfig
from tests import composition
from tools import composition as page

# What a family refuses whatever else is chosen.
REFUSED = {
    ("clip", name) for name in ("stage", "context", "adascale", "qk_clip", "exchange", "local steps")
}


def rows_on_page(family: str, tier: str) -> tuple[composition.Row, ...]:
    return tuple(row for *of, row in composition.rows_on_page() if of == [family, tier])


@pytest.mark.full
@pytest.mark.parametrize("family", composition.FAMILIES)
def test_every_pair_runs_in_its_tier_or_is_refused_with_a_reason(family):
    rows = rows_on_page(family, "full")
    all_rows = rows + rows_on_page(family, "slow")
    for pair, message in composition.pairs(family).items():
        assert any(set(pair) <= set(row) for row in all_rows) == (message is None), pair
        if message is None and not composition.is_slow(family, pair):
            assert any(set(pair) <= set(row) for row in rows), pair
    assert all(composition.num_devices(row) <= composition.DEVICES for row in all_rows)
    assert {len(row) for row in all_rows} != {2}, "rows combine more than a pair"


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["full", "slow"])
@pytest.mark.parametrize("family", composition.FAMILIES)
def test_the_page_has_the_rows_that_are_found(family, tier):
    assert rows_on_page(family, tier) == composition.rows(family, tier)


def test_every_feature_is_in_the_table():
    names = [f.name for f in composition.FEATURES]
    assert len(set(names)) == len(names)
    for family, f in itertools.product(composition.FAMILIES, composition.FEATURES):
        alone = composition.refusal(family, (f.name,))
        assert alone is None or (family, f.name) in REFUSED, alone


def test_every_optimizer_is_a_feature():
    names = {f.values.get("optimizer.name", OptimizerConfig.name) for f in composition.FEATURES}
    assert names == OPTIMIZERS.keys(), "add a new optimizer to FEATURES in tests/composition.py"


@pytest.mark.full
def test_the_page_is_printed_from_the_tables():
    assert composition.PAGE.read_text() == page.text(rows_on_page)


def test_the_page_has_the_rules_and_their_reasons():
    assert "\n".join(page.rules()) in composition.PAGE.read_text()
