"""What the config files share: the sections of a Llama and of a CLIP run, and argument strings."""

import math

from ml_collections import ConfigDict, config_dict


def parse_arg(arg: str, **defaults):
    """``"a=1,b=x,flag"`` as a ConfigDict over the given defaults, each value in the type of its default.

    The bare name of a boolean sets it. Raises ValueError for a name without a default.
    """
    values = ConfigDict(defaults)
    for item in filter(None, (arg or "").split(",")):
        name, _, text = item.partition("=")
        if name not in defaults:
            raise ValueError(
                f"config argument {name!r} is unknown; arguments: {', '.join(sorted(defaults))}"
            )
        kind = type(defaults[name])
        if kind is bool:
            if text not in ("", "true", "false", "True", "False", "0", "1"):
                raise ValueError(f"config argument {name}={text!r}: expected true or false")
            values[name] = text not in ("false", "False", "0")
        else:
            try:
                values[name] = kind(text)
            except ValueError:
                raise ValueError(f"config argument {name}={text!r}: expected {kind.__name__}") from None
    return values


LOW_BIT = {
    "fp8": dict(mu="float8_e4m3fn", nu="float8_e5m2"),
    "8bit": dict(mu="dynamic8", nu="dynamic8", block_size=256),
}


def choose(arg: str, c: ConfigDict) -> ConfigDict:
    """Applies an argument string such as ``precision=fp8_delayed,optimizer=adamw`` to a config.

    precision: a recipe of `maxlp.precision.RECIPES`; ``fp16``: matmuls and activations in float16 under a
      dynamic loss scale; ``pure_bf16``: no float32 copy of the parameters, stochastic rounding.
    optimizer: a name in `maxlp.optim.OPTIMIZERS`.
    galore: rank of the projected gradients; 0 is no projection.
    low_bit: moments in ``fp8`` (e4m3 and e5m2, a scale per tensor) or ``8bit`` (dynamic, in blocks of 256).
    """
    chosen = parse_arg(arg, precision=c.precision.recipe, optimizer=c.optimizer.name, galore=0, low_bit="")
    if chosen.precision == "fp16":
        c.model.dtype = "float16"
        c.precision.loss_scale.update(initial=2.0**15, growth_interval=2000)
    elif chosen.precision == "pure_bf16":
        c.model.dtype = c.model.param_dtype = "bfloat16"
        c.optimizer.param_rounding = "stochastic"
    else:
        c.precision.recipe = chosen.precision
    c.optimizer.name = chosen.optimizer
    if chosen.galore:
        c.optimizer.galore.rank = chosen.galore
    if chosen.low_bit:
        if chosen.low_bit not in LOW_BIT:
            raise ValueError(f"config argument low_bit={chosen.low_bit!r}: one of {', '.join(LOW_BIT)}")
        c.optimizer.low_bit.update(LOW_BIT[chosen.low_bit])
    return c


def _unset(**types) -> dict:
    """Keys that the command line can set; what they configure is off while all are unset."""
    return {name: config_dict.placeholder(kind) for name, kind in types.items()}


