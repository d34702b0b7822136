"""Stochastic gradient descent with momentum."""

from typing import Any, NamedTuple, cast

import optax

from maxlp.optim.config import OptimizerKind


class MomentumState(NamedTuple):
    """The momentum, under the name by which wrappers find first moments."""

    mu: optax.Updates


def scale_by_momentum(
    b1: float = 0.9, mu_dtype: Any = None, *, nesterov: bool = False
) -> optax.GradientTransformation:
    """Heavy-ball momentum (Polyak 1964), not normalized: a constant gradient is amplified to 1 / (1 - b1).

        m ← b1 · m + g            u = m, or with Nesterov's momentum g + b1 · m

    Args:
      b1: decay rate of the momentum; 0 is plain gradient descent.
      mu_dtype: dtype of the momentum; None for the parameter's.
      nesterov: use the momentum of the next step (Sutskever et al. 2013).
    """
    trace = optax.trace(b1, nesterov, accumulator_dtype=mu_dtype)

    def init(params: optax.Params) -> MomentumState:
        state: Any = trace.init(params)
        return MomentumState(state.trace)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        updates, new = cast(tuple[Any, Any], trace.update(updates, optax.TraceState(state.mu), params))
        return updates, MomentumState(new.trace)

    return optax.GradientTransformation(init, update)


SGD = OptimizerKind(scale_by=scale_by_momentum, only_moment="mu", like_params=True)
