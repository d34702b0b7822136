"""The amax histories of delayed scaling: what enters them, and that nothing else changes them."""

import itertools

import jax
import numpy as np
import optax
import pytest

from maxlp.runtime.checkpoint import Checkpointer
from tests.fixtures import Trainer, batches, histories, make_mesh, precision_config, with_full_histories
from tests.precision.fixtures import exact_batch, exact_params, exact_trainer

FAST = [(1, 4, True, "none"), (4, 1, False, "none"), (4, 4, True, "block")]
LAYOUTS = [  # devices, microbatches, scan, remat; all compared with (1, 1, True, "none")
    layout if layout in FAST else pytest.param(layout, marks=pytest.mark.slow)
    for layout in itertools.product((1, 4), (1, 4), (True, False), ("none", "block"))
    if layout != (1, 1, True, "none")
]


def run_exact(devices, microbatches, scan, remat, *, steps=5, **how):
    trainer = exact_trainer(devices, microbatches=microbatches, scan=scan, remat=remat, **how)
    state, metrics = trainer.run(trainer.init(exact_params()), map(exact_batch, range(steps)))
    return histories(state), [m["loss"] for m in metrics]


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


@pytest.mark.full
def test_unquantized_blocks_keep_no_history_and_do_not_depend_on_the_layout(exact_reference):
    expected, losses = run_exact(1, 1, True, "none", unquantized_blocks=1)
    for path, history in expected.items():
        assert np.all(history[1] > 0) and not np.any(history[[0, 2]]), path
    ours, ours_losses = run_exact(4, 4, False, "block", unquantized_blocks=1)
    assert ours_losses == losses
    jax.tree.map(np.testing.assert_array_equal, ours, expected)
    assert losses != exact_reference[1]


def test_optimizers_and_clipping_do_not_change_the_state(exact_reference):
    tx = optax.chain(optax.clip_by_global_norm(1e-9), optax.adamw(0.0, weight_decay=0.9))
    ours, losses = run_exact(1, 1, True, "none", tx=tx)
    assert losses == exact_reference[1]
    jax.tree.map(np.testing.assert_array_equal, ours, exact_reference[0])


def test_a_run_restored_on_another_mesh_continues_to_the_bit(tmp_path, exact_reference):
    before, after = exact_trainer(4), exact_trainer(2)
    state, _ = before.run(before.init(exact_params()), map(exact_batch, range(2)))
    checkpoints = Checkpointer(tmp_path, every_steps=1)
    checkpoints.save(2, state, {})
    restored = checkpoints.restore_latest(after.abstract)
    state, metrics = after.run(restored.state, map(exact_batch, range(2, 5)))
    assert [m["loss"] for m in metrics] == exact_reference[1][2:]
    jax.tree.map(np.testing.assert_array_equal, histories(state), exact_reference[0])
    checkpoints.close()


# --- the same on a real model -------------------------------------------------------------------------


def run_llama(devices, microbatches, scan, remat):
    """Three steps with fixed weights, so that only the effect of the data is compared.

    The histories start full: in the very first step each microbatch scales by its own amax.
    """
    trainer = Trainer(
        make_mesh(fsdp=devices),
        recipe=precision_config("fp8_delayed", history=4),
        dtype="bfloat16",
        microbatches=microbatches,
        scan_layers=scan,
        remat=remat,
        tx=optax.sgd(0.0),
    )
    state, metrics = trainer.run(with_full_histories(trainer.init()), batches(3, rows=16))
    return histories(state), [m["loss"] for m in metrics]


@pytest.fixture(scope="module")
def llama_reference():
    return run_llama(1, 1, True, "none")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_llamas_state_is_bit_equal_in_every_layout(layout, llama_reference):
    expected, expected_losses = llama_reference
    ours, losses = run_llama(*layout)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)  # float32 sums in another order
    assert len(expected) == 7 * 3
    for path, history in expected.items():
        np.testing.assert_array_equal(ours[path], history, err_msg=path)
        assert history.shape == (2, 4) and len(np.unique(history)) > 1, path
