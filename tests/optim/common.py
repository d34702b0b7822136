"""Trees that look like a Llama's parameters, small."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax


def is_shape(x):
    return isinstance(x, tuple)


def random_tree(shapes, seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(scale * rng.normal(size=shape), jnp.float32), shapes, is_leaf=is_shape
    )


@functools.cache
def jitted_step(tx):
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)


def run(tx, params, grads_of_step):
    """Parameters and state after one update for each tree of gradients."""
    state, step = tx.init(params), jitted_step(tx)
    for grads in grads_of_step:
        params, state = step(grads, state, params)
    return params, state


def assert_trees_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_trees_close(got, want, **tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), got, want)
