"""Winner-take-all column-row sampling against its formulas, and what it saves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlp.precision import make_recipe, sampling
from maxlp.precision.dot import QuantDot
from tests.fixtures import Trainer, batches, make_mesh, precision_config
from tests.precision.fixtures import Layer, exact_batch, exact_params, exact_trainer

DIMS = (((2,), (0,)), ((), ()))
DRAWS = 8192


def arrays(spread, shape=(32, 16), out=8) -> tuple[np.ndarray, np.ndarray]:
    """Input and gradient in float32; norms of the tokens vary by a factor of ``exp(spread)``."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.exp(spread * rng.normal(size=(*shape[:-1], 1)))
    return x.astype(np.float32), rng.normal(size=(*shape[:-1], out)).astype(np.float32)


def estimates(x, g, num):
    """Gradients of the kernel from many samples."""

    def one(key):
        rows, index = sampling.sample_sequence(jnp.asarray(x), num, key)
        return rows.T @ jnp.asarray(g)[index]

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), DRAWS)), np.float64)


def variance_without_winners(x, g, num):
    """The theoretical variance of column-row sampling, E ‖estimate - dW‖² with p_s = ‖x_s‖ / Σ ‖x‖."""
    x, g = x.astype(np.float64), g.astype(np.float64)
    norm, gradient = np.linalg.norm(x, axis=1), np.linalg.norm(g, axis=1)
    return (np.sum(norm * gradient**2) * norm.sum() - np.sum((x.T @ g) ** 2)) / num


@pytest.mark.parametrize("spread, num", [(0.0, 1), (0.0, 10), (0.0, 31), (1.5, 1), (1.5, 10), (1.5, 31)])
def test_the_mean_is_the_gradient_and_the_variance_below_that_of_column_row_sampling(spread, num):
    x, g = arrays(spread)
    exact, found = x.astype(np.float64).T @ g.astype(np.float64), estimates(x, g, num)
    variance = np.sum(np.var(found, axis=0))
    # ‖mean - dW‖² has the mean variance / DRAWS; in its worst case, one random number squared, it is
    # beyond nine times that with a probability of 0.3 %.
    assert np.sum((found.mean(axis=0) - exact) ** 2) < 9 * variance / DRAWS
    # One draw is that of column-row sampling; its variance is measured to a few times 1 / √DRAWS.
    bound = 1.05 if num == 1 else 1.0 if spread == 0 else 0.5
    relative = variance / variance_without_winners(x, g, num)
    print(f"{num} of 32 tokens, spread {spread}: {relative:.3f} of the variance of column-row sampling")
    assert relative < bound


def test_the_winners_are_those_of_the_formula():
    """All that has a constant weight of 1 in every sample; a brute-force search over |C| finds the same."""
    x, _ = arrays(1.5)
    num, norm = 10, np.sort(np.linalg.norm(np.float64(x), axis=1))[::-1]
    factors = [norm[c:].sum() / (num - c) for c in range(num)]
    winners = int(np.argmin(factors))
    assert 1 < winners < num - 1
    order = np.argsort(-np.linalg.norm(x, axis=1))
    for seed in range(3):
        rows, index = sampling.sample_sequence(jnp.asarray(x), num, jax.random.key(seed))
        np.testing.assert_array_equal(index[:winners], order[:winners])
        np.testing.assert_array_equal(rows[:winners], x[order[:winners]])
        # A token that is drawn gets the same norm as every other: its interval's.
        drawn = np.linalg.norm(rows[winners:], axis=1)
        np.testing.assert_allclose(drawn, factors[winners], rtol=32 * 2.0**-23)
        assert not set(np.asarray(index[winners:])) & set(order[:winners])


