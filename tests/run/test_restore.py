"""What is evaluated, sampled from and exported of a run: of schedule-free AdamW, the average."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from ml_collections import ConfigDict

from maxlp import convert, train
from maxlp.core.train_state import init_state
from maxlp.families.llama import hf
from maxlp.families.weights import to_other
from maxlp.run import run_dir
from maxlp.run.config import ConfigError
from maxlp.run.experiment import resolve
from maxlp.run.restore import restore_model
from maxlp.runtime.checkpoint import Checkpointer
from maxlp.runtime.safetensors import Tensors
from tests import fixtures
from tests.run.fixtures import SMALL, changed, load

CHOICES = {
    "optimizer.name": "schedule_free_adamw",
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "optimizer.b1": 0.8,
    "data.seq_len": 32,
    "data.tokenizer": "bytes",
}


def test_a_guard_that_a_resumed_run_did_not_have_begins():
    values = SMALL | CHOICES | {"spikes.guard": "skip", "spikes.window": 20}
    experiment = resolve(changed(load("debug"), values))
    state = experiment.with_all_gates({"step": 7})
    assert state["step"] == 7 and state["guard"]["values"].shape == (2, 20)
    assert state["guard"]["seen"].sharding.is_fully_replicated
    assert experiment.with_all_gates(state) == state


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[ConfigDict, object, dict, dict]:
    """A config, the directory of its run, the state after two updates, the average by its definition."""
    c = changed(load("debug"), SMALL | CHOICES)
    workdir = tmp_path_factory.mktemp("run")
    experiment = resolve(c, jax.devices()[:1])
    state = jax.jit(lambda: init_state(experiment.make_model, experiment.tx, 0))()
    trained, opt_state = state["params"], state["opt_state"]
    for _ in range(2):
        updates, opt_state = experiment.tx.update(trained, opt_state, trained)
        trained = optax.apply_updates(trained, updates)
    state |= {"params": trained, "opt_state": opt_state}
    assert experiment.abstract_state()[1].keys() == state.keys()
    [z] = (s.z for s in jax.tree.leaves(opt_state, is_leaf=has_z) if has_z(s))
    b1 = c.optimizer.b1  # y = (1 - b1) z + b1 x
    average = jax.device_get(jax.tree.map(lambda y, z: (y - (1 - b1) * z) / b1, trained, z))
    assert not np.allclose(average["final_norm"]["scale"], trained["final_norm"]["scale"], rtol=1e-4)
    with Checkpointer(workdir / "checkpoints", every_steps=1) as checkpoints:
        checkpoints.save(2, state, {})
    run_dir.save_config(workdir, c)
    return c, workdir, state, average


def has_z(node) -> bool:
    return isinstance(node, optax.contrib.ScheduleFreeState)


def assert_equal(got, expected):
    # (y - (1 - b1) z) / b1 in one or two roundings of float32
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, expected)


@pytest.mark.full
def test_evaluation_during_training_uses_the_average(run):
    _, _, state, average = run
    seen = []

    def evaluate(state, batches):
        seen.append(state)
        return {"loss": 1.0}

    assert train.validate(evaluate, state, [], fixtures.make_mesh(), 0) == {"eval/loss": 1.0}
    assert seen[0].keys() == {"params", "model_state"}
    assert_equal(jax.device_get(seen[0]["params"]), average)


@pytest.mark.parametrize("step", [None, 2])
def test_commands_that_use_a_model_restore_the_average(run, step):
    """`evaluate` and `generate`."""
    c, workdir, _, average = run
    graphdef, state, found = restore_model(c, workdir, step, fixtures.make_mesh())
    assert found == 2
    assert_equal(jax.device_get(state["params"]), average)
    assert nnx.merge(graphdef, state["params"], state["model_state"]).config.num_layers == 2


def test_a_run_whose_config_has_lost_its_optimizer_is_not_taken_for_imported_weights(run):
    c, workdir, _, _ = run
    c = c.copy_and_resolve_references()
    del c["optimizer"]
    with pytest.raises(ConfigError, match=r"config\.optimizer is missing"):
        restore_model(c, workdir, None, fixtures.make_mesh())


def test_the_average_is_exported(run, tmp_path):
    _, workdir, _, average = run
    convert.export_weights(workdir, tmp_path / "out")
    exported, expected = Tensors(tmp_path / "out"), to_other(average, hf.LAYOUT)
    assert set(exported) == set(expected)
    assert_equal({name: exported[name] for name in exported}, expected)


@pytest.mark.parametrize("values", [{}, {"train.local.steps": 3, "train.total_steps": 300}], ids=str)
def test_a_model_is_restored_without_what_replicas_have_for_themselves(tmp_path, values):
    """Two replicas trained it; one device evaluates it."""
    exchange = {"precision.exchange": "int8", "mesh.data": 2, "mesh.fsdp": 1}
    c = changed(load("debug"), SMALL | {"data.tokenizer": "bytes", "data.seq_len": 32} | exchange | values)
    experiment = resolve(c, jax.devices()[:2])
    with jax.set_mesh(experiment.mesh):
        _, abstract = experiment.abstract_state()
        state = experiment.initial_state(abstract)
    with Checkpointer(tmp_path / "checkpoints", every_steps=1) as checkpoints:
        checkpoints.save(2, state, {})
    run_dir.save_config(tmp_path, c)
    _, restored, step = restore_model(c, tmp_path, None, fixtures.make_mesh())
    assert step == 2 and restored["model_state"] == {}
    assert_equal(restored["params"], jax.device_get(state["params"]))
