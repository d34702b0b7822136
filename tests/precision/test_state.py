"""The amax histories of delayed scaling: what enters, and that nothing else changes them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlp.nn import layers
from maxlp.nn import stack as stacks
from maxlp.parallel import sharding
from maxlp.precision import inject, make_recipe
from maxlp.runtime.checkpoint import Checkpointer
from tests.precision import tiny

FAST = [(1, 4, True, "none"), (4, 1, False, "none"), (4, 4, True, "block")]
LAYOUTS = [  # devices, microbatches, scan, remat; all against the first
    layout if layout in FAST else pytest.param(layout, marks=pytest.mark.slow)
    for layout in itertools.product((1, 4), (1, 4), (True, False), ("none", "block"))
    if layout != (1, 1, True, "none")
]


# --- a network without rounding: whatever the order of its sums, its numbers are the same to the bit ---


class Block(stacks.Block):
    def __init__(self, rngs):
        sizes = dict(axes=("embed", "mlp"), std=1.0, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs)
        self.up_proj = layers.Linear(8, 16, **sizes)
        self.down_proj = layers.Linear(16, 8, **(sizes | dict(axes=("mlp", "embed"))))

    def __call__(self, x_BSD):
        return x_BSD + self.down_proj(jax.nn.relu(self.up_proj(x_BSD)))


class Exact(nnx.Module):
    """Weights of -1, 0 and 1, few of them not 0; the loss weighs outputs by the batch's small integers."""

    def __init__(self, scan, remat, rngs, num_layers=3, **how):
        self.layers = stacks.stack(Block, num_layers, rngs)
        for linear in (self.layers.up_proj, self.layers.down_proj):
            draw = jax.random.randint(rngs.params(), linear.kernel.shape, 0, 8)
            linear.kernel[...] = jnp.where(draw == 0, 1.0, jnp.where(draw == 1, -1.0, 0.0))
        self.how = nnx.static(dict(num_layers=num_layers, scan=scan, remat=remat, **how))

    def __call__(self, x_BSD):
        return stacks.apply_stack(self.layers, x_BSD, lambda block, x, *_: (block(x), None), **self.how)[0]


def exact_loss(model, batch):
    x_BSD = batch["x"].reshape(*batch["loss_mask"].shape, 8).astype(jnp.float32)
    y_BSD = model(sharding.constrain(x_BSD, "batch", None, None))
    weight_BSD = batch["weight"].reshape(y_BSD.shape).astype(jnp.float32)
    zero = jnp.zeros((), jnp.float32)
    return {"loss": jnp.sum(y_BSD * weight_BSD), "correct": zero}


def exact_batch(seed):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.integers(-2, 3, (16, 4 * 8), np.int32),
        "weight": rng.integers(-1, 2, (16, 4 * 8), np.int32),
        "loss_mask": np.ones((16, 4), bool),  # 64 tokens: the mean is exact
    }


def exact_model(scan, remat, unquantized_blocks=0, **how):
    def make(rngs):
        model = Exact(scan, remat, rngs, **how)
        recipe = make_recipe("fp8_delayed", history=3)
        inject(model, recipe, first_blocks=unquantized_blocks, last_blocks=unquantized_blocks)
        return model

    return make


def run_exact(devices, microbatches, scan, remat, *, unquantized_blocks=0, tx=None, steps=5):
    make = exact_model(scan, remat, unquantized_blocks)
    mesh = sharding.make_mesh(devices=jax.devices()[:devices])
    state, train = tiny.trainer(
        make, mesh=mesh, microbatches=microbatches, tx=tx or optax.sgd(0.0), loss_fn=exact_loss
    )
    losses = []
    for i in range(steps):
        state, metrics = train(state, exact_batch(i))
        losses.append(float(metrics["loss"]))
    return tiny.histories(state), losses


@pytest.fixture(scope="module")
def exact_reference():
    return run_exact(1, 1, True, "none")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_is_bit_equal_in_every_layout(layout, exact_reference):
    expected, expected_losses = exact_reference
    ours, losses = run_exact(*layout)
    assert losses == expected_losses
    assert len(ours) == len(expected) == 2 * 3
    for path, history in expected.items():
        assert np.all(history > 0), path
        np.testing.assert_array_equal(ours[path], history, err_msg=path)


def test_unquantized_blocks_keep_no_history_and_do_not_depend_on_the_layout():
    expected, losses = run_exact(1, 1, True, "none", unquantized_blocks=1)
    for path, history in expected.items():
        assert np.all(history[1] > 0) and not np.any(history[[0, 2]]), path
    ours, ours_losses = run_exact(4, 4, False, "block", unquantized_blocks=1)
    assert ours_losses == losses
    jax.tree.map(np.testing.assert_array_equal, ours, expected)
    assert losses != run_exact(1, 1, True, "none")[1]


def test_optimizers_and_clipping_do_not_see_the_state(exact_reference):
    tx = optax.chain(optax.clip_by_global_norm(1e-9), optax.adamw(0.0, weight_decay=0.9))
    ours, losses = run_exact(1, 1, True, "none", tx=tx)
    assert losses == exact_reference[1]
    jax.tree.map(np.testing.assert_array_equal, ours, exact_reference[0])


# --- the same on a real model -------------------------------------------------------------------------


def run_llama(devices, microbatches, scan, remat):
    """Three steps with fixed weights, so that only what the data does is compared.

    The histories start full: in the very first step each microbatch scales by its own amax.
    """
    make = tiny.make_model(scan=scan, remat=remat, history=4)
    mesh = sharding.make_mesh(devices=jax.devices()[:devices])
    state, train = tiny.trainer(make, mesh=mesh, microbatches=microbatches, tx=optax.sgd(0.0))
    state = tiny.warm(state, input=4.0, kernel=0.4, output_grad=1e-3)
    losses = []
    for i in range(3):
        state, metrics = train(state, tiny.batch(i, rows=16))
        losses.append(float(metrics["loss"]))
    return tiny.histories(state), losses


@pytest.fixture(scope="module")
def llama_reference():
    return run_llama(1, 1, True, "none")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_llamas_state_is_bit_equal_in_every_layout(layout, llama_reference):
    expected, expected_losses = llama_reference
    ours, losses = run_llama(*layout)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    assert len(expected) == 7 * 3
    for path, history in expected.items():
        np.testing.assert_array_equal(ours[path], history, err_msg=path)
        assert history.shape == (2, 4) and len(np.unique(history)) > 1, path


def test_saved_and_restored_on_another_mesh_the_state_goes_on_to_the_bit(tmp_path, exact_reference):
    def on(devices):
        mesh = sharding.make_mesh(devices=jax.devices()[:devices])
        return tiny.trainer(exact_model(True, "none"), mesh=mesh, tx=optax.sgd(0.0), loss_fn=exact_loss)

    state, train = on(4)
    for i in range(2):
        state, _ = train(state, exact_batch(i))
    checkpoints = Checkpointer(tmp_path, every_steps=1)
    checkpoints.save(2, state, {})
    fresh, train = on(2)
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), fresh)
    state = checkpoints.restore_latest(abstract).state
    losses = []
    for i in range(2, 5):
        state, metrics = train(state, exact_batch(i))
        losses.append(float(metrics["loss"]))
    assert losses == exact_reference[1][2:]
    jax.tree.map(np.testing.assert_array_equal, tiny.histories(state), exact_reference[0])
    checkpoints.close()
