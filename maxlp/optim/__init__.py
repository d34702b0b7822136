"""What an update is: one visible optax chain, chosen by name.

    clip by global norm → rescale → decoupled weight decay → learning rate

    rescale = low_bit(galore(OPTIMIZERS[name]))      both wrappers optional

A new optimizer is one new file with a `scale_by_<x>` that takes what it needs of `b1, b2, eps, mu_dtype`
and its own options as keywords, and one entry in `OPTIMIZERS`. States lie on a mesh like their
parameters: see `parallel.opt_state`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from maxlp.optim.adamp import decay_divisors, scale_by_adamp
from maxlp.optim.adascale import scale_by_adascale
from maxlp.optim.galore import galore as with_galore
from maxlp.optim.low_bit import bytes_per_parameter, state_bytes
from maxlp.optim.low_bit import low_bit as with_low_bit
from maxlp.optim.others import (
    eval_params,
    eval_part,
    scale_by_adafactor,
    scale_by_debiased_rms,
    scale_by_muon,
)
from maxlp.optim.pure_bf16 import pure_bf16
from maxlp.optim.schedules import SCHEDULES, make_schedule
from maxlp.optim.stable_adamw import clip_decay, divide_decay, scale_by_stable_adam

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "bytes_per_parameter",
    "decay_mask",
    "eval_params",
    "eval_part",
    "make_schedule",
    "make_tx",
    "scale_by_adascale",
    "state_bytes",
]

OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": optax.scale_by_adam,
    "stable_adamw": scale_by_stable_adam,
    "adafactor": scale_by_adafactor,
    "lion": optax.scale_by_lion,
    "muon": scale_by_muon,
    "schedule_free_adamw": scale_by_debiased_rms,
    "adamp": scale_by_adamp,
}
WRAPPERS = {"galore": with_galore, "low_bit": with_low_bit}

_NOT_OPTIONS = ("inner", "layer_axes")  # arguments that are no values of a config


def make_tx(
    name: str = "adamw",
    *,
    learning_rate: float,
    schedule: str = "cosine",
    warmup_steps: int,
    total_steps: int,
    final_lr_fraction: float,
    decay_fraction: float = 0.2,
    clip_norm: float,
    weight_decay: float,
    decay_embeddings: bool = False,
    decay_with_clip: bool = True,
    b1: float,
    b2: float,
    eps: float,
    mu_dtype: str | None = None,
    options: Mapping[str, Any] | None = None,
    galore: Mapping[str, Any] | None = None,
    low_bit: Mapping[str, Any] | None = None,
    param_rounding: str | None = None,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Builds the gradient transformation of a run and its learning-rate schedule.

    AdamW is Loshchilov & Hutter 2019 (algorithm 2) in its common form: the decay is multiplied
    by the learning rate, `p -= lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * p)`.

    Args:
        name: a key of `OPTIMIZERS`.
        learning_rate: the peak of the schedule.
        schedule: a key of `SCHEDULES`, each preceded by a linear warm-up.
        warmup_steps: updates before the peak; 0 starts at the peak.
        total_steps: updates of the whole run.
        final_lr_fraction: rate at `total_steps` over the peak (cosine and wsd).
        decay_fraction: share of `total_steps` that decays (wsd only).
        clip_norm: gradients are scaled down to this global L2 norm; 0 turns clipping off.
        weight_decay: decoupled, for the tensors that `decay_mask` picks.
        decay_embeddings: whether embedding tables decay too.
        decay_with_clip: whether update clipping (stable_adamw) shortens the decay as well as the step.
        b1: decay rate of the first moment; of schedule_free_adamw, the weight of the average.
        b2: decay rate of the second moment.
        eps: added to the denominator.
        mu_dtype: dtype of the first moment, None for that of the parameters.
        options: further keywords of `OPTIMIZERS[name]` alone. Of `b1, b2, eps, mu_dtype` it is given
            those that it knows: adafactor none of the first three, lion no `eps`.
        galore: keywords of `galore.galore`, at least `rank`; None: no projection.
        low_bit: keywords of `low_bit.low_bit`, may be empty; None: moments as the optimizer keeps them.
        param_rounding: how bfloat16 parameters are rounded after an update, one of `pure_bf16.METHODS`;
            None: like any others, to the nearest, which loses small updates.

    Returns:
        The transformation, and the function from finished updates to the learning rate.

    Raises:
        ValueError: an unknown name or option, or a value out of range.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name=} is unknown, choose one of: {', '.join(OPTIMIZERS)}")
    for key, value in {"clip_norm": clip_norm, "weight_decay": weight_decay}.items():
        if value < 0:
            raise ValueError(f"{key}={value} must not be negative (0 turns it off)")
    for key, value in {"b1": b1, "b2": b2}.items():
        if not 0 <= value < 1:
            raise ValueError(f"{key}={value} must be at least 0 and below 1")
    if not eps > 0:
        raise ValueError(f"{eps=} must be positive")
    schedule_free = name == "schedule_free_adamw"
    if schedule_free and (schedule != "constant" or b1 == 0):
        raise ValueError(f"{name} averages instead of decaying: set schedule='constant' and b1 above 0")

    lr_schedule = make_schedule(
        schedule,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        final_lr_fraction=final_lr_fraction,
        decay_fraction=decay_fraction,
    )
    options = options or {}
    common = {"b1": b1, "b2": b2, "eps": eps, "mu_dtype": mu_dtype}
    rescale = _call(OPTIMIZERS[name], "options", f"optimizer {name!r}", options, common)
    for key, values in {"galore": galore, "low_bit": low_bit}.items():
        if values is not None:
            rescale = _call(WRAPPERS[key], key, key, values, {"inner": rescale})

    decay = optax.add_decayed_weights(weight_decay, lambda p: decay_mask(p, decay_embeddings))
    if name == "stable_adamw" and decay_with_clip:
        rescale_and_decay = (clip_decay(rescale, decay, options.get("clip_threshold", 1.0)),)
    elif name == "adamp":
        rescale_and_decay = (divide_decay(rescale, decay, decay_divisors),)
    else:
        rescale_and_decay = (rescale, decay)
    tx = optax.chain(
        optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),
        *rescale_and_decay,
        optax.scale_by_learning_rate(lr_schedule),
    )
    if schedule_free:
        if param_rounding is not None:
            raise ValueError(f"{param_rounding=} does not go with {name}, which keeps a copy of its own")
        tx = optax.contrib.schedule_free(tx, lr_schedule, b1)
    if param_rounding is not None:
        tx = pure_bf16(tx, method=param_rounding)
    return tx, lr_schedule


def _call(
    function: Callable[..., Any],
    section: str,
    owner: str,
    values: Mapping[str, Any],
    common: Mapping[str, Any],
) -> Any:
    """The function of its own `values`, a section of the config, and of those `common` ones it takes."""
    takes = inspect.signature(function).parameters
    own = [key for key in takes if key not in common and key not in _NOT_OPTIONS]
    for key in values:
        if key not in own:
            raise ValueError(f"{section}.{key} is unknown to {owner}, allowed: {', '.join(own)}")
    for key in own:
        if takes[key].default is inspect.Parameter.empty and key not in values:
            raise ValueError(f"{section}.{key} is missing")
    return function(**{key: value for key, value in common.items() if key in takes}, **values)


def decay_mask(params: Any, decay_embeddings: bool) -> Any:
    """Which tensors decay, as a tree of bools shaped like `params`.

    The last name of a tensor's path decides: `kernel` decays, `embedding` if asked for, anything
    else (`scale`, `bias`, a logit scale, a class token ...) does not. Not the rank: a norm scale
    stacked over layers is (L, D) and still a scale.
    """
    decayed = {"kernel", "embedding"} if decay_embeddings else {"kernel"}

    def decays(path: tuple[Any, ...], _: Any) -> bool:
        return jax.tree_util.keystr(path[-1:], simple=True) in decayed

    return jax.tree.map_with_path(decays, params)
