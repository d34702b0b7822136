"""Optimizer state in pinned memory of the host, around any transformation.

A device then holds the state of a tensor only while it updates that tensor, where the program updates one
after the other: `core.fused_backward` (released gradients) updates layer by layer. In a step that updates
all at once the compiler chooses the order.
"""

from typing import Any

import jax
import optax


def offload(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The transformation with its state on the host, except for scalars.

    The state is the same otherwise, so that a checkpoint of one continues the other.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> Any:
        return move(inner.init(params), jax.memory.Space.Host)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any) -> Any:
        # Not before the gradients exist: until then the backward pass needs the memory.
        updates, state = jax.lax.optimization_barrier((updates, state))
        updates, state = inner.update(updates, move(state, jax.memory.Space.Device), params, **extra)
        return updates, move(state, jax.memory.Space.Host)

    return optax.GradientTransformationExtraArgs(init, update)


def move(state: Any, space: jax.memory.Space) -> Any:
    """The state with all but its scalars in a memory."""
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, state)
