"""The fidelity experiments train what their names say."""

import importlib
from types import ModuleType

import jax
import pytest
from ml_collections import ConfigDict

from configs.llama import tiny
from maxlp.run.experiment import resolve


@pytest.fixture
def fidelity() -> ModuleType:
    return importlib.import_module("fidelity")


@pytest.fixture
def scalify(fidelity) -> dict[str, ConfigDict]:
    """The configs of the experiment's variants."""
    changed = importlib.import_module("training").changed
    return {
        name: changed(tiny.get_config(), changes) for name, changes in fidelity.VARIANTS["scalify"].items()
    }


@pytest.mark.parametrize("name", ["scalify_fp16", "scalify_fp16_params", "scalify_fp8"])
def test_variants_of_scalify_are_the_arguments_of_their_names(scalify, name):
    assert scalify[name].to_dict() == tiny.get_config(f"precision={name}").to_dict()


def test_every_variant_of_scalify_is_a_run(scalify):
    runs = {name: resolve(config).settings for name, config in scalify.items()}
    both = runs["scalify_fp8, float16 parameters"]
    assert (both.model.param_dtype, both.precision.scalify) == ("float16", "fp8")
    for name, scale in {"float16 without scales": 1.0, "the same, gradients / 1024": 2.0**-10}.items():
        loss_scale = runs[name].precision.loss_scale
        assert loss_scale.initial == loss_scale.maximum == scale, "the scale never grows"


def test_smaller_gradients_are_those_of_a_smaller_loss(fidelity, scalify, monkeypatch):
    # Scale propagation would turn both factors into exponents.
    monkeypatch.setattr(fidelity, "scaled_gradients", lambda gradients: gradients)
    name = "scalify_fp16, gradients / 1024"
    run = fidelity.ADAPTED[name](resolve(scalify[name]))
    with jax.set_mesh(run.mesh):
        graphdef, state = run.abstract_state()
        program = str(jax.make_jaxpr(lambda *args: run.step(graphdef, *args))(state, run.abstract_batch()))
    small = f"{2.0**-10}:f32[]"
    assert f"mul 1.0:f32[] {small}" in program, "the loss's gradient"
    assert f"div 1.0:f32[] {small}" in program, "what undoes it"
