"""What config files share: the argument string."""

from ml_collections import ConfigDict, config_dict


def parse_arg(arg: str, **defaults):
    """``"a=1,b=x,flag"`` as a ConfigDict of the given defaults, each value in its default's type.

    A bare name of a boolean sets it. Raises ValueError for names without a default.
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


def choose(arg: str, c: ConfigDict) -> ConfigDict:
    """The config with the choices of its argument string: ``precision=fp8_delayed,optimizer=adamw``."""
    chosen = parse_arg(arg, precision=c.precision.recipe, optimizer=c.optimizer.name)
    c.precision.recipe = chosen.precision
    c.optimizer.name = chosen.optimizer
    return c


def llama(**sizes) -> ConfigDict:
    """A Llama run in which only sizes, lengths and rates are left to choose.

    Every section holds the keyword arguments of one function; the README lists which.
    """
    c = ConfigDict()
    c.model = ConfigDict(
        dict(
            name="llama",
            vocab_size=128256,
            rope_theta=500000.0,
            rope_scaling=None,
            max_seq_len=8192,
            norm_eps=1e-5,
            tie_embeddings=False,
            init_std=0.02,
            dtype="bfloat16",
            param_dtype="float32",
            attention="xla",
            scan_layers=True,
            remat="block",
        )
    )
    c.model.update(sizes)
    c.precision = ConfigDict(
        dict(
            recipe="bf16",  # matmuls in model.dtype; others: precision.recipes.RECIPES
            options={},
            rules=(),
            first_blocks=1,
            last_blocks=1,
            min_dim=0,
            smooth_swiglu="none",
        )
    )
    c.mesh = ConfigDict(dict(data=1, fsdp=-1, tensor=1, dcn_data=1))
    c.optimizer = ConfigDict(
        dict(
            name="adamw",
            learning_rate=3e-4,
            schedule="cosine",
            warmup_steps=2000,
            final_lr_fraction=0.1,
            clip_norm=1.0,
            weight_decay=0.1,
            decay_embeddings=False,
            b1=0.9,
            b2=0.95,
            eps=1e-8,
        )
    )
    c.data = ConfigDict(
        dict(
            name="text",
            source=config_dict.placeholder(str),  # e.g. "array_record:/data/c4", "text:/data/**/*.txt"
            tokenizer=config_dict.placeholder(str),  # "bytes", or a tokenizer.json or .model file
            seq_len=8192,
            batch_size=512,
            packing="concat",
            num_epochs=config_dict.placeholder(int),  # without end
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
        )
    )
    c.checkpoint = ConfigDict(dict(every_steps=1000, keep_last=2))
    c.metrics = ConfigDict(dict(tensorboard=True, wandb_project=""))
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
