"""A run's weights with the factors of Smooth-SwiGLU folded in, measured on its validation data."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from maxlp.core.gradients import forward_state, join_trees
from maxlp.core.train_state import State
from maxlp.nn.attention import AUTO
from maxlp.parallel.batches import device_batches
from maxlp.precision.fold import folded, watch
from maxlp.run import run_dir
from maxlp.run.experiment import make_data
from maxlp.run.settings import Machine, Settings
from maxlp.run.tokenizer import saved_tokenizer
from maxlp.runtime.distributed import print_primary
from maxlp.runtime.messages import counted


def calibrated_params(s: Settings, workdir: Path, params: State, sequences: int, mesh: Mesh) -> State:
    """The parameters with constant factors, see `precision.fold`; the function stays the same bit for bit.

    Args:
      s: of the run.
      params: those that the run publishes; its model computes with them unquantized, in ``model.dtype``.
      sequences: number of sequences of validation data to measure the gated products on; at most all.
    """
    s = _with_batches_of_one(s, mesh)
    paths: list[str] = []

    def make() -> nnx.Module:
        model = s.family.make_model(s.model, rngs=nnx.Rngs(0))
        paths.extend(watch(model, s.family.gated_products))
        return model

    graphdef, _, abstract = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), nnx.to_pure_dict(abstract))
    loss = s.family.loss(s.loss, s.train.seed)

    @jax.jit
    def observe(params: State, state: dict, batch: dict) -> dict:
        model = nnx.merge(graphdef, params, state)
        loss(model, batch, jnp.int32(0))
        return join_trees(state, forward_state(model))

    run_dir.use_hub_commits(workdir, s.data)
    data = make_data(s, saved_tokenizer(s.data.tokenizer, workdir), "validation", mesh)
    with jax.set_mesh(mesh):
        used = 0
        for batch, _ in device_batches(iter(data), mesh, limit=sequences):
            state, used = observe(params, state, batch), used + 1
    print_primary(f"measured the gated products on {counted(used, 'sequence')} of validation data")
    return folded(params, state, paths)


def _with_batches_of_one(s: Settings, mesh: Mesh) -> Settings:
    """The settings with batches of one row, on a mesh of this machine."""
    model = dataclasses.replace(s.model, attention=AUTO)
    data = dataclasses.replace(s.data, batch_size=1)
    return dataclasses.replace(s, model=model, data=data, mesh={}).on(Machine.of(mesh))
