"""The train step: gradients, optimizer, gates, as one pure function of (state, batch)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from maxlp.core.gates import NO_GATES, Gates, accept_all
from maxlp.core.gradients import Batch, Gradients, Metrics, squared_norm
from maxlp.core.train_state import State, shardings
from maxlp.parallel import sharding

GATED = ("params", "model_state", "opt_state")  # what a rejected step leaves unchanged
Statistics = Callable[[optax.Updates, optax.OptState, optax.Updates, optax.Params], Metrics]
UpdateArguments = Callable[[optax.Updates, Metrics], dict[str, jax.Array]]
OptimizerMetrics = Callable[[optax.OptState], Metrics]
AfterUpdate = Callable[[Any, dict], tuple[Any, Metrics]]
# (structure, state, batch) to the new state and scalar metrics: `train_step` or `fused_backward.train_step`
Step = Callable[[nnx.GraphDef, State, Batch], tuple[State, Metrics]]


def nothing(*measured: Any) -> dict[str, jax.Array]:
    """No entries: the default `Statistics`, `UpdateArguments` and `OptimizerMetrics`."""
    return {}


def keep_update(params: Any, model_state: dict) -> tuple[Any, Metrics]:
    """The updated parameters as they are: the default `AfterUpdate`."""
    return params, {}


def loss_scale_of(state: State) -> jax.Array | None:
    """The loss scale of float16 training, a float32 scalar; None for a run without loss scaling."""
    return state["loss_scale"]["scale"] if "loss_scale" in state else None


def train_step(
    graphdef: nnx.GraphDef,
    state: State,
    batch: Batch,
    *,
    gradients: Gradients,
    tx: optax.GradientTransformation,
    gates: Gates = NO_GATES,
    statistics: Statistics = nothing,
    update_arguments: UpdateArguments = nothing,
    optimizer_metrics: OptimizerMetrics = nothing,
    after_update: AfterUpdate = keep_update,
) -> tuple[State, Metrics]:
    """One training step on a global batch.

    Args:
      gates: if any of them rejects the step, params, model_state and opt_state stay as they were.
      statistics: maps (gradients, new opt_state, updates, old params) to more metrics.
      update_arguments: maps (gradients, their metrics) to extra keyword arguments of ``tx.update``.
      optimizer_metrics: maps the opt_state after the step, accepted or not, to more metrics.
      after_update: maps (updated params, new model_state) to the params to keep, and metrics.

    Returns:
      the new state, and scalars: those of ``gradients`` (loss, accuracy, …) and grad_norm; ``skipped``
      (0 or 1) if there are gates; and those of the gates, the optimizer and statistics.
    """
    grads, model_state, metrics = gradients(graphdef, state, batch, loss_scale_of(state))
    with jax.named_scope("optimizer"):
        extra = update_arguments(grads, metrics)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"], **extra)
        # Accumulated or unscaled gradients are float32, and would promote moments in bfloat16.
        opt_state = optax.tree.cast_like(opt_state, state["opt_state"])
        params, corrections = after_update(optax.apply_updates(state["params"], updates), model_state)
    new = {"params": params, "model_state": model_state, "opt_state": opt_state}
    with jax.named_scope("statistics"):
        more = statistics(grads, opt_state, updates, state["params"])
        metrics |= {"grad_norm": jnp.sqrt(squared_norm(grads)), **corrections, **more}
    if gates:
        accepted, gate_states, more = accept_all(gates, state, metrics)
        metrics |= more | {"skipped": 1.0 - accepted}
        new = {key: optax.tree.where(accepted, new[key], state[key]) for key in GATED} | gate_states
    return new | {"step": state["step"] + 1}, metrics | optimizer_metrics(new["opt_state"])


def jit_step(step: Step, graphdef: nnx.GraphDef, abstract: State, mesh: Mesh) -> jax.stages.Wrapped:
    """A train step under `jit`: (state, batch) to (state, metrics), the state donated.

    The new state has the shardings of ``abstract``: left to itself, XLA might shard small parameters in
    another way, for which the next step would be compiled again.

    On GPUs, XLA's rematerialization pass is off, because ``model.remat`` decides what is recomputed. The
    pass starts at about three quarters of the memory, and repeats casts and amax reductions in the loops
    over layers: an 8B in FP8 that takes 120 GiB had 590 instead of 450 fusions, and saved 0.1 GiB (compiled
    for an H200). Collective-permutes are combined, so that ring attention sends keys and values as one: XLA
    runs one permute at a time.
    """
    out = (shardings(abstract), sharding.replicated(mesh))
    on_gpu = mesh.devices.flat[0].platform in ("gpu", "cuda")
    combined = "xla_gpu_collective_permute_combine_threshold_bytes"
    options = {"xla_disable_hlo_passes": "rematerialization", combined: 2**30} if on_gpu else None
    state_step = functools.partial(step, graphdef)
    return jax.jit(state_step, donate_argnums=0, out_shardings=out, compiler_options=options)