def test_tokens_of_zeros_are_never_needed():
    """Fewer other tokens than the sample has places: all of them, as they are, and the sum is exact."""
    x, g = arrays(1.0)
    x[5:] = 0
    rows, index = sampling.sample_sequence(jnp.asarray(x), 10, jax.random.key(0))
    # Ten products are added in another order in float32.
    np.testing.assert_allclose(rows.T @ g[index], x.T @ g, rtol=0, atol=2.0**-20 * np.abs(x).sum())
    rows, index = sampling.sample_sequence(jnp.zeros((32, 16)), 10, jax.random.key(0))
    assert not np.any(rows) and np.all((index >= 0) & (index < 32))


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**100])
def test_the_sample_does_not_depend_on_the_unit_of_the_input(factor):
    """Squares of such elements are not in float32."""
    x, _ = arrays(1.0)
    expected = sampling.sample_sequence(jnp.asarray(x), 10, jax.random.key(0))
    rows, index = sampling.sample_sequence(jnp.asarray(x) * factor, 10, jax.random.key(0))
    np.testing.assert_array_equal(index, expected.index)
    np.testing.assert_array_equal(rows / factor, expected.rows)


def test_a_sample_has_at_least_one_token_and_may_lack_a_single_one():
    assert sampling.sample(jnp.ones((2, 4, 16)), 0.1).index.shape == (2, 1)
    assert sampling.sample(jnp.ones((100, 16)), 0.99).index.shape == (99,)
    assert sampling.sample(jnp.ones((100, 16)), 0.999) is None


def test_rows_in_16_bits_are_rounded_once():
    x = jnp.asarray(arrays(1.0)[0], jnp.bfloat16)
    rows, index = sampling.sample_sequence(x, 10, jax.random.key(0))
    expected = sampling.sample_sequence(x.astype(jnp.float32), 10, jax.random.key(0))
    np.testing.assert_array_equal(index, expected.index)
    np.testing.assert_array_equal(rows, expected.rows.astype(jnp.bfloat16))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_the_sample(value):
    x, _ = arrays(1.0)
    x[3, 5] = value
    assert not np.all(np.isfinite(sampling.sample_sequence(jnp.asarray(x), 10, jax.random.key(0)).rows))


def test_a_layer_has_exact_outputs_and_a_sampled_gradient_of_the_kernel():
    x, g = arrays(1.0, (2, 32, 16))
    w = np.float32(np.random.default_rng(1).normal(size=(16, 8)))
    steps = {name: Layer(recipe) for name, recipe in (
        ("plain", make_recipe("bf16")),
        ("sampled", make_recipe("wta_crs")),
        ("all", make_recipe("wta_crs", keep=0.99)),  # rounds to every token
    )}  # fmt: skip
    found = {name: jax.jit(layer.step)(layer.state, x, w, g) for name, layer in steps.items()}
    for name in ("sampled", "all"):
        for ours, exact in zip(found[name][:2], found["plain"][:2], strict=True):
            np.testing.assert_array_equal(ours, exact)
    np.testing.assert_array_equal(found["all"][2], found["plain"][2])

    expected = np.zeros((16, 8))
    for x_SK, g_SN in zip(x, g, strict=True):  # each sequence by itself, 10 of 32 tokens
        sample = sampling.sample(jnp.asarray(x_SK), 0.3)
        assert sample is not None
        rows, index = sample
        assert rows.shape == (10, 16)
        expected += np.asarray(rows, np.float64).T @ g_SN.astype(np.float64)[index]
    # Sums of 20 products in float32; weights that XLA may compute in another order.
    np.testing.assert_allclose(
        found["sampled"][2], expected, rtol=0, atol=2.0**-18 * np.abs(expected).max()
    )
    again = jax.jit(steps["sampled"].step)(steps["sampled"].state, x, w, g)
    np.testing.assert_array_equal(again[2], found["sampled"][2])


