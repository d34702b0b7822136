"""Programs on pairs of data and scale compute the same as on arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.precision.scalify import Scaled, dynamic_rescale_l2_grad, scale, scalify, unscale
from maxlp.precision.scalify.rules import RULES
from tests.fixtures import make_mesh

F32 = jnp.float32


def pair(x: jax.Array, exponent: int) -> Scaled:
    """``x``, whose scale is ``2**exponent``."""
    return Scaled(x * 2.0**-exponent, jnp.int32(exponent))


# --- random programs -------------------------------------------------------------------------------------
# Of (4, 6) arrays. No result is far from 1, so that float32 neither overflows nor has subnormals.

REPLICATED = jax.sharding.NamedSharding(make_mesh(), jax.P())
MASK = np.arange(24).reshape(4, 6) % 3 == 0
STEPS = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - 0.5 * y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (2.0 + jnp.abs(y)),
    "constant": lambda x, y: 3.0 - x * 0.7,
    "maximum": lambda x, y: jnp.maximum(x, y),
    "exp": lambda x, y: jnp.exp(-jnp.abs(x)),
    "exp2": lambda x, y: jnp.exp2(-jnp.abs(x)) - jnp.expm1(-jnp.abs(y)),
    "sin": lambda x, y: jnp.sin(x) * jnp.cos(y),
    "erf": lambda x, y: jax.lax.erf(x),
    "silu": lambda x, y: jax.nn.silu(x),
    "gelu": lambda x, y: jax.nn.gelu(x, approximate=False),
    "roots": lambda x, y: jnp.sqrt(jnp.abs(x)) * jax.lax.rsqrt(1.0 + y * y),
    "power": lambda x, y: jnp.tanh(x) ** 3,
    "pow": lambda x, y: jax.lax.pow(1.0 + jnp.abs(x), y),
    "log": lambda x, y: jnp.log1p(jnp.abs(x)) - jnp.log(1.0 + jnp.square(y)),
    "sum": lambda x, y: x - jnp.sum(y, axis=1, keepdims=True),
    "mean": lambda x, y: x * jnp.mean(y),
    "max": lambda x, y: x - jnp.max(y, axis=0, keepdims=True),
    "min": lambda x, y: x - jnp.min(y, axis=0, keepdims=True),
    "softmax": lambda x, y: jax.nn.softmax(jnp.where(MASK, jnp.finfo(F32).min, x), axis=-1),
    "select": lambda x, y: jnp.where(MASK, x, 0.0) + jnp.where(x > y, y, -1.0),
    "dot": lambda x, y: jnp.tanh(x @ y.T) @ y,
    "batched dot": lambda x, y: jnp.einsum("bi,bj->bj", x, y),
    "layout": lambda x, y: jnp.concatenate([x[:2], jnp.flip(y, 1)[2:]]).T.reshape(4, 6),
    "split": lambda x, y: jnp.concatenate(jnp.split(x, 2, axis=1)[::-1], axis=1),
    "stack": lambda x, y: jnp.stack([*jnp.unstack(x, axis=1)[:3], *jnp.unstack(y, axis=1)[3:]], axis=1),
    "pad": lambda x, y: jnp.pad(x, ((1, 0), (0, 1)))[1:, :-1],
    "tile": lambda x, y: jnp.tile(x[:2], (2, 1)) + y,
    "slice": lambda x, y: x * jax.lax.dynamic_slice(y, (1, 0), (1, 6)),
    "gather": lambda x, y: jnp.take(x, np.array([1, 1, 3, 0]), axis=0),
    "scatter": lambda x, y: x.at[np.array([0, 2, 0])].add(y[:3]),
    "update": lambda x, y: jax.lax.dynamic_update_slice(x, y[:2], (1, 0)),
    "sort": lambda x, y: jnp.sort(x, axis=1) + jax.lax.top_k(y, 6)[0],
    "cumsum": lambda x, y: jnp.cumsum(x, axis=0) / 4,
    "cummax": lambda x, y: jax.lax.cummax(x, axis=1),
    "clip": lambda x, y: jnp.clip(x, -0.5, 0.5),
    "clamp": lambda x, y: jax.lax.clamp(-0.5, x, 0.5),
    "finite": lambda x, y: jnp.where(jnp.isfinite(x), x, y),
    "barrier": lambda x, y: jax.lax.optimization_barrier((x, y))[0],
    "sharding": lambda x, y: jax.lax.with_sharding_constraint(x, REPLICATED),
    "scan": lambda x, y: jax.lax.scan(lambda c, r: (c * 0.5 + r, c - r), jnp.zeros(6), x)[1] + y,
    "growing scan": lambda x, y: jax.lax.scan(lambda c, r: (c * 4.0, c * r), y[0], x, reverse=True)[1] / 64,
    "remat": lambda x, y: jax.checkpoint(lambda x: jnp.tanh(x) * x)(x),
    "rescale": lambda x, y: jax.vjp(dynamic_rescale_l2_grad, y)[1](x)[0],
}
# Where these jump, a program magnifies the last bit of what comes before.
JUMPS = {
    "sign": lambda x, y: jnp.sign(x),
    "round": lambda x, y: jnp.round(x),
    "floor": lambda x, y: jnp.floor(x) + jnp.ceil(y),
    "argmax": lambda x, y: x + jnp.argmax(x, axis=1, keepdims=True) - jnp.argmin(y, axis=1, keepdims=True),
    "order": lambda x, y: jnp.where((x < y) & (x != 0), x, y) + jnp.where(x <= 0.5, x, y),
    "bfloat16": lambda x, y: x.astype(jnp.bfloat16).astype(F32),
    "reduce_precision": lambda x, y: jax.lax.reduce_precision(x, 8, 10),
    "bits": lambda x, y: jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.int32) & -4, F32),
}
NEWER_JAX = {"expand_dims", "one_minus_square", "polynomial"}  # primitives that 0.10 does not have


def program(names: tuple[str, ...], x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    for name in names:
        x, y = jnp.tanh(STEPS[name](x, y)), x
    return {"mean": jnp.mean(x * y), "x": x, "y": y}


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 6))]
)
def test_random_programs_at_any_scale_differ_only_by_the_order_of_sums(seed):
    """And so do their gradients. (Eagerly, each operation would be compiled by itself.)"""
    rng = np.random.default_rng(seed)
    names = tuple(rng.permutation(list(STEPS))[:12])
    x, y = jnp.asarray(rng.normal(size=(2, 4, 6)), F32)
    exponents = rng.integers(-12, 13, 2)

    def gradient(x, y):
        return jax.grad(lambda *a: program(names, *a)["mean"], argnums=(0, 1))(x, y)

    for fn in (functools.partial(program, names), gradient):
        got = jax.jit(scalify(fn))(*map(pair, (x, y), exponents))
        assert all(isinstance(leaf, Scaled) for leaf in jax.tree.leaves(got, is_leaf=is_scaled))
        # The order of sums is XLA's, and may differ where the surrounding operations do.
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-7),
            unscale(got),
            jax.jit(fn)(x, y),
        )


def is_scaled(x) -> bool:
    return isinstance(x, Scaled)


@pytest.mark.parametrize("name", STEPS | JUMPS)
def test_each_step_is_bit_exact(name):
    """The data is that of the program without scales, times a power of two, which rounds nothing."""
    step = (STEPS | JUMPS)[name]
    x, y = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 6)), F32)
    for exponents in ((0, 0), (9, -7), (-11, 4)):
        got = scalify(step)(pair(x, exponents[0]), pair(y, exponents[1]))
        assert got.exponent.dtype == jnp.int32
        np.testing.assert_array_equal(unscale(got), step(x, y), err_msg=str(exponents))


def test_every_rule_is_in_a_step_or_its_gradient(monkeypatch):
    used = set()

    def noted(name, rule):
        return lambda *args: used.add(name) or rule(*args)

    for name, rule in RULES.items():
        monkeypatch.setitem(RULES, name, noted(name, rule))
    x = pair(jnp.ones((4, 6)), 0)
    for step in (STEPS | JUMPS).values():
        jax.eval_shape(scalify(step), x, x)
    for step in STEPS.values():
        jax.eval_shape(scalify(jax.grad(lambda *args, step=step: jnp.sum(step(*args)))), x, x)
    assert RULES.keys() - used <= NEWER_JAX


# The last one is what the gradient of a bias is: `jnp.sum` itself converts to float32.
@pytest.mark.parametrize("add", [jnp.sum, jnp.cumsum, lambda x: jax.lax.reduce_sum(x, (0,))])
def test_sums_beyond_float16_do_not_overflow(add):
    ones = jnp.ones(2**17, jnp.float16)
    assert jnp.all(unscale(scalify(add)(pair(ones, 0))) <= 2**17)
    assert not jnp.all(jnp.isfinite(add(ones)))


def test_a_scattered_sum_does_not_stop_where_float16_has_no_next_integer():
    """As in the gradient of an embedding that many tokens share."""
    add = scalify(lambda x, y: x.at[jnp.zeros(4096, int)].add(y))
    total = unscale(add(pair(jnp.zeros(2, jnp.float16), 0), pair(jnp.ones(4096, jnp.float16), 0)))
    np.testing.assert_array_equal(total, [4096, 0])


@pytest.mark.parametrize(
    "add",
    [
        lambda x: jnp.sum(x, axis=(1, 2)),  # 256 terms
        lambda x: jnp.cumsum(x.reshape(1024, 256), axis=1)[:, -1],
    ],
)
def test_sums_of_independent_terms_have_data_of_the_size_of_the_terms(add):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1024, 16, 16)), F32)
    size = jnp.std(scalify(add)(pair(x, 0)).data)
    # The root of 256 terms is a power of two. A deviation of 1024 values is known to 1 / √2048.
    assert abs(size - 1) < 5 / 2048**0.5


def test_float16_keeps_magnitudes_that_it_cannot_hold():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 64, 64)), jnp.float16)
    unit, small = (Scaled(x, jnp.int32(exponent)) for exponent in (0, -15))

    def product(x):
        return x[0] @ x[1] @ x[2] @ x[3]

    got = scalify(product)(small)
    assert got.data.dtype == jnp.float16
    # A sum of 64 products is 8 times as large as one of them; that is in the exponent.
    assert 0.5 < np.sqrt(np.mean(np.square(np.float32(got.data)))) < 2
    # The same data, and far from float16's smallest number, 2^-24.
    np.testing.assert_array_equal(unscale(got), unscale(scalify(product)(unit)) * 2.0**-60)
    want = product(np.asarray(x, np.float64)) * 2.0**-60
    # Three products, each rounded to 11 bits.
    np.testing.assert_allclose(unscale(got), want, rtol=0, atol=3 * 2**-11 * np.abs(want).max())
    assert not np.any(product(x * jnp.float16(2.0**-15)))


def test_a_mean_starts_from_a_scale_of_its_own():
    """In float16 the gradient of a mean of 2^20 values is 2^-20, and would be 0."""
    x = jnp.ones(2**20, jnp.float16)
    got = scalify(jax.grad(lambda x: jnp.mean(x).astype(F32)))(scale(x))
    np.testing.assert_array_equal(unscale(got), np.full(2**20, 2.0**-20, np.float32))


@pytest.mark.parametrize("zeros", ["bias", "gradient of a branch"])
def test_zeros_take_nothing_from_what_they_are_added_to(zeros):
    """Under an exponent of 0, float16 rounds 2^-30 to 0. Biases and gains of branches often start at 0."""

    def add(x, b):
        return x + b if zeros == "bias" else x + jax.vjp(dynamic_rescale_l2_grad, x)[1](b)[0]

    nothing = jnp.zeros(4, jnp.float16)
    b = scale(nothing) if zeros == "bias" else Scaled(nothing, jnp.int32(0))
    got = scalify(add)(Scaled(jnp.ones(4, jnp.float16), jnp.int32(-30)), b)
    np.testing.assert_array_equal(unscale(got), jnp.full(4, 2.0**-30))


def test_the_second_step_does_not_trace_again():
    traces = 0

    @jax.jit
    @scalify
    def update(params, x):
        nonlocal traces
        traces += 1
        grads = jax.grad(lambda p: jnp.mean(jnp.square(x @ p["w"] + p["b"][None])))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = jax.tree.map(scale, {"w": jnp.eye(3), "b": jnp.zeros(3)})
    for _ in range(2):
        params = update(params, jnp.ones((5, 3)))
    assert traces == 1


def test_a_primitive_without_a_rule_is_named_with_its_line():
    def program(x):
        return jnp.linalg.cholesky(x)

    line = program.__code__.co_firstlineno + 1
    with pytest.raises(
        ValueError, match=rf"primitive 'cholesky', used at .*test_interpreter.py:{line}; add"
    ):
        scalify(program)(scale(jnp.eye(3)))


def test_what_does_not_depend_on_scaled_inputs_needs_no_rule():
    def program(x, a):
        return x * jnp.linalg.cholesky(a)

    got = scalify(program)(scale(jnp.eye(3) * 1024.0), jnp.eye(3) * 4.0)
    np.testing.assert_array_equal(unscale(got), jnp.eye(3) * 2048.0)


@pytest.mark.parametrize("spread", [0.0, 8.0])
def test_scaled_data_has_a_root_mean_square_from_1_to_2(spread):
    """Of values of one size, and of sizes over many powers of two, whose largest one is far above it."""
    rng = np.random.default_rng(0)
    sizes = np.exp2(rng.normal(size=(16, 64)) * spread)
    for row, exponent in zip(rng.normal(size=sizes.shape) * sizes, range(-64, 64, 8), strict=True):
        x = jnp.asarray(row * 2.0**exponent, F32)
        got = scale(x)
        assert 1 <= np.sqrt(np.mean(np.square(np.float64(got.data)))) < 2
        np.testing.assert_array_equal(unscale(got), x)


def test_a_decay_rate_changes_the_data_and_not_the_exponent():
    """0.999 as 1.998 / 2 would double the data of a moving average in each step."""
    x = scale(jnp.ones(4))
    got = scalify(lambda x: 0.999 * x)(x)
    assert got.exponent == x.exponent
    np.testing.assert_array_equal(got.data, x.data * F32(0.999))


def test_stacked_values_of_a_scan_lose_nothing_to_a_small_scale():
    """Their common exponent is the largest one: under the smallest, float16 would overflow."""
    rows = jnp.ones((3, 4), jnp.float16)

    def shrinking(x):
        return jax.lax.scan(lambda c, _: (c * c, c), x[0], None, length=3)[1]

    got = scalify(shrinking)(Scaled(rows, jnp.int32(-6)))
    np.testing.assert_array_equal(unscale(got), np.outer(2.0 ** np.array([-6, -12, -24]), np.ones(4)))


@pytest.mark.parametrize("exponent", [-3, -2, 4, 5])
@pytest.mark.parametrize("root", [jax.lax.sqrt, jax.lax.rsqrt])
def test_roots_of_odd_and_even_exponents(root, exponent):
    x = Scaled(jnp.asarray([1.0, 1.25, 1.75]), jnp.int32(exponent))
    np.testing.assert_allclose(unscale(scalify(root)(x)), root(unscale(x)), rtol=1e-6)
