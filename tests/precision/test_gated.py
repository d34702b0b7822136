"""SiLU with the gradient of quantized gates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.families.llama.model import Mlp
from maxlp.precision import gated
from tests.fixtures import NO_EXCESS_PRECISION, make_llama, precision_config

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-38, -1e-38, 3e38, -3e38]


@pytest.mark.parametrize("options", [{}, NO_EXCESS_PRECISION], ids=["default", "strict"])
def test_the_gradient_is_that_of_jax_to_the_bit(options):
    """In a program too, where XLA may keep float32 between bfloat16 operations."""
    rng = np.random.default_rng(0)
    gate = np.concatenate([3 * rng.normal(size=30_000), 10.0 ** rng.uniform(-30, 30, 999), SPECIAL])
    arrays = [jnp.float32(a).astype(jnp.bfloat16) for a in (gate, *rng.normal(size=(2, gate.size)))]

    def product_and_gradients(silu):
        def both(gate, up, g):
            h, pull = jax.vjp(lambda gate, up: silu(gate) * up, gate, up)
            return h, *pull(g)

        return jax.jit(both).lower(*arrays).compile(options)(*arrays)

    for ours, expected in zip(*map(product_and_gradients, (gated._silu, jax.nn.silu)), strict=True):
        np.testing.assert_array_equal(*(a.astype(jnp.float32) for a in (ours, expected)))


@pytest.mark.parametrize(
    "config, silu",
    [
        (None, jax.nn.silu),
        (precision_config(rules=(("*/up_proj", "fp8_delayed"),)), jax.nn.silu),
        (precision_config("fp8_rowwise"), jax.nn.silu),
        (precision_config("fp8_gaudi"), jax.nn.silu),
        (precision_config("fp8_delayed", last_blocks=1), gated.silu),
    ],
    ids=["bf16", "another matmul", "rows", "simulated", "FP8"],
)
def test_gates_whose_gradient_is_fp8_with_one_scale_have_it(config, silu):
    made = nnx.eval_shape(lambda: make_llama(config, num_layers=3)(nnx.Rngs(0)))
    assert made.layers.mlp.silu is silu


def test_another_activation_stays(monkeypatch):
    monkeypatch.setattr(Mlp, "silu", staticmethod(jax.nn.gelu))
    made = nnx.eval_shape(lambda: make_llama(precision_config("fp8_delayed"), num_layers=3)(nnx.Rngs(0)))
    assert made.layers.mlp.silu is jax.nn.gelu
