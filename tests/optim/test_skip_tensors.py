"""Tensors with gradients that are not finite skip a step; the others do not."""

import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.optim.config import OPTIMIZERS
from maxlp.optim.skip_tensors import skip_nonfinite, skip_nonfinite_tensors
from tests.optim.common import jitted_step, make_optimizer, random_tree, run

SHAPES = {"layers": {"kernel": (3, 8, 4)}, "scale": (8,)}  # three layers, and a tensor of its own


def optimizer(name):
    rates = dict(learning_rate=0.02, warmup_steps=1)
    return make_optimizer(name=name, weight_decay=0.01, clip_norm=1.0, **rates)


def assert_close(got, want):
    """Equal but for the last bits of a number and of its update of up to 2^-5: they are of two programs."""
    np.testing.assert_allclose(got, want, rtol=2.0**-22, atol=2.0**-27)


@pytest.mark.parametrize(
    "name", [name for name, kind in OPTIMIZERS.items() if pkgutil.resolve_name(kind).like_params]
)
def test_only_tensors_with_finite_gradients_are_updated(name):
    """The others, and their moments, keep every bit; the rest is updated as if their gradient were zero."""
    plain, tx = optimizer(name).tx, skip_nonfinite_tensors(optimizer(name).tx)
    params, state = run(tx, random_tree(SHAPES, 0), [random_tree(SHAPES, 1)])
    without = run(plain, random_tree(SHAPES, 0), [random_tree(SHAPES, 1)])
    jax.tree.map(np.testing.assert_array_equal, (params, state), without)

    grads = random_tree(SHAPES, 2)
    kernel = grads["layers"]["kernel"]
    zeroed = grads | {"layers": {"kernel": kernel.at[1].set(0)}}
    for bad in (jnp.inf, jnp.nan):
        overflowed = grads | {"layers": {"kernel": kernel.at[1, 2, 3].set(bad)}}
        after = jitted_step(tx)(overflowed, state, params)
        others = jitted_step(plain)(zeroed, state, params)

        leaves = (jax.tree.leaves(tree) for tree in (after, (params, state), others))
        for new, old, other in zip(*leaves, strict=True):
            if new.ndim and new.shape[0] == 3:
                np.testing.assert_array_equal(new[1], old[1])
                assert_close(new[jnp.array([0, 2])], other[jnp.array([0, 2])])
                assert np.any(new[0] != old[0])
            else:
                assert_close(new, other)


def test_rms_is_that_of_the_updated_tensors():
    """The global norm, by which gradients are clipped before, is theirs too."""
    plain, skips, params = optimizer("adamw"), skip_nonfinite(optimizer("adamw")), random_tree(SHAPES, 0)
    grads = random_tree(SHAPES, 1)
    zeroed = grads | {"scale": jnp.zeros(8)}
    want = plain.rms(zeroed, run(plain.tx, params, [zeroed])[1])
    for bad in (jnp.inf, jnp.nan):
        overflowed = grads | {"scale": grads["scale"].at[3].set(bad)}
        got = skips.rms(overflowed, run(skips.tx, params, [overflowed])[1])
        # Float32 means, in two programs.
        np.testing.assert_allclose(got["layers/kernel"], want["layers/kernel"], rtol=1e-5)
        assert got["scale"] == 0
