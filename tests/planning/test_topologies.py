"""Topologies by name: their devices, their published speeds, their errors."""

import importlib.util
import itertools
import math

import pytest

from maxlp.families.llama.presets import llama
from maxlp.planning import topologies
from maxlp.run.config import ConfigError
from tests.planning import peaks


def test_names_count_devices():
    sizes = {"v5p:8x16x16": 2048, "v5e:16x16*2": 512, "tpu7x:2x2x2": 16, "v4:2x2x4": 16, "h100:64x8": 512}
    assert {name: topologies.parse(name).size for name in sizes} == sizes
    assert topologies.parse("v5e:2x4").chip.memory == 15.75 * 2**30


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p", "is not CHIP:SHAPE"),
        ("v9:2x2", "chip 'v9' is unknown; one of v4, v5e"),
        ("v5e:4x4x4", "the shape of v5e must be 2 torus dimensions"),
        ("h100:8", "the shape of h100 must be HOSTSxGPUS"),
        ("v5e:64x64", "at most 256 chips"),
        ("v5e:0x4", "at least 1"),
        ("h100:1x99999999999", "at most 1,048,576"),
        ("v5e:16x16*4097", "has 1,048,832 devices; give at most 1,048,576"),
    ],
)
def test_invalid_names_are_explained(name, message):
    with pytest.raises(ValueError, match=message) as error:
        topologies.parse(name)
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "size", "accepted"),
    [
        ("h100:2x8", 2, True),  # hosts
        ("h100:1x8", 2, False),
        ("h100:2x8*2", 4, True),
        ("h100:2x8*2", 2, False),
        ("v5e:4x4*2", 2, True),  # slices
        ("v5e:4x4*2", 1, False),  # this axis alone spans them
        ("v5e:4x4", 2, False),  # the hosts of a slice do not count
        ("v5e:4x4*4", 2, False),
    ],
)
def test_dcn_data_has_the_size_of_the_machine(name, size, accepted):
    s = peaks.settings_of(llama(**peaks.LLAMA_SIZES), {"mesh.dcn_data": size})
    topology = topologies.parse(name)
    if accepted:
        assert topology.machine(s).axes["data"] == size
    else:
        with pytest.raises(ConfigError, match=f"config.mesh.dcn_data={size} must be [124 or]+ here: the"):
            topology.machine(s)


@pytest.mark.parametrize(
    ("name", "changes", "kernel"),
    [
        ("h100:1x8", {}, "flash"),
        ("h100:1x8", {"data.max_documents": 16}, "cudnn"),
        ("h100:1x8", {"data.max_documents": 17}, "flash"),
        ("a100:1x8", {"data.max_documents": 16}, "flash"),
        ("h100:1x8", {"data.max_documents": 16, "data.batch_size": 2**20}, "flash"),  # offsets are int32
        (
            "h100:1x8",
            {"data.max_documents": 16, "data.batch_size": 2**20, "train.microbatches": 1024},
            "cudnn",
        ),
        ("v5p:2x2x1", {"data.max_documents": 16}, "splash"),
    ],
)
def test_auto_is_chosen_for_the_devices_of_the_topology(name, changes, kernel):
    s = peaks.settings_of(llama(**peaks.LLAMA_SIZES), changes)
    assert s.on(topologies.parse(name).machine(s)).model.attention == kernel


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for name, package in (("v5e:2x2", "libtpu"), ("h100:1x8", "jax-cuda13-plugin")):
        with pytest.raises(
            ValueError, match=rf"{package}, which is not installed: pip install 'maxlp\[aot\]'"
        ):
            topologies.devices(topologies.parse(name))


def test_peaks_are_the_published_ones():
    assert topologies.CHIPS["v5p"].peak() == 459e12
    assert topologies.CHIPS["h100"].peak("float8") == 1979e12
    assert topologies.CHIPS["v7x"].peak() == 2307e12 / 2


