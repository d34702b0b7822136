import numpy as np
import pytest

from maxlp.monitoring.batch_statistics import batch_lines, batch_statistics, text_lines


def text(seed):
    tokens = np.random.default_rng(seed).integers(0, 40, (8, 64), np.int32)
    tokens[:, ::2] = 7
    return {"tokens": tokens, "loss_mask": np.ones(tokens.shape, bool)}


def images(seed):
    rng = np.random.default_rng(seed)
    return {"images": rng.normal(128, 30, (4, 8, 8, 3)).clip(0, 255).astype(np.uint8)}


def beyond(batches, damage):
    """The names of the statistics of a damaged last batch that are not as in those before it."""
    damage(batches[-1])
    steps = range(1, len(batches) + 1)
    found = [batch_statistics(batch) for batch in batches]
    rows = [*batch_lines(steps, found, min_history=len(found) - 1)]
    plain = batch_lines(steps, found, min_history=len(found))
    assert not any(row.endswith((" lower", " higher")) for row in plain), "too few to compare with"
    assert max(map(len, rows)) <= 80
    return {row[2:47].strip(): row.split()[-1] for row in rows if row.endswith((" lower", " higher"))}


@pytest.mark.parametrize(
    ("make", "damage", "expected"),
    [
        (text, lambda x: x["tokens"][3].fill(9), {"tokens: distinct values, least of a row": "lower"}),
        (
            text,
            lambda x: x["tokens"].__setitem__(3, np.arange(64)),
            {"tokens: distinct values, most of a row": "higher"},
        ),
        (text, lambda x: x["tokens"].__setitem__(3, x["tokens"][5]), {"tokens: repeated rows": "higher"}),
        (text, lambda x: x["loss_mask"][3].fill(False), {"loss_mask: share that is true": "lower"}),
        (images, lambda x: x["images"][2].fill(128), {"images: deviation, least of a row": "lower"}),
    ],
)
def test_one_damaged_row_shows(make, damage, expected):
    batches = [make(seed) for seed in range(20)]
    batches[-1] = {name: x.copy() for name, x in make(5).items()}  # within the ranges before the damage
    assert beyond(batches, damage) == expected


def test_numbers_of_a_small_batch():
    batch = {
        "tokens": np.array([[1, 1, 2], [1, 1, 2]], np.int32),
        "images": np.array([[[0], [4]], [[2], [2]]], np.uint8),
        "loss_mask": np.array([[True, False, False], [True, True, False]]),
    }
    assert batch_statistics(batch) == {
        "tokens: distinct values, least of a row": 2,
        "tokens: distinct values, most of a row": 2,
        "tokens: repeated rows": 1,
        "images: mean": 2,
        "images: deviation, least of a row": 0,
        "images: deviation, most of a row": 2,
        "images: repeated rows": 0,
        "loss_mask: share that is true": 0.5,
    }
    assert len([*batch_lines([7], [batch_statistics(batch)], 16)]) == 9, "nothing to compare with"


def test_the_texts_shown_are_the_first_and_those_with_the_least_and_the_most_distinct_tokens():
    batch = {"tokens": np.tile(np.array([65, 66], np.int32), (9, 40))}
    batch["tokens"][6], batch["tokens"][8] = 67, np.arange(80) + 40
    lines = [*text_lines(batch, lambda ids: bytes(ids.astype(np.uint8)).decode())]
    assert [line.split(":")[0] for line in lines] == [f"  row {i}" for i in (0, 1, 2, 3, 6, 8)]
    assert lines[4].startswith("  row 6: 'CCC") and max(map(len, lines)) == 80
    assert [*text_lines({"images": np.zeros((2, 3))}, str)] == []
