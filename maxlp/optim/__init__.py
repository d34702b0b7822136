"""What an update is: one visible optax chain, chosen by name.

    clip by global norm -> rescale (OPTIMIZERS[name]) -> decoupled weight decay -> learning rate

A new optimizer is one new file with a `scale_by_<x>` that takes `b1, b2, eps, mu_dtype` and its
own options as keywords, and one entry in `OPTIMIZERS`.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import optax

from maxlp.optim.schedules import SCHEDULES, make_schedule

__all__ = ["OPTIMIZERS", "SCHEDULES", "decay_mask", "make_schedule", "make_tx", "state_shardings"]

OPTIMIZERS = {"adamw": optax.scale_by_adam}

_COMMON = ("b1", "b2", "eps", "mu_dtype")


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
    b1: float,
    b2: float,
    eps: float,
    mu_dtype: str | None = None,
    options: Mapping[str, Any] | None = None,
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
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the denominator.
        mu_dtype: dtype of the first moment, None for that of the parameters.
        options: further keywords of `OPTIMIZERS[name]` alone.

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

    lr_schedule = make_schedule(
        schedule,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        final_lr_fraction=final_lr_fraction,
        decay_fraction=decay_fraction,
    )
    rescale = OPTIMIZERS[name](b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype, **_checked_options(name, options))
    tx = optax.chain(
        optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),
        rescale,
        optax.add_decayed_weights(weight_decay, lambda p: decay_mask(p, decay_embeddings)),
        optax.scale_by_learning_rate(lr_schedule),
    )
    return tx, lr_schedule


def _checked_options(name: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    options = dict(options or {})
    allowed = [p for p in inspect.signature(OPTIMIZERS[name]).parameters if p not in _COMMON]
    for key in options:
        if key not in allowed:
            raise ValueError(
                f"options.{key} is unknown to optimizer {name!r}, allowed: {', '.join(allowed)}"
            )
    return options


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


def state_shardings(
    tx: optax.GradientTransformation, abstract_params: Any, param_shardings: Any, replicated: Any
) -> Any:
    """Shardings of `tx.init(params)`, so that the state can be born sharded.

    Moments shaped like their parameter lie where it lies. All else is replicated: counters, and
    per-parameter state of another shape (factored moments, projectors).

    Args:
        tx: the transformation.
        abstract_params: tree of arrays or `jax.ShapeDtypeStruct`.
        param_shardings: tree of shardings with the structure of `abstract_params`.
        replicated: the sharding of everything that does not follow a parameter.

    Returns:
        A tree of shardings with the structure of the optimizer state, fit for `out_shardings`.
    """

    def follow(leaf: Any, param: Any, sharding: Any) -> Any:
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        return sharding if leaf.shape == param.shape else replicated

    return optax.tree.map_params(
        tx,
        follow,
        jax.eval_shape(tx.init, abstract_params),
        abstract_params,
        param_shardings,
        transform_non_params=lambda _: replicated,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
