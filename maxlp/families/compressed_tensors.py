"""Weights in 8 bits for inference, in the format of compressed-tensors, which vLLM and transformers read.

The kernel of a matmul is two tensors: its codes ``NAME.weight`` (out, in), in int8 or E4M3, and the
scales of its output channels, ``NAME.weight_scale`` (out, 1). Their product is the weight.
``quantization_config`` in ``config.json`` describes both. It also specifies that a runtime quantizes the
inputs of these matmuls, with a scale for each token: vLLM has kernels for these schemes (W8A8).

A runtime may hold scales in bfloat16. So they are rounded up to bfloat16 here, and the codes are computed
for the rounded ones: a value w is off by at most half a step of its channel, ``scale / 2``, in int8, and by
at most ``max(2^-4 |w|, 2^-10 scale)`` in E4M3.
"""

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from maxlp.families.weights import Section, read_config
from maxlp.numerics import formats
from maxlp.numerics.rounding import cast
from maxlp.numerics.scales import amax, scale_for
from maxlp.runtime.safetensors import Tensors

Array = np.ndarray
SCALE = "_scale"  # after the name of a weight


class Scheme(NamedTuple):
    """How weights are quantized.

    Attributes:
      format: of the codes.
      kind, name: what compressed-tensors calls the format of the codes and that of the files.
    """

    format: formats.Format
    kind: str
    name: str

    def config(self) -> dict[str, Any]:
        """The ``quantization_config`` of a model whose matmuls in blocks are quantized."""
        numbers = dict(num_bits=8, type=self.kind, symmetric=True)
        group = dict(
            targets=["Linear"],
            weights=dict(numbers, strategy="channel", dynamic=False),
            input_activations=dict(numbers, strategy="token", dynamic=True),
        )
        return dict(
            quant_method="compressed-tensors",
            quantization_status="compressed",
            format=self.name,
            config_groups={"group_0": group},
            ignore=["lm_head"],
        )


SCHEMES = {
    "int8": Scheme(formats.FORMATS["int8"], "int", "int-quantized"),
    "fp8": Scheme(formats.FORMATS["float8_e4m3fn"], "float", "float-quantized"),
}


def quantize(tensors: Mapping[str, Array], patterns: tuple[str, ...], scheme: Scheme) -> dict[str, Array]:
    """The tensors with codes and scales in place of those whose names match one of the patterns."""
    found = {}
    for name, tensor in tensors.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            found[name], found[name + SCALE] = _quantized(tensor, scheme.format)
        else:
            found[name] = tensor
    return found


def _quantized(weight: Array, to: formats.Format) -> tuple[Array, Array]:
    """Codes (out, in), and scales (out, 1) in bfloat16, of a weight (out, in)."""
    weight = weight.astype(np.float32)
    scale = np.asarray(scale_for(amax(jnp.asarray(weight), (1,)), to))
    rounded_up = (scale.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    scale = rounded_up.view(np.float32)
    return np.asarray(cast(jnp.asarray(weight / scale), to)), scale.astype(jnp.bfloat16)


# --- reading --------------------------------------------------------------------------------------------


class Dequantized(Mapping[str, Array]):
    """The tensors of a folder in which some are codes with scales: these are read as their products."""

    def __init__(self, tensors: Tensors):
        self.tensors = tensors
        self.names = [name for name in tensors if not name.endswith(f".weight{SCALE}")]

    def __getitem__(self, name: str) -> Array:
        """Reads a tensor; one with scales in float32, in which the product is exact for scales in bfloat16.

        Raises:
          ValueError: a scale that is not one number for each output channel.
        """
        if name + SCALE not in self.tensors:
            return self.tensors[name]
        codes, scale = self.tensors.codes(name), self.tensors[name + SCALE]
        if scale.shape not in ((), (1,), (len(codes), 1)):
            raise ValueError(
                f"tensor {name + SCALE!r} of shape {scale.shape} is not one scale for each of the "
                f"{len(codes)} output channels; give weights that are quantized by channel, or not at all"
            )
        return codes.astype(np.float32) * scale.astype(np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def dequantized(tensors: Tensors, config_file: Path) -> Mapping[str, Array]:
    """The tensors of a folder as numbers, whether its config describes quantized ones or not.

    Raises:
      ValueError: weights that are quantized in another way.
    """
    config = Section(f"{config_file.name}: ", read_config(config_file)).section("quantization_config", None)
    if not config.values:
        return tensors
    _check(config, quant_method="compressed-tensors", format=[scheme.name for scheme in SCHEMES.values()])
    groups = config.section("config_groups")
    for name in groups.values:
        weights = groups.section(name).section("weights")
        _check(weights, num_bits=8, symmetric=True, type=[scheme.kind for scheme in SCHEMES.values()])
    return Dequantized(tensors)


def _check(section: Section, **supported: Any) -> None:
    for key, values in supported.items():
        values = values if isinstance(values, list) else [values]
        if section.values.get(key) not in values:
            raise section.refusal(key, " or ".join(map(repr, values)))
