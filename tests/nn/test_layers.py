"""The layers that families share, against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.core.train_step import jit_step
from maxlp.nn import layers
from maxlp.run.experiment import resolve_settings
from tests import composition
from tests.fixtures import walk_jaxpr

CONTRACTION = ((2,), (0,)), ((), ())  # (B, S, in) with (in, out)


def random(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def linear(**changes):
    how = dict(axes=("embed", "mlp"), std=0.5, dtype=jnp.float32, param_dtype=jnp.float32)
    return layers.Linear(64, 256, rngs=nnx.Rngs(0), **how | changes)


# --- matmuls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "result", "rtol"),
    # Sums of up to 8 terms in float32, and a few roundings to bfloat16.
    [
        ("float32", "float32", 2.0**-20),
        ("bfloat16", "bfloat16", 2.0**-7),
        ("bfloat16", "float32", 2.0**-7),
    ],
)
def test_gradients_of_dot_general_are_those_of_jax_in_the_operands_dtype(dtype, result, rtol):
    x, kernel, g = random(2, 3, 8, dtype=dtype), random(8, 5, dtype=dtype), random(2, 3, 5, dtype=result)

    def run(dot_general):
        def f(x, kernel):
            return dot_general(x, kernel, CONTRACTION, jnp.dtype(result))

        y, vjp = jax.vjp(f, x, kernel)
        return y, *vjp(g)

    for actual, expected in zip(run(layers.dot_general), run(_lax_dot_general), strict=True):
        assert actual.dtype == expected.dtype
        scale = float(jnp.max(jnp.abs(expected)))
        np.testing.assert_allclose(
            np.asarray(actual, np.float32), np.asarray(expected, np.float32), atol=rtol * scale
        )


def _lax_dot_general(x, kernel, dimension_numbers, preferred_element_type):
    return jax.lax.dot_general(x, kernel, dimension_numbers, preferred_element_type=preferred_element_type)


def test_linear_is_a_product_and_a_bias_in_its_dtype():
    plain, biased = linear(), linear(bias="mlp", bias_std=0.1)
    x = random(2, 3, 64)
    # Sums of 64 products of up to about 3 in float32.
    np.testing.assert_allclose(plain(x), x @ plain.kernel[...], rtol=1e-6, atol=1e-5)
    bias = layers.over_last_dim(biased.bias[...], x)
    np.testing.assert_allclose(biased(x), x @ biased.kernel[...] + bias, rtol=1e-6, atol=1e-5)
    low = linear(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, bias="mlp")
    assert low.kernel.dtype == low.bias.dtype == low(x).dtype == jnp.bfloat16
    assert low(x, preferred_element_type=jnp.float32).dtype == jnp.float32


def test_linear_has_the_given_standard_deviations():
    made = linear(std=0.5, draw=layers.uniform, bias="mlp", bias_std=0.25)
    # The standard deviation of 256 uniform numbers has a standard error of 2.8 %.
    np.testing.assert_allclose([np.std(made.kernel[...]), np.std(made.bias[...])], [0.5, 0.25], rtol=0.1)
    assert np.max(np.abs(linear(std=1.0).kernel[...])) <= 3


def test_precision_is_injected_by_replacing_dot_general():
    def doubled(x, kernel, dimension_numbers, preferred_element_type):
        return 2 * layers.dot_general(x, kernel, dimension_numbers, preferred_element_type)

    made, x = linear(), random(1, 2, 64)
    expected = 2 * made(x)
    made.dot_general = nnx.static(doubled)
    np.testing.assert_array_equal(made(x), expected)


# --- embedding and norms --------------------------------------------------------------------------------


def test_an_embedding_looks_up_rows_and_is_the_kernel_of_tied_logits():
    how = dict(std=1.0, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    embed = layers.Embed(16, 8, rngs=nnx.Rngs(0), **how)
    ids = jnp.array([[3, 0, 3], [15, 7, 1]])
    x = embed(ids)
    assert x.dtype == jnp.bfloat16
    np.testing.assert_array_equal(x, embed.embedding[...].astype(jnp.bfloat16)[ids])
    logits = embed.attend(x)
    assert logits.shape == (2, 3, 16) and logits.dtype == jnp.float32
    np.testing.assert_array_equal(jnp.argmax(logits, -1), ids)


def test_the_gradients_of_a_frequent_token_are_summed_in_float32():
    # A bfloat16 sum of ones stops at 256, where the next number is 258.
    ids = jnp.zeros((2, 2048), jnp.int32).at[1, 5].set(3)

    def total(table):
        return jnp.sum(layers.take_rows(8, table, ids))

    for dtype in (jnp.bfloat16, jnp.float32):
        gradient = jax.grad(total)(jnp.ones((8, 4), dtype))
        assert gradient.dtype == dtype
        expected = np.zeros((8, 4)) + np.array([4095, 0, 0, 1, 0, 0, 0, 0])[:, None]
        np.testing.assert_array_equal(gradient, expected.astype(dtype))


@pytest.mark.parametrize("kind", [layers.RMSNorm, layers.LayerNorm])
def test_norms_equal_their_definitions_and_compute_in_float32(kind):
    norm, x = kind(64, eps=1e-5, param_dtype=jnp.float32), 100 + random(2, 3, 64)
    norm.scale[...] = 1 + random(64, seed=1)
    expected = np.asarray(x, np.float64)
    if kind is layers.LayerNorm:
        norm.bias[...] = random(64, seed=2)
        expected = expected - expected.mean(-1, keepdims=True)
    expected = (
        expected / np.sqrt((expected**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(norm.scale[...])
    )
    if kind is layers.LayerNorm:
        expected = expected + np.asarray(norm.bias[...])
    # In float32 a mean of numbers near 100 is off by some 1e-5, and the gain is up to 3.
    np.testing.assert_allclose(norm(x), expected, rtol=1e-5, atol=1e-4)
    rounded = x.astype(jnp.bfloat16)
    assert norm(rounded).dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm(rounded), norm(rounded.astype(jnp.float32)).astype(jnp.bfloat16))


def test_layer_scale_is_a_gain_of_each_channel():
    scale, x = layers.LayerScale(4, 0.1, param_dtype=jnp.float32), random(2, 3, 4)
    np.testing.assert_allclose(scale(x), 0.1 * x, rtol=1e-6)  # products in float32
    scale.scale[...] = jnp.arange(4.0)
    np.testing.assert_allclose(scale(x), np.asarray(x) * np.arange(4.0), rtol=1e-6)


def test_gradients_of_float32_logits_are_multiplied_in_bfloat16():
    x, kernel = jnp.ones((2, 3, 8), jnp.bfloat16), jnp.ones((8, 16), jnp.bfloat16)

    def loss(x, kernel):
        return jnp.sum(layers.dot_general(x, kernel, (((2,), (0,)), ((), ())), jnp.float32))

    eqns = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, kernel).eqns
    matmuls = [e for e in eqns if e.primitive.name == "dot_general"]
    assert len(matmuls) == 2
    assert {v.aval.dtype for e in matmuls for v in e.invars} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("kind", [layers.RMSNorm, layers.LayerNorm])
def test_epsilon_is_added_to_the_mean_square(kind):
    """It shows in small activations alone."""
    x = np.asarray(random(2, 8)) * 1e-3
    centered = x - x.mean(-1, keepdims=True) if kind is layers.LayerNorm else x
    want = centered / np.sqrt(np.mean(centered**2, axis=-1, keepdims=True) + 1e-5)
    norm = kind(8, eps=1e-5, param_dtype=jnp.float32)
    np.testing.assert_allclose(norm(jnp.asarray(x)), want, rtol=1e-6, atol=1e-7)  # float32


# --- dtypes of a whole step -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", composition.FAMILIES)
def test_sums_and_norms_of_a_bfloat16_step_are_float32(family):
    """Forward, backward and optimizer; only elementwise activations and sums of two gradients are not."""
    run = resolve_settings(composition.settings(family, ("pure_bf16",)), jax.devices()[:1])
    with jax.set_mesh(run.mesh):
        graphdef, abstract = run.abstract_state()
        traced = jit_step(run.step, graphdef, abstract, run.mesh).trace(abstract, run.abstract_batch())
    eqns = [e for e in walk_jaxpr(traced.jaxpr.jaxpr) if e.primitive.name in ("reduce_sum", "rsqrt", "log")]
    assert {e.primitive.name for e in eqns} >= {"reduce_sum", "rsqrt"}
    narrow = [e for e in eqns if e.invars[0].aval.dtype.itemsize == 2]
    assert not narrow, [str(e) for e in narrow]
