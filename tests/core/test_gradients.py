"""Gradients of a batch: of the mean over all tokens, whatever the loss scale and the microbatches.

Shape letters: B rows · S tokens of a row · D features.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.core import gradients
from maxlp.core.train_state import abstract_model
from maxlp.families.llama import task
from maxlp.families.llama.task import NextTokenConfig
from maxlp.nn.layers import Frozen, param
from maxlp.parallel import sharding
from maxlp.precision.delayed import OverwriteWithGradient
from tests import fixtures

B, S, D = 8, 4, 3
# Rows i, M + i, 2M + i, … are one microbatch: the counts of 2 and of 4 microbatches differ.
COUNTS_B = np.array([4, 1, 3, 1, 4, 1, 1, 0])
W_D = np.array([0.5, -1.0, 0.25])


# --- a linear model whose gradients are known -----------------------------------------------------------


@jax.custom_vjp
def record_gradient(y_BS, largest):
    """``y_BS``; the "gradient" of ``largest`` is the largest gradient of ``y_BS``."""
    return y_BS


def _record_fwd(y_BS, largest):
    return y_BS, None


def _record_bwd(_, g_BS):
    return g_BS, jnp.max(jnp.abs(g_BS))


record_gradient.defvjp(_record_fwd, _record_bwd)


class Linear(nnx.Module):
    """x · w, with the state of a quantized matmul: the largest input and the largest output gradient."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.float32(W_D))
        self.largest_input = nnx.Variable(jnp.zeros(()))
        self.largest_output_grad = OverwriteWithGradient(jnp.zeros(()))

    def __call__(self, x_BSD):
        self.largest_input[...] = jnp.max(jnp.abs(x_BSD))
        return record_gradient(x_BSD @ self.w[...], self.largest_output_grad[...])


def squares(model, batch):
    """Sums of squared errors."""
    error_BS = model(batch["x"]) - batch["y"]
    sums = {"loss": jnp.square(error_BS), "correct": jnp.abs(error_BS) < 0.5}
    return {key: jnp.sum(jnp.where(batch["mask"], value, 0.0)) for key, value in sums.items()}


def num_tokens(batch):
    return jnp.sum(batch["mask"], dtype=jnp.float32)


def linear_batch():
    rng = np.random.default_rng(0)
    x_BSD, y_BS = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, S, D), (B, S)))
    # Errors grow with the row, so that the rows of different microbatches have different means.
    y_BS *= np.arange(1, 1 + B, dtype=np.float32)[:, None]
    return {"x": x_BSD, "y": y_BS, "mask": np.arange(S) < COUNTS_B[:, None]}


def expected_gradient(batch, rows=slice(None)):
    """Gradients of the mean over the tokens of these rows, and those of its outputs, in float64."""
    x_BSD, y_BS, mask_BS = (batch[key][rows].astype(np.float64) for key in ("x", "y", "mask"))
    g_BS = 2 * (x_BSD @ W_D - y_BS) * mask_BS / mask_BS.sum()
    return np.einsum("BS,BSD->D", g_BS, x_BSD), g_BS


def of_linear(batch, microbatches=1, loss_scale=None, measure_noise=False):
    graphdef, params, model_state = nnx.split(Linear(nnx.Rngs(0)), nnx.Param, ...)
    state = {"params": nnx.to_pure_dict(params), "model_state": nnx.to_pure_dict(model_state)}
    compute = gradients.token_gradients(
        squares, num_tokens, microbatches=microbatches, measure_noise=measure_noise
    )
    return jax.jit(functools.partial(compute, graphdef))(state | {"step": 0}, batch, loss_scale)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("loss_scale", [None, 2.0**10])
