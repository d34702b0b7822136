"""The train step computes the same on every mesh, for every way to divide the batch and the layers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from maxlp.core.train_step import jit_step, train_step
from maxlp.families.llama.task import NextTokenConfig
from maxlp.parallel import sharding
from tests.fixtures import Trainer, batch, batches, make_mesh

ROWS, LENGTH, STEPS = 32, 16, 3
Z_LOSS = 1e-3
MESHES = {
    "data8": dict(data=8),
    "fsdp8": dict(fsdp=8),
    "fsdp4_tensor2": dict(fsdp=4, tensor=2),
    "data2_fsdp2_tensor2": dict(data=2, fsdp=2, tensor=2),
}


@pytest.fixture(scope="module")
def one_device():
    """The initial parameters, those after some steps, and the metrics of each step."""
    trainer = Trainer(loss=NextTokenConfig(z_loss=Z_LOSS))
    state = trainer.init()
    initial = jax.device_get(state["params"])
    state, metrics = trainer.run(state, batches(STEPS, ROWS, LENGTH))
    return initial, jax.device_get(state["params"]), metrics


# (mesh, remat, microbatches, scan_layers). All cover every pair of values; the quick ones, every value.
QUICK = [
    ("data8", "dots", 4, True),
    ("fsdp8", "block", 1, True),
    ("fsdp4_tensor2", "none", 4, True),
    ("data2_fsdp2_tensor2", "block", 1, False),
]
FULL = [
    ("data8", "none", 1, True),
    ("data8", "block", 4, False),
    ("fsdp8", "none", 4, False),
    ("fsdp8", "dots", 1, False),
    ("fsdp4_tensor2", "dots", 1, False),
    ("fsdp4_tensor2", "block", 1, True),
    ("data2_fsdp2_tensor2", "none", 1, False),
    ("data2_fsdp2_tensor2", "dots", 4, True),
]


def test_choices_cover_all_pairs_and_the_quick_ones_all_values():
    quick, values = list(zip(*QUICK, strict=True)), list(zip(*QUICK + FULL, strict=True))
    assert [set(factor) for factor in quick] == [set(factor) for factor in values]
    assert set(values[0]) == set(MESHES)
    for a, b in itertools.combinations(values, 2):
        assert set(zip(a, b, strict=True)) == set(itertools.product(set(a), set(b)))


@pytest.mark.parametrize(
    ("mesh", "remat", "microbatches", "scan_layers"),
    [*QUICK, *(pytest.param(*choice, marks=pytest.mark.full) for choice in FULL)],
)
def test_mesh_microbatches_scan_and_remat_do_not_change_the_result(
    one_device, mesh, remat, microbatches, scan_layers, capfd
):
    initial, params, metrics = one_device
    trainer = Trainer(
        make_mesh(**MESHES[mesh]),
        loss=NextTokenConfig(z_loss=Z_LOSS, num_chunks=microbatches),
        microbatches=microbatches,
        scan_layers=scan_layers,
        remat=remat,
    )
    state, found = trainer.run(trainer.init(initial), batches(STEPS, ROWS, LENGTH))
    # Sums in another order: a few units in the last place of float32.
    for ours, expected in zip(found, metrics, strict=True):
        np.testing.assert_allclose(ours["loss"], expected["loss"], rtol=2e-6)
        np.testing.assert_allclose(ours["grad_norm"], expected["grad_norm"], rtol=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=5e-6),
        jax.device_get(state["params"]),
        params,
    )
    # XLA warns where it must gather an activation to change its layout.
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


def test_the_new_state_takes_the_memory_and_the_layout_of_the_old_one():
    """Even if the step computes it in another layout, so that the next step is not compiled again."""
    mesh = make_mesh(fsdp=8)
    place = NamedSharding(mesh, PartitionSpec("fsdp"))

    def replicating_step(graphdef, state, batch):
        return {
            "x": jax.lax.with_sharding_constraint(state["x"] + batch["x"], sharding.replicated(mesh))
        }, {}

    abstract = {"x": jax.ShapeDtypeStruct((8,), "float32", sharding=place)}
    step = jit_step(replicating_step, None, abstract, mesh)
    first = state = {"x": jax.device_put(np.zeros(8, np.float32), place)}
    for _ in range(2):
        state, _ = step(state, {"x": 1.0})
    assert state["x"].sharding == place and step._cache_size() == 1
    assert first["x"].is_deleted()


def test_moments_of_parameters_in_16_bits_keep_their_dtype():
    """Sums of gradients are float32, but a step cannot be repeated if it changes the dtype of its state."""
    trainer = Trainer(param_dtype="bfloat16", microbatches=2, tx=optax.adam(0.1))
    state, _ = trainer.trace(batch(0, ROWS, LENGTH)).out_info
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, (state, trainer.abstract))
    assert dtypes[0] == dtypes[1]


def test_the_loss_is_the_mean_over_the_targets_of_all_documents(one_device):
    """By its definition, each document alone, in float64."""
    initial, _, metrics = one_device
    trainer, rows = Trainer(), batch(0, ROWS, LENGTH)
    places = [(i, rows["segment_ids"][i] == segment) for i in range(ROWS) for segment in (1, 2)]
    alone_NS = np.zeros(
        (len(places), LENGTH), np.int32
    )  # a document in each row; the padding has no effect
    for row, (i, where) in zip(alone_NS, places, strict=True):
        row[: where.sum()] = rows["tokens"][i, where]
    model = nnx.merge(trainer.graphdef, initial, {})
    logits_NSV = np.asarray(jax.jit(model)(alone_NS), np.float64)
    log_z_NS = np.log(np.exp(logits_NSV).sum(-1))
    total, count = 0.0, 0
    for logits_SV, log_z_S, (i, where) in zip(logits_NSV, log_z_NS, places, strict=True):
        length, mask = where.sum(), rows["loss_mask"][i, where]
        nll = log_z_S[:length] - logits_SV[np.arange(length), rows["targets"][i, where]]
        total += np.sum((nll + Z_LOSS * log_z_S[:length] ** 2) * mask)
        count += mask.sum()
    np.testing.assert_allclose(metrics[0]["loss"], total / count, rtol=1e-6)  # the logits are float32


def test_the_program_does_not_grow_with_depth():
    def size(num_layers: int) -> int:
        trainer = Trainer(num_layers=num_layers, remat="block")
        return len(trainer.lower(batch(0, ROWS, LENGTH)).as_text())

    assert size(64) < 1.01 * size(2)


@pytest.mark.full
def test_remat_and_microbatches_lower_the_peak_of_memory():
    def temporaries(**how) -> int:
        compiled = Trainer(num_layers=8, **how).compile(batch(0, ROWS, LENGTH))
        return compiled.memory_analysis().temp_size_in_bytes

    none, dots, block = (temporaries(remat=remat) for remat in ("none", "dots", "block"))
    assert block < dots < none
    assert temporaries(remat="block", microbatches=4) < block


def test_metrics_describe_the_step():
    """The norm of the gradients, and what the optimizer's new state says."""
    # 257 squares of 1: a sum in bfloat16 would stay at 256.
    params = {"w": jnp.ones(257, jnp.bfloat16)}

    def gradients(graphdef, state, batch, loss_scale):
        return jax.tree.map(lambda p: -p, state["params"]), {}, {"loss": jnp.float32(1.0)}

    def updates_of(opt_state):
        return {"updates": opt_state[1].count}

    tx = optax.sgd(lambda count: 2.0)
    state = {"params": params, "model_state": {}, "opt_state": tx.init(params), "step": jnp.int32(1)}
    new, metrics = train_step(None, state, {}, gradients=gradients, tx=tx, optimizer_metrics=updates_of)
    assert new["step"] == 2 and metrics["updates"] == 1
    # Sums of 257 squares in float32.
    np.testing.assert_allclose(metrics["grad_norm"], 257**0.5, rtol=1e-6)
    assert metrics["grad_norm"].dtype == jnp.float32
