"""Recipes with switches: all off and all on are the two programs between which they switch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.nn import layers
from maxlp.parallel.batches import global_batch
from maxlp.precision import RECIPES, make_recipe, switches
from maxlp.precision.dot import QuantDot
from maxlp.run.attribution import SwitchEvaluator
from tests.fixtures import Trainer, batch, precision_config

# The scales of these recipes are powers of two: no rounding depends on how XLA fuses the program around a
# matmul. (So in float32; in bfloat16 XLA may keep more precision, in one program and not in the other.)
EXACT = ["fp8_delayed", "fp8_rowwise_with_gw_hp", "mxfp8"]


def evaluation(recipe, **options):
    """An `SwitchEvaluator` of a small Llama under a recipe, and the trainer."""
    trainer = Trainer(recipe=precision_config(recipe, **options))
    state, data = trainer.init(), global_batch(batch(0), trainer.mesh)
    with jax.set_mesh(trainer.mesh):
        made = SwitchEvaluator(trainer.graphdef, trainer.gradients, state, data)
    return made, trainer


def gradients_of(trainer, state):
    """Loss and gradients of the training program itself."""

    @jax.jit
    def gradients(state):
        grads, _, metrics = trainer.gradients(trainer.graphdef, state, batch(0), None)
        return metrics["loss"], grads

    with jax.set_mesh(trainer.mesh):
        return jax.device_get(gradients(state))


def switched(evaluate, value):
    on = {path: np.full_like(off, value) for path, off in evaluate.off.items()}
    numbers, grads, _ = evaluate.compiled(evaluate.state, evaluate.batch, on, evaluate.reference)
    return jax.device_get((numbers["loss"], grads))


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.full
@pytest.mark.default_emitters
@pytest.mark.parametrize("recipe", EXACT)
def test_all_off_is_high_precision_and_all_on_is_the_recipe_to_the_bit(recipe):
    evaluate, trainer = evaluation(recipe)
    plain = Trainer()
    low = gradients_of(trainer, trainer.init())
    high = gradients_of(plain, plain.init(trainer.init()["params"]))
    assert_equal(switched(evaluate, False), high)
    assert_equal(switched(evaluate, True), low)
    assert low[0] != high[0], "the recipe changes the loss"


# --- one matmul -----------------------------------------------------------------------------------------

SWITCHABLE = [name for name, recipe in RECIPES.items() if recipe.gemms and recipe.keep == 1]
# A trust mask without a rotation, and a rotation without a mask.
QUICK = ("fp8_delayed", "int8_switchback", "mxfp8", "quest")
MATMULS = [
    pytest.param(name, {}, marks=[] if name in QUICK else pytest.mark.full, id=name) for name in SWITCHABLE
] + [
    pytest.param("quest", dict(fwd_hadamard=False), id="quest-masked"),
    pytest.param("int8_all", dict(fwd_hadamard=True), id="int8_all-rotated", marks=pytest.mark.full),
]


@functools.cache
def operands():
    """Input, kernel and output gradient; blocks and tiles of 128 divide them."""
    rng = np.random.default_rng(0)
    shapes = (2, 64, 128), (128, 256), (2, 64, 256)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def products(dot_general, x, kernel, g):
    """Output, gradient of the input and gradient of the kernel, in one program."""
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    y, pull = jax.vjp(lambda *pair: dot_general(*pair, numbers, preferred_element_type=None), x, kernel)
    return y, *pull(g)


@functools.partial(jax.jit, static_argnames="structure")
def of_split_module(structure, state, *operands):
    def dot_general(*args, **kwargs):
        return nnx.merge(structure, state, copy=True)(*args, **kwargs)

    return products(dot_general, *operands)


def of_module(dot):
    return jax.device_get(of_split_module(*nnx.split(dot), *operands()))


@jax.jit
def of_plain_matmul(*operands):
    return products(layers.dot_general, *operands)


def switching(recipe, on):
    dot = switches.SwitchDot(QuantDot(recipe), ())
    dot.on[...] = jnp.asarray(on)
    return of_module(dot)


@pytest.mark.parametrize(("name", "options"), MATMULS)
def test_all_on_is_the_recipe_to_the_bit(name, options):
    recipe = make_recipe(name, **options)
    assert_equal(switching(recipe, np.ones((3, 2), bool)), of_module(QuantDot(recipe)))


@pytest.mark.parametrize(("name", "options"), MATMULS)
def test_all_off_is_the_plain_matmul(name, options):
    """To the bit; of rotated operands to within rounding."""
    recipe = make_recipe(name, **options)
    found = switching(recipe, np.zeros((3, 2), bool))
    plain = jax.device_get(of_plain_matmul(*operands()))
    if not recipe.fwd_hadamard:
        assert_equal(found, plain)
        return
    for a, b in zip(found, plain, strict=True):
        # Sums of at most 256 products, and two rotations that sum 128 numbers: their rounding errors are
        # independent, and each is below 2^-24 of a partial sum.
        assert 0 < np.linalg.norm(a - b) < 2**-24 * 512**0.5 * np.linalg.norm(b)


@pytest.mark.parametrize("index", [0, 1])
def test_a_trust_mask_belongs_to_its_operand(index):
    """With one switch on, its operand has no gradient where it is clipped; the other has all of it."""
    recipe = make_recipe("quest", fwd_hadamard=False)
    masked = [grad == 0 for grad in of_module(QuantDot(recipe))[1:]]
    assert all(0 < mask.mean() < 0.2 for mask in masked)
    on = np.zeros((3, 2), bool)
    on[0, index] = True
    found = [grad == 0 for grad in switching(recipe, on)[1:]]
    np.testing.assert_array_equal(found[index], masked[index])
    assert not found[1 - index].any()


@pytest.mark.parametrize("name", ["fp8_current", "mxfp8"])
def test_a_gradient_of_zeros_has_no_error(name):
    """As an idle stage of a pipeline has it, beside other microbatches whose errors count."""
    dot = switches.SwitchDot(QuantDot(make_recipe(name)), ())
    dot.on[...] = jnp.array([[1, 0], [1, 0], [0, 1]], bool)
    structure, state = nnx.split(dot)
    x, kernel, g = operands()

    @jax.jit
    def statistics(state, g):
        def product(state):
            numbers = (((x.ndim - 1,), (0,)), ((), ()))
            return jnp.vdot(nnx.merge(structure, state, copy=True)(x, kernel, numbers), g)

        return jax.grad(product, allow_int=True)(state)["backward_statistics"][...]

    error = switches.STATISTICS.index("error")
    of_g, of_zeros = (np.asarray(statistics(state, a))[:, 0, error] for a in (g, 0 * g))
    assert (of_g > 0).all() and (of_zeros == 0).all()


@pytest.mark.parametrize("size", [1.0, 2.0**-70])  # the squares of such small products are zero in float32
def test_the_error_is_relative_to_the_product_in_high_precision(size):
    dot = switches.SwitchDot(QuantDot(make_recipe("fp8_current")), ())
    dot.on[0, 0] = True
    x, kernel, _ = operands()
    x *= size
    numbers = (((2,), (0,)), ((), ()))
    y, y0 = dot(x, kernel, numbers), layers.dot_general(x, kernel, numbers, preferred_element_type=None)
    error = float(dot.forward_statistics[0, switches.STATISTICS.index("error")])
    # Norms, summed in float32.
    difference, norm = (float(jnp.linalg.norm(a / size)) for a in (y - y0, y0))
    assert error == pytest.approx(difference / norm, rel=1e-5)


def test_the_operands_of_a_recipe():
    def kinds(name, **options):
        return set(switches.switchable(make_recipe(name, **options)))

    every = {(gemm, tensor) for gemm, pair in switches.GEMMS.items() for tensor in pair}
    assert kinds("fp8_current") == every
    assert kinds("int8_switchback") == every - {("drhs", "input"), ("drhs", "output_grad")}
    # The kernel's gradient is in high precision, but made from the input as int8 has saved it.
    assert kinds("int8_switchback_m") == every - {("drhs", "output_grad")}
