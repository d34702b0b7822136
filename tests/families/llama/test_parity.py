"""Llama against Hugging Face's; tools/make_llama_goldens.py made the goldens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.families.llama import hf
from maxlp.families.llama.model import RopeScaling, rope_table
from tests.families.decoders import (
    assert_round_trip,
    assert_same_outputs_and_gradients,
    load,
    loss_and_logits,
    params_of,
)

NAMES = ("llama_3_1", "llama_3_2_tied", "llama_2")
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)


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
    golden = load(name, hf)
    config = dataclasses.replace(golden.config, scan_layers=scan_layers, remat=remat)
    assert_same_outputs_and_gradients(golden, config)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_survive_the_round_trip_to_the_bit(name):
    assert_round_trip(load(name, hf))


def test_the_goldens_distinguish_the_rotary_scaling():
    """Without the scaling the logits are far off, in spite of short sequences."""
    golden = load("llama_3_1", hf)
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
    # Angles, cosines and sines have a few roundings of 2^-24; the shares between have six decimals.
    np.testing.assert_allclose(plain, 5e5 ** (-np.arange(64) / 64), rtol=1e-6)
    ratio = scaled / plain
    np.testing.assert_allclose(ratio[:29], 1, rtol=1e-6)
    between = [0.828168, 0.643743, 0.493507, 0.371122, 0.271425, 0.190211]
    np.testing.assert_allclose(ratio[29:35], between, rtol=3e-6)
    np.testing.assert_allclose(ratio[35:], 1 / 8, rtol=1e-6)
    known = [2.166570764e-3, 1.785078128e-4, 3.068925989e-7]
    np.testing.assert_allclose(scaled[[29, 34, 63]], known, rtol=1e-6)
