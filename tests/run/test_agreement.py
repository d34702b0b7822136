"""The closed form of the planner, and training, accept the same configs; what both accept runs.

Random configs (`draws`) are given to both. The planner's closed form and its search call
`constraints.check`, make the state as shapes and evaluate the formulas. Training, its dry run and a
compiled plan resolve the config and trace the train step. A disagreement means that a rule is missing.
"""

import math

import jax
import numpy as np
import pytest

from maxlp.core.train_state import abstract_state
from maxlp.core.train_step import jit_step
from maxlp.parallel.batches import global_batch
from maxlp.planning.cost_model import cost_of, state_shapes
from maxlp.run import constraints
from maxlp.run.config import ConfigError
from maxlp.run.experiment import Experiment, resolve
from maxlp.run.settings import read
from tests.run import draws

QUICK, FULL, RUN = 30, 300, 40


def refusal(function, c) -> str | None:
    """The message with which a function refuses a config; None if it accepts it."""
    try:
        function(c)
    except ConfigError as error:
        return str(error)
    return None


def closed_form(c) -> None:
    """What ``plan --estimate_only`` and the search do with a config."""
    s = read(c)
    machine = s.machine(8, "cpu")
    constraints.check(s, machine)
    state, cost = state_shapes(s, machine), cost_of(s)
    memory = cost.memory(s, machine, state)
    work = cost.work(s, machine, state)
    cost.collectives(s, machine)
    assert all(math.isfinite(value) and value >= 0 for value in (*memory.values(), *work.flops.values()))


def traced_step(c) -> tuple[Experiment, dict, jax.stages.Traced]:
    """What the command ``train`` does with a config before it compiles the step."""
    run = resolve(c)
    with jax.set_mesh(run.mesh):
        graphdef, abstract = abstract_state(run.make_model, run.tx, run.mesh, run.gates)
        step = jit_step(run.step, graphdef, abstract, run.mesh)
        return run, abstract, step.trace(abstract, run.abstract_batch())


def batch(run: Experiment) -> dict:
    """A random global batch."""
    rng = np.random.default_rng(0)

    def values(name: str, spec: jax.ShapeDtypeStruct) -> np.ndarray:
        if name == "positions":
            return np.broadcast_to(np.arange(spec.shape[1], dtype=np.int32), spec.shape)
        if spec.dtype == bool:
            return np.ones(spec.shape, bool)
        return rng.integers(0, 64, spec.shape).astype(spec.dtype)

    shapes = run.family.batch_shapes(run.settings.data)
    return global_batch({name: values(name, spec) for name, spec in shapes.items()}, run.mesh)


def check_agreement(family: str, seed: int) -> bool:
    """Whether both accept a draw; fails where they differ, or if a refusal is not one line for the user."""
    changes = draws.draw(family, seed)
    c = draws.config(family, changes)
    told = f"{family} {seed}: {changes}"
    try:
        planner, trainer = refusal(closed_form, c), refusal(traced_step, c)
    except Exception as error:
        raise AssertionError(f"{told}: neither accepted nor a ConfigError: {error!r}") from error
    assert planner == trainer, told
    if planner is not None:
        assert planner.startswith("config.") and "\n" not in planner, f"{told}: {planner}"
    return planner is None


CASES = [(family, seed) for seed in range(FULL) for family in draws.FEATURES]


@pytest.mark.parametrize(("family", "seed"), CASES[:QUICK])
def test_planner_and_trainer_accept_the_same(family, seed):
    check_agreement(family, seed)


@pytest.mark.full
@pytest.mark.parametrize(("family", "seed"), CASES[QUICK:])
def test_planner_and_trainer_accept_the_same_more(family, seed):
    check_agreement(family, seed)
