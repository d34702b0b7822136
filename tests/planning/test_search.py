"""The search for the fastest settings that fit, against every combination."""

import dataclasses
import importlib
import itertools

import pytest

from maxlp.families.llama.presets import llama
from maxlp.planning import search, topologies
from maxlp.planning.cost_model import cost_of, state_shapes
from maxlp.planning.roofline import group, roofline
from maxlp.run import constraints
from maxlp.run.presets import choose
from maxlp.run.settings import LocalConfig, Machine, Settings, read
from tests.planning import peaks
from tests.planning.peaks import estimated_peak


def small(**changes) -> Settings:
    """A Llama whose memory depends on every choice: 16 rows of 2,048."""
    values = {"data.seq_len": 2048, "data.batch_size": 16, "loss.num_chunks": 2, "spikes.statistics": False}
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return peaks.settings_of(llama(**peaks.LLAMA_SIZES), values)


def preset(path: str, arg: str = "") -> Settings:
    c = importlib.import_module(f"configs.{path}").get_config(arg)
    return peaks.settings_of(c, {})


def with_memory(name: str, gib: float) -> topologies.Topology:
    """A topology whose chips have another memory."""
    topology = topologies.parse(name)
    return dataclasses.replace(
        topology, chip=dataclasses.replace(topology.chip, memory=gib * topologies.GIB / search.MARGIN)
    )


def layouts_of(s: Settings, topology: topologies.Topology) -> list[search.Candidate]:
    """The layouts of `search.find`, without its search of other numerics."""
    return search._Search(s, topology).fastest(search.Variant(), search.COUNT)


def evaluated(s: Settings, topology: topologies.Topology, state) -> tuple[float, float] | None:
    """(peak, seconds) of settings, computed without the search; None if they cannot run."""
    try:
        machine = topology.machine(s)
        constraints.check(s, machine)
        cost = cost_of(s)
        peak = sum(cost.memory(s, machine, state).values())
    except ValueError:
        return None
    groups = group(cost.collectives(s, machine), topology, machine.axes)
    return peak, roofline(cost.work(s, machine, state), groups, topology).expected


def every_layout(s: Settings, topology: topologies.Topology) -> list[tuple[float, float]]:
    """(peak, seconds) of every combination that the search covers."""
    state = state_shapes(s, Machine(dict(stage=1, data=1, fsdp=1, context=1, tensor=1), "cuda", ""))
    sizes = [n for n in (1, 2, 4, 8) if n <= topology.size]
    found = []
    for data, context, tensor, remat, attention, released in itertools.product(
        *(sizes, sizes, sizes), search.REMATS, ("auto", "ring"), (False, True)
    ):
        mesh = dict(stage=1, data=data, fsdp=-1, context=context, tensor=tensor, dcn_data=1)
        changes = {"model.remat": remat, "model.attention": attention, "train.release_gradients": released}
        cell = search.changed(dataclasses.replace(s, mesh=mesh), changes)
        for n, chunks in itertools.product((1, 2, 4, 8, 16), (2**i for i in range(12))):
            one = search.changed(cell, {"train.microbatches": n, "loss.num_chunks": chunks})
            found.append(evaluated(one, topology, state))
    return [one for one in found if one is not None]


@pytest.mark.parametrize(
    ("devices", "clip_norm"),
    [
        pytest.param(2, 0.0, marks=pytest.mark.full),  # without clipping, gradients can be released
        pytest.param(2, 1.0, marks=pytest.mark.slow),
        pytest.param(1, 0.0, marks=pytest.mark.slow),
        pytest.param(1, 1.0, marks=pytest.mark.slow),
    ],
)
def test_the_fastest_of_all_combinations_is_found(devices, clip_norm):
    """For chips of any memory; where nothing fits, the smallest is found."""
    s = small(optimizer__clip_norm=clip_norm)
    everything = every_layout(s, topologies.parse(f"h100:1x{devices}"))
    least = min(peak for peak, _ in everything) / topologies.GIB
    for gib in (least * 0.99, least * 1.01, least * 1.3, least * 2, 70.0):
        topology = with_memory(f"h100:1x{devices}", gib)
        layouts = layouts_of(s, topology)
        fitting = [one for one in everything if one[0] <= gib * topologies.GIB]
        if not fitting:
            assert not layouts
            continue
        assert layouts[0].seconds == pytest.approx(min(seconds for _, seconds in fitting))
        for one in layouts:
            new = search.changed(s, one.changes)
            constraints.check(new, topology.machine(new))
            assert (
                estimated_peak(new, topology) == pytest.approx(one.peak)
                and one.peak <= gib * topologies.GIB
            )


