"""Random configs of every family: small enough to trace in a second, and not all of them possible."""

import random
from typing import Any

from ml_collections import ConfigDict

from configs.common import choose, llama

Changes = dict[str, Any]  # config key -> value


def base_llama() -> ConfigDict:
    """A Llama that runs on eight devices."""
    c = llama(
        vocab_size=64,
        embed_dim=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=64,
        max_seq_len=128,
    )
    c.data.source, c.data.tokenizer = "unread", "bytes"
    c.data.seq_len, c.data.batch_size, c.loss.num_chunks = 32, 16, 1
    c.precision.first_blocks = c.precision.last_blocks = 0
    c.train.total_steps, c.optimizer.warmup_steps = 10, 2
    return choose("", c)


BASES = {"llama": base_llama}

RECIPES = (
    *("fp8_delayed", "fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_rowwise_with_gw_hp"),
    *("fp8_switchback", "int8_switchback", "int8_switchback_m", "int8_switchback_q", "int8_all"),
    *("mxfp8", "simulate", "fp4"),
)
FP16 = {"model.dtype": "float16", "precision.loss_scale.initial": 256.0}
PURE_BF16 = {"model.param_dtype": "bfloat16"}
RELEASED = {"train.release_gradients": True, "optimizer.clip_norm": 0.0}

