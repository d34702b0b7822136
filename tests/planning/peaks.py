"""Small runs whose peak memory, as the compilers report it, `tools/record_peaks.py` has recorded."""

import importlib
import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from maxlp.families.clip.presets import CLIP_SIZES, clip
from maxlp.families.llama.presets import llama
from maxlp.planning.cost_model import cost_of, state_shapes
from maxlp.planning.topologies import Topology
from maxlp.run import constraints
from maxlp.run.settings import Settings, read

FILE = Path(__file__).parent / "peaks.json"  # topology -> name of a run -> bytes
KERNELS = {"cuda": "flash", "tpu": "splash"}

LLAMA_SIZES = dict(
    embed_dim=1024,
    num_layers=8,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    mlp_dim=4096,
    vocab_size=32000,
)
SAMPLED = {  # gradients of kernels from a tenth of the tokens
    "precision.recipe": "wta_crs",
    "precision.options.keep": 0.1,
    "precision.first_blocks": 0,
    "precision.last_blocks": 0,
}
LLAMA_RUN = {"data.seq_len": 2048, "data.batch_size": 32}
# The names of these runs are keys of the file.
LLAMA: dict[str, dict[str, Any]] = {
    "as it is": {},
    "tensor 2": {"mesh.tensor": 2},
    "remat none": {"model.remat": "none"},
    "remat none, sampled": {"model.remat": "none"} | SAMPLED,
    "remat dots": {"model.remat": "dots"},
    "2 microbatches": {"train.microbatches": 2},
    "tensor 2, remat none": {"mesh.tensor": 2, "model.remat": "none"},
    "logits at once": {"loss.num_chunks": 1},
    "plain attention": {"model.attention": "xla"},
    "twice as wide": {"model.embed_dim": 2048, "model.mlp_dim": 8192, "data.batch_size": 16},
    "twice the batch": {"data.batch_size": 64},
    "twice as deep": {"model.num_layers": 16},
    "tensor 2, remat none, sampled": {"mesh.tensor": 2, "model.remat": "none"} | SAMPLED,
    "tensor 4, remat dots": {"mesh.tensor": 4, "model.remat": "dots"},
    "context 2": {"mesh.context": 2, "model.attention": "ring"},
    "context 4": {"mesh.context": 4, "model.attention": "ring"},
    "stage 2": {"mesh.stage": 2, "model.pipeline.microbatches": 4},
    "stage 4, 2 rounds": {"mesh.stage": 4, "model.pipeline.rounds": 2},
    "remat offload": {"model.remat": "offload"},
    "qk_norm": {"model.qk_norm": True},
    "qk_norm, remat none": {"model.qk_norm": True, "model.remat": "none"},
    "qk_norm, remat dots": {"model.qk_norm": True, "model.remat": "dots"},
    "qk_norm, wide heads": {"model.qk_norm": True, "model.head_dim": 128, "model.mlp_dim": 3072},
}
RELEASED = {"train.release_gradients": True, "optimizer.clip_norm": 0.0}
SOAP = {"optimizer.name": "soap"}
PURE = {"model.param_dtype": "bfloat16", "optimizer.param_rounding": "stochastic"}
BITS_8 = {
    "optimizer.low_bit.mu": "dynamic8",
    "optimizer.low_bit.nu": "dynamic8",
    "optimizer.low_bit.block_size": 256,
}
FLASHOPTIM = {
    "model.param_dtype": "bfloat16",
    "optimizer.param_rounding": "residual",
    "optimizer.low_bit.mu": "companded8",
    "optimizer.low_bit.nu": "companded8",
    "optimizer.low_bit.block_size": 32,
}
GALORE = {"optimizer.galore.rank": 256}
LORA = {"train.lora.rank": 16, "train.init_from": "unread"}
OFFLOAD = {"optimizer.offload": True} | RELEASED
for _name, _changes in {
    "as it is": {},
    "bf16": {"model.param_dtype": "bfloat16"},
    "remat none": {"model.remat": "none"},
    "remat dots": {"model.remat": "dots"},
    "2 microbatches": {"train.microbatches": 2},
    "logits at once": {"loss.num_chunks": 1},
    "stage 2": {"mesh.stage": 2, "model.pipeline.microbatches": 4},
}.items():
    LLAMA[f"LoRA, {_name}"] = LORA | _changes
