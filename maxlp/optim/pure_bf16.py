"""Parameters kept in bfloat16 alone, without a float32 copy.

bfloat16 has 8 significant bits: an update below 1/512 of a parameter is rounded away, and training stalls
as soon as the learning rate decays. Two ways out, both 2 or 4 bytes a parameter instead of 6:

* ``stochastic``: the sum is rounded up with the probability of its distance (Zamirai et al. 2020,
  arXiv:2010.06192). Its expectation is the exact sum; no state, some noise.
* ``kahan``: what rounding took away is kept in a second bfloat16 and added to the next update (Kahan 1965;
  Zamirai et al., same; pure bfloat16 training: Dobler & de Melo 2024, arXiv:2408.15793). Together that is
  about 16 significant bits, without noise.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

METHODS = ("stochastic", "kahan")


class PureBf16State(NamedTuple):
    """State of the inner transformation, and what rounding took away: None, or bfloat16 like ``params``."""

    count: jax.typing.ArrayLike
    inner: optax.OptState
    lost: Any


def pure_bf16(
    inner: optax.GradientTransformation, *, method: str = "stochastic", seed: int = 0
) -> optax.GradientTransformation:
    """A whole optimizer chain, learning rate included, for bfloat16 parameters.

    `inner` sees gradients and parameters in float32, and its state is what it is for float32 parameters
    (`low_bit` goes inside). The updates that come out are float32 and such that `optax.apply_updates`
    gives the rounded parameters exactly: they are differences of two bfloat16 numbers. (Where a parameter
    shrinks to less than 2^-16 of itself in one update, the difference may round in its 24th bit.)

    Args:
        inner: what computes the updates to add to parameters.
        method: one of `METHODS`.
        seed: of the stochastic rounding; its noise depends on the seed, the number of the update and the
            parameter, not on the devices.

    Raises:
        ValueError: an unknown method, or, at `init`, parameters that are not bfloat16.
    """
    if method not in METHODS:
        raise ValueError(f"param_rounding={method!r} is unknown, choose one of: {', '.join(METHODS)}")

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params: optax.Params) -> PureBf16State:
        for path, p in jax.tree.leaves_with_path(params):
            if p.dtype != jnp.bfloat16:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(
                    f"param_rounding={method!r} is for bfloat16 parameters, {name} is {p.dtype}; "
                    "set model.param_dtype='bfloat16' or param_rounding=None"
                )
        lost = jax.tree.map(jnp.zeros_like, params) if method == "kahan" else None
        return PureBf16State(jnp.zeros([], jnp.int32), inner.init(wide(params)), lost)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        assert params is not None, "what is rounded is the parameter after the update"
        old = wide(params)
        updates, inner_state = inner.update(wide(updates), state.inner, old)
        if method == "kahan":
            wanted = jax.tree.map(lambda u, c: u + c.astype(jnp.float32), updates, state.lost)
            deltas = jax.tree.map(lambda p, u: _nearest(p + u) - p, old, wanted)
            lost = jax.tree.map(lambda u, d: (u - d).astype(jnp.bfloat16), wanted, deltas)
        else:
            key = jax.random.fold_in(jax.random.key(seed), state.count)
            leaves, structure = jax.tree.flatten(updates)
            keys = structure.unflatten(jax.random.fold_in(key, i) for i in range(len(leaves)))
            deltas = jax.tree.map(lambda p, u, k: _stochastic(p, u, k) - p, old, updates, keys)
            lost = None
        return deltas, PureBf16State(optax.safe_increment(state.count), inner_state, lost)

    return optax.GradientTransformation(init, update)


# Rounded on the bits: XLA may take a conversion to bfloat16 and back for the identity.


def _nearest(x: jax.Array) -> jax.Array:
    """float32 to the nearest bfloat16, ties to even, still as float32."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _stochastic(p: jax.Array, u: jax.Array, key: jax.Array) -> jax.Array:
    """``p + u`` to one of its two neighbours in bfloat16, the likelier the nearer, still as float32."""
    noise = jax.random.bits(key, p.shape, jnp.uint16).astype(jnp.uint32)
    exact = p + u
    bits = jax.lax.bitcast_convert_type(exact, jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isnan(exact), exact, rounded)