@pytest.mark.parametrize(("name", "topology"), [("llama.8b", "h100:1x8"), ("clip.b32", "v5e:2x4")])
def test_more_microbatches_and_parts_never_take_less_time_nor_from_two_on_more_memory(name, topology):
    """The search relies on this: for every mesh and remat, with and without chunks."""
    s, topology = preset(name), topologies.parse(topology)
    one = Machine(
        dict(stage=1, data=1, fsdp=1, context=1, tensor=1), topology.chip.platform, topology.chip.kind
    )
    state = state_shapes(s, one)
    checked = 0
    for mesh, remat in itertools.product(search.meshes(s, topology), search.REMATS):
        cell = search.changed(dataclasses.replace(s, mesh=mesh), {"model.remat": remat})
        runs = [search.changed(cell, {"train.microbatches": 2**i}) for i in range(0, 12, 2)]
        found = [one for run in runs if (one := evaluated(run, topology, state))]
        assert all(a[1] <= b[1] * (1 + 1e-9) for a, b in itertools.pairwise(found))
        assert all(a[0] >= b[0] for a, b in itertools.pairwise(found[1:]))
        checked += len(found)
        if s.family.loss_parts is None or not found:
            continue
        key, values = s.family.loss_parts(s.data, topology.machine(cell).axes)
        found = [evaluated(search.changed(cell, {key: value}), topology, state) for value in values]
        (seconds,) = {one[1] for one in found if one}
        peaks_ = [one[0] for one in found[1:] if one]
        assert seconds and all(a >= b for a, b in itertools.pairwise(peaks_))
    assert checked > 50


TABLE = [  # preset, topology, layout fits, changes of the numerics that are needed
    ("llama.debug", "rtx4090:1x1", True, set()),
    ("llama.350m", "rtx4090:1x1", True, set()),
    ("llama.1b", "rtx4090:1x1", False, {"low_bit=8bit"}),
    ("llama.8b", "h100:1x8", True, set()),
    ("llama.8b", "v5p:2x4x4", True, set()),
    ("llama.8b", "h100:1x1", False, {"precision=pure_bf16", "low_bit=8bit"}),
    ("llama.8b", "rtx4090:1x1", False, None),  # nothing fits
    ("llama.70b", "h100:1x4", False, {"precision=pure_bf16", "galore=1024"}),
    ("llama.405b", "h100:1x8", False, None),
    ("clip.b32", "rtx4090:1x1", True, set()),
    ("clip.h14", "v5e:2x4", True, set()),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "topology", "fits", "needs"), TABLE, ids=[f"{row[0]}-{row[1]}" for row in TABLE]
)
def test_presets_on_machines(name, topology, fits, needs):
    s, topology = preset(name), topologies.parse(topology)
    found = search.find(s, topology)
    assert bool(found.layouts) == fits
    limit = search.MARGIN * topology.chip.memory
    if needs is None:
        assert not found.numerics and found.smallest is not None and found.smallest.peak > limit
        return
    if not fits:
        assert any(needs <= set(one.numerics) for one in found.numerics)
    for one in (*found.layouts, *found.numerics):
        new = search.changed(s, one.changes)
        constraints.check(new, topology.machine(new))
        assert one.peak <= limit and estimated_peak(new, topology) == pytest.approx(one.peak)
        assert one.numerics or not one.changes.keys() & {"data.batch_size", "optimizer.clip_norm"}


