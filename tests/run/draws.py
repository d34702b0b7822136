"""Random configs of every family: small enough to trace in a second, and not all of them possible."""

import random
from collections.abc import Callable, Iterable
from typing import Any

from ml_collections import ConfigDict

from maxlp.families.clip.presets import clip
from maxlp.families.llama.presets import llama
from maxlp.optim import OPTIMIZERS
from maxlp.precision import RECIPES

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
    return common(c)


def base_clip() -> ConfigDict:
    """A CLIP that runs on eight devices."""
    tower = dict(width=32, num_layers=2, num_heads=4, mlp_dim=64)
    c = clip(
        embed_dim=32,
        visual=dict(tower, image_size=16, patch_size=4),
        text=dict(tower, vocab_size=64, max_len=16),
    )
    c.data.source, c.data.tokenizer = "unread", "bytes"
    c.data.image_size, c.data.text_len, c.data.batch_size = 16, 16, 16
    return common(c)


def common(c: ConfigDict) -> ConfigDict:
    """The settings that the bases of all families share."""
    c.precision.first_blocks = c.precision.last_blocks = 0
    c.train.total_steps, c.optimizer.warmup_steps, c.optimizer.clip_norm = 10, 2, 1.0
    return c


def each(key: str, *values: Any, **others: Any) -> list[Changes]:
    """One alternative for each value of a key. In the names of ``others`` two underscores are a dot."""
    more = {name.replace("__", "."): value for name, value in others.items()}
    return [more | {key: value} for value in values]


def product(changes: Changes, alternatives: Iterable[Changes]) -> list[Changes]:
    """The alternatives, each with the same further changes."""
    return [changes | one for one in alternatives]


QUANTIZED = tuple(name for name in RECIPES if name != "bf16")
FP16 = {"model.dtype": "float16", "precision.loss_scale.initial": 256.0}
PURE_BF16 = {"model.param_dtype": "bfloat16", "optimizer.param_rounding": "stochastic"}
RELEASED = {"train.release_gradients": True, "optimizer.clip_norm": 0.0}
AVERAGED = {"optimizer.name": "schedule_free_adamw", "optimizer.schedule": "constant"}
GALORE = {"optimizer.galore.rank": 8}
DYNAMIC8 = {
    "optimizer.low_bit.mu": "dynamic8",
    "optimizer.low_bit.nu": "dynamic8",
    "optimizer.low_bit.min_size": 64,
}
OTHER_OPTIMIZERS = tuple(name for name in OPTIMIZERS if name not in ("adamw", AVERAGED["optimizer.name"]))

