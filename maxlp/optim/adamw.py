"""AdamW, whose rescaling is optax's."""

import optax

from maxlp.optim.config import OptimizerKind

ADAMW = OptimizerKind(
    scale_by=optax.scale_by_adam, second_moment=optax.ScaleByAdamState, like_params=True, galore_rates=True
)
