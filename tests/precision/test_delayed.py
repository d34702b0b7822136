"""Delayed scaling of one layer against two independent implementations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.linen import fp8_ops

from maxlp.precision import delayed, make_recipe
from maxlp.precision.dot import QuantDot
from tests.precision import fixtures

DIMS = (((1,), (0,)), ((), ()))
E4M3, E5M2 = (448.0, ml_dtypes.float8_e4m3fn), (57344.0, ml_dtypes.float8_e5m2)


def data(step):
    """Input, kernel and output gradient whose largest magnitudes jump by powers of two."""
    rng = np.random.default_rng(step)
    arrays = []
    for shape, exponent in (((24, 32), 0), ((32, 16), -3), ((24, 16), -12)):
        a = rng.uniform(-3, 3, shape).astype(np.float32)
        a[3, 5] = -3.5  # 448 and 57344 are multiples: the scales are exact powers of two
        arrays.append(a * np.float32(2.0 ** (exponent + rng.integers(-2, 3))))
    return arrays


def assert_close(ours, exact):
    """Equal but for the order of float32 sums of up to 32 products, most of whose roundings cancel."""
    np.testing.assert_allclose(ours, exact, rtol=0, atol=16 * 2.0**-24 * np.abs(exact).max())


@functools.cache
def compiled_layer(**options):
    layer = fixtures.Layer(make_recipe("fp8_delayed", **options))
    return layer.state, jax.jit(layer.step)


class Layer:
    """One layer with delayed scaling, run step by step as in training."""

    def __init__(self, **options):
        self.state, self.compiled = compiled_layer(**options)

    def __call__(self, x, w, g):
        y, dx, dw, self.state = self.compiled(self.state, x, w, g)
        return y, dx, dw

    @property
    def histories(self):
        state = self.state[0] | self.state[1]
        return [state[f"{name}_amax_history"] for name in ("input", "kernel", "output_grad")]


@pytest.mark.parametrize("residuals", ["full", "quantized"])
def test_five_steps_equal_an_independent_model(residuals):
    """With full residuals, the backward pass quantizes the input again, by the input's own history."""
    history_length, margin = 3, 1.0
    layer = Layer(history=history_length, margin=margin, residuals=residuals)
    pasts = [[], [], []]

    def fp8(a, past, kind):
        largest, dtype = kind
        amax = max(past[-history_length:], default=np.abs(a).max())
        scale = amax * 2**margin / largest
        return np.clip(a / scale, -largest, largest).astype(dtype).astype(np.float64) * scale

    for step in range(5):
        arrays = data(step)
        x, w, g = (fp8(*z) for z in zip(arrays, pasts, (E4M3, E4M3, E5M2), strict=True))
        for ours, exact in zip(layer(*arrays), (x @ w, g @ w.T, x.T @ g), strict=True):
            assert_close(ours, exact)
        for past, a, history in zip(pasts, arrays, layer.histories, strict=True):
            past.append(np.abs(a).max())
            newest_first = [*past[::-1], 0, 0][:history_length]
            np.testing.assert_array_equal(history, newest_first)


def test_full_histories_give_the_same_numbers_without_a_cold_start():
    """So a run may use the program without it once every history has a value."""
    layer, known = Layer(history=3), Layer(history=3, cold_start=False)
    layer(*data(0))
    known.state = layer.state
    for step in (1, 2):
        expected, ours = (one(*data(step)) for one in (layer, known))
        jax.tree.map(np.testing.assert_array_equal, (ours, known.state), (expected, layer.state))


def test_a_kernel_quantized_again_for_the_backward_pass_takes_its_own_history():
    """In a recipe with another format of the kernel for the input's gradient than for the output."""
    recipe = make_recipe("fp8_delayed", history=3, residuals="full")
    e5m2 = recipe.dlhs[0]
    layer = fixtures.Layer(dataclasses.replace(recipe, dlhs=(e5m2, e5m2)))
    state, step = layer.state, jax.jit(layer.step)
    (past_x, past_w, past_g), (x, w, g) = data(0), data(1)
    # By the history of so small an input, the kernel would saturate.
    *_, state = step(state, past_x * np.float32(2.0**-20), past_w, past_g)
    _, dx, _, _ = step(state, x, w, g)

    def rounded(a, past):
        scale = np.abs(past).max() / E5M2[0]
        return np.clip(a / scale, -E5M2[0], E5M2[0]).astype(E5M2[1]).astype(np.float64) * scale

    expected = rounded(g, past_g) @ rounded(w, past_w).T
    assert_close(dx, expected)


def test_five_steps_equal_flax():
    layer = Layer(history=3, cold_start=False)
    scales, histories = [jnp.ones(1)] * 3, [jnp.zeros(3)] * 3

    @jax.jit
    def flax_step(x, w, g, scales, histories):
        def product(x, w, scales, histories):
            return fp8_ops.fp8_scaled_dot_general(
                x,
                w,
                DIMS,
                preferred_element_type=jnp.float32,
                lhs_scale=scales[0],
                rhs_scale=scales[1],
                grad_scale=scales[2],
                lhs_amax_history=histories[0],
                rhs_amax_history=histories[1],
                grad_amax_history=histories[2],
                quantize_compute_type=jnp.float32,
            )

        y, pull = jax.vjp(product, x, w, scales, histories)
        return y, *pull(g)

    for step in range(5):
        arrays = data(step)
        *theirs, scales, histories = flax_step(*arrays, scales, histories)
        if step:  # at step 0 a scale of 1 flushes the gradients in both
            assert all(np.any(a) for a in theirs)
        for ours, exact in zip(layer(*arrays), theirs, strict=True):
            assert_close(ours, exact)
        for ours, exact in zip(layer.histories, histories, strict=True):
            np.testing.assert_array_equal(ours, exact[jnp.array([0, 2, 1])])  # theirs is a ring


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_non_finite_data_does_not_enter_and_the_next_step_is_normal(bad):
    layer, clean = Layer(history=4), Layer(history=4)
    layer(*data(0)), clean(*data(0))
    spoiled = data(1)
    for a in spoiled:
        a[0, 0] = bad
    layer(*spoiled)
    for ours, expected in zip(layer.histories, clean.histories, strict=True):
        np.testing.assert_array_equal(ours, [0, expected[0], 0, 0])
    for ours, exact in zip(layer(*data(2)), clean(*data(2)), strict=True):
        np.testing.assert_array_equal(ours, exact)


