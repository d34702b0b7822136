"""Models made of Flax's own layers."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlp.precision import inject, make_recipe
from maxlp.precision.flax_layers import mixed_precision
from tests.fixtures import walk_jaxpr

EXACT = make_recipe("simulate", format="e8m23", granularity="unscaled")  # rounds nothing
FP8 = make_recipe("fp8_current")


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(16, 64, rngs=rngs)
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.out = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.hidden(x))))


class Block(nnx.Module):
    """One of Flax's transformer blocks: attention of `LinearGeneral`, an MLP of `Einsum`."""

    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.up = nnx.Einsum("BSD,DGF->BSGF", (32, 2, 64), (2, 64), rngs=rngs)
        self.down = nnx.Einsum("...F,DF->...D", (32, 64), rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        up = self.up(self.norm(x))
        return x + self.down(nnx.silu(up[:, :, 0]) * up[:, :, 1])


def gradients(model, x):
    def loss(model):
        return jnp.mean(jnp.square(model(x).astype(jnp.float32) - 1))

    return nnx.jit(nnx.value_and_grad(loss))(model)


@pytest.mark.full
def test_an_mlp_trains_in_fp8_on_bfloat16():
    model, x = Mlp(nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (32, 16))
    mixed_precision(model)
    assert inject(model, FP8) == {"hidden": "fp8_current", "out": "fp8_current"}
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = []
    for _ in range(20):
        loss, grads = gradients(model, x)
        optimizer.update(model, grads)
        losses.append(float(loss))
    assert losses[-1] < 0.3 * losses[0]
    assert model.hidden.kernel.dtype == jnp.float32 and model(x).dtype == jnp.bfloat16


def test_every_matmul_of_a_block_is_quantized_and_computes_the_same():
    plain, exact, fp8 = (Block(nnx.Rngs(0)) for _ in range(3))
    paths = {*(f"attention/{name}" for name in ("query", "key", "value", "out")), "up", "down"}
    assert set(inject(exact, EXACT)) == set(inject(fp8, FP8)) == paths
    x = jax.random.normal(jax.random.key(1), (2, 8, 32))
    want, want_grads = gradients(plain, x)
    got, grads = gradients(exact, x)
    # Sums of up to 64 terms in float32, in another order.
    np.testing.assert_allclose(got, want, rtol=64 * 2.0**-24)
    largest = max(float(jnp.abs(grad).max()) for grad in jax.tree.leaves(want_grads))
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=64 * 2.0**-24 * largest)
    got, grads = gradients(fp8, x)
    assert got != want and got == pytest.approx(float(want), rel=0.05)  # E4M3 has 3 bits
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        assert (
            np.linalg.norm(ours - theirs) < 0.2 * np.linalg.norm(theirs) + 1e-6
        )  # the keys' bias has none


def test_sums_norms_and_softmax_are_float32_and_matmuls_16_bits():
    model, x = Block(nnx.Rngs(0)), jnp.zeros((2, 8, 32))
    mixed_precision(model)
    structure, state = nnx.split(model)
    eqns = [*walk_jaxpr(jax.make_jaxpr(lambda s, x: nnx.merge(structure, s)(x))(state, x).jaxpr)]
    for eqn in eqns:
        if eqn.primitive.name in ("reduce_sum", "exp", "rsqrt", "reduce_max"):
            assert eqn.invars[0].aval.dtype == jnp.float32, eqn
    found = [str(e.invars[0].aval.dtype) for e in eqns if e.primitive.name == "dot_general"]
    assert sorted(found) == 6 * ["bfloat16"] + 2 * ["float32"], "all but the two of attention"


@pytest.mark.parametrize("convert, dtype", [(False, jnp.bfloat16), (True, jnp.float32)])
def test_a_softmax_that_a_module_calls_itself_has_the_dtype_of_its_input(convert, dtype):
    layer = nnx.Linear(16, 64, rngs=nnx.Rngs(0))
    mixed_precision(layer)

    def call(x):
        y = layer(x)
        return nnx.softmax(y.astype(jnp.float32) if convert else y)

    eqns = walk_jaxpr(jax.make_jaxpr(call)(jnp.zeros((2, 16))).jaxpr)
    assert {eqn.invars[0].aval.dtype for eqn in eqns if eqn.primitive.name == "exp"} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("einsum", ["EBD,EDF->EBF", "BD,DD->BD", "B...D,DF->B...F"])
def test_an_einsum_that_is_no_matmul_needs_a_rule(einsum):
    class Experts(nnx.Module):
        def __init__(self, rngs):
            shape = (4, 16, 32) if "E" in einsum else (16, 16) if "DD" in einsum else (16, 32)
            self.experts = nnx.Einsum(einsum, shape, rngs=rngs)

    with pytest.raises(ValueError, match=r"^rules: experts multiplies no input") as error:
        inject(Experts(nnx.Rngs(0)), FP8)
    assert "\n" not in str(error.value) and repr(einsum) in str(error.value)
    rules = (("experts", make_recipe("bf16")),)
    assert inject(Experts(nnx.Rngs(0)), FP8, rules=rules) == {"experts": "high precision"}


def test_an_einsum_may_permute_the_axes_of_its_result():
    x = jax.random.normal(jax.random.key(1), (2, 3, 5, 16))

    def model():
        return nnx.Dict(up=nnx.Einsum("...SD,DGF->...FSG", (16, 4, 8), rngs=nnx.Rngs(0)))

    plain, exact = model(), model()
    assert inject(exact, EXACT) == {"up": "simulate"}
    np.testing.assert_array_equal(exact.up(x), plain.up(x))


def test_blocks_must_divide_what_an_einsum_sums_over():
    with pytest.raises(ValueError, match="the kernel of down is 64 × 32, which blocks of 64 do not divide"):
        inject(Block(nnx.Rngs(0)), make_recipe("mxfp8", block_size=64), rules=(("att*", FP8),))


def test_the_example_of_the_documentation_runs():
    page = (Path(__file__).parents[2] / "docs/low_precision.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(example, "docs/low_precision.md", "exec"), {})
