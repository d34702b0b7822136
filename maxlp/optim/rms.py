"""RMS_t of a step, the number that rises before a loss spike (see `maxlp.optim.stable_adamw`)."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from maxlp.optim.config import OptimizerConfig
from maxlp.optim.tree_utils import by_name, clip_factor, find_states, name_of, tensor_axes, widened

Rms = Callable[[optax.Updates, optax.OptState], dict[str, jax.Array]]


def make_rms(config: OptimizerConfig) -> Rms:
    """Builds the function that measures RMS_t of this optimizer's steps.

    It maps the gradients before clipping and the state after the update to RMS_t by parameter name,
    float32 (*layers). For stable_adamw that is the number it clips by, inside GaLore RMS_t of the
    projected gradient. For the others it is computed from Adam's second moment; parameters whose moment is
    factored, projected or stored in few bits are left out, and all parameters if AdaGC clips. (To measure
    those, use stable_adamw with clip_threshold=inf, which is AdamW.)
    """
    last_rms, state_type = config.kind.last_rms, config.kind.second_moment
    if last_rms is not None:
        return lambda grads, opt_state: by_name(last_rms(opt_state))
    if state_type is None or config.galore is not None or config.adagc is not None:
        return lambda grads, opt_state: {}
    return functools.partial(_second_moment_rms, state_type=state_type, config=config)


def rms_of_tensor(path: KeyPath, g: jax.Array, v: jax.Array, eps: float) -> jax.Array:
    """RMS_t = √mean(g² / max(v̂, eps²)) of each layer's tensor, (*layers, …) to (*layers), in float32."""
    # eps² below 1e-38 underflows in float32. Where there was never a gradient, 0 would be divided by 0.
    least = max(eps**2, float(jnp.finfo(jnp.float32).tiny))
    return jnp.sqrt(jnp.mean(jnp.square(g) / jnp.maximum(v, least), axis=tensor_axes(path, g)))


def _second_moment_rms(
    grads: optax.Updates, opt_state: optax.OptState, *, state_type: type, config: OptimizerConfig
) -> dict[str, jax.Array]:
    """RMS_t by parameter name, with v̂ from the state of type `state_type`."""
    [(_, state)] = find_states(opt_state, state_type)
    moments = dict(jax.tree.flatten_with_path(state.nu)[0])
    debias = 1 - config.b2 ** state.count.astype(jnp.float32)
    grads = widened(grads)
    scale = clip_factor(grads, config.clip_norm) if config.clip_norm else 1.0
    rms = {}
    for path, g in jax.tree.flatten_with_path(grads)[0]:
        if path in moments:
            v = moments[path].astype(g.dtype) / debias
            rms[name_of(path)] = rms_of_tensor(path, scale * g, v, config.eps)
    return rms
