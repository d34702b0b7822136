"""Attribution: what is made worse on purpose comes first, and one compiled program serves all sites."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from maxlp.precision import RECIPES, Operand
from maxlp.run import attribution
from maxlp.run.attribution import Effect, Evaluate, Site
from tests.fixtures import Trainer, batch, precision_config, with_full_histories


def evaluate(recipe, change_state=lambda state: state, **options):
    trainer = Trainer(recipe=precision_config(recipe, **options))
    state = change_state(trainer.init())
    with jax.set_mesh(trainer.mesh):
        return Evaluate(trainer.graphdef, trainer.gradients, state, batch(0), lambda state: None)


def planted(monkeypatch, **gemms):
    """The name of fp8_current with other operands in some of its matmuls."""
    monkeypatch.setitem(
        RECIPES, "planted", dataclasses.replace(RECIPES["fp8_current"], name="planted", **gemms)
    )
    return "planted"


@pytest.fixture(scope="module")
def clean():
    """An attribution of fp8_current, and the number of programs that were compiled for it."""
    made, notes = evaluate("fp8_current"), []
    return (
        attribution.attribution(made, 7, lambda *note: notes.append(note)),
        made.compiled._cache_size(),
        notes,
    )


@pytest.mark.full
def test_one_program_serves_all_sites(clean):
    found, compiled, notes = clean
    assert len(found.effects) == 2 * 7 * 3 * 2 and compiled == 1
    assert notes[-1] == (2 + 2 * len(found.effects),) * 2
    assert [site.layer for site in found.effects] == [0] * 42 + [1] * 42


@pytest.mark.full
def test_effects_are_those_of_low_precision(clean):
    """Forward operands change the loss and backward ones only gradients; all of them do more than one."""
    found, _, _ = clean
    for site, effect in found.effects.items():
        assert (effect.loss_on != 0) == (site.gemm == "fwd")
        assert 0 < effect.error_on < found.error_all < 0.2 and 0.99 < effect.cosine_on < 1
        assert effect.saturated == 0
    [(first, _), *_] = found.ranked()
    assert list(attribution.table(found, 1))[1].startswith(f"{first} ")


@pytest.mark.full
@pytest.mark.parametrize("gemm, tensor", [("fwd", "input"), ("dlhs", "output_grad"), ("drhs", "input")])
def test_a_coarse_operand_is_found(gemm, tensor, monkeypatch):
    """One bit of mantissa in one operand of one matmul, by a rule: its two layers come first."""
    pair = {name: Operand("e8m7", "unscaled") for name in attribution.GEMMS[gemm]} | {
        tensor: Operand("e3m1")
    }
    name = planted(monkeypatch, residuals="full", **{gemm: tuple(pair.values())})
    made = evaluate("fp8_current", rules=(("layers/mlp/up_proj", name),), residuals="full")
    found = attribution.attribution(made, 1)
    first = [site for site, _ in found.ranked()[:2]]
    assert {*first} == {Site("layers/mlp/up_proj", layer, gemm, tensor) for layer in (0, 1)}


@pytest.mark.full
def test_a_stale_scale_of_one_layer_is_found():
    """A history that is 1,000 times too small for the kernel of one layer: it saturates there alone."""

    def stale(state):
        state = with_full_histories(state)
        flat = nnx.traversals.flatten_mapping(state["model_state"])
        where = ("layers", "mlp", "down_proj", "dot_general", "kernel_amax_history")
        flat[where] = flat[where].at[1].multiply(1e-3)
        return state | {"model_state": nnx.traversals.unflatten_mapping(flat)}

    found = attribution.attribution(evaluate("fp8_delayed", stale, history=4), 1)
    site = Site("layers/mlp/down_proj", 1, "fwd", "kernel")
    assert found.ranked()[0][0] == site
    assert found.effects[site].saturated > 0.9 and found.effects[site].error_off < 0
    others = [
        e.saturated
        for s, e in found.effects.items()
        if (s.path, s.layer, s.tensor) != ("layers/mlp/down_proj", 1, "kernel")
    ]
    assert max(others) == 0


@pytest.mark.full
def test_unquantized_blocks_have_no_sites():
    made = evaluate("fp8_current", first_blocks=1)
    assert {site.layer for site in made.sites()} == {1}


def test_what_is_not_finite_ranks_first_and_is_null(tmp_path):
    sites = [Site("layers/up_proj", layer, "fwd", "kernel") for layer in (0, 1)]
    effects = [Effect(0.1, error, 1.0, 0.0, 0.0, 0.0, -0.1) for error in (0.5, float("nan"))]
    found = attribution.Attribution(3, 2.0, 0.1, 0.5, 0.9, dict(zip(sites, effects, strict=True)))
    assert [site for site, _ in found.ranked()] == sites[::-1]
    assert [entry["error_on"] for entry in attribution.as_json(found)["sites"]] == [None, 0.5]
    assert sorted(path.name for path in attribution.write(found, tmp_path)) == [
        "attribute_3.json", "attribute_3.png",
    ]  # fmt: skip
    assert all(np.isfinite(path.stat().st_size) and path.stat().st_size for path in tmp_path.iterdir())