# Further settings that the search offers; on one device the state and its update take the most memory.
for _name, _changes in {
    "as it is": {},
    "remat offload": {"model.remat": "offload"},
    "released": RELEASED,
    "released, remat none": RELEASED | {"model.remat": "none"},
    "pure bf16": PURE,
    "bfloat16 first moments": {"optimizer.mu_dtype": "bfloat16"},
    "8 bits": BITS_8,
    "GaLore": GALORE,
    "pure bf16, 8 bits": PURE | BITS_8,
    "pure bf16, 8 bits, 4 microbatches": PURE | BITS_8 | {"train.microbatches": 4},
    "pure bf16, GaLore": PURE | GALORE,
    "pure bf16, GaLore, 8 bits": PURE | GALORE | BITS_8,
    "pure bf16, released": PURE | RELEASED,
    "8 bits, released": BITS_8 | RELEASED,
    "pure bf16, 8 bits, released": PURE | BITS_8 | RELEASED,
    "GaLore, 8 bits, released": GALORE | BITS_8 | RELEASED,
    "offloaded": OFFLOAD,
    "pure bf16, offloaded": PURE | OFFLOAD,
    "8 bits, offloaded": BITS_8 | OFFLOAD,
    "LoRA": LORA,
    "LoRA, bf16": LORA | {"model.param_dtype": "bfloat16"},
    "pure bf16, GaLore, 8 bits, released": PURE | GALORE | BITS_8 | RELEASED,
}.items():
    LLAMA[f"one device, {_name}"] = {"data.batch_size": 4, **_changes}
# What determines the peak of larger models: one row leaves it to the update, sixteen to a block.
for _name, _changes in {
    "FlashOptim": FLASHOPTIM,
    "FlashOptim, released": FLASHOPTIM | RELEASED,
    "FlashOptim, offloaded": FLASHOPTIM | OFFLOAD,
    "tied, offloaded": {"model.tie_embeddings": True} | OFFLOAD,
    "tied, FlashOptim, offloaded": {"model.tie_embeddings": True} | FLASHOPTIM | OFFLOAD,
    "pure bf16, 8 bits": PURE | BITS_8,
    "pure bf16, companded moments": FLASHOPTIM | PURE,
    "pure bf16, 8 bits, remat none": {"model.remat": "none"} | PURE | BITS_8,
    "Muon": {"optimizer.name": "muon"},
    "APOLLO": {"optimizer.name": "apollo", "optimizer.options.rank": 64},
    "Muon, 8 bits": {"optimizer.name": "muon"} | BITS_8,
    "Stable-SPAM": {"optimizer.name": "stable_spam"},
    "float8 moments": {"optimizer.low_bit.mu": "float8_e4m3fn", "optimizer.low_bit.nu": "float8_e5m2"},
    "companded moments": {key: value for key, value in FLASHOPTIM.items() if "low_bit" in key},
    "skipped tensors": {"model.dtype": "float16", "precision.loss_scale.per_tensor": True},
    "Kahan": {"model.param_dtype": "bfloat16", "optimizer.param_rounding": "kahan"},
}.items():
    LLAMA[f"one row, {_name}"] = {"data.batch_size": 1, **_changes}
for _name, _changes in {
    "SOAP": {},
    "SOAP, one-sided": {"optimizer.options.one_sided": True},
    "SOAP, stage 2": {"mesh.stage": 2, "model.pipeline.microbatches": 2},
    "SOAP, released": RELEASED,
}.items():
    LLAMA[_name] = {"data.batch_size": 8} | SOAP | _changes
for _name, _changes in {
    "SOAP": {},
    "SOAP, pure bf16": PURE,
    "SOAP, 8 bits": BITS_8,
    "SOAP, offloaded": OFFLOAD,
}.items():
    LLAMA[f"one row, {_name}"] = {"data.batch_size": 1} | SOAP | _changes