# Alternatives of the features that all families share. A draw takes one alternative of some features.
COMMON: dict[str, list[Changes]] = {
    "mesh": [
        *each("mesh.tensor", 2, 2, 4, 8, 3),
        *each("mesh.data", 2, 8, -1, mesh__fsdp=1),
        *each("mesh.tensor", 1, 2, 4, mesh__data=2),
        *each("mesh.fsdp", 1, 2, mesh__data=-1, mesh__tensor=2),
        *each("mesh.dcn_data", 2, 0),
        {"mesh.fsdp": 4, "mesh.tensor": 4},
    ],
    "batch": [
        *each("data.batch_size", 8, 24, 32, 12),
        *each("train.microbatches", 2, 4, 3, data__batch_size=32),
        {"train.microbatches": 4},
    ],
    "dtype": [
        *each("model.dtype", "float32", "float32", "float16"),
        *each("model.param_dtype", "bfloat16", "float16"),
        FP16,
        FP16 | {"precision.loss_scale.growth_interval": 2, "spikes.guard": "skip"},
        FP16 | {"model.param_dtype": "float16"},
        {"precision.loss_scale.initial": 8.0},
        FP16 | {"precision.loss_scale.per_tensor": True},
    ],
    "layers": [
        *each("model.remat", "none", "dots", "dots", "offload"),
        *each("model.remat", "none", "block", "dots", model__scan_layers=False),
    ],
    "attention": each("model.attention", "ring", "ring", "ring", "flash", "cudnn", "splash"),
    "recipe": [*each("precision.recipe", *QUANTIZED), *each("precision.recipe", *QUANTIZED)],
    "unquantized": [
        *each("precision.first_blocks", 1, 2, precision__recipe="fp8_delayed"),
        *each("precision.last_blocks", 1, precision__recipe="fp8_current", precision__first_blocks=0),
        *each("precision.last_blocks", 1, precision__recipe="int8_all", precision__first_blocks=1),
        *each("precision.min_dim", 33, 64, 65, precision__recipe="fp8_current"),
        {"precision.first_blocks": 2},
    ],
    "options": [
        *each("precision.options.history", 1, 4, precision__recipe="fp8_delayed"),
        *each("precision.options.margin", 1.0, -1.0, precision__recipe="fp8_delayed"),
        *each("precision.options.cold_start", True, False, precision__recipe="fp8_delayed"),
        *each("precision.options.residuals", "full", "quantized", precision__recipe="fp8_delayed"),
        *each("precision.options.residuals", "full", "quantized", precision__recipe="int8_switchback"),
        *each("precision.options.residuals", "quantized", precision__recipe="bf16"),
        *each("precision.options.format", "e3m4", "e4m3fn", "int8", precision__recipe="simulate"),
        *each("precision.options.format", "int4", "e4m3", precision__recipe="int8_all"),
        *each("precision.options.granularity", "row", "block", precision__recipe="fp8_current"),
        *each("precision.options.granularity", "tensor", "row", precision__recipe="fp8_delayed"),
        *each("precision.options.grad_format", "float8_e4m3fn", "int8", precision__recipe="fp8_current"),
        *each("precision.options.power_of_two", True, False, precision__recipe="fp8_rowwise"),
        *each("precision.options.rounding", "truncate", "stochastic", precision__recipe="fp8_current"),
        *each("precision.options.block_size", 16, 64, precision__recipe="mxfp8"),
        *each("precision.options.block_scales", "floor", "float32", precision__recipe="mxfp8"),
        *each("precision.options.kernel_granularity", "tile", "tensor", precision__recipe="mxfp8"),
        *each("precision.options.grad_rounding", "nearest", precision__recipe="nvfp4"),
        *each("precision.options.hadamard", False, precision__recipe="nvfp4"),
        *each("precision.options.clipping", "max", "gaussian", precision__recipe="quest"),
        *each("precision.options.clipping", "gaussian", precision__recipe="int8_all"),
        *each("precision.options.fwd_hadamard", True, False, precision__recipe="quest"),
        *each("precision.options.fwd_hadamard", True, precision__recipe="fp8_delayed"),
        *each("precision.options.trust_mask", True, precision__recipe="int8_all"),
        *each("precision.options.trust_mask", True, precision__recipe="fp8_current"),
        *each("precision.options.keep", 0.5, 1.0, precision__recipe="wta_crs"),
        *each("precision.options.keep", 0.5, precision__recipe="int8_switchback"),
        *each("precision.options.keep", 0.5, precision__recipe="mxfp8"),
    ],
    "optimizer": [
        *each("optimizer.name", *OTHER_OPTIMIZERS),
        AVERAGED,
        *each("optimizer.decay_with_clip", False, optimizer__name="stable_adamw"),
        *each(
            "optimizer.options",
            {"clip_threshold": 2.0},
            {"clip_threshold": 0.0},
            optimizer__name="stable_adamw",
        ),
        *each("optimizer.options", {"clip_threshold": 1.0}, optimizer__name="adamw"),
        *each("optimizer.mu_dtype", "bfloat16", "float32"),
        *each("optimizer.mu_dtype", "bfloat16", optimizer__name="lion"),
    ],
    "adascale": [
        *each("optimizer.adascale", 4.0, 0.5, 100.0, optimizer__name="sgd", train__microbatches=2),
        {"optimizer.adascale": 4.0, "optimizer.name": "sgd"},
        {"optimizer.adascale": 4.0},
    ],
    "schedule": [
        *each("optimizer.schedule", "linear", "constant", "wsd", "rsqrt"),
        *each("optimizer.warmup_steps", 0, 9, 10),
        *each("optimizer.decay_fraction", 0.8, 0.9, 0.0, optimizer__schedule="wsd"),
        *each("optimizer.decay_embeddings", True, optimizer__weight_decay=0.0),
        {"optimizer.clip_norm": 0.0},
    ],
    "galore": [
        *each("optimizer.galore.rank", 4, 100),
        *each("optimizer.name", *OTHER_OPTIMIZERS, optimizer__galore__rank=8),
        GALORE | AVERAGED,
        GALORE | DYNAMIC8,
        GALORE | PURE_BF16,
        *product(
            GALORE,
            [
                *each("optimizer.galore.side", "long", "short"),
                *each("optimizer.galore.basis", "randomized"),
                *each("optimizer.galore.moments", "reset", "reproject"),
                *each("optimizer.galore.moments", "reset", "keep", optimizer__name="adafactor"),
                *each("optimizer.galore.moments", "reproject", optimizer__name="lion"),
                *each("optimizer.galore.projector", "int8", "int4"),
                *each("optimizer.galore.targets", ("mlp/",), ("norm",), ("nothing",), ("kernel",)),
                *each("optimizer.galore.lazy_threshold", 0.4),
                *each("optimizer.galore.update_proj_gap", 1),
            ],
        ),
        *each("optimizer.galore.projector", "int4", optimizer__galore__rank=7),
        *each("optimizer.galore.projector", "int4", "int8", optimizer__galore__rank=100),
    ],
    "low_bit": [
        *(
            {"optimizer.low_bit.mu": mu, "optimizer.low_bit.nu": nu, "optimizer.low_bit.min_size": 64}
            for mu, nu in (
                ("float8_e4m3fn", "float8_e5m2"),
                ("bfloat16", "float32"),
                ("int8", "dynamic8"),
                ("companded8", "companded8"),
                ("float8_e5m2", "bfloat16"),
            )
        ),
        *product(DYNAMIC8, each("optimizer.low_bit.block_size", 0, 16, 256, 7)),
        *product(DYNAMIC8, each("optimizer.name", *OTHER_OPTIMIZERS)),
        DYNAMIC8 | AVERAGED,
        {"optimizer.low_bit.mu": "int8"},
    ],
    "rounding": [
        *[PURE_BF16] * 2,
        *product(PURE_BF16, each("optimizer.param_rounding", "kahan", "residual", "float16_master")),
        *product(PURE_BF16, each("optimizer.name", *OTHER_OPTIMIZERS)),
        PURE_BF16 | AVERAGED,
        {"optimizer.param_rounding": "kahan"},
    ],
    "released": [
        *[RELEASED] * 4,
        *product(RELEASED, each("spikes.guard", "rollback", "skip")),
        *product(RELEASED, each("optimizer.name", *OTHER_OPTIMIZERS)),
        *product(
            RELEASED | {"precision.first_blocks": 1},
            each("precision.recipe", "fp8_delayed", "fp8_current", "fp8_rowwise"),
        ),
        RELEASED | AVERAGED,
        RELEASED | DYNAMIC8,
        RELEASED | GALORE,
        RELEASED | PURE_BF16,
        RELEASED | FP16,
        RELEASED | {"train.microbatches": 2},
        RELEASED | {"optimizer.clip_norm": 1.0},
        RELEASED | {"model.scan_layers": False},
    ],
    "monitoring": [
        *each("spikes.guard", "skip", "rollback"),
        *each("spikes.window", 4, spikes__guard="skip", spikes__min_history=2),
        *each("spikes.statistics", False),
        *each("spikes.update_ratios", True),
        *each("precision.health_every", 2, precision__recipe="fp8_delayed"),
        *each("precision.sharpness_every", 2),
        *each("precision.magnitudes_every", 2),
        *each("profile.start", 10, 11),
    ],
}

