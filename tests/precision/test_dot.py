import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp import precision
from maxlp.nn import layers
from maxlp.numerics import blockwise, formats, quantized
from maxlp.numerics.quantized import quantize, rotate
from maxlp.precision import delayed, dot, make_recipe, recipes
from maxlp.precision.dot import QuantDot
from tests.fixtures import walk_jaxpr
from tests.precision.fixtures import Layer, documented_recipes

DIMS = (((2,), (0,)), ((), ()))


def arrays(dtype=jnp.bfloat16, shape=(2, 32, 64), out=96, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    w = rng.normal(size=(shape[-1], out)) / np.sqrt(shape[-1])
    g = rng.normal(size=(*shape[:-1], out)) * 1e-3
    return tuple(jnp.asarray(a, dtype) for a in (x, w, g))


@functools.cache
def compiled(recipe):
    layer = Layer(recipe)
    return functools.partial(jax.jit(layer.step), layer.state)


def run(recipe, x, w, g):
    """Output and both gradients of one matmul."""
    return compiled(recipe)(x, w, g)[:3]


@jax.jit
def plain(x, w, g):
    """The same three matmuls in the dtype of the operands."""
    dot = functools.partial(jax.lax.dot_general, preferred_element_type=x.dtype)
    tokens = ((0, 1), (0, 1))
    return dot(x, w, DIMS), dot(g, w, (((2,), (1,)), ((), ()))), dot(x, g, (tokens, ((), ())))


def sqnr(ours, exact):
    ours, exact = (np.asarray(a, np.float64) for a in (ours, exact))
    return 10 * np.log10(np.sum(exact**2) / np.sum((ours - exact) ** 2))


@pytest.mark.parametrize(
    "rows, length, parts",
    [
        pytest.param(1, 133_144, [], id="the last that int32 can sum"),
        pytest.param(1, 133_145, [1, 5], id="one more: five parts, the fewest that divide it"),
        pytest.param(64, 4096, [2, 1], id="parts are of rows"),
        pytest.param(3, 2**17, [3, 1], id="as few as can be"),
        pytest.param(2, 2**19, [2, 4], id="rows longer than the limit"),
    ],
)
def test_a_sum_over_many_tokens_is_one_of_sums_that_fit_int32(rows, length, parts):
    """The products of the largest integers; one part would be -2^31 and more at 133,145 tokens."""
    x, w, g = (jnp.ones(shape) for shape in ((rows, length, 1), (1, 1), (rows, length, 1)))
    step = functools.partial(run, make_recipe("int8_all"))
    dots = [eqn for eqn in walk_jaxpr(jax.make_jaxpr(step)(x, w, g)) if eqn.primitive.name == "dot_general"]
    _, batch = dots[-1].params["dimension_numbers"]
    assert [dots[-1].invars[0].aval.shape[axis] for axis in batch[0]] == parts
    # The sum is exact; its scales have a few roundings.
    np.testing.assert_allclose(step(x, w, g)[2], [[rows * length]], rtol=1e-6)


def test_one_entry_adds_a_format(monkeypatch):
    """E3M4, half a step (2^-5) from every number: in a state of an optimizer, and in the three matmuls."""
    to = formats.Format("float8_e3m4", "float", 3, 4, 15.5, jnp.float8_e3m4, ("states", "matmuls"))
    monkeypatch.setitem(formats.FORMATS, to.name, to)
    monkeypatch.setattr(formats, "MATMULS", (*formats.MATMULS, to.name))
    rng = np.random.default_rng(0)
    x, w, g = (rng.uniform(1, 2, size).astype("f4") for size in ((2, 8, 32), (32, 16), (2, 8, 16)))
    stored = blockwise.decode(blockwise.encode(x, to.name), to.name)
    np.testing.assert_allclose(stored, x, rtol=2.0**-5)
    recipe = make_recipe("fp8_current", format=to.name, grad_format=to.name)
    for ours, exact in zip(run(recipe, x, w, g), plain(x, w, g), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=2 * 2.0**-5 + 2.0**-10)  # (1 + 2^-5)² - 1
        assert 20 < sqnr(ours, exact) < 60


# --- int8 ---------------------------------------------------------------------------------------------


def int8(x, axes):
    """numpy: int64 codes and the float32 scale."""
    x = np.asarray(x, np.float32)
    a = np.abs(x).max(axes, keepdims=True)
    scale = np.where(a == 0, np.float32(1), a * np.float32(1 / 127)).astype(np.float32)
    return np.clip(np.rint(x * (np.float32(1) / scale)), -127, 127).astype(np.int64), scale


def scaled(product, a, b):
    assert np.abs(product).max() < 2**24, "the product is exact in float32"
    return jnp.asarray(product.astype(np.float32) * (a * b))


@pytest.mark.parametrize(
    "name, kernel_rows, dtype",
    [
        ("int8_switchback", False, jnp.float32),
        ("int8_switchback", False, jnp.bfloat16),
        ("int8_switchback_m", False, jnp.bfloat16),
        ("int8_switchback_q", True, jnp.float32),
        ("int8_all", True, jnp.bfloat16),
    ],
)
def test_int8_matmuls_equal_an_integer_reference_to_the_bit(name, kernel_rows, dtype):
    x, w, g = arrays(dtype)
    x = x.at[0, 3].set(0)  # an all-zero row has scale 1 and gives zeros
    y, dx, dw = run(make_recipe(name), x, w, g)

    (qx, sx), (qw, sw) = int8(x, 2), int8(w, 0 if kernel_rows else (0, 1))
    np.testing.assert_array_equal(y, scaled(qx @ qw, sx, sw).astype(dtype))
    assert not np.any(np.asarray(y, np.float32)[0, 3])

    (qg, sg), (qw, sw) = int8(g, 2), int8(w, 1 if kernel_rows else (0, 1))
    np.testing.assert_array_equal(dx, scaled(qg @ qw.T, sg, sw.T).astype(dtype))

    if name == "int8_all":
        (qx, sx), (qg, sg) = int8(x, (0, 1)), int8(g, (0, 1))
        product = np.einsum("bsk,bsn->kn", qx, qg)
        np.testing.assert_array_equal(dw, scaled(product, sx[0, 0][:, None], sg[0, 0]).astype(dtype))


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("int8_switchback", jnp.float32),
        ("int8_switchback", jnp.bfloat16),
        ("int8_switchback_q", jnp.float32),
        ("fp8_switchback", jnp.bfloat16),
        ("fp8_rowwise_with_gw_hp", jnp.bfloat16),
    ],
)
def test_a_kernel_gradient_in_high_precision_equals_that_of_a_plain_layer_to_the_bit(name, dtype):
    x, w, g = arrays(dtype)
    np.testing.assert_array_equal(run(make_recipe(name), x, w, g)[2], plain(x, w, g)[2])


