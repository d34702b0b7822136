"""Ring attention: the same numbers as on one device, equal work everywhere, no square and no whole copy."""

import functools
import math
import socket

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs.llama import debug
from maxlp.nn import attention
from maxlp.nn.attention import ring, tiles
from maxlp.parallel import sharding
from maxlp.planning import hlo, search
from maxlp.run import build
from maxlp.run.config import ConfigError
from tests import test_step, test_train
from tests.models.test_attention import assert_close, inputs, out_and_grads
from tests.precision import fixtures
from tests.test_step import Trained

MESHES = {
    "context8": dict(fsdp=1, context=8),
    "context4_tensor2": dict(fsdp=1, context=4, tensor=2),
    "fsdp2_context2_tensor2": dict(fsdp=2, context=2, tensor=2),
    "stage2_context2_tensor2": dict(stage=2, fsdp=1, context=2, tensor=2),
}


def on_mesh(name: str):
    return jax.set_mesh(sharding.make_mesh(**MESHES[name]))


# --- the order ----------------------------------------------------------------------------------------


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

        def there_and_back(x_BSD):
            x_BSD, vjp = jax.vjp(ring.unbalance, sharding.constrain(x_BSD, "batch", "embed_seq", None))
            return x_BSD, vjp(x_BSD)[0]

        x_BSD = jax.device_put(
            jnp.stack([balanced_BS, -balanced_BS], axis=-1).astype(jnp.float32),
            jax.P(sharding.RULES["batch"], sharding.RULES["embed_seq"]),
        )
        compiled = jax.jit(there_and_back).lower(x_BSD).compile()
        natural_BSD, back_BSD = compiled(x_BSD)
    np.testing.assert_array_equal(natural_BSD[1, :, 0], np.arange(S))
    np.testing.assert_array_equal(back_BSD, x_BSD)
    assert {c.kind for c in hlo.collectives(compiled.as_text(), dict(mesh.shape))} == {"collective-permute"}


def test_a_length_that_does_not_divide_stays_in_order():
    tokens_BS = jnp.arange(24)[None]
    with on_mesh("context8"):
        np.testing.assert_array_equal(ring.balance(tokens_BS), tokens_BS)
        assert ring.parts(24) == 1 and ring.parts(32) == 8


