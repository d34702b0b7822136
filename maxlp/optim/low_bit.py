"""Adam's moments in 8 or 16 bits, around any transformation that has them.

Between updates the moments are stored as codes (see `maxlp.numerics.blockwise`); the inner transformation
sees them in float32. In a compiled step the float32 form of a moment lives only during its own update.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from maxlp.numerics.blockwise import decode, encode
from maxlp.numerics.formats import Quantized
from maxlp.numerics.rounding import key_for
from maxlp.optim.config import LowBitConfig
from maxlp.optim.partition import map_moments
from maxlp.optim.tree_utils import layer_axes, name_of


class LowBitState(NamedTuple):
    """The state of the inner transformation, with `Quantized` in place of its moments."""

    count: jax.typing.ArrayLike
    inner: optax.OptState


def low_bit(inner: optax.GradientTransformation, config: LowBitConfig) -> optax.GradientTransformation:
    """The transformation with its moments stored in few bits.

    The first moment needs precision; the second needs range, because its root is a divisor: Fishman et
    al. 2024 (arXiv:2409.12517, section 5) use e4m3 and e5m2, with a power-of-two scale for each tensor.
    With dynamic8 for both, blocks of 256, and tensors below 4096 entries left as they are, the state is
    that of Dettmers et al. 2021 (arXiv:2110.02861), except that a block never spans two rows, which
    preserves the sharding of the tensor. A nonzero second moment never becomes zero.

    Args:
      inner: a transformation whose state has moments `mu` or `nu`; GaLore goes inside.
      config: formats and block size.
    """

    def init(params: optax.Params) -> LowBitState:
        # Without the barrier XLA would encode the zeros at compile time.
        state = jax.lax.optimization_barrier(inner.init(params))
        found: list = []
        map_moments(lambda *moment: found.append(moment), state)
        assert found or not jax.tree.leaves(params), "the inner transformation has no moments"
        count = jnp.zeros([], jnp.int32)
        return LowBitState(count, _packed(state, count, config))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        updates, new = inner.update(updates, _unpacked(state.inner, config), params)
        count = optax.safe_increment(state.count)
        return updates, LowBitState(count, _packed(new, count, config))

    return optax.GradientTransformation(init, update)


def warnings(state: optax.OptState, config: LowBitConfig) -> list[str]:
    """A line if all moments are below `min_size`, so that none is encoded."""
    encoded: list[bool] = []
    map_moments(lambda moment, path, x: encoded.append(_is_encoded(x)), state, is_leaf=_is_encoded)
    if any(encoded):
        return []
    return [
        f"optimizer.low_bit.min_size={config.min_size} is above the size of every moment, and none is "
        "stored in few bits; lower it"
    ]


def _packed(state: optax.OptState, count: Any, config: LowBitConfig) -> optax.OptState:
    """The state with its moments encoded; stochastic rounding depends on the seed and `count`."""
    key = jax.random.fold_in(jax.random.key(config.seed), count)

    def one(moment: str, path: KeyPath, x: jax.Array) -> Any:
        axes, name = layer_axes(path), getattr(config, moment)
        if name == "float32" or math.prod(x.shape[axes:]) < max(config.min_size, 2):
            return x
        own, signed = key_for(key, f"{moment}/{name_of(path)}"), moment == "mu"
        return encode(x, name, signed=signed, block_size=config.block_size, layer_axes=axes, key=own)

    return map_moments(one, state)


def _unpacked(state: optax.OptState, config: LowBitConfig) -> optax.OptState:
    """The state with its moments in float32."""

    def one(moment: str, path: KeyPath, x: Any) -> jax.Array:
        del path
        if not _is_encoded(x):
            return x
        return decode(x, getattr(config, moment), signed=moment == "mu", block_size=config.block_size)

    return map_moments(one, state, is_leaf=_is_encoded)


def _is_encoded(x: Any) -> bool:
    return isinstance(x, Quantized)
