"""Block scales where the number of tokens is no multiple of a block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.families.clip.model import TextTower
from maxlp.precision import inject, make_recipe
from tests.precision.fixtures import Layer


@pytest.mark.parametrize("residuals", ["full", "quantized"])
def test_tokens_are_padded_with_zeros_in_the_weight_gradient(residuals):
    """20 tokens give the numbers of 32 of which the last 12 are zero, to the bit."""
    rng = np.random.default_rng(0)
    layer = Layer(make_recipe("mxfp8", residuals=residuals))
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


def test_a_clip_text_tower_of_20_tokens_trains():
    """Its features approach a target."""
    sizes = dict(vocab_size=64, max_len=20, width=32, num_layers=1, num_heads=2, mlp_dim=64, embed_dim=32)
    how = dict(causal=True, pool="argmax", eos_id=None, proj_bias=False, layer_scale=None, qk_norm=False)
    run = dict(act="gelu", norm_eps=1e-5, init="clip", attention="xla", scan_layers=True, remat="none")
    dtypes = dict(dtype=jnp.dtype("bfloat16"), param_dtype=jnp.dtype("float32"))
    tower = nnx.eval_shape(lambda: TextTower(**sizes, **how, **run, **dtypes, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    text_BS = rng.integers(0, 64, (8, 20), np.int32)
    target_BE = rng.normal(size=(8, 32)).astype(np.float32)

    table = inject(tower, make_recipe("mxfp8"))
    assert set(table) == {*(f"layers/attn/{p}_proj" for p in "qkvo"), "layers/mlp/up_proj",
                          "layers/mlp/down_proj", "proj"}  # fmt: skip
    graphdef, params = nnx.split(tower)
    params = jax.tree.map(lambda p: (0.2 * rng.normal(size=p.shape)).astype(np.float32), params)

    def loss(params):
        return jnp.mean(jnp.square(nnx.merge(graphdef, params)(text_BS) - target_BE))

    @jax.jit
    def step(params):
        value, grads = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - g, params, grads)

    losses = []
    for _ in range(5):
        value, params = step(params)
        losses.append(float(value))
    assert np.all(np.diff(losses) < 0) and losses[-1] < 0.85 * losses[0]
