import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.nn.layers import dot_general
from maxlp.numerics import formats
from maxlp.numerics.quantized import dequantize, quantize
from maxlp.precision import make_recipe, smooth_swiglu
from maxlp.precision.dot import QuantDot
from maxlp.precision.fold import fold
from maxlp.precision.recipes import Recipe

DIMS = (((1,), (0,)), ((), ()))
FORMS = ("none", "channel", "balanced", "token")
ALIGNED = 7  # the channel whose two branches are the same vector
MAGNITUDES = (1, 20, 80, 320)  # of that vector


def network(magnitude, features=512, width=128, tokens=256):
    """Input and the three kernels of a SwiGLU, float32."""
    rng = np.random.default_rng(0)
    x, gate, up, down = (
        rng.normal(size=shape).astype(np.float32) / np.float32(np.sqrt(fan_in))
        for shape, fan_in in (
            ((tokens, width), 1),
            ((width, features), width),
            ((width, features), width),
            ((features, width), features),
        )
    )
    gate[:, ALIGNED] = up[:, ALIGNED] = magnitude * gate[:, 0]
    # Not numpy arrays: their products would come from another library, which may sum in another order.
    return tuple(jnp.asarray(a) for a in (x, gate, up, down))


def product(x, gate, up):
    return jax.nn.silu(x @ gate) * (x @ up)


@pytest.mark.parametrize("form", ["channel", "balanced", "token"])
def test_the_function_and_its_gradients_are_unchanged_to_the_bit(form):
    """Powers of two round nothing, so both sides round alike where their sums have the same order.

    JAX's own gradient of a kernel, (gᵀ x)ᵀ, has another order on some CPUs.
    """
    x, gate, up, down = network(16)
    h = product(x, gate, up).at[:, 3].set(0)  # an all-zero channel too
    dot = QuantDot(dataclasses.replace(Recipe("unquantized"), smooth=form))
    smooth, pull = jax.vjp(lambda h, w: dot(h, w, DIMS), h, down)
    plain, pull_plain = jax.vjp(lambda h, w: dot_general(h, w, DIMS, jnp.float32), h, down)
    np.testing.assert_array_equal(smooth, plain)
    g = jnp.asarray(np.random.default_rng(1).normal(size=plain.shape), jnp.float32)
    for ours, exact in zip(pull(g), pull_plain(g), strict=True):
        np.testing.assert_array_equal(ours, exact)
    if form != "token":
        s = smooth_swiglu.factors(h, down, form)
        assert len(np.unique(s)) > 2 and np.all(np.frexp(np.asarray(s))[0] == 0.5)
        folded_up, folded_down = fold(up, down, s)
        np.testing.assert_array_equal(product(x, gate, folded_up).at[:, 3].set(0), h / s[None])
        folded = product(x, gate, folded_up).at[:, 3].set(0) @ folded_down
        np.testing.assert_array_equal(folded, plain)


def error_of_others(form, magnitude):
    """Relative error, under current scales, of the contribution of all channels but the aligned one."""
    x, gate, up, down = network(magnitude)
    h = product(x, gate, up)
    s = smooth_swiglu.factors(h, down, form) if form != "none" else jnp.float32(1)
    of_product, of_kernel = (s[None], s[:, None]) if s.ndim == 1 else (s, 1.0)

    def round_trip(a):
        return dequantize(quantize(a, formats.get("float8_e4m3fn"), "tensor", (0,)), a.dtype)

    others = np.arange(h.shape[1]) != ALIGNED
    rounded_h = round_trip(h / of_product) * of_product
    rounded_down = round_trip(down * of_kernel) / of_kernel
    ours = rounded_h[:, others] @ rounded_down[others]
    exact = h[:, others] @ down[others]
    return np.linalg.norm(ours - exact) / np.linalg.norm(exact)


def error_after_alignment(form, magnitude):
    """Relative error of the output under delayed scaling when a channel aligned since the last step."""
    dot = QuantDot(smooth_swiglu.smooth(make_recipe("fp8_delayed", history=1), form))
    for factor in (1, magnitude):
        x, gate, up, down = network(factor)
        h = product(x, gate, up)
        y = dot(h, down, DIMS)
    return np.linalg.norm(y - h @ down) / np.linalg.norm(h @ down)