def test_gradients_are_those_of_the_mean_over_all_tokens(microbatches, loss_scale):
    batch = linear_batch()
    expected, g_BS = expected_gradient(batch)
    grads, model_state, metrics = of_linear(batch, microbatches, loss_scale)
    # Means over 15 tokens in float32; the terms of a gradient cancel.
    np.testing.assert_allclose(grads["w"], expected, rtol=1e-5)
    errors = (batch["x"] @ W_D - batch["y"])[batch["mask"]]
    np.testing.assert_allclose(metrics["loss"], np.mean(errors**2), rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], np.mean(np.abs(errors) < 0.5), rtol=1e-6)
    assert metrics["tokens"] == COUNTS_B.sum()
    # The state is the maximum over the microbatches; quantization sees the gradients with their scale.
    assert model_state["largest_input"] == np.abs(batch["x"]).max()
    scaled = np.abs(g_BS).max() * (loss_scale or 1.0)
    np.testing.assert_allclose(model_state["largest_output_grad"], scaled, rtol=1e-6)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_the_batch_distinguishes_a_mean_of_means_from_the_mean(microbatches):
    """So the test above would fail with a mean of means."""
    batch = linear_batch()
    means = [expected_gradient(batch, slice(i, None, microbatches))[0] for i in range(microbatches)]
    assert np.abs(np.mean(means, axis=0) / expected_gradient(batch)[0] - 1).max() > 0.1


@pytest.mark.parametrize(("microbatches", "loss_scale"), [(2, None), (4, 2.0**10)])
def test_the_norms_of_microbatches_are_those_of_gradients_whose_mean_is_the_batch_gradient(
    microbatches, loss_scale
):
    """Microbatch i of n counts n times its share, whatever its number of tokens."""
    batch, parts = linear_batch(), []
    for i in range(microbatches):
        rows = slice(i, None, microbatches)
        share = COUNTS_B[rows].sum() / COUNTS_B.sum()
        parts.append(microbatches * share * expected_gradient(batch, rows)[0])
    np.testing.assert_allclose(np.mean(parts, axis=0), expected_gradient(batch)[0], rtol=1e-12)  # float64
    _, _, metrics = of_linear(batch, microbatches, loss_scale, measure_noise=True)
    norm = np.sqrt(np.mean(np.sum(np.square(parts), axis=1)))
    np.testing.assert_allclose(metrics["microbatch_grad_norm"], norm, rtol=1e-6)  # float32
    assert "microbatch_grad_norm" not in of_linear(batch, microbatches, loss_scale)[2]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_batch_without_tokens_has_no_gradient(microbatches):
    grads, _, metrics = of_linear(linear_batch() | {"mask": np.zeros((B, S), bool)}, microbatches)
    assert not np.any(grads["w"]) and metrics["loss"] == 0


def test_gradients_with_a_loss_scale_are_unscaled_in_float32():
    grads = gradients.unscaled({"w": jnp.float16([6e-5, 1.0])}, jnp.float32(2.0**14))
    assert grads["w"].dtype == jnp.float32
    np.testing.assert_array_equal(grads["w"], np.float16([6e-5, 1.0]).astype(np.float32) / 2**14)


def test_squares_of_bfloat16_gradients_are_summed_in_float32():
    """bfloat16 does not have the number 257."""
    assert gradients.squared_norm({"w": jnp.ones(256, "bfloat16"), "b": jnp.ones(1, "bfloat16")}) == 257


# --- microbatches ---------------------------------------------------------------------------------------


def test_microbatches_take_every_nth_row_and_sharding_stays():
    rows_B = jnp.arange(8)
    with jax.set_mesh(fixtures.make_mesh(data=4)):
        rows_B = jax.device_put(rows_B, jax.P(("data", "fsdp")))
        parts = jax.jit(gradients.split_batch, static_argnums=1)(rows_B, 2)
        back = jax.jit(gradients.join_batch)(parts)
    np.testing.assert_array_equal(parts, [[0, 2, 4, 6], [1, 3, 5, 7]])
    # Each device keeps its own two rows.
    for shard, own in zip(parts.addressable_shards, rows_B.addressable_shards, strict=True):
        np.testing.assert_array_equal(np.asarray(shard.data)[:, 0], own.data)
    np.testing.assert_array_equal(back, rows_B)


