"""Kernels whose gradients are scattered over ``fsdp`` in 8 bits."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from maxlp.core import replicas
from maxlp.families.llama.task import NextTokenConfig, loss_gradients
from maxlp.nn.layers import Linear, dot_general
from maxlp.parallel import exchange, sharding
from maxlp.precision import scatter
from maxlp.precision.scatter import Scatter
from tests.families.clip.fixtures import make_clip
from tests.fixtures import Trainer, batch, exchanged_bytes, make_llama, make_mesh, precision_config

STEPS = {"int8": 127, "float8_e4m3fn": 14}  # in a block's largest number, where E4M3's are widest


def scattering(make_model, format_name="int8"):
    """Makes the model so that gradients of its blocks' kernels are scattered in this format."""

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = make_model(rngs)
        scatter.set_format(model, format_name)
        return model

    return make


def product(x, g):
    return jax.lax.dot_general(x, g, (((0, 1), (0, 1)), ((), ())))


@functools.partial(jax.jit, static_argnums=0)
def summed(how: Scatter, x, g):
    return how(product, x, g)


@pytest.mark.parametrize("format_name", STEPS)
@pytest.mark.parametrize(
    ("axes", "sizes", "dims"),
    [
        (("embed", "mlp"), dict(fsdp=8), (64, 301)),
        (("mlp", "embed"), dict(data=2, fsdp=2, tensor=2), (602, 96)),
        (("embed", "q_heads"), dict(data=2, fsdp=4), (64, 96)),
    ],
)
def test_a_sum_is_within_a_step_of_each_device(format_name, axes, sizes, dims):
    mesh, rng = make_mesh(**sizes), np.random.default_rng(0)
    shards = sharding.batch_shards(mesh)
    x, g = (rng.standard_normal((16, 8, dim)).astype(np.float32) for dim in dims)
    x[:2] *= 30  # one device has larger gradients than the others
    with jax.set_mesh(mesh):
        x_split, g_split = (jax.device_put(a, sharding.batch_sharding(mesh)) for a in (x, g))
        total = summed(Scatter(format_name, axes), x_split, g_split)
    parts = np.einsum("dbsk,dbsn->dkn", *(a.reshape(shards, -1, *a.shape[1:]) for a in (x, g)))
    along = 2 if axes[0] == "embed" else 1  # blocks lie along the dim that is not scattered
    largest = np.abs(parts).max(axis=along, keepdims=True)  # of a block at most
    bound = largest.sum(axis=0) / STEPS[format_name] + 1e-5 * np.abs(parts).sum(axis=0)
    error = np.abs(total - parts.sum(axis=0))
    assert (error < bound).all() and error.max() > 0.1 * (bound.max() - largest.min())


@pytest.mark.parametrize(
    ("dim", "tensor"), [(5461, 1), (2736, 1), (2736, 2), (1376, 2), (5504, 1), (602, 2), (128, 1), (64, 1)]
)
def test_values_of_any_dim_are_sent_in_few_more_than_8_bits(dim, tensor):
    """With scales and padding. Nothing else is exchanged, but the sum over parts that is the random key."""
    how, K = Scatter("int8", ("embed", "mlp")), 4
    with jax.set_mesh(make_mesh(fsdp=2, tensor=tensor)):
        rows = [
            jax.ShapeDtypeStruct((2, 1, width), jnp.float32, sharding=PartitionSpec("fsdp"))
            for width in (K, dim)
        ]
        sent = exchanged_bytes(summed.lower(how, *rows).compile().as_text())
    of_scales, of_values = sent.pop(("all-to-all", "f32")), sent.pop(("all-to-all", "s8"))
    assert sent.pop(("all-reduce", "u32"), 4) == 4 and not sent
    part = dim // tensor
    assert of_scales == 4 * K * math.ceil(part / exchange.BLOCK)
    assert 8 * (of_scales + of_values) / (K * part) <= (8.5 if part < 128 else 8.3)
    assert of_scales + of_values == K * scatter.num_bytes(part, "int8")


def test_rounding_is_right_on_average():
    """Values far below a quantization step on every device are kept in the mean of many sums."""
    draws, small, step = 512, 0.1, 1.0  # a block's largest number is 127 steps
    how, mesh = Scatter("int8", ("embed", "mlp")), make_mesh(fsdp=2)
    x = np.zeros((draws, 2, 1, 64), np.float32)
    x[..., 0] = 127 * step
    x[..., 1:32] = small * step
    x[..., 32:] = np.random.default_rng(0).standard_normal((draws, 2, 1, 32))  # so that draws differ
    ones = np.ones((2, 1, 2), np.float32)  # the kernel is (2, 64), and a block a row of it
    with jax.set_mesh(mesh):
        sums = np.stack([summed(how, ones, one) for one in x])
    rounded = sums[:, 0, 1:32]
    assert set(np.unique(rounded)) == {0.0, step, 2 * step}
    deviation = step * np.sqrt(2 * small * (1 - small) / rounded.size)
    assert abs(rounded.mean() - 2 * small * step) < 5 * deviation


def test_one_device_and_no_mesh_add_nothing():
    x = np.random.default_rng(0).standard_normal((4, 2, 8)).astype(np.float32)
    how = Scatter("int8", ("embed", "mlp"))
    np.testing.assert_array_equal(how(product, x, x), product(x, x))
    with jax.set_mesh(make_mesh(tensor=2)):
        np.testing.assert_array_equal(how(product, x, x), product(x, x))


