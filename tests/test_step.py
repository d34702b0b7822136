"""The train step is the same function on every mesh, for every way to cut the batch and the layers."""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from maxlp.core import gradients
from maxlp.core import train_step as step
from maxlp.families.llama import task as language
from maxlp.families.llama.model import Llama
from maxlp.parallel import sharding
from maxlp.parallel.batches import global_batch

MODEL = dict(
    vocab_size=128,
    embed_dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=64,
    max_seq_len=64,
    rope_theta=10000.0,
    rope_scaling=None,
    norm_eps=1e-5,
    tie_embeddings=False,
    init_std=0.1,
    dtype="float32",
    param_dtype="float32",
    attention="xla",
    scan_layers=True,
    remat="none",
)
B, S, STEPS = 32, 16, 3
MESHES = {
    "data8": dict(data=8, fsdp=1),
    "fsdp8": dict(fsdp=8),
    "fsdp4_tensor2": dict(fsdp=4, tensor=2),
    "data2_fsdp2_tensor2": dict(data=2, fsdp=2, tensor=2),
}


def batch(seed: int) -> dict[str, np.ndarray]:
    """Two documents a row, and a mask that leaves very different counts to different rows."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, MODEL["vocab_size"], (B, S + 1)).astype(np.int32)
    cut = rng.integers(1, S, (B, 1))
    column = np.arange(S)
    first = column < cut
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.where(first, 1, 2).astype(np.int32),
        "positions": np.where(first, column, column - cut).astype(np.int32),
        "loss_mask": rng.random((B, S)) < rng.random((B, 1)),
    }


class Trained:
    """A few steps of training, and what it took."""

    def __init__(self, devices=8, microbatches=1, num_chunks=1, z_loss=1e-3, tx=None, mesh=None, **model):
        # Plain gradient descent: parameters then differ by as much as the gradients do.
        self.tx = tx or optax.sgd(0.5)
        self.mesh = sharding.make_mesh(**(mesh or {"fsdp": 1}), devices=jax.devices()[:devices])
        make = lambda rngs: Llama(**{**MODEL, **model}, rngs=rngs)  # noqa: E731
        with jax.set_mesh(self.mesh):
            self.graphdef, self.abstract = step.abstract_state(make, self.tx, self.mesh)
            self.shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
            self.init = jax.jit(
                functools.partial(step.init_state, make, self.tx, 0), out_shardings=self.shardings
            )
            self.train_step = step.jit_train_step(
                self.abstract,
                self.mesh,
                graphdef=self.graphdef,
                gradients=gradients.of_sums(
                    functools.partial(language.next_token_loss, num_chunks=num_chunks, z_loss=z_loss),
                    language.num_targets,
                    microbatches=microbatches,
                ),
                tx=self.tx,
                schedule=lambda n: 0.5,
            )

    def run(self):
        with jax.set_mesh(self.mesh):
            state, self.losses, self.norms = self.init(), [], []
            for seed in range(STEPS):
                state, metrics = self.train_step(state, global_batch(batch(seed), self.mesh))
                self.losses.append(float(metrics["loss"]))
                self.norms.append(float(metrics["grad_norm"]))
        self.state = state
        return self


@pytest.fixture(scope="module")
def one_device():
    return Trained(devices=1).run()


def assert_same(got: Trained, want: Trained):
    # Sums in another order: a few units in the last place of float32.
    np.testing.assert_allclose(got.losses, want.losses, rtol=2e-6)
    np.testing.assert_allclose(got.norms, want.norms, rtol=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(jax.device_get(a), jax.device_get(b), rtol=2e-4, atol=5e-6),
        got.state["params"],
        want.state["params"],
    )


# Every mesh with every remat, and of the other factors every pair of values at least once.
CHOICES = [
    ("data8", "none", 1, True),
    ("data8", "dots", 4, True),
    ("data8", "block", 4, False),
    ("fsdp8", "none", 4, False),
    ("fsdp8", "dots", 1, False),
    ("fsdp8", "block", 1, True),
    ("fsdp4_tensor2", "none", 4, True),
    ("fsdp4_tensor2", "dots", 1, False),
    ("fsdp4_tensor2", "block", 1, True),
    ("data2_fsdp2_tensor2", "none", 1, False),
    ("data2_fsdp2_tensor2", "dots", 4, True),
    ("data2_fsdp2_tensor2", "block", 1, False),
]


def test_choices_cover_all_pairs():
    factors = list(zip(*CHOICES, strict=True))
    assert set(factors[0]) == set(MESHES)
    for a, b in itertools.combinations(factors, 2):
        assert set(zip(a, b, strict=True)) == set(itertools.product(set(a), set(b)))


@pytest.mark.parametrize(("mesh", "remat", "microbatches", "scan_layers"), CHOICES)
def test_mesh_accumulation_scan_remat_change_nothing(
    one_device, mesh, remat, microbatches, scan_layers, capfd
):
    got = Trained(
        mesh=MESHES[mesh],
        microbatches=microbatches,
        num_chunks=microbatches,
        scan_layers=scan_layers,
        remat=remat,
    ).run()
    assert_same(got, one_device)
    assert got.train_step._cache_size() == 1, "the step was compiled twice"
    # XLA says so when it must gather an activation to change its layout.
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


def test_loss_is_the_mean_over_tokens_of_all_microbatches(one_device):
    """Against the definition, computed document by document with plain logits."""
    model = nnx.merge(one_device.graphdef, jax.device_get(one_device.init()["params"]), {})
    b = batch(0)
    places = [(i, b["segment_ids"][i] == segment) for i in range(B) for segment in (1, 2)]
    alone_NS = np.zeros((len(places), S), np.int32)  # a document a row; what follows it has no effect
    for row, (i, where) in zip(alone_NS, places, strict=True):
        row[: where.sum()] = b["tokens"][i, where]
    logits_NSV = np.asarray(jax.jit(model)(alone_NS), np.float64)
    log_norm_NS = np.log(np.exp(logits_NSV).sum(-1))
    total, count = 0.0, 0
    for logits_SV, log_norm_S, (i, where) in zip(logits_NSV, log_norm_NS, places, strict=True):
        length, mask = where.sum(), b["loss_mask"][i, where]
        nll = log_norm_S[:length] - logits_SV[np.arange(length), b["targets"][i, where]]
        total += np.sum((nll + 1e-3 * log_norm_S[:length] ** 2) * mask)
        count += mask.sum()
    np.testing.assert_allclose(one_device.losses[0], total / count, rtol=1e-5)


def test_state_is_born_in_shards():
    """Compiled initialisation: each of 8 devices holds an eighth, and never the whole."""
    tx = optax.adamw(1e-3)
    whole = Trained(devices=1, embed_dim=256, mlp_dim=1024, vocab_size=4096, tx=tx)
    split = Trained(mesh=MESHES["fsdp8"], embed_dim=256, mlp_dim=1024, vocab_size=4096, tx=tx)

    def memory(trained):
        with jax.set_mesh(trained.mesh):
            return trained.init.lower().compile().memory_analysis()

    total = memory(whole).output_size_in_bytes
    per_device = memory(split)
    assert per_device.output_size_in_bytes < total / 8 * 1.05
    assert per_device.temp_size_in_bytes < total / 8


def test_compiled_step_does_not_grow_with_depth():
    def program(num_layers):
        t = Trained(devices=1, num_layers=num_layers, remat="block")
        with jax.set_mesh(t.mesh):
            return t.train_step.lower(t.abstract, global_batch(batch(0), t.mesh)).as_text()

    shallow, deep = program(2), program(64)
    assert len(deep) < 1.01 * len(shallow)


def test_remat_and_chunks_lower_peak_memory():
    def temp(**kwargs):
        t = Trained(devices=1, num_layers=8, **kwargs)
        with jax.set_mesh(t.mesh):
            lowered = t.train_step.lower(t.abstract, global_batch(batch(0), t.mesh))
            return lowered.compile().memory_analysis().temp_size_in_bytes

    none, dots, block = (temp(remat=r) for r in ("none", "dots", "block"))
    assert block < dots < none
    assert temp(remat="block", microbatches=4) < block
