"""Block scales where the number of tokens is no multiple of a block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.precision import make_recipe
from tests.precision import fixtures


@pytest.mark.parametrize("residuals", ["full", "quantized"])
def test_tokens_are_padded_with_zeros_in_the_weight_gradient(residuals):
    """20 tokens give the numbers of 32 of which the last 12 are zero, to the bit."""
    rng = np.random.default_rng(0)
    layer = fixtures.Layer(make_recipe("mxfp8", residuals=residuals))
    step = jax.jit(lambda *arrays: layer.step(layer.state, *arrays)[:3])
    kernel = jnp.asarray(rng.normal(size=(64, 96)), jnp.bfloat16)
    x, g = (jnp.asarray(rng.normal(size=(2, 20, dim)), jnp.bfloat16) for dim in (64, 96))
    padded = (jnp.pad(a, ((0, 0), (0, 12), (0, 0))) for a in (x, g))
    y, dx, dkernel = step(x, kernel, g)
    padded_x, padded_g = padded
    expected_y, expected_dx, expected = step(padded_x, kernel, padded_g)
    np.testing.assert_array_equal(y, expected_y[:, :20])
    np.testing.assert_array_equal(dx, expected_dx[:, :20])
    np.testing.assert_array_equal(dkernel, expected)
    exact = np.einsum("bsk,bsn->kn", *(np.asarray(a, np.float64) for a in (x, g)))
    assert np.linalg.norm(np.float64(dkernel) - exact) < 0.06 * np.linalg.norm(exact)
