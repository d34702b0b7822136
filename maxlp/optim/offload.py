"""Optimizer state in pinned host memory, around any transformation.

If a program updates one tensor after the other, a device holds the state of a tensor only during its
update: `core.fused_backward` (released gradients) updates layer by layer. In a step that updates all at
once the compiler chooses the order.
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
        # The state is moved only when the gradients exist: until then the backward pass needs the memory.
        updates, state = jax.lax.optimization_barrier((updates, state))
        updates, state = inner.update(updates, move(state, jax.memory.Space.Device), params, **extra)
        return updates, move(state, jax.memory.Space.Host)

    return optax.GradientTransformationExtraArgs(init, update)


def move(state: Any, space: jax.memory.Space) -> Any:
    """Moves a state, except for its scalars, to a memory space."""
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, state)
