"""Gates decide together whether a step counts, and a rejected step changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.core.gates import accept_all
from maxlp.core.train_step import train_step


class BelowLimit:
    """Accepts losses below a limit, and counts its steps."""

    def __init__(self, name: str, limit: float):
        self.name, self.limit = name, limit

    def init(self):
        return {"steps": jnp.int32(0)}

    def accept(self, state, metrics):
        return (
            metrics["loss"] < self.limit,
            {"steps": state["steps"] + 1},
            {f"{self.name}_limit": self.limit},
        )


def make_gates(**limits: float) -> dict[str, BelowLimit]:
    return {name: BelowLimit(name, limit) for name, limit in limits.items()}


@pytest.mark.parametrize(
    ("limits", "accepted"),
    [
        (dict(first=2.0, second=2.0), True),
        (dict(first=0.5, second=2.0), False),
        (dict(first=2.0, second=0.5), False),
        (dict(first=0.5, second=0.5), False),
    ],
)
def test_a_step_counts_if_all_gates_accept_it(limits, accepted):
    gates = make_gates(**limits)
    state = {name: gate.init() for name, gate in gates.items()}
    found, new, metrics = accept_all(gates, state, {"loss": jnp.float32(1.0)})
    assert found == accepted
    assert new == {"first": {"steps": 1}, "second": {"steps": 1}}, "every gate sees every step"
    assert metrics == {f"{name}_limit": limit for name, limit in limits.items()}


# --- in the train step ----------------------------------------------------------------------------------

TX = optax.adam(0.1)


def gradients(graphdef, state, batch, loss_scale):
    """Of x · w; the model state counts the batches."""
    del graphdef, loss_scale
    metrics = {"loss": jnp.sum(batch["x"] * state["params"]["w"])}
    return {"w": batch["x"]}, {"batches": state["model_state"]["batches"] + 1}, metrics


def compiled_step(gates):
    step = functools.partial(train_step, None, gradients=gradients, tx=TX, gates=gates)
    return jax.jit(step)


def initial_state(gates):
    params = {"w": jnp.linspace(0.5, 1.0, 8)}
    state = {"params": params, "model_state": {"batches": jnp.int32(0)}, "opt_state": TX.init(params)}
    return state | {"step": jnp.int32(0)} | {name: gate.init() for name, gate in gates.items()}


def batch(scale: float):
    return {"x": scale * jnp.linspace(-1.0, 1.0, 8)}


@pytest.mark.parametrize("limits", [dict(first=10.0, second=1e9), dict(first=1e9, second=10.0)])
@pytest.mark.parametrize("bad", [1e3, float("nan"), float("inf")])
def test_a_rejected_step_leaves_the_training_unchanged_to_the_bit(limits, bad):
    gates = make_gates(**limits)
    step = compiled_step(gates)
    before, _ = step(initial_state(gates), batch(1.0))
    after, metrics = step(before, batch(bad))
    assert metrics["skipped"] == 1
    for key in ("params", "model_state", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, after[key], before[key])
    assert after["step"] == 2 and after["first"] == after["second"] == {"steps": 2}


def test_gates_that_accept_do_not_change_a_step():
    gates = make_gates(first=1e9, second=1e9)
    expected, expected_metrics = compiled_step({})(initial_state({}), batch(1.0))
    state, metrics = compiled_step(gates)(initial_state(gates), batch(1.0))
    jax.tree.map(np.testing.assert_array_equal, {key: state[key] for key in expected}, expected)
    assert metrics.pop("skipped") == 0 and "skipped" not in expected_metrics
    assert {key: metrics[key] for key in expected_metrics} == expected_metrics
