"""Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682): its rescaling, and its average.

Gradients are taken at y, the trained parameters; evaluated and published is the average x:

    z ← z - lr · update(y)      x ← (1 - c) x + c z      y = (1 - b1) z + b1 x

Optax keeps y and z (`optax.contrib.schedule_free`), from which x follows.
"""

from collections.abc import Iterator
from typing import Any

import jax
import optax

from maxlp.optim.config import Conflict, OptimizerConfig, OptimizerKind
from maxlp.optim.make_tx import AveragePart
from maxlp.optim.tree_utils import find_states, name_of


def scale_by_debiased_rms(b2: float = 0.999, eps: float = 1e-8) -> optax.GradientTransformation:
    """Adam without its first moment, which the averaging replaces: g / (√v̂ + eps)."""
    return optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True)


def _conflicts(config: OptimizerConfig) -> Iterator[Conflict]:
    """The keys that schedule-free AdamW cannot work with."""
    if config.schedule != "constant":
        yield "schedule", config.schedule, "it averages instead of decaying; set schedule='constant'"
    if config.b1 == 0:
        yield "b1", config.b1, "b1 weighs its average; set b1 above 0"
    if config.param_rounding is not None:
        reason = "its average needs parameters in float32; set it to None and model.param_dtype to float32"
        yield "param_rounding", config.param_rounding, reason
    if config.offload:
        yield "offload", config.offload, "its average is evaluated on the device; set offload=False"


def eval_part(opt_state: Any) -> Any:
    """The part of an optimizer state that `make_tx.eval_params` needs.

    A program that only evaluates restores that part alone:
    `restore(path, {"params": …, "opt_state": eval_part(abstract["opt_state"])})`.

    Args:
      opt_state: of schedule_free_adamw, arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      An `AveragePart`, inside nested dicts that give it the path it has in the state.
    """
    [(path, state)] = find_states(opt_state, optax.contrib.ScheduleFreeState)
    part: Any = AveragePart(state.b1, state.z)
    for key in reversed(path):
        part = {name_of((key,)): part}
    return part


SCHEDULE_FREE_ADAMW = OptimizerKind(
    scale_by=scale_by_debiased_rms,
    conflicts=_conflicts,
    only_moment="nu",
    # The type of the rescaling's state, which optax does not export.
    second_moment=type(jax.eval_shape(scale_by_debiased_rms().init, ())),
    averages=True,
    galore_rates=True,
)
