"""Adapters in the format of PEFT, which other libraries add to the model that they were trained on.

``adapter_model.safetensors`` holds two matrices for each matmul with an adapter: NAME.lora_A.weight (R, in)
and NAME.lora_B.weight (out, R). ``adapter_config.json`` describes them. The weight NAME.weight (out, in)
becomes ``weight + (lora_alpha / r) x B A``.
"""

from typing import Any

from flax import nnx

from maxlp.families.weights import TRANSPOSED, Layout, Place
from maxlp.nn.lora import Adapter
from maxlp.nn.stack import path_name

WEIGHTS = "adapter_model.safetensors"


def layout(base: Layout) -> Layout:
    """The names of the tensors of adapters, from those of the model that they belong to."""
    leaves = {}
    for module, name in base.modules.items():
        for ours, theirs in (("a", "lora_A"), ("b", "lora_B")):
            path = f"{module}/adapter/{ours}"
            leaves[path] = Place(f"base_model.model.{name}.{theirs}.weight", TRANSPOSED)
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
