"""SGD with momentum: optax's, with its state where wrappers look for moments."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.optim.sgd import scale_by_momentum
from tests.optim.common import random_tree, run

SHAPES = {"a": (3,), "b": (2, 4)}


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("b1", [0.0, 0.9])
def test_equals_optax(b1, nesterov):
    params, grads = random_tree(SHAPES, 9), [random_tree(SHAPES, i) for i in range(4)]
    ours = optax.chain(scale_by_momentum(b1, nesterov=nesterov), optax.scale(-0.1))
    got, state = run(ours, params, grads)
    want, _ = run(optax.sgd(0.1, b1, nesterov), params, grads)
    for name in SHAPES:
        np.testing.assert_array_equal(got[name], want[name])
    assert state[0].mu.keys() == SHAPES.keys()


def test_the_momentum_has_the_wanted_dtype():
    state = scale_by_momentum(0.9, "bfloat16").init({"a": jnp.zeros(3)})
    assert state.mu["a"].dtype == jnp.bfloat16