@pytest.mark.parametrize("devices", [2, 4, 5])
def test_every_tile_below_the_diagonal_once_and_as_many_on_each_device(devices):
    tiles = 4  # of a device: two of each chunk
    last = 2 * devices - 1
    place = lambda device, i: 2 * device + i if i < 2 else 2 * (last - device) + i - 2  # noqa: E731
    met = np.zeros((tiles * devices,) * 2, int)
    for device in range(devices):
        for step in range(devices):
            source = (device - step) % devices
            own = np.tril_indices(tiles)
            pairs = own if step == 0 else ring.far_pairs(tiles, device < step)
            assert len(pairs[0]) == (tiles * (tiles + 1) // 2 if step == 0 else tiles**2 // 2)
            for i, j in zip(*map(np.asarray, pairs), strict=True):
                met[place(device, i), place(source, j)] += 1
    np.testing.assert_array_equal(met, np.tril(np.ones_like(met)))


# --- attention ----------------------------------------------------------------------------------------


def balanced(attend):
    """Attention in the order of the ring, as a function of arrays in natural order."""

    def run(q_BSNH, k_BSKH, v_BSKH, *, causal, segment_ids_BS):
        B, S = q_BSNH.shape[:2]

        def there(x):
            return ring.balance(jnp.moveaxis(x, 1, -1).reshape(-1, S)).reshape(B, *x.shape[2:], S)

        q, k, v = (jnp.moveaxis(there(x), -1, 1) for x in (q_BSNH, k_BSKH, v_BSKH))
        ids = None if segment_ids_BS is None else there(segment_ids_BS)
        out_BSNH = attend(q, k, v, causal=causal, segment_ids_BS=ids)
        return ring.unbalance(out_BSNH.reshape(B, S, -1)).reshape(out_BSNH.shape)

    return run


@pytest.mark.parametrize(
    ("name", "causal", "packed"),
    [
        (None, True, True),
        ("context8", True, True),
        ("context4_tensor2", False, False),
        ("fsdp2_context2_tensor2", True, True),
    ],
)
def test_equals_plain_attention_with_its_gradients(name, causal, packed, monkeypatch):
    """Several tiles of 64 where a device has more than two chunks of that."""
    monkeypatch.setattr(tiles, "TILE", 64)
    *arrays, ids = inputs(2, 512, 4, 2, 16)
    args = (*arrays, ids if packed else None, causal)
    with on_mesh(name) if name else jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
        actual = out_and_grads(balanced(attention.ATTENTION["ring"]), *args)
    assert_close(actual, out_and_grads(attention.xla, *args), atol=1e-5)


def test_memory_grows_with_the_length_and_not_its_square():
    """Also of two recomputed layers, of which JAX takes out what is the same for both."""

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
    assert long < 2 * 16384**2 * 4 / 10  # a tenth of what the logits would take


def test_heads_that_do_not_divide_are_named():
    *arrays, _ = inputs(2, 64, 4, 1, 16)
    with (
        on_mesh("fsdp2_context2_tensor2"),
        pytest.raises(ValueError, match=r"num_kv_heads=1 to be a multiple of mesh\.tensor=2"),
    ):
        ring.ring(*arrays[:3], causal=True, segment_ids_BS=None)


# --- in training --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        (dict(fsdp=2, context=4), dict(microbatches=2, num_chunks=2, remat="block")),
        (dict(fsdp=2, context=2, tensor=2), dict(num_chunks=4)),
        pytest.param(
            dict(data=2, fsdp=1, context=4),
            dict(scan_layers=False, remat="dots"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dict(stage=2, fsdp=1, context=2, tensor=2),
            dict(num_chunks=2, pipeline=dict(microbatches=2)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_train_step_equals_one_device_with_plain_attention(mesh, how, one_device):
    got = Trained(mesh=mesh, attention="ring", **how).run()
    test_step.assert_same(got, one_device)


@pytest.fixture(scope="module")
def one_device():
    return Trained(devices=1).run()


@pytest.mark.parametrize(
    ("recipe", "mesh"),
    [
        ("fp8_delayed", dict(fsdp=2, context=2, tensor=2)),
        ("fp8_current", dict(fsdp=1, context=8)),
    ],
)
@pytest.mark.slow
def test_eight_bits_and_their_state_equal_one_device(recipe, mesh, monkeypatch):
    """Rounding to eight bits makes a step of what differs in the last bit, so that a gradient's largest
    entry may differ by some thousandths."""

    def run(mesh, attention):
        monkeypatch.setitem(fixtures.SIZES, "attention", attention)
        make = fixtures.make_model(recipe, dtype="float32", remat="block")
        state, train = fixtures.trainer(make, mesh=mesh, microbatches=2, tx=optax.sgd(0.0))
        if recipe == "fp8_delayed":
            state = fixtures.warm(state, input=4.0, kernel=0.4, output_grad=1e-3)
        found = []
        for i in range(2):
            state, metrics = train(state, fixtures.batch(i))
            found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        return found, fixtures.histories(state)

    want, histories = run(sharding.make_mesh(devices=jax.devices()[:1]), "xla")
    got, ours = run(sharding.make_mesh(**mesh), "ring")
    np.testing.assert_allclose(got, want, rtol=1e-4)
    for path, history in histories.items():
        np.testing.assert_allclose(ours[path], history, rtol=1e-2, err_msg=path)


WHOLE_LAYERS = {"train.release_gradients": True, "optimizer.clip_norm": 0.0, "spikes.guard": "off"}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model.attention": "xla"}, "use config.model.attention=ring"),
        (
            WHOLE_LAYERS,
            "release_gradients=True does not go with config.mesh.context=2",
        ),
        ({"data.seq_len": 252}, "seq_len=252 is not a multiple of config.mesh.context=2 × 2 × config.mesh"),
        (
            {"data.seq_len": 24, "loss.num_chunks": 8},
            "seq_len=24 is not a multiple of config.mesh.context=2",
        ),
        ({"model.num_kv_heads": 1}, "num_kv_heads=1 is not a multiple of config.mesh.tensor=2"),
    ],
)
def test_a_config_that_cannot_be_split_is_named(values, says):
    base = {"model.attention": "ring", "model.num_heads": 4, "model.num_kv_heads": 2}
    base |= {"mesh.context": 2, "mesh.tensor": 2, "data.tokenizer": "bytes"}
    c = search.changed(debug.get_config(), base)
    build.check(c, build.mesh(c))
    c = search.changed(c, values)
    with pytest.raises(ConfigError, match=says):
        build.check(c, build.mesh(c))


@pytest.mark.slow
def test_processes_that_share_their_rows_train_as_one(tmp_path):
    """Two processes with one device each hold halves of the same sequences."""
    options = ("--config.train.total_steps=4", "--config.optimizer.schedule=constant")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    group = [
        test_train.start(
            tmp_path / "two",
            *options,
            "--config.mesh.context=2",
            "--config.model.attention=ring",
            MAXLP_COORDINATOR=f"localhost:{port}",
            MAXLP_NUM_PROCESSES="2",
            MAXLP_PROCESS_ID=str(rank),
        )
        for rank in range(2)
    ]
    for process in group:
        test_train.finish(process)
    test_train.run(tmp_path / "one", *options)
    got, want = (test_train.losses(tmp_path / name) for name in ("two", "one"))
    assert sorted(got) == sorted(want) == [1, 2, 3, 4]
    assert all(math.isclose(got[n], want[n], rel_tol=1e-4) for n in want), (got, want)
