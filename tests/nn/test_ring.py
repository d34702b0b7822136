"""Ring attention: equal to plain attention, with equal work on all devices and no (S, S) array."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.families.llama.task import NextTokenConfig
from maxlp.nn.attention import ring, tiles
from maxlp.nn.attention.dense import dense
from maxlp.parallel import sharding
from maxlp.parallel.schedule import PipelineConfig
from maxlp.planning import hlo
from tests.fixtures import (
    Trainer,
    batches,
    make_mesh,
    one_device_step,
    precision_config,
    with_full_histories,
)
from tests.nn.fixtures import assert_close, in_natural_order, inputs, out_and_grads

MESHES = {
    "context8": dict(fsdp=1, context=8),
    "context4_tensor2": dict(fsdp=1, context=4, tensor=2),
    "fsdp2_context2_tensor2": dict(fsdp=2, context=2, tensor=2),
    "stage2_context2_tensor2": dict(stage=2, fsdp=1, context=2, tensor=2),
}


def on_mesh(name: str):
    return jax.set_mesh(sharding.make_mesh(**MESHES[name]))


# --- the balanced order ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MESHES)
def test_unbalance_is_the_inverse_of_balance_and_gathers_nothing(name):
    mesh = sharding.make_mesh(**MESHES[name])
    n, B, S = mesh.shape["context"], 2, 64
    with jax.set_mesh(mesh):
        balanced_BS = jax.jit(ring.balance)(jnp.tile(jnp.arange(S), (B, 1)))
        chunks = np.arange(S).reshape(2 * n, -1)
        for shard in balanced_BS.addressable_shards:
            i = int(np.argwhere(mesh.devices == shard.device)[0, sharding.MESH_AXES.index("context")])
            np.testing.assert_array_equal(
                np.asarray(shard.data)[0], np.concatenate([chunks[i], chunks[2 * n - 1 - i]])
            )

        def unbalance_and_back(x_BSD):
            x_BSD, vjp = jax.vjp(ring.unbalance, sharding.constrain(x_BSD, "batch", "embed_seq", None))
            return x_BSD, vjp(x_BSD)[0]

        x_BSD = jax.device_put(
            jnp.stack([balanced_BS, -balanced_BS], axis=-1).astype(jnp.float32),
            jax.P(sharding.RULES["batch"], sharding.RULES["embed_seq"]),
        )
        compiled = jax.jit(unbalance_and_back).lower(x_BSD).compile()
        natural_BSD, back_BSD = compiled(x_BSD)
    np.testing.assert_array_equal(natural_BSD[1, :, 0], np.arange(S))
    np.testing.assert_array_equal(back_BSD, x_BSD)
    assert {c.kind for c in hlo.collectives(compiled.as_text(), dict(mesh.shape))} == {"collective-permute"}


def test_a_length_that_does_not_divide_keeps_its_natural_order():
    tokens_BS = jnp.arange(24)[None]
    with on_mesh("context8"):
        np.testing.assert_array_equal(ring.balance(tokens_BS), tokens_BS)
        assert ring.ring_size(24) == 1 and ring.ring_size(32) == 8


@pytest.mark.parametrize("devices", [2, 4, 5])
def test_each_tile_below_the_diagonal_is_visited_once_and_devices_visit_equally_many(devices):
    n = 4  # tiles of a device: two of each chunk
    last = 2 * devices - 1

    def position(device: int, tile: int) -> int:
        return 2 * device + tile if tile < 2 else 2 * (last - device) + tile - 2

    visits = np.zeros((n * devices,) * 2, int)
    for device in range(devices):
        for step in range(devices):
            source = (device - step) % devices
            pairs = np.tril_indices(n) if step == 0 else ring.remote_pairs(n, device < step)
            assert len(pairs[0]) == (n * (n + 1) // 2 if step == 0 else n**2 // 2)
            for i, j in zip(*map(np.asarray, pairs), strict=True):
                visits[position(device, i), position(source, j)] += 1
    np.testing.assert_array_equal(visits, np.tril(np.ones_like(visits)))


# --- attention ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "causal", "packed"),
    [
        (None, True, True),
        ("context8", True, True),
        ("context4_tensor2", False, False),
        ("fsdp2_context2_tensor2", True, True),
    ],
)
def test_output_and_gradients_equal_dense_attention(name, causal, packed, monkeypatch):
    """Several tiles of 64 where a chunk is longer than that."""
    monkeypatch.setattr(tiles, "MAX_TILE_SIZE", 64)
    *arrays, ids = inputs(2, 512, 4, 2, 16)
    args = (*arrays, ids if packed else None, causal)
    with on_mesh(name) if name else jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
        actual = out_and_grads(in_natural_order(ring.ring), *args)
    assert_close(actual, out_and_grads(dense, *args))


def test_replicas_that_compute_their_own_gradients_attend_to_their_own_rows():
    """As in `core.replicas` and `core.local_steps`, where the axis ``data`` is split already."""
    *args, ids = inputs(8, 64, 4, 2, 16)
    rows = jax.P("data")
    with jax.set_mesh(sharding.make_mesh(data=2, fsdp=2, tensor=2)):
        of_replica = jax.shard_map(
            lambda *args: out_and_grads(ring.ring, *args),
            in_specs=(rows,) * 5,
            out_specs=(rows,) * 4,
            axis_names={"data"},
            check_vma=False,
        )
        actual = jax.jit(of_replica)(*args, ids)
    assert_close(actual, out_and_grads(dense, *args, ids))


def test_products_of_bfloat16_tiles_are_summed_in_float32():
    q, k, v, *_ = inputs(1, 64, 2, 1, 16, "bfloat16")

    def total(q, k, v):
        return jnp.sum(ring.ring(q, k, v, causal=True, segment_ids_BS=None), dtype=jnp.float32)

    program = str(jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(q, k, v))
    dtypes = re.findall(r":(\w+)\[[^]]*\] = dot_general", program)
    assert len(dtypes) >= 5 and set(dtypes) == {"f32"}


@pytest.mark.full
def test_memory_grows_linearly_with_the_length():
    """With two recomputed layers: what is equal in both, like masks, must not be hoisted and kept."""

    def layer(ids_BS, x_BSNH, _):
        return ring.ring(x_BSNH, *(x_BSNH[:, :, :1],) * 2, causal=True, segment_ids_BS=ids_BS), None

    def loss(x_BSNH, ids_BS):
        layers = jax.checkpoint(functools.partial(layer, ids_BS))
        return jnp.sum(jax.lax.scan(layers, x_BSNH, length=2)[0])

    def temporaries(S):
        x, ids = jax.ShapeDtypeStruct((1, S, 2, 16), jnp.float32), jax.ShapeDtypeStruct((1, S), jnp.int32)
        compiled = jax.jit(jax.grad(loss)).lower(x, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporaries(8192), temporaries(16384)
    assert long < 2.1 * short
    assert long < 2 * 16384**2 * 4 / 10  # a tenth of the memory of the logits


# --- in training ----------------------------------------------------------------------------------------

L, B, S = 8, 16, 32


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        (
            dict(fsdp=2, context=2, tensor=2),
            dict(microbatches=2, loss=NextTokenConfig(num_chunks=4)),
        ),
        pytest.param(
            dict(fsdp=2, context=4), dict(loss=NextTokenConfig(num_chunks=2)), marks=pytest.mark.slow
        ),
        pytest.param(
            dict(data=2, context=4), dict(scan_layers=False, remat="dots"), marks=pytest.mark.slow
        ),
        pytest.param(
            dict(stage=2, context=2, tensor=2),
            dict(loss=NextTokenConfig(num_chunks=2), pipeline=PipelineConfig(microbatches=2)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_step_equals_dense_attention_on_one_device(mesh, how):
    params, expected, expected_metrics = one_device_step(L, B, S)
    trainer = Trainer(make_mesh(**mesh), **dict(num_layers=L, attention="ring", remat="block") | how)
    state, [metrics] = trainer.run(trainer.init(params), batches(1, B, S))
    # Float32 sums in another order.
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], expected_metrics["grad_norm"], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6),
        jax.device_get(state["params"]),
        expected,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "mesh"),
    [
        ("fp8_delayed", dict(fsdp=2, context=2, tensor=2)),
        ("fp8_current", dict(context=8)),
    ],
)
def test_steps_in_eight_bits_equal_dense_attention_on_one_device(recipe, mesh):
    """Losses and gradient norms are equal to float32 rounding in most steps.

    In some steps an element is so close to the middle between two numbers of the format that a difference
    in its last bit moves it by a whole step of the format. This changes the gradient norm by some
    thousandths, and the largest element of a gradient by some hundredths.
    """

    def run(trainer):
        state, metrics = trainer.run(with_full_histories(trainer.init()), batches(8, B, S))
        return [[m["loss"], m["grad_norm"]] for m in metrics], jax.device_get(state["model_state"])

    options = dict(history=4) if recipe == "fp8_delayed" else {}
    how = dict(recipe=precision_config(recipe, **options), tx=optax.sgd(0.0), microbatches=2, remat="block")
    expected, histories = run(Trainer(**how))
    actual, our_histories = run(Trainer(make_mesh(**mesh), attention="ring", **how))
    difference = np.abs(np.divide(actual, expected) - 1)
    assert np.median(difference) < 1e-5 and difference.max() < 5e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-2), our_histories, histories)
