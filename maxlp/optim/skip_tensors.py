"""Updates only the tensors whose gradients are finite."""

import dataclasses
import pkgutil
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxlp.optim.config import OPTIMIZERS, OptimizerConfig
from maxlp.optim.make_tx import Optimizer
from maxlp.optim.tree_utils import over_tensor, tensor_axes, zero_unless


def refusal(config: OptimizerConfig, guard: str) -> str | None:
    """Why tensors cannot be skipped with an optimizer and a guard, if they cannot."""
    if guard == "skip":
        return (
            "spikes.guard=skip rejects each step in which a gradient is not finite, also with "
            "precision.loss_scale.per_tensor=True; set spikes.guard=rollback or off, or per_tensor=False"
        )
    wrapped = any(part is not None for part in (config.galore, config.low_bit, config.adascale))
    if config.kind.like_params and not wrapped and config.param_rounding != "float16_master":
        return None
    names = [name for name, kind in OPTIMIZERS.items() if pkgutil.resolve_name(kind).like_params]
    return (
        f"precision.loss_scale.per_tensor=True needs optimizer.name={' or '.join(names)} without "
        "galore, low_bit, adascale and param_rounding=float16_master; choose that, or per_tensor=False"
    )


def skip_nonfinite(optimizer: Optimizer) -> Optimizer:
    """The optimizer with `skip_nonfinite_tensors`, which also measures RMS_t without those tensors."""

    def rms(grads: optax.Updates, opt_state: optax.OptState) -> dict[str, jax.Array]:
        return optimizer.rms(_zero_unless(_finite(grads), grads), opt_state)

    return dataclasses.replace(optimizer, tx=skip_nonfinite_tensors(optimizer.tx), rms=rms)


def skip_nonfinite_tensors(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Leaves a tensor and its moments unchanged in a step in which its gradient is not finite.

    All others are updated as if its gradient were zero. Each layer of a stack is a tensor. This is what the
    float16 runs of Wortsman et al. 2023 (arXiv:2304.13013) do at an overflow; their loss scale is fixed.
    """
    inner = optax.with_extra_args_support(tx)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        finite, like_params = _finite(updates), jax.tree.structure(updates)
        updates, new_state = inner.update(_zero_unless(finite, updates), state, params, **extra)

        def is_moment(node: Any) -> bool:
            return jax.tree.structure(node) == like_params

        def where(ok: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(over_tensor(ok, new), new, old)

        def kept(new: Any, old: Any) -> Any:
            return jax.tree.map(where, finite, new, old) if is_moment(new) else new

        return _zero_unless(finite, updates), jax.tree.map(kept, new_state, state, is_leaf=is_moment)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _finite(grads: Any) -> Any:
    """Whether all of a gradient is finite, (*layers) for each parameter."""
    return jax.tree.map_with_path(lambda path, g: jnp.isfinite(g).all(axis=tensor_axes(path, g)), grads)


def _zero_unless(finite: Any, tree: Any) -> Any:
    return jax.tree.map(lambda ok, x: zero_unless(over_tensor(ok, x), x), finite, tree)