def saved(recipe, x, *kernels):
    """The shapes of what the layers of one input save for the backward pass."""
    structure, state = nnx.split(QuantDot(recipe))

    def products(x, *kernels):
        shared = {}
        return [nnx.merge(structure, state, copy=True)(x, w, DIMS, shared=shared) for w in kernels]

    _, pull = jax.eval_shape(lambda *args: jax.vjp(products, *args), x, *kernels)
    unique = {id(leaf): leaf.shape for leaf in jax.tree.leaves(pull) if leaf.size > 8}
    return sorted(unique.values())


@pytest.mark.parametrize("name", ["wta_crs", "int8_switchback"])
def test_only_the_sample_is_saved_and_once_for_layers_of_one_input(name):
    x, w, v = jnp.zeros((2, 40, 64)), jnp.zeros((64, 96)), jnp.zeros((64, 32))
    sampled = saved(make_recipe(name, keep=0.3), x, w, v)
    assert (2, 40, 64) in saved(make_recipe(name), x, w) or name == "wta_crs"
    assert sampled == [(2, 12), (2, 12, 64), (64, 32), (64, 96)]


FAST = (4, 4, False, "block")  # devices, microbatches, scan, remat
LAYOUTS = [
    layout if layout == FAST else pytest.param(layout, marks=pytest.mark.full)
    for layout in (FAST, (4, 1, True, "none"), (1, 4, True, "none"), (1, 1, True, "block"))
]
SMALLER = make_recipe("wta_crs", keep=0.5)


def exact_step(devices, microbatches, scan, remat, recipe=SMALLER):
    """The gradients of a network whose activations are integers: the update of SGD with rate 1."""
    how: dict[str, Any] = dict(microbatches=microbatches, scan=scan, remat=remat, tx=optax.sgd(1.0))
    trainer = exact_trainer(devices, recipe=recipe, **how)
    state, _ = trainer.run(trainer.init(exact_params()), [exact_batch(0)])
    return jax.tree.map(np.subtract, exact_params(), jax.device_get(state["params"]))


@pytest.fixture(scope="module")
def expected_step():
    return exact_step(1, 1, True, "none")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_sample_is_the_same_in_every_layout(layout, expected_step):
    """Sums of 64 weighted tokens differ by rounding, those of another sample by as much as themselves."""
    for ours, theirs in zip(*map(jax.tree.leaves, (exact_step(*layout), expected_step)), strict=True):
        assert np.any(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2.0**-18 * np.abs(theirs).max())


@pytest.mark.full
def test_a_sampled_step_is_not_the_exact_one(expected_step):
    plain = exact_step(1, 1, True, "none", make_recipe("bf16"))
    for ours, exact in zip(*map(jax.tree.leaves, (expected_step, plain)), strict=True):
        assert np.abs(ours - exact).max() > 0.01 * np.abs(exact).max()


def temporaries(recipe):
    """Bytes of temporaries in a compiled step of a small Llama."""
    sizes: dict[str, Any] = dict(embed_dim=128, mlp_dim=512, max_seq_len=128, dtype="bfloat16")
    (rows,) = batches(1, rows=16, length=128)
    compiled = Trainer(make_mesh(), recipe=precision_config(recipe), **sizes).compile(rows)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.full
def test_a_step_needs_less_memory():
    assert temporaries("wta_crs") < 0.95 * temporaries("bf16")


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("wta_crs", dict(keep=0.0), "keep=0.0 must be above 0 and at most 1"),
        ("wta_crs", dict(keep=1.5), "keep=1.5 must be above 0 and at most 1"),
        ("mxfp8", dict(keep=0.5), "recipe='mxfp8': keep=0.5 needs a gradient of the kernel in the model's"),
        ("int8_switchback_m", dict(keep=0.5), "a recipe such as wta_crs or int8_switchback with residu"),
    ],
)
def test_recipes_that_cannot_sample(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_recipe(name, **options)


def test_sequences_split_over_explicit_axes_are_refused():
    mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.ones((2, 8, 4)), NamedSharding(mesh, P(None, "context", None)))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="the mesh axis 'context' splits them; shard"):
        sampling.sample(x, 0.5)
