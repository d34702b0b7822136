"""The statistics of quantized tensors, against what a training step saw and against numpy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

from maxlp.core import gradients
from maxlp.core import train_step as step
from maxlp.families.llama import task as language
from maxlp.parallel import sharding
from maxlp.parallel.batches import global_batch
from maxlp.precision import health, make_recipe
from tests.precision import tiny

HISTORY = 4


@functools.cache
def prepared(devices=1, microbatches=1):
    """A Llama after three training steps whose first block stays plain, and its parts."""
    mesh = sharding.make_mesh(devices=jax.devices()[:devices])
    make = tiny.make_model(history=HISTORY, first=1)
    state, train = tiny.trainer(make, mesh=mesh, microbatches=microbatches, tx=optax.sgd(0.05))
    for i in range(3):
        state, _ = train(state, tiny.batch(i))
    graphdef, _ = step.abstract_state(make, optax.sgd(0.05), mesh)
    found = gradients.of_sums(language.next_token_loss, language.num_targets, microbatches=microbatches)
    measure = functools.partial(health.measure, graphdef=graphdef, gradients=found)
    return mesh, jax.device_get(state), train, measure


def measured(batch, devices=1, microbatches=1, change=lambda state: state):
    mesh, state, _, measure = prepared(devices, microbatches)
    with jax.set_mesh(mesh):
        program = jax.jit(measure).lower(change(state), global_batch(batch, mesh))
        compiled = program.compile(compiler_options={"xla_allow_excess_precision": False})
        return compiled(change(state), global_batch(batch, mesh))


def test_amax_scale_and_age_are_those_of_the_training_step():
    """The next training step enters the same amax into its histories, from which the scales come."""
    _, before, train, _ = prepared()
    flat = health.flatten(measured(tiny.batch(7)))
    histories = tiny.histories(before)
    after = tiny.histories(train(before, tiny.batch(7))[0])
    seen = 0
    for path, history in after.items():
        module, name = path.split("/dot_general/")
        tensor = name.removesuffix("_amax_history")
        of = lambda stat, m=module, t=tensor: flat[f"health/{m}/1/{t}/{stat}"]  # noqa: E731
        assert of("amax") == history[1, 0]
        earlier = histories[path][1]
        top = 57344.0 if tensor == "output_grad" else 448.0
        assert of("scale") == 2.0 ** np.ceil(np.log2(earlier.max() / top))
        assert of("age") == 1 + np.argmax(earlier)
        seen += 1
    assert seen == 21
    assert not [key for key in flat if key.startswith("health/layers/mlp/up_proj/0/")], "block 0 is plain"
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
    return jnp.asarray(np.where(rng.random(shape) < 0.1, 0, x), jnp.bfloat16)


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
    if name == "fp8_delayed":  # a history from when the tensor was a tenth of what it is
        history = jnp.asarray([0.01, 0.2, 0.05, 0.2])
        largest, age = np.float32(0.2), 2
    else:
        history, age = None, 0
        largest = np.abs(np.asarray(x, np.float32)).max(axes, keepdims=axes is not None)
    scale = (
        np.float64(largest) / top if "int8" in name else 2.0 ** np.ceil(np.log2(np.float64(largest) / top))
    )
    saturated, underflow = counted(x, scale, dtype)
    ours = health.statistics(recipe, tensor, x, history)
    expected = [np.abs(np.asarray(x, np.float32)).max(), scale.max(), age, saturated, underflow]
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
    assert underflow > 0.01 and (saturated > 0.01) == (name == "fp8_delayed")


def test_a_blocks_scale_is_its_own_and_what_is_not_quantized_is_zero():
    x = values((4, 64), spread=8.0)
    stats = dict(
        zip(health.STATISTICS, health.statistics(make_recipe("mxfp8"), "input", x, None), strict=True)
    )
    blocks = np.asarray(x, np.float64).reshape(4, 2, 32)
    scale = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(-1, keepdims=True) / 448))
    assert stats["underflow"] == pytest.approx(counted(blocks, scale, ml_dtypes.float8_e4m3fn)[1])
    assert stats["scale"] == scale.max() and stats["saturated"] == 0
    assert not np.any(health.statistics(make_recipe("bf16"), "input", x, None))


def test_saturation_of_each_tensor_in_the_model_is_seen_where_it_is():
    """A history that is too small for one tensor of one layer."""
    path = ("layers", "mlp", "down_proj", "dot_general")

    def shrink(name):
        def change(state):
            flat = nnx.traversals.flatten_mapping(state["model_state"])
            flat[(*path, name)] = flat[(*path, name)] / 64
            return dict(state, model_state=nnx.traversals.unflatten_mapping(flat))

        return change

    for tensor in health.TENSORS:
        flat = health.flatten(measured(tiny.batch(7), change=shrink(f"{tensor}_amax_history")))
        worst = max((v, k) for k, v in flat.items() if k.endswith("/saturated"))
        assert worst[1] == f"health/layers/mlp/down_proj/1/{tensor}/saturated" and worst[0] > 1e-3
        assert health.summary(flat)[f"health/{tensor}/saturated"] == worst[0]
        text = dict(health.lines(flat))[f"layers/mlp/down_proj {tensor}"]
        assert f"saturated {worst[0]:.2%} (layer 1)" in text


def test_shards_and_microbatches_see_the_same_tensors():
    whole = health.flatten(measured(tiny.batch(7)))
    split = health.flatten(measured(tiny.batch(7), devices=4, microbatches=2))
    assert whole.keys() == split.keys()
    _, state, *_ = prepared(4, 2)
    for key, value in split.items():
        if key.endswith("kernel/amax"):
            module = key.removeprefix("health/").removesuffix("/1/kernel/amax")
            kernel = functools.reduce(lambda d, k: d[k], [*module.split("/"), "kernel"], state["params"])
            assert value == np.abs(kernel[1].astype(ml_dtypes.bfloat16)).max()
        if key.endswith(("input/amax", "grad/amax")):
            assert value == pytest.approx(whole[key], rel=0.3)
        if key.endswith("underflow"):
            assert value == pytest.approx(whole[key], abs=0.03)


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
            assert ours[f"corr_{i}"][layer] == pytest.approx(corr[channel], abs=1e-5)
            assert ours[f"norm_{i}"][layer] == pytest.approx(np.sort(norms)[-i], rel=1e-5)
        assert ours["norm_median"][layer] == pytest.approx(np.median(norms), rel=1e-5)
    assert ours["channel_1"][1] == 7 and ours["corr_1"][1] < -0.99
    flat = health.flatten({"layers/mlp": {f"swiglu/{k}": v for k, v in ours.items()}})
    assert health.summary(flat)["health/swiglu/corr"] > 0.99
    ((label, text),) = health.lines(flat)
    assert label == "layers/mlp swiglu"
    assert text.startswith("corr -1.00 in channel 7 (layer 1), norm 1") and text.endswith(
        "× median (layer 1)"
    )


def test_the_models_kernels_are_measured():
    flat = health.flatten(measured(tiny.batch(7)))
    _, state, *_ = prepared()
    gate, up = (state["params"]["layers"]["mlp"][f"{p}_proj"]["kernel"][0] for p in ("gate", "up"))
    channel = int(flat["health/layers/mlp/0/swiglu/channel_1"])
    expected = np.corrcoef(gate[:, channel], up[:, channel])[0, 1]
    assert flat["health/layers/mlp/0/swiglu/corr_1"] == pytest.approx(expected, abs=1e-5)
