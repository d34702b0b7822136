import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlp.families.llama import losses
from maxlp.nn import layers
from maxlp.parallel import sharding
from maxlp.planning import hlo, topologies
from tests.planning import hlo_flops

B, S, D, V = 3, 8, 16, 50


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(B, S, D)).astype(np.float32),
        "w": rng.normal(size=(D, V)).astype(np.float32),
        "targets": rng.integers(0, V, (B, S)).astype(np.int32),
        "mask": rng.random((B, S)) < 0.7,
    }


def logits(w_DV, x_BSD):
    return layers.dot_general(x_BSD, w_DV, (((x_BSD.ndim - 1,), (0,)), ((), ())), jnp.float32)


def total(p, w, x, num_chunks, z_loss):
    """The loss and the sums; with 0 chunks, over materialized logits."""
    labels = p["targets"], p["mask"]
    if num_chunks == 0:
        sums = losses.next_token(logits(w, x), *labels, z_loss=z_loss)
    else:
        weights = nnx.State({"w": layers.param(w, ("embed", "vocab"))})
        sums = losses.next_token_in_chunks(
            lambda weights, x: logits(weights["w"][...], x),
            weights,
            x,
            *labels,
            num_chunks=num_chunks,
            z_loss=z_loss,
        )
    return sums["loss"], sums


@pytest.mark.parametrize("num_chunks", [0, 1, 2, 8])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_equals_optax_with_gradients(problem, num_chunks, z_loss):
    p = problem

    def reference(w, x):
        logits = x @ w
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, p["targets"])
        nll += z_loss * jax.nn.logsumexp(logits, -1) ** 2
        return jnp.sum(nll * p["mask"])

    ours = jax.value_and_grad(lambda w, x: total(p, w, x, num_chunks, z_loss)[0], argnums=(0, 1))
    (loss, grads), (want, want_grads) = (
        f(p["w"], p["x"]) for f in (ours, jax.value_and_grad(reference, (0, 1)))
    )
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    # Float32 sums in another order, whose terms may cancel.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-6, atol=1e-6), grads, want_grads)


@pytest.mark.parametrize("num_chunks", [1, 2, 8])
def test_chunks_in_float16_have_the_range_of_the_whole(num_chunks):
    """512 equal tokens: only the gradient of their sum, -120,000, is beyond the 65,504 of float16.

    As in training, the mean is differentiated with a loss scale. All numbers but 1 / V are small integers
    and powers of two, so that both forms round in the same places.
    """
    B, S, D, V, loss_scale = 4, 128, 4, 64, 128.0
    x_BSD, w_DV = jnp.full((B, S, D), 240, jnp.float16), jnp.zeros((D, V), jnp.float16)
    p = {"targets": jnp.zeros((B, S), jnp.int32), "mask": jnp.ones((B, S), bool)}

    def whole(w_DV, x_BSD):
        return total(p, w_DV, x_BSD, 0, 0.0)[0] / (B * S) * loss_scale

    def chunked(w_DV, x_BSD):
        return total(p, w_DV, x_BSD, num_chunks, 0.0)[0] / (B * S) * loss_scale

    expected, actual = (jax.jit(jax.grad(f, (0, 1)))(w_DV, x_BSD) for f in (whole, chunked))
    # The factor and the gradient are rounded to float16, by up to 2^-11 each.
    assert np.float32(expected[0][0, 0]) == pytest.approx(-240 * loss_scale * (1 - 1 / V), rel=2.0**-10)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("num_chunks", [1, 8])
