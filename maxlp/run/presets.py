"""What the config files of all families share: sections, and choices after the colon of --config."""

import dis
from collections.abc import Callable, Mapping
from typing import TypeVar

from ml_collections import ConfigDict, config_dict

T = TypeVar("T")


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


def own_choice(arg: str, name: str, values: Mapping[str, T], default: str) -> tuple[T, str]:
    """The value that ``name=KEY`` in an argument string asks for, and the string's rest, for `choose`.

    Raises ValueError for an unknown key.
    """
    items = (arg or "").split(",")
    keys = [item.removeprefix(f"{name}=") for item in items if item.startswith(f"{name}=")]
    key = keys[-1] if keys else default
    if key not in values:
        raise ValueError(f"config argument {name}={key!r}: one of {', '.join(values)}")
    return values[key], ",".join(item for item in items if not item.startswith(f"{name}="))


UNREAD = (
    "does not use its argument, so the text after the colon would have no effect; return "
    "maxlp.run.presets.choose(arg, c), or leave the text out"
)


def reads_argument(get_config: Callable) -> bool:
    """False for a Python function whose code never loads its first argument."""
    code = getattr(get_config, "__code__", None)
    if code is None or not code.co_argcount:
        return True  # unknown
    loads = (i for i in dis.get_instructions(code) if "LOAD_" in i.opname)
    names = (i.argval if isinstance(i.argval, tuple) else (i.argval,) for i in loads)
    return any(code.co_varnames[0] in loaded for loaded in names)


PURE_BF16 = {
    "model.dtype": "bfloat16",
    "model.param_dtype": "bfloat16",
    "optimizer.param_rounding": "stochastic",
}
LOW_BIT = {
    "fp8": dict(mu="float8_e4m3fn", nu="float8_e5m2"),
    "8bit": dict(mu="dynamic8", nu="dynamic8", block_size=256),
    "companded": dict(mu="companded8", nu="companded8", block_size=32),
}
SCALIFY = {"scalify_fp16": "fp16", "scalify_fp16_params": "fp16", "scalify_fp8": "fp8"}


def choose(arg: str, c: ConfigDict, galore: tuple[int, float] | None = None) -> ConfigDict:
    """Applies an argument string such as ``precision=fp8_delayed,optimizer=adamw`` to a config.

    precision: a recipe of `maxlp.precision.RECIPES`; ``fp16``: matmuls and activations in float16 under a
      dynamic loss scale; ``scalify_fp16`` and ``scalify_fp8``: matmuls and activations in float16, or the
      matmuls of transformer blocks in FP8, with a scale for every array; ``scalify_fp16_params``:
      parameters, gradients and moments in float16 too; ``pure_bf16``: no float32 copy of the parameters,
      stochastic rounding.
    optimizer: a name in `maxlp.optim.OPTIMIZERS`; ``schedule_free_adamw`` sets its constant schedule too.
    galore: rank of the projected gradients; 0 is no projection. The learning rate becomes that of the
      config divided by GaLore's scale, so that projected kernels keep theirs.
    low_bit: moments in ``fp8`` (e4m3 and e5m2, a scale per tensor), ``8bit`` (dynamic, in blocks of 256) or
      ``companded`` (8 bits of functions of them, in blocks of 32).

    Args:
      galore: the rank that a bare ``galore`` means in this config, and its learning rate with GaLore, in
        place of the divided one.

    Raises:
      ValueError: an unknown name, a wrong value, or a bare ``galore`` without a rank in this config.
    """
    rank, galore_rate = galore or (None, None)
    items = (arg or "").split(",")
    if "galore" in items and rank is None:
        raise ValueError(
            "config argument galore: this config has no rank of its own; add one, as in galore=128"
        )
    arg = ",".join(f"galore={rank}" if item == "galore" else item for item in items)
    chosen = parse_arg(arg, precision=c.precision.recipe, optimizer=c.optimizer.name, galore=0, low_bit="")
    recipe = "bf16"
    if chosen.precision == "fp16":
        c.model.dtype = "float16"
        c.precision.loss_scale.update(initial=2.0**15, growth_interval=2000)
    elif chosen.precision in SCALIFY:
        c.model.dtype, c.model.attention = "float16", "xla"  # a kernel has no rule for scales
        c.precision.scalify = SCALIFY[chosen.precision]
        if chosen.precision == "scalify_fp16_params":
            c.model.param_dtype, c.optimizer.param_rounding = "float16", "nearest"
            c.optimizer.low_bit.update(mu="float16", nu="float16")
    elif chosen.precision == "pure_bf16":
        c.update_from_flattened_dict(PURE_BF16)
    else:
        from maxlp.precision import RECIPES

        known = (*RECIPES, "fp16", *SCALIFY, "pure_bf16")
        if chosen.precision not in known:
            raise ValueError(
                f"config argument precision={chosen.precision!r} is unknown; one of {', '.join(known)}"
            )
        recipe = chosen.precision
    c.precision.recipe = recipe
    c.optimizer.name = chosen.optimizer
    if chosen.optimizer == "schedule_free_adamw":
        c.optimizer.schedule = "constant"  # it takes no other
    if chosen.galore:
        from maxlp.optim.config import GaloreConfig  # few configs need it

        c.optimizer.galore.rank = chosen.galore
        c.optimizer.learning_rate = galore_rate or c.optimizer.learning_rate / GaloreConfig.scale
    if chosen.low_bit:
        if chosen.low_bit not in LOW_BIT:
            raise ValueError(f"config argument low_bit={chosen.low_bit!r}: one of {', '.join(LOW_BIT)}")
        c.optimizer.low_bit.update(LOW_BIT[chosen.low_bit])
    return c