def test_switchback_errors_on_gaussian_data_are_those_of_its_steps():
    """A step is a 127th of the largest number of a row or a tensor; rounding has an error of a step / √12.

    Those of the two operands are independent. A result depends on the errors of 32,768 numbers or more:
    4 % are about four standard errors of its norm.
    """
    x, w, g = arrays(jnp.float32, (1, 128, 256), 256)
    exact = plain(x, w, g)

    def error(a, b):
        return np.linalg.norm(a - b) / np.linalg.norm(b)

    def of_steps(a, axis=None):
        return np.sqrt(np.mean(np.max(np.abs(a), axis) ** 2) / 12 / np.mean(a**2)) / 127

    of_kernel = of_steps(w)
    y, dx, _ = run(make_recipe("int8_switchback"), x, w, g)
    assert error(y, exact[0]) == pytest.approx(np.hypot(of_steps(x, -1), of_kernel), rel=0.04)
    assert error(dx, exact[1]) == pytest.approx(np.hypot(of_steps(g, -1), of_kernel), rel=0.04)
    dw = run(make_recipe("int8_switchback_m"), x, w, g)[2]
    assert error(dw, exact[2]) == pytest.approx(of_steps(x, -1), rel=0.04)


# --- QuEST --------------------------------------------------------------------------------------------