# Values that no config can have, whatever else it has; one draw in eight has one.
INVALID: list[Changes] = [
    *each("mesh.tensor", 0, -2),
    *each("data.batch_size", 0),
    *each("train.microbatches", 0),
    *each("model.dtype", "int8"),
    *each("model.param_dtype", "float64"),
    *each("model.remat", "all"),
    *each("model.attention", "flsh"),
    *each("precision.recipe", "fp4"),
    *each("precision.min_dim", -1),
    *each("precision.loss_scale.initial", 3.0),
    *each("precision.options.format", "x"),
    *each("precision.options.history", 0, precision__recipe="fp8_delayed"),
    *each("precision.options.granularity", "column", precision__recipe="fp8_current"),
    *each("optimizer.name", "adam"),
    *each("optimizer.mu_dtype", "int8"),
    *each("optimizer.schedule", "step", "sqrt"),
    *each("optimizer.galore.rank", -1),
    *each("optimizer.galore.update_proj_gap", 0),
    *each("optimizer.low_bit.block_size", -1),
    *each("optimizer.low_bit.mu", "int4", optimizer__low_bit__nu="int8"),
    *each("optimizer.param_rounding", "up", model__param_dtype="bfloat16"),
    *each("spikes.guard", "stop"),
    *each("spikes.window", 1),
]

