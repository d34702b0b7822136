"""Wrong values of each config key, listed independently of maxlp's own checks.

`KEYS` has an entry for every key of the two configs in `bases`. Each entry yields values that are wrong
whatever the other keys are: of another type, out of range, not a number, not a choice. (None is the default
of many keys; `cases.config_key` sets others to it.)
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

HUGE = 10**30
WORDS = ("four", "ünïcödé", "é" * 300, " ", "None ", "xla;rm", "\t", "0x", "[", "Adam W", "💥")


class Int(NamedTuple):
    """An integer of at least ``low``; ``high`` is the first one that is too large."""

    low: int
    high: int | None = None

    def wrong(self) -> Iterator[Any]:
        yield from (self.low - 1, self.low - 1000, -HUGE, 2.5, math.nan, math.inf, "four", [3], {"a": 1})
        yield from ([] if self.high is None else [self.high, HUGE])


class Float(NamedTuple):
    """A finite number from ``low`` to ``high``, both allowed unless ``open_low``, ``open_high``."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def wrong(self) -> Iterator[Any]:
        yield from (math.nan, math.inf, -math.inf, "a lot", [0.5], {"a": 1.0})
        if self.low > -math.inf:
            yield from (self.low - 1.0, self.low - 1e-3, -1e30)
            yield from [self.low] if self.open_low else []
        if self.high < math.inf:
            yield from (self.high + 1.0, self.high + 1e-3, 1e30)
            yield from [self.high] if self.open_high else []


class Name(NamedTuple):
    """One of a few words."""

    def wrong(self) -> Iterator[Any]:
        yield from (*WORDS, 7, 0.5, True, ["a"], {"a": 1})
        yield ""


class Switch(NamedTuple):
    """True or false."""

    def wrong(self) -> Iterator[Any]:
        yield from ("maybe", 2, 0.5, math.nan, [True], {"a": True})


class Text(NamedTuple):
    """A string whose wrong values are listed."""

    values: tuple[Any, ...]

    def wrong(self) -> Iterator[Any]:
        yield from (*self.values, 7, ["a", "b"])


class Group(NamedTuple):
    """A tuple whose wrong values are listed."""

    values: tuple[Any, ...]

    def wrong(self) -> Iterator[Any]:
        yield from self.values


Kind = Int | Float | Name | Switch | Text | Group

COUNT, SIZE = Int(0), Int(1)
POSITIVE, NOT_NEGATIVE = Float(0, open_low=True), Float(0)
SEED = Int(0, 2**63)
SOURCES = (
    "nosuch:corpus",
    "text:",
    "text:nowhere/*.txt",
    "text:corpus?spilt=all",
    "text:corpus?validation=2",
)
SOURCES += ("text:corpus?validation=nan", "text:corpus;", "jsonl:nowhere.jsonl", "http://corpus", "a\0b")
TOKENIZERS = (
    "nowhere.json",
    "bpe:abc",
    "bpe:-5",
    "bpe:",
    "bpe:1e3",
    "bpe:2",
    "tokenizer.json?bos=<nosuch>",
)
TOKENIZERS += ("tokenizer.json?boss=<s>", "llama.py", "corpus", "", "a\0b")

