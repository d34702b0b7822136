"""Training with less communication between replicas: gradients in 8 bits, or local steps (DiLoCo)."""

import dataclasses
import functools
from typing import Any

from maxlp.core import local_steps, replicas
from maxlp.core.train_state import MakeModel
from maxlp.core.train_step import Step
from maxlp.run.settings import Machine, Settings


def apply(
    s: Settings, machine: Machine, model: MakeModel, optimizer: Any, step: Any
) -> tuple[MakeModel, Any, Step]:
    """Model, optimizer and step of a run with ``train.local`` or ``precision.exchange``.

    Args:
      step: `train_step.train_step` with its arguments.
    """
    count, format_name = machine.axes["data"], s.precision.exchange
    if s.train.local is None:
        exchanged = replicas.exchanged(step.keywords["gradients"], format_name)
        return replicas.with_errors(model, count), optimizer, functools.partial(step, gradients=exchanged)
    gradients = s.family.gradients(s.loss, s.train.seed, s.train.microbatches, alone=True)
    alone = functools.partial(step, gradients=gradients)
    tx, step = local_steps.combine(
        optimizer.tx, alone, replicas=count, format_name=format_name, **vars(s.train.local)
    )
    return model, dataclasses.replace(optimizer, tx=tx), step
