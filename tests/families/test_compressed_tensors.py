"""Weights in 8 bits: their error, and what other tools wrote differently."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from maxlp.families import compressed_tensors
from maxlp.families.compressed_tensors import SCHEMES, Dequantized, dequantized
from maxlp.runtime.safetensors import Tensors, write_tensors

NAME, SCALE = "up_proj.weight", "up_proj.weight_scale"


def weights() -> np.ndarray:
    """Channels (rows) of very different sizes; one is zero, one has an outlier."""
    w = np.random.default_rng(0).standard_normal((64, 96)) * np.geomspace(1e-6, 1e4, 64)[:, None]
    w[3], w[5, 7] = 0.0, 1e3
    return w.astype(np.float32)


def written(tmp_path, scheme: str, weight: np.ndarray) -> Tensors:
    tensors = {NAME: weight, "norm.weight": np.ones(8, np.float32)}
    quantized = compressed_tensors.quantize(tensors, ("*_proj.weight",), SCHEMES[scheme])
    write_tensors(tmp_path, quantized, dtype="bfloat16")
    config = dict(model_type="llama", quantization_config=SCHEMES[scheme].config())
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Tensors(tmp_path)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_error_of_a_weight_is_half_a_step(scheme, tmp_path):
    w = weights()
    tensors = written(tmp_path, scheme, w)
    found = dequantized(tensors, tmp_path / "config.json")
    assert sorted(found) == ["norm.weight", NAME] and len(found) == 2
    scale = tensors[SCALE].astype(np.float32)
    assert scale.shape == (64, 1) and tensors[SCALE].dtype == jnp.bfloat16
    # w / scale is rounded to float32 before it is rounded to a code.
    half_step = scale / 2 if scheme == "int8" else np.maximum(np.abs(w) / 16, scale * 2.0**-10)
    assert (np.abs(found[NAME] - w) <= half_step * (1 + 2.0**-15)).all()
    # Scales are at most 2^-7 larger than they need to be, so that no code is wasted or saturates.
    top = SCHEMES[scheme].format.max
    needed = np.abs(w).max(axis=1, keepdims=True) / top
    assert (scale[:3] >= needed[:3]).all() and (scale[:3] <= needed[:3] * (1 + 2.0**-7)).all()
    assert (found[NAME][3] == 0).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_files_hold_a_byte_for_each_weight(scheme, tmp_path):
    tensors = written(tmp_path, scheme, weights())
    assert tensors.codes(NAME).dtype == SCHEMES[scheme].format.dtype
    assert tensors["norm.weight"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=rf"tensor '{NAME}' holds numbers of type (I8|F8_E4M3), not F64"):
        tensors[NAME]
    with pytest.raises(ValueError, match=r"tensor 'norm.weight' holds numbers of type BF16 with a scale"):
        tensors.codes("norm.weight")


def test_a_folder_without_quantized_weights_is_read_as_it_is(tmp_path):
    tensors = written(tmp_path, "int8", weights())
    (tmp_path / "config.json").write_text("{}")
    assert dequantized(tensors, tmp_path / "config.json") is tensors


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(quant_method="gptq"), "quant_method='gptq' is not supported, only 'compressed-tensors'$"),
        (
            dict(format="pack-quantized"),
            "format='pack-quantized' is not supported, only 'int-quantized' or",
        ),
        (
            dict(config_groups=dict(group_0=dict(weights=dict(num_bits=4, type="int", symmetric=True)))),
            r"config_groups.group_0.weights.num_bits=4 is not supported, only 8",
        ),
        (
            dict(config_groups=dict(group_0=dict(weights=dict(num_bits=8, type="int", symmetric=False)))),
            r"config_groups.group_0.weights.symmetric=False is not supported, only True",
        ),
        (dict(config_groups=None), "config_groups=None"),
    ],
)
def test_other_schemes_are_refused(changes, message, tmp_path):
    tensors = written(tmp_path, "int8", weights())
    config = dict(quantization_config=SCHEMES["int8"].config() | changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"config.json: quantization_config.*{message}"):
        dequantized(tensors, tmp_path / "config.json")


def test_scales_of_groups_are_refused(tmp_path):
    codes = np.ones((4, 8), np.int8)
    save_file({NAME: codes, SCALE: np.ones((4, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'up_proj.weight_scale' of shape \(4, 2\) is not one scale"):
        Dequantized(Tensors(tmp_path))[NAME]
