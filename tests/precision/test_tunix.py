"""A model of another library, as it is: a small Llama of Tunix, whose MLPs are `nnx.Linear`.

Tunix is not among the packages for development, because it brings many others along:
`pip install google-tunix`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlp.precision import inject, make_recipe
from maxlp.precision.flax_layers import mixed_precision

llama3 = pytest.importorskip("tunix.models.llama3.model", reason="needs pip install google-tunix")
pytestmark = pytest.mark.full

LENGTH = 32
LINEARS = [f"layers/{i}/mlp/{name}_proj" for i in range(2) for name in ("down", "gate", "up")]


@pytest.fixture(autouse=True)
def as_it_is():
    """It adds arrays of different ranks, which our own tests refuse."""
    with jax.numpy_rank_promotion("allow"):
        yield


def make_model():
    """Two layers. Tunix begins with kernels of zeros for the MLPs, and expects to load others."""
    config = llama3.ModelConfig(
        num_layers=2,
        vocab_size=64,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    model, rngs = llama3.Llama3(config, rngs=nnx.Rngs(0)), nnx.Rngs(1)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Linear):
            module.kernel[...] = nnx.initializers.lecun_normal()(rngs.params(), module.kernel.shape)
    return model


def loss_and_logits(model):
    tokens = jax.random.randint(jax.random.key(2), (2, LENGTH), 0, 64)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (2, LENGTH, LENGTH))
    logits, _ = model(tokens, positions, None, mask)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean(), logits


gradients = nnx.jit(nnx.value_and_grad(loss_and_logits, has_aux=True))


def outputs(model):
    """Its logits, and all gradients of its parameters in one vector."""
    (_, logits), grads = gradients(model)
    leaves = jax.tree.leaves(nnx.to_pure_dict(grads))
    return np.asarray(logits, np.float32), np.concatenate([np.ravel(np.asarray(g)) for g in leaves])


def errors(model):
    """Relative errors of logits and gradients, against the model in float32."""
    pairs = zip(outputs(model), outputs(make_model()), strict=True)
    return [np.linalg.norm(got - want) / np.linalg.norm(want) for got, want in pairs]


def test_its_linear_layers_are_injected_and_a_format_that_rounds_nothing_changes_nothing():
    """Its attention and its head multiply by `Einsum`, a class of its own."""
    model = make_model()
    exact = make_recipe("simulate", format="e8m23", granularity="unscaled")
    assert inject(model, exact) == dict.fromkeys(LINEARS, "simulate")
    assert errors(model) == [0, 0]


@pytest.mark.parametrize(
    ("recipe", "of_logits", "of_gradients"),
    [
        ("bf16", 2.0**-6, 2.0**-6),
        ("int8_switchback", 0.05, 0.05),
        ("fp8_current", 0.15, 0.2),
        ("mxfp8", 0.15, 0.2),
    ],
)
def test_logits_and_gradients_are_those_of_float32_but_for_rounding(recipe, of_logits, of_gradients):
    """Three matmuls of each layer follow one another, each with an error of 4 % in E4M3."""
    model = make_model()
    mixed_precision(model)
    table = inject(model, make_recipe(recipe))
    assert set(table.values()) == {"high precision" if recipe == "bf16" else recipe}
    logits, grads = errors(model)
    print(f"{recipe}: logits {logits:.3f}, gradients {grads:.3f}")
    assert 1e-3 < logits < of_logits and 1e-3 < grads < of_gradients


def test_it_trains_in_fp8():
    model = make_model()
    mixed_precision(model)
    inject(model, make_recipe("fp8_current"))
    optimizer, losses = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), []
    for _ in range(10):
        (loss, _), grads = gradients(model)
        optimizer.update(model, grads)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
