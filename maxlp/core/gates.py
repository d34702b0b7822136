"""Gates: what decides at the end of a step whether the step counts."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp


class Gate(Protocol):
    """Accepts or rejects a step; what it remembers is part of the training state.

    A rejected step leaves params, model_state and opt_state unchanged, to the bit.
    """

    def init(self) -> dict[str, jax.Array]:
        """What the gate remembers before the first step."""
        ...

    def accept(self, state: dict[str, jax.Array], metrics: dict[str, Any]) -> tuple[jax.Array, dict, dict]:
        """Accepts or rejects a step by its metrics.

        Returns:
          a bool scalar, what to remember, and more metrics.
        """
        ...


Gates = Mapping[str, Gate]
NO_GATES: Gates = {}


def accept_all(
    gates: Gates, state: dict[str, Any], metrics: dict[str, Any]
) -> tuple[jax.Array, dict[str, dict], dict[str, Any]]:
    """Asks every gate; the step counts if all of them accept it.

    Args:
      state: the training state, with an entry for each gate.

    Returns:
      whether all accept, the new entries of the state, and more metrics.
    """
    accepted, new, more = jnp.bool_(True), {}, {}
    for name, gate in gates.items():
        ok, new[name], extra = gate.accept(state[name], metrics)
        accepted &= ok
        more |= extra
    return accepted, new, more
