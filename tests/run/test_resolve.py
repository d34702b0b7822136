"""What a config is resolved into: each value reaches the part that it is for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.core.train_step import jit_step
from maxlp.run import constraints, experiment
from maxlp.run.experiment import describe, resolve
from tests.run.fixtures import SMALL, changed, load

VALUES = SMALL | {"data.seq_len": 32, "data.tokenizer": "bytes", "data.batch_size": 8}


def resolved(**values):
    c = changed(load("debug"), VALUES | {key.replace("__", "."): value for key, value in values.items()})
    return resolve(c, jax.devices()[:1])


def initial_state(run):
    with jax.set_mesh(run.mesh):
        return run.initial_state(run.abstract_state()[1])


def test_the_seed_chooses_the_weights():
    first, again, other = (initial_state(resolved(train__seed=seed)) for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    kernel = [s["params"]["layers"]["mlp"]["up_proj"]["kernel"] for s in (first, other)]
    assert np.mean(np.asarray(kernel[0]) == np.asarray(kernel[1])) < 0.01
    assert first["step"] == 0


@pytest.mark.parametrize(
    "values",
    [
        {"train.release_gradients": True, "optimizer.clip_norm": 0.0},
        {"train.local.steps": 10, "train.total_steps": 300, "mesh.data": 2},
    ],
)
def test_a_gate_that_no_rule_refuses_is_named(values, monkeypatch):
    monkeypatch.setattr(constraints, "check", lambda *_: None)
    c = changed(load("debug"), VALUES | values | {"spikes.guard": "skip"})
    with pytest.raises(AssertionError, match="has to refuse the gates guard"):
        resolve(c, jax.devices()[:2])


def test_the_schedule_ends_with_the_run():
    run = resolved(train__total_steps=50, optimizer__schedule="linear", optimizer__final_lr_fraction=0.5)
    peak = run.settings.optimizer.learning_rate
    np.testing.assert_allclose(run.schedule(50), peak / 2, rtol=1e-6)  # rates are float32
    assert run.schedule(49) > run.schedule(50)


def test_seed_and_microbatches_reach_the_gradients_and_the_data(monkeypatch):
    made = []

    def gradients(loss, seed, microbatches, square_norms):
        made.append((seed, microbatches))

    def make_data(model, data, **how):
        assert model is settings.model
        made.append((data.tokenizer, how))

    run = resolved(train__seed=3, train__microbatches=4)
    settings = run.settings
    for name, function in (("gradients", gradients), ("make_data", make_data)):
        monkeypatch.setitem(vars(settings.family), name, function)
    experiment.assemble(settings, run.machine, run.mesh)
    experiment.make_data(settings, "given", "validation", run.mesh)
    how = dict(split="validation", seed=3, process_index=0, process_count=1)
    assert made == [(3, 4), ("given", how)]


def test_the_seed_reaches_the_rounding_of_parameters():
    values = dict(model__param_dtype="bfloat16", optimizer__param_rounding="stochastic")
    params = {"kernel": jnp.ones(256, jnp.bfloat16)}

    def updates(seed):
        tx = resolved(train__seed=seed, **values).tx
        return np.asarray(tx.update(params, tx.init(params), params)[0]["kernel"])

    np.testing.assert_array_equal(updates(1), updates(1))
    assert np.any(updates(1) != updates(2))


def test_both_gates_are_used():
    run = resolved(model__dtype="float16", precision__loss_scale__initial=256.0, spikes__guard="skip")
    assert list(run.gates) == ["loss_scale", "guard"]
    assert resolved().gates == {}


@pytest.mark.parametrize(("offload", "place"), [(False, ""), (True, " on the host")])
def test_the_description_counts_bytes_in_gib(offload, place):
    released = dict(train__release_gradients=True, optimizer__clip_norm=0.0)
    run = resolved(optimizer__offload=offload, **released)
    abstract = run.abstract_state()[1]
    count = sum(leaf.size for leaf in jax.tree.leaves(abstract["params"]))
    text = describe(run, abstract)
    assert f"{count:,} parameters in float32" in text
    assert f"parameters {4 * count / 2**30:.3g} GiB, optimizer {8 * count / 2**30:.3g} GiB{place}\n" in text


@pytest.mark.parametrize(("steps", "warns"), [(100, True), (101, False)])
def test_the_description_warns_of_an_adagc_that_never_clips(steps, warns):
    values = dict(train__total_steps=steps, optimizer__warmup_steps=0, optimizer__adagc__ratio=1.05)
    run = resolved(**values)
    text = describe(run, run.abstract_state()[1])
    assert ("warning: optimizer.adagc.warmup_steps=100 is the whole run" in text) == warns


@pytest.mark.parametrize(("rounding", "warns"), [(None, True), ("stochastic", False)])
def test_the_description_warns_of_updates_that_bfloat16_parameters_lose(rounding, warns):
    run = resolved(model__param_dtype="bfloat16", optimizer__param_rounding=rounding)
    text = describe(run, run.abstract_state()[1])
    assert ("loses updates below 2⁻⁹ of a parameter" in text) == warns


@pytest.mark.parametrize("init_from", ["", "run"])
def test_the_description_warns_of_ranks_and_of_galores_rate(init_from):
    """The rate is that of pre-training; a rank is cut in any run. Short sides are 64, and 32 of keys."""

    def warnings(**values):
        run = resolved(train__init_from=init_from, **values)
        text = describe(run, run.abstract_state()[1])
        return [line for line in text.splitlines() if line.startswith("warning: optimizer.")]

    *rates, rank = warnings(optimizer__galore__rank=40, optimizer__learning_rate=0.1)
    assert len(rates) == (not init_from) and all("galore.scale" in line for line in rates)
    assert "optimizer.galore.rank=40 is cut" in rank and "such as 32 of layers" in rank
    [rank] = warnings(optimizer__name="apollo")
    assert "optimizer.options.rank=256 is cut" in rank


@pytest.mark.parametrize(
    ("step", "every", "due"), [(6, 3, True), (5, 3, False), (5, 0, False), (7, 3, False)]
)
def test_intervals_count_finished_steps(step, every, due):
    from maxlp.train import is_due

    assert is_due(step, every) == due


def test_an_exchange_reaches_the_model_and_the_step():
    """The state has an error of each parameter for both replicas, and the step exchanges 8 bits."""

    def traced(exchange):
        values = {"mesh.fsdp": 1, "mesh.data": 2, "precision.exchange": exchange}
        run = resolve(changed(load("debug"), VALUES | values), jax.devices()[:2])
        with jax.set_mesh(run.mesh):
            graphdef, abstract = run.abstract_state()
            program = jit_step(run.step, graphdef, abstract, run.mesh).lower(abstract, run.abstract_batch())
        return abstract, program.as_text()

    (plain, before), (abstract, after) = traced("none"), traced("int8")
    assert plain["model_state"] == {} and "all_to_all" not in before
    shapes = jax.tree.map(lambda p: (2, *p.shape), abstract["params"])
    assert jax.tree.map(lambda e: e.shape, abstract["model_state"]) == {"errors": shapes}
    assert re.search(r"all_to_all.*xi8>", after)


def test_local_steps_reach_the_optimizer_and_the_step():
    """Replicas have parameters and moments of their own, and outer gradients are sent in 8 bits."""
    local = {"train.local.steps": 3, "train.local.outer_rate": 0.5, "train.total_steps": 6}
    values = {"mesh.fsdp": 1, "mesh.data": 2, "precision.exchange": "float8_e4m3fn"}
    run = resolve(changed(load("debug"), VALUES | values | local), jax.devices()[:2])
    with jax.set_mesh(run.mesh):
        graphdef, abstract = run.abstract_state()
        step = jit_step(run.step, graphdef, abstract, run.mesh)
        text = step.lower(abstract, run.abstract_batch()).as_text()
    state, params = abstract["opt_state"], abstract["params"]
    for own in (state.replicas.state["params"], state.errors.state):
        jax.tree.map(lambda p, x: np.testing.assert_array_equal(x.shape, (2, *p.shape)), params, own)
    # A replica's mean is over its own tokens: its layers, its loss and its gradients need no other replica.
    assert text.partition("all_reduce")[0].count("stablehlo.while") == 3
    assert re.search(r"all_to_all.*xi8>", text)
    ones = jax.tree.map(lambda p: jnp.ones(p.shape), {"norm": params["final_norm"]})
    updates, _ = run.tx.update(ones, run.tx.init(ones), ones)
    # λ (1 + μ), with the default μ of 0.9, in float32
    jax.tree.map(lambda u: np.testing.assert_allclose(u, -0.5 * 1.9, rtol=1e-6), updates)
