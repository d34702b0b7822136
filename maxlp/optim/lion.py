"""Lion, whose rescaling is optax's."""

from collections.abc import Iterator

import optax

from maxlp.optim.config import Conflict, OptimizerConfig, OptimizerKind


def _conflicts(config: OptimizerConfig) -> Iterator[Conflict]:
    """The keys that Lion cannot work with."""
    beta, mode = (config.options.get(key) for key in ("smooth_beta", "mode"))
    if beta is not None and mode != "smooth":
        yield "options.smooth_beta", beta, "its mode is not smooth; set options.mode='smooth'"


LION = OptimizerKind(scale_by=optax.scale_by_lion, conflicts=_conflicts, only_moment="mu", like_params=True)
