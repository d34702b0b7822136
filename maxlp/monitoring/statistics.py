"""What a compiled step can tell of each tensor: RMS_t and the norm of its gradient.

Results are dicts from names such as ``layers/attn/q_proj/kernel`` to float32 arrays (*layers): a number
for each layer of a stack, so that a few arrays come to the host and not hundreds. `flat` makes scalars of
them, there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxlp.optim.tree_utils import layer_axes, name_of, tensor_mean, widened

Tensors = dict[str, jax.Array]


def tensor_statistics(
    grads: optax.Updates, opt_state: optax.OptState, *, b2: float, eps: float, clip_norm: float = 0.0
) -> dict[str, Tensors]:
    """RMS_t and gradient norms of one step.

    Args:
        grads: before clipping.
        opt_state: after the update.
        b2, eps, clip_norm: of `optim.make_tx`.

    Returns:
        {"grad_norms": …} and, of an optimizer that has one, {"rms": …}.
    """
    found = {"grad_norms": tensor_norms(grads)}
    if rms := rms_of(opt_state) or second_moment_rms(grads, opt_state, b2=b2, eps=eps, clip_norm=clip_norm):
        found["rms"] = rms
    return found


def tensor_norms(tree: Any) -> Tensors:
    """L2 norm of each tensor."""

    def norm(path: Any, x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(x), axis=tuple(range(layer_axes(path), x.ndim))))

    return _by_name(jax.tree.map_with_path(norm, widened(tree)))


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


def _by_name(tree: Any) -> Tensors:
    return {name_of(path): x for path, x in jax.tree.flatten_with_path(tree)[0]}


# --- on the host --------------------------------------------------------------------------------------


def flat(metrics: dict[str, Any]) -> dict[str, float]:
    """Scalars, with the numbers of tensors under ``rms/<name>`` or ``rms/<name>/<layer>``, and ``rms/max``.

    Args:
        metrics: names to numpy scalars or to dicts of (*layers) arrays.
    """
    scalars = {}
    for key, value in metrics.items():
        if isinstance(value, dict):
            values = numbers(value)
            scalars |= {f"{key}/{name}": number for name, number in values.items()}
            scalars[f"{key}/max"] = max(values.values(), default=0.0)
        else:
            scalars[key] = float(value)
    return scalars


def numbers(tensors: dict[str, Any]) -> dict[str, float]:
    """(*layers) arrays as one number each: ``layers/mlp/up_proj/kernel/3`` is layer 3."""
    found = {}
    for name, values in tensors.items():
        for index, value in np.ndenumerate(np.asarray(values)):
            found["/".join([name, *map(str, index)])] = float(value)
    return found


def largest(tensors: dict[str, float], count: int = 1) -> list[tuple[str, float]]:
    """The tensors of the largest numbers, NaN and infinity before all others."""
    order = sorted(tensors, key=lambda name: (np.isfinite(tensors[name]), -tensors[name]))
    return [(name, tensors[name]) for name in order[:count]]