def test_current_scales_lose_the_other_channels_and_the_balanced_form_keeps_them():
    errors = []
    for magnitude in MAGNITUDES:
        errors.append({form: error_of_others(form, magnitude) for form in FORMS})
        largest = jnp.max(product(*network(magnitude)[:3]))
        print(f"largest product {largest:.1e}:", *(f"{form} {e:.2g}" for form, e in errors[-1].items()))
    assert max(errors[0].values()) < 0.045
    assert {form for form, error in errors[-1].items() if error < 0.045} == {"balanced"}
    assert errors[-1]["none"] > 0.5


def test_delayed_scales_saturate_when_a_channel_aligns_and_smoothing_prevents_it():
    for magnitude in MAGNITUDES:
        lost = error_after_alignment("none", magnitude)
        print(f"magnitude {magnitude}, delayed: {lost:.2g}")
        assert lost > 0.9 or magnitude == 1
    assert error_after_alignment("channel", 32) < 0.05
    assert error_after_alignment("balanced", 32) < 0.05


def test_only_scales_that_smoothing_makes_jump_become_current():
    recipe = make_recipe("fp8_delayed")
    delayed = {form: smooth_swiglu.smooth(recipe, form).delayed for form in FORMS}
    assert delayed == {
        "none": ("input", "kernel", "output_grad"),
        "token": ("input", "kernel", "output_grad"),
        "channel": ("input", "output_grad"),
        "balanced": ("output_grad",),
    }


def test_the_balanced_form_divides_the_spread_between_product_and_kernel():
    """By powers of two, so each channel of one is within a factor of two of the geometric mean."""
    rng = np.random.default_rng(4)
    x, kernel = rng.normal(size=(32, 8)).astype(np.float32), rng.normal(size=(8, 16)).astype(np.float32)
    x *= 2.0 ** np.arange(-8, 8, 2, dtype=np.float32)
    kernel *= 2.0 ** np.arange(12, -12, -3, dtype=np.float32)[:, None]
    largest_x, largest_w = np.abs(x).max(axis=0), np.abs(kernel).max(axis=1)
    s = np.asarray(smooth_swiglu.factors(x, kernel, "balanced"))
    ratio = s / np.sqrt(largest_x / largest_w)
    assert np.all(np.log2(s) == np.round(np.log2(s))) and np.all((ratio >= 1) & (ratio < 2))
    ratio = np.asarray(smooth_swiglu.factors(x, kernel, "channel")) / largest_x
    assert np.all((ratio >= 1) & (ratio < 2))


@pytest.mark.parametrize("form", ["channel", "balanced", "token"])
def test_channels_and_tokens_of_zeros_are_not_scaled(form):
    """A kernel's row times the least factor would be flushed to zero, and with it a gradient."""
    x, kernel = (jnp.full(shape, 5.0).at[1].set(0.0) for shape in ((4, 4), (4, 8)))
    x = x.at[:, 2].set(0.0)
    s = np.asarray(smooth_swiglu.factors(x, kernel, form))
    zeros = [1] if form == "token" else [1, 2] if form == "balanced" else [2]
    assert np.all(s.ravel()[zeros] == 1)


@pytest.mark.parametrize("form", ["channel", "balanced", "token"])
def test_float16_holds_the_factors_of_its_largest_and_smallest_numbers(form):
    """Rounded up, 40,000 would be 2^16: infinity."""
    h = jnp.full((4, 8), 0.01, jnp.float16).at[:, 3].set(40_000).at[:, 5].set(2.0**-20)
    kernel = jnp.full((8, 4), 2.0**-8, jnp.float16).at[3].set(2.0**-16)
    dot = QuantDot(dataclasses.replace(Recipe("unquantized"), smooth=form))
    exact = np.asarray(h, np.float64) @ np.asarray(kernel, np.float64)
    # A few roundings to float16, by up to 2^-11 each.
    np.testing.assert_allclose(dot(h, kernel, DIMS), exact, rtol=2.0**-9)
