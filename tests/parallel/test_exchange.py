"""Sums of gradients over replicas in 8 bits: bounds of one sum, and what error feedback keeps of many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxlp.parallel import exchange
from tests.fixtures import make_mesh

# Half the distance of the two largest values, relative to the largest: what rounding loses at most.
HALF_STEP = {"int8": 0.5 / 127, "float8_e4m3fn": 16 / 448}
ROUNDING = 2.0**-20  # of scales, products and sums of eight numbers in float32
# No size is a multiple of a piece; the large one has many blocks.
SHAPES = {"matrix": (37, 60), "stack": {"kernel": (4, 40, 24), "scale": (4, 8)}}
SPECS = {"matrix": P(), "stack": {"kernel": P(None, "fsdp", "tensor"), "scale": P()}}


def gradients(seed: int, replicas: int, dtype=jnp.float32):
    """Random gradients of the replicas, of very different sizes within a tensor and between replicas."""
    rng = np.random.default_rng(seed)

    def one(shape):
        x = rng.standard_normal((replicas, *shape)) * 10.0 ** rng.uniform(-3, 0, (replicas, *shape))
        return jnp.asarray(x * rng.uniform(0.1, 3.0, (replicas, *[1] * len(shape))), dtype)

    return jax.tree.map(one, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def zeros(grads):
    return jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.float32), grads)


@functools.cache
def exchanging(name: str, **sizes: int):
    mesh = make_mesh(**sizes)
    split = jax.tree.map(lambda spec: NamedSharding(mesh, P("data", *spec)), SPECS)
    run = jax.jit(
        lambda grads, errors: exchange.sum_over_replicas(grads, errors, SPECS, name),
        in_shardings=(split, split),
    )

    def on_mesh(grads, errors):
        with jax.set_mesh(mesh):
            return jax.device_get(run(jax.device_put(grads, split), jax.device_put(errors, split)))

    return on_mesh


def largest(x: np.ndarray, replicas: int) -> np.ndarray:
    """The largest magnitude of the block of each value of a whole tensor."""
    flat = np.pad(np.abs(x).ravel(), (0, -x.size % (replicas * exchange.BLOCK))).reshape(-1, exchange.BLOCK)
    return np.repeat(flat.max(axis=1), exchange.BLOCK)[: x.size].reshape(x.shape)


def bound(x: np.ndarray, name: str) -> np.ndarray:
    """What a sum over the first axis loses at most: a rounding of each replica's values, and of the sum."""
    roundings = [largest(one, len(x)) for one in x]
    at_most = sum(roundings) * (1 + HALF_STEP[name]) + largest(x.sum(axis=0), len(x))
    return (HALF_STEP[name] + ROUNDING) * at_most


@pytest.mark.parametrize("name", HALF_STEP)
def test_a_sum_is_within_the_bound_of_the_format(name):
    grads = gradients(0, 8)
    sums, errors = exchanging(name, data=8)(grads, zeros(grads))
    for got, error, g in zip(*map(jax.tree.leaves, (sums, errors, jax.device_get(grads))), strict=True):
        off, at_most = np.abs(got - g.astype(np.float64).sum(axis=0)), bound(g, name)
        assert (off <= at_most).all()
        assert off.max() > 0.05 * at_most.max(), "8 bits lose something"
        np.testing.assert_allclose(
            got + error.sum(axis=0), g.sum(axis=0), rtol=0, atol=ROUNDING * np.abs(g).max() * 8
        )


def test_the_partition_of_the_parameters_changes_only_the_blocks():
    """Nothing is lost, although each device exchanges its own part of a replica's gradient."""
    grads = gradients(1, 2)
    sums, errors = exchanging("int8", data=2, fsdp=2, tensor=2)(grads, zeros(grads))
    for got, error, g in zip(*map(jax.tree.leaves, (sums, errors, jax.device_get(grads))), strict=True):
        tolerance = ROUNDING * np.abs(g).max() * 2
        np.testing.assert_allclose(got + error.sum(axis=0), g.sum(axis=0), rtol=0, atol=tolerance)
        assert np.abs(error).max() > 100 * tolerance


@pytest.mark.parametrize("name", HALF_STEP)
def test_many_sums_are_as_exact_as_one_with_errors_and_drift_without(name):
    steps, run, grads = 40, exchanging(name, data=8), gradients(2, 8)
    errors = zeros(grads)
    total = drifting = exact = jax.tree.map(lambda g: np.zeros(g.shape[1:]), grads)
    add = functools.partial(jax.tree.map, lambda a, b: a + np.asarray(b, np.float64))
    for step in range(steps):
        g = jax.tree.map(lambda g, step=step: g * (1 + 0.01 * (step % 3)), grads)
        sums, errors = run(g, errors)
        total, drifting = add(total, sums), add(drifting, run(g, zeros(g))[0])
        exact = add(exact, jax.tree.map(lambda g: np.asarray(g, np.float64).sum(axis=0), g))
    for a, b, c, g in zip(
        *map(jax.tree.leaves, (total, drifting, exact, jax.device_get(grads))), strict=True
    ):
        # What is rounded is the gradient plus the error before it, which may be the error of a sum.
        once = 2 * bound(1.02 * g, name) + steps * ROUNDING * np.abs(g).sum(axis=0).max()
        assert (np.abs(a - c) <= once).all()
        assert np.abs(b - c).max() > 5 * np.abs(a - c).max()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", HALF_STEP)
def test_what_is_not_finite_stays_visible(name, value):
    grads = gradients(3, 8)
    grads["matrix"] = grads["matrix"].at[5, 0, 3].set(value)
    sums, _ = exchanging(name, data=8)(grads, zeros(grads))
    wrong = ~np.isfinite(sums["matrix"])
    assert wrong[0, 3] and wrong.sum() == exchange.BLOCK
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(sums["stack"]))


def test_sums_keep_the_dtype_of_the_gradients_and_errors_are_float32():
    grads = gradients(4, 8, jnp.bfloat16)
    sums, errors = exchanging("int8", data=8)(grads, zeros(grads))
    assert {x.dtype for x in jax.tree.leaves(sums)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(errors)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_a_sum_loses_in_16_bits_is_in_the_errors_too(dtype):
    """Errors are added to gradients in float32, and include the rounding of the result to its dtype."""
    grads, run = gradients(5, 8, dtype), exchanging("int8", data=8)
    errors = zeros(grads)
    total = exact = jax.tree.map(lambda g: np.zeros(g.shape[1:]), grads)
    add = functools.partial(jax.tree.map, lambda a, b: a + np.asarray(b, np.float64))
    for _ in range(3):
        sums, errors = run(grads, errors)
        total = add(total, sums)
        exact = add(exact, jax.tree.map(lambda g: np.asarray(g, np.float64).sum(axis=0), grads))
    for got, error, want, g in zip(*map(jax.tree.leaves, (total, errors, exact, grads)), strict=True):
        at_most = 3 * 8 * ROUNDING * np.abs(np.asarray(g, np.float64)).max()
        np.testing.assert_allclose(got + error.sum(axis=0), want, rtol=0, atol=at_most)
