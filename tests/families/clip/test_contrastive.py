"""The losses against float64 NumPy, with gradients by complex-step differentiation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.families.clip import contrastive
from maxlp.families.clip.contrastive import LOSSES, METHODS, ContrastiveConfig, contrastive_sums
from maxlp.parallel import sharding

MESHES = {
    "data 8": {"data": 8, "fsdp": 1},
    "data 2 x fsdp 4": {"data": 2, "fsdp": 4},
    "fsdp 4 x tensor 2": {"fsdp": 4, "tensor": 2},
}
NAMES = ("image", "text", "scale", "bias")
# float32 sums in another order: 100 roundings of 6e-8.
CLOSE = {"rtol": 6e-6, "atol": 6e-6}


def reference(image, text, scale, bias, loss):
    """The sum over the pairs, for complex arguments too."""

    def log_sum_exp(x):
        return np.array([row.real.max() + np.log(np.exp(row - row.real.max()).sum()) for row in x])

    x = scale * image @ text.T + bias
    if loss == "softmax":
        return ((log_sum_exp(x) + log_sum_exp(x.T)) / 2 - np.diag(x)).sum()
    x = np.where(np.eye(len(x), dtype=bool), -x, x)
    bigger = np.where(x.real > 0, x, 0)
    return (bigger + np.log1p(np.exp(np.where(x.real > 0, -x, x)))).sum()


def reference_grads(*args, loss, step=1e-30):
    """Exact derivatives: the imaginary part of the value a complex step away."""
    args = [np.asarray(a, np.complex128) for a in args]
    grads = [np.zeros(a.shape) for a in args]
    for arg, grad in zip(args, grads, strict=True):
        for i in np.ndindex(arg.shape):
            before = arg[i]
            arg[i] += step * 1j
            grad[i] = reference(*args, loss).imag / step
            arg[i] = before
    return grads


def features(B, E=5, seed=0, spread=1.0):
    """Image and text features of unit norm around one direction."""
    rng = np.random.default_rng(seed)
    x = np.eye(E)[0] * (1 - spread) + spread * rng.normal(size=(2, B, E))
    return tuple((x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32))


def value_and_grads(*args, **config):
    """The sums, and the gradients of a third of the loss."""

    def third(*args):
        sums = contrastive_sums(*args, ContrastiveConfig(**config))
        return sums["loss"] / 3, sums

    return jax.value_and_grad(third, argnums=range(4), has_aux=True)(*args)


@functools.partial(jax.jit, static_argnames="tile_size")
def everything(*args, tile_size):
    return {
        (loss, method): value_and_grads(*args, kind=loss, method=method, tile_size=tile_size)
        for loss in LOSSES
        for method in METHODS
    }


@pytest.mark.parametrize(
    "B, tile_size, scale, bias, spread",
    [
        (7, 3, 10.0, -2.5, 1.0),  # tiles of 3, 3 and 1
        (6, 2, 100.0, -10.0, 1e-3),  # logits of 100 that differ by 1e-4: exp alone overflows
        (4, 9, 100.0, 0.0, 1.0),  # one tile, larger than the batch
        (1, 1, 100.0, -10.0, 1.0),
    ],
)
def test_equals_float64(B, tile_size, scale, bias, spread):
    args = (*features(B, spread=spread), scale, bias)
    results = everything(*args, tile_size=tile_size)
    logits = scale * args[0].astype(np.float64) @ args[1].T.astype(np.float64)
    hits = (np.argmax(logits, 1) == np.arange(B)).sum()
    for (loss, method), ((_, sums), grads) in results.items():
        where = f"{loss} {method}"
        want = reference(*(np.asarray(a, np.float64) for a in args), loss)
        # A logit of 100 has a rounding error of 8e-6 in float32, and the loss of a pair at least that.
        absolute = B * max(1e-6, scale * 1e-6 / 4)
        np.testing.assert_allclose(sums["loss"], want, rtol=1e-6, atol=absolute, err_msg=where)
        if spread == 1.0:  # otherwise the order of the logits depends on rounding
            assert sums["correct"] == hits, where
        assert sums["examples"] == B
        for got, grad, name in zip(grads, reference_grads(*args, loss=loss), NAMES, strict=True):
            # Probabilities have the error of logits, 1e-5 at scale 100; gradients of features, times scale.
            atol = (scale if name in ("image", "text") else B) * max(1e-6, scale * 1e-7)
            np.testing.assert_allclose(got, grad / 3, rtol=1e-5, atol=atol, err_msg=f"{where} {name}")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("B, spread", [(6, 0.0), (16, 1e-3)])
def test_probabilities_keep_their_digits_at_logits_of_one_hundred(B, spread, method):
    """The gradient of the scale, Σ G_ij <image_i, text_j>, is nearly the sum of G, whose rows sum to zero.

    Each probability may have four roundings of its own size (exp, sum, division, mean): 4 B · 2^-24 in all.
    The rounding of max + log(sum), a number of 102, would be 3.8e-6 in each of the B rows.
    """
    args = (*features(B, spread=spread), 100.0, 0.0)
    (_, _), grads = jax.jit(functools.partial(value_and_grads, kind="softmax", method=method, tile_size=4))(
        *args
    )
    want = reference_grads(*args, loss="softmax")[2] / 3
    np.testing.assert_allclose(grads[2], want, rtol=0, atol=4 * B * 2.0**-24 / 3)


@pytest.mark.parametrize("method", METHODS)
def test_no_bias_changes_the_softmax(method):
    """With one, logits would be rounded more, and Adam would turn its tiny gradient into a step."""
    run = jax.jit(functools.partial(value_and_grads, kind="softmax", method=method, tile_size=4))
    without, (value, grads) = (run(*features(6), 20.0, bias) for bias in (0.0, 1e4))
    jax.tree.map(np.testing.assert_array_equal, (value, grads), without)
    assert grads[NAMES.index("bias")] == 0


@pytest.fixture(scope="module")
def one_device():
    args = (*features(24, seed=1), 20.0, -5.0)
    return args, everything(*args, tile_size=5)


@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_equal_one_device(one_device, mesh):
    """Three pairs per device, in tiles of two and one."""
    args, want = one_device
    with jax.set_mesh(sharding.make_mesh(**MESHES[mesh])):
        where = jax.NamedSharding(jax.sharding.get_mesh(), sharding.spec("batch", None))
        placed = [jax.device_put(a, where) for a in args[:2]] + list(args[2:])
        got = everything(*placed, tile_size=2)
    for key in want:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), got[key], want[key])
        assert got[key][0][1]["correct"] == want[key][0][1]["correct"]


@pytest.mark.parametrize(("B", "axes"), [(8, ("fsdp", "tensor")), (4, ("fsdp",)), (6, ()), (9, ())])
def test_leading_axes_split_the_pairs_up_to_the_first_that_does_not_divide_them(B, axes):
    with jax.set_mesh(sharding.make_mesh(fsdp=4, tensor=2)):
        assert contrastive._axes(B) == axes
    assert contrastive._axes(B) == ()


@pytest.mark.parametrize("B", [12, 9])
def test_batches_that_the_mesh_does_not_divide(B):
    """With 12 pairs on fsdp 4 × tensor 2 the tensor axis repeats the work; with 9 all devices do."""
    args = (*features(B), 20.0, -5.0)
    for kind in LOSSES:
        want = jax.jit(functools.partial(value_and_grads, kind=kind, method="plain"))(*args)
        with jax.set_mesh(sharding.make_mesh(fsdp=4, tensor=2)):
            tiled = functools.partial(value_and_grads, kind=kind, method="tiled", tile_size=2)
            got = jax.jit(tiled)(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), got, want)


@pytest.mark.parametrize("method", METHODS)
def test_ties_are_hits_and_the_loss_of_equal_features_is_log_batch(method):
    B = 6
    ones = jnp.ones((B, 4)) / 2
    config = ContrastiveConfig(kind="softmax", method=method, tile_size=4)
    sums = contrastive_sums(ones, ones, 100.0, 0.0, config)
    assert sums["correct"] == B
    # a log-sum of 100 + log 6, whose rounding is 8e-6
    np.testing.assert_allclose(sums["loss"] / B, np.log(B), atol=2e-5)


def test_bfloat16_features_are_computed_in_float32():
    image, text = (jnp.asarray(x, jnp.bfloat16) for x in features(6))
    exact = contrastive_sums(
        image.astype(jnp.float32),
        text.astype(jnp.float32),
        50.0,
        0.0,
        ContrastiveConfig(kind="softmax", method="tiled"),
    )
    (_, sums), grads = value_and_grads(image, text, 50.0, 0.0, kind="softmax", method="tiled")
    assert sums["loss"] == exact["loss"]
    assert grads[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("method", METHODS)
def test_products_are_in_float32_on_every_chip(method):
    """By default GPUs and TPUs multiply float32 numbers with fewer bits."""
    args = (*features(8), 10.0, 0.0)
    function = functools.partial(value_and_grads, kind="softmax", method=method)
    dots = [line for line in jax.jit(function).lower(*args).as_text().splitlines() if "dot_general" in line]
    assert dots and all("precision = [HIGHEST, HIGHEST]" in line for line in dots)


@pytest.mark.full
def test_memory_of_tiles_grows_linearly_with_the_batch():
    """Temporary bytes of loss and gradients as compiled for one device."""

    def temp(B, method):
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((B, 16), (B, 16), (), ())]
        run = functools.partial(value_and_grads, kind="softmax", method=method, tile_size=64)
        return jax.jit(run).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temp(4096, "plain") > 4096**2 * 4
    assert temp(4096, "tiled") < 4 * temp(1024, "tiled")
    assert temp(4096, "tiled") < temp(4096, "plain") / 20


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"kind": "clip"}, "kind='clip' is unknown; one of softmax, sigmoid"),
        ({"method": "ring"}, "method='ring' is unknown; one of plain, sharded, tiled"),
        ({"tile_size": 0}, "tile_size=0 must be at least 1"),
    ],
)
def test_invalid_configs_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ContrastiveConfig(**{"kind": "softmax", "method": "tiled"} | wrong)
