import itertools
import math

import jax
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
    found = statistics.tensor_statistics(grads, None, grads, grads, rms=lambda *_: {})
    norms = statistics.per_layer(found["grad_norms"])
    assert set(norms) == {"tok_embed/embedding", *(f"layers/mlp/kernel/{i}" for i in range(3))}
    wide = optax.tree.cast(grads, jnp.float32)
    # Two orders of summing 320 squares in float32.
    assert math.hypot(*norms.values()) == pytest.approx(float(optax.tree.norm(wide)), rel=1e-6)


def test_the_optimizer_supplies_rms_or_it_is_left_out(grads):
    def rms(grads, opt_state):
        return {"layers/mlp/kernel": opt_state * jnp.ones(3)}

    found = statistics.tensor_statistics(grads, jnp.float32(2.0), grads, grads, rms=rms)
    np.testing.assert_array_equal(found["rms"]["layers/mlp/kernel"], [2.0, 2.0, 2.0])
    assert found["grad_norms"].keys() == {"tok_embed/embedding", "layers/mlp/kernel"}
    without = statistics.tensor_statistics(grads, None, grads, grads, rms=lambda *_: {})
    assert without.keys() == {"grad_norms"}


def test_a_group_with_another_learning_rate_stands_out_in_its_update_ratios(grads):
    rates = {"tok_embed": {"embedding": 1e-3}, "layers": {"mlp": {"kernel": jnp.array([1e-3, 0.03, 0.0])}}}
    updates = jax.tree.map(lambda rate, p: -jnp.reshape(rate, (-1, *[1] * (p.ndim - 1))) * p, rates, grads)
    params = grads | {"frozen": {"bias": jnp.zeros(3)}, "new": {"bias": jnp.zeros(3)}}
    updates |= {"frozen": {"bias": jnp.zeros(3)}, "new": {"bias": jnp.ones(3)}}
    found = statistics.tensor_statistics(
        params, None, updates, params, rms=lambda *_: {}, update_ratios=True
    )
    expected = {"tok_embed/embedding": 1e-3, "frozen/bias": 0.0, "new/bias": math.inf}
    expected |= {f"layers/mlp/kernel/{i}": ratio for i, ratio in enumerate((1e-3, 0.03, 0.0))}
    of_layers = statistics.per_layer(found["update_ratios"])
    assert of_layers == pytest.approx(expected, rel=2**-8)  # an update in bfloat16


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


@pytest.mark.parametrize("values", itertools.permutations([1.0, math.inf, math.nan]))
def test_the_largest_of_each_kind_is_nan_if_one_is(values):
    assert math.isnan(statistics.flat({"rms": {"a": np.array(values)}})["rms/max"])
