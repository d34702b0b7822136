"""The sizes of the blocks' outputs, against float64 in NumPy and against blocks called one by one."""

import jax
import numpy as np
import pytest
from flax import nnx

from maxlp.families.clip.contrastive import ContrastiveConfig
from maxlp.families.clip.gradients import batch_loss as clip_loss
from maxlp.families.llama.model import rope_frequencies
from maxlp.families.llama.task import NextTokenConfig
from maxlp.families.llama.task import batch_loss as next_token_loss
from maxlp.nn import lora
from maxlp.precision import magnitudes
from maxlp.run.measurements import compiled
from tests.families.clip.fixtures import make_batch, make_clip
from tests.fixtures import LLAMA, Trainer, make_llama, make_mesh, precision_config

HEADS, KV_HEADS, DIM = (LLAMA[key] for key in ("num_heads", "num_kv_heads", "head_dim"))


def text(rows=2, length=16):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, LLAMA["vocab_size"], (rows, length))
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, 1),
        "positions": np.broadcast_to(np.arange(length), (rows, length)),
        "segment_ids": np.ones((rows, length), int),
        "loss_mask": np.ones((rows, length), bool),
    }


def norm(x, scale):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + LLAMA["norm_eps"]) * scale


def rotated(x_BSNH):
    """The pairs (i, i + H/2) as complex numbers, times those of their angles."""
    angles = np.arange(x_BSNH.shape[1])[:, None] * rope_frequencies(DIM, LLAMA["rope_theta"], None)
    turned = (x_BSNH[..., : DIM // 2] + 1j * x_BSNH[..., DIM // 2 :]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], -1)


def attention(x, w):
    B, S, _ = x.shape
    q, k, v = (
        (x @ w[f"{name}_proj"]["kernel"]).reshape(B, S, heads, DIM)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    k, v = (np.repeat(a, HEADS // KV_HEADS, axis=2) for a in (rotated(k), v))
    logits = np.einsum("BSNH,BTNH->BNST", rotated(q), k) / np.sqrt(DIM)
    weights = np.exp(np.where(np.tri(S, dtype=bool), logits, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("BNST,BTNH->BSNH", weights, v).reshape(B, S, -1) @ w["o_proj"]["kernel"]


def sizes_in_float64(params, tokens):
    """The mean |x| after each block of a Llama."""
    params = jax.tree.map(np.float64, params)
    x, found = params["tok_embed"]["embedding"][tokens], []
    for i in range(LLAMA["num_layers"]):
        w = jax.tree.map(lambda stack, i=i: stack[i], params["layers"])
        x = x + attention(norm(x, w["attn_norm"]["scale"]), w["attn"])
        h = norm(x, w["mlp_norm"]["scale"])
        gate, up = (h @ w["mlp"][f"{name}_proj"]["kernel"] for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["mlp"]["down_proj"]["kernel"]
        found.append(np.mean(np.abs(x)))
    return found


def measured(trainer, state):
    with jax.set_mesh(trainer.mesh):
        how = dict(graphdef=trainer.graphdef, loss=next_token_loss(NextTokenConfig()))
        return compiled(magnitudes.measure, magnitudes.metrics, **how)(state, text())


def test_they_are_those_of_a_llama_in_float64():
    trainer = Trainer()
    state = trainer.init()
    found = measured(trainer, state)
    expected = sizes_in_float64(state["params"], text()["tokens"])
    assert list(found) == ["magnitude/layers/0", "magnitude/layers/1"]
    # Sums of up to 96 terms in float32, and a mean over 2,048 numbers.
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-5)
    assert abs(expected[1] / expected[0] - 1) > 0.01


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2, "tensor": 2}, {"data": 2, "context": 2}])
def test_they_are_the_same_unrolled_with_remat_and_on_a_mesh(mesh):
    base = Trainer()
    state = base.init()
    other = Trainer(make_mesh(**mesh), scan_layers=False, remat="block")
    found = measured(other, other.init(jax.device_get(state["params"])))
    assert found == pytest.approx(measured(base, state), rel=1e-5)  # sums in another order


class OneByOne:
    """Replaces a tower's `Encoder`: calls its blocks one by one."""

    def run(self, blocks, x_BSD):
        graphdef, variables = nnx.split(blocks)
        self.sizes = []
        for i in range(2):
            x_BSD = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], variables))(
                x_BSD, x_BSD.shape[1]
            )
            self.sizes.append(np.mean(np.abs(np.float64(x_BSD))))
        return x_BSD


@pytest.mark.full
def test_both_towers_of_a_clip_are_measured():
    loss, batch = clip_loss(ContrastiveConfig(kind="softmax", method="plain")), make_batch(4)
    model, other = make_clip(), make_clip()
    found = magnitudes.of_blocks(model, lambda: loss(model, batch, 3))
    towers = {"visual/layers": other.visual, "text/layers": other.text}
    for tower in towers.values():
        tower.encoder = OneByOne()
    loss(other, batch, 3)
    assert found.keys() == towers.keys()
    for name, tower in towers.items():
        # The same sums, in other programs.
        np.testing.assert_allclose(found[name], tower.encoder.sizes, rtol=1e-5)


@pytest.mark.full
def test_blocks_at_the_ends_stay_unquantized():
    """With two mantissa bits in one block, the output of the other is as without quantization."""
    recipe = precision_config("simulate", format="e5m2", first_blocks=1)
    trainer, plain = Trainer(recipe=recipe), Trainer()
    state = trainer.init()
    found = list(measured(trainer, state).values())
    expected = list(measured(plain, plain.init(state["params"])).values())
    assert found[0] == pytest.approx(expected[0], rel=1e-5)  # float32, in two programs
    assert abs(found[1] / expected[1] - 1) > 1e-4


@pytest.mark.full
def test_frozen_kernels_are_those_of_each_layer():
    def make(rngs):
        model = make_llama()(rngs)
        lora.add_adapters(model, rngs, rank=4, scale=2.0)  # which are zero at first
        return model

    trainer = Trainer(make_model=make)
    state = trainer.init()
    found = measured(trainer, state)
    expected = sizes_in_float64(state["model_state"], text()["tokens"])
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-5)  # sums as in the first test