def test_chunks_in_bfloat16_add_their_gradients_in_float32(num_chunks):
    """256 tokens in the first of 8 chunks and one in each other: bfloat16 would lose those."""
    B, S, D, V = 4, 512, 4, 64
    x_BSD, w_DV = jnp.ones((B, S, D), jnp.bfloat16), jnp.zeros((D, V), jnp.bfloat16)
    mask = np.zeros((B, S), bool)
    mask[:, : S // 8] = mask[0, :: S // 8] = True
    p = {"targets": jnp.zeros((B, S), jnp.int32), "mask": jnp.asarray(mask)}
    grad = jax.jit(jax.grad(lambda w: total(p, w, x_BSD, num_chunks, 0.0)[0]))(w_DV)
    # Rounded once to bfloat16, whose step is 2 between 256 and 512.
    np.testing.assert_allclose(np.float32(grad[:, 0]), -mask.sum() * (1 - 1 / V), atol=1.01)


def test_the_gradient_of_a_chunk_in_bfloat16_is_not_rounded():
    """132 tokens in each of 7 chunks: 909.6 is rounded to 908, and the sum of 7 rounded 129.9 to 912."""
    B, S, D, V = 4, 512, 4, 64
    x_BSD, w_DV = jnp.ones((B, S, D), jnp.bfloat16), jnp.zeros((D, V), jnp.bfloat16)
    mask = np.zeros((B, 8, S // 8), bool)
    mask[:, :7, : 132 // B] = True
    p = {"targets": jnp.zeros((B, S), jnp.int32), "mask": jnp.asarray(mask.reshape(B, S))}
    grad = jax.jit(jax.grad(lambda w: total(p, w, x_BSD, 8, 0.0)[0]))(w_DV)
    np.testing.assert_array_equal(np.float32(grad[:, 0]), -908)


def test_counts(problem):
    likely = np.argmax(problem["x"] @ problem["w"], -1)
    p = problem | {"targets": np.where(np.arange(S) < S // 2, likely, problem["targets"]).astype(np.int32)}
    for num_chunks, z_loss in ((0, 0.0), (1, 0.0), (1, 1e-2), (2, 1e-2)):
        sums = total(p, p["w"], p["x"], num_chunks, z_loss)[1]
        hits = (likely == p["targets"]) & p["mask"]
        assert sums["tokens"] == p["mask"].sum()
        assert sums["correct"] == hits.sum() > 5
        nll = optax.softmax_cross_entropy_with_integer_labels(p["x"] @ p["w"], p["targets"])
        np.testing.assert_allclose(sums["nll"], np.sum(nll * p["mask"]), rtol=1e-6)  # sums of float32


def test_without_z_loss_no_logit_is_too_large_for_its_square():
    logits, mask = jnp.asarray([[[1e20, -1e20]]]), jnp.ones((1, 1), bool)
    assert losses.next_token(logits, jnp.zeros((1, 1), jnp.int32), mask, z_loss=0.0)["loss"] == 0


def test_chunks_never_hold_all_logits():
    """Peak temporary memory of loss and gradient falls with the number of chunks, well below all logits."""
    B, S, D, V = sizes = 4, 256, 32, 4096
    all_logits = B * S * V * 4
    assert temporary_bytes(0, sizes, "float32") > all_logits
    # Beside the chunks' logits: the weights' gradient, of one chunk and summed over all.
    assert temporary_bytes(16, sizes, "float32") < all_logits / 4 + 2 * D * V * 4


def temporary_bytes(num_chunks, sizes, dtype):
    """Temporary memory of the compiled loss and gradient, for sizes B, S, D, V."""
    B, S, D, V = sizes

    def loss(w, x):
        p = {"targets": jnp.zeros((B, S), jnp.int32), "mask": jnp.ones((B, S), bool)}
        return total(p, w, x, num_chunks, 0.0)[0]

    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((D, V), (B, S, D))]
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.aot("jax_cuda13_plugin")
def test_one_chunk_keeps_the_gradient_of_all_logits_and_no_logits():
    """Two bytes for each, and an eighth of the sequence in float32; compiled for a GPU."""
    B, S, _, V = sizes = 4, 1024, 128, 8192
    topology = topologies.parse("h100:1x1")
    with jax.set_mesh(sharding.make_mesh(devices=topologies.devices(topology))):
        none, one = (temporary_bytes(n, sizes, "bfloat16") / (B * S * V) for n in (0, 1))
    assert 2 < one < 2 + 4 / 8 + 2 / 8 + 0.1
    assert none > 5.9


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_chunks_compute_the_logits_once(problem, num_chunks):
    """Three matmuls: the logits, and the gradients of hidden states and weights."""
    p = problem

    def matmuls(f):
        text = jax.jit(f).lower(p["w"], p["x"]).compile().as_text()
        return hlo_flops.matmul_flops(text) / (2 * B * S * D * V)

    def loss(w, x):
        return total(p, w, x, num_chunks, 1e-4)[0]

    assert matmuls(jax.grad(loss, (0, 1))) == 3
    assert matmuls(loss) == 1


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_chunks_send_the_weights_once_and_their_gradient_once(num_chunks):
    """Vocabulary, rows and sequence are all split, and the loss and gradients are those of one device.

    Other collectives carry only scalars and the softmax statistics of each row. With one chunk XLA chooses
    the collectives, and on CPUs it adds the gradient on every device instead of scattering it.
    """
    mesh = sharding.make_mesh(fsdp=2, context=2, tensor=2)
    B, S, D, V = 4, 64, 32, 1024

    def loss(w_DV, x_BSD, targets_BS):
        return total({"targets": targets_BS, "mask": targets_BS > 3}, w_DV, x_BSD, num_chunks, 1e-4)[0]

    rng = np.random.default_rng(0)
    w_DV, x_BSD = (rng.standard_normal(s).astype(np.float32) for s in ((D, V), (B, S, D)))
    args = w_DV, x_BSD, rng.integers(0, V, (B, S), np.int32)
    places = sharding.spec("embed", "vocab"), *[sharding.spec("batch", "seq")] * 2
    expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(*args)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss, (0, 1)), out_shardings=(None, places[:2]))
        args = tuple(map(jax.device_put, args, places))
        compiled = step.lower(*args).compile()
        got = compiled(*args)
    # Sums over the vocabulary and over tokens are split over devices; terms of gradients cancel.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, expected)
    of_device = D * V * 4 // 2  # the vocabulary stays split over tensor
    found = hlo.collectives(compiled.as_text(), dict(mesh.shape))
    large = [one for one in found if one.bytes * one.times > of_device // 8]
    assert sorted((one.kind, one.bytes, one.times) for one in large) == [
        ("all-gather", of_device, 1),
        ("all-reduce" if num_chunks == 1 else "reduce-scatter", of_device, 1),
    ], found


def test_bfloat16_logits_are_computed_on_in_float32(problem):
    rng = np.random.default_rng(3)
    logits = jnp.asarray(8 * rng.normal(size=(B, S, V)), jnp.bfloat16)
    ours = losses.cross_entropy(logits, problem["targets"])
    wide = losses.cross_entropy(logits.astype(jnp.float32), problem["targets"])
    for a, b in zip(ours, wide, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
