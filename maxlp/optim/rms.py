"""RMS_t of a step, the number that precedes loss spikes (see `maxlp.optim.stable_adamw`)."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from maxlp.optim.config import OptimizerConfig
from maxlp.optim.tree_utils import find_states, layer_axes, name_of, tensor_mean, widened

Rms = Callable[[optax.Updates, optax.OptState], dict[str, jax.Array]]


def make_rms(config: OptimizerConfig) -> Rms:
    """The function that measures RMS_t of a step of this optimizer.

    Returns:
      A function of the gradients before clipping and the state after the update to RMS_t by the
      parameters' names, float32 (*layers). stable_adamw reports what it clips by, which inside GaLore is
      RMS_t of the projected gradient. Otherwise the result lacks parameters whose second moment is not
      stored as it is, and is {} for optimizers without one. (To see RMS_t there, use stable_adamw with
      clip_threshold=inf: AdamW that measures it.)
    """
    if config.name == "stable_adamw":
        from maxlp.optim.stable_adamw import last_rms

        return lambda grads, opt_state: _by_name(last_rms(opt_state))
    state_type = _second_moment_type(config.name)
    if state_type is None or config.has_galore:
        return lambda grads, opt_state: {}
    return functools.partial(
        second_moment_rms, state_type=state_type, b2=config.b2, eps=config.eps, clip_norm=config.clip_norm
    )


def _second_moment_type(name: str) -> type | None:
    """The type of the state that holds Adam's second moment `nu`, if the optimizer has one."""
    if name == "adamp":
        from maxlp.optim.adamp import AdamPState

        return AdamPState
    if name == "schedule_free_adamw":
        from maxlp.optim.schedule_free import debiased_rms_state

        return debiased_rms_state()
    return optax.ScaleByAdamState if name in ("adamw", "muon") else None


def second_moment_rms(
    grads: optax.Updates,
    opt_state: optax.OptState,
    *,
    state_type: type,
    b2: float,
    eps: float,
    clip_norm: float,
) -> dict[str, jax.Array]:
    """RMS_t = √mean(g² / max(v̂, eps²)), with v̂ from the first state of type `state_type`.

    Args:
      grads: before clipping.
      opt_state: after the update.
      state_type: a state with `count` and `nu`.
      b2, eps, clip_norm: of the `OptimizerConfig`.
    """
    state = find_states(opt_state, state_type)[0][1]
    moments = dict(jax.tree.flatten_with_path(state.nu)[0])
    debias = 1 - b2 ** state.count.astype(jnp.float32)
    scale = 1.0
    if clip_norm:
        scale = jnp.minimum(1.0, clip_norm / jnp.maximum(optax.tree.norm(grads), 1e-30))
    rms = {}
    for path, g in jax.tree.flatten_with_path(widened(grads))[0]:
        if path in moments:
            v = moments[path].astype(g.dtype) / debias
            ratio = jnp.square(scale * g) / jnp.maximum(v, eps**2)
            rms[name_of(path)] = jnp.sqrt(tensor_mean(ratio, layer_axes(path)))
    return rms


def _by_name(tree: optax.Updates) -> dict[str, jax.Array]:
    return {name_of(path): x for path, x in jax.tree.flatten_with_path(tree)[0]}
