"""Local steps: replicas of the ``data`` axis train alone, and every H steps an outer optimizer joins them.

DiLoCo (Douillard et al. 2023, arXiv:2311.08105, algorithm 1). A run evaluates and publishes the outer
parameters θ; replica r of R has parameters θ_r and a state of the ordinary optimizer of its own:

    H times    θ_r ← optimizer(θ_r, gradient of the mean loss of r's rows)     only metrics go over ``data``
    then       Δ ← mean of θ - θ_r over all r                                 the outer gradient
               m ← μ m + Δ,   θ ← θ - λ (Δ + μ m)                             Nesterov's momentum
               θ_r ← θ                                                         the moments stay

The outer gradient is exchanged in float32, or by `parallel.exchange` in 8 bits with error feedback (clients
that send FP8 to a server with float32 parameters: Wang et al. 2024, arXiv:2407.02610).

The optimizer's state is a `LocalState`: checkpoints hold all of it, and a run can resume within a round.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from maxlp.core.gradients import Batch, Metrics
from maxlp.core.replicas import PER_REPLICA, REPLICATED, param_specs
from maxlp.core.train_state import State
from maxlp.core.train_step import Step
from maxlp.parallel import exchange
from maxlp.parallel.opt_state import PerReplica

MEANS = ("loss", "accuracy")  # metrics that are means over a replica's tokens


class LocalState(NamedTuple):
    """The optimizer's state of a run with local steps.

    Attributes:
      outer: of the outer optimizer.
      replicas: ``{"params", "opt_state"}`` of every replica.
      errors: every replica's accumulated quantization error of its outer gradients, float32; {} if these
        are sent in float32.
    """

    outer: optax.OptState
    replicas: PerReplica
    errors: PerReplica


def combine(
    tx: optax.GradientTransformation,
    step: Step,
    *,
    replicas: int,
    format_name: str,
    steps: int,
    outer_rate: float,
    outer_momentum: float,
) -> tuple[optax.GradientTransformation, Step]:
    """The optimizer and the train step of replicas that train alone, from those of one replica.

    Args:
      tx: the optimizer of each replica.
      step: `train_step.train_step` with it, and with the gradients of a replica's own rows.
      replicas: R.
      format_name: of the outer gradients, as in `exchange.sum_over_replicas`; ``none`` is float32.
      steps: H.
      outer_rate, outer_momentum: λ and μ.

    Returns:
      the optimizer of the outer parameters, whose gradient is the outer gradient and whose state is a
      `LocalState`; and a step of all replicas.
    """
    outer = outer_optimizer(tx, optax.sgd(outer_rate, outer_momentum, nesterov=True), replicas, format_name)
    combined = functools.partial(train_step, inner=step, tx=outer, steps=steps, format_name=format_name)
    return outer, combined


def outer_optimizer(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    replicas: int,
    format_name: str,
) -> optax.GradientTransformation:
    """``outer`` with a `LocalState`, which also holds the state of replicas that train with ``inner``."""

    def for_each(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (replicas, *x.shape))

    def init(params: optax.Params) -> LocalState:
        mine = {"params": params, "opt_state": inner.init(params)}
        errors = {} if format_name == "none" else optax.tree.zeros_like(params, dtype=jnp.float32)
        return LocalState(
            outer=outer.init(params),
            replicas=PerReplica(jax.tree.map(for_each, mine)),
            errors=PerReplica(jax.tree.map(for_each, errors)),
        )

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        updates, own = outer.update(updates, state.outer, params)
        return updates, state._replace(outer=own)

    return optax.GradientTransformation(init, update)


def train_step(
    graphdef: nnx.GraphDef,
    state: State,
    batch: Batch,
    *,
    inner: Step,
    tx: optax.GradientTransformation,
    steps: int,
    format_name: str,
) -> tuple[State, Metrics]:
    """One step of every replica; the last one of each round also updates the outer parameters.

    Args:
      inner: the step of a replica. Its gradients are those of the replica's own rows.
      tx: of the outer parameters.
      steps: H, the number of steps in a round.
      format_name: of the outer gradients, as in `exchange.sum_over_replicas`; ``none`` is float32.

    Returns:
      the new state, and the metrics of ``inner``: loss and accuracy over the tokens of all replicas, the
      number of these, and means over the replicas of all others.
    """
    assert not state["model_state"], "see run.constraints"
    local: LocalState = state["opt_state"]

    def replica_step(each: State, step: jax.Array, rows: Batch) -> tuple[State, Metrics]:
        mine = jax.tree.map(lambda x: x[0], each)
        new, metrics = inner(graphdef, mine | {"model_state": {}, "step": step}, rows)
        return jax.tree.map(lambda x: x[None], {key: new[key] for key in mine}), _combined(metrics)

    advance = jax.shard_map(
        replica_step,
        in_specs=(PER_REPLICA, REPLICATED, PER_REPLICA),
        out_specs=(PER_REPLICA, REPLICATED),
        axis_names={exchange.AXIS},
        check_vma=False,  # the model's loops do not declare over which axes their values vary
    )
    with jax.named_scope("replicas"):
        replicas, metrics = advance(local.replicas.state, state["step"], batch)
    local = local._replace(replicas=PerReplica(replicas))
    specs, step = param_specs(graphdef, state), state["step"] + 1
    update = functools.partial(_outer_update, tx=tx, specs=specs, format_name=format_name)
    with jax.named_scope("outer_update"):
        # A loop of one iteration or none: it updates its arrays in place, and `jax.lax.cond` would not.
        ends = jnp.int32(step % steps == 0)
        params, local = jax.lax.fori_loop(0, ends, lambda _, at: update(*at), (state["params"], local))
    return state | {"params": params, "opt_state": local, "step": step}, metrics


def _combined(metrics: Metrics) -> Metrics:
    """The metrics of all replicas, from those of each: all-reduces of a few scalars."""
    tokens = metrics["tokens"]
    sums = {name: metrics[name] * tokens for name in MEANS} | {"tokens": tokens}
    means, sums = jax.lax.pmean(metrics, exchange.AXIS), jax.lax.psum(sums, exchange.AXIS)
    total = jnp.maximum(sums["tokens"], 1.0)
    return means | {name: sums[name] / total for name in MEANS} | {"tokens": sums["tokens"]}


def _outer_update(
    params: dict, local: LocalState, *, tx: optax.GradientTransformation, specs: dict, format_name: str
) -> tuple[dict, LocalState]:
    """Updates the outer parameters, from which all replicas then continue."""
    replicas, errors = local.replicas.state, local.errors.state
    deltas = jax.tree.map(lambda outer, own: outer[None] - own, params, replicas["params"])
    if format_name == "none":
        grads = jax.tree.map(lambda x: jnp.mean(x, axis=0), deltas)
    else:
        shares = jax.tree.map(lambda x: x / x.shape[0], deltas)
        grads, errors = exchange.sum_over_replicas(shares, errors, specs, format_name)
    updates, new = tx.update(grads, local, params)
    assert isinstance(new, LocalState)
    params = jax.tree.map(jax.lax.with_sharding_constraint, optax.apply_updates(params, updates), specs)

    def broadcast(outer: jax.Array, own: jax.Array, spec: PartitionSpec) -> jax.Array:
        place = PartitionSpec(exchange.AXIS, *spec)
        return jax.lax.with_sharding_constraint(jnp.broadcast_to(outer, own.shape), place)

    synchronized = replicas | {"params": jax.tree.map(broadcast, params, replicas["params"], specs)}
    return params, new._replace(replicas=PerReplica(synchronized), errors=PerReplica(errors))
