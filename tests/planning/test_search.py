"""The search for the nearest settings that fit."""

import pytest

from maxlp.families.llama.presets import llama
from maxlp.planning import search, topologies
from tests.planning import peaks
from tests.planning.peaks import estimated_peak


def llama_8b(**changes):
    sizes = dict(embed_dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14336)
    values = {"data.seq_len": 131072, "data.batch_size": 16, "loss.num_chunks": 16}
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return peaks.settings_of(llama(max_seq_len=131072, **sizes), values)


def test_changes_replace_values_by_key():
    s = llama_8b()
    new = search.changed(s, {"model.remat": "dots", "mesh.tensor": 2})
    assert (new.model.remat, new.mesh["tensor"]) == ("dots", 2)
    assert (s.model.remat, s.mesh["tensor"]) == ("block", 1)


def test_search_finds_the_nearest_that_fits():
    """A run that keeps every activation of 16 rows a device fits if it recomputes them: one change."""
    changes = {"model.remat": "none", "model.attention": "splash", "data.batch_size": 128}
    s = peaks.settings_of(llama(**peaks.LLAMA_SIZES), peaks.LLAMA_RUN | changes)
    topology = topologies.parse("v5e:2x4")
    assert estimated_peak(s, topology) > topology.chip.memory
    found = search.nearest(s, topology)
    assert all(one.peak <= topology.chip.memory for one in found)
    assert len(found[0].changes) == 1
    assert estimated_peak(search.changed(s, found[0].changes), topology) == pytest.approx(found[0].peak)


@pytest.mark.parametrize("attention", ["ring", "cudnn"])
def test_a_long_sequence_is_split_over_context(attention):
    """Two rows of 131,072 for each GPU do not fit; split over devices they do, with ring attention."""
    s, topology = llama_8b(model__attention=attention), topologies.parse("h100:1x8")
    assert estimated_peak(s, topology) > topology.chip.memory
    found = search.nearest(s, topology)
    split = next(one for one in found if one.changes.get("mesh.context", 1) > 1)
    new = search.changed(s, split.changes)
    assert new.model.attention == "ring"
    axes = topology.machine(new).axes
    assert axes["context"] > 1 and axes["fsdp"] * axes["context"] * axes["tensor"] == 8
    assert estimated_peak(new, topology) <= topology.chip.memory


def test_no_proposal_contains_another_one():
    """Where one change is enough, none is added."""
    s = llama_8b(model__attention="xla", data__batch_size=8)
    found = search.nearest(s, topologies.parse("h200:1x8"))
    assert found[0].changes == {"model.attention": "cudnn"}  # faster than the ring, which fits too
    assert not any(a.settings < b.settings for a in found for b in found)
    order = [(len(one.settings), one.seconds) for one in found]
    assert order == sorted(order)


def test_choices_are_those_of_the_model_and_the_platform():
    """No context for CLIP, no kernel of another platform, and only keys that exist."""
    s = llama_8b()
    choices = search._choices(s, "cuda")
    assert choices["model.attention"] == ("cudnn", "ring") and "mesh.context" in choices
    assert all(search._value(s, key) is not None or key == "optimizer.mu_dtype" for key in choices)
    clip = search._choices(peaks.recorded("CLIP b32", "tpu"), "tpu")
    assert "mesh.context" not in clip and clip["model.attention"] == ("splash",)
    assert clip["loss.method"] == ("tiled",)
