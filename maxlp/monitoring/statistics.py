"""Measurements of each tensor in a train step: RMS_t, the norm of its gradient and the size of its update.

Results are dicts from names such as ``layers/attn/q_proj/kernel`` to float32 arrays (*layers): one array
holds a number for each layer of a stack, so that the host fetches a few arrays instead of hundreds. On the
host, `flat` turns them into scalars.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath

from maxlp.optim.rms import Rms
from maxlp.optim.tree_utils import by_name, tensor_norm, widened

Tensors = dict[str, jax.Array]


# --- inside the compiled step -------------------------------------------------------------------------


def tensor_statistics(
    grads: optax.Updates,
    opt_state: optax.OptState,
    updates: optax.Updates,
    params: optax.Params,
    *,
    rms: Rms,
    update_ratios: bool = False,
) -> dict[str, Tensors]:
    """RMS_t, gradient norms and, if asked for, update ratios of one step.

    Args:
      grads: gradients before clipping.
      opt_state: state of the optimizer after the update.
      updates: what the optimizer adds to the parameters, weight decay included.
      params: the parameters before the update.
      rms: the optimizer's function from (grads, opt_state) to the RMS_t of each tensor; empty where the
        optimizer does not define it.
      update_ratios: whether to measure ‖update‖ / ‖weight‖ too.

    Returns:
      ``{"grad_norms": …}``, ``{"update_ratios": …}`` if asked for, and ``{"rms": …}`` unless that is empty.
    """
    found = {"grad_norms": by_name(jax.tree.map_with_path(tensor_norm, widened(grads)))}
    if update_ratios:
        ratios = jax.tree.map_with_path(update_ratio, widened(updates), widened(params))
        found["update_ratios"] = by_name(ratios)
    if measured := rms(grads, opt_state):
        found["rms"] = measured
    return found


def update_ratio(path: KeyPath, update: jax.Array, p: jax.Array) -> jax.Array:
    """‖update‖ / ‖p‖ of each layer's tensor, (*layers, …) to (*layers); 0 where the update is 0."""
    norm = tensor_norm(path, update)
    return jnp.where(norm == 0, 0.0, norm / tensor_norm(path, p))


# --- on the host --------------------------------------------------------------------------------------


def flat(metrics: dict[str, Any]) -> dict[str, float]:
    """All metrics as scalars; those of tensors become ``rms/<name>[/<layer>]``, with a ``rms/max``.

    The largest number is NaN if one of them is.

    Args:
      metrics: from names to numpy scalars, or to dicts of (*layers) arrays.
    """
    scalars = {}
    for key, value in metrics.items():
        if isinstance(value, dict):
            values = per_layer(value)
            scalars |= {f"{key}/{name}": number for name, number in values.items()}
            scalars[f"{key}/max"] = largest(values)[0][1]
        else:
            scalars[key] = float(value)
    return scalars


def of_tensors(metrics: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Those of the metrics that are statistics of tensors, such as ``rms``, as numbers `per_layer`.

    Args:
      metrics: as in `flat`.
    """
    return {key: per_layer(value) for key, value in metrics.items() if isinstance(value, dict)}


def per_layer(tensors: dict[str, Any]) -> dict[str, float]:
    """One number for each layer: ``layers/mlp/up_proj/kernel/3`` is layer 3 of a (*layers) array."""
    found = {}
    for name, values in tensors.items():
        for index, value in np.ndenumerate(np.asarray(values)):
            found["/".join([name, *map(str, index)])] = float(value)
    return found


def largest(tensors: dict[str, float], count: int = 1) -> list[tuple[str, float]]:
    """The tensors with the largest numbers; NaN comes first."""
    order = sorted(tensors, key=lambda name: (not np.isnan(tensors[name]), -tensors[name]))
    return [(name, tensors[name]) for name in order[:count]]