def test_8b_on_one_h100_fits_in_pure_bfloat16_with_8_bit_moments_and_a_batch_in_one_pass():
    """Sums of microbatches are float32, and updates too: 99 GiB compiled. A few rows in one pass fit."""
    s, topology = preset("llama.8b", "precision=pure_bf16,low_bit=8bit"), topologies.parse("h100:1x1")
    found = search.find(s, topology)
    assert not found.layouts
    one = next(one for one in found.numerics if len(one.numerics) == 1)
    assert one.numerics == (f"batch_size={one.changes['data.batch_size']}",)
    assert one.changes.keys() <= {"data.batch_size", "model.remat"} and one.changes["data.batch_size"] >= 4
    assert estimated_peak(search.changed(s, {"train.microbatches": 512}), topology) > topology.chip.memory


def test_layouts_do_not_change_the_numerics():
    layout = {
        "model.remat",
        "model.attention",
        "train.microbatches",
        "train.release_gradients",
        "loss.num_chunks",
    }
    found = layouts_of(small(), with_memory("h100:1x2", 2.0))
    assert found and all(key in layout or key.startswith("mesh.") for one in found for key in one.changes)


def test_the_least_busy_of_equally_fast_layouts_is_first():
    """Traffic with the host counts like that with the chip's memory and with other chips."""
    topology = topologies.parse("h100:1x2")
    s = small(optimizer__offload=True, optimizer__clip_norm=0.0, train__release_gradients=True)
    state = state_shapes(s, Machine(dict(stage=1, data=1, fsdp=1, context=1, tensor=1), "cuda", ""))
    found = layouts_of(s, topology)
    assert len(found) == search.COUNT and found == sorted(found, key=lambda one: one.order)
    for one in found:
        new = search.changed(s, one.changes)
        machine, cost = topology.machine(new), cost_of(new)
        groups = group(cost.collectives(new, machine), topology, machine.axes)
        time = roofline(cost.work(new, machine, state), groups, topology)
        assert time.host > 0.01 * one.busy
        assert one.busy == pytest.approx(time.compute + time.memory + time.network + time.host)
    first, second = found[:2]
    busier = dataclasses.replace(first, busy=2 * first.busy, changes={}, peak=0.0)
    assert first.order < busier.order < dataclasses.replace(busier, rate=first.rate / 2).order
    assert second.order[0] >= first.order[0]


def test_layouts_keep_the_replicas_that_train_alone():
    """More or fewer of them would be another algorithm."""
    local = {"train.local": LocalConfig(steps=5), "train.total_steps": 10}
    topology = topologies.parse("h100:4x2")
    for mesh in ({"mesh.dcn_data": 4}, {"mesh.data": -1, "mesh.fsdp": 2}, {"mesh.data": 4}):
        s = search.changed(small(), local | mesh)
        found = list(search.meshes(s, topology))
        assert {one["data"] * one["dcn_data"] for one in found} == {4}
        assert len(found) == 3  # the two devices of a replica on fsdp, context or tensor


@pytest.mark.parametrize("own", [{}, {"mesh.dcn_data": 2}, {"mesh.tensor": -1, "mesh.fsdp": 2}], ids=str)
def test_every_mesh_is_covered_once(own):
    """Four devices on four axes, of two hosts, which ``mesh.dcn_data`` and ``mesh.data`` split alike."""
    s, topology = search.changed(small(), own), topologies.parse("h100:2x2")
    axes = [topology.machine(dataclasses.replace(s, mesh=one)).axes for one in search.meshes(s, topology)]
    assert len(axes) == len({tuple(one.values()) for one in axes}) == 10


def test_free_stages_are_those_of_the_topology():
    s = search.changed(small(), {"mesh.stage": -1, "mesh.fsdp": 2})
    assert {one["stage"] for one in search.meshes(s, topologies.parse("h100:1x4"))} == {2}


@pytest.mark.parametrize("stage", [0, 3, 8])
def test_stages_that_do_not_divide_the_devices_have_no_mesh(stage):
    s = search.changed(small(), {"mesh.stage": stage})
    assert not list(search.meshes(s, topologies.parse("h100:1x4")))


def test_first_moments_are_offered_in_bfloat16_unless_the_parameters_are():
    variants = [one.changes for one in search.smaller_numerics(small())]
    assert {"optimizer.mu_dtype": "bfloat16"} in variants
    assert not any({"optimizer.mu_dtype", "model.param_dtype"} <= changes.keys() for changes in variants)


