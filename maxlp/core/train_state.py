"""The training state: a plain pytree, so that every JAX transformation works on it.

::

    {"params": …, "model_state": …, "opt_state": …, "step": int32}

``params`` and ``model_state`` are nested dicts of arrays. ``model_state`` holds the variables that are not
trained: what the forward and backward passes write (FP8's amax histories), and frozen parameters (LoRA). In
plain bfloat16 it is empty. The optimizer, clipping and norms leave it out. A run with gates (`core.gates`)
has one more entry for each, under its name.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from maxlp.core.gates import NO_GATES, Gates
from maxlp.parallel import sharding
from maxlp.parallel.opt_state import opt_state_shardings

State = dict[str, Any]
CORE = ("params", "model_state", "opt_state", "step")  # entries of every state; others are those of gates
MakeModel = Callable[[nnx.Rngs], nnx.Module]


def init_state(
    make_model: MakeModel,
    tx: optax.GradientTransformation,
    seed: int,
    gates: Gates = NO_GATES,
    start_from: Callable[[State], State] | None = None,
) -> State:
    """A fresh state. Under jit with the shardings of `abstract_state` it is initialized already sharded.

    Args:
      start_from: maps the random ``{"params", "model_state"}`` to those that training begins with. Under
        jit, what it replaces is never allocated.
    """
    _, params, model_state = nnx.split(make_model(nnx.Rngs(seed)), nnx.Param, ...)
    core: State = {"params": nnx.to_pure_dict(params), "model_state": nnx.to_pure_dict(model_state)}
    if start_from is not None:
        core = start_from(core)
    core["opt_state"] = tx.init(core["params"])
    return core | {"step": jnp.zeros((), jnp.int32)} | {name: g.init() for name, g in gates.items()}


def abstract_model(make_model: MakeModel, mesh: Mesh | AbstractMesh) -> tuple[nnx.GraphDef, State]:
    """A model's structure, and its ``params`` and ``model_state`` as shapes, dtypes and shardings."""
    # Not nnx.eval_shape, which under a mesh takes logical axes for mesh axes.
    structure = []

    def variables() -> tuple[nnx.State, nnx.State]:
        graphdef, params, model_state = nnx.split(make_model(nnx.Rngs(0)), nnx.Param, ...)
        structure.append(graphdef)
        return params, model_state

    params, model_state = jax.eval_shape(variables)
    abstract = {
        key: jax.tree.map(_with_sharding, nnx.to_pure_dict(state), sharding.param_shardings(state, mesh))
        for key, state in (("params", params), ("model_state", model_state))
    }
    return structure[0], abstract


def abstract_state(
    make_model: MakeModel,
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    gates: Gates = NO_GATES,
) -> tuple[nnx.GraphDef, State]:
    """The model's structure and the whole state as shapes, dtypes and shardings; nothing is allocated.

    Raises:
      ValueError: a parameter that the mesh does not divide, or that the optimizer cannot take.
    """
    graphdef, abstract = abstract_model(make_model, mesh)
    opt_state = jax.eval_shape(tx.init, abstract["params"])
    opt_shardings = opt_state_shardings(tx, abstract["params"], mesh)
    small = {"step": jax.ShapeDtypeStruct((), jnp.int32)}
    small |= jax.eval_shape(lambda: {name: gate.init() for name, gate in gates.items()})
    replicated = sharding.replicated(mesh)
    return graphdef, {
        **abstract,
        "opt_state": jax.tree.map(_with_sharding, opt_state, opt_shardings),
        **jax.tree.map(lambda leaf: _with_sharding(leaf, replicated), small),
    }


def _with_sharding(leaf: jax.ShapeDtypeStruct, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def shardings(abstract: State) -> State:
    """The shardings of an abstract state."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def num_params(params: dict) -> int:
    """The number of scalars in a tree of arrays or shapes."""
    return sum(math.prod(p.shape) for p in jax.tree.leaves(params))
