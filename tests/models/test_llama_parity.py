"""Llama against Hugging Face's, through ``models/hf.py``. tools/make_llama_goldens.py made the goldens."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.families.llama import hf, losses
from maxlp.families.llama import model as llama

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
CASES = ("llama_3_1", "llama_3_2_tied", "llama_2")
RUN = dict(dtype="float32", param_dtype="float32", attention="xla", scan_layers=True, remat="none")


def load(name: str) -> dict:
    """A golden with its config as `llama.Llama` arguments, and weights and grads as dicts by name."""
    with np.load(GOLDENS / f"{name}.npz") as file:
        flat = dict(file)
    golden = dict(config=hf.config_from_hf(json.loads(str(flat.pop("config")))) | RUN)
    for key, value in flat.items():
        group, _, tensor = key.partition("/")
        if tensor:
            golden.setdefault(group, {})[tensor] = value.astype(np.float32)
        else:
            golden[group] = value
    return golden


def loss_and_logits(params: dict, config: dict, tokens, positions) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy of the next token, and all logits."""
    model = llama.Llama(**config, rngs=nnx.Rngs(0))
    nnx.update(model, params)
    x_BSD, _ = model.hidden(tokens, positions)
    targets = tokens[:, 1:]
    every = jnp.ones_like(targets, bool)
    logits_BSV = model.logits(x_BSD)
    sums = losses.next_token(logits_BSV[:, :-1], targets, every, z_loss=0.0)
    return sums["loss"] / sums["tokens"], logits_BSV


@pytest.mark.parametrize("scan_layers, remat", [(True, "none"), (False, "block")])
@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients_equal_hugging_face(name, scan_layers, remat):
    golden = load(name)
    config = golden["config"] | dict(scan_layers=scan_layers, remat=remat)
    compute = jax.jit(lambda p, *x: jax.value_and_grad(loss_and_logits, has_aux=True)(p, config, *x))
    params = hf.to_maxlp(golden["weights"], config)
    (loss, logits), grads = compute(params, golden["tokens"], golden["positions"])
    np.testing.assert_allclose(logits, golden["logits"], atol=3e-5, rtol=0)
    np.testing.assert_allclose(loss, golden["loss"], atol=3e-6, rtol=0)
    grads = hf.to_hf(grads)
    for key, expected in golden["grads"].items():
        atol = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(grads[key], expected, atol=atol, rtol=0, err_msg=key)


@pytest.mark.parametrize("name", CASES)
def test_weights_survive_the_round_trip_bit_for_bit(name):
    golden = load(name)
    back = hf.to_hf(hf.to_maxlp(golden["weights"], golden["config"]))
    assert set(back) == set(golden["weights"])
    for key, weight in golden["weights"].items():
        np.testing.assert_array_equal(back[key], weight, strict=True)


def test_the_goldens_see_the_rotary_scaling():
    """Without it the logits are far off: the parity above is no accident of short sequences."""
    golden = load("llama_3_1")
    params = hf.to_maxlp(golden["weights"], golden["config"])
    config = golden["config"] | dict(rope_scaling=None)
    compute = jax.jit(lambda p, *x: loss_and_logits(p, config, *x))
    _, logits = compute(params, golden["tokens"], golden["positions"])
    assert np.abs(logits - golden["logits"]).max() > 0.1


def test_rope_frequencies_of_llama_3_1():
    """theta 5e5, factor 8, low 1, high 4, original context 8192, head dim 128 (from the published rule)."""

    def frequencies(scaling: llama.RopeScaling | None) -> np.ndarray:
        cos, sin = llama.rope_table(jnp.ones((1, 1), jnp.int32), 128, 5e5, scaling)
        return np.arctan2(sin, cos).ravel()

    plain, scaled = frequencies(None), frequencies(llama.RopeScaling(8.0, 1.0, 4.0, 8192))
    np.testing.assert_allclose(plain, 5e5 ** (-np.arange(64) / 64), rtol=3e-6)
    ratio = scaled / plain
    np.testing.assert_allclose(ratio[:29], 1, rtol=1e-6)
    between = [0.828168, 0.643743, 0.493507, 0.371122, 0.271425, 0.190211]
    np.testing.assert_allclose(ratio[29:35], between, rtol=3e-6)
    np.testing.assert_allclose(ratio[35:], 1 / 8, rtol=1e-6)
    known = [2.166570764e-3, 1.785078128e-4, 3.068925989e-7]
    np.testing.assert_allclose(scaled[[29, 34, 63]], known, rtol=1e-6)