def test_the_kernels_of_blocks_are_scattered_and_no_others():
    model = scattering(make_llama())(nnx.Rngs(0))
    found = {path: m.sum_over_rows for path, m in nnx.iter_modules(model) if isinstance(m, Linear)}
    assert found.pop(("lm_head",)) is None
    assert found[("layers", "attn", "o_proj")] == Scatter("int8", ("q_heads", "embed"))
    assert len(found) == 7 and None not in found.values()
    clip = make_clip()
    scatter.set_format(clip, "int8")
    for tower in ("visual", "text"):
        assert getattr(clip, tower).layers.attn.o_proj.sum_over_rows is not None


def gradient(before: dict, state: dict) -> dict:
    """What a step of plain gradient descent has subtracted."""
    return jax.tree.map(lambda a, b: np.asarray(a - b, np.float64), before, jax.device_get(state["params"]))


# The norm of an error, relative to that of the gradient: a stochastic rounding has a variance of at most a
# quarter of a step's square, and a block's largest number is less than 8 root mean squares. Recipes that
# round gradients stochastically are left to `tests/matrix.py`.
TOLERANCE = {name: 8 * 0.5 / steps for name, steps in STEPS.items()}


@pytest.mark.parametrize(
    ("sizes", "recipe", "format_name", "changes"),
    [
        (dict(data=2, fsdp=2, tensor=2), None, "int8", dict(mlp_dim=602)),  # two parts of two blocks
        pytest.param(
            dict(fsdp=4), "fp8_delayed", "int8", dict(microbatches=2, remat="block"), marks=pytest.mark.full
        ),
        pytest.param(dict(fsdp=4), None, "int8", dict(mlp_dim=301), marks=pytest.mark.full),
        pytest.param(dict(fsdp=8), None, "float8_e4m3fn", {}, marks=pytest.mark.full),
        pytest.param(
            dict(fsdp=4), "int8_all", "int8", {}, marks=[pytest.mark.full, pytest.mark.default_emitters]
        ),
        pytest.param(dict(fsdp=4), "mxfp8", "int8", {}, marks=pytest.mark.full),
        pytest.param(dict(fsdp=4), "wta_crs", "int8", dict(scan_layers=False), marks=pytest.mark.slow),
        pytest.param(dict(fsdp=4), None, "int8", dict(released=True), marks=pytest.mark.full),
    ],
)
def test_gradients_are_those_of_the_batch(sizes, recipe, format_name, changes):
    mesh, data = make_mesh(**sizes), batch(0, rows=16)
    config = None if recipe is None else precision_config(recipe)
    model = {key: changes.pop(key) for key in ("mlp_dim", "remat", "scan_layers") if key in changes}
    make = make_llama(config, **model)
    plain = Trainer(mesh, make_model=make, **changes)
    ours = Trainer(mesh, make_model=scattering(make, format_name), **changes)
    params = jax.device_get(plain.init()["params"])
    state, [want] = plain.run(plain.init(params), [data])
    exact = nnx.traversals.flatten_mapping(gradient(params, state))
    state, [got] = ours.run(ours.init(params), [data])
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-6)  # sums in another order, as below
    for path, g in nnx.traversals.flatten_mapping(gradient(params, state)).items():
        error = np.linalg.norm(g - exact[path]) / np.linalg.norm(exact[path])
        if path[-1] == "kernel" and path[0] == "layers":
            assert 0 < error < TOLERANCE[format_name], path
        else:
            assert error < 1e-5, path


@pytest.mark.full
def test_the_program_sends_8_bits():
    """Also for blocks whose matmuls are not quantized."""
    config, mesh = precision_config("fp8_delayed", first_blocks=1), make_mesh(fsdp=8)
    trainer = Trainer(mesh, make_model=scattering(make_llama(config)))
    kernels = nnx.traversals.flatten_mapping(trainer.abstract["params"]["layers"])
    sent = exchanged_bytes(trainer.compile(batch(0)).as_text())
    sizes = [leaf.size for path, leaf in kernels.items() if path[-1] == "kernel"]
    assert sent["all-to-all", "s8"] == sum(sizes)
    other = sum(leaf.size for path, leaf in kernels.items() if path[-1] != "kernel")
    head = 3 * 64 * 64  # head, embeddings and their lookup
    assert sent["all-reduce", "f32"] + sent["reduce-scatter", "f32"] < 4 * (other + head) + 1000


@pytest.mark.full
def test_replicas_exchange_what_their_devices_have_scattered():
    mesh, data = make_mesh(data=2, fsdp=2, tensor=2), batch(0, rows=16)
    make = replicas.with_errors(scattering(make_llama()), 2)
    gradients = replicas.exchanged(loss_gradients(NextTokenConfig(), microbatches=1), "int8")
    plain, ours = Trainer(mesh), Trainer(mesh, make_model=make, gradients=gradients)
    params = jax.device_get(plain.init()["params"])
    exact = gradient(params, plain.run(plain.init(params), [data])[0])
    got = gradient(params, ours.run(ours.init(params), [data])[0])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        assert np.linalg.norm(a - b) < 3 * TOLERANCE["int8"] * np.linalg.norm(b)  # rounded three times


def test_what_is_not_finite_stays_visible():
    g = np.ones((2, 1, 96), np.float32)
    g[1, 0, 5] = np.inf
    with jax.set_mesh(make_mesh(fsdp=2)):
        total = summed(Scatter("int8", ("embed", "mlp")), np.ones((2, 1, 64), np.float32), g)
    assert not np.isfinite(total[:, 5]).any()


def test_a_plain_dot_general_is_as_before():
    x, kernel = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
    numbers = (((2,), (0,)), ((), ()))
    with_none = jax.grad(lambda k: dot_general(x, k, numbers, jnp.float32).sum())(kernel)
    np.testing.assert_array_equal(with_none, np.full((4, 5), 6.0))
