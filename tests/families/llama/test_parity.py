"""Llama against Hugging Face's; tools/make_llama_goldens.py made the goldens."""

import dataclasses
import functools
import json
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.core.train_state import abstract_model
from maxlp.families import weights
from maxlp.families.llama import hf, losses
from maxlp.families.llama.model import Llama, LlamaConfig, RopeScaling, rope_table
from maxlp.parallel import sharding

GOLDENS = pathlib.Path(__file__).parents[2] / "goldens"
NAMES = ("llama_3_1", "llama_3_2_tied", "llama_2")
RUN = dict(dtype="float32", param_dtype="float32", attention="xla", scan_layers=True, remat="none")
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)


class Golden(NamedTuple):
    """A golden: its config, the weights and some gradients by name, and other arrays."""

    config: LlamaConfig
    weights: dict[str, np.ndarray]
    grads: dict[str, np.ndarray]
    arrays: dict[str, np.ndarray]


def load(name: str) -> Golden:
    with np.load(GOLDENS / f"{name}.npz") as file:
        flat = dict(file)
    config = LlamaConfig(**hf.config_from_hf(json.loads(str(flat.pop("config")))), **RUN)
    groups: dict[str, dict[str, np.ndarray]] = {"weights": {}, "grads": {}, "": {}}
    for key, value in flat.items():
        group, _, tensor = key.rpartition("/")
        groups[group][tensor] = value.astype(np.float32) if group else value
    return Golden(config, groups["weights"], groups["grads"], groups[""])


@functools.lru_cache
def abstract(config: LlamaConfig) -> tuple[nnx.GraphDef, dict]:
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    graphdef, state = abstract_model(lambda rngs: Llama(config, rngs=rngs), mesh)
    return graphdef, state["params"]


def params_of(golden: Golden) -> dict:
    return weights.to_maxlp(golden.weights, abstract(golden.config)[1], hf.LAYOUT)


def loss_and_logits(params: dict, config: LlamaConfig, tokens, positions) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy of the next token, and all logits."""
    model = nnx.merge(abstract(config)[0], params)
    x_BSD, _ = model.hidden(tokens, positions)
    targets = tokens[:, 1:]
    logits_BSV = model.logits(x_BSD)
    sums = losses.next_token(logits_BSV[:, :-1], targets, jnp.ones_like(targets, bool), z_loss=0.0)
    return sums["loss"] / sums["tokens"], logits_BSV


@pytest.mark.parametrize(
    "name, scan_layers, remat",
    [
        ("llama_3_1", True, "none"),
        ("llama_3_1", False, "block"),
        ("llama_3_2_tied", True, "none"),
        ("llama_2", True, "none"),
    ],
)
def test_logits_loss_and_gradients_equal_hugging_face(name, scan_layers, remat):
    golden = load(name)
    config, arrays = dataclasses.replace(golden.config, scan_layers=scan_layers, remat=remat), golden.arrays
    compute = jax.jit(lambda p, *x: jax.value_and_grad(loss_and_logits, has_aux=True)(p, config, *x))
    (loss, logits), grads = compute(params_of(golden), arrays["tokens"], arrays["positions"])
    # float32 on both sides: logits of some tens, after a few roundings of 2e-6 each
    np.testing.assert_allclose(logits, arrays["logits"], atol=3e-5, rtol=0)
    np.testing.assert_allclose(loss, arrays["loss"], atol=3e-6, rtol=0)
    grads = weights.to_other(grads, hf.LAYOUT)
    for key, expected in golden.grads.items():
        atol = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(grads[key], expected, atol=atol, rtol=0, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_survive_the_round_trip_to_the_bit(name):
    golden = load(name)
    back = weights.to_other(params_of(golden), hf.LAYOUT)
    assert set(back) == set(golden.weights)
    for key, weight in golden.weights.items():
        np.testing.assert_array_equal(back[key], weight, strict=True)


def test_the_goldens_distinguish_the_rotary_scaling():
    """Without the scaling the logits are far off, in spite of short sequences."""
    golden = load("llama_3_1")
    config = dataclasses.replace(golden.config, rope_scaling=None)
    compute = jax.jit(lambda p, *x: loss_and_logits(p, config, *x))
    _, logits = compute(params_of(golden), golden.arrays["tokens"], golden.arrays["positions"])
    assert np.abs(logits - golden.arrays["logits"]).max() > 0.1


def test_rope_frequencies_of_llama_3_1():
    """theta 5e5, factor 8, low 1, high 4, original context 8192, head dim 128 (from the published rule)."""

    def frequencies(scaling: RopeScaling | None) -> np.ndarray:
        cos, sin = rope_table(jnp.ones((1, 1), jnp.int32), 128, 5e5, scaling)
        return np.arctan2(sin, cos).ravel()

    plain, scaled = frequencies(None), frequencies(SCALING)
    np.testing.assert_allclose(plain, 5e5 ** (-np.arange(64) / 64), rtol=3e-6)
    ratio = scaled / plain
    np.testing.assert_allclose(ratio[:29], 1, rtol=1e-6)
    between = [0.828168, 0.643743, 0.493507, 0.371122, 0.271425, 0.190211]
    np.testing.assert_allclose(ratio[29:35], between, rtol=3e-6)
    np.testing.assert_allclose(ratio[35:], 1 / 8, rtol=1e-6)
    known = [2.166570764e-3, 1.785078128e-4, 3.068925989e-7]
    np.testing.assert_allclose(scaled[[29, 34, 63]], known, rtol=1e-6)
