"""Parameters stored in bfloat16 alone, without a float32 master copy.

bfloat16 has 8 significant bits: an update below 1/512 of a parameter is rounded away, and training stalls
as soon as the learning rate decays. Four remedies, at 2, 3 or 4 bytes per parameter instead of 6:

* `stochastic`: the sum is rounded up or down with probability proportional to proximity (Zamirai et al.
  2020, arXiv:2010.06192). Its expectation is the exact sum; it needs no state and adds some noise.
* `residual`: the rounding error is kept in an int8, in units of 1/254 of the distance between neighbouring
  bfloat16 numbers, half of which it never exceeds (FlashOptim's master weights; Ortiz et al. 2026,
  arXiv:2602.23349). Together that is about 16 significant bits, without noise.
* `kahan`: the rounding error is kept in a second bfloat16 and added to the next update (Kahan 1965;
  Zamirai et al.; pure bfloat16 training: Dobler & de Melo 2024, arXiv:2408.15793). Together that is at
  least 16 significant bits, and more where the error is small.
* `float16_master`: a master copy in float16 with a scale for each tensor (FP8-LM: Peng et al. 2023,
  arXiv:2310.18313; Fishman et al. 2024, arXiv:2409.12517), to which updates are added and rounded to
  nearest. That is 11 significant bits, and fewer below 2^-29 of the tensor's largest magnitude.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.random import threefry2x32_p
from jax.tree_util import KeyPath

from maxlp.numerics.blockwise import decode, encode
from maxlp.numerics.formats import Quantized
from maxlp.numerics.rounding import drop_bits, key_for
from maxlp.optim.config import BF16_ROUNDINGS
from maxlp.optim.tree_utils import layer_axes, name_of, widened

_LOST = {"kahan": jnp.bfloat16, "residual": jnp.int8}  # dtypes of the rounding errors


class PureBf16State(NamedTuple):
    """The number of updates, the state of the inner transformation, and what the method keeps.

    Attributes:
      lost: the rounding errors of `kahan` and `residual`, shaped like `params`; else None.
      master: `Quantized` for each parameter, with `float16_master`; else None.
    """

    count: jax.typing.ArrayLike
    inner: optax.OptState
    lost: Any
    master: Any = None


def pure_bf16(
    inner: optax.GradientTransformation, *, method: str, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Wraps a whole optimizer chain, learning rate included, for bfloat16 parameters.

    `inner` sees gradients and parameters in float32 (with `residual`, the rounding errors are part of the
    parameters; with `float16_master`, it sees the masters), and its state is the same as for float32
    parameters (`low_bit` goes inside). The resulting updates are float32 differences of two bfloat16
    numbers, so that `optax.apply_updates` gives the rounded parameters exactly. (Where a parameter shrinks
    to less than 2^-16 of itself in one update, the difference may round in its 24th bit.)

    Args:
      inner: computes the updates to add to the parameters.
      method: one of `config.BF16_ROUNDINGS`.
      seed: seed of the stochastic rounding; the noise depends on the seed, the number of the update and
        the parameter's name, not on the devices.

    Raises:
      ValueError: at `init`, parameters that are not bfloat16.
    """
    assert method in BF16_ROUNDINGS, method

    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> PureBf16State:
        for path, p in jax.tree.leaves_with_path(params):
            if p.dtype != jnp.bfloat16:
                raise ValueError(
                    f"param_rounding={method!r} is for bfloat16 parameters, {name_of(path)} is {p.dtype}; "
                    "set model.param_dtype='bfloat16' or param_rounding=None"
                )
        lost = optax.tree.zeros_like(params, dtype=_LOST[method]) if method in _LOST else None
        master = _masters(params) if method == "float16_master" else None
        return PureBf16State(jnp.zeros([], jnp.int32), inner.init(widened(params)), lost, master)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any) -> Any:
        assert params is not None, "the parameter after the update is what gets rounded"
        stored = old = widened(params)
        if method == "residual":
            old = jax.tree.map(_with_residual, stored, state.lost)
        elif method == "float16_master":
            old = jax.tree.map(lambda _, master: decode(master, "float16"), stored, state.master)
        updates, inner_state = inner.update(widened(updates), state.inner, old, **extra)
        lost = master = None
        if method == "kahan":
            wanted = jax.tree.map(lambda u, c: u + c.astype(jnp.float32), updates, state.lost)
            deltas = jax.tree.map(lambda p, u: _nearest(p + u) - p, old, wanted)
            lost = jax.tree.map(lambda u, d: (u - d).astype(jnp.bfloat16), wanted, deltas)
        elif method in ("residual", "float16_master"):
            wanted = jax.tree.map(jnp.add, old, updates)
            new = jax.tree.map(_nearest, wanted)
            deltas = jax.tree.map(jnp.subtract, new, stored)
            if method == "residual":
                lost = jax.tree.map(_residual, wanted, new)
            else:
                master = _masters(wanted)
        else:
            key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), state.count)

            def delta(path: KeyPath, p: jax.Array, u: jax.Array) -> jax.Array:
                return _stochastic(p + u, key_for(key, name_of(path))) - p

            deltas = jax.tree.map_with_path(delta, old, updates)
        return deltas, PureBf16State(optax.safe_increment(state.count), inner_state, lost, master)

    return optax.GradientTransformationExtraArgs(init, update)