LLAMA["sixteen rows, pure bf16, 8 bits"] = {"data.batch_size": 16} | PURE | BITS_8
# Presets on one device, named by what they change: the update of 8 billion parameters can be the peak.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {}
for _name, _changes in {
    "as it is": {},
    "8 bits": BITS_8,
    "pure bf16": PURE,
    "pure bf16, 8 bits": PURE | BITS_8,
    "GaLore, 8 bits": {"galore": True} | BITS_8,
    "pure bf16, GaLore, 8 bits": {"galore": True} | PURE | BITS_8,
}.items():
    _galore = _changes.pop("galore", False)
    for _preset, _kernel, _batch, _rank, _released in (
        ("llama.8b", "flash", 4, 1024, {"data.batch_size": 1}),
        ("clip.l14", "xla", 256, 192, {}),
    ):
        _all = (
            {"data.batch_size": _batch, "model.attention": _kernel}
            | _changes
            | ({"optimizer.galore.rank": _rank} if _galore else {})
        )
        PRESETS[f"{_preset}, {_name}"] = _preset, _all
        PRESETS[f"{_preset}, {_name}, 4 microbatches"] = _preset, _all | {"train.microbatches": 4}
        PRESETS[f"{_preset}, {_name}, released"] = _preset, _all | RELEASED | _released
PRESETS["llama.8b, LoRA, bf16"] = (
    "llama.8b",
    LORA | {"data.batch_size": 1, "model.attention": "flash", "model.param_dtype": "bfloat16"},
)
# Steps of the campaign (benchmarks/accelerator) in bfloat16, as the planner chooses them for an H200.
CAMPAIGN_CLIP: dict[str, tuple[str, dict[str, Any]]] = {
    "clip.b16, remat dots": ("clip.b16", {"data.batch_size": 1024, "model.remat": "dots"}),
    "clip.h14, remat dots": ("clip.h14", {"data.batch_size": 256, "model.remat": "dots"}),
    "clip.b16, remat dots, 64 microbatches": (
        "clip.b16",
        {"data.batch_size": 131072, "model.remat": "dots", "train.microbatches": 64},
    ),
}
PRESETS |= CAMPAIGN_CLIP
# One row of 2,048 tokens leaves the peak to the update; FP8 inside puts the blocks in three parts.
UPDATED = {
    "llama.8b, 8 bits, short row": {},
    "llama.8b, 8 bits, short row, FP8 inside": {"precision.recipe": "fp8_delayed"},
}
for _name, _changes in UPDATED.items():
    _short = {"data.batch_size": 1, "data.seq_len": 2048, "model.attention": "flash"}
    PRESETS[_name] = "llama.8b", _short | BITS_8 | _changes
# On several GPUs, short rows leave it to the end of the loss, when the head's gradient is scattered.
SCATTERED: dict[str, dict[str, Any]] = {
    "llama.8b, short rows": {},
    "llama.8b, 8 bits, short rows": BITS_8,
}
for _name, _changes in SCATTERED.items():
    _short = {"data.batch_size": 8, "data.seq_len": 2048, "model.attention": "flash"}
    PRESETS[_name] = "llama.8b", _short | _changes
