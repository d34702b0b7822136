import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.monitoring import statistics


@pytest.fixture
def grads():
    rng = np.random.default_rng(0)
    return {
        "tok_embed": {"embedding": jnp.asarray(rng.normal(size=(16, 8)), jnp.bfloat16)},
        "layers": {"mlp": {"kernel": jnp.asarray(rng.normal(size=(3, 8, 8)), jnp.float32)}},
    }


def test_norms_of_tensors_add_up_to_the_global_norm(grads):
    norms = statistics.per_layer(statistics.tensor_statistics(grads, None, rms=lambda *_: {})["grad_norms"])
    assert set(norms) == {"tok_embed/embedding", *(f"layers/mlp/kernel/{i}" for i in range(3))}
    wide = optax.tree.cast(grads, jnp.float32)
    # Two orders of summing 320 squares in float32.
    assert math.hypot(*norms.values()) == pytest.approx(float(optax.tree.norm(wide)), rel=1e-6)


def test_the_optimizer_supplies_rms_or_it_is_left_out(grads):
    def rms(grads, opt_state):
        return {"layers/mlp/kernel": opt_state * jnp.ones(3)}

    found = statistics.tensor_statistics(grads, jnp.float32(2.0), rms=rms)
    np.testing.assert_array_equal(found["rms"]["layers/mlp/kernel"], [2.0, 2.0, 2.0])
    assert found["grad_norms"].keys() == {"tok_embed/embedding", "layers/mlp/kernel"}
    assert statistics.tensor_statistics(grads, None, rms=lambda *_: {}).keys() == {"grad_norms"}


def test_metrics_are_flattened_with_the_largest_of_each_kind():
    rms = {"tok_embed/embedding": np.float32(1.5), "layers/mlp/kernel": np.array([0.5, 2.5, 1.0])}
    assert statistics.flat({"loss": np.float32(2), "rms": rms}) == {
        "loss": 2.0,
        "rms/tok_embed/embedding": 1.5,
        "rms/layers/mlp/kernel/0": 0.5,
        "rms/layers/mlp/kernel/1": 2.5,
        "rms/layers/mlp/kernel/2": 1.0,
        "rms/max": 2.5,
    }


def test_every_statistic_of_tensors_is_found_among_the_metrics():
    tensors = {"rms": {"a": np.float32(1.5)}, "new": {"layers/b": np.array([0.5, 2.5])}}
    found = {"rms": {"a": 1.5}, "new": {"layers/b/0": 0.5, "layers/b/1": 2.5}}
    assert statistics.of_tensors({"loss": np.float32(2)} | tensors) == found


def test_numbers_that_are_not_finite_are_the_largest():
    tensors = {"a": 1.0, "b": math.inf, "c": 3.0}
    assert statistics.largest(tensors, 2) == [("b", math.inf), ("c", 3.0)]
    assert statistics.largest(tensors | {"b": math.nan})[0][0] == "b"


@pytest.mark.parametrize("values", [[1.0, math.nan], [math.nan, 1.0]])
def test_the_largest_of_each_kind_is_nan_if_one_is(values):
    assert math.isnan(statistics.flat({"rms": {"a": np.array(values)}})["rms/max"])
