"""The fidelity experiments train what their names say."""

import importlib
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from configs.llama import tiny
from maxlp.run.experiment import resolve

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scalify(monkeypatch) -> dict[str, ConfigDict]:
    """The configs of the experiment's variants."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # whose files import each other
    fidelity, training = (importlib.import_module(name) for name in ("fidelity", "training"))
    variants = fidelity.VARIANTS["scalify"]
    return {name: training.changed(tiny.get_config(), changes) for name, changes in variants.items()}


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
