"""A pipeline of stages is the same model: loss, gradients and FP8 state, and what its program moves."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from configs.llama import debug
from maxlp import precision
from maxlp.core import gradients
from maxlp.core import train_step as step
from maxlp.families.llama import cost as estimate
from maxlp.families.llama import task as language
from maxlp.families.llama.model import Llama
from maxlp.nn import layers
from maxlp.nn import stack as stacks
from maxlp.parallel import pipeline, sharding
from maxlp.parallel.batches import global_batch
from maxlp.parallel.schedule import PipelineConfig
from maxlp.planning import hlo
from maxlp.run import build
from maxlp.run.config import ConfigError
from tests import test_train
from tests.precision import fixtures

B, S, D, L = 16, 32, 64, 8


# --- a Llama -------------------------------------------------------------------------------------------


def a_step(mesh, num_chunks=1, **model):
    """One step of gradient descent on a mesh, lowered, with the function that makes its state."""
    sizes = {**fixtures.SIZES, "num_layers": L, "dtype": "float32", "scan_layers": True, "remat": "block"}
    make = lambda rngs: Llama(**sizes | model, rngs=rngs)  # noqa: E731
    tx = optax.sgd(1.0)  # parameters then differ by as much as the gradients do
    graphdef, abstract = step.abstract_state(make, tx, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    function = step.jit_train_step(
        abstract,
        mesh,
        graphdef=graphdef,
        gradients=gradients.of_sums(
            functools.partial(language.next_token_loss, num_chunks=num_chunks), language.num_targets
        ),
        tx=tx,
        schedule=optax.constant_schedule(1.0),
    )
    lowered = function.lower(abstract, global_batch(packed(), mesh))
    return lowered, jax.jit(lambda: step.init_state(make, tx, 0), out_shardings=shardings)


def on(mesh):
    return sharding.make_mesh(**{"fsdp": 1, **mesh}, devices=jax.devices()[: math.prod(mesh.values())])


def stepped(mesh, start=None, **how):
    """Parameters before and after a step, its loss, and what its program moves."""
    mesh = on(mesh)
    with jax.set_mesh(mesh):
        lowered, init = a_step(mesh, **how)
        compiled = lowered.compile()
        like = compiled.input_shardings[0][0]
        state = init() if start is None else jax.device_put(start, like)
        start = jax.device_get(state)
        state, metrics = compiled(state, global_batch(packed(), mesh))
    found = hlo.collectives(compiled.as_text(), dict(mesh.shape))
    return start, jax.device_get(state["params"]), float(metrics["loss"]), found


def packed():
    """Rows of two documents and of other lengths each, so that rows must not be mixed up."""
    batch = fixtures.batch(0, rows=B, length=S)
    cut, column = np.arange(3, 3 + B)[:, None], np.arange(S)
    first = column < cut
    batch["segment_ids"] = np.where(first, 1, 2).astype(np.int32)
    batch["positions"] = np.where(first, column, column - cut).astype(np.int32)
    batch["loss_mask"] = column < S - np.arange(B)[:, None]
    return batch


@pytest.fixture(scope="module")
def one_device():
    return stepped({})


CASES = {
    "stage4_data2": (dict(stage=4, data=2), dict(microbatches=8), {}),
    "circular_fsdp2_tensor2": (
        dict(stage=2, fsdp=2, tensor=2),
        dict(microbatches=4, rounds=2),
        dict(num_chunks=4),
    ),
    "circular_stage4": (dict(stage=4, fsdp=2), dict(microbatches=4, rounds=2), dict(remat="dots")),
    "plain": (dict(stage=8), dict(microbatches=16), dict(remat="none")),
    "ring": (dict(stage=2, context=2, fsdp=2), dict(microbatches=4), dict(attention="ring")),
}
FAST = ("stage4_data2", "circular_fsdp2_tensor2")


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_equal_to_one_device(case, one_device):
    mesh, how, model = CASES[case]
    start, want, want_loss, _ = one_device
    _, params, loss, found = stepped(mesh, start, pipeline=how, **model)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), params, want)
    over_stages = [one for one in found if "stage" in one.axes and one.bytes > 64]
    schedule = PipelineConfig(**how).schedule(mesh["stage"])
    rows = B // schedule.microbatches // mesh.get("data", 1) // mesh.get("fsdp", 1)
    x = rows * S * D * 4 // mesh.get("context", 1) // mesh.get("tensor", 1)
    ticks = [(one.kind, one.bytes) for one in over_stages if one.times >= schedule.ticks - 1]
    # Activations on, what waits on, the last stage's back; the last two are one if none waits long.
    assert set(ticks) == {("collective-permute", x)}
    assert len(ticks) <= 6
    if case != "ring":  # its order of the sequence is undone on whole rows
        assert not [one for one in over_stages if one.kind == "all-gather"]


def test_program_does_not_grow():
    """A stage's layers and the ticks are loops."""

    def size(num_layers, microbatches):
        how = dict(microbatches=microbatches, rounds=2)
        with jax.set_mesh(mesh := on(dict(stage=2))):
            return len(a_step(mesh, num_layers=num_layers, pipeline=how)[0].as_text())

    assert size(64, 16) < 1.01 * size(4, 2)


