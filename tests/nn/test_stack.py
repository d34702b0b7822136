"""Stacks of blocks whose ends compute in other precision than what is between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.nn import layers
from maxlp.nn import stack as stacks
from maxlp.precision import inject, make_recipe

D, L = 8, 5


class Block(stacks.Block):
    def __init__(self, rngs, dim=D):
        sizes = dict(std=1.0, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs)
        self.up_proj = layers.Linear(dim, 2 * dim, axes=("embed", "mlp"), **sizes)
        self.down_proj = layers.Linear(2 * dim, dim, axes=("mlp", "embed"), **sizes)

    def __call__(self, x_BSD):
        return x_BSD + self.down_proj(jax.nn.relu(self.up_proj(x_BSD)))


class Stack(nnx.Module):
    def __init__(self, ends, dim=D, num_layers=L, **how):
        rngs = nnx.Rngs(0)
        self.layers = stacks.stack(lambda rngs: Block(rngs, dim), num_layers, rngs)
        self.how = nnx.static(dict(num_layers=num_layers, **how))
        inject(self, make_recipe("fp8_delayed", history=2), first_blocks=ends[0], last_blocks=ends[1])

    def __call__(self, x_BSD):
        call = lambda block, x, _, gain: (gain * block(x), jnp.sum(x))  # noqa: E731
        gain_L = gains(self.how["num_layers"])
        return stacks.apply_stack(self.layers, x_BSD, call, None, gain_L, **self.how)


def gains(num_layers):
    """Something of each layer, as a cache is in generation."""
    return jnp.linspace(0.5, 1.5, num_layers)


def one_by_one(model, x_BSD):
    """What a stack does, from blocks that are cut out of it."""
    first, last = model.layers.unquantized_blocks
    graphdef, leaves = nnx.split(model.layers)
    seen = []
    for i in range(L):
        block = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], leaves))
        if not first <= i < L - last:
            block.up_proj.dot_general = block.down_proj.dot_general = layers.dot_general
        seen.append(jnp.sum(x_BSD))
        x_BSD = gains(L)[i] * block(x_BSD)
    return x_BSD, jnp.stack(seen)


def gradients(model, run, x_BSD):
    """(loss, outs), and the gradients of weights and input."""
    graphdef, params, state = nnx.split(model, nnx.Param, ...)
    state = nnx.to_pure_dict(state)

    def loss(params, x_BSD):
        y_BSD, outs = run(nnx.merge(graphdef, params, state), x_BSD)
        return jnp.sum(y_BSD * jnp.cos(jnp.arange(D))), outs

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x_BSD)


@pytest.mark.parametrize(
    ("ends", "scan", "remat"),
    [((1, 1), True, "block"), ((2, 0), True, "none"), ((0, 2), False, "dots")],
)
def test_unquantized_blocks_are_blocks_one_after_another(ends, scan, remat):
    """Outputs and every layer's gradient."""
    model = Stack(ends, scan=scan, remat=remat)
    x_BSD = jax.random.normal(jax.random.key(1), (2, 4, D))
    (loss, outs), grads = gradients(model, lambda model, x: model(x), x_BSD)
    (expected_loss, expected_outs), expected = gradients(model, one_by_one, x_BSD)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(outs, expected_outs, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert np.all(np.any(theirs, axis=tuple(range(1, theirs.ndim)))), "a layer without a gradient"
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())


def test_unquantized_blocks_copy_neither_weights_nor_gradients():
    """Temporaries of a step that updates weights in place, where these are nearly all that there is."""

    def temporaries(ends):
        model = Stack(ends, dim=128, num_layers=16, scan=True, remat="block")
        graphdef, params, state = nnx.split(model, nnx.Param, ...)
        state = nnx.to_pure_dict(state)

        def update(params, x_BSD):
            loss = lambda params: jnp.sum(nnx.merge(graphdef, params, state)(x_BSD)[0])  # noqa: E731
            return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

        done = jax.jit(update, donate_argnums=0).lower(params, jnp.ones((1, 1, 128))).compile()
        return done.memory_analysis().temp_size_in_bytes, sum(p.nbytes for p in jax.tree.leaves(params))

    (without, weights), (with_ends, _) = temporaries((0, 0)), temporaries((1, 1))
    assert with_ends < without + 0.5 * weights