# Features of the config that are independent of the family: each draw takes one alternative of some features.
COMMON: dict[str, list[Changes]] = {
    "mesh": [
        *({"mesh.tensor": n} for n in (2, 4, 8, 3)),
        *({"mesh.data": n} for n in (2, 8)),
        {"mesh.data": 2, "mesh.tensor": 2},
        {"mesh.fsdp": 4, "mesh.tensor": 4},
        {"mesh.fsdp": 2, "mesh.data": -1, "mesh.tensor": 2},
        {"mesh.data": -1},
        {"mesh.tensor": 0},
        {"mesh.dcn_data": 2},
    ],
    "batch": [
        *({"data.batch_size": n} for n in (8, 24, 32, 12, 0)),
        *({"train.microbatches": n, "data.batch_size": 32} for n in (2, 4, 3, 0)),
        {"train.microbatches": 4},
    ],
    "dtype": [
        *({"model.dtype": name} for name in ("float32", "float16", "int8")),
        *({"model.param_dtype": name} for name in ("bfloat16", "float16", "float64")),
        FP16,
        FP16 | {"precision.loss_scale.growth_interval": 0},
        FP16 | {"precision.loss_scale.initial": 3.0},
        {"precision.loss_scale.initial": 8.0},
    ],
    "layers": [
        *({"model.remat": name} for name in ("none", "dots", "offload", "all")),
        {"model.scan_layers": False},
        {"model.scan_layers": False, "model.remat": "none"},
    ],
    "attention": [{"model.attention": name} for name in ("ring", "ring", "cudnn", "splash", "flash")],
    "recipe": [{"precision.recipe": name} for name in RECIPES],
    "unquantized": [
        *({"precision.recipe": name, "precision.first_blocks": 1} for name in RECIPES[:3]),
        {"precision.recipe": "int8_all", "precision.first_blocks": 1, "precision.last_blocks": 1},
        {"precision.recipe": "fp8_current", "precision.min_dim": 64},
        {"precision.recipe": "fp8_current", "precision.min_dim": -1},
        {"precision.first_blocks": 2},
    ],
    "options": [
        *({"precision.recipe": "fp8_delayed", "precision.options.history": n} for n in (1, 4, 0)),
        *({"precision.recipe": "fp8_delayed", "precision.options.margin": n} for n in (1.0, -1.0)),
        *({"precision.recipe": "simulate", "precision.options.format": f} for f in ("e3m4", "e4m3fn", "x")),
        *({"precision.recipe": "int8_all", "precision.options.format": f} for f in ("int4", "e4m3")),
        *(
            {"precision.recipe": "fp8_current", "precision.options.granularity": g}
            for g in ("row", "block", "tensor", "column")
        ),
        {"precision.recipe": "fp8_delayed", "precision.options.granularity": "row"},
        {"precision.recipe": "fp8_delayed", "precision.options.cold_start": False},
        {"precision.recipe": "fp8_delayed", "precision.options.residuals": "full"},
        {"precision.recipe": "int8_switchback", "precision.options.residuals": "quantized"},
        {"precision.recipe": "fp8_current", "precision.options.grad_format": "float8_e4m3fn"},
        {"precision.recipe": "fp8_rowwise", "precision.options.power_of_two": True},
        {"precision.recipe": "fp8_current", "precision.options.rounding": "truncate"},
        {"precision.recipe": "bf16", "precision.options.residuals": "quantized"},
    ],
    "optimizer": [
        *({"optimizer.name": n} for n in ("stable_adamw", "adafactor", "lion", "muon", "adamp", "adam")),
        {"optimizer.name": "schedule_free_adamw", "optimizer.schedule": "constant"},
        {"optimizer.name": "schedule_free_adamw"},
        {"optimizer.name": "stable_adamw", "optimizer.decay_with_clip": False},
        {"optimizer.name": "stable_adamw", "optimizer.options": {"clip_threshold": 2.0}},
        {"optimizer.name": "stable_adamw", "optimizer.options": {"clip_threshold": 0.0}},
        {"optimizer.name": "adamw", "optimizer.options": {"clip_threshold": 1.0}},
        {"optimizer.mu_dtype": "bfloat16"},
        {"optimizer.mu_dtype": "int8"},
    ],
    "schedule": [
        *({"optimizer.schedule": name} for name in ("linear", "constant", "wsd", "rsqrt", "step")),
        {"optimizer.warmup_steps": 10},
        {"optimizer.warmup_steps": 0, "optimizer.clip_norm": 0.0},
        {"optimizer.schedule": "wsd", "optimizer.decay_fraction": 0.9},
        {"optimizer.decay_embeddings": True, "optimizer.weight_decay": 0.0},
    ],
    "galore": [
        *({"optimizer.galore.rank": n} for n in (4, 100, 0, -1)),
        *(
            {"optimizer.galore.rank": 8, f"optimizer.galore.{key}": value}
            for key, value in (
                ("side", "long"),
                ("basis", "randomized"),
                ("moments", "reset"),
                ("moments", "reproject"),
                ("projector", "int8"),
                ("projector", "int4"),
                ("targets", ("mlp",)),
                ("targets", ("norm",)),
                ("targets", ("nothing",)),
                ("update_proj_gap", 0),
                ("lazy_threshold", 0.4),
            )
        ),
        {"optimizer.galore.rank": 7, "optimizer.galore.projector": "int4"},
        *(
            {"optimizer.galore.rank": 8, "optimizer.name": name}
            for name in ("stable_adamw", "adafactor", "lion", "muon", "adamp")
        ),
    ],
    "low_bit": [
        *(
            {"optimizer.low_bit.mu": mu, "optimizer.low_bit.nu": nu, "optimizer.low_bit.min_size": 64}
            for mu, nu in (
                ("float8_e4m3fn", "float8_e5m2"),
                ("bfloat16", "float32"),
                ("int8", "dynamic8"),
                ("int4", "int8"),
            )
        ),
        *(
            {
                "optimizer.low_bit.mu": "dynamic8",
                "optimizer.low_bit.nu": "dynamic8",
                "optimizer.low_bit.min_size": 64,
                "optimizer.low_bit.block_size": size,
            }
            for size in (0, 16, 7, -1)
        ),
        *(
            {
                "optimizer.low_bit.mu": "dynamic8",
                "optimizer.low_bit.nu": "dynamic8",
                "optimizer.name": name,
            }
            for name in ("lion", "muon", "adafactor", "stable_adamw")
        ),
        {"optimizer.low_bit.mu": "int8"},
    ],
    "rounding": [
        *(PURE_BF16 | {"optimizer.param_rounding": name} for name in ("stochastic", "kahan", "nearest")),
        {"optimizer.param_rounding": "kahan"},
        PURE_BF16
        | {
            "optimizer.param_rounding": "stochastic",
            "optimizer.name": "schedule_free_adamw",
            "optimizer.schedule": "constant",
        },
    ],
    "released": [
        *[RELEASED] * 4,
        RELEASED | {"spikes.guard": "rollback"},
        RELEASED | {"spikes.guard": "skip"},
        RELEASED | {"train.microbatches": 2},
        RELEASED | FP16,
        RELEASED | {"optimizer.clip_norm": 1.0},
        RELEASED | {"spikes.statistics": False},
    ],
    "guards": [
        *({"spikes.guard": name} for name in ("skip", "rollback", "stop")),
        {"spikes.guard": "skip", "spikes.window": 4, "spikes.min_history": 2},
        {"spikes.guard": "skip", "spikes.window": 1},
        {"spikes.statistics": False},
        {"precision.health_every": 2},
    ],
}

