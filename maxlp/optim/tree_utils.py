"""Layers in parameter trees, states in optimizer states, and the names of both."""

import re
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, KeyPath

from maxlp.schema import NotEmpty, RegularExpression

Targets = Annotated[tuple[Annotated[str, RegularExpression()], ...], NotEmpty()]

# The default of all targets: the matrices of the blocks, without embeddings, head and norms.
HIDDEN_KERNELS = ("(attn|mlp)/.*kernel$",)


def layer_axes(path: KeyPath) -> int:
    """The number of leading layer axes of a parameter: 1 below `layers`, else 0.

    A stack of L layers is one (L, …) array to the compiler but L tensors to the optimizer: per-tensor
    quantities (an RMS, a subspace, a scale) are computed for each layer.
    """
    return int(DictKey("layers") in path)


def name_of(path: KeyPath) -> str:
    """A parameter's name, such as `layers/attn/q_proj/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaf_name(path: KeyPath) -> str:
    """The last part of a parameter's name, such as `kernel`, `embedding`, `scale` or `bias`."""
    return name_of(path[-1:])


def matches(path: KeyPath, patterns: Sequence[str]) -> bool:
    """Whether any of the regular expressions is found in the parameter's name."""
    return any(re.search(pattern, name_of(path)) for pattern in patterns)


def widened(tree: Any) -> Any:
    """The tree with its arrays in float32; float64 arrays keep their dtype."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def clip_factor(grads: optax.Updates, max_norm: float) -> jax.Array:
    """The factor, at most 1, that scales gradients down to a global norm: a float32 scalar."""
    return jnp.minimum(1.0, max_norm / jnp.maximum(optax.tree.norm(widened(grads)), 1e-30))


def tensor_axes(path: KeyPath, x: jax.Array) -> tuple[int, ...]:
    """The dims of each layer's tensor in the parameter at a path, (*layers, …)."""
    return tuple(range(layer_axes(path), x.ndim))


def tensor_norm(path: KeyPath, x: jax.Array) -> jax.Array:
    """The L2 norm of each layer's tensor, (*layers, …) to (*layers)."""
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=tensor_axes(path, x)))


def per_tensor(params: Any, value: float) -> Any:
    """A number for each layer's tensor of the parameters, float32 (*layers)."""
    return jax.tree.map_with_path(
        lambda path, p: jnp.full(p.shape[: layer_axes(path)], value, jnp.float32), params
    )


def over_tensor(x: jax.Array, like: jax.Array) -> jax.Array:
    """Reshapes one number per layer, (*layers), to broadcast against `like`, (*layers, …)."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


def zero_unless(condition: jax.typing.ArrayLike, x: jax.Array) -> jax.Array:
    """x where the condition, which broadcasts against it, is true; else 0.

    Without the barrier XLA would broadcast the 0 to an array, merge it with the zeros from which a scan
    accumulates gradients, and keep it in memory for the step.
    """
    return jnp.where(condition, x, jax.lax.optimization_barrier(jnp.zeros((), x.dtype)))


def by_name(tree: Any) -> dict[str, jax.Array]:
    """The arrays of a tree by `name_of`."""
    return {name_of(path): x for path, x in jax.tree.flatten_with_path(tree)[0]}


def find_states(opt_state: Any, *kinds: type) -> list[tuple[KeyPath, Any]]:
    """All states of the given types inside an optimizer state, each with its path."""
    nodes, _ = jax.tree.flatten_with_path(opt_state, is_leaf=lambda node: isinstance(node, kinds))
    return [(path, node) for path, node in nodes if isinstance(node, kinds)]


def state_bytes(state: Any) -> int:
    """The size in bytes of a tree of arrays or `jax.ShapeDtypeStruct`s, counting every shard once."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
