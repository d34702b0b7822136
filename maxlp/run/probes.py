"""Measurements of a run besides its steps: one more pass over a batch every so many steps."""

import pkgutil

from flax import nnx

from maxlp.core.train_step import loss_scale_of
from maxlp.families import Measure
from maxlp.precision import health, magnitudes
from maxlp.run.experiment import Experiment


def make(run: Experiment, graphdef: nnx.GraphDef) -> list[tuple[int, Measure]]:
    """The measurements that a config asks for, each with the number of steps between them."""
    s, family = run.settings, run.family
    config, probes = s.precision, []
    if config.health_every:
        measure = health.probe(graphdef, run.gradients, loss_scale=loss_scale_of)
        probes.append((config.health_every, measure))
    if config.sharpness_every and family.sharpness is not None:
        probes.append((config.sharpness_every, pkgutil.resolve_name(family.sharpness)(graphdef)))
    if config.magnitudes_every:
        loss = family.loss(s.loss, s.train.seed)
        probes.append((config.magnitudes_every, magnitudes.probe(graphdef, loss)))
    return probes