def quest(x, axis):
    """numpy: the rotated array, odd integers, their float32 scale, and which elements are trusted.

    The paper's algorithm with its authors' formula: a grid of steps of 2 α / 15 from -α to α, where α is
    2.514 root mean squares, and trust within half a step.
    """
    size = x.shape[axis]
    matrix = (
        np.float64([[(-1) ** (i & j).bit_count() for i in range(size)] for j in range(size)]) / size**0.5
    )
    rotated = np.float32(np.moveaxis(np.tensordot(np.float64(x), matrix, (axis, 0)), -1, axis))
    rms = np.sqrt(np.mean(rotated**2, axis, keepdims=True, dtype=np.float32))
    half_step = np.maximum(np.float32(2.514) * rms * np.float32(1 / 15), np.finfo(np.float32).tiny)
    in_steps = np.clip(rotated * (np.float32(1) / half_step), -15, 15) / 2
    odd = (2 * np.rint(in_steps + np.float32(0.5)) - 1).astype(np.int64)
    trusted = np.abs(odd * half_step - rotated) <= half_step * np.float32(1 + 2.0**-20)
    return matrix, odd, half_step, trusted


def test_quest_equals_a_numpy_reference():
    """Integers, of which 64 are rotated without rounding: the codes agree bit for bit.

    The scales agree but for the order of three multiplications, each rounded once.
    """
    rng = np.random.default_rng(0)
    x, w, g = (
        np.round(rng.normal(size=s) * 5).astype(np.float32) for s in ((2, 4, 64), (64, 96), (2, 4, 96))
    )
    x[0, 1] = 0  # padding
    y, dx, dw = run(make_recipe("quest"), x, w, g)
    (matrix, qx, sx, of_x), (_, qw, sw, of_w) = (quest(*pair) for pair in ((x, 2), (w, 0)))
    for array, axis, codes, scale in ((x, 2, qx, sx), (w, 0, qw, sw)):
        turned = rotate(array, axis, 64, random_signs=False)
        q = quantize(turned, formats.get("midrise4"), "row", (axis,), clipping="gaussian")
        np.testing.assert_array_equal(q.codes, codes)
        np.testing.assert_allclose(q.scale, scale, rtol=3 * 2.0**-23)
    # Three roundings in each scale, and the two products with them.
    np.testing.assert_allclose(y, scaled(qx @ qw, sx, sw), rtol=8 * 2.0**-23, atol=1e-30)
    assert np.abs(y[0, 1]).max() < 1e-30, "zeros stay zero, though the grid has no zero"
    assert 0.9 < of_x.mean() < 1 and 0.9 < of_w.mean() < 1

    expected_dx = np.where(of_x, g @ np.float64(qw * sw).T, 0) @ matrix
    expected_dw = matrix @ np.where(of_w, np.einsum("bsk,bsn->kn", np.float64(qx * sx), g), 0)
    # Sums of up to 96 and of 64 terms in float32.
    for ours, expected in ((dx, expected_dx), (dw, expected_dw)):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=160 * 2.0**-24 * np.abs(expected).max())


def test_each_part_of_quest_is_a_switch():
    x, w, g = arrays(jnp.float32)
    whole = run(make_recipe("quest"), x, w, g)
    for option in (dict(fwd_hadamard=False), dict(clipping="max")):
        assert np.any(run(make_recipe("quest", **option), x, w, g)[0] != whole[0])
    y, dx, dw = run(make_recipe("quest", trust_mask=False), x, w, g)
    np.testing.assert_array_equal(y, whole[0])
    assert np.any(dx != whole[1]) and np.any(dw != whole[2])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_kernel_is_quantized_in_tiles_as_it_is(dtype):
    """Also where it is so small that float16 has fewer bits for it."""
    w = arrays(dtype)[1] * dtype(2.0**-10)
    recipe = make_recipe("nvfp4")
    assert recipe.fwd[1].granularity == "tile"
    ours = dot.quantize_forward(recipe, "kernel", w, None)
    exact = dot.quantize(recipe, recipe.fwd[1], w.astype(jnp.float32), (0,), None)
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_delayed_scales_have_room_for_rotated_tokens():
    """Of tokens 1 and -1 with the signs of its own row, a rotation makes zeros and one 4, exact in FP8."""
    _, w, _ = arrays(jnp.float32)
    signs = 4 * rotate(jnp.eye(16), 0)[3]
    x, g = (jnp.tile(signs[None, :, None], (1, 1, size)) for size in w.shape)
    dw = run(make_recipe("fp8_delayed", hadamard=True), x, w, g)[2]
    np.testing.assert_array_equal(dw, np.full(w.shape, 16.0))