def llama(**sizes) -> ConfigDict:
    """The config of a Llama run; presets set sizes, lengths and rates.

    Every section holds the fields of one dataclass or function; the README lists which.
    """
    c = ConfigDict()
    c.model = ConfigDict(
        dict(
            name="llama",
            vocab_size=128256,
            rope_theta=500000.0,
            rope_scaling=_unset(
                factor=float, low_freq_factor=float, high_freq_factor=float, original_max_seq_len=int
            ),
            max_seq_len=8192,
            norm_eps=1e-5,
            tie_embeddings=False,
            init_std=0.02,
            dtype="bfloat16",
            param_dtype="float32",
            attention="auto",  # the platform's kernel: nn.attention.choose
            scan_layers=True,
            remat="block",
            pipeline=dict(microbatches=config_dict.placeholder(int), rounds=1),  # on mesh.stage > 1
        )
    )
    c.model.update(sizes)
    c.precision = ConfigDict(
        dict(
            recipe="bf16",  # matmuls in model.dtype; others: precision.recipes.RECIPES
            options=_unset(  # in place of the recipe's own: precision.recipes.RecipeOptions
                history=int,
                margin=float,
                cold_start=bool,
                residuals=str,
                format=str,
                grad_format=str,
                granularity=str,
                power_of_two=bool,
                rounding=str,
            ),
            rules=(),  # (pattern, recipe) pairs: precision.inject
            first_blocks=1,
            last_blocks=1,
            min_dim=0,
            smooth_swiglu="none",
            loss_scale=_unset(  # for float16: precision.DynamicLossScale
                initial=float, growth_interval=int, minimum=float, maximum=float
            ),
            health_every=0,  # steps between measurements of the quantization; 0: none
        )
    )
    c.mesh = ConfigDict(dict(stage=1, data=1, fsdp=-1, context=1, tensor=1, dcn_data=1))
    c.optimizer = ConfigDict(
        dict(
            name="adamw",
            learning_rate=3e-4,
            schedule="cosine",
            warmup_steps=2000,
            final_lr_fraction=0.1,
            decay_fraction=config_dict.placeholder(float),
            clip_norm=1.0,
            weight_decay=0.1,
            decay_embeddings=False,
            decay_with_clip=config_dict.placeholder(bool),
            b1=0.9,
            b2=0.95,
            eps=1e-8,
            mu_dtype=config_dict.placeholder(str),  # of the first moments; unset: that of the parameters
            options=dict(),  # further keywords of this optimizer
            galore=_unset(  # low-rank projection of the gradients: optim.config.GaloreConfig
                rank=int,
                update_proj_gap=int,
                scale=float,
                side=str,
                basis=str,
                moments=str,
                projector=str,
                lazy_threshold=float,
                targets=tuple,
                seed=int,
            ),
            low_bit=_unset(  # moments in few bits: optim.config.LowBitConfig
                mu=str, nu=str, block_size=int, min_size=int, seed=int
            ),
            param_rounding=config_dict.placeholder(str),  # of bfloat16 parameters: stochastic, kahan
        )
    )
    c.data = ConfigDict(
        dict(
            source=config_dict.placeholder(str),  # e.g. "array_record:/data/c4", "text:/data/**/*.txt"
            tokenizer=config_dict.placeholder(str),  # "bytes", or a tokenizer.json or .model file
            seq_len=8192,
            batch_size=512,
            packing="concat",
            shuffle=config_dict.placeholder(bool),
            shuffle_tokens=config_dict.placeholder(int),
            num_epochs=config_dict.placeholder(int),  # unset: without end
            num_workers=0,
        )
    )
    c.loss = ConfigDict(dict(num_chunks=8, z_loss=0.0))
    c.train = ConfigDict(
        dict(
            total_steps=100_000,
            microbatches=1,
            seed=0,
            log_every=10,
            eval_every=1000,
            eval_batches=20,
            init_from="",
            release_gradients=False,
        )
    )
    c.spikes = ConfigDict(
        dict(
            guard="off",  # or "skip", "rollback"
            statistics=True,  # gradient norm and RMS_t of every tensor
            window=64,
            threshold=3.2,
            min_history=16,
            merge_steps=10,
            rms_threshold=1.8,
            lead=8,
            guard_threshold=6.0,
            rewind_steps=100,
            skip_batches=200,
            max_actions=10,
        )
    )
    c.checkpoint = ConfigDict(dict(every_steps=1000, keep_last=2, keep_every=config_dict.placeholder(int)))
    c.metrics = ConfigDict(dict(tensorboard=True, wandb_project=""))
    c.profile = ConfigDict(dict(start=0, steps=3))
    return c


# Llama 3.1 stretches the rotary wavelengths by 8 beyond the 8192 positions of Llama 3; 3.2 by 32.
LLAMA_3_1_ROPE = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
LLAMA_3_2_ROPE = dict(LLAMA_3_1_ROPE, factor=32.0)


def llama_c4(steps: int, learning_rate: float, **sizes) -> ConfigDict:
    """The C4 pre-training runs of GaLore (arXiv:2403.03507, section 5.1 and appendix C).

    131 072 tokens a step in sequences of 256, warm-up over 10 % of the steps, cosine to 10 %.
    """
    c = llama(vocab_size=32000, rope_theta=10000.0, max_seq_len=1024, norm_eps=1e-6, remat="none", **sizes)
    c.data.seq_len = 256
    c.data.batch_size = 512
    c.loss.num_chunks = 1
    c.optimizer.learning_rate = learning_rate
    c.optimizer.warmup_steps = steps // 10
    c.optimizer.weight_decay = 0.0
    c.optimizer.b2 = 0.999
    c.train.total_steps = steps
    return c


# --- CLIP ---------------------------------------------------------------------------------------------


def _clip_size(embed_dim: int, patch_size: int, visual: tuple, text: tuple) -> dict:
    keys = ("width", "num_layers", "num_heads", "mlp_dim")
    return dict(
        embed_dim=embed_dim,
        visual=dict(zip(keys, visual, strict=True), patch_size=patch_size),
        text=dict(zip(keys, (*text, 4 * text[0]), strict=True)),
    )


