"""The end at a broken document, where another process may be the one that meets it."""

import numpy as np
import pytest

from maxlp.data.readers import BrokenExample
from maxlp.run.intact_batches import IntactBatches
from maxlp.runtime import distributed
from tests.fixtures import make_mesh


class Batches:
    """Batches numbered from 1 on, of which the one after `intact` cannot be made."""

    def __init__(self, intact: int, taken: int = 0):
        self.intact, self.taken = intact, taken

    def __iter__(self):
        return self

    def __next__(self):
        if self.taken == self.intact:
            raise BrokenExample(f"broken after {self.intact}")
        self.taken += 1
        return {"tokens": np.full((1, 1), self.taken, np.int32)}

    def get_state(self):
        return {"step": self.taken}


def steps(batches: IntactBatches):
    """The steps in turn, with the number in their batch."""
    for batch, state in batches.on_devices(make_mesh()):
        assert int(batch["tokens"][0, 0]) == state["step"]
        yield state["step"]


@pytest.fixture
def announced(monkeypatch):
    """What the processes have announced: a list that they share."""
    shared = []

    class Announcements:
        def __init__(self, topic):
            pass

        add, all = staticmethod(shared.append), staticmethod(lambda: shared)

    monkeypatch.setattr(distributed, "Announcements", Announcements)
    return shared


@pytest.mark.parametrize("when", [0, 2, 3])
def test_a_process_ends_after_the_last_batch_of_the_first_that_met_such_a_document(announced, when):
    """Whenever it hears of it, and although others have met one in a later batch."""
    batches = IntactBatches(Batches(intact=9))
    found = steps(batches)
    taken = [next(found) for _ in range(when)]
    announced += [[6, "in the seventh"], [3, "in the fourth"], [5, "in the sixth"]]
    assert [*taken, *found] == [1, 2, 3]
    assert batches.error == "in the fourth"


def test_what_one_process_meets_is_announced_before_the_batches_ahead_of_it_are_used(announced):
    batches = IntactBatches(Batches(intact=5))
    found = steps(batches)
    assert [next(found) for _ in range(2)] == [1, 2] and not announced
    assert next(found) == 3 and not announced
    assert next(found) == 4 and announced == [[5, "broken after 5"]]
    assert list(found) == [5] and batches.error == "broken after 5"


def test_no_batch_before_the_document_is_an_error(announced):
    """Of a run that resumes there as well: nothing is left to save."""
    for taken in (0, 4):
        announced.clear()
        with pytest.raises(ValueError, match=f"broken after {taken}"):
            list(steps(IntactBatches(Batches(intact=taken, taken=taken))))
