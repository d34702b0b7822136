"""The training state and the two compiled functions: one that trains, one that evaluates.

The state is a plain pytree, so that every tool of JAX works on it::

    {"params": …, "model_state": …, "opt_state": …, "step": int32}

``params`` and ``model_state`` are nested dicts of arrays. ``model_state`` holds what the forward and the
backward pass change (amax histories of FP8; nothing in plain bf16): no optimizer, clip or norm sees it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from maxlp import losses, sharding

State = dict[str, Any]
Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]
LossFn = Callable[[nnx.Module, Batch], Sums]

# State of the backward pass (scales of output gradients), which only the cotangents see.
OVERWRITE_WITH_GRADIENT = nnx.WithTag("overwrite_with_gradient")


# --- state --------------------------------------------------------------------------------------------


def split(model: nnx.Module) -> tuple[nnx.GraphDef, dict, dict]:
    """A model as its structure, its parameters and its other state."""
    graphdef, params, model_state = nnx.split(model, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(model_state)


def init_state(make_model: Callable[[nnx.Rngs], nnx.Module], tx: optax.GradientTransformation, seed: int):
    """A fresh state; run it under jit with the shardings of `abstract_state`, and it is born in shards."""
    _, params, model_state = split(make_model(nnx.Rngs(seed)))
    step = jnp.zeros((), jnp.int32)
    return {"params": params, "model_state": model_state, "opt_state": tx.init(params), "step": step}


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
    make_model: Callable[[nnx.Rngs], nnx.Module], tx: optax.GradientTransformation, mesh: Mesh
) -> tuple[nnx.GraphDef, State]:
    """The model's structure and the whole state as shapes, dtypes and shardings; nothing is allocated."""
    graphdef, abstract = abstract_model(make_model, mesh)
    opt_state = jax.eval_shape(tx.init, abstract["params"])
    opt_shardings = sharding.opt_state_shardings(tx, abstract["params"], mesh)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.replicated(mesh))
    return graphdef, {
        **abstract,
        "opt_state": jax.tree.map(_placed, opt_state, opt_shardings),
        "step": step,
    }


def _placed(leaf: jax.ShapeDtypeStruct, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def abstract_batch(batch_size: int, seq_len: int, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """The global batch of packed text as shapes: int32 (B, S), and a bool mask."""
    dtypes: dict[str, Any] = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), jnp.int32)
    dtypes["loss_mask"] = jnp.bool_
    where = sharding.batch_sharding(mesh)
    return {k: jax.ShapeDtypeStruct((batch_size, seq_len), t, sharding=where) for k, t in dtypes.items()}


# --- loss ---------------------------------------------------------------------------------------------


def next_token_loss(model: nnx.Module, batch: Batch, *, num_chunks: int = 1, z_loss: float = 0.0) -> Sums:
    """Sums over a batch of packed text; see `losses.next_token`.

    Args:
      num_chunks: pieces in which the logits are made, so that they never all exist. Divides the length.
      z_loss: weight of the squared log-partition; 0 is off, 1e-4 is PaLM's.
    """
    x_BSD, _ = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])
    return losses.next_token(
        model.logits, x_BSD, batch["targets"], batch["loss_mask"], num_chunks=num_chunks, z_loss=z_loss
    )


# --- steps --------------------------------------------------------------------------------------------