RING = {"model.attention": "ring"}
LLAMA: dict[str, list[Changes]] = {
    "context": [
        *product(RING, each("mesh.context", 2, 2, 4, 8)),
        *product(RING | {"mesh.context": 2}, each("mesh.tensor", 2, 4)),
        *product(RING | {"mesh.context": 2}, each("mesh.stage", 2, model__pipeline__microbatches=2)),
        *product(RING | {"mesh.context": 2}, each("data.seq_len", 36, 40, 128)),
        RING | {"mesh.context": 4, "data.seq_len": 120},
        {"mesh.context": 2},
    ],
    "stage": [
        *each("mesh.stage", 2, 2, 4),
        *each("mesh.stage", 2, 4, model__num_layers=4, data__batch_size=32),
        *each(
            "model.remat",
            "none",
            "block",
            "dots",
            mesh__stage=2,
            model__num_layers=4,
            model__pipeline__rounds=2,
        ),
        *each("model.pipeline.microbatches", 4, 3, mesh__stage=2, data__batch_size=32),
        *each("mesh.tensor", 2, mesh__stage=2),
        *each("train.microbatches", 2, mesh__stage=2, data__batch_size=32),
        *each("precision.recipe", *QUANTIZED, mesh__stage=2),
        *each("precision.first_blocks", 1, mesh__stage=2, precision__recipe="fp8_delayed"),
        *each("model.scan_layers", False, mesh__stage=2),
    ],
    "sequence": [
        *each("data.seq_len", 16, 33, 40, 128, 129),
        *each("loss.num_chunks", 2, 4, 8, 3),
        *each("loss.num_chunks", 2, 4, model__tie_embeddings=True),
        *each("loss.num_chunks", 2, 4, data__seq_len=36),
        *each("loss.z_loss", 1e-4, loss__num_chunks=2),
    ],
    "sizes": [
        *each("model.num_heads", 4, 8, 2, model__num_kv_heads=1),
        *each("model.num_heads", 3, 6, model__num_kv_heads=3),
        *each("model.num_heads", 8, model__num_kv_heads=8),
        *each("model.embed_dim", 64, 48, 36, 44),
        *each("model.mlp_dim", 96, 60, 50),
        *each("model.vocab_size", 100, 63, 256),
        *each("model.num_layers", 1, 3, 4),
        *each("model.head_dim", 4, 16, 6),
        *each("model.qk_norm", True),
        *each("model.init_std", None, model__tie_embeddings=True),
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
            {"precision.rules": ((pattern, name),), "precision.recipe": recipe}
            for recipe in ("bf16", "fp8_current")
            for pattern, name in (
                ("lm_head", "fp8_delayed"),
                ("lm_head", "mxfp8"),
                ("lm_head", "fp8_rowwise"),
                ("*/down_proj", "int8_switchback"),
                ("layers/attn/*", "bf16"),
                ("nothing", "fp8_current"),
                ("*", "fp8_delayed"),
            )
        ),
        *(
            {"precision.rules": (("lm_head", name),), "loss.num_chunks": 4}
            for name in ("fp8_delayed", "fp8_current", "mxfp8", "int8_switchback_m")
        ),
    ],
    "smooth": [
        {"precision.recipe": recipe, "precision.smooth_swiglu": form}
        for recipe in ("fp8_delayed", "fp8_current", "fp8_rowwise", "int8_switchback", "mxfp8", "bf16")
        for form in ("channel", "balanced", "token")
    ],
}
LLAMA_INVALID: list[Changes] = [
    *each("data.seq_len", 1),
    *each("loss.num_chunks", 0),
    *each("loss.z_loss", -1.0),
    *each("model.embed_dim", 0),
    *each("model.head_dim", 7),
    *each("model.num_kv_heads", 3),
    *each("model.pipeline.rounds", 0),
    *each("precision.rules", (("*", "fp3"),)),
    *each("precision.smooth_swiglu", "row"),
]