# --- state ---------------------------------------------------------------------------------------------


def run_exact(mesh, microbatches=1, **how):
    mesh = on(mesh)
    make = fixtures.exact_model(True, "block", num_layers=4, **how)
    state, train = fixtures.trainer(
        make, mesh=mesh, microbatches=microbatches, tx=optax.sgd(0.0), loss_sums=fixtures.exact_loss
    )
    losses = []
    for i in range(4):
        state, metrics = train(state, fixtures.exact_batch(i))
        losses.append(float(metrics["loss"]))
    return fixtures.histories(state), losses


@pytest.mark.parametrize(
    ("mesh", "rounds"),
    [(dict(stage=2, fsdp=2), 2), pytest.param(dict(stage=4), 1, marks=pytest.mark.slow)],
)
def test_delayed_scaling_is_that_of_microbatches_to_the_bit(mesh, rounds):
    want, losses = run_exact({}, microbatches=4)
    ours, our_losses = run_exact(mesh, pipeline=PipelineConfig(4, rounds))
    assert our_losses == losses and len(ours) == 2 * 3
    for path, history in want.items():
        assert np.all(history > 0), path
        np.testing.assert_array_equal(ours[path], history, err_msg=path)


@pytest.mark.slow
def test_delayed_scaling_of_a_bfloat16_llama_is_that_of_microbatches_to_the_bit():
    """With fixed weights, and histories that start full: see `tests.precision.test_state`."""

    def run(mesh, microbatches=1, pipeline=None):
        def make(rngs):
            how = dict(num_layers=4, scan_layers=True, remat="block", dtype="bfloat16", pipeline=pipeline)
            model = Llama(**fixtures.SIZES | how, rngs=rngs)
            precision.inject(model, precision.make_recipe("fp8_delayed", history=4))
            return model

        state, train = fixtures.trainer(make, mesh=on(mesh), microbatches=microbatches, tx=optax.sgd(0.0))
        state = fixtures.warm(state, input=4.0, kernel=0.4, output_grad=1e-3)
        for i in range(3):
            state, _ = train(state, fixtures.batch(i, rows=B))
        return fixtures.histories(state)

    want, ours = run({}, 4), run(dict(stage=2, fsdp=2), pipeline=dict(microbatches=4, rounds=2))
    jax.tree.map(np.testing.assert_array_equal, ours, want)


class Watch(stacks.Block):
    """Its state is largest for zeros, which only bubbles see."""

    def __init__(self, rngs):
        self.shift = layers.param(jnp.ones(()), ())
        self.seen = nnx.Variable(jnp.zeros((1,)), out_sharding=(None,), eager_sharding=False)

    def __call__(self, x_BSD):
        self.seen[...] = jnp.max(1 / (1 + x_BSD))[None]
        return x_BSD + self.shift[...]