def test_bandwidth_of_mesh_axes():
    h100 = topologies.parse("h100:8x8")
    mesh = {"data": 1, "fsdp": 8, "tensor": 8}
    assert topologies.axis_bandwidth(h100, mesh, ("tensor",)) == 450e9  # inside a host
    assert topologies.axis_bandwidth(h100, mesh, ("fsdp",)) == 50e9  # one adapter each, across hosts
    whole = {"data": 1, "fsdp": 64, "tensor": 1}
    assert topologies.axis_bandwidth(h100, whole, ("fsdp",)) == 400e9  # all eight adapters of a host
    both = {"data": 1, "fsdp": 32, "context": 2, "tensor": 1}
    assert topologies.axis_bandwidth(h100, both, ("fsdp", "context")) == 400e9
    assert topologies.axis_bandwidth(h100, both, ("fsdp",)) == 200e9  # every other adapter
    six = {"data": 1, "fsdp": 8, "tensor": 6}  # of which some groups leave their host
    assert topologies.axis_bandwidth(topologies.parse("h100:6x8"), six, ("tensor",)) == 100e9
    # The data axis of a hybrid mesh is outside of the stages, although it comes after them.
    stages = {"stage": 4, "data": 4, "fsdp": 1, "tensor": 1}
    two_hosts = topologies.parse("h100:2x8")
    assert topologies.axis_bandwidth(two_hosts, stages, ("stage",), dcn=2) == 450e9
    assert topologies.axis_bandwidth(two_hosts, stages, ("data",), dcn=2) == 100e9

    v5p = topologies.parse("v5p:8x8x8")
    assert topologies.axis_bandwidth(v5p, {"data": 1, "fsdp": 512, "tensor": 1}, ("fsdp",)) == 600e9
    two = {"data": 1, "fsdp": 64, "tensor": 8}
    assert topologies.axis_bandwidth(v5p, two, ("tensor",)) == pytest.approx(
        200e9
    )  # one dimension of three
    assert topologies.axis_bandwidth(v5p, two, ("fsdp",)) == pytest.approx(400e9)
    small = topologies.parse("v5e:4x4")  # its dimensions do not close to rings
    assert topologies.axis_bandwidth(small, {"data": 1, "fsdp": 16, "tensor": 1}, ("fsdp",)) == 100e9
    slices = topologies.parse("v5e:16x16*2")
    hybrid = {"data": 2, "fsdp": 256, "tensor": 1}
    assert topologies.axis_bandwidth(slices, hybrid, ("data",), dcn=2) == 3.125e9
    assert math.isinf(topologies.axis_bandwidth(slices, hybrid, ("tensor",)))


def test_the_dimensions_of_a_torus_do_not_depend_on_what_its_axes_are_called():
    """Nor on axes of size 1; ``data`` is between slices only if there are several."""
    v5p, names = topologies.parse("v5p:8x8x8"), ("data", "fsdp", "context", "tensor")
    for outer, inner in itertools.combinations(names, 2):
        mesh = dict.fromkeys(names, 1) | {outer: 64, inner: 8}
        assert topologies.axis_bandwidth(v5p, mesh, (outer,)) == pytest.approx(400e9), mesh
        assert topologies.axis_bandwidth(v5p, mesh, (inner,)) == pytest.approx(200e9), mesh


def test_axes_share_the_dimensions_of_a_torus():
    """16 chips in a row close to a ring; four do not, and have half of the links."""
    v5e, mesh = topologies.parse("v5e:16x4"), {"data": 1, "fsdp": 16, "tensor": 4}
    for axes, links in ((("fsdp",), 100e9), (("tensor",), 50e9), (("fsdp", "tensor"), 150e9)):
        assert topologies.axis_bandwidth(v5e, mesh, axes) == pytest.approx(links), axes
    one_chip = topologies.parse("v7x:1x1x1")  # of two devices
    assert topologies.axis_bandwidth(one_chip, {"fsdp": 2}, ("fsdp",)) == 300e9


def test_what_no_ring_sends_between_hosts_is_sent_by_each_gpu():
    """A ring leaves a host once for its eight devices; here each has an adapter for its own bytes."""
    h100, mesh = topologies.parse("h100:2x8"), {"data": 1, "fsdp": 16, "tensor": 1}
    ring, permute, all_to_all = (
        topologies.axis_bandwidth(h100, mesh, ("fsdp",), kind=kind)
        for kind in ("reduce-scatter", "collective-permute", "all-to-all")
    )
    assert (ring, permute) == (400e9, 50e9)
    assert all_to_all == pytest.approx(50e9 * 15 / 8)  # 8 of the 15 parts that it sends leave the host
    assert topologies.axis_bandwidth(h100, {"fsdp": 2, "tensor": 8}, ("fsdp",), kind="all-to-all") == 50e9


def test_a_program_gets_most_of_a_gpus_memory():
    chip = topologies.parse("h100:1x1").chip
    assert chip.memory == pytest.approx(0.95 * topologies.GPUS["h100"].memory)
