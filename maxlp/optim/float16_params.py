"""Parameters stored in float16 alone, each update computed in float32 and rounded to nearest.

float16 has 11 significant bits: an update below 2^-12 to 2^-11 of its parameter is lost, an eighth of what
is lost in bfloat16. Balança et al. 2024 (arXiv:2407.17353, Table 2) store weights in float16 with a scale.
Here the scale is not stored: `precision.scalify` computes it from the parameter's values in each step. So
the range is that of float16 itself, in which numbers below 2^-14 are subnormal and have fewer bits.
"""

from typing import Any

import optax

from maxlp.optim.tree_utils import widened


def float16_params(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps a whole optimizer chain, learning rate included, for float16 parameters.

    Args:
      inner: sees parameters in float32, as gradients are (`precision.scalify.unscale`), so that its updates
        and its state are too; `low_bit` goes inside. `optax.apply_updates` rounds the sum of parameter and
        update once.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> optax.OptState:
        return inner.init(widened(params))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any) -> Any:
        return inner.update(updates, state, widened(params), **extra)

    return optax.GradientTransformationExtraArgs(init, update)
