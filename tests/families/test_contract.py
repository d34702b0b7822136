"""The contract of every family, on its debug config and on the presets that its weight formats can hold."""

import dataclasses
import fnmatch
import itertools
import json
import math

import jax
import numpy as np
import pytest
from flax.nnx.traversals import flatten_mapping

from maxlp.families import FAMILIES, weights
from maxlp.parallel import sharding
from maxlp.planning import compiled
from maxlp.planning.cost_model import cost_of, state_shapes
from maxlp.run import constraints
from maxlp.run.config import load_file, presets
from maxlp.run.experiment import assemble
from maxlp.run.pretrained import check_written
from maxlp.run.settings import Settings, read
from tests.planning import hlo_flops
from tests.run.fixtures import changed

FORMATS = [(family, name) for family in FAMILIES for name in weights.formats(family)]


def settings(preset: str, **changes) -> Settings:
    """A preset with two layers and 512 tokens, whose tokenizer needs no file."""
    c = load_file(preset)
    sizes = {"num_layers": 2, "vocab_size": 512}
    keys = {key: sizes.get(key.rpartition(".")[2]) for key in flatten_mapping(c.to_dict(), sep=".")}
    small = {key: size for key, size in keys.items() if size is not None}
    small |= {"data.source": c.data.source or "unread", "data.tokenizer": "bytes"}
    return read(changed(c, small | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_debug_config_is_accepted_and_has_a_closed_form(family):
    s = settings(f"{family}/debug")
    assert s.family.name == family
    for machine in (s.machine(1, "cpu"), s.machine(1, "cuda"), s.machine(1, "tpu")):
        constraints.check(s, machine)
        state, cost = state_shapes(s, machine), cost_of(s)
        found = [*cost.memory(s, machine, state).values(), *cost.work(s, machine, state).flops.values()]
        assert all(math.isfinite(value) and value >= 0 for value in found)
        assert cost.collectives(s, machine) == [], "there is one device"


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_the_closed_form_counts_the_matmuls_of_the_compiled_step(family, tmp_path):
    s = settings(f"{family}/debug", **{"model.scan_layers": True, "data.batch_size": 8})
    machine, mesh = s.machine(1, "cpu"), sharding.make_mesh(devices=jax.devices()[:1])
    compiled.compile_step(assemble(s, machine, mesh), str(tmp_path / "step.txt"))
    counted = hlo_flops.matmul_flops((tmp_path / "step.txt").read_text())
    flops = sum(cost_of(s).work(s, machine, state_shapes(s, machine)).flops.values())
    # Of steps as small as these, it leaves out 0.2 %.
    assert flops == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_have_the_shapes_that_it_declares(family):
    s = settings(f"{family}/debug", **{"data.batch_size": 2})
    batches = s.family.make_data(s.model, s.data, split="train", seed=0, process_index=0, process_count=1)
    batch = next(iter(batches))
    found = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in batch.items()}
    assert found == s.family.batch_shapes(s.data)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_keys_and_the_matmuls_that_it_names_exist(family):
    s = settings(f"{family}/debug")
    config, found = flatten_mapping(load_file(f"{family}/debug").to_dict(), sep="."), s.family
    named = {*found.initial_keys, *found.training_keys, *found.free_keys, *found.search_choices}
    named |= {f"loss.{key}" for key in found.plain_loss}
    if found.loss_parts is not None:
        named.add(found.loss_parts(s.data, s.machine(1, "cpu").axes)[0])
    missing = [name for name in named if not any(f"{key}.".startswith(f"{name}.") for key in config)]
    assert not missing
    assert found.vocabulary(s.model)[0] in config
    for pattern in found.gated_products:
        assert fnmatch.filter(s.matmuls, pattern), pattern


def settings_for(family: str, weight_format: weights.WeightFormat) -> Settings:
    """The debug config, or the first preset of the family that the format can hold."""
    for preset in (f"{family}/debug", *presets()):
        if preset.startswith(f"{family}/"):
            s = settings(preset)
            try:
                weight_format.layout(s.model)
                weight_format.config_files(s.model, lambda: None)
            except ValueError:
                continue
            return s
    raise AssertionError("the format refuses every preset")


@pytest.mark.parametrize(("family", "name"), FORMATS)
def test_each_parameter_has_its_own_place_in_a_format(family, name):
    weight_format = weights.formats(family)[name]
    s = settings_for(family, weight_format)
    layout, shapes = weight_format.layout(s.model), state_shapes(s, s.machine(1, "cpu")).tree["params"]
    numbers = itertools.count()
    params = jax.tree.map(lambda x: np.broadcast_to(np.float32(next(numbers)), x.shape), shapes)
    back = weights.to_maxlp(weights.to_other(params, layout), params, layout)
    jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.parametrize(("family", "name"), FORMATS)
def test_the_files_of_a_format_describe_the_model(family, name, tmp_path):
    weight_format = weights.formats(family)[name]
    model = settings_for(family, weight_format).model
    files = weight_format.config_files(model, lambda: None)
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    found, detected = weights.find_format(tmp_path)
    assert (found.name, detected) == (family, weight_format)
    check_written(found, dataclasses.replace(model, dtype=model.param_dtype), detected, tmp_path)