PRESETS["clip.l14, offloaded"] = "clip.l14", {"data.batch_size": 256, "model.attention": "xla"} | OFFLOAD
PRESETS["llama.8b, offloaded"] = "llama.8b", {"data.batch_size": 1, "model.attention": "flash"} | OFFLOAD
_P8 = {"model.attention": "flash"} | PURE | BITS_8
PRESETS["llama.8b, pure bf16, 8 bits, 16 rows"] = "llama.8b", {"data.batch_size": 16} | _P8
PRESETS["llama.8b, pure bf16, 8 bits, 24 rows, remat offload"] = (
    "llama.8b",
    {"data.batch_size": 24, "model.remat": "offload"} | _P8,
)
PRESETS["llama.8b, pure bf16, 8 bits, remat none"] = (
    "llama.8b",
    {"data.batch_size": 4, "model.remat": "none"} | _P8,
)
# On several devices: weights are rounded before they are gathered.
PRESETS["llama.8b, batch 8, released"] = "llama.8b", {"data.batch_size": 8} | RELEASED
PRESETS["llama.70b, 8 bits, released"] = (
    "llama.70b",
    {"data.batch_size": 4, "mesh.tensor": 1} | BITS_8 | RELEASED,
)
CLIP: dict[str, tuple[str, dict[str, Any]]] = {
    "CLIP b32": ("b32", {"data.batch_size": 8192}),
    "CLIP b32, remat none": ("b32", {"data.batch_size": 4096, "model.remat": "none"}),
    "CLIP b32, remat none, sampled": (
        "b32",
        {"data.batch_size": 4096, "model.remat": "none"} | SAMPLED,
    ),
    "CLIP b32, remat dots": ("b32", {"data.batch_size": 8192, "model.remat": "dots"}),
    "CLIP b32, 32k sharded": ("b32", {"data.batch_size": 32768, "loss.method": "sharded"}),
    "CLIP b32, 32k plain": ("b32", {"data.batch_size": 32768, "loss.method": "plain"}),
    "CLIP b32, 32k": ("b32", {"data.batch_size": 32768}),
    "CLIP b32, half the batch": ("b32", {"data.batch_size": 4096}),
    "CLIP b32, twice the batch": ("b32", {"data.batch_size": 16384}),
    "CLIP b32, tensor 2": ("b32", {"data.batch_size": 4096, "mesh.tensor": 2}),
    "CLIP b32, LoRA": ("b32", {"data.batch_size": 8192} | LORA),
    "CLIP b32, LoRA, remat none": ("b32", {"data.batch_size": 4096, "model.remat": "none"} | LORA),
    "CLIP b32, LoRA, 2 microbatches": ("b32", {"data.batch_size": 8192, "train.microbatches": 2} | LORA),
    "CLIP l14": ("l14", {"data.batch_size": 2048}),
    "CLIP l14, half the patches": (
        "l14",
        {"data.batch_size": 2048, "model.visual.patch_dropout": 0.5},
    ),
    "CLIP h14": ("h14", {"data.batch_size": 1024}),
    "CLIP h14, flash": ("h14", {"data.batch_size": 1024, "model.attention": "flash"}),
    "CLIP b32, flash, remat dots": (
        "b32",
        {"data.batch_size": 8192, "model.remat": "dots", "model.attention": "flash"},
    ),
    "CLIP h14, 4 microbatches": ("h14", {"data.batch_size": 4096, "train.microbatches": 4}),
}


def settings_of(c: ConfigDict, changes: dict[str, Any]) -> Settings:
    """The settings of a config with these changes by key, without data to read."""
    with c.unlocked():
        c.update_from_flattened_dict({"data.source": "unread", "data.tokenizer": "bytes"} | changes)
    return read(c)


def recorded(name: str, platform: str) -> Settings:
    """The settings of a recorded run."""
    if name in CLIP:
        size, changes = CLIP[name]
        return settings_of(clip(**CLIP_SIZES[size]), {"model.attention": "xla"} | changes)
    if name in PRESETS:
        preset, changes = PRESETS[name]
        return settings_of(importlib.import_module(f"configs.{preset}").get_config(), changes)
    return settings_of(
        llama(**LLAMA_SIZES), LLAMA_RUN | {"model.attention": KERNELS[platform]} | LLAMA[name]
    )


def peaks() -> dict[str, dict[str, float]]:
    """Topology -> name of a run -> bytes; under "compilers", the compiler's version of each topology."""
    return json.loads(FILE.read_text()) if FILE.exists() else {"compilers": {}}


def estimated_peak(s: Settings, topology: Topology) -> float:
    """The peak memory of a device by the closed form, in bytes.

    Raises:
      ConfigError: settings that violate a constraint.
    """
    machine = topology.machine(s)
    constraints.check(s, machine)
    return sum(cost_of(s).memory(s, machine, state_shapes(s, machine)).values())
