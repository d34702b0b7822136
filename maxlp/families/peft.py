"""Adapters in the format of PEFT, which other libraries add to the model that they were trained on.

``adapter_model.safetensors`` holds two matrices for each matmul with an adapter: NAME.lora_A.weight (R, in)
and NAME.lora_B.weight (out, R). ``adapter_config.json`` describes them. The weight NAME.weight (out, in)
becomes ``weight + (lora_alpha / r) x B A``; rsLoRA (Kalajdzievski 2023, arXiv:2312.03732) divides by the
square root of r.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from maxlp.families.weights import (
    ADAPTER_CONFIG,
    TRANSPOSED,
    Layout,
    Place,
    Section,
    naming,
    read_config,
)
from maxlp.nn.lora import Adapter
from maxlp.nn.stack import path_name
from maxlp.runtime import hub
from maxlp.runtime.safetensors import Tensors
from maxlp.schema import Positive

Array = np.ndarray
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the names of the model's modules

# What may be in a config that describes plain LoRA: these values, these keys with any value, and other keys
# with a value that switches them off. PiSSA and the like are initial values that also change the model.
VALUES = dict(peft_type=["LORA"], bias=["none"], init_lora_weights=[True, False, "gaussian", "orthogonal"])
KEYS = (
    *("auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern"),
    *("layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_version"),
    *("qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "task_type", "use_rslora"),
)


def layout(base: Layout) -> Layout:
    """The names of the tensors of adapters, from those of the model that they belong to."""
    leaves = {}
    for module, name in base.modules.items():
        for ours, theirs in (("a", "lora_A"), ("b", "lora_B")):
            path = f"{module}/adapter/{ours}"
            leaves[path] = Place(f"{PREFIX}{name}.{theirs}.weight", TRANSPOSED)
    return Layout(modules={}, leaves=leaves)


def config(model: nnx.Module, base: Layout, name: str, revision: str | None) -> dict[str, Any]:
    """The content of `weights.ADAPTER_CONFIG`.

    Args:
      model: has adapters, all of the same rank and scale.
      base: the names of the model's tensors.
      name: of the model that the adapters were trained on, a folder or ORG/NAME of the Hub.
      revision: of that repository; None for a folder.
    """
    adapters = {path: m for path, m in nnx.iter_modules(model) if isinstance(m, Adapter)}
    modules = {base.modules[path_name(path[:-1])] for path in adapters}
    adapter = next(iter(adapters.values()))
    rank = adapter.a.shape[-1]
    return dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=name,
        revision=revision,
        r=rank,
        lora_alpha=adapter.scale * rank,
        lora_dropout=0.0,
        use_rslora=False,
        target_modules=sorted(module.rpartition(".")[2] for module in modules),
        bias="none",
        inference_mode=True,
    )


# --- reading --------------------------------------------------------------------------------------------

REMEDY = "merge the adapter with PEFT (merge_and_unload, save_pretrained), and give the merged model"


class Adapters:
    """The adapters in a folder, to be merged into the model that they belong to.

    Args:
      folder: as PEFT's ``save_pretrained`` writes it.

    Attributes:
      base: the weights of that model, a folder or the id of a repository of the Hub.

    Raises:
      ValueError: adapters other than plain LoRA, or a model that does not exist.
    """

    def __init__(self, folder: Path):
        self.folder, file = folder, folder / ADAPTER_CONFIG
        with naming(file):
            c = Section(f"{ADAPTER_CONFIG}: ", read_config(file))
            for key, value in c.values.items():
                if value not in VALUES[key] if key in VALUES else value and key not in KEYS:
                    raise ValueError(
                        f"{c.place}{key}={value!r} is not supported, only plain LoRA; {REMEDY}"
                    )
            self._alpha, self._root = c.read("lora_alpha", Positive), c.read("use_rslora", bool, False)
            name, revision = c.read("base_model_name_or_path", str), c.read("revision", str, None)
            self.base = hub.as_id(name)
            if hub.is_id(self.base):
                self.base += f"@{revision}" if revision else ""
            elif not Path(name).is_dir():
                raise ValueError(
                    f"{c.place}base_model_name_or_path={name!r} is not a folder here; write the folder or "
                    "ORG/NAME of the model that the adapter was trained on"
                )

    def merged(
        self, tensors: Mapping[str, Array], shape_of: Mapping[str, tuple[int, ...]]
    ) -> Mapping[str, Array]:
        """The tensors of the model with the adapters merged into them, see `Merged`."""
        return Merged(tensors, shape_of, self)

    def scale(self, rank: int) -> float:
        """The factor of the product of matrices of this rank."""
        return self._alpha / (rank**0.5 if self._root else rank)


class Merged(Mapping[str, Array]):
    """The tensors of a model, to which the products of adapters are added when they are read, in float32.

    Args:
      tensors: of the model, by name.
      shape_of: their shapes.

    Raises:
      ValueError: a tensor in the folder of the adapters that does not belong to a weight of the model.
    """

    def __init__(
        self, tensors: Mapping[str, Array], shape_of: Mapping[str, tuple[int, ...]], adapters: Adapters
    ):
        self.tensors, self.adapters = tensors, adapters
        self.matrices = Tensors(adapters.folder, WEIGHTS)
        self.merged = set()
        with naming(adapters.folder / WEIGHTS):
            for name in self.matrices:
                match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_[AB]\.weight", name)
                weight = f"{match[1]}.weight" if match else ""
                if weight not in shape_of:
                    raise ValueError(
                        f"tensor {name!r} belongs to no matmul of the model {adapters.base}; name another "
                        f"one in {ADAPTER_CONFIG}, or {REMEDY}"
                    )
                a, b = (self.matrices.shape_of.get(one, ()) for one in _pair(weight))
                if len(a) != 2 or b != (shape_of[weight][0], a[0]) or shape_of[weight][1:] != a[1:]:
                    raise ValueError(
                        f"A and B of shapes {a} and {b} do not fit {weight} of shape {shape_of[weight]} of "
                        f"the model {adapters.base}; name the right one in {ADAPTER_CONFIG}"
                    )
                self.merged.add(weight)

    def __getitem__(self, name: str) -> Array:
        tensor = self.tensors[name]
        if name not in self.merged:
            return tensor
        a, b = (self.matrices[one].astype(np.float32) for one in _pair(name))
        return tensor.astype(np.float32) + np.float32(self.adapters.scale(len(a))) * (b @ a)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def _pair(weight: str) -> tuple[str, str]:
    """The names of A and B beside a weight."""
    stem = PREFIX + weight.removesuffix(".weight")
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"
