"""The statistics of quantized tensors, against those of a training step and against numpy."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

from maxlp.families.llama.task import NextTokenConfig
from maxlp.parallel.batches import global_batch
from maxlp.precision import health, make_recipe
from maxlp.run.measurements import compiled
from tests.fixtures import (
    NO_EXCESS_PRECISION,
    Trainer,
    batch,
    batches,
    histories,
    precision_config,
    with_full_histories,
)
from tests.precision.fixtures import exact_batch, exact_trainer

HISTORY = 4
statistics = jax.jit(health.statistics, static_argnames=("recipe", "tensor"))


def measurement(trainer):
    """A function (state, batch) -> statistics by path."""
    how = dict(graphdef=trainer.graphdef, gradients=trainer.gradients)
    measure = jax.jit(functools.partial(health.measure, **how))

    @functools.cache
    def compiled():
        return measure.lower(trainer.abstract, batch(0)).compile(compiler_options=NO_EXCESS_PRECISION)

    def run(state, batch):
        with jax.set_mesh(trainer.mesh):
            return health.flatten(jax.device_get(compiled()(state, batch)))

    return run


@pytest.fixture(scope="module")
def llama():
    """A Llama whose first block is not quantized: its state after three steps, trainer and measurement."""
    recipe = precision_config("fp8_delayed", history=HISTORY, first_blocks=1)
    trainer = Trainer(recipe=recipe, dtype="bfloat16", tx=optax.sgd(0.05))
    state, _ = trainer.run(trainer.init(), batches(3))
    return jax.device_get(state), trainer, measurement(trainer)


@pytest.mark.full
def test_amax_scale_and_age_are_those_of_the_training_step(llama):
    """The next training step enters the same amax into its histories, from which the scales come."""
    before, trainer, measure = llama
    flat = measure(before, batch(7))
    after = histories(trainer.run(before, [batch(7)])[0])
    for path, history in after.items():
        module, name = path.split("/dot_general/")
        where = f"health/{module}/1/{name.removesuffix('_amax_history')}"
        assert flat[f"{where}/amax"] == history[1, 0]
        earlier = histories(before)[path][1]
        top = 57344.0 if "output_grad" in name else 448.0
        assert flat[f"{where}/scale"] == 2.0 ** np.ceil(np.log2(earlier.max() / top))
        assert flat[f"{where}/age"] == 1 + np.argmax(earlier)
    assert len(after) == 21
    assert not [key for key in flat if key.startswith("health/layers/mlp/up_proj/0/")], "not quantized"
    assert {key.rpartition("/")[2] for key in flat if "_proj" in key} == set(health.STATISTICS)


def counted(x, scale, dtype):
    """Shares that saturate and underflow, counted in float64 with the casts of ml_dtypes."""
    x = np.asarray(x, np.float64) / np.asarray(scale, np.float64)
    top = float(ml_dtypes.finfo(dtype).max) if dtype != np.int8 else 127.0
    codes = np.rint(x) if dtype == np.int8 else np.clip(x, -top, top).astype(np.float32).astype(dtype)
    nonzero = x != 0
    vanished = nonzero & (np.asarray(codes, np.float64) == 0)
    return np.mean(np.abs(x) > top * (1 + 2**-16)), np.sum(vanished) / max(np.sum(nonzero), 1)


def values(shape, seed=0, spread=3.0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 10.0 ** rng.uniform(-spread, 0, shape)
    return np.where(rng.random(shape) < 0.1, 0, x).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    "name, tensor, dtype, axes",
    [
        ("fp8_delayed", "input", ml_dtypes.float8_e4m3fn, None),
        ("fp8_delayed", "output_grad", ml_dtypes.float8_e5m2, None),
        ("fp8_current", "kernel", ml_dtypes.float8_e4m3fn, None),
        ("fp8_rowwise", "output_grad", ml_dtypes.float8_e4m3fn, -1),
        ("int8_switchback", "input", np.int8, -1),
        ("int8_switchback", "kernel", np.int8, None),
        ("int8_switchback_q", "kernel", np.int8, 0),
    ],
)
def test_shares_equal_those_counted_with_numpy(name, tensor, dtype, axes):
    recipe = make_recipe(name)
    x = values((48, 64), spread=14.0)
    top = 127.0 if dtype == np.int8 else float(ml_dtypes.finfo(dtype).max)
    if name == "fp8_delayed":  # a history from when the tensor was a tenth of its size
        history = jnp.asarray([0.01, 0.2, 0.05, 0.2])
        largest, age = np.float32(0.2), 2
    else:
        history, age = None, 0
        largest = np.abs(np.asarray(x, np.float32)).max(axes, keepdims=axes is not None)
    scale = (
        np.float64(largest) / top if "int8" in name else 2.0 ** np.ceil(np.log2(np.float64(largest) / top))
    )
    saturated, underflow = counted(x, scale, dtype)
    ours = statistics(recipe, tensor, x, history)
    expected = [np.abs(np.asarray(x, np.float32)).max(), scale.max(), age, saturated, underflow]
    # The counts are exact; the scales are quotients in float32.
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
    assert underflow > 0.01 and (saturated > 0.01) == (name == "fp8_delayed")


def test_each_block_has_its_own_scale_and_unquantized_tensors_are_zero():
    x = values((4, 64), spread=8.0)
    stats = dict(zip(health.STATISTICS, statistics(make_recipe("mxfp8"), "input", x, None), strict=True))
    blocks = np.asarray(x, np.float64).reshape(4, 2, 32)
    scale = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(-1, keepdims=True) / 448))
    assert stats["underflow"] == pytest.approx(counted(blocks, scale, ml_dtypes.float8_e4m3fn)[1])
    assert stats["scale"] == scale.max() and stats["saturated"] == 0
    assert not np.any(statistics(make_recipe("bf16"), "input", x, None))


@pytest.mark.parametrize("name", ["mxfp8", "fp8_rowwise", "fp8_current"])
def test_zeros_have_no_scale(name):
    """Tokens without a target have no gradient, nor has a stage of a pipeline while it is idle."""
    x, scale = 1e-6 * values((4, 64)).astype(np.float32), health.STATISTICS.index("scale")
    padded = np.concatenate([x, np.zeros_like(x)])
    of_x, of_padded, of_zeros = (
        statistics(make_recipe(name), "output_grad", a, None)[scale] for a in (x, padded, 0 * x)
    )
    assert of_zeros < of_x == of_padded < 1e-6


@pytest.mark.full
def test_saturation_of_each_tensor_in_the_model_is_located(llama):
    """A history that is too small for one tensor of one layer."""
    state, _, measure = llama
    for tensor in health.TENSORS:
        flat = nnx.traversals.flatten_mapping(state["model_state"])
        history = ("layers", "mlp", "down_proj", "dot_general", f"{tensor}_amax_history")
        flat[history] = flat[history] / 64
        changed = dict(state, model_state=nnx.traversals.unflatten_mapping(flat))
        found = measure(changed, batch(7))
        worst = max((v, k) for k, v in found.items() if k.endswith("/saturated"))
        assert worst[1] == f"health/layers/mlp/down_proj/1/{tensor}/saturated" and worst[0] > 1e-3
        assert health.summary(found)[f"health/{tensor}/saturated"] == worst[0]
        text = dict(health.lines(found))[f"layers/mlp/down_proj {tensor}"]
        assert f"saturated {worst[0]:.2%} (layer 1)" in text


def test_a_share_of_a_few_in_a_million_is_not_shown_as_none():
    shown = [health.percent(share) for share in (0.0, 3e-6, 4.9e-5, 5e-5, 0.1234, 1.0)]
    assert shown == ["0.00%", "3.0e-04%", "4.9e-03%", "0.01%", "12.34%", "100.00%"]


def test_shards_and_microbatches_measure_the_same_tensors():
    """In a network without rounding, ranges and scales are equal; shares are the worst microbatch's."""
    state = with_full_histories(exact_trainer().init(), input=2.0, kernel=0.5, output_grad=0.5)
    state, found = jax.device_get(state), []
    for devices, microbatches in ((1, 1), (4, 2)):
        trainer = exact_trainer(devices, microbatches=microbatches)
        with jax.set_mesh(trainer.mesh):
            how = dict(graphdef=trainer.graphdef, gradients=trainer.gradients)
            probe = compiled(health.measure, health.metrics, **how)
            metrics = probe(state, global_batch(exact_batch(1), trainer.mesh))
        worst = health.summary(metrics)
        assert worst.items() <= metrics.items()
        found.append({key: value for key, value in metrics.items() if key not in worst})
    whole, split = found
    assert whole.keys() == split.keys() and len(whole) == 3 * 2 * 3 * len(health.STATISTICS)
    assert any(value for key, value in whole.items() if key.endswith("/saturated"))
    for key, value in split.items():
        if key.endswith(("/amax", "/scale", "/age")):
            assert value == whole[key] and value > 0, key
        else:
            assert whole[key] <= value <= whole[key] + 0.1, key