SIGMOID = {"loss.kind": "sigmoid", "model.logit_bias": -10.0}
CLIP: dict[str, list[Changes]] = {
    "loss": [
        *each("loss.method", "plain", "sharded", "tiled"),
        *product(SIGMOID, each("loss.method", "plain", "sharded", "tiled")),
        *each("loss.tile_size", 1, 3, 16, loss__method="tiled"),
        *each("loss.kind", "sigmoid", "softmax"),
        {"model.logit_bias": 0.0},
    ],
    "cached": [
        *each("train.microbatches", 2, 4, data__batch_size=32),
        *each("loss.method", "plain", "sharded", "tiled", train__microbatches=2),
        *each("model.visual.patch_dropout", 0.5, train__microbatches=2),
        *each("precision.recipe", *QUANTIZED, train__microbatches=2),
    ],
    "visual": [
        *each("model.visual.pool", "gap", "map", "map"),
        *each("model.visual.pool", "gap", "map", model__visual__patch_dropout=0.5),
        *each("model.visual.patch_dropout", 0.25, 0.5, 0.99),
        *each("model.visual.proj", False, model__embed_dim=32),
        *each("model.visual.proj", False, model__embed_dim=16),
        *each("model.visual.pre_norm", False, model__visual__patch_bias=True),
    ],
    "text": [
        *each("model.text.pool", "last", "eos"),
        *each("model.text.eos_id", 3, model__text__pool="eos"),
        *each("model.text.causal", False, True, model__text__proj_bias=True),
        *each("data.text_len", 3, 8, 15, 17),
        *each("model.text.max_len", 8, 64),
    ],
    "images": [
        *({"data.image_size": size, "model.visual.image_size": size} for size in (20, 32, 24)),
        *each("model.visual.patch_size", 8, 16, 2),
        *each("data.image_size", 32),
        *each("model.visual.image_size", 32),
        *each("data.crop_scale", (0.5, 1.0), data__source="glyphs"),
    ],
    "towers": [
        *each("model.embed_dim", 16, 36, 48),
        *each("model.visual.width", 48, 64, 36),
        *each("model.text.width", 16, 48, 20),
        *each("model.visual.num_heads", 1, 2, 8),
        *each("model.text.num_heads", 1, 2, 8),
        *each("model.visual.num_layers", 1, 3),
        *each("model.text.num_layers", 1, 3),
        *each("model.text.mlp_dim", 96, 60, 50),
        *each("model.text.vocab_size", 100, 63),
    ],
    "blocks": [
        *each("model.layer_scale", 0.0, 1e-4),
        *each("model.qk_norm", True),
        *each("model.act", "gelu_tanh", "quick_gelu"),
        *each("model.init", "siglip"),
    ],
    "rules": [
        *(
            {"precision.rules": ((pattern, name),), "precision.recipe": recipe}
            for recipe in ("bf16", "fp8_current")
            for pattern, name in (
                ("visual/layers/attn/*", "fp8_delayed"),
                ("text/layers/mlp/*", "mxfp8"),
                ("*/down_proj", "int8_switchback"),
                ("visual/proj", "fp8_current"),
                ("visual/*", "bf16"),
                ("layers/*", "bf16"),
                ("*", "fp8_delayed"),
            )
        ),
    ],
    "smooth": [
        {"precision.recipe": recipe, "precision.smooth_swiglu": form}
        for recipe in ("fp8_delayed", "int8_switchback", "bf16")
        for form in ("channel", "token")
    ],
    "axes": [
        *each("mesh.stage", 2),
        *each("mesh.context", 2, model__attention="ring"),
    ],
}
CLIP_INVALID: list[Changes] = [
    *each("loss.kind", "triplet"),
    *each("loss.method", "ring"),
    *each("loss.tile_size", 0, loss__method="tiled"),
    *each("data.text_len", 2, 0),
    *each("data.image_size", 0),
    *each("data.crop_scale", (0.9, 0.5)),
    *each("model.embed_dim", 0),
    *each("model.visual.pool", "mean"),
    *each("model.visual.patch_size", 5, 0),
    *each("model.visual.num_heads", 3),
    *each("model.visual.patch_dropout", 1.0, -0.5),
    *each("model.text.pool", "cls"),
    *each("model.text.num_heads", 0),
    *each("model.act", "relu2"),
    *each("model.init", "zeros"),
]

BASES: dict[str, Callable[[], ConfigDict]] = {"llama": base_llama, "clip": base_clip}
FEATURES = {"llama": COMMON | LLAMA, "clip": COMMON | CLIP}
INVALID_OF = {"llama": INVALID + LLAMA_INVALID, "clip": INVALID + CLIP_INVALID}


def draw(family: str, seed: int) -> Changes:
    """The changes of the family's base config for this seed: alternatives of one to five features."""
    rng = random.Random(f"{family} {seed}")
    features = FEATURES[family]
    changes: Changes = {}
    for name in rng.sample(sorted(features), rng.choice((1, 2, 3, 3, 4, 5))):
        changes |= rng.choice(features[name])
    return changes | (rng.choice(INVALID_OF[family]) if rng.random() < 1 / 8 else {})


def config(family: str, changes: Changes) -> ConfigDict:
    """The family's base config with these changes."""
    c = BASES[family]()
    with c.unlocked():
        c.update_from_flattened_dict(changes)
    return c