def test_gradients_of_bfloat16_parameters_are_accumulated_in_float32():
    """1 + 256 · 2⁻⁸ = 2, where a sum in bfloat16 would stay at 1: it rounds 1 + 2⁻⁸ down."""
    small = 2.0**-8
    parts = {"w": jnp.concatenate([jnp.ones(1), jnp.full(256, small)]).astype(jnp.bfloat16)}
    total, rest = gradients.accumulate(lambda part: (part, part["w"]), {"w": jnp.bfloat16(0)}, parts)
    assert total["w"] == 2.0 and total["w"].dtype == jnp.float32 and rest.shape == (257,)


class WithFrozen(Linear):
    """`Linear` beside a large weight that is not trained."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.frozen = Frozen(jnp.ones((1024, 1024)))

    def __call__(self, x_BSD):
        return super().__call__(x_BSD) + jnp.mean(self.frozen[...])


def test_frozen_weights_are_not_copied_for_each_microbatch():
    graphdef, params, rest = nnx.split(WithFrozen(nnx.Rngs(0)), nnx.Param, ...)
    state = {"params": nnx.to_pure_dict(params), "model_state": nnx.to_pure_dict(rest), "step": 0}
    compute = gradients.token_gradients(squares, num_tokens, microbatches=8)
    compute = jax.jit(functools.partial(compute, graphdef))
    memory = compute.lower(state, linear_batch(), None).compile().memory_analysis()
    assert memory.temp_size_in_bytes < rest["frozen"].nbytes


# --- sharding -------------------------------------------------------------------------------------------


class Matrix(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = param(jnp.ones((8, 8)), ("embed", "mlp"))


def test_gradients_get_the_shards_of_their_parameters_from_any_others():
    graphdef, params, _ = nnx.split(Matrix(nnx.Rngs(0)), nnx.Param, ...)
    g = jnp.arange(64.0).reshape(8, 8)

    def by_columns(graphdef, state, batch, loss_scale):
        return {"w": jax.lax.with_sharding_constraint(g, jax.P(None, "fsdp"))}, {}, {}

    mesh = fixtures.make_mesh(fsdp=4, tensor=2)
    wanted = sharding.param_shardings(params, mesh)["w"]
    state = {"params": nnx.to_pure_dict(params), "model_state": {}}
    with jax.set_mesh(mesh):
        compute = jax.jit(functools.partial(gradients.shard_like_params(by_columns), graphdef))
        grads, _, _ = compute(state, {}, None)
    assert grads["w"].sharding.is_equivalent_to(wanted, 2)
    np.testing.assert_array_equal(grads["w"], g)


# --- a Llama --------------------------------------------------------------------------------------------


def of_llama(microbatches=1, loss_scale=None, **loss):
    make_model = fixtures.make_llama(init_std=0.3)
    graphdef, _ = abstract_model(make_model, fixtures.make_mesh())
    compute = task.loss_gradients(NextTokenConfig(z_loss=1e-3, **loss), microbatches=microbatches)

    @jax.jit
    def run(batch):
        params = nnx.to_pure_dict(nnx.state(make_model(nnx.Rngs(0)), nnx.Param))
        return compute(graphdef, {"params": params, "model_state": {}, "step": 0}, batch, loss_scale)

    grads, _, metrics = run(fixtures.batch(0, rows=4, length=16))
    return grads, metrics


def test_chunks_microbatches_and_loss_scale_do_not_change_gradients():
    """Chunks compute their gradients in the forward pass, and the backward pass multiplies them."""
    expected, expected_metrics = of_llama()
    grads, metrics = of_llama(microbatches=2, loss_scale=2.0**10, num_chunks=4)
    assert metrics.keys() == expected_metrics.keys()
    # Sums in another order.
    for key in metrics:
        np.testing.assert_allclose(metrics[key], expected_metrics[key], rtol=1e-6)
    for ours, grad in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, grad, rtol=0, atol=1e-5 * np.abs(grad).max())