# The features of a Llama alone.
RING = {"model.attention": "ring"}
LLAMA: dict[str, list[Changes]] = {
    "context": [
        *(RING | {"mesh.context": n} for n in (2, 4, 8)),
        RING | {"mesh.context": 2, "mesh.tensor": 2},
        RING | {"mesh.context": 2, "mesh.stage": 2},
        RING | {"mesh.context": 2, "data.seq_len": 36},
        RING | {"mesh.context": 4, "data.seq_len": 120},
        {"mesh.context": 2},
    ],
    "stage": [
        *({"mesh.stage": n} for n in (2, 2, 4)),
        {"mesh.stage": 2, "model.num_layers": 4, "model.pipeline.rounds": 2},
        {"mesh.stage": 2, "model.num_layers": 4, "model.pipeline.rounds": 2, "model.remat": "none"},
        {"mesh.stage": 2, "data.batch_size": 32, "model.pipeline.microbatches": 4},
        {"mesh.stage": 2, "data.batch_size": 32, "model.pipeline.microbatches": 3},
        {"mesh.stage": 2, "mesh.tensor": 2},
        {"mesh.stage": 2, "model.scan_layers": False},
        {"mesh.stage": 4, "model.num_layers": 4, "data.batch_size": 32},
    ],
    "sequence": [
        *({"data.seq_len": n} for n in (16, 33, 40, 128, 129, 1)),
        *({"loss.num_chunks": n} for n in (2, 4, 8, 3, 0)),
        {"loss.num_chunks": 4, "data.seq_len": 36},
        {"loss.z_loss": 1e-4, "loss.num_chunks": 2},
        {"loss.z_loss": -1.0},
    ],
    "sizes": [
        *({"model.num_heads": n, "model.num_kv_heads": k} for n, k in ((4, 4), (4, 1), (3, 3), (8, 8), (4, 3))),
        *({"model.embed_dim": n} for n in (64, 36, 44, 0)),
        *({"model.mlp_dim": n} for n in (96, 60, 50)),
        *({"model.vocab_size": n} for n in (100, 63, 256)),
        *({"model.num_layers": n} for n in (1, 3, 4)),
        *({"model.head_dim": n} for n in (4, 16, 7)),
        {"model.tie_embeddings": True},
        {"model.init_std": None},
        {
            "model.rope_scaling.factor": 8.0,
            "model.rope_scaling.low_freq_factor": 1.0,
            "model.rope_scaling.high_freq_factor": 4.0,
            "model.rope_scaling.original_max_seq_len": 64,
        },
        {"model.rope_scaling.factor": 8.0},
    ],
    "rules": [
        *(
            {"precision.rules": ((pattern, name),)}
            for pattern, name in (
                ("lm_head", "fp8_delayed"),
                ("lm_head", "fp8_current"),
                ("lm_head", "mxfp8"),
                ("lm_head", "fp8_rowwise"),
                ("*/down_proj", "int8_switchback"),
                ("layers/attn/*", "simulate"),
                ("layers/attn/*", "fp8_delayed"),
                ("nothing", "fp8_current"),
                ("*", "fp8_delayed"),
                ("*", "fp3"),
            )
        ),
        {"precision.rules": (("lm_head", "fp8_delayed"),), "loss.num_chunks": 4},
        {"precision.rules": (("lm_head", "mxfp8"),), "loss.num_chunks": 4},
    ],
    "smooth": [
        {"precision.recipe": recipe, "precision.smooth_swiglu": form}
        for recipe in ("fp8_delayed", "fp8_current", "fp8_rowwise", "int8_switchback", "mxfp8", "bf16")
        for form in ("channel", "balanced", "token", "row")
    ],
}

FEATURES = {"llama": COMMON | LLAMA}


def draw(family: str, seed: int) -> Changes:
    """The changes of the family's base config for this seed: alternatives of one to four features."""
    rng = random.Random(f"{family} {seed}")
    features = FEATURES[family]
    changes: Changes = {}
    for name in rng.sample(sorted(features), rng.choice((1, 2, 2, 3, 3, 4))):
        changes |= rng.choice(features[name])
    return changes


def config(family: str, changes: Changes) -> ConfigDict:
    """The family's base config with these changes."""
    c = BASES[family]()
    with c.unlocked():
        c.update_from_flattened_dict(changes)
    return c
