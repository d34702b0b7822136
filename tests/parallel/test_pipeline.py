"""A pipeline of stages computes what one device computes, and moves nothing but activations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlp.core.gradients import OVERWRITE_WITH_GRADIENT
from maxlp.families.llama.task import NextTokenConfig
from maxlp.nn import layers, stack
from maxlp.parallel import pipeline
from maxlp.parallel.schedule import PipelineConfig
from maxlp.planning import hlo
from maxlp.precision import inject, make_recipe
from tests.fixtures import (
    LLAMA,
    Trainer,
    batch,
    batches,
    make_mesh,
    one_device_step,
    permutes_in_place,
    precision_config,
    with_full_histories,
)
from tests.nn.fixtures import MlpBlock

B, S, D, L = 16, 32, LLAMA["embed_dim"], 8

# --- a Llama --------------------------------------------------------------------------------------------


def pipelined(mesh, schedule, **how) -> Trainer:
    how = dict(num_layers=L, remat="block") | how
    return Trainer(make_mesh(**mesh), pipeline=PipelineConfig(**schedule), **how)


CASES = {
    "stage4_data2": (dict(stage=4, data=2), dict(microbatches=8), {}),
    "circular_fsdp2_tensor2": (
        dict(stage=2, fsdp=2, tensor=2),
        dict(microbatches=4, rounds=2),
        dict(loss=NextTokenConfig(num_chunks=4), scan_layers=False),  # a pipeline scans in any case
    ),
    "circular_stage4": (dict(stage=4, fsdp=2), dict(microbatches=4, rounds=2), dict(remat="dots")),
    "no_remat": (dict(stage=8), dict(microbatches=16), dict(remat="none")),
    "ring": (dict(stage=2, context=2, fsdp=2), dict(microbatches=4), dict(attention="ring")),
}
QUICK, FULL = ("circular_fsdp2_tensor2",), ("stage4_data2",)


@pytest.mark.parametrize(
    "case",
    [
        *QUICK,
        *(pytest.param(case, marks=pytest.mark.full) for case in FULL),
        *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case not in QUICK + FULL),
    ],
)
def test_a_step_equals_one_device_and_sends_activations_only(case):
    mesh, schedule, how = CASES[case]
    params, expected, expected_metrics = one_device_step(L, B, S)
    trainer = pipelined(mesh, schedule, **how)
    state, [metrics] = trainer.run(trainer.init(params), batches(1, B, S))
    # Float32 sums in another order.
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6),
        jax.device_get(state["params"]),
        expected,
    )

    sizes = dict(trainer.mesh.shape)
    text = trainer.compile(batch(0, B, S)).as_text()
    found = hlo.collectives(text, sizes)
    assert not permutes_in_place(text)
    over_stages = [one for one in found if "stage" in one.axes and one.bytes > 64]
    made = PipelineConfig(**schedule).schedule(sizes["stage"])
    rows = B // made.microbatches // sizes["data"] // sizes["fsdp"]
    activations = rows * S * D * 4 // sizes["context"] // sizes["tensor"]
    in_ticks = [(one.kind, one.bytes) for one in over_stages if one.times >= made.ticks - 1]
    assert set(in_ticks) == {("collective-permute", activations)}
    # In the forward and in the backward pass: outputs to the next stage, the queue by one stage, and the
    # last stage's output back to the queue (which the first one does if the queue has one column).
    assert len(in_ticks) <= 6
    if case != "ring":  # which gathers rows to restore the natural order
        assert not [one for one in over_stages if one.kind == "all-gather"]


# --- state ----------------------------------------------------------------------------------------------


class ExactBlock(MlpBlock):
    """Weights of -1, 0 and 1: with integer inputs nothing is rounded, whatever the order of a sum."""

    def __init__(self, rngs):
        super().__init__(rngs)
        for linear in (self.up_proj, self.down_proj):
            linear.kernel[...] = jnp.clip(jnp.round(linear.kernel[...]), -1, 1)


class ExactModel(nnx.Module):
    def __init__(self, num_layers=4, recipe="fp8_delayed"):
        self.num_layers = num_layers
        self.layers = stack.stack(ExactBlock, num_layers, nnx.Rngs(0))
        inject(self, make_recipe(recipe, **({"history": 3} if recipe == "fp8_delayed" else {})))


def split(model):
    """The structure, the parameters, the state of the backward pass and that of the forward pass."""
    return nnx.split(model, nnx.Param, OVERWRITE_WITH_GRADIENT, ...)


def gradients(graphdef, params, backward, forward, batch, schedule=None):
    """The loss, the gradients of params and of the state of the backward pass, and the new state."""

    def loss(params, backward):
        model = nnx.merge(graphdef, params, backward, forward, copy=True)
        y_BSD, _ = stack.apply_stack(
            model.layers,
            batch["x"],
            lambda block, x_BSD, *_: (block(x_BSD), None),
            num_layers=model.num_layers,
            scan=True,
            remat="block",
            pipeline=schedule,
        )
        return jnp.sum(y_BSD * batch["weight"]), split(model)[3]

    both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, new_forward), (grads, new_backward) = both(params, backward)
    return value, grads, new_backward, new_forward


def sequential(step, params, backward, forward, batch, microbatches):
    """`gradients` of one microbatch after another, which all read the old state."""
    parts = [jax.tree.map(lambda a, i=i: a[i::microbatches], batch) for i in range(microbatches)]
    values, grads, *states = zip(*(step(params, backward, forward, part) for part in parts), strict=True)
    total = jax.tree.map(lambda *parts: sum(parts), *grads)
    return sum(values), total, *(jax.tree.map(lambda *p: jnp.stack(p).max(0), *s) for s in states)


def random_batch(seed, rows=16):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.integers(-2, 3, (rows, 4, 8)).astype(np.float32),
        "weight": rng.integers(-1, 2, (rows, 4, 8)).astype(np.float32),
    }


def test_the_program_does_not_grow_with_layers_or_microbatches():
    def size(num_layers, microbatches):
        graphdef, *variables = split(nnx.eval_shape(lambda: ExactModel(num_layers, "bf16")))
        schedule = PipelineConfig(microbatches=microbatches, rounds=2)
        step = jax.jit(functools.partial(gradients, graphdef, schedule=schedule))
        with jax.set_mesh(make_mesh(stage=2)):
            return len(step.lower(*variables, random_batch(0)).as_text())

    assert size(64, 16) < 1.01 * size(4, 4)


@pytest.mark.parametrize(
    ("mesh", "rounds"),
    [
        pytest.param(dict(stage=2, fsdp=2), 2, marks=pytest.mark.full),
        pytest.param(dict(stage=4), 1, marks=pytest.mark.slow),
    ],
)
def test_delayed_scaling_equals_that_of_microbatches_to_the_bit(mesh, rounds):
    graphdef, params, backward, forward = split(ExactModel())
    step = jax.jit(functools.partial(gradients, graphdef), static_argnames="schedule")
    schedule = PipelineConfig(microbatches=4, rounds=rounds)
    expected = actual = (None, None, backward, forward)
    for seed in range(4):
        batch = random_batch(seed)
        expected = sequential(step, params, *expected[2:], batch, microbatches=4)
        with jax.set_mesh(make_mesh(**mesh)):
            actual = step(params, *actual[2:], batch, schedule=schedule)
        actual = jax.device_get(actual)
        assert actual[0] == expected[0]
        jax.tree.map(np.testing.assert_array_equal, actual[2:], jax.device_get(expected[2:]))
        # Gradients of parameters are float32 sums in another order.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), actual[1], expected[1])
    histories = [leaf for leaf in jax.tree.leaves(actual[2:]) if leaf.ndim == 2]
    assert len(histories) == 2 * 3 and all(np.all(history > 0) for history in histories)


@pytest.mark.slow
def test_delayed_scaling_of_a_bfloat16_llama_equals_that_of_microbatches_to_the_bit():
    """With fixed weights and full histories, so that no scale is taken from an amax of zero."""
    recipe = precision_config("fp8_delayed", history=4)
    how = dict(recipe=recipe, tx=optax.sgd(0.0), num_layers=4, dtype="bfloat16", remat="block")

    def run(trainer):
        state, _ = trainer.run(with_full_histories(trainer.init()), batches(3, B, S))
        return jax.device_get(state["model_state"])

    expected = run(Trainer(microbatches=4, **how))
    actual = run(pipelined(dict(stage=2, fsdp=2), dict(microbatches=4, rounds=2), **how))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


class Recorder(stack.Block):
    """Its state is largest for zeros, which only idle stages compute on, and at first larger still."""

    def __init__(self, rngs):
        self.shift = layers.param(jnp.ones(()), ())
        self.largest = nnx.Variable(jnp.full((1,), 9.0), out_sharding=(None,), eager_sharding=False)

    def __call__(self, x_BSD):
        self.largest[...] = jnp.max(1 / (1 + x_BSD))[None]
        return x_BSD + self.shift[...]


@pytest.mark.parametrize(("stages", "microbatches", "rounds"), [(4, 4, 1), (4, 8, 2)])
def test_idle_stages_do_not_change_the_state(stages, microbatches, rounds):
    """That of a layer is the maximum over the microbatches, of which nothing older is part."""
    num_layers = stages * rounds

    @jax.jit
    def run(x_BSD):
        blocks = stack.stack(Recorder, num_layers, nnx.Rngs(0))
        y_BSD, _ = stack.apply_stack(
            blocks,
            x_BSD,
            lambda block, x_BSD, *_: (block(x_BSD), None),
            num_layers=num_layers,
            scan=True,
            remat="none",
            pipeline=PipelineConfig(microbatches=microbatches, rounds=rounds),
        )
        return y_BSD, blocks.largest[...]

    x_BSD = np.float32([7, 8, 1, 2, 3, 4, 5, 6]).reshape(8, 1, 1)  # the third microbatch has the 1
    with jax.set_mesh(make_mesh(stage=stages)):
        y_BSD, largest = run(x_BSD)
    np.testing.assert_array_equal(y_BSD, x_BSD + num_layers)
    expected = 1 / np.arange(2.0, num_layers + 2)
    np.testing.assert_allclose(largest[:, 0], expected, rtol=1e-6)  # a quotient in float32


class Steep(stack.Block):
    """Keeps negative numbers; three in a row make infinity of zeros, on which idle stages compute."""

    def __init__(self, rngs):
        self.factor = layers.param(jnp.ones(()), ())

    def __call__(self, x_BSD):
        return self.factor[...] * jnp.where(x_BSD < 0, x_BSD, jnp.exp(88 * x_BSD))


def test_idle_stages_do_not_change_the_gradients():
    graphdef, params = nnx.split(stack.stack(Steep, 4, nnx.Rngs(0)))

    @jax.jit
    @jax.grad
    def gradient(params, x_BSD):
        def run(block, x_BSD, *_):
            return block(x_BSD), None

        blocks = nnx.merge(graphdef, params)
        return jnp.sum(stack.apply_stack(blocks, x_BSD, run, num_layers=4, scan=True, remat="none")[0])

    x_BSD = -np.arange(1.0, 9.0, dtype=np.float32).reshape(8, 1, 1)
    with jax.set_mesh(make_mesh(stage=4)):
        np.testing.assert_array_equal(gradient(params, x_BSD).factor[...], [x_BSD.sum()] * 4)


def test_a_pipeline_needs_stages_and_a_batch_that_divides_into_microbatches():
    """Otherwise the blocks run one after another, which alone returns what each of them computes."""

    def is_pipelined(rows: int, **mesh: int) -> bool:
        def outs(x_BSD):
            blocks = stack.stack(Recorder, 4, nnx.Rngs(0))
            how = dict(num_layers=4, scan=True, remat="none", pipeline=PipelineConfig(microbatches=4))
            return stack.apply_stack(blocks, x_BSD, lambda block, x, *_: (block(x), jnp.sum(x)), **how)[1]

        with jax.set_mesh(make_mesh(**mesh)):
            return jax.eval_shape(outs, jax.ShapeDtypeStruct((rows, 1, 1), "float32")) is None

    assert is_pipelined(8, stage=2)
    assert not is_pipelined(6, stage=2)
    assert not is_pipelined(8, fsdp=2)


# --- from layers to stages ------------------------------------------------------------------------------


@pytest.mark.parametrize(("P", "R"), [(2, 2), (4, 2), (2, 4), (4, 3), (6, 4), (8, 5)])
def test_routes_bring_every_block_where_it_runs(P, R):
    arrived = {}
    for route in pipeline._routes(P, R):
        sources, targets = zip(*route.pairs, strict=True)
        assert sorted(sources) == sorted(targets) == list(range(P))
        for p, q in route.pairs:
            arrived[q, route.target_block[q]] = p * R + route.source_block[p]
    assert arrived == {(stage, r): r * P + stage for stage in range(P) for r in range(R)}
