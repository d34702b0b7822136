"""Gradients and training of models under `scalify`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlp.families.clip.contrastive import ContrastiveConfig, contrastive_sums
from maxlp.families.clip.gradients import loss_gradients as clip_gradients
from maxlp.families.llama import task
from maxlp.families.llama.task import NextTokenConfig
from maxlp.precision import HIGH_PRECISION
from maxlp.precision.scalify import mark, scale, scaled_gradients, scalify, unscale
from maxlp.precision.scalify.markers import fp8_dot_general
from maxlp.precision.scalify.scaled import Scaled
from tests.families.clip.fixtures import make_batch, make_clip
from tests.fixtures import Trainer, batch, batches, make_llama, make_mesh
from tests.optim.common import make_optimizer


def distance(got, want) -> float:
    """Largest distance of any tensor, relative to the largest norm of a tensor."""
    top = max(float(jnp.linalg.norm(w)) for w in jax.tree.leaves(want))
    return max(
        float(jnp.linalg.norm(g - w)) / top
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


def llama_gradients(
    small: float = 1.0, *, scaled: bool, marked: str = "fp16", params: dict | None = None, **model
):
    """Gradients of ``small`` times the loss, divided by ``small`` in float32."""
    graphdef, own, rest = nnx.split(marked_llama(marked, **model), nnx.Param, ...)
    state = {
        "params": params or nnx.to_pure_dict(own),
        "model_state": nnx.to_pure_dict(rest),
        "step": jnp.int32(0),
    }
    gradients = task.loss_gradients(NextTokenConfig())

    def of_small_loss(graphdef, state, batch, loss_scale):
        del loss_scale
        return (
            gradients(graphdef, state, batch, jnp.float32(small))
            if small != 1.0
            else gradients(graphdef, state, batch, None)
        )

    used = scaled_gradients(of_small_loss) if scaled else of_small_loss
    with jax.set_mesh(make_mesh()):
        return jax.jit(lambda state, batch: used(graphdef, state, batch, None))(state, batch(0))[0]


def marked_llama(precision: str, **model) -> nnx.Module:
    made = make_llama(**model)(nnx.Rngs(0))
    mark(made, fp8=precision == "fp8")
    return made


@pytest.mark.full
@pytest.mark.parametrize("model", [{}, {"remat": "block"}, {"scan_layers": False, "tie_embeddings": True}])
def test_float32_gradients_of_a_llama_are_those_without_scales(model):
    want = llama_gradients(scaled=False, **model)
    assert distance(llama_gradients(scaled=True, **model), want) < 1e-6  # sums in another order


@pytest.mark.full
def test_float16_gradients_do_not_underflow():
    want = llama_gradients(scaled=False)
    small = 2.0**-24  # a loss as small as float16's smallest number
    plain = llama_gradients(small, scaled=False, dtype="float16")
    got = llama_gradients(small, scaled=True, dtype="float16")
    assert distance(plain, want) > 0.5
    # In bfloat16, which has 3 bits fewer, this model's training differs from that in float32 by 0.016.
    assert distance(got, want) < 0.016


@pytest.mark.full
def test_float16_parameters_have_the_gradients_of_their_float32_copies():
    """The model computes in float16 either way; only the gradients are rounded to it as well."""
    halves = {"dtype": "float16", "param_dtype": "float16"}
    narrow = make_llama(**halves)(nnx.Rngs(0))
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), nnx.to_pure_dict(nnx.state(narrow, nnx.Param)))
    got = llama_gradients(scaled=True, **halves)
    assert distance(got, llama_gradients(scaled=True, params=wide, dtype="float16")) < 2.0**-10
    assert distance(llama_gradients(2.0**-24, scaled=True, **halves), got) < 0.016  # see above


def test_every_matmul_of_fp8_rounds_both_of_its_operands():
    rng = np.random.default_rng(0)
    x, kernel, g = (rng.standard_normal(shape, np.float32) for shape in ((8, 16), (16, 4), (8, 4)))

    def matmuls(x, kernel, g):
        y, pull = jax.vjp(lambda *pair: fp8_dot_general(*pair, (((1,), (0,)), ((), ())), None), x, kernel)
        return y, *pull(g)

    got = unscale(scalify(matmuls)(*(Scaled(jnp.asarray(a), jnp.int32(0)) for a in (x, kernel, g))))
    x, kernel = (a.astype(jnp.float8_e4m3fn).astype(np.float32) for a in (x, kernel))
    g = g.astype(jnp.float8_e5m2).astype(np.float32)
    for one, want in zip(got, (x @ kernel, g @ kernel.T, x.T @ g), strict=True):
        np.testing.assert_allclose(one, want, atol=1e-5)  # sums of 16 products in another order


def test_fp8_is_for_blocks_alone():
    table = mark(make_llama()(nnx.Rngs(0)), fp8=True)
    assert {path for path, name in table.items() if name == HIGH_PRECISION} == {"lm_head"}


@pytest.mark.full
def test_fp8_matmuls_multiply_fp8():
    want = llama_gradients(scaled=False)
    got = llama_gradients(scaled=True, dtype="float16", marked="fp8")
    assert 0.01 < distance(got, want) < 0.3  # numbers of 3 and of 2 bits


@pytest.mark.parametrize(
    "kind",
    [pytest.param("softmax", marks=pytest.mark.full), pytest.param("sigmoid", marks=pytest.mark.slow)],
)
def test_gradients_of_a_clip_are_those_without_scales(kind):
    graphdef, params, rest = nnx.split(make_clip(), nnx.Param, ...)
    state = {
        "params": nnx.to_pure_dict(params),
        "model_state": nnx.to_pure_dict(rest),
        "step": jnp.int32(3),
    }
    gradients = clip_gradients(ContrastiveConfig(kind=kind, method="plain", tile_size=5), 0, 1)

    def run(gradients):
        with jax.set_mesh(make_mesh()):
            return jax.jit(lambda s, b: gradients(graphdef, s, b, None)[0])(state, make_batch(8))

    # Sums in another order, in logits that are multiplied by 14.
    assert distance(run(scaled_gradients(gradients)), run(gradients)) < 1e-5


@pytest.mark.parametrize("method", ["sharded", "tiled"])
def test_a_loss_split_over_devices_has_no_rule(method):
    """`run.combinations` refuses these losses, and those of a Llama in chunks, on several devices."""

    def trace(method, **mesh):
        config = ContrastiveConfig(kind="softmax", method=method)
        loss = scalify(lambda x: contrastive_sums(x, x, 1.0, 0.0, config)["loss"])
        with jax.set_mesh(make_mesh(**mesh)):
            jax.make_jaxpr(loss)(scale(jnp.eye(4, dtype=jnp.float16)))

    trace(method)
    trace("plain", data=2)
    with pytest.raises(ValueError, match="no rule for the primitive 'shard_map'"):
        trace(method, data=2)


def scaled_trainer(precision: str, mesh=None) -> Trainer:
    gradients = scaled_gradients(task.loss_gradients(NextTokenConfig()))
    param_dtype, tx = "float32", optax.sgd(0.1)
    if precision == "fp16_params":
        low_bit = dict(mu="float16", nu="float16", min_size=1)
        clipped = dict(learning_rate=1e-3, clip_norm=1.0, weight_decay=0.1)
        tx = make_optimizer(param_rounding="nearest", low_bit=low_bit, **clipped).tx
        param_dtype = "float16"

    def make(rngs):
        made = make_llama(dtype="float16", param_dtype=param_dtype)(rngs)
        mark(made, fp8=precision == "fp8")
        return made

    return Trainer(mesh, make_model=make, gradients=gradients, tx=tx)


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("fp16", marks=pytest.mark.slow),
        pytest.param("fp16_params", marks=pytest.mark.full),
        pytest.param("fp8", marks=pytest.mark.full),
    ],
)
def test_a_mesh_equals_one_device(precision):
    def losses(mesh):
        trainer = scaled_trainer(precision, mesh)
        return [m["loss"] for m in trainer.run(trainer.init(), batches(3))[1]]

    # float16 sums of other parts round differently; E4M3's steps are 2^-4.
    rtol = {"fp16": 2**-11, "fp16_params": 2**-11, "fp8": 2**-7}[precision]
    np.testing.assert_allclose(losses(make_mesh(data=2, fsdp=2)), losses(None), rtol=rtol)


@pytest.mark.full
def test_a_whole_update_with_float16_weights_and_moments_trains():
    """Parameters, gradients and momentum are float16 data, without a loss scale."""
    trainer = Trainer(make_model=marked, gradients=None, tx=optax.sgd(0.1, momentum=0.9))

    def update(params, trace, batch):
        state = {"params": params, "model_state": {}, "step": jnp.int32(0)}
        grads, _, metrics = trainer.gradients(trainer.graphdef, state, batch, None)
        trace = jax.tree.map(lambda m, g: 0.9 * m + g, trace, grads)
        return jax.tree.map(lambda p, m: p - 0.05 * m, params, trace), trace, metrics["loss"]

    params = jax.tree.map(scale, trainer.init()["params"])
    trace = jax.tree.map(lambda p: scale(jnp.zeros_like(p)), trainer.init()["params"])
    step, losses = jax.jit(scalify(update)), []
    with jax.set_mesh(trainer.mesh):
        for _ in range(20):
            params, trace, loss = step(params, trace, batch(0))
            losses.append(float(unscale(loss)))
    assert {leaf.dtype for leaf in jax.tree.leaves((params, trace))} == {
        jnp.dtype("float16"),
        jnp.dtype("int32"),
    }
    assert losses[-1] < losses[0] - 0.5


def marked(rngs: nnx.Rngs) -> nnx.Module:
    made = make_llama(dtype="float16", param_dtype="float16")(rngs)
    mark(made)
    return made
