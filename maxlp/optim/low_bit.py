"""Adam's moments in 8 or 16 bits, around any transformation that has them.

Between two updates the moments are kept as codes (see `codes`); the inner transformation sees them in
float32. Compiled, the float32 form of one moment lives as long as its own update.
"""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from maxlp.numerics.blockwise import FORMATS, Blocks, decode, encode
from maxlp.optim.tree_utils import MOMENTS, LayerAxes, layer_axes, map_moments


class LowBitState(NamedTuple):
    """The state of the inner transformation with `Blocks` in the place of its moments."""

    count: jax.typing.ArrayLike
    inner: optax.OptState


def low_bit(
    inner: optax.GradientTransformation,
    *,
    mu: str = "float8_e4m3fn",
    nu: str = "float8_e5m2",
    block_size: int = 0,
    min_size: int = 4096,
    seed: int = 0,
    layer_axes: LayerAxes = layer_axes,
) -> optax.GradientTransformation:
    """The transformation with its moments stored in few bits.

    The first moment needs precision and the second one range, for its root divides: Fishman et al. 2024
    (arXiv:2409.12517, section 5) take e4m3 and e5m2, with a power-of-two scale for each tensor. With
    `mu = nu = "dynamic8"`, blocks of 256 and tensors below 4096 left alone it is the state of Dettmers
    et al. 2021 (arXiv:2110.02861), but for where blocks lie: in one row each, which keeps the sharding
    of the tensor. A nonzero second moment never becomes zero.

    Args:
        inner: any transformation whose state has fields `mu` or `nu`; if one of the wrappers is GaLore,
            this one goes around it.
        mu: format of the first moment, a key of `codes.FORMATS` or "float32" to leave it.
        nu: format of the second moment.
        block_size: entries in a row that share a scale; 0: one scale for a tensor of a layer.
        min_size: tensors of fewer entries (in one layer) are left alone: norms, biases.
        seed: of the stochastic rounding of bfloat16 and float8_e5m2.
        layer_axes: how many leading axes of the parameter at a path count its layers.

    Raises:
        ValueError: an unknown format, or, at `init`, a state without moments.
    """
    formats = {"mu": mu, "nu": nu}
    for key, name in formats.items():
        if name not in ("float32", *FORMATS) or name == "int4":
            choices = ", ".join(["float32", *FORMATS]).replace("int4, ", "")
            raise ValueError(f"{key}={name!r} is unknown, choose one of: {choices}")
    if block_size < 0:
        raise ValueError(f"{block_size=} must not be negative (0: one scale a tensor)")

    def is_blocks(x: Any) -> bool:
        return isinstance(x, Blocks)

    def packed(state: optax.OptState, count: Any) -> optax.OptState:
        numbers = itertools.count()

        def one(moment: str, path: KeyPath, x: jax.Array) -> Any:
            axes = layer_axes(path)
            if formats[moment] == "float32" or math.prod(x.shape[axes:]) < min_size:
                return x
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), count), next(numbers))
            return encode(
                x,
                formats[moment],
                signed=moment == "mu",
                block_size=block_size,
                layer_axes=axes,
                key=key,
            )

        return map_moments(one, state)

    def unpacked(state: optax.OptState) -> optax.OptState:
        def one(moment: str, path: KeyPath, x: Any) -> jax.Array:
            del path
            if not is_blocks(x):
                return x
            return decode(x, formats[moment], signed=moment == "mu", block_size=block_size)

        return map_moments(one, state, is_leaf=is_blocks)

    def init(params: optax.Params) -> LowBitState:
        # Behind the barrier, for XLA would encode the zeros while it compiles.
        state = jax.lax.optimization_barrier(inner.init(params))
        found = set()
        map_moments(lambda moment, path, x: found.add(moment), state)
        if not found and jax.tree.leaves(params):
            raise ValueError(
                f"low_bit stores {' and '.join(MOMENTS)}, which this optimizer's state has not"
            )
        count = jnp.zeros([], jnp.int32)
        return LowBitState(count, packed(state, count))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        updates, new = inner.update(updates, unpacked(state.inner), params)
        count = optax.safe_increment(state.count)
        return updates, LowBitState(count, packed(new, count))

    return optax.GradientTransformation(init, update)


def state_bytes(state: Any) -> int:
    """Bytes of all arrays of a state (arrays or `jax.ShapeDtypeStruct`), over all devices once."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def bytes_per_parameter(state: Any, params: optax.Params) -> float:
    """Bytes of optimizer state for each parameter: 8 for Adam in float32."""
    return state_bytes(state) / sum(p.size for p in jax.tree.leaves(params))
