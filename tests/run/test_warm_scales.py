"""Runs with delayed scales go from the cold program to the warm one, and no number changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.parallel.batches import global_batch
from maxlp.precision import delayed, make_recipe
from maxlp.precision.dot import QuantDot
from maxlp.run import warm_scales
from maxlp.run.experiment import resolve_settings
from tests import composition, fixtures
from tests.fixtures import Trainer, precision_config, with_full_histories


class Stepper:
    """The step of a row of `tests.composition`, whose histories have four places."""

    def __init__(self, row, devices):
        self.run = resolve_settings(composition.settings("llama", row), jax.devices()[:devices])
        with jax.set_mesh(self.run.mesh):
            self.graphdef, self.abstract = self.run.abstract_state()
            self.programs = self.run.jit_step(self.graphdef, self.abstract)

    def state(self):
        with jax.set_mesh(self.run.mesh):
            return self.run.initial_state(self.abstract)

    def steps(self, state, seeds, step=None):
        """What the steps with these batches return, on the host, and which programs ran."""
        step = step or dataclasses.replace(self.programs)
        found, ran = [], []
        for seed in seeds:
            with jax.set_mesh(self.run.mesh):
                state, metrics = step(state, global_batch(fixtures.batch(seed), self.run.mesh))
            found.append(jax.device_get((state, metrics)))
            if step is not self.programs.cold:
                ran.append("warm" if step.last is self.programs.warm else "cold")
        return found, ran

    def placed(self, state):
        """A state of the host on the mesh."""
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, self.abstract)


@functools.cache
def stepper(row=("fp8_delayed", "fsdp", "microbatches", "guard=skip"), devices=2):
    return Stepper(row, devices)


def assert_equal(ours, expected):
    jax.tree.map(np.testing.assert_array_equal, ours, expected)


@pytest.mark.parametrize(
    "row",
    [
        (),
        # The first block has no histories, and must not keep the run cold.
        pytest.param(
            (("fp8_delayed", "unquantized blocks", "release_gradients"), 1),
            marks=[pytest.mark.full, pytest.mark.default_emitters],
        ),
        pytest.param((("fp8_gaudi", "remat=block"), 1), marks=pytest.mark.full),
    ],
    ids=["mesh", "released", "gaudi"],
)
def test_a_run_that_becomes_warm_equals_one_that_stays_cold(row):
    it = stepper(*row)
    ours, ran = it.steps(it.state(), range(3))
    cold, _ = it.steps(it.state(), range(3), it.programs.cold)
    assert ran == ["cold", "warm", "warm"]
    assert_equal(ours, cold)


def test_a_run_that_resumes_before_or_after_the_switch_takes_the_same_programs():
    it = stepper()
    whole, ran = it.steps(it.state(), range(3))
    for done in (1, 2):
        rest, ran_then = it.steps(it.placed(whole[done - 1][0]), range(done, 3))
        assert ran_then == ran[done:]
        assert_equal(rest, whole[done:])


def test_a_step_is_cold_where_one_history_of_one_layer_is_empty():
    it = stepper()
    [(state, _)], _ = it.steps(it.state(), [0])
    dot = state["model_state"]["layers"]["mlp"]["up_proj"]["dot_general"]
    dot["kernel_amax_history"] = dot["kernel_amax_history"] * np.array([[1], [0]], np.float32)
    ours, ran = it.steps(it.placed(state), (1, 2))
    assert ran == ["cold", "warm"]
    assert_equal(ours[0], it.steps(it.placed(state), [1], it.programs.cold)[0][0])


@pytest.mark.parametrize("length", [1, 2, 5])
def test_the_program_is_a_function_of_the_state_though_it_is_seldom_looked_at(length):
    """Histories that fill up and empty again: amaxes are 0 at times, and rejected steps add none."""
    dot = QuantDot(make_recipe("fp8_delayed", history=length), (2,))
    graphdef, model_state = nnx.split(dot)
    state = {"params": {}, "model_state": nnx.to_pure_dict(model_state), "step": jnp.int32(0)}
    rng, looked = np.random.default_rng(length), []

    def step(state, batch):
        def push(history):
            amaxes = rng.choice([0.0, 2.0], size=2, p=[0.3, 0.7])
            return jax.vmap(delayed.push)(history, jnp.float32(amaxes))

        return state if batch else state | {"model_state": jax.tree.map(push, state["model_state"])}, {}

    def look(state):
        looked.append(state)
        return warm_scales.warm_steps(graphdef, state)

    programs = warm_scales.Programs(lambda *args: step(*args), lambda *args: step(*args), look)
    ran = []
    for batch in rng.random(60) < 0.2:
        full = all(np.all(np.max(h, -1) > 0) for h in jax.tree.leaves(state["model_state"]))
        state, _ = programs(state, batch)
        ran.append(programs.last is programs.warm)
        assert ran[-1] == full
    assert 0 < sum(ran) < 60
    assert length == 1 or len(looked) < 60
    # Then comes another run's state, although that of this run need not be checked for some steps.
    full = jax.tree.map(jnp.ones_like, state["model_state"])
    for given, expected in ((full, programs.warm), (nnx.to_pure_dict(model_state), programs.cold)):
        programs({"params": {}, "model_state": given, "step": jnp.int32(0)}, {})
        assert programs.last is expected


def test_layers_that_are_not_quantized_keep_no_run_cold():
    config = precision_config("fp8_delayed", first_blocks=1, rules=(("layers/2/attn/q_proj", "bf16"),))
    trainer = Trainer(recipe=config, num_layers=3)
    state = with_full_histories(trainer.init())
    assert warm_scales.warm_steps(trainer.graphdef, state) == 1024

    def without(layer, name):
        def one(path, history):
            return history.at[layer].set(0.0) if name in jax.tree_util.keystr(path) else history

        return state | {"model_state": jax.tree.map_with_path(one, state["model_state"])}

    for layer, name, steps in ((0, "", 1024), (2, "q_proj", 1024), (2, "k_proj", 0), (1, "q_proj", 0)):
        assert warm_scales.warm_steps(trainer.graphdef, without(layer, name)) == steps


def test_a_run_that_resumes_compiles_the_cold_program_only_if_it_needs_it():
    compiled = []

    class Lazy:
        def __init__(self, name):
            self.name = name

        def lower(self, *shapes):
            return self

        def compile(self):
            compiled.append(self.name)
            return self

    for resumes, expected in ((True, ["warm"]), (False, ["cold", "warm"])):
        compiled.clear()
        programs = warm_scales.Programs(Lazy("cold"), Lazy("warm"), None, resumes)
        programs.lower("state", "batch").compile()
        assert compiled == expected


def test_a_run_whose_recipe_never_starts_cold_has_one_program():
    s = composition.settings("llama", ("fp8_delayed",))
    assert s.starts_cold and not composition.settings("llama", ("mxfp8",)).starts_cold
    options = dataclasses.replace(s.precision.options, cold_start=False)
    warm = dataclasses.replace(s, precision=dataclasses.replace(s.precision, options=options))
    assert not warm.starts_cold
