"""A small Llama and its train step on any mesh, for every test that trains."""

import collections
import functools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from maxlp import precision
from maxlp.core import fused_backward, train_step
from maxlp.core.gates import NO_GATES, Gates
from maxlp.core.gradients import Gradients
from maxlp.core.train_state import MakeModel, State, abstract_state, init_state, shardings
from maxlp.families.llama import task
from maxlp.families.llama.model import Llama, LlamaConfig
from maxlp.families.llama.task import NextTokenConfig
from maxlp.parallel import sharding
from maxlp.parallel.batches import global_batch
from maxlp.planning import hlo
from maxlp.precision import PrecisionConfig, RecipeOptions

# The smallest sizes that every recipe, and two or four parts of every mesh axis, can divide.
LLAMA = dict(
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
    remat="none",
)
# With excess precision XLA keeps float32 between fused bfloat16 operations. Which operations are fused
# differs between layouts, and so would the numbers.
NO_EXCESS_PRECISION = {"xla_allow_excess_precision": False}


def llama_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**LLAMA | changes)


def precision_config(
    recipe: str = "bf16", *, rules=(), first_blocks=0, last_blocks=0, smooth_swiglu="none", **options: Any
) -> PrecisionConfig:
    """The config of a recipe with these options (``history=4``)."""
    return PrecisionConfig(
        recipe=recipe,
        options=RecipeOptions(**options),
        rules=rules,
        first_blocks=first_blocks,
        last_blocks=last_blocks,
        min_dim=0,
        smooth_swiglu=smooth_swiglu,
    )


def make_llama(config: PrecisionConfig | None = None, **changes: Any) -> MakeModel:
    """Makes a small Llama under a precision recipe.

    Args:
      config: of the recipe; None for the model's own dtype.
      changes: of `LLAMA`.
    """

    def make(rngs: nnx.Rngs) -> Llama:
        model = Llama(llama_config(**changes), rngs=rngs)
        if config is not None:
            precision.apply(model, config, gated_products=task.FAMILY.gated_products)
        return model

    return make


def batch(seed: int, rows: int = 8, length: int = 32) -> dict[str, np.ndarray]:
    """Rows of two documents, with very different numbers of targets, so that no two rows weigh the same."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, LLAMA["vocab_size"], (rows, length + 1), np.int32)
    cut, column = rng.integers(1, length, (rows, 1)), np.arange(length)
    is_first = column < cut
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.where(is_first, 1, 2).astype(np.int32),
        "positions": np.where(is_first, column, column - cut).astype(np.int32),
        "loss_mask": rng.random((rows, length)) < rng.random((rows, 1)),
    }


def batches(steps: int, rows: int = 8, length: int = 32) -> list[dict[str, np.ndarray]]:
    return [batch(seed, rows, length) for seed in range(steps)]


def matmul_types(lowered: jax.stages.Lowered) -> list[tuple[str, ...]]:
    """The types of both operands and of the result ("bf16") of each matmul, in StableHLO."""
    tensor = r"tensor<(?:\d+x)*(\w+)>"
    return re.findall(rf"dot_general.*: \({tensor}, {tensor}\) -> {tensor}", lowered.as_text())


def walk_jaxpr(jaxpr: jax.extend.core.Jaxpr) -> Iterator[jax.extend.core.JaxprEqn]:
    """All equations of a program, also those of its inner programs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from walk_jaxpr(inner)


def make_mesh(**sizes: int) -> Mesh:
    """A mesh of the first devices; an axis that is not given has size 1."""
    return sharding.make_mesh(**{"fsdp": 1} | sizes, devices=jax.devices()[: math.prod(sizes.values())])


class RejectAll:
    """A gate that accepts no step."""

    def init(self) -> dict:
        return {}

    def accept(self, state: dict, metrics: dict) -> tuple[jax.Array, dict, dict]:
        return jnp.bool_(False), state, {}