@pytest.mark.parametrize("dim", [48, 192, 256])
def test_rotated_operands_of_any_size_have_the_same_product(dim):
    """In blocks of 16, 64 and 128; int8 shows that both operands are rotated alike."""
    x, w, g = arrays(jnp.float32, (2, 8, dim))
    ours = run(make_recipe("int8_all", fwd_hadamard=True), x, w, g)
    assert all(sqnr(*pair) > 37 for pair in zip(ours, plain(x, w, g), strict=True))


# --- every recipe -------------------------------------------------------------------------------------

QUANTIZED = [name for name in precision.RECIPES if name != "bf16"]


def noise(operand):
    """The squared error of Gaussian numbers in this format, relative to their mean square."""
    f = formats.get(operand.format)
    if f.kind == "int":  # equal steps up to the largest of some thousand numbers, or to the clipping
        relative = (2 * (f.clip or 3.5) / (2**f.bits - 1)) ** 2 / 12
    else:
        relative = 0.04 * 4.0**-f.mantissa_bits
    return relative * (2 if operand.rounding == "stochastic" else 1)


def noise_of_matmuls(recipe):
    """The `noise` of both operands together, for each matmul; 0 if it is not quantized."""
    found = {gemm: sum(map(noise, recipe.gemms.get(gemm, ()))) for gemm in recipes.GEMMS}
    if recipe.residuals == "quantized":  # a matmul in 16 bits then multiplies what `fwd` has quantized
        x, kernel = recipe.fwd
        found = {"drhs": noise(x), "dlhs": noise(kernel)} | {k: v for k, v in found.items() if v}
    if recipe.trust_mask:  # entries that are clipped, with 1 % of the squares, have no gradient
        found |= {gemm: 2 * found[gemm] for gemm in ("dlhs", "drhs")}
    if recipe.keep < 1:  # independent draws of a share of the tokens, with products that are uncorrelated
        found["drhs"] = 1 / recipe.keep
    return [found[gemm] for gemm in recipes.GEMMS]


@pytest.mark.parametrize("name", QUANTIZED)
def test_signal_to_noise(name):
    """It follows from the formats of the operands, so that a new recipe needs no bound of its own.

    The documentation quotes it in whole decibels.
    """
    x, w, g = arrays()
    exact = plain(*(a.astype(jnp.float32) for a in (x, w, g)))
    recipe = make_recipe(name, **({"block_size": 32} if name == "fp8_blocks" else {}))  # to fit the arrays
    decibels = [sqnr(*pair) for pair in zip(run(recipe, x, w, g), exact, strict=True)]
    expected = [-10 * np.log10(n) if n else np.inf for n in noise_of_matmuls(recipe)]
    for measured, bound in zip(decibels, expected, strict=True):  # at most 55, in bfloat16
        assert min(bound - 1.5, 50) < measured < bound + 3, (decibels, expected)
    _, _, _, _, quoted, _ = documented_recipes()[name]
    assert [float(x) for x in quoted.replace("−", "-").split(",")] == pytest.approx(decibels, abs=1)


@pytest.mark.parametrize(
    "name, input_bytes, kernel_bytes",
    [
        ("bf16", 2, 2),
        ("fp8_delayed", 1, 1),
        ("fp8_switchback", 2, 1),  # dlhs uses the quantized kernel, drhs the input as it was
        ("int8_switchback", 2, 1),
        ("int8_switchback_m", 1, 1),
        ("int8_switchback_q", 2, 2),
    ],
)
def test_bytes_saved_for_the_backward_pass(name, input_bytes, kernel_bytes):
    x, w, _ = arrays()
    options = dict(history=2) if "delayed" in name else {}
    structure, state = nnx.split(QuantDot(make_recipe(name, **options)))

    def product(x, w):
        return nnx.merge(structure, state, copy=True)(x, w, DIMS)

    _, pull = jax.eval_shape(lambda x, w: jax.vjp(product, x, w), x, w)
    kept = {leaf.shape: leaf.dtype.itemsize for leaf in jax.tree.leaves(pull) if leaf.size > 8}
    assert (kept[x.shape], kept[w.shape]) == (input_bytes, kernel_bytes)


