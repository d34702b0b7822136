"""Gradients of a batch whose sum over the replicas of the ``data`` axis is exchanged in 8 bits.

By default XLA adds the gradients of the replicas in the dtype of the matmuls, in every microbatch. Here
each replica computes its share of the batch's gradient from its own rows, with the other axes of the mesh
left to XLA, and once a step `parallel.exchange` adds the shares. A share is the gradient of the replica's
sum of losses, divided by the number of tokens in the whole batch.

The rounding errors are state, and saved in checkpoints: ``model_state["errors"]`` holds, for each replica,
an array of the shape of each parameter.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from maxlp.core.gradients import Batch, Gradients, Metrics
from maxlp.core.train_state import MakeModel, State
from maxlp.nn.layers import Frozen
from maxlp.parallel import exchange, sharding

ERRORS = "errors"
PER_REPLICA, REPLICATED = PartitionSpec(exchange.AXIS), PartitionSpec()


class ErrorFeedback(Frozen):
    """Each replica's accumulated quantization error of a parameter's gradients: (R, …), float32."""


def with_errors(make_model: MakeModel, replicas: int) -> MakeModel:
    """Makes the model with the state that `exchanged` needs: the replicas' errors."""

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = make_model(rngs)
        errors: dict = {}
        for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            zeros = jnp.zeros((replicas, *param.shape), jnp.float32)
            axes = ("replica", *param.get_metadata("out_sharding"))
            errors[path] = ErrorFeedback(zeros, out_sharding=axes, eager_sharding=False)
        setattr(model, ERRORS, nnx.data(nnx.traversals.unflatten_mapping(errors)))
        return model

    return make


def exchanged(gradients: Gradients, format_name: str) -> Gradients:
    """The gradients of a batch: the replicas' shares, added in 8 bits.

    Args:
      gradients: computes a replica's share from its rows, such as `core.gradients.token_gradients`.
      format_name: of `exchange.sum_over_replicas`.
    """

    def with_exchange(graphdef: nnx.GraphDef, state: State, batch: Batch, loss_scale: jax.Array | None):
        assert loss_scale is None, "see run.constraints"
        model_state = dict(state["model_state"])
        errors = model_state.pop(ERRORS)
        specs = param_specs(graphdef, state)

        def replica_gradients(params: dict, model_state: dict, errors: dict, step: jax.Array, rows: Batch):
            mine = {"params": params, "model_state": model_state | {ERRORS: errors}, "step": step}
            grads, new, metrics = gradients(graphdef, mine, rows, None)
            grads = jax.tree.map(lambda g, at: jax.lax.with_sharding_constraint(g, at)[None], grads, specs)
            del new[ERRORS]
            return grads, *_combined(new, metrics)

        share = jax.shard_map(
            replica_gradients,
            in_specs=(REPLICATED, REPLICATED, PER_REPLICA, REPLICATED, PER_REPLICA),
            out_specs=(PER_REPLICA, REPLICATED, REPLICATED),
            axis_names={exchange.AXIS},
            check_vma=False,  # the model's loops do not declare over which axes their values vary
        )
        with jax.named_scope("replicas"):
            shares, new, metrics = share(state["params"], model_state, errors, state["step"], batch)
        with jax.named_scope("exchange"):
            grads, errors = exchange.sum_over_replicas(shares, errors, specs, format_name)
        return grads, new | {ERRORS: errors}, metrics

    return with_exchange


def _combined(model_state: dict, metrics: Metrics) -> tuple[dict, Metrics]:
    """The model_state and the metrics of the whole batch, from those of each replica.

    States are combined by maximum, as over microbatches. Metrics are shares, which add up; the number of
    tokens is already that of the whole batch.
    """
    model_state = jax.tree.map(lambda x: jax.lax.pmax(x, exchange.AXIS), model_state)
    sums = {name: sharding.sum_of_replicas(x) for name, x in metrics.items() if name != "tokens"}
    return model_state, metrics | sums


def param_specs(graphdef: nnx.GraphDef, state: State) -> dict:
    """The PartitionSpec of each parameter on the current mesh."""
    model = nnx.merge(graphdef, state["params"], state["model_state"])
    places = sharding.param_shardings(nnx.state(model, nnx.Param), jax.sharding.get_abstract_mesh())
    return jax.tree.map(lambda place: place.spec, places)