class Trainer:
    """The train step of a model on a mesh, compiled once.

    Plain gradient descent is the default, so that parameters differ by as much as their gradients do.

    Args:
      mesh: one device by default.
      make_model, gradients: of another model than the small Llama.
      recipe: precision of the Llama; None for its own dtype.
      loss: of the Llama.
      microbatches: of the Llama's gradients.
      released: updates each layer in the backward pass (`core.fused_backward`).
      gates, optimizer_metrics: as in `train_step.train_step`.
      model: changes of `LLAMA`.
    """

    def __init__(
        self,
        mesh: Mesh | None = None,
        *,
        make_model: MakeModel | None = None,
        gradients: Gradients | None = None,
        recipe: PrecisionConfig | None = None,
        loss: NextTokenConfig = NextTokenConfig(),  # noqa: B008  (frozen)
        microbatches: int = 1,
        released: bool = False,
        tx: optax.GradientTransformation | None = None,
        gates: Gates = NO_GATES,
        optimizer_metrics: train_step.OptimizerMetrics = train_step.nothing,
        **model: Any,
    ):
        self.mesh = make_mesh() if mesh is None else mesh
        self.make_model = make_model or make_llama(recipe, **model)
        self.gradients = gradients or task.loss_gradients(loss, microbatches=microbatches)
        self.tx, self.gates = tx or optax.sgd(1.0), gates
        after_update = task.after_update(llama_config(**model))
        common = dict(tx=self.tx, after_update=after_update, optimizer_metrics=optimizer_metrics)
        if released:
            step = functools.partial(fused_backward.train_step, loss=task.batch_loss(loss), **common)
        else:
            step = functools.partial(train_step.train_step, gradients=self.gradients, gates=gates, **common)
        with jax.set_mesh(self.mesh):
            self.graphdef, self.abstract = abstract_state(self.make_model, self.tx, self.mesh, gates)
        self.step = train_step.jit_step(step, self.graphdef, self.abstract, self.mesh)
        self._init = jax.jit(self._state, out_shardings=shardings(self.abstract))
        self.compiled: jax.stages.Compiled | None = None

    def init(self, params: dict | None = None) -> State:
        """The initial state on the mesh, with random parameters or those of another trainer."""
        with jax.set_mesh(self.mesh):
            return self._init(params)

    def _state(self, params: dict | None) -> State:
        state = init_state(self.make_model, self.tx, 0, self.gates)
        given = {} if params is None else {"params": params, "opt_state": self.tx.init(params)}
        return state | given

    def trace(self, batch: dict[str, np.ndarray]) -> jax.stages.Traced:
        place = sharding.batch_sharding(self.mesh)
        shapes = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=place) for k, v in batch.items()}
        with jax.set_mesh(self.mesh):
            return self.step.trace(self.abstract, shapes)

    def lower(self, batch: dict[str, np.ndarray]) -> jax.stages.Lowered:
        with jax.set_mesh(self.mesh):
            return self.trace(batch).lower()

    def compile(self, batch: dict[str, np.ndarray]) -> jax.stages.Compiled:
        """The compiled step; later batches must have the shapes of the first one."""
        self.compiled = self.compiled or self.lower(batch).compile(compiler_options=NO_EXCESS_PRECISION)
        return self.compiled

    def run(self, state: State, batches: Iterable[dict]) -> tuple[State, list[dict[str, float]]]:
        """The state after these batches, and the metrics of each. The first state is donated."""
        found = []
        for batch in batches:
            with jax.set_mesh(self.mesh):
                state, metrics = self.compile(batch)(state, global_batch(batch, self.mesh))
            found.append({name: float(value) for name, value in metrics.items()})
        return state, found


@functools.cache
def one_device_step(num_layers: int, rows: int, length: int) -> tuple[dict, dict, dict[str, float]]:
    """Initial parameters, and the parameters and metrics after one step on one device, on the host."""
    trainer = Trainer(num_layers=num_layers)
    params = jax.device_get(trainer.init()["params"])
    state, [metrics] = trainer.run(trainer.init(params), batches(1, rows, length))
    return params, jax.device_get(state["params"]), metrics


def exchanged_bytes(program: str) -> dict[tuple[str, str], int]:
    """Bytes of the results of a compiled program's collectives, by kind and dtype; loops count once."""
    found: collections.Counter = collections.Counter()
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    for result, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", program):
        for array, dtype in re.findall(r"\b(([a-z]\w*)\[[\d,]*\])", result):
            found[kind, dtype] += int(hlo.num_bytes(array))
    return found


# --- the state of delayed scaling -----------------------------------------------------------------------


def permutes_in_place(program: str) -> list[str]:
    """The pairs of the collective-permutes in a compiled program in which every device sends to itself."""
    found = re.findall(r"source_target_pairs=\{(.*?)\}\}", program)
    return [pairs for pairs in found if all(a == b for a, b in re.findall(r"(\d+),(\d+)", pairs))]


def histories(state: State) -> dict[str, np.ndarray]:
    """Path to float32 history (L, H)."""
    flat = nnx.traversals.flatten_mapping(state["model_state"])
    return {"/".join(map(str, path)): np.asarray(value) for path, value in flat.items()}


def with_full_histories(state: State, **amax: float) -> State:
    """The state with histories full of one amax for each tensor, as after many steps.

    Args:
      amax: of ``input``, ``kernel`` and ``output_grad``.
    """
    amax = dict(input=4.0, kernel=0.4, output_grad=1e-3) | amax

    def fill(path: tuple, history: jax.Array) -> jax.Array:
        [value] = [value for name, value in amax.items() if f"'{name}_amax_history'" in str(path[-1])]
        return jax.device_put(np.full(history.shape, value, np.float32), history.sharding)

    return state | {"model_state": jax.tree.map_with_path(fill, state["model_state"])}
