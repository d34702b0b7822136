"""Gates: they decide at the end of a step whether its update is kept."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp


class Gate(Protocol):
    """Accepts or rejects a step; a gate's own state is part of the training state.

    A rejected step leaves params, model_state and opt_state unchanged, bit for bit.
    """

    def init(self) -> dict[str, jax.Array]:
        """The gate's state before the first step."""
        ...

    def accept(self, state: dict[str, jax.Array], metrics: dict[str, Any]) -> tuple[jax.Array, dict, dict]:
        """Decides on a step by its metrics.

        Args:
          state: of the gate, before the step.

        Returns:
          whether the step counts (a bool scalar), the new state of the gate, and more metrics.
        """
        ...


Gates = Mapping[str, Gate]
NO_GATES: Gates = {}


def accept_all(
    gates: Gates, state: dict[str, Any], metrics: dict[str, Any]
) -> tuple[jax.Array, dict[str, dict], dict[str, Any]]:
    """The decision of all gates together; the step counts if every one accepts it.

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
