"""A stack computes what its blocks compute one after another, also where some of them are not quantized."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.nn import layers, stack
from maxlp.precision import inject, make_recipe
from tests.nn.fixtures import MlpBlock

D, L = 8, 4


class Model(nnx.Module):
    """``ends``: blocks at the start and at the end that are not quantized; ``rules``: see `inject`."""

    def __init__(self, ends, rules=(), dim=D, num_layers=L, **how):
        rngs = nnx.Rngs(0)
        self.layers = stack.stack(lambda rngs: MlpBlock(rngs, dim), num_layers, rngs)
        self.how = nnx.static(dict(num_layers=num_layers, **how))
        recipe = make_recipe("fp8_delayed", history=2)
        rules = tuple((pattern, make_recipe("bf16")) for pattern in rules)
        inject(self, recipe, rules=rules, first_blocks=ends[0], last_blocks=ends[1])

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
    graphdef, leaves = nnx.split(model.layers)
    outs = []
    for i in range(L):
        block = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], leaves))
        for name in plain_layers(model, i):
            getattr(block, name).dot_general = layers.dot_general
        x_BSD, out = call(block, x_BSD, None, gains(L)[i])
        outs.append(out)
    return x_BSD, jnp.stack(outs)


def plain_layers(model, i):
    [plain] = (part.plain for part in model.layers.parts if part.start <= i < part.stop)
    return plain


def gradients(model, run, x_BSD):
    """(loss, outs), and the gradients of weights and input."""
    graphdef, params, state = nnx.split(model, nnx.Param, ...)
    state = nnx.to_pure_dict(state)

    def loss(params, x_BSD):
        y_BSD, outs = run(nnx.merge(graphdef, params, state), x_BSD)
        return jnp.sum(y_BSD * jnp.cos(jnp.arange(D))[None, None]), outs

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x_BSD)


@pytest.mark.parametrize(
    ("ends", "rules", "scan", "remat"),
    [
        pytest.param((1, 1), (), True, "block", marks=pytest.mark.full),
        ((2, 0), (), True, "none"),
        ((0, 2), (), False, "dots"),
        ((1, 0), ("layers/[12]/up_proj", "layers/3/*"), True, "none"),
    ],
)
def test_a_stack_equals_its_blocks_one_after_another(ends, rules, scan, remat):
    """Outputs and every layer's gradient."""
    model = Model(ends, rules, scan=scan, remat=remat)
    x_BSD = jax.random.normal(jax.random.key(1), (2, 4, D))
    (loss, outs), grads = gradients(model, lambda model, x: model(x), x_BSD)
    (expected_loss, expected_outs), expected = gradients(model, one_by_one, x_BSD)
    # Float32 in two programs; gradients have the roundings of eight matmuls.
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


def in_a_loop(stack_call, new_states=None):
    """A `Block.run_stack` that runs one layer after another."""
    _, *variables = nnx.split(stack_call.blocks, nnx.Param, ...)
    params, state = map(nnx.to_pure_dict, variables)
    x_BSD = stack_call.x
    for start, stop, plain in stack_call.parts:
        for i in range(start, stop):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], (params, state))
            x_BSD, new_state = stack_call.layer(x_BSD, *layer, plain)
            assert jax.tree.structure(new_state) == jax.tree.structure(layer[1])
            if new_states is not None:
                new_states.append(new_state)
    return x_BSD


@pytest.mark.parametrize("run_stack", [False, True])
def test_every_matmul_that_is_quantized_keeps_its_history(run_stack):
    """Also in a layer in which others are not."""
    blocks = Model((0, 0), ("layers/1/up_proj",)).layers
    x_BSD = jax.random.normal(jax.random.key(1), (2, 4, D))

    def run(blocks, x_BSD):
        how = dict(num_layers=L, scan=True, remat="none")
        return stack.apply_stack(blocks, x_BSD, lambda block, x, *_: (block(x), None), **how)

    def histories():
        layers = (blocks.up_proj, blocks.down_proj)
        return [np.asarray(layer.dot_general.input_amax_history[...]) for layer in layers]

    before, new_states = histories(), []
    if run_stack:
        blocks.run_stack = nnx.static(functools.partial(in_a_loop, new_states=new_states))
        run(blocks, x_BSD)
        new = jax.tree.map(lambda *leaves: np.stack(leaves), *new_states)
        after = [new[name]["dot_general"]["input_amax_history"] for name in ("up_proj", "down_proj")]
    else:
        nnx.jit(run)(blocks, x_BSD)
        after = histories()
    changed = [(new != old).any(axis=1).tolist() for new, old in zip(after, before, strict=True)]
    assert changed == [[True, False, True, True], [True, True, True, True]]


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
    np.testing.assert_allclose(actual, expected, rtol=1e-5)  # float32 in two programs