def test_in_the_first_step_non_finite_data_gives_a_non_finite_result():
    x, w, g = data(0)
    x[0, 0] = np.inf
    y, _, dw = Layer(history=4)(x, w, g)
    assert not np.any(np.isfinite(y)) and not np.any(np.isfinite(dw))


@pytest.mark.parametrize(
    "recipe, options",
    [
        ("fp8_delayed", {}),
        ("fp8_delayed", dict(cold_start=False)),
        ("fp8_gaudi", {}),
        ("fp8_gaudi", dict(cold_start=False)),
        ("fp8_current", dict(granularity="unscaled")),
        ("simulate", dict(granularity="unscaled")),
    ],
)
def test_with_older_scales_or_none_non_finite_data_gives_a_non_finite_product(recipe, options):
    """It saturates in the cast, and neither a gate nor the loss scale would see it."""
    layer = fixtures.Layer(make_recipe(recipe, history=4, **options))
    step = jax.jit(layer.step)
    *_, state = step(layer.state, *data(0))
    assert all(np.all(np.isfinite(result)) for result in step(state, *data(1))[:3])
    y, dw = 0, 2
    for tensor, product in enumerate((y, y, dw)):
        for value in (np.inf, np.nan):
            tensors = data(1)
            tensors[tensor][0, 0] = value
            assert not np.all(np.isfinite(step(state, *tensors)[product])), (tensor, value)


@pytest.mark.parametrize("cold_start, alive", [(True, 4), (False, 0)])
def test_cold_start_reaches_every_layer_in_the_first_step(cold_start, alive):
    """Gradients of 1e-7 are below E5M2's smallest number; with a first scale of 1 nothing would learn."""
    recipe = make_recipe("fp8_delayed", history=4, cold_start=cold_start)
    rng = np.random.default_rng(0)
    kernels = [rng.normal(size=(32, 32)).astype(np.float32) / 6 for _ in range(4)]

    def loss(kernels, x):
        for kernel in kernels:
            x = QuantDot(recipe)(x, kernel, DIMS)
        return 1e-7 * jnp.sum(x)

    grads = jax.jit(jax.grad(loss))(kernels, rng.normal(size=(8, 32)).astype(np.float32))
    assert sum(bool(np.all(np.any(g, axis=1))) for g in grads) == alive


def test_a_history_of_one_holds_the_most_recent_amax():
    layer = Layer(history=1)
    for step in range(3):
        layer(*data(step))
        for history, a in zip(layer.histories, data(step), strict=True):
            np.testing.assert_array_equal(history, [np.abs(a).max()])


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_only_a_history_of_zeros_is_cold(size):
    """A history of small numbers is not, although amax values of gradients are below 1 as a rule."""
    history, amax = jnp.float32([0, size, size / 2]), jnp.float32(5 * size)
    for cold_start in (True, False):
        assert delayed.delayed_amax(history, amax, cold_start) == history.max()
        assert delayed.delayed_amax(0 * history, amax, cold_start) == (amax if cold_start else 0)
    np.testing.assert_array_equal(delayed.push(history, amax), [amax, 0, history[1]])
    np.testing.assert_array_equal(delayed.push(history, jnp.inf * amax), [0, 0, history[1]])


def test_the_recipe_of_gaudi_is_the_published_one():
    """Fishman et al.: factors 2^⌊log2(largest / amax)⌋ of earlier steps, E4M3 to 240, E5M2 × E5M2."""
    rng = np.random.default_rng(0)
    layer = fixtures.Layer(make_recipe("fp8_gaudi", history=2))
    first, (x, w, g) = (
        [rng.normal(size=s).astype(np.float32) for s in ((32, 64), (64, 48), (32, 48))] for _ in range(2)
    )
    g = np.sign(g) * 2.0 ** np.round(np.log2(np.abs(g)).clip(-8, 0)).astype(np.float32)  # E5M2 holds these
    step = jax.jit(layer.step)
    *_, state = step(layer.state, *first)
    y, dx, dw, _ = step(state, x, w, g)

    def rounded(array, history, dtype):
        scale = 2.0 ** np.floor(np.log2(float(ml_dtypes.finfo(dtype).max) / np.abs(history).max()))
        largest = float(ml_dtypes.finfo(dtype).max)
        return np.clip(array * scale, -largest, largest).astype(dtype).astype(np.float64) / scale

    forward, backward = (
        [rounded(a, b, dtype) for a, b in ((x, first[0]), (w, first[1]))]
        for dtype in (ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2)
    )
    gradient = rounded(g, first[2], ml_dtypes.float8_e5m2)
    np.testing.assert_array_equal(gradient, g)
    expected = forward[0] @ forward[1], g @ backward[1].T, backward[0].T @ g
    for ours, product in zip((y, dx, dw), expected, strict=True):
        # Sums of up to 64 terms in float32.
        np.testing.assert_allclose(ours, product, rtol=0, atol=64 * 2.0**-24 * np.abs(product).max())