def train_step(
    state: State,
    batch: Batch,
    *,
    graphdef: nnx.GraphDef,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    microbatches: int,
    schedule: optax.Schedule,
) -> tuple[State, dict[str, jax.Array]]:
    """One update from a global batch, in ``microbatches`` forward and backward passes.

    The loss is the mean over the *tokens* of the whole batch: each microbatch's sum is divided by the
    whole batch's count, so that the number of microbatches changes nothing but memory. The model's own
    state is combined by maximum over the microbatches (amax histories; an average would be wrong).

    Returns:
      the new state, and scalars: loss, accuracy, grad_norm, param_norm, learning_rate, tokens.
    """
    num_tokens = jnp.maximum(jnp.sum(batch["loss_mask"], dtype=jnp.float32), 1.0)
    forward, backward = _split_state(nnx.merge(graphdef, state["params"], state["model_state"]))

    def mean_loss(params: dict, backward: dict, microbatch: Batch) -> tuple[jax.Array, tuple[Sums, dict]]:
        model = nnx.merge(graphdef, params, forward, backward)
        sums = loss_fn(model, microbatch)
        return sums["loss"] / num_tokens, (sums, _split_state(model)[0])

    def gradients(microbatch: Batch) -> tuple[dict, tuple[Sums, dict]]:
        both = jax.grad(mean_loss, argnums=(0, 1), has_aux=True)
        (grads, new_backward), (sums, new_forward) = both(state["params"], backward, microbatch)
        return grads, (sums, _join(new_forward, new_backward))

    if microbatches == 1:
        grads, (sums, model_state) = gradients(batch)
    else:

        def accumulate(grads: dict, microbatch: Batch) -> tuple[dict, tuple[Sums, dict]]:
            more, aux = gradients(microbatch)
            return jax.tree.map(lambda a, g: a + g.astype(a.dtype), grads, more), aux

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state["params"])
        grads, (sums, model_state) = jax.lax.scan(accumulate, zeros, _microbatches(batch, microbatches))
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
        model_state = jax.tree.map(lambda x: jnp.max(x, axis=0), model_state)

    with jax.named_scope("optimizer"):
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
    metrics = {
        "loss": sums["loss"] / num_tokens,
        "accuracy": sums["correct"] / num_tokens,
        "grad_norm": optax.tree.norm(grads),
        "param_norm": optax.tree.norm(params),
        "learning_rate": jnp.asarray(schedule(state["step"]), jnp.float32),
        "tokens": num_tokens,
    }
    step = state["step"] + 1
    return {"params": params, "model_state": model_state, "opt_state": opt_state, "step": step}, metrics


def _split_state(model: nnx.Module) -> tuple[dict, dict]:
    """A model's state that the forward pass writes, and that whose gradient is its new value."""
    _, _, backward, forward = nnx.split(model, nnx.Param, OVERWRITE_WITH_GRADIENT, ...)
    return nnx.to_pure_dict(forward), nnx.to_pure_dict(backward)


def _join(*states: dict) -> dict:
    flat = [nnx.traversals.flatten_mapping(state) for state in states]
    return nnx.traversals.unflatten_mapping(functools.reduce(dict.__or__, flat))


def _microbatches(batch: Batch, n: int) -> Batch:
    """(B, …) to (n, B/n, …). Microbatch i takes rows i, n+i, 2n+i, …: each device keeps its own rows."""
    names = ("batch", None)
    return {
        k: sharding.constrain(jnp.moveaxis(v.reshape(v.shape[0] // n, n, -1), 1, 0), None, *names)
        for k, v in batch.items()
    }


def eval_step(state: State, batch: Batch, *, graphdef: nnx.GraphDef, loss_fn: LossFn) -> Sums:
    """The loss's sums over a batch, nothing changed."""
    return loss_fn(nnx.merge(graphdef, state["params"], state["model_state"]), batch)


def jit_train_step(
    abstract: State,
    mesh: Mesh,
    *,
    graphdef: nnx.GraphDef,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    microbatches: int,
    schedule: optax.Schedule,
) -> jax.stages.Wrapped:
    """`train_step` under jit: (state, batch) to (state, metrics), the state donated.

    Its layout is pinned to that of ``abstract``: without, XLA may move small parameters after the first
    step and compile again.
    """
    function = functools.partial(
        train_step, graphdef=graphdef, tx=tx, loss_fn=loss_fn, microbatches=microbatches, schedule=schedule
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(function, donate_argnums=0, out_shardings=(shardings, sharding.replicated(mesh)))
