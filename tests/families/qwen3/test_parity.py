"""Qwen3 against Hugging Face's; tools/make_qwen_goldens.py made the golden."""

import jax
import numpy as np
import pytest

from maxlp.families.qwen3 import hf
from tests.families.decoders import (
    Golden,
    assert_round_trip,
    assert_same_outputs_and_gradients,
    load,
    loss_and_logits,
    params_of,
)


@pytest.fixture(scope="module")
def golden() -> Golden:
    return load("qwen3", hf)


def test_logits_loss_and_gradients_equal_hugging_face(golden):
    assert_same_outputs_and_gradients(golden, golden.config)


def test_tensors_survive_the_round_trip_to_the_bit(golden):
    assert_round_trip(golden)


def test_the_golden_distinguishes_norms_after_the_rotation(golden):
    """A rotation keeps the RMS of a head but moves its dims, so only the scales tell the two apart."""
    params = params_of(golden)
    for norm in ("q_norm", "k_norm"):
        scale = params["layers"]["attn"][norm]["scale"]
        scale[...] = scale[:, ::-1]
    compute = jax.jit(lambda p, *x: loss_and_logits(p, golden.config, *x))
    _, logits = compute(params, golden.arrays["tokens"], golden.arrays["positions"])
    assert np.abs(logits - golden.arrays["logits"]).max() > 0.1
