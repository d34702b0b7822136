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
Statistics = Callable[[optax.Updates, optax.OptState], Metrics]
UpdateArguments = Callable[[optax.Updates, Metrics], dict[str, jax.Array]]
OptimizerMetrics = Callable[[optax.OptState], Metrics]
AfterUpdate = Callable[[Any, dict], tuple[Any, Metrics]]
# (structure, state, batch) to the new state and scalar metrics: `train_step` or `fused_backward.train_step`
Step = Callable[[nnx.GraphDef, State, Batch], tuple[State, Metrics]]


def nothing(*measured: Any) -> dict[str, jax.Array]:
    """The `Statistics`, `UpdateArguments` and `OptimizerMetrics` of a run without any."""
    return {}


def keep_update(params: Any, model_state: dict) -> tuple[Any, Metrics]:
    """The `AfterUpdate` of a model whose parameters are those of the optimizer."""
    return params, {}


def loss_scale_of(state: State) -> jax.Array | None:
    """The factor of the loss in float16 training; None without one."""
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
    """One update from a global batch.

    Args:
      gates: the step counts if all of them accept it.
      statistics: maps (gradients, new opt_state) to more metrics.
      update_arguments: maps (gradients, their metrics) to further keywords of ``tx.update``.
      optimizer_metrics: maps the opt_state after the step, accepted or not, to more metrics.
      after_update: maps (updated params, model_state of this step) to the next step's params, and metrics.

    Returns:
      the new state, and scalars: those of ``gradients`` (loss, accuracy, …), grad_norm, param_norm;
      ``skipped`` (0 or 1) if there are gates; and those of the gates, the optimizer and statistics.
    """
    grads, model_state, metrics = gradients(graphdef, state, batch, loss_scale_of(state))
    with jax.named_scope("optimizer"):
        extra = update_arguments(grads, metrics)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"], **extra)
        # Gradients of microbatches and unscaled ones are float32; moments may be in bfloat16.
        opt_state = optax.tree.cast_like(opt_state, state["opt_state"])
        params, corrections = after_update(optax.apply_updates(state["params"], updates), model_state)
        # Otherwise XLA keeps the sums in float32 of 16-bit parameters, and rounds them with the norm below.
        params = jax.tree.map(lambda p: jax.lax.optimization_barrier(p) if p.itemsize == 2 else p, params)
    new = {"params": params, "model_state": model_state, "opt_state": opt_state}
    with jax.named_scope("statistics"):
        metrics |= {"grad_norm": global_norm(grads), **corrections, **statistics(grads, opt_state)}
    if gates:
        accepted, gate_states, more = accept_all(gates, state, metrics)
        metrics |= more | {"skipped": 1.0 - accepted}
        new = {key: optax.tree.where(accepted, new[key], state[key]) for key in GATED} | gate_states
    with jax.named_scope("statistics"):
        metrics["param_norm"] = global_norm(new["params"])
    return new | {"step": state["step"] + 1}, metrics | optimizer_metrics(new["opt_state"])


def global_norm(tree: Any) -> jax.Array:
    """Global L2 norm, summed in float32 (of bfloat16 arrays too)."""
    return jnp.sqrt(squared_norm(tree))


def jit_step(step: Step, graphdef: nnx.GraphDef, abstract: State, mesh: Mesh) -> jax.stages.Wrapped:
    """A train step under `jit`: (state, batch) to (state, metrics), the state donated.

    The layout of the new state is that of ``abstract``: XLA might move small parameters and compile again.

    On GPUs, XLA's own rematerialization is off, because ``model.remat`` decides what is computed again. It
    would begin at about three quarters of the memory, and repeat quantizations and maxima in the loops over
    layers: in an 8B in FP8 of 120 GiB, 590 instead of 450 fusions to save 0.1 GiB (compiled for an H200).
    The ring's keys and values are sent as one, because XLA runs one permute at a time.
    """
    out = (shardings(abstract), sharding.replicated(mesh))
    on_gpu = mesh.devices.flat[0].platform in ("gpu", "cuda")
    combined = "xla_gpu_collective_permute_combine_threshold_bytes"
    options = {"xla_disable_hlo_passes": "rematerialization", combined: 2**30} if on_gpu else None
    of_state = functools.partial(step, graphdef)
    return jax.jit(of_state, donate_argnums=0, out_shardings=out, compiler_options=options)