def unset(**types) -> dict:
    """Keys that the command line can set; what they configure is off while all are unset."""
    return {name: config_dict.placeholder(kind) for name, kind in types.items()}


def sections(model: dict, data: dict, loss: dict) -> ConfigDict:
    """A config from the sections that differ between families; the others have the same keys in all.

    Every section holds the fields of one dataclass or function; the README lists which.
    """
    c = ConfigDict(dict(model=model, precision=_precision(), optimizer=_optimizer(), data=data, loss=loss))
    c.mesh = ConfigDict(dict(stage=1, data=1, fsdp=-1, context=1, tensor=1, dcn_data=1))
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
            lora=unset(rank=int, alpha=float, targets=tuple),  # adapters: run.settings.LoraConfig
            local=unset(steps=int, outer_rate=float, outer_momentum=float),  # run.settings.LocalConfig
        )
    )
    c.spikes = ConfigDict(
        dict(
            guard="off",  # or "skip", "rollback"
            statistics=True,  # gradient norm and RMS_t of every tensor
            update_ratios=False,  # ‖update‖ / ‖weight‖ of every tensor
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
    c.metrics = ConfigDict(dict(tensorboard=True, wandb_project="", wandb_group="", wandb_tags=()))
    c.profile = ConfigDict(dict(start=0, steps=3))
    return c


def _precision() -> ConfigDict:
    return ConfigDict(
        dict(
            recipe="bf16",  # matmuls in model.dtype; others: precision.recipes.RECIPES
            options=unset(  # in place of the recipe's own: precision.recipes.RecipeOptions
                history=int,
                margin=float,
                cold_start=bool,
                residuals=str,
                format=str,
                grad_format=str,
                granularity=str,
                power_of_two=bool,
                rounding=str,
                block_size=int,
                block_scales=str,
                kernel_granularity=str,
                grad_rounding=str,
                hadamard=bool,
                clipping=str,
                fwd_hadamard=bool,
                trust_mask=bool,
                keep=float,
            ),
            rules=(),  # (pattern, recipe) pairs: precision.inject
            first_blocks=1,
            last_blocks=1,
            min_dim=0,
            smooth_swiglu="none",
            loss_scale=unset(  # for float16: precision.DynamicLossScale
                initial=float, growth_interval=int, minimum=float, maximum=float, per_tensor=bool
            ),
            scalify="none",  # or "fp16", "fp8": precision.scalify
            exchange="none",  # or "int8", "float8_e4m3fn": parallel.exchange, between replicas (mesh.data)
            scatter="none",  # or "int8", "float8_e4m3fn": precision.scatter, over mesh.fsdp
            high_precision_from=0,  # the step after which matmuls compute in model.dtype; 0: never
            health_every=0,  # steps between measurements of the quantization; 0: none
            sharpness_every=0,  # steps between measurements of the loss's sharpness; 0: none
            magnitudes_every=0,  # steps between measurements of the size of the blocks' outputs; 0: none
        )
    )


def _optimizer() -> ConfigDict:
    return ConfigDict(
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
            adagc=unset(ratio=float, decay=float, warmup_steps=int),  # clipping: optim.config.AdaGCConfig
            mu_dtype=config_dict.placeholder(str),  # of the first moments; unset: that of the parameters
            options=unset(  # keywords of single optimizers: docs/optimizers.md
                **dict.fromkeys(("nesterov", "one_sided"), bool),
                **dict.fromkeys(("eps_root", "smooth_beta", "clip_threshold", "clipping_threshold"), float),
                **dict.fromkeys(("momentum", "decay_rate", "beta", "rms", "adam_rate", "scale"), float),
                **dict.fromkeys(("growth", "delta", "wd_ratio"), float),
                **dict.fromkeys(("norm_decay", "squared_norm_decay", "largest_decay"), float),
                **dict.fromkeys(("min_dim_size_to_factor", "ns_steps", "precondition_frequency"), int),
                **dict.fromkeys(("max_precond_dim", "rank", "update_proj_gap", "seed", "reset_every"), int),
                **dict.fromkeys(("mode", "granularity"), str),
                targets=tuple,
            ),
            galore=unset(  # low-rank projection of the gradients: optim.config.GaloreConfig
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
            low_bit=unset(  # moments in few bits: optim.config.LowBitConfig
                mu=str, nu=str, block_size=int, min_size=int, seed=int
            ),
            adascale=config_dict.placeholder(float),  # batch / the batch that rate and steps are for
            param_rounding=config_dict.placeholder(str),  # see docs/optimizers.md
            offload=config_dict.placeholder(bool),  # state in the host's memory between steps
        )
    )
