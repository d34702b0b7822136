"""Attribution: what is made worse on purpose comes first, and one compiled program serves all sites."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from maxlp import precision
from maxlp.parallel.batches import global_batch
from maxlp.precision import RECIPES, Operand, switches
from maxlp.precision.recipes import GEMMS
from maxlp.precision.replace import replace_quant_dots
from maxlp.run import attribution
from maxlp.run.attribution import Effect, Site, SwitchEvaluator
from maxlp.run.settings import read
from tests.fixtures import Trainer, batch, make_llama, precision_config
from tests.run.fixtures import TINY, changed, load

FP8 = RECIPES["fp8_current"]


def evaluate(recipe, change_state=lambda state: state, make_model=None, **options):
    trainer = Trainer(recipe=precision_config(recipe, **options), make_model=make_model)
    state, data = change_state(trainer.init()), global_batch(batch(0), trainer.mesh)
    with jax.set_mesh(trainer.mesh):
        return SwitchEvaluator(trainer.graphdef, trainer.gradients, state, data)


@pytest.fixture(scope="module")
def clean():
    """An attribution of fp8_current, what it noted, and the number of programs compiled during it."""
    made, notes, compiled = evaluate("fp8_current"), [], []

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    found = attribution.attribution(made, 7, lambda *note: notes.append(note))
    compilations = len(compiled)
    jax.jit(lambda x: x + 1)(1.0)
    assert len(compiled) > compilations, "the listener hears compilations"
    return found, notes, compilations


def test_the_table_fits_a_terminal():
    effect = attribution.Effect(-1e-3, 1e-3, 0.5, 1e-3, 1.0, 1.0, -1e-3, -1e-3)
    sites = [attribution.Site("visual/layers/mlp/down_proj", n, "drhs", "output_grad") for n in range(30)]
    found = attribution.Attribution(7, 1.0, -1e-3, 1e-3, 0.5, dict.fromkeys(sites, effect))
    lines = list(attribution.table(found, 10))
    assert len(lines) == 2 * (2 + 2 * 10) + 2 and max(map(len, lines)) <= 80


@pytest.mark.parametrize("size", [1e-4, 1e-2, 0.3, 3.0])
def test_error_and_angle_are_those_of_float64(size):
    """At a relative difference of 1e-4, 1 - cos is 5e-9: below half a step of float32 at 1."""
    rng = np.random.default_rng(0)
    h = {"a": rng.normal(size=(64, 64)), "b": 1e-20 * rng.normal(size=500)}
    g = {name: x * (1 + size * rng.normal(size=x.shape)) for name, x in h.items()}
    g, h = ({name: np.float32(1e-15 * x) for name, x in tree.items()} for tree in (g, h))
    wide_g, wide_h = (np.concatenate([x.ravel() for x in map(np.float64, t.values())]) for t in (g, h))
    error = np.linalg.norm(wide_g - wide_h) / np.linalg.norm(wide_h)
    g_unit, h_unit = (x / np.linalg.norm(x) for x in (wide_g, wide_h))
    found = jax.jit(attribution.distance)(g, h)
    # Scaling rounds g by up to 6e-8, which is 6e-4 of the smallest difference, at random in 4,596 elements.
    np.testing.assert_allclose(found["error"], error, rtol=1e-4)
    np.testing.assert_allclose(found["angle"], np.sum((g_unit - h_unit) ** 2) / 2, rtol=1e-4)
    assert attribution.distance(h, h)["angle"] == 0


def test_effects_are_differences_from_high_precision_and_from_the_recipe():
    weights = {("fwd", "input"): 1.0, ("drhs", "output_grad"): 4.0}
    sites = [Site("a", None, *kind) for kind in weights]

    class Sums:
        """The loss and the error are sums over what is on; each statistic is a number of its own."""

        def __init__(self):
            self.sites, self.off = sites, {"a": np.zeros((3, 2), bool)}

        def __call__(self, on):
            total = sum(weights[site[2:]] for site in sites if on["a"][site.index])
            statistics = {"a": np.broadcast_to(np.array([0.1, 0.2, 0.3]), (3, 2, 3))}
            return {"loss": 8 + total, "error": 16 + total, "angle": total}, statistics

    found = attribution.attribution(Sums(), 7)
    assert (found.loss, found.loss_all, found.error_all, found.angle_all) == (8, 5, 21, 5)
    for site, weight in zip(sites, weights.values(), strict=True):
        assert found.effects[site] == Effect(
            loss_on=weight,
            error_on=16 + weight,
            angle_on=weight,
            matmul=0.3,
            saturated=0.1,
            underflow=0.2,
            loss_off=-weight,
            error_off=-weight,
        )


@pytest.mark.full
def test_one_program_serves_all_sites(clean):
    found, notes, compilations = clean
    assert len(found.effects) == 2 * 7 * 3 * 2 and compilations == 0
    assert notes[-1] == (2 + 2 * len(found.effects),) * 2
    assert [site.layer for site in found.effects] == [0] * 42 + [1] * 42


@pytest.mark.full
def test_effects_are_those_of_low_precision(clean):
    """Forward operands change the loss and backward ones only gradients; all of them do more than one."""
    found = clean[0]
    for site, effect in found.effects.items():
        assert (effect.loss_on != 0) == (site.gemm == "fwd")
        assert 0 < effect.error_on < found.error_all < 0.2 and 0 < effect.angle_on < 0.01
        # At most half a step of E5M2, in a product whose terms do not cancel more than their errors.
        assert 0.001 < effect.matmul < 2.0**-3 and effect.saturated == 0
    [(first, _), *_] = found.ranked()
    assert list(attribution.table(found, 1))[2] == str(first)


@pytest.mark.parametrize(
    ("gemm", "tensor"),
    [
        pytest.param("fwd", "input", marks=pytest.mark.slow),
        pytest.param("dlhs", "output_grad", marks=pytest.mark.slow),
        pytest.param("drhs", "input", marks=pytest.mark.full),
    ],
)
def test_a_coarse_operand_is_found(gemm, tensor):
    """One bit of mantissa in one operand of one matmul, by a rule: its two layers come first."""
    pair = {name: Operand("e8m7", "unscaled") for name in GEMMS[gemm]} | {tensor: Operand("e3m1")}
    coarse = dataclasses.replace(FP8, residuals="full", **{gemm: tuple(pair.values())})

    def make_model(rngs):
        model = make_llama()(rngs)
        precision.inject(model, FP8, rules=(("layers/mlp/up_proj", coarse),))
        return model

    found = attribution.attribution(evaluate("bf16", make_model=make_model), 1)
    first = {site for site, _ in found.ranked("matmul")[:2]}
    assert first == {Site("layers/mlp/up_proj", layer, gemm, tensor) for layer in (0, 1)}


@pytest.mark.full
def test_a_stale_scale_of_one_layer_is_found():
    """A history of an amax of 0.001 for the kernel of one layer: the kernel saturates there alone."""

    def stale(state):
        flat = nnx.traversals.flatten_mapping(state["model_state"])
        where = ("layers", "mlp", "down_proj", "dot_general", "kernel_amax_history")
        flat[where] = flat[where].at[1].set(1e-3)
        return state | {"model_state": nnx.traversals.unflatten_mapping(flat)}

    found = attribution.attribution(evaluate("fp8_delayed", stale, history=4), 1)
    sites = {Site("layers/mlp/down_proj", 1, gemm, "kernel") for gemm in ("fwd", "dlhs")}
    for by in ("error_on", "matmul"):
        assert {site for site, _ in found.ranked(by)[:2]} == sites
    for site, effect in found.effects.items():
        assert effect.saturated > 0.9 and effect.error_off < 0 if site in sites else effect.saturated == 0


def test_a_head_in_chunks_has_effects_of_its_own():
    rules = {"precision.rules": (("lm_head", "fp8_current"),), "loss.num_chunks": 2}
    ends = {"precision.first_blocks": 0, "precision.last_blocks": 0}
    whole = {"mesh.data": 8, "mesh.fsdp": 1}  # compiles faster than split weights
    s = read(changed(load("debug"), TINY | rules | ends | whole))
    with attribution.evaluator(s, None, 1) as (evaluate, _):
        off = evaluate.off["lm_head"]
        both = [evaluate({"lm_head": on})[1]["lm_head"] for on in (off, np.arange(6).reshape(3, 2) % 2 > 0)]
    without, alone = (found[..., switches.STATISTICS.index("error")] for found in both)
    assert not without.any() and np.all((alone > 0.001) & (alone < 2.0**-3))


@pytest.mark.full
def test_unquantized_blocks_have_no_sites():
    trainer = Trainer(recipe=precision_config("fp8_current", first_blocks=1))
    state = trainer.init()
    with jax.set_mesh(trainer.mesh):
        graphdef, model_state = replace_quant_dots(trainer.graphdef, state, switches.SwitchDot)
        sites = attribution.sites_of(nnx.merge(graphdef, state["params"], model_state))
    assert {site.layer for site in sites} == {1} and len(sites) == 7 * 3 * 2


def test_what_is_not_finite_ranks_first_and_is_null(tmp_path):
    sites = [Site("layers/up_proj", layer, "fwd", "kernel") for layer in (0, 1)]
    effects = [Effect(0.1, error, 1.0, 0.3, 0.0, 0.0, 0.0, -0.1) for error in (0.5, float("nan"))]
    found = attribution.Attribution(3, 2.0, 0.1, 0.5, 0.9, dict(zip(sites, effects, strict=True)))
    assert [site for site, _ in found.ranked()] == sites[::-1]
    assert [entry["error_on"] for entry in attribution.as_json(found)["sites"]] == [None, 0.5]
    assert sorted(path.name for path in attribution.write(found, tmp_path)) == [
        "attribute_3.json", "attribute_3.png",
    ]  # fmt: skip
    assert all(path.stat().st_size for path in tmp_path.iterdir())
