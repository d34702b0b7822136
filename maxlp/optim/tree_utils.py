"""Where a tensor's layers are, and where a state's moments are."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, GetAttrKey, KeyPath

LayerAxes = Callable[[KeyPath], int]

# The matrices that GaLore and Muon are for: no embedding, no head, no norm.
HIDDEN_KERNELS = ("(attn|mlp)/.*kernel$",)
MOMENTS = ("mu", "nu")  # what optax calls the first and the second moment, in every state that has them


def layer_axes(path: KeyPath) -> int:
    """How many leading axes of a parameter count its layers: 1 below `layers`, else 0.

    A stack of L layers is one array (L, …) for the compiler and L tensors for the optimizer: what is
    computed per tensor (an RMS, a subspace, a scale) is computed for each of them.
    """
    return int(DictKey("layers") in path)


def name_of(path: KeyPath) -> str:
    """`layers/attn/q_proj/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def widened(tree: Any) -> Any:
    """The arrays of a tree in float32, or in float64 if that is what they are."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def matches(path: KeyPath, patterns: Sequence[str]) -> bool:
    """Whether one of the regular expressions is found in the parameter's name."""
    return any(re.search(pattern, name_of(path)) for pattern in patterns)


def tensor_mean(x: jax.Array, axes: int) -> jax.Array:
    """Mean over a tensor, for each of its layers: (*layers, …) → (*layers)."""
    return jnp.mean(x, axis=tuple(range(axes, x.ndim)))


def over_tensor(x: jax.Array, like: jax.Array) -> jax.Array:
    """Brings one number a layer, (*layers), to the rank of `like`, (*layers, …)."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


def map_moments(fn: Callable[..., Any], state: Any, *rest: Any, is_leaf: Callable | None = None) -> Any:
    """`state` with `fn(moment, path, leaf, *rest)` in place of each leaf of a moment.

    Args:
        fn: takes the moment's name (one of `MOMENTS`), the path of the parameter, the leaf of the state,
            and the leaves of `rest` at the same place.
        state: an optax state; moments are recognised by the name of their field.
        rest: trees with the structure of `state`.
        is_leaf: as in `jax.tree.map`.
    """

    def one(path: KeyPath, leaf: Any, *others: Any) -> Any:
        for i, key in enumerate(path):
            if isinstance(key, GetAttrKey) and key.name in MOMENTS:
                return fn(key.name, path[i + 1 :], leaf, *others)
        return leaf

    return jax.tree.map_with_path(one, state, *rest, is_leaf=is_leaf)
