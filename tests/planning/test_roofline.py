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


def test_groups_are_of_all_their_axes_and_the_slowest_is_first():
    """Fewer bytes between hosts can take longer than more within them."""
    hosts, mesh = topologies.parse("h100:2x8"), {"data": 2, "fsdp": 4, "tensor": 2}
    of_axes = {("fsdp",): 6_000, ("fsdp", "tensor"): 3_000, ("data",): 2_000}
    found = [Collective("all-to-all", axes, 2, n, 1, overlapped=False) for axes, n in of_axes.items()]
    between, *within = roofline.group(found, hosts, mesh, dcn=2)
    assert (between.axes, between.sent) == (("data",), 1_000)
    assert between.seconds == pytest.approx(1_000 / hosts.chip.network)
    assert [(row.axes, row.sent) for row in within] == [(("fsdp",), 3_000), (("fsdp", "tensor"), 1_500)]


@pytest.mark.parametrize("dcn", [1, 2])
def test_only_replicas_on_several_slices_use_the_network(dcn):
    found = [Collective("all-reduce", ("data",), 2, 1_000, 1, overlapped=False)]
    slices = topologies.parse("v5e:4x4")
    [row] = roofline.group(found, slices, {"data": 2, "fsdp": 8, "tensor": 1}, dcn)
    assert (row.seconds == pytest.approx(1_000 / slices.chip.network)) == (dcn == 2)


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


def test_every_resource_can_be_the_slowest():
    """Exposed collectives are a part of the network's time: they count once if it is the slowest."""
    found = [
        Collective("all-reduce", ("tensor",), 2, int(9e9), 1, overlapped=False),
        Collective("all-gather", ("fsdp",), 4, int(6e9), 1, overlapped=True),
    ]
    groups, chip = roofline.group(found, H100, MESH), H100.chip
    network, exposed = 13.5e9 / 450e9, 9e9 / 450e9
    for limit, flops, hbm, host, expected in [
        ("network", 0.001, 0.001, 0.001, network),
        ("host", 0.01, 0.1, 0.5, 0.5 + exposed),
        ("memory", 0.01, 0.4, 0.1, 0.4 + exposed),
        ("compute", 0.3, 0.4, 0.5, 0.6 + exposed),  # two dtypes
    ]:
        of_dtypes = {"bfloat16": flops * 989e12, "float8": flops * 1979e12}
        work = Work(of_dtypes, hbm * chip.hbm, host * chip.host)
        bound = roofline.roofline(work, groups, H100)
        assert bound.limit == limit and bound.expected == pytest.approx(expected)
        assert bound.least == pytest.approx(max(2 * flops, hbm, host, network))


def test_what_is_not_published_or_not_sent_takes_no_time():
    """No bandwidth to the host's memory; no collective over one device."""
    v5e = topologies.parse("v5e:2x4")
    groups = roofline.group([Collective("all-gather", ("fsdp",), 1, 100, 1, overlapped=False)], v5e, MESH)
    bound = roofline.roofline(Work({}, 0.0, 1e12), groups, v5e)
    assert (bound.host, bound.network, bound.exposed) == (0, 0, 0)
