"""The lower bound of a step's time."""

import pytest

from maxlp.planning import roofline, topologies
from maxlp.planning.cost_model import Work
from maxlp.planning.hlo import Collective

H100 = topologies.parse("h100:1x8")
MESH = {"data": 1, "fsdp": 4, "tensor": 2}


def test_eight_bit_matmuls_take_half_the_time():
    def seconds(dtype):
        return roofline.roofline(Work({dtype: 1e15}, 0.0), [], H100).compute

    assert seconds("bfloat16") == pytest.approx(1e15 / 989e12)
    assert seconds("float8") == pytest.approx(seconds("bfloat16") / 2, rel=1e-3)  # 1979 TFLOP/s


def test_collectives_of_one_kind_and_axes_are_summed():
    found = [
        Collective("all-gather", ("fsdp",), 4, 400, 2, overlapped=True),
        Collective("all-gather", ("fsdp",), 4, 400, 1, overlapped=False),
        Collective("all-reduce", ("tensor",), 2, 10_000, 1, overlapped=False),
    ]
    slow, fast = roofline.group(found, H100, MESH)
    assert (slow.kind, slow.axes, slow.sent, slow.overlapped) == ("all-reduce", ("tensor",), 10_000, 0)
    assert (fast.times, fast.sent, fast.overlapped) == (3, 900, 600)
    assert fast.seconds == pytest.approx(900 / H100.chip.links)


def test_exposed_collectives_add_to_the_slowest_resource():
    found = [
        Collective("all-reduce", ("tensor",), 2, int(9e9), 1, overlapped=False),
        Collective("all-gather", ("fsdp",), 4, int(6e9), 1, overlapped=True),
    ]
    groups = roofline.group(found, H100, MESH)
    bound = roofline.roofline(Work({"bfloat16": 989e12 * 0.5}, H100.chip.hbm * 0.25), groups, H100)
    assert (bound.compute, bound.memory) == (pytest.approx(0.5), pytest.approx(0.25))
    assert bound.network == pytest.approx(13.5e9 / 450e9) and bound.exposed == pytest.approx(0.02)
    assert bound.least == pytest.approx(0.5) and bound.expected == pytest.approx(0.52)
    assert bound.limit == "compute"
