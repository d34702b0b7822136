"""The schedule of a pipeline: its length, its bubble, and when it applies."""

import jax
import pytest

from maxlp.parallel.schedule import PipelineConfig, Schedule
from tests.parallel.fixtures import make_mesh


def test_more_microbatches_and_rounds_make_the_bubble_smaller():
    assert PipelineConfig().schedule(4) == Schedule(stages=4, microbatches=4, rounds=1)
    assert PipelineConfig().schedule(4).bubble == 3 / 7
    longer = PipelineConfig(microbatches=8, rounds=2).schedule(4)
    assert longer.ticks == 19 and longer.bubble == 3 / 19


def test_a_schedule_applies_to_a_mesh_with_stages_and_a_batch_that_divides():
    config = PipelineConfig(microbatches=4, rounds=2)
    assert config.in_mesh(8) is None
    with jax.set_mesh(make_mesh(fsdp=2)):
        assert config.in_mesh(8) is None
    with jax.set_mesh(make_mesh(stage=2)):
        assert config.in_mesh(8) == Schedule(2, 4, 2)
        assert config.in_mesh(6) is None


@pytest.mark.parametrize("values", [dict(microbatches=0), dict(rounds=0), dict(rounds=-1)])
def test_an_invalid_size_is_named(values):
    [(key, value)] = values.items()
    with pytest.raises(ValueError, match=f"^{key}={value} must be at least 1"):
        PipelineConfig(**values)
