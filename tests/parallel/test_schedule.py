"""The schedule of a pipeline: its length and its bubble."""

import pytest

from maxlp.parallel.schedule import PipelineConfig, Schedule


def test_more_microbatches_and_rounds_make_the_bubble_smaller():
    assert PipelineConfig().schedule(4) == Schedule(stages=4, microbatches=4, rounds=1)
    assert PipelineConfig().schedule(4).bubble == 3 / 7
    longer = PipelineConfig(microbatches=8, rounds=2).schedule(4)
    assert longer.ticks == 19 and longer.bubble == 3 / 19


@pytest.mark.parametrize("values", [dict(microbatches=0), dict(rounds=0), dict(rounds=-1)])
def test_an_invalid_size_is_named(values):
    [(key, value)] = values.items()
    with pytest.raises(ValueError, match=f"^{key}={value} must be at least 1"):
        PipelineConfig(**values)