@pytest.mark.full
def test_a_head_in_chunks_is_not_measured():
    """Its loss is a function with a gradient of its own, out of which only sums come."""
    recipe = precision_config(rules=(("*/up_proj", "fp8_current"), ("lm_head", "fp8_current")))
    found = []
    for chunks in (1, 2):
        trainer = Trainer(recipe=recipe, loss=NextTokenConfig(num_chunks=chunks))
        found.append(measurement(trainer)(trainer.init(), batch(0)))
    whole, in_chunks = found
    of_head = {key for key in whole if key.startswith("health/lm_head/")}
    assert len(of_head) == 3 * len(health.STATISTICS) and in_chunks.keys() == whole.keys() - of_head
    for key, value in in_chunks.items():
        # The gradients of the head are sums in another order, or of other neighbours in E4M3 and E5M2.
        assert value == pytest.approx(whole[key], rel=0.1, abs=1e-3), key


# --- SwiGLU -------------------------------------------------------------------------------------------


def test_alignment_equals_numpy_and_finds_the_aligned_channel():
    rng = np.random.default_rng(0)
    gate, up = rng.normal(size=(2, 3, 64, 40)).astype(np.float32)
    up[1, :, 7] = -20 * gate[1, :, 7] + 0.1 * rng.normal(size=64)
    ours = jax.jit(health.alignment)(gate, up)
    for layer in range(3):
        corr = np.array([np.corrcoef(gate[layer, :, i], up[layer, :, i])[0, 1] for i in range(40)])
        order = np.argsort(-np.abs(corr))[:4]
        norms = np.linalg.norm(gate[layer], axis=0) * np.linalg.norm(up[layer], axis=0)
        for i, channel in enumerate(order, 1):
            assert ours[f"channel_{i}"][layer] == channel
            # Sums over 64 tokens in float32.
            assert ours[f"corr_{i}"][layer] == pytest.approx(corr[channel], abs=1e-6)
            assert ours[f"norm_{i}"][layer] == pytest.approx(np.sort(norms)[-i], rel=1e-6)
        assert ours["norm_median"][layer] == pytest.approx(np.median(norms), rel=1e-6)
    assert ours["channel_1"][1] == 7 and ours["corr_1"][1] < -0.99
    flat = health.flatten({"layers/mlp": {f"swiglu/{k}": v for k, v in ours.items()}})
    assert health.summary(flat)["health/swiglu/corr"] > 0.99
    ((label, text),) = health.lines(flat)
    assert label == "layers/mlp swiglu"
    assert text.startswith("corr -1.00 in channel 7 (layer 1), norm 1") and text.endswith(
        "× median (layer 1)"
    )


def test_a_swiglu_of_which_most_channels_are_pruned_is_described():
    gate, up = np.random.default_rng(0).normal(size=(2, 1, 64, 40)).astype(np.float32)
    up[:, :, 10:] = 0.0
    flat = health.flatten({"mlp": {f"swiglu/{k}": v for k, v in health.alignment(gate, up).items()}})
    ((_, text),) = health.lines(flat)
    assert re.fullmatch(r"corr .0\.\d\d in channel \d \(layer 0\), norm inf × median \(layer 0\)", text)


def test_the_models_kernels_are_measured(llama):
    state, _, measure = llama
    flat = measure(state, batch(7))
    gate, up = (state["params"]["layers"]["mlp"][f"{p}_proj"]["kernel"][0] for p in ("gate", "up"))
    channel = int(flat["health/layers/mlp/0/swiglu/channel_1"])
    expected = np.corrcoef(gate[:, channel], up[:, channel])[0, 1]
    assert flat["health/layers/mlp/0/swiglu/corr_1"] == pytest.approx(expected, abs=1e-6)  # sums in float32
