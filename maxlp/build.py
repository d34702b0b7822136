"""From a config to the parts of a run: the one place where model, mesh, optimizer and loss meet.

Each function binds one section of the config to the function it belongs to; `check` holds what no section
can know alone. All of it runs in seconds and before anything is allocated or compiled.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import optax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxlp import optim, sharding, step
from maxlp.config import ConfigError, bind, call
from maxlp.models import MODELS

SECTIONS = ("model", "mesh", "optimizer", "data", "loss", "train", "checkpoint", "metrics")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """The config's ``train`` section.

    total_steps: updates of the run.
    microbatches: passes that each batch is split into.
    seed: of the weights and the order of the data.
    log_every, eval_every: updates between records and held-out evaluations (eval_every 0: at the end).
    eval_batches: of held-out data during the run (0: all); the last evaluation always takes all.
    init_from: a run or checkpoint whose weights to start from; "" draws them at random.
    """

    total_steps: int
    microbatches: int
    seed: int
    log_every: int
    eval_every: int
    eval_batches: int
    init_from: str

    def __post_init__(self):
        least = {"total_steps": 1, "microbatches": 1, "log_every": 1, "eval_every": 0, "eval_batches": 0}
        for key, bound in least.items():
            if getattr(self, key) < bound:
                raise ConfigError(f"config.train.{key}={getattr(self, key)} must be at least {bound}")


def loop(c: ConfigDict) -> Loop:
    return call(Loop, "train", c.train)


def mesh(c: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    return call(sharding.make_mesh, "mesh", c.mesh, devices=devices)


def model(c: ConfigDict) -> Callable[[nnx.Rngs], nnx.Module]:
    """The function that makes the model; call it under `jax.jit` or `jax.eval_shape` if it is large."""
    values = dict(c.model.items())
    name = values.pop("name", None)
    if name not in MODELS:
        raise ConfigError(f"config.model.name={name!r} is unknown; one of {', '.join(MODELS)}")
    make = bind(MODELS[name], "model", values, "rngs")
    return lambda rngs: make(rngs=rngs)


def tx(c: ConfigDict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    return call(optim.make_tx, "optimizer", c.optimizer, total_steps=c.train.total_steps)


def loss(c: ConfigDict) -> step.LossFn:
    return bind(step.next_token_loss, "loss", c.loss, "model", "batch")


def check(c: ConfigDict, devices: Mesh) -> None:
    """Raises a ConfigError with the first pair of sections that do not fit each other."""
    for name in SECTIONS:
        if name not in c:
            raise ConfigError(f"config.{name} is missing; sections: {', '.join(SECTIONS)}")
    for name in c:
        if name not in SECTIONS:
            raise ConfigError(f"config.{name} is unknown; sections: {', '.join(SECTIONS)}")
    batch, seq, shards = c.data.batch_size, c.data.seq_len, sharding.batch_shards(devices)
    rows = shards * c.train.microbatches
    if batch % rows:
        raise ConfigError(
            f"config.data.batch_size={batch} does not divide into {shards} data shards × "
            f"config.train.microbatches={c.train.microbatches}; use a multiple of {rows}"
        )
    if seq > c.model.max_seq_len:
        raise ConfigError(
            f"config.data.seq_len={seq} is beyond config.model.max_seq_len={c.model.max_seq_len}, "
            "the range of the rotary embedding"
        )
    if seq % c.loss.num_chunks:
        raise ConfigError(
            f"config.data.seq_len={seq} is not a multiple of config.loss.num_chunks={c.loss.num_chunks}"
        )
    if seq % devices.shape["tensor"]:
        raise ConfigError(
            f"config.data.seq_len={seq} is not a multiple of config.mesh.tensor={devices.shape['tensor']}"
        )
