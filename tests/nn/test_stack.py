"""A stack computes what its blocks compute one after another, also with unquantized blocks at its ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.nn import layers, stack
from maxlp.precision import inject, make_recipe

D, L = 8, 4


class Block(stack.Block):
    def __init__(self, rngs, dim=D):
        sizes = dict(std=1.0, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs)
        self.up_proj = layers.Linear(dim, 2 * dim, axes=("embed", "mlp"), **sizes)
        self.down_proj = layers.Linear(2 * dim, dim, axes=("mlp", "embed"), **sizes)

    def __call__(self, x_BSD):
        return x_BSD + self.down_proj(jax.nn.relu(self.up_proj(x_BSD)))


class Model(nnx.Module):
    """``ends``: unquantized blocks at the start and at the end."""

    def __init__(self, ends, dim=D, num_layers=L, **how):
        rngs = nnx.Rngs(0)
        self.layers = stack.stack(lambda rngs: Block(rngs, dim), num_layers, rngs)
        self.how = nnx.static(dict(num_layers=num_layers, **how))
        inject(self, make_recipe("fp8_delayed", history=2), first_blocks=ends[0], last_blocks=ends[1])

    def __call__(self, x_BSD):
        gain_L = gains(self.how["num_layers"])
        return stack.apply_stack(self.layers, x_BSD, call, None, gain_L, **self.how)


def gains(num_layers):
    """An input of each layer, as a cache is in generation."""
    return jnp.linspace(0.5, 1.5, num_layers)


def call(block, x_BSD, _, gain):
    return gain * block(x_BSD), jnp.sum(x_BSD)


def one_by_one(model, x_BSD):
    """The blocks of a stack, sliced out of it."""
    first, last = model.layers.unquantized_blocks
    graphdef, leaves = nnx.split(model.layers)
    outs = []
    for i in range(L):
        block = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], leaves))
        if not first <= i < L - last:
            block.up_proj.dot_general = block.down_proj.dot_general = layers.dot_general
        x_BSD, out = call(block, x_BSD, None, gains(L)[i])
        outs.append(out)
    return x_BSD, jnp.stack(outs)


def gradients(model, run, x_BSD):
    """(loss, outs), and the gradients of weights and input."""
    graphdef, params, state = nnx.split(model, nnx.Param, ...)
    state = nnx.to_pure_dict(state)

    def loss(params, x_BSD):
        y_BSD, outs = run(nnx.merge(graphdef, params, state), x_BSD)
        return jnp.sum(y_BSD * jnp.cos(jnp.arange(D))[None, None]), outs

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x_BSD)


@pytest.mark.parametrize(
    ("ends", "scan", "remat"),
    [
        pytest.param((1, 1), True, "block", marks=pytest.mark.full),
        ((2, 0), True, "none"),
        ((0, 2), False, "dots"),
    ],
)
def test_a_stack_equals_its_blocks_one_after_another(ends, scan, remat):
    """Outputs and every layer's gradient."""
    model = Model(ends, scan=scan, remat=remat)
    x_BSD = jax.random.normal(jax.random.key(1), (2, 4, D))
    (loss, outs), grads = gradients(model, lambda model, x: model(x), x_BSD)
    (expected_loss, expected_outs), expected = gradients(model, one_by_one, x_BSD)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(outs, expected_outs, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert np.all(np.any(theirs, axis=tuple(range(1, theirs.ndim)))), "a layer without a gradient"
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.full
def test_unquantized_blocks_copy_neither_weights_nor_gradients():
    """The temporary memory of a step that updates weights in place; there is little but weights."""

    def temporaries(ends):
        model = Model(ends, dim=128, num_layers=16, scan=True, remat="block")
        graphdef, params, state = nnx.split(model, nnx.Param, ...)
        state = nnx.to_pure_dict(state)

        def loss(params, x_BSD):
            return jnp.sum(nnx.merge(graphdef, params, state)(x_BSD)[0])

        def update(params, x_BSD):
            return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, x_BSD))

        done = jax.jit(update, donate_argnums=0).lower(params, jnp.ones((1, 1, 128))).compile()
        return done.memory_analysis().temp_size_in_bytes, sum(p.nbytes for p in jax.tree.leaves(params))

    (without, weights), (with_ends, _) = temporaries((0, 0)), temporaries((1, 1))
    assert with_ends < without + 0.5 * weights


def in_a_loop(stack_call):
    """A `Block.run_stack` that runs one layer after another."""
    _, *variables = nnx.split(stack_call.blocks, nnx.Param, ...)
    params, state = map(nnx.to_pure_dict, variables)
    x_BSD = stack_call.x
    for i in range(stack_call.num_layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], (params, state))
        x_BSD, new_state = stack_call.layer(x_BSD, *layer, False)
        assert jax.tree.structure(new_state) == jax.tree.structure(layer[1])
    return x_BSD


def test_run_stack_replaces_the_scan_over_layers():
    """A train step may run the layers itself; it gets all that `apply_stack` would use."""
    graphdef, variables = nnx.split(Model((0, 0)))

    def output(run_stack, variables, x_BSD):
        blocks = nnx.merge(graphdef, variables).layers
        blocks.run_stack = nnx.static(run_stack)
        how = dict(num_layers=L, scan=True, remat="none")
        return stack.apply_stack(blocks, x_BSD, lambda block, x, *_: (block(x), None), **how)[0]

    x_BSD = jax.random.normal(jax.random.key(1), (2, 4, D))
    expected, actual = (jax.jit(output, static_argnums=0)(f, variables, x_BSD) for f in (None, in_a_loop))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