SHARED: dict[str, Kind] = {
    "model.name": Name(),
    "model.dtype": Name(),
    "model.param_dtype": Name(),
    "model.attention": Name(),
    "model.remat": Name(),
    "model.scan_layers": Switch(),
    "model.norm_eps": POSITIVE,
    "model.qk_norm": Switch(),
    "precision.recipe": Name(),
    "precision.options.history": SIZE,
    "precision.options.margin": Float(),
    "precision.options.cold_start": Switch(),
    "precision.options.residuals": Name(),
    "precision.options.format": Name(),
    "precision.options.grad_format": Name(),
    "precision.options.granularity": Name(),
    "precision.options.power_of_two": Switch(),
    "precision.options.rounding": Name(),
    "precision.options.block_size": SIZE,
    "precision.options.block_scales": Name(),
    "precision.options.kernel_granularity": Name(),
    "precision.options.grad_rounding": Name(),
    "precision.options.hadamard": Switch(),
    "precision.options.clipping": Name(),
    "precision.options.fwd_hadamard": Switch(),
    "precision.options.trust_mask": Switch(),
    "precision.options.keep": Float(0, 1, open_low=True),
    "precision.rules": Group(
        (("nosuch",), ((1, 2),), (("*", "nosuch"),), (("*",),), (("no/such/path", "fp8"),), 7, "ab")
    ),
    "precision.first_blocks": COUNT,
    "precision.high_precision_from": COUNT,
    "precision.last_blocks": COUNT,
    "precision.min_dim": COUNT,
    "precision.smooth_swiglu": Name(),
    "precision.loss_scale.initial": Float(0, open_low=True),
    "precision.loss_scale.growth_interval": SIZE,
    "precision.loss_scale.minimum": Float(0, open_low=True),
    "precision.loss_scale.maximum": Float(0, open_low=True),
    "precision.loss_scale.per_tensor": Switch(),
    "precision.health_every": COUNT,
    "precision.sharpness_every": COUNT,
    "precision.magnitudes_every": COUNT,
    "precision.scalify": Name(),
    "precision.exchange": Name(),
    "precision.scatter": Name(),
    **{f"mesh.{axis}": Int(1, 1000) for axis in ("stage", "data", "context", "tensor", "dcn_data")},
    "optimizer.name": Name(),
    "optimizer.learning_rate": POSITIVE,
    "optimizer.schedule": Name(),
    "optimizer.warmup_steps": Int(0, 10**6),
    "optimizer.final_lr_fraction": Float(0, 1),
    "optimizer.decay_fraction": Float(0, 1),
    "optimizer.clip_norm": NOT_NEGATIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.decay_embeddings": Switch(),
    "optimizer.decay_with_clip": Switch(),
    "optimizer.b1": Float(0, 1, open_high=True),
    "optimizer.b2": Float(0, 1, open_high=True),
    "optimizer.eps": POSITIVE,
    "optimizer.adascale": Float(1),
    "optimizer.adagc.ratio": Float(1),
    "optimizer.adagc.decay": Float(0, 1, open_high=True),
    "optimizer.adagc.warmup_steps": SIZE,
    "optimizer.mu_dtype": Text(("int8", "float64", "nosuch", "bfloat", "💥")),
    **{f"optimizer.options.{key}": Switch() for key in ("nesterov", "one_sided")},
    **{f"optimizer.options.{key}": NOT_NEGATIVE for key in ("eps_root", "delta")},
    **{f"optimizer.options.{key}": POSITIVE for key in ("smooth_beta", "rms", "adam_rate", "scale")},
    **{f"optimizer.options.{key}": Float(0, 1, open_high=True) for key in ("momentum", "beta")},
    **{f"optimizer.options.{key}": Float(0, 1, open_low=True) for key in ("decay_rate", "wd_ratio")},
    "optimizer.options.clip_threshold": Float(0, open_low=True),
    "optimizer.options.clipping_threshold": Float(0, open_low=True),
    "optimizer.options.growth": Float(1),
    **{f"optimizer.options.{key}_decay": Float(0, 1, open_high=True) for key in ("norm", "squared_norm")},
    "optimizer.options.largest_decay": Float(0, 1, open_high=True),
    "optimizer.options.reset_every": COUNT,
    "optimizer.options.min_dim_size_to_factor": COUNT,
    **{f"optimizer.options.{key}": SIZE for key in ("ns_steps", "precondition_frequency")},
    **{f"optimizer.options.{key}": SIZE for key in ("max_precond_dim", "rank", "update_proj_gap")},
    "optimizer.options.seed": Int(0, 2**63),
    **{f"optimizer.options.{key}": Name() for key in ("mode", "granularity")},
    "optimizer.options.targets": Group(((), ("(",), ("[a-",), (7,), "kernel", 7)),
    "optimizer.galore.rank": Int(0),
    "optimizer.galore.update_proj_gap": SIZE,
    "optimizer.galore.scale": Float(),
    "optimizer.galore.side": Name(),
    "optimizer.galore.basis": Name(),
    "optimizer.galore.moments": Name(),
    "optimizer.galore.projector": Name(),
    "optimizer.galore.lazy_threshold": Float(0, 1),
    "optimizer.galore.targets": Group(((), ("(",), ("[a-",), (7,), "kernel", 7)),
    "optimizer.galore.seed": Int(0, 2**63),
    "optimizer.low_bit.mu": Name(),
    "optimizer.low_bit.nu": Name(),
    "optimizer.low_bit.block_size": Int(0),
    "optimizer.low_bit.min_size": Int(0),
    "optimizer.low_bit.seed": Int(0, 2**63),
    "optimizer.param_rounding": Name(),
    "optimizer.offload": Switch(),
    "data.source": Text(SOURCES),
    "data.tokenizer": Text(TOKENIZERS),
    "data.batch_size": SIZE,
    "data.num_epochs": SIZE,
    "data.num_workers": COUNT,
    "train.total_steps": SIZE,
    "train.microbatches": SIZE,
    "train.seed": SEED,
    "train.log_every": SIZE,
    "train.eval_every": COUNT,
    "train.eval_batches": COUNT,
    "train.init_from": Text(("nowhere", "corpus", "llama.py", "gs://bucket/run", "a\0b")),
    "train.release_gradients": Switch(),
    "train.local.steps": SIZE,
    "train.local.outer_rate": Float(0, open_low=True),
    "train.local.outer_momentum": Float(0, 1, open_high=True),
    "train.lora.rank": SIZE,
    "train.lora.alpha": Float(0, open_low=True),
    "train.lora.targets": Group(((), (7,), "q_proj", 7, ("no/such/path",))),
    "spikes.guard": Name(),
    "spikes.statistics": Switch(),
    "spikes.update_ratios": Switch(),
    "spikes.window": SIZE,
    "spikes.threshold": POSITIVE,
    "spikes.min_history": SIZE,
    "spikes.merge_steps": COUNT,
    "spikes.rms_threshold": POSITIVE,
    "spikes.lead": SIZE,
    "spikes.guard_threshold": POSITIVE,
    "spikes.rewind_steps": COUNT,
    "spikes.skip_batches": COUNT,
    "spikes.max_actions": SIZE,
    "checkpoint.every_steps": SIZE,
    "checkpoint.keep_last": SIZE,
    "checkpoint.keep_every": SIZE,
    "metrics.tensorboard": Switch(),
    "metrics.wandb_project": Text(()),
    "metrics.wandb_group": Text(()),
    "metrics.wandb_tags": Group(((1,), ("a", None), "a", 7)),
    "profile.start": COUNT,
    "profile.steps": SIZE,
}
MESH_FSDP: dict[str, Kind] = {"mesh.fsdp": Group((0, -2, 1000, 2.5, "all", math.nan, [1]))}
# Sizes with which nothing could be allocated, or that do not fit an index.
MODEL_SIZE = Int(1, HUGE)
LLAMA: dict[str, Kind] = {
    **SHARED,
    **MESH_FSDP,
    **{
        f"model.{key}": MODEL_SIZE
        for key in (
            *("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"),
            "max_seq_len",
        )
    },
    "model.rope_theta": POSITIVE,
    "model.logit_soft_cap": POSITIVE,
    "model.qk_clip": POSITIVE,
    "model.rope_scaling.factor": Float(0, open_low=True),
    "model.rope_scaling.low_freq_factor": Float(0, open_low=True),
    "model.rope_scaling.high_freq_factor": Float(0, open_low=True),
    "model.rope_scaling.original_max_seq_len": SIZE,
    "model.tie_embeddings": Switch(),
    "model.init_std": Float(0),
    "model.pipeline.microbatches": SIZE,
    "model.pipeline.rounds": SIZE,
    "data.seq_len": Int(2, 10**9),
    "data.packing": Name(),
    "data.max_documents": SIZE,
    "data.shuffle": Switch(),
    "data.shuffle_tokens": Int(0),
    "loss.num_chunks": SIZE,
    "loss.z_loss": NOT_NEGATIVE,
}
CLIP: dict[str, Kind] = {
    **SHARED,
    **MESH_FSDP,
    "model.embed_dim": MODEL_SIZE,
    **{
        f"model.{tower}.{key}": MODEL_SIZE
        for tower in ("visual", "text")
        for key in ("width", "num_layers", "num_heads", "mlp_dim")
    },
    "model.visual.image_size": Int(1, 10**6),
    "model.visual.patch_size": Int(1, 10**6),
    "model.visual.pool": Name(),
    "model.visual.pre_norm": Switch(),
    "model.visual.patch_bias": Switch(),
    "model.visual.proj": Switch(),
    "model.visual.patch_dropout": Float(0, 1, open_high=True),
    "model.text.vocab_size": MODEL_SIZE,
    "model.text.max_len": MODEL_SIZE,
    "model.text.causal": Switch(),
    "model.text.pool": Name(),
    "model.text.eos_id": Int(0, 300),
    "model.text.proj_bias": Switch(),
    "model.act": Name(),
    "model.layer_scale": Float(),
    "model.init": Name(),
    "model.logit_scale": Float(),
    "model.logit_bias": Float(),
    "model.image_mean": Group(((0.5, 0.5), (0.5, 0.5, math.nan), 0.5, ("a", "b", "c"), ())),
    "model.image_std": Group(((0.5, 0.5), (0.5, 0.5, 0.0), (1.0, 1.0, -1.0), (1.0, math.inf, 1.0), 0.5)),
    "model.image_resize": Name(),
    "model.image_interpolation": Name(),
    "data.source": Text((*(each.replace("text:", "tar:") for each in SOURCES), "tar:pictures/a.tar")),
    "data.validation_source": Text(SOURCES),
    "data.classes": Text(("nowhere.txt", "pictures", "a\0b")),
    "data.templates_file": Text(("nowhere.txt", "pictures", "a\0b")),
    "data.image_size": Int(1, 10**6),
    "data.text_len": Int(3, 10**6),
    "data.lowercase": Switch(),
    "data.crop_scale": Group(
        ((0.5,), (0.9, 0.1), (0.0, 1.0), (0.5, 2.0), (math.nan, 1.0), 0.5, ("a", "b"))
    ),
    "data.templates": Group((("no braces",), "{}", (7,), 7)),
    "data.max_pixels": Int(1),
    "data.num_threads": SIZE,
    "data.max_broken": COUNT,
    "loss.kind": Name(),
    "loss.method": Name(),
    "loss.tile_size": SIZE,
}
KEYS = {"llama": LLAMA, "clip": CLIP}
