"""The training state, and the compiled function that trains.

The state is a plain pytree, so that every tool of JAX works on it::

    {"params": …, "model_state": …, "opt_state": …, "step": int32}

``params`` and ``model_state`` are nested dicts of arrays. ``model_state`` holds what the forward and the
backward pass change (amax histories of FP8; nothing in plain bf16): no optimizer, clip or norm sees it.
A run with judges (`Judge`) has an entry for each, under its name.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from maxlp.core.gradients import Batch, Gradients, State
from maxlp.parallel import sharding


class Judge(Protocol):
    """Decides at the end of each step whether the step counts; what it remembers is part of the state.

    A step that does not count leaves params, model_state and opt_state as they were, to the bit.
    """

    def init(self) -> dict: ...

    def accept(self, state: dict, metrics: dict) -> tuple[jax.Array, dict, dict]:
        """(verdict, what to remember, more metrics); the verdict is a bool scalar."""
        ...


Judges = Mapping[str, Judge]
NO_JUDGES: Judges = {}
Statistics = Callable[[optax.Updates, optax.OptState], dict]


# --- state --------------------------------------------------------------------------------------------


def split(model: nnx.Module) -> tuple[nnx.GraphDef, dict, dict]:
    """A model as its structure, its parameters and its other state."""
    graphdef, params, model_state = nnx.split(model, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(model_state)


def init_state(
    make_model: Callable[[nnx.Rngs], nnx.Module],
    tx: optax.GradientTransformation,
    seed: int,
    judges: Judges = NO_JUDGES,
) -> State:
    """A fresh state; run it under jit with the shardings of `abstract_state`, and it is born in shards."""
    _, params, model_state = split(make_model(nnx.Rngs(seed)))
    core = {"params": params, "model_state": model_state, "opt_state": tx.init(params)}
    return core | {"step": jnp.zeros((), jnp.int32)} | {name: j.init() for name, j in judges.items()}


def abstract_model(
    make_model: Callable[[nnx.Rngs], nnx.Module], mesh: Mesh
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """A model's structure, and its params and model_state as shapes, dtypes and shardings."""
    # Not nnx.eval_shape: under a mesh it takes logical axes for mesh axes.
    structure = []

    def variables() -> tuple[nnx.State, nnx.State]:
        graphdef, params, model_state = nnx.split(make_model(nnx.Rngs(0)), nnx.Param, ...)
        structure.append(graphdef)
        return params, model_state

    params, model_state = jax.eval_shape(variables)
    abstract = {
        key: jax.tree.map(_placed, nnx.to_pure_dict(state), sharding.param_shardings(state, mesh))
        for key, state in (("params", params), ("model_state", model_state))
    }
    return structure[0], abstract


def abstract_state(
    make_model: Callable[[nnx.Rngs], nnx.Module],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    judges: Judges = NO_JUDGES,
) -> tuple[nnx.GraphDef, State]:
    """The model's structure and the whole state as shapes, dtypes and shardings; nothing is allocated."""
    graphdef, abstract = abstract_model(make_model, mesh)
    opt_state = jax.eval_shape(tx.init, abstract["params"])
    opt_shardings = sharding.opt_state_shardings(tx, abstract["params"], mesh)
    small = {"step": jax.ShapeDtypeStruct((), jnp.int32)}
    small |= jax.eval_shape(lambda: {name: judge.init() for name, judge in judges.items()})
    whole = sharding.replicated(mesh)
    return graphdef, {
        **abstract,
        "opt_state": jax.tree.map(_placed, opt_state, opt_shardings),
        **jax.tree.map(lambda leaf: _placed(leaf, whole), small),
    }


def _placed(leaf: jax.ShapeDtypeStruct, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


# --- the step -----------------------------------------------------------------------------------------


def norm(tree: Any) -> jax.Array:
    """Global L2 norm, summed in float32 (of bfloat16 arrays too)."""
    return optax.tree.norm(optax.tree.cast(tree, jnp.float32))


def no_statistics(grads: optax.Updates, opt_state: optax.OptState) -> dict:
    return {}


def train_step(
    state: State,
    batch: Batch,
    *,
    graphdef: nnx.GraphDef,
    gradients: Gradients,
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
    judges: Judges = NO_JUDGES,
    statistics: Statistics = no_statistics,
) -> tuple[State, dict[str, Any]]:
    """One update from a global batch.

    Args:
      judges: the step counts if all of them say so.
      statistics: (gradients, new opt_state) to more metrics.

    Returns:
      the new state, and scalars: those of ``gradients`` (loss, accuracy, …), grad_norm, param_norm,
      learning_rate; ``skipped`` (0 or 1) if there are judges; and what judges and statistics add.
    """
    grads, model_state, metrics = gradients(graphdef, state, batch)
    with jax.named_scope("optimizer"):
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
    new = {"params": params, "model_state": model_state, "opt_state": opt_state}
    with jax.named_scope("statistics"):
        metrics |= {"grad_norm": norm(grads), **statistics(grads, opt_state)}
    if judges:
        counts = jnp.bool_(True)
        for name, judge in judges.items():
            verdict, new[name], more = judge.accept(state[name], metrics)
            counts &= verdict
            metrics |= more
        metrics["skipped"] = 1.0 - counts
        core = ("params", "model_state", "opt_state")
        new |= {k: jax.tree.map(functools.partial(jnp.where, counts), new[k], state[k]) for k in core}
    with jax.named_scope("statistics"):
        metrics["param_norm"] = norm(new["params"])
    metrics["learning_rate"] = jnp.asarray(schedule(state["step"]), jnp.float32)
    return new | {"step": state["step"] + 1}, metrics


def jit_train_step(
    abstract: State,
    mesh: Mesh,
    *,
    graphdef: nnx.GraphDef,
    gradients: Gradients,
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
    judges: Judges = NO_JUDGES,
    statistics: Statistics = no_statistics,
) -> jax.stages.Wrapped:
    """`train_step` under `jit`."""
    function = functools.partial(
        train_step,
        graphdef=graphdef,
        gradients=gradients,
        tx=tx,
        schedule=schedule,
        judges=judges,
        statistics=statistics,
    )
    return jit(function, abstract, mesh)


def jit(function: Callable[[State, Batch], Any], abstract: State, mesh: Mesh) -> jax.stages.Wrapped:
    """A train step compiled: (state, batch) to (state, metrics), the state donated.

    Its layout is pinned to that of ``abstract``: without, XLA may move small parameters after the first
    step and compile again.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(function, donate_argnums=0, out_shardings=(shardings, sharding.replicated(mesh)))
