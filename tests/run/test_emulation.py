"""What a description warns about: formats that a chip lacks."""

import dataclasses
import re

import jax
import pytest

from maxlp.planning import topologies
from maxlp.planning.cost_model import matmul_dtypes
from maxlp.precision import RECIPES
from maxlp.run import emulation
from maxlp.run.experiment import describe, resolve
from maxlp.run.settings import read
from tests.run.fixtures import changed, load

# recipe -> the chips that multiply its formats in every quantized matmul
FP8 = {"h100", "h200", "b200", "l4", "rtx4090", "rtx5090", "rtx6000ada", "v7x"}
INT8 = topologies.CHIPS.keys() - {"v7x"}
MULTIPLY = {
    "fp8_current": FP8,
    "fp8_delayed": FP8,
    "mxfp8": {"b200", "rtx5090"},
    "nvfp4": {"b200", "rtx5090"},
    "int8_switchback": INT8,
    "quest": INT8,
    "fp8_blocks": set(),
    "simulate": set(),
    "bf16": topologies.CHIPS.keys(),
    "wta_crs": topologies.CHIPS.keys(),
}


def settings(recipe: str, **values):
    sizes = {"model.embed_dim": 256, "model.head_dim": 128}  # which blocks of 128 divide
    return read(changed(load("debug"), sizes | {"precision.recipe": recipe} | values))


@pytest.mark.parametrize("chip", topologies.CHIPS)
@pytest.mark.parametrize("recipe", MULTIPLY)
def test_a_recipe_whose_formats_a_chip_lacks_is_one_line(recipe, chip):
    kind = topologies.CHIPS[chip].kind
    found = emulation.warnings(settings(recipe), kind)
    assert len(found) == (chip not in MULTIPLY[recipe])
    for line in found:
        assert line.startswith(f"{kind} does not multiply the formats of {recipe} (") and "\n" not in line


@pytest.mark.parametrize("chip", ["a100", "v5e", "h100", "b200", "v7x"])
@pytest.mark.parametrize("recipe", [name for name in RECIPES if RECIPES[name].gemms])
def test_the_planner_counts_what_is_named_at_the_rate_of_bfloat16_and_nothing_else(recipe, chip):
    s, chip = settings(recipe), topologies.CHIPS[chip]
    rates = {gemm: chip.peak(name) for gemm, name in matmul_dtypes(s, "layers/mlp/up_proj").items()}
    slow = [gemm for gemm in s.recipe("layers/mlp/up_proj").gemms if rates[gemm] == chip.peak()]
    named = re.findall(r"\((.*)\)", *emulation.warnings(s, chip.kind) or [""])
    assert named == ([", ".join(slow)] if slow else [])


def test_blocks_are_emulated_where_replicas_are_apart():
    for recipe, gemms in (("mxfp8", "fwd, dlhs, drhs"), ("fp8_current", None)):
        s, chip = (
            settings(recipe, **{"mesh.data": 2, "precision.exchange": "int8"}),
            topologies.CHIPS["b200"],
        )
        found = emulation.warnings(s, chip.kind)
        assert [f"of {recipe} ({gemms})" in line for line in found] == ([True] if gemms else [])
        rates = set(matmul_dtypes(s, "layers/mlp/up_proj").values())
        assert rates == ({"bfloat16"} if gemms else {"float8"})


def test_every_recipe_of_the_rules_is_named_once():
    rules = (("*/q_proj", "fp8_rowwise_with_gw_hp"), ("*/k_proj", "int8_switchback"))
    [line] = emulation.warnings(settings("nvfp4", **{"precision.rules": rules}), "TPU v5 lite")
    assert "the formats of nvfp4 (fwd, dlhs, drhs) and fp8_rowwise_with_gw_hp (fwd, dlhs): the" in line


def test_blocks_without_an_instruction_and_options_of_a_recipe_count():
    assert emulation.warnings(settings("mxfp8", **{"precision.options.block_size": 64}), "NVIDIA B200")
    assert emulation.warnings(
        settings("fp8_current", **{"precision.options.format": "e3m4"}), "NVIDIA H200"
    )
    assert not emulation.warnings(
        settings("simulate", **{"precision.options.format": "int8"}), "NVIDIA A100"
    )


def test_fp8_of_scale_propagation_counts():
    s = read(load("debug", "precision=scalify_fp8"))
    assert "scalify_fp8 (fwd, dlhs, drhs)" in emulation.warnings(s, "TPU v5 lite")[0]
    assert not emulation.warnings(s, "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize("kind", ["cpu", "a chip that nobody knows"])
def test_where_no_rate_is_published_nothing_is_said(kind):
    assert emulation.warnings(settings("nvfp4"), kind) == []


def test_the_description_of_a_run_warns():
    run = resolve(changed(load("debug"), {"precision.recipe": "nvfp4"}), jax.devices()[:1])
    abstract = run.abstract_state()[1]
    assert "warning" not in describe(run, abstract)
    on_tpu = run.machine._replace(device_kind="TPU v5 lite")
    lines = describe(dataclasses.replace(run, machine=on_tpu), abstract).splitlines()
    [warning] = [line for line in lines if line.startswith("warning: ")]
    assert warning.startswith("warning: TPU v5 lite does not multiply the formats of nvfp4")
