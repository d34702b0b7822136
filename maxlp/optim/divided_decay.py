"""Weight decay that depends on the optimizer's rescaling."""

from typing import Any

import jax
import optax

from maxlp.optim.config import Divisors
from maxlp.optim.tree_utils import over_tensor


def divide_decay(
    rescale: optax.GradientTransformation, decay: optax.GradientTransformation, divisors: Divisors
) -> optax.GradientTransformation:
    """`optax.chain(rescale, decay)` with the decay of each tensor divided by a number from `rescale`.

    Args:
      rescale: any rescaling, bare or wrapped.
      decay: `optax.add_decayed_weights`.
      divisors: maps the new state of `rescale` to one divisor per tensor, (*layers) for each parameter.
    """

    def init(params: optax.Params) -> Any:
        return rescale.init(params), decay.init(params)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        updates, rescaled = rescale.update(updates, state[0], params)
        decays, decayed = decay.update(optax.tree.zeros_like(updates), state[1], params)

        def add(u: jax.Array, d: jax.Array, divisor: jax.Array) -> jax.Array:
            return u + (d / over_tensor(divisor, d)).astype(u.dtype)

        return jax.tree.map(add, updates, decays, divisors(rescaled)), (rescaled, decayed)

    return optax.GradientTransformation(init, update)
