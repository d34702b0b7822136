"""A small Llama and its train step on any mesh."""

import functools
import math

import jax
import numpy as np
import optax

from maxlp import precision
from maxlp.core import train_step
from maxlp.core.train_state import abstract_state, init_state, shardings
from maxlp.families.llama.model import Llama, LlamaConfig
from maxlp.families.llama.task import NextTokenConfig, loss_gradients
from maxlp.parallel import sharding
from maxlp.parallel.batches import global_batch

MODEL = dict(
    vocab_size=64,
    embed_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=96,
    max_seq_len=128,
    rope_theta=10_000.0,
    rope_scaling=None,
    norm_eps=1e-5,
    tie_embeddings=False,
    init_std=0.1,
    dtype="float32",
    param_dtype="float32",
    attention="xla",
    scan_layers=True,
    remat="block",
)
# With excess precision XLA keeps float32 between fused bfloat16 operations. Which operations are fused
# differs between layouts, and so would the numbers.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


def make_mesh(**sizes: int) -> jax.sharding.Mesh:
    """A mesh of the first devices; an axis that is not given has size 1."""
    return sharding.make_mesh(**{"fsdp": 1} | sizes, devices=jax.devices()[: math.prod(sizes.values())])


def batch(seed: int, rows: int, length: int) -> dict[str, np.ndarray]:
    """Rows of two documents and of different numbers of targets, so that rows cannot be confused."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, MODEL["vocab_size"], (rows, length + 1), np.int32)
    cut, column = np.arange(3, 3 + rows)[:, None] % length, np.arange(length)
    is_first = column < cut
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.where(is_first, 1, 2).astype(np.int32),
        "positions": np.where(is_first, column, column - cut).astype(np.int32),
        "loss_mask": column < length - np.arange(rows)[:, None] % (length // 2),
    }


def full_histories(model_state: dict) -> dict:
    """The state of delayed scaling with full histories, as after many steps."""
    amax = {"input_": 4.0, "kernel_": 0.4, "output_grad_": 1e-3}

    def fill(path, x):
        (value,) = (value for name, value in amax.items() if name in str(path))
        return jax.device_put(np.full(x.shape, value, x.dtype), x.sharding)

    return jax.tree.map_with_path(fill, model_state)


@functools.cache
def one_device_step(num_layers: int, rows: int, length: int):
    """An initial state, and the parameters and metrics after one step on one device, on the host."""
    trainer = Trainer({}, num_layers=num_layers)
    start = jax.device_get(trainer.init())
    state, [metrics] = trainer.run(trainer.init(start), 1, rows, length)
    return start, jax.device_get(state["params"]), metrics


class Trainer:
    """The train step of a small Llama with plain gradient descent, so that parameters change by gradients.

    Args:
      mesh: the sizes of its axes.
      loss: keys of `NextTokenConfig`.
      model: changes to `MODEL`.
    """

    def __init__(self, mesh, *, microbatches=1, loss=None, recipe="bf16", learning_rate=1.0, **model):
        self.mesh = make_mesh(**mesh)
        config = LlamaConfig(**MODEL | model)
        tx = optax.sgd(learning_rate)

        def make(rngs):
            made = Llama(config, rngs=rngs)
            precision.inject(made, precision.make_recipe(recipe))
            return made

        with jax.set_mesh(self.mesh):
            graphdef, self.abstract = abstract_state(make, tx, self.mesh)
        step = functools.partial(
            train_step.train_step,
            gradients=loss_gradients(NextTokenConfig(**loss or {}), 0, microbatches),
            tx=tx,
            schedule=optax.constant_schedule(learning_rate),
        )
        self.step = train_step.jit_step(step, graphdef, self.abstract, self.mesh)
        self.make, self.tx, self.compiled = make, tx, None

    def lower(self, rows: int, length: int) -> jax.stages.Lowered:
        with jax.set_mesh(self.mesh):
            return self.step.lower(self.abstract, global_batch(batch(0, rows, length), self.mesh))

    def compile(self, rows: int, length: int) -> jax.stages.Compiled:
        """The compiled step; compiles once."""
        self.compiled = self.compiled or self.lower(rows, length).compile(compiler_options=COMPILER_OPTIONS)
        return self.compiled

    def init(self, start=None):
        """The initial state on the mesh: random, or the arrays of another one."""
        where = shardings(self.abstract)
        if start is not None:
            return jax.device_put(start, where)
        with jax.set_mesh(self.mesh):
            return jax.jit(functools.partial(init_state, self.make, self.tx, 0), out_shardings=where)()

    def run(self, state, steps: int, rows: int, length: int):
        """The state after some steps, and the metrics of each."""
        compiled, found = self.compile(rows, length), []
        for seed in range(steps):
            with jax.set_mesh(self.mesh):
                state, metrics = compiled(state, global_batch(batch(seed, rows, length), self.mesh))
            found.append({name: float(value) for name, value in metrics.items()})
        return state, found