def test_if_no_mesh_is_possible_nothing_is_traced(monkeypatch):
    """On 25 devices, of which none share 7 rows or the 4 heads of a layer."""
    monkeypatch.setattr(search, "state_shapes", lambda *_: pytest.fail("traces a state in vain"))
    found = search.find(small(data__batch_size=7, mesh__fsdp=-1), topologies.parse("h100:5x5"))
    assert (found.combinations, found.layouts, found.numerics, found.smallest) == (0, [], [], None)


def test_adascale_keeps_its_microbatches():
    changes = {"optimizer.name": "sgd", "optimizer.adascale": 2.0, "train.microbatches": 2}
    s = peaks.settings_of(llama(**peaks.LLAMA_SIZES), changes)
    found = layouts_of(s, topologies.parse("h100:1x2"))
    assert found and not any("train.microbatches" in one.changes for one in found)


def test_names_are_those_of_the_configs():
    """``precision=pure_bf16,low_bit=8bit,galore=…`` in a config's argument gives the same settings."""
    s = small()
    found = search.smaller_numerics(s)
    names = ("precision=pure_bf16", "low_bit=8bit", f"galore={search.galore_rank(s)}")
    variant = next(one for one in found if one.names == names)
    c = choose(",".join(names), llama(**peaks.LLAMA_SIZES))
    expected = peaks.settings_of(
        c, {"data.seq_len": 2048, "data.batch_size": 16, "loss.num_chunks": 2, "spikes.statistics": False}
    )
    new = search.changed(s, variant.changes)
    assert (new.model, new.optimizer) == (expected.model, expected.optimizer)


def test_changes_replace_values_by_key_and_are_flags():
    s = small()
    changes = {"model.remat": "dots", "mesh.tensor": 2, "optimizer.galore": {"rank": 8}}
    new = search.changed(s, changes)
    assert (new.model.remat, new.mesh["tensor"], new.optimizer.galore.rank) == ("dots", 2, 8)
    assert (s.model.remat, s.mesh["tensor"]) == ("block", 1)
    assert search.flags(changes) == [
        "--config.model.remat=dots",
        "--config.mesh.tensor=2",
        "--config.optimizer.galore.rank=8",
    ]


@pytest.mark.full
def test_flags_of_a_result_give_its_settings():
    """For a config whose own mesh the machine cannot have."""
    c = importlib.import_module("configs.llama.70b").get_config()
    with c.unlocked():
        c.data.source = c.data.tokenizer = "unread"
    topology = topologies.parse("v5p:2x2x1")
    s = read(c)
    found = search.find(s, topology)
    one = (found.layouts or found.numerics)[0]
    for flag in search.flags(one.changes):  # as the command line sets them
        key, value = flag.removeprefix("--config.").split("=")
        *path, name = key.split(".")
        section = c
        for part in path:
            section = section[part]
        old = section.get_type(name)
        section[name] = value == "True" if old is bool else old(value)
    new = read(c)
    assert (
        new.on(topology.machine(new)).model
        == search.changed(s, one.changes).on(topology.machine(new)).model
    )
    assert (new.optimizer, new.data, new.train) == (
        *(getattr(search.changed(s, one.changes), key) for key in ("optimizer", "data", "train")),
    )
    assert topology.machine(new).axes == one.layout["mesh"]


@pytest.mark.parametrize("changes", [peaks.SOAP, peaks.BITS_8], ids=["SOAP", "8 bits"])
def test_state_that_a_mesh_splits_differently_is_that_of_the_mesh(changes):
    """The devices share the layers of SOAP; scales of blocks are split as far as there are blocks."""
    topology = topologies.parse("h100:1x8")
    s = peaks.settings_of(llama(**peaks.LLAMA_SIZES), {"data.batch_size": 8} | changes)
    layouts = layouts_of(s, topology)
    assert {"fsdp": 8}.items() <= layouts[0].layout["mesh"].items()
    for one in layouts:
        assert estimated_peak(search.changed(s, one.changes), topology) == pytest.approx(one.peak)