# Of open_clip: joint dim, patch, image (width, layers, heads, mlp), text (width, layers, heads).
CLIP_SIZES = {
    "s32": _clip_size(384, 32, (384, 12, 6, 1536), (384, 12, 6)),
    "b32": _clip_size(512, 32, (768, 12, 12, 3072), (512, 12, 8)),
    "b16": _clip_size(512, 16, (768, 12, 12, 3072), (512, 12, 8)),
    "l14": _clip_size(768, 14, (1024, 24, 16, 4096), (768, 12, 12)),
    "h14": _clip_size(1024, 14, (1280, 32, 16, 5120), (1024, 24, 16)),
    "g14": _clip_size(1024, 14, (1408, 40, 16, 6144), (1024, 24, 16)),
    "bigG14": _clip_size(1280, 14, (1664, 48, 16, 8192), (1280, 32, 20)),
}


def clip(**sizes) -> ConfigDict:
    """The config of a CLIP run; presets set sizes, lengths and rates.

    Args:
      sizes: keys of the ``model`` section (`CLIP_SIZES` has sets of them); those of ``visual`` and ``text``
        are merged into the defaults below.
    """
    c = llama()
    c.model = ConfigDict(
        dict(
            name="clip",
            embed_dim=512,
            visual=dict(
                image_size=224,
                pool="cls",
                pre_norm=True,
                patch_bias=False,
                proj=True,
                patch_dropout=0.0,
            ),
            text=dict(
                vocab_size=49408,  # CLIP's BPE
                max_len=77,
                causal=True,
                pool="argmax",
                eos_id=config_dict.placeholder(int),
                proj_bias=False,
            ),
            act="gelu",
            norm_eps=1e-5,
            layer_scale=config_dict.placeholder(float),
            qk_norm=False,
            init="clip",
            logit_scale=math.log(1 / 0.07),
            logit_bias=config_dict.placeholder(float),
            image_mean=(0.48145466, 0.4578275, 0.40821073),  # OpenAI's
            image_std=(0.26862954, 0.26130258, 0.27577711),
            dtype="bfloat16",
            param_dtype="float32",
            attention="auto",
            scan_layers=True,
            remat="block",
        )
    )
    c.model.update(sizes)
    # open_clip's settings for these sizes.
    c.optimizer.update(
        dict(
            learning_rate=5e-4,
            warmup_steps=10_000,
            final_lr_fraction=0.0,
            clip_norm=0.0,
            weight_decay=0.2,
            decay_embeddings=True,
            b1=0.9,
            b2=0.98,
            eps=1e-6,
        )
    )
    c.data = ConfigDict(
        dict(
            source=config_dict.placeholder(str),  # e.g. "tar:/data/laion/{00000..41455}.tar"
            validation_source="",  # e.g. "tfds:imagenet2012?data_dir=/data/tfds"; if empty, part of source
            tokenizer=config_dict.placeholder(str),  # of CLIP's 49408 tokens
            classes="",  # a file of names for labels that have none
            image_size=224,
            text_len=77,
            batch_size=32768,
            crop_scale=config_dict.placeholder(tuple),
            templates=config_dict.placeholder(tuple),
            max_pixels=config_dict.placeholder(int),
            num_threads=config_dict.placeholder(int),
            max_broken=100,  # examples that a process skips before it stops
            num_epochs=config_dict.placeholder(int),  # unset: without end
            num_workers=0,
        )
    )
    c.loss = ConfigDict(dict(kind="softmax", method="tiled", tile_size=4096))
    return c


def clip_size(arg: str, default: str) -> tuple[dict, str]:
    """The entry of `CLIP_SIZES` that ``size=NAME`` in an argument string asks for, and the string's rest.

    Raises ValueError for an unknown name.
    """
    items = (arg or "").split(",")
    names = [item.removeprefix("size=") for item in items if item.startswith("size=")]
    name = names[-1] if names else default
    if name not in CLIP_SIZES:
        raise ValueError(f"config argument size={name!r}: one of {', '.join(CLIP_SIZES)}")
    return CLIP_SIZES[name], ",".join(item for item in items if not item.startswith("size="))


def siglip(**sizes) -> ConfigDict:
    """As `clip`, for a SigLIP (Zhai et al. 2023, arXiv:2303.15343): a sigmoid loss over single pairs."""
    c = clip(
        visual=dict(pool="map", pre_norm=False, patch_bias=True, proj=False),
        text=dict(vocab_size=32000, max_len=64, causal=False, pool="last", proj_bias=True),
        act="gelu_tanh",
        norm_eps=1e-6,
        init="siglip",
        logit_scale=math.log(10),
        logit_bias=-10.0,
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
    )
    c.model.update(sizes)
    c.optimizer.update(dict(learning_rate=1e-3, weight_decay=1e-4, decay_embeddings=False, b2=0.95))
    c.data.text_len = 64
    c.loss.kind = "sigmoid"
    return c