def test_bubbles_leave_no_trace_in_the_state():
    mesh = on(dict(stage=4))

    @jax.jit
    def run(x_BSD):
        stack = stacks.stack(Watch, 4, nnx.Rngs(0))
        call = lambda block, x, *_: (block(x), None)  # noqa: E731
        y, _ = stacks.apply_stack(stack, x_BSD, call, num_layers=4, scan=True, remat="none")
        return y, stack.seen[...]

    x_BSD = np.arange(1.0, 9.0, dtype=np.float32).reshape(8, 1, 1)
    with jax.set_mesh(mesh):
        y_BSD, seen = run(x_BSD)
    np.testing.assert_array_equal(y_BSD, x_BSD + 4)
    np.testing.assert_allclose(seen[:, 0], 1 / np.arange(2.0, 6.0), rtol=1e-6)


# --- what goes where -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("P", "R"), [(2, 2), (4, 2), (2, 4), (4, 3), (6, 4), (8, 5)])
def test_routes_bring_every_block_where_it_runs(P, R):
    arrived = {}
    for route in pipeline._routes(P, R):
        assert sorted(h for h, _ in route.pairs) == sorted(d for _, d in route.pairs) == list(range(P))
        for h, d in route.pairs:
            arrived[d, route.used[d]] = h * R + route.stored[h]
    assert arrived == {(d, r): r * P + d for d in range(P) for r in range(R)}


def test_bubble_is_smaller_with_rounds():
    assert PipelineConfig().schedule(4).bubble == 3 / 7
    assert PipelineConfig(microbatches=8, rounds=2).schedule(4).bubble == 3 / 19


def test_a_plan_counts_bubbles():
    c = debug.get_config()
    c.data.batch_size = 16

    def flops(**mesh):
        c.mesh.update(mesh)
        axes = estimate.mesh_axes(c, 8)
        return estimate.work(c, axes, estimate.abstract_state(c, axes), "tpu").flops["bfloat16"]

    assert flops(stage=4, fsdp=2) == pytest.approx(flops(stage=1, fsdp=8) * 7 / 4)


# --- settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"model.pipeline.rounds": 2}, "num_layers=4 does not divide into config.mesh.stage=4"),
        ({"model.pipeline.rounds": 0}, "rounds=0 must be at least 1"),
        ({"model.pipeline.microbatches": 6}, "multiple of config.mesh.stage=4; take 8"),
        ({"data.batch_size": 6}, "microbatches=4 does not divide the 3 rows"),
        ({"model.scan_layers": False}, "config.model.scan_layers=False; set it to True"),
        ({"precision.recipe": "fp8_current"}, "set config.precision.first_blocks=0"),
        ({"loss.num_chunks": 128}, "over which the head splits it"),
        ({"model.num_layers": 8, "model.pipeline.rounds": 2}, "remat=none would keep a copy"),
        ({"model.pipeline.rouns": 2}, "config.model.pipeline.rouns is unknown; keys: microbatches, rounds"),
        (
            {"train.release_gradients": True, "optimizer.clip_norm": 0.0},
            "config.train.release_gradients=True; set it to False",
        ),
    ],
)
def test_settings_that_cannot_work_are_one_line(changes, message):
    c = debug.get_config()
    for key, value in ({"mesh.stage": 4, "mesh.fsdp": 2, "data.batch_size": 16} | changes).items():
        *sections, name = key.split(".")
        functools.reduce(lambda node, part: node[part], sections, c)[name] = value
    if message is None:
        build.check(c, build.mesh(c))
        return
    with pytest.raises(ConfigError) as error:
        build.check(c, build.mesh(c))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_a_run_goes_on_in_stages(tmp_path):
    """Checkpoints know nothing of stages: what one device wrote, four go on with, and the reverse."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    options = (*test_train.WHOLE, "--config.model.num_layers=4", "--config.precision.recipe=fp8_delayed")
    options += ("--config.precision.first_blocks=0", "--config.precision.last_blocks=0")
    until = "--config.train.total_steps={}".format
    stages = ("--config.mesh.stage=4", "--config.model.remat=block")
    in_parts = (*options, "--config.train.microbatches=4")
    test_train.run(whole, *in_parts, until(9))
    test_train.run(moved, *in_parts, until(3))
    test_train.run(moved, *options, *stages, until(6), devices=4)
    test_train.run(moved, *in_parts, until(9))
    want, ours = test_train.losses(whole), test_train.losses(moved)
    assert ours.keys() == want.keys() and len(want) == 9
    np.testing.assert_allclose(list(ours.values()), list(want.values()), rtol=2e-4)
