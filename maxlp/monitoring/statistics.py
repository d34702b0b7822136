"""What a train step measures of each tensor: RMS_t and the norm of its gradient.

Results are dicts from names such as ``layers/attn/q_proj/kernel`` to float32 arrays (*layers): one array
holds a number for each layer of a stack, so that the host fetches a few arrays instead of hundreds. There,
`flat` turns them into scalars.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxlp.optim.tree_utils import layer_axes, name_of, tensor_mean, widened

Tensors = dict[str, jax.Array]
MeasureRMS = Callable[[optax.Updates, optax.OptState], Tensors]


# --- inside the compiled step -------------------------------------------------------------------------


def tensor_statistics(
    grads: optax.Updates, opt_state: optax.OptState, *, rms: MeasureRMS
) -> dict[str, Tensors]:
    """RMS_t and gradient norms of one step.

    Args:
      grads: gradients before clipping.
      opt_state: state of the optimizer after the update.
      rms: the optimizer's function from (grads, opt_state) to the RMS_t of each tensor; empty where the
        optimizer does not define it.

    Returns:
      ``{"grad_norms": …}``, and ``{"rms": …}`` unless that is empty.
    """
    found = {"grad_norms": tensor_norms(grads)}
    if measured := rms(grads, opt_state):
        found["rms"] = measured
    return found


def tensor_norms(tree: Any) -> Tensors:
    """L2 norm of each tensor, for each layer of a stack."""

    def norm(path: Any, x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(x), axis=tuple(range(layer_axes(path), x.ndim))))

    return _by_name(jax.tree.map_with_path(norm, widened(tree)))


def _by_name(tree: Any) -> Tensors:
    return {name_of(path): x for path, x in jax.tree.flatten_with_path(tree)[0]}


# --- RMS_t of today's optimizers ----------------------------------------------------------------------


def optimizer_rms(
    grads: optax.Updates, opt_state: optax.OptState, *, b2: float, eps: float, clip_norm: float = 0.0
) -> Tensors:
    """RMS_t of any optimizer of `optim.make_tx` that defines it."""
    return rms_of(opt_state) or second_moment_rms(grads, opt_state, b2=b2, eps=eps, clip_norm=clip_norm)


def rms_of(opt_state: optax.OptState) -> Tensors:
    """The RMS_t of the last update, which StableAdamW keeps in its state; {} of other optimizers.

    It is what was clipped with: under GaLore, that of the projected gradient.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, "rms"))
    return next((_by_name(node.rms) for node in nodes if hasattr(node, "rms")), {})


def second_moment_rms(
    grads: optax.Updates, opt_state: optax.OptState, *, b2: float, eps: float, clip_norm: float = 0.0
) -> Tensors:
    """RMS_t = √mean(g² / max(v̂, eps²)) of an optimizer with Adam's second moment, after its update.

    {} where there is none. Left out are tensors whose moment is not stored as it is: projected, or in few
    bits. (To see RMS_t there, take stable_adamw with clip_threshold=inf: that is AdamW, measured.)
    """
    stop = lambda x: hasattr(x, "nu") or hasattr(x, "subspaces")  # noqa: E731
    nodes = [node for node in jax.tree.leaves(opt_state, is_leaf=stop) if hasattr(node, "nu")]
    if not nodes or not hasattr(nodes[0], "count"):
        return {}
    moments = dict(jax.tree.flatten_with_path(nodes[0].nu)[0])
    debias = 1 - b2 ** nodes[0].count.astype(jnp.float32)
    scale = 1.0
    if clip_norm:
        scale = jnp.minimum(1.0, clip_norm / jnp.maximum(optax.tree.norm(grads), 1e-30))
    rms = {}
    for path, g in jax.tree.flatten_with_path(widened(grads))[0]:
        v = moments.get(path)
        if v is not None and v.shape == g.shape:
            ratio = jnp.square(scale * g) / jnp.maximum(v.astype(g.dtype) / debias, eps**2)
            rms[name_of(path)] = jnp.sqrt(tensor_mean(ratio, layer_axes(path)))
    return rms


# --- on the host --------------------------------------------------------------------------------------


def flat(metrics: dict[str, Any]) -> dict[str, float]:
    """All metrics as scalars; those of tensors become ``rms/<name>[/<layer>]``, with a ``rms/max``.

    Args:
      metrics: from names to numpy scalars, or to dicts of (*layers) arrays.
    """
    scalars = {}
    for key, value in metrics.items():
        if isinstance(value, dict):
            values = per_layer(value)
            scalars |= {f"{key}/{name}": number for name, number in values.items()}
            scalars[f"{key}/max"] = max(values.values(), default=0.0)
        else:
            scalars[key] = float(value)
    return scalars


def per_layer(tensors: dict[str, Any]) -> dict[str, float]:
    """One number for each layer: ``layers/mlp/up_proj/kernel/3`` is layer 3 of a (*layers) array."""
    found = {}
    for name, values in tensors.items():
        for index, value in np.ndenumerate(np.asarray(values)):
            found["/".join([name, *map(str, index)])] = float(value)
    return found


def largest(tensors: dict[str, float], count: int = 1) -> list[tuple[str, float]]:
    """The tensors with the largest numbers; NaN and infinity come first."""
    order = sorted(tensors, key=lambda name: (np.isfinite(tensors[name]), -tensors[name]))
    return [(name, tensors[name]) for name in order[:count]]