def _masters(params: Any) -> Any:
    """`Quantized` in float16 for each parameter; each layer has the scale of its own largest magnitude."""

    def one(path: KeyPath, p: jax.Array) -> Quantized:
        return encode(p, "float16", layer_axes=layer_axes(path))

    return jax.tree.map_with_path(one, params)


# The bits are rounded explicitly: XLA may drop a conversion to bfloat16 and back.


def _nearest(x: jax.Array) -> jax.Array:
    """float32 to the nearest bfloat16, ties to even; the result is float32."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _stochastic(x: jax.Array, key: jax.Array) -> jax.Array:
    """float32 to a neighbouring bfloat16, with probability proportional to proximity; float32."""
    return drop_bits(x, 16, "stochastic", _noise(key, x.shape))


def _noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Random uint16 from Threefry, whose counters are the row and the column of each number.

    A barrier ties the counters to the key. Otherwise XLA would compute them once for all arrays of a shape,
    as it does for `jax.random.bits`, and fuse the updates of these arrays into one loop, which cannot
    update all their moments in place.
    """
    counters = [jax.lax.iota(jnp.uint32, size) for size in shape or (1,)]
    (k1, k2), counters = jax.lax.optimization_barrier((jax.random.key_data(key), counters))
    *rows, column = jnp.meshgrid(*counters, indexing="ij", sparse=True)
    row = functools.reduce(lambda row, i: row * i.size + i, rows, jnp.zeros_like(column))
    bits, _ = threefry2x32_p.bind(k1, k2, *jnp.broadcast_arrays(row, column))
    return bits.astype(jnp.uint16).reshape(shape)


def _residual(exact: jax.Array, rounded: jax.Array) -> jax.Array:
    """int8: the rounding error in units of `_unit`, at most 127 of them in magnitude."""
    return jnp.round((exact - rounded) / _unit(rounded)).astype(jnp.int8)


def _with_residual(rounded: jax.Array, residual: jax.Array) -> jax.Array:
    """float32: the inverse of `_residual`."""
    return rounded + residual.astype(jnp.float32) * _unit(rounded)


def _unit(x: jax.Array) -> jax.Array:
    """1/254 of the distance from bfloat16 numbers to the next larger ones, in float32.

    Numbers below 2^-100, whose own units would be subnormal, get that of 2^-100.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & 0x7F800000
    return jnp.maximum(jax.lax.bitcast_convert_type(bits, jnp.float32), 2.0**-100) * (2.0**-7 / 254)