# --- layers of one input --------------------------------------------------------------------------------


class Pair(nnx.Module):
    """Two layers that multiply the same input."""

    def __init__(self, recipe):
        of_both: dict[str, Any] = dict(
            axes=("embed", "mlp"), std=0.1, dtype=jnp.bfloat16, param_dtype=jnp.float32
        )
        for name, out_dim in (("a", 96), ("b", 32)):
            linear = layers.Linear(64, out_dim, rngs=nnx.Rngs(out_dim), **of_both)
            linear.dot_general = nnx.data(QuantDot(recipe))
            setattr(self, name, linear)


def separately(x, *linears):
    return [linear(x) for linear in linears]


def pair_step(recipe, apply):
    """A step to (outputs, gradients and backward state, forward state), and the initial state."""
    structure, params, backward, forward = nnx.split(
        Pair(recipe), nnx.Param, delayed.OverwriteWithGradient, ...
    )

    def step(forward, backward, x):
        def outputs(params, backward, x):
            pair = nnx.merge(structure, params, backward, forward, copy=True)
            return apply(x, pair.a, pair.b), nnx.to_pure_dict(nnx.state(pair, delayed.AmaxHistory))

        ys, pull, new = jax.vjp(outputs, nnx.to_pure_dict(params), backward, x, has_aux=True)
        return ys, pull([y * 1e-3 for y in ys]), new

    return step, (nnx.to_pure_dict(forward), nnx.to_pure_dict(backward))


def conversions_of(jaxpr, shape):
    """How often a program, with the programs within it, converts an array of this shape to E4M3."""
    casts = [eqn for eqn in walk_jaxpr(jaxpr) if eqn.primitive.name == "convert_element_type"]
    made = [cast.outvars[0].aval for cast in casts]
    return sum(one.dtype == jnp.float8_e4m3fn and one.shape == shape for one in made)


@pytest.mark.parametrize(
    "name, options",
    [
        ("fp8_delayed", dict(history=3)),
        ("fp8_delayed", dict(history=3, cold_start=False)),
        ("fp8_rowwise", {}),
    ],
)
def test_layers_of_one_input_quantize_it_once_with_the_same_results(name, options, monkeypatch):
    """The reference calls each layer alone, and leaves layouts and passes to XLA."""
    recipe, inputs = make_recipe(name, **options), [arrays(seed=seed)[0] for seed in range(3)]

    def run(apply):
        step, (forward, backward) = pair_step(recipe, apply)
        results = []
        for x in inputs:
            results.append(jax.jit(step)(forward, backward, x))
            forward, backward = results[-1][2], results[-1][1][1]
        return results

    ours = run(layers.apply_to_same_input)
    with monkeypatch.context() as unfused:
        unfused.setattr(quantized, "written_once", lambda values: values)
        reference = run(separately)
    jax.tree.map(np.testing.assert_array_equal, ours, reference)


@pytest.mark.parametrize("apply, casts", [(layers.apply_to_same_input, 1), (separately, 2)])
def test_a_shared_input_is_quantized_once(apply, casts):
    """In the program, so that it is also saved once for the backward pass."""
    structure, state = nnx.split(Pair(make_recipe("fp8_delayed", history=3)))

    def forward(x):
        pair = nnx.merge(structure, state, copy=True)
        return apply(x, pair.a, pair.b)

    x = arrays()[0]
    assert conversions_of(jax.make_jaxpr(forward)(x).jaxpr, x.shape) == casts


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed"])
def test_both_matmuls_take_the_same_quantized_gradient(name):
    """Two equal arrays would be sent to the devices of a mesh twice."""
    layer = Layer(make_recipe(name))
    program = str(jax.make_jaxpr(layer.step)(layer.state, *arrays()))
    assert program.count("new_dtype=float8_e5m2") == 1
