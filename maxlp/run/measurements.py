"""Measurements during training, each one more pass over the batch of a step."""

import functools
import pkgutil
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from maxlp.core.train_step import loss_scale_of
from maxlp.families import Measure
from maxlp.parallel.sharding import replicated
from maxlp.precision import health, magnitudes
from maxlp.run.experiment import Experiment


def make(run: Experiment, graphdef: nnx.GraphDef) -> list[tuple[int, Measure]]:
    """The measurements that a config asks for, each with the number of steps between them."""
    s, family = run.settings, run.family
    config, found = s.precision, []
    program = functools.partial(compiled, graphdef=graphdef)
    if config.health_every:
        measure = program(health.measure, health.metrics, gradients=run.gradients, loss_scale=loss_scale_of)
        found.append((config.health_every, measure))
    if config.sharpness_every and family.sharpness is not None:
        measure = program(pkgutil.resolve_name(family.sharpness), lambda x: {"sharpness": float(x)})
        found.append((config.sharpness_every, measure))
    if config.magnitudes_every:
        measure = program(magnitudes.measure, magnitudes.metrics, loss=family.loss(s.loss, s.train.seed))
        found.append((config.magnitudes_every, measure))
    return found


def compiled(
    measure: Callable[..., Any], metrics: Callable[[Any], dict[str, float]], **constants: Any
) -> Measure:
    """``metrics(measure(state, batch, **constants))``, with ``measure`` as a compiled program.

    This function and its result must be called with the mesh set.

    Args:
      metrics: gets what ``measure`` returns on the host.
    """
    everywhere = replicated(jax.sharding.get_mesh())
    program = jax.jit(functools.partial(measure, **constants), out_shardings=everywhere)
    return lambda state, batch: metrics(jax.device_get(program(state, batch)))
