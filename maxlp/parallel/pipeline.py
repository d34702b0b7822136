"""Pipeline parallelism: the mesh axis ``stage`` splits the layers, and microbatches pass through them.

A circular schedule (Huang et al. 2019, arXiv:1811.06965, for one round; Narayanan et al. 2021,
arXiv:2104.04473, for more), as one program for all devices. The activations of all stages are one
array whose first axis is split over ``stage``. In a tick every stage runs its layers on its own
entry; then each entry moves to the next stage (a collective-permute). A scan over the ticks makes
compile time independent of the number of microbatches, and a scan over the layers of a stage makes
it independent of depth. The derivative of the scan over ticks is the same pipeline in reverse.

Four layers in two stages: three microbatches a, b, c in one round, and two in two rounds::

    tick       0    1    2    3             tick       0    1    2    3    4
    stage 0    a01  b01  c01  ·             stage 0    a0   b0   a2   b2   ·
    stage 1    ·    a23  b23  c23           stage 1    ·    a1   b1   a3   b3

In ``stages - 1`` of the ``rounds · microbatches + stages - 1`` ticks a stage is idle (a bubble): it
computes on zeros, and the result is discarded.

Shape letters: P stages · M microbatches · W = M/P columns of the queue · R rounds · B batch ·
b = B/M · S length · D embed · L layers · J = L/(P R) layers of a stage in a round.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp.parallel.schedule import Schedule
from maxlp.parallel.sharding import constrain, spec, split_rows

STAGE = "stage"  # the mesh axis

# (x, params, state, rows) of one layer and one microbatch to x and the layer's new state
Layer = Callable[[jax.Array, Any, Any, Any], tuple[jax.Array, Any]]


def run(
    layer: Layer,
    x_BSD: jax.Array,
    rows: Any,
    params: nnx.State,
    state: nnx.State,
    *,
    schedule: Schedule,
    remat: Callable[[Callable], Callable],
    remat_tick: Callable[[Callable], Callable],
) -> tuple[jax.Array, nnx.State]:
    """Runs all layers on all microbatches; the result equals that of the layers one after another.

    The rows are split as `sharding.split_rows` does. Every microbatch reads the old state. The new
    state is the maximum over the microbatches. So is the gradient of the state, because that of an
    overwrite-with-gradient variable (`core.gradients`) is its new value; it must not be negative.

    Args:
      rows: arrays with a leading batch axis; each microbatch gets its own part.
      params, state: stacked over layers.
      remat, remat_tick: wrap the function of a layer and that of a tick.

    Returns:
      x_BSD, its sequence split over the stages too (if they divide it), and the new state.
    """
    P, M, R = schedule
    stage_P = jnp.arange(P)
    params_RPJ, state_RPJ = _to_stages(params, schedule), _to_stages(state, schedule)
    rows_M = jax.tree.map(lambda a: _split_rows(a, M), rows)

    def run_stages(x_P: jax.Array, round_P: jax.Array, microbatch_P: jax.Array, state_RPJ: Any) -> tuple:
        """The layers of all stages, each on its own microbatch: new activations and state."""
        rows_P = jax.tree.map(lambda a: jnp.take(a, microbatch_P, axis=0), rows_M)
        variables_PJ = jax.tree.map(lambda a: _choose_round(a, round_P), (params_RPJ, state_RPJ))
        variables_JP = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), variables_PJ)

        def run_layer(x_P: jax.Array, variables_P: tuple) -> tuple[jax.Array, Any]:
            params_P, state_P = variables_P
            return jax.vmap(layer, spmd_axis_name=STAGE)(x_P, params_P, state_P, rows_P)

        x_P, state_JP = jax.lax.scan(remat(run_layer), x_P, variables_JP)
        return x_P, jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1), state_JP)

    run_stages = remat_tick(run_stages)

    def tick(carry: tuple, t: jax.Array) -> tuple[tuple, None]:
        queue, received_P, old_state, new_state = carry
        item_P = t - stage_P  # what each stage works on: round · M + microbatch
        busy_P = (item_P >= 0) & (item_P < R * M)
        round_P, microbatch_P = jnp.clip(item_P // M, 0, R - 1), item_P % M
        column_P = _column(queue, t)
        x_P = _where(stage_P == 0, column_P, received_P)
        old_state, state = _copy(old_state)
        # An idle stage runs on zeros. Nothing reads its result, but if that were infinite, the
        # gradients (zero times infinity) would be NaN.
        x_P = _constrain_stages(_where(busy_P, x_P, 0))
        x_P, written_state = run_stages(x_P, round_P, microbatch_P, state)
        x_P = _constrain_stages(x_P)
        writes_RP = busy_P[None] & (round_P[None] == jnp.arange(R)[:, None])
        new_state = jax.tree.map(
            lambda old, new: _merge_state(old, new[None], writes_RP, microbatch_P == 0),
            new_state,
            written_state,
        )
        received_P = _constrain_stages(_send(x_P, _rotation(P, 1)))
        queue = _advance_queue(queue, t, stage_P, column_P, x_P, received_P)
        return (queue, received_P, old_state, new_state), None

    queue = _fill_queue(x_BSD, schedule)
    start = (queue, _constrain_stages(jnp.zeros_like(queue[:, 0])), state_RPJ, state_RPJ)
    (queue, _, _, state_RPJ), _ = jax.lax.scan(tick, start, jnp.arange(schedule.ticks))
    return _empty_queue(queue, x_BSD.shape), _from_stages(state_RPJ, state, schedule)


# --- the queue of microbatches that wait for stage 0 ------------------------------------------------------
#
# The queue (P, W, b, S, D) is spread over all stages, so that no device holds the whole batch.
# Microbatch m starts at stage m // W, in column m % W. In tick t, stage 0 reads its entry of column
# t % W; then this column moves on by one stage, from stage p to p - 1 and from stage 0 to P - 1. So
# microbatch m reaches stage 0 in tick m. The output of the last stage is put back into the place
# that the microbatch came from, and reaches stage 0 again in ticks m + M, m + 2 M, …


def _fill_queue(x_BSD: jax.Array, schedule: Schedule) -> jax.Array:
    x_BSD = constrain(x_BSD, *_axes_outside(x_BSD.ndim))
    x_MbSD = split_rows(x_BSD, schedule.microbatches)
    return _constrain_stages(x_MbSD.reshape(schedule.stages, -1, *x_MbSD.shape[1:]))


def _column(queue: jax.Array, t: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(queue, t % queue.shape[1], 1, keepdims=False)


def _set_column(queue: jax.Array, x_P: jax.Array, t: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(queue, x_P, t % queue.shape[1], 1)


def _advance_queue(
    queue: jax.Array,
    t: jax.Array,
    stage_P: jax.Array,
    column_P: jax.Array,
    x_P: jax.Array,
    received_P: jax.Array,
) -> jax.Array:
    """Moves the column of tick t, and puts the output of the last stage back into the queue.

    Args:
      stage_P: 0, 1, …, P-1.
      column_P: the column of tick t.
      x_P: the outputs of all stages in this tick.
      received_P: the same outputs, each one at the next stage.
    """
    P, W = queue.shape[:2]
    queue = _set_column(queue, _send(column_P, _rotation(P, -1)), t)
    # The last stage finishes what stage 0 read P - 1 ticks ago. In that tick the place that became
    # free moved to stage P - 1, and since then it moves by one stage every W ticks.
    read_tick = t - (P - 1)
    stage = P - 1 - (P - 1) // W
    output_P = received_P if stage == 0 else x_P if stage == P - 1 else _send(x_P, [(P - 1, stage)])
    is_output_P = (stage_P == stage) & (read_tick >= 0)
    queue = _set_column(queue, _where(is_output_P, output_P, _column(queue, read_tick)), read_tick)
    return _constrain_stages(queue)


def _empty_queue(queue: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The activations (B, S, D) after the last tick."""
    P, W = queue.shape[:2]
    # In the first R M ticks every column returns to where it started. In the P - 1 ticks after them
    # some columns move once more than the others.
    moves, extra = divmod(P - 1, W)
    ahead = _send(queue[:, :extra], _rotation(P, moves + 1))
    behind = _send(queue[:, extra:], _rotation(P, moves))
    x_MbSD = _constrain_stages(jnp.concatenate([ahead, behind], axis=1)).reshape(-1, *queue.shape[2:])
    axes = _axes_outside(len(shape))
    x_MbSD = constrain(x_MbSD, None, *axes)
    return constrain(jnp.moveaxis(x_MbSD, 0, 1).reshape(shape), *axes)


# --- activations ------------------------------------------------------------------------------------------


def _axes_outside(rank: int) -> tuple[str | None, ...]:
    """Outside of the pipeline the stages split the sequence: all of them run the embedding and the head."""
    return ("batch", "logits_seq", *(None,) * (rank - 2))


def _constrain_stages(x: jax.Array) -> jax.Array:
    """Splits (P, b, S, D), or the queue (P, W, b, S, D), over stages, batch and sequence."""
    return constrain(x, "layers", *(None,) * (x.ndim - 4), "batch", "act_seq", "act_embed")


def _split_rows(a: jax.Array, n: int) -> jax.Array:
    axes = (None, "batch", "seq", *(None,) * a.ndim)
    return constrain(split_rows(a, n), *axes[: a.ndim + 1])


def _where(condition_P: jax.Array, x: jax.Array, y: Any) -> jax.Array:
    return jnp.where(condition_P.reshape(-1, *(1,) * (x.ndim - 1)), x, y)


def _send(x_P: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    """Sends entries between stages, by pairs (from, to); stages that receive nothing get zeros.

    (`jnp.roll` would do for a rotation, but XLA turns one by more than one stage into three all-to-alls.)
    """

    axis, send = jax.P(STAGE), functools.partial(_permute, pairs=pairs)
    return jax.shard_map(send, in_specs=axis, out_specs=axis, axis_names={STAGE})(x_P)


def _permute(x: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    """Sends arrays of a `jax.shard_map`; where every stage keeps its own, XLA would copy them."""
    stays = pairs == _rotation(jax.lax.axis_size(STAGE), 0)
    return x if stays else jax.lax.ppermute(x, STAGE, pairs)


def _rotation(P: int, by: int) -> list[tuple[int, int]]:
    return [(stage, (stage + by) % P) for stage in range(P)]


# --- state ------------------------------------------------------------------------------------------------


@jax.custom_vjp
def _copy(tree: Any) -> tuple[Any, Any]:
    """The tree twice; the gradients of the two are combined by maximum, not by sum."""
    return tree, tree


_copy.defvjp(
    lambda tree: (_copy(tree), None), lambda _, gradients: (jax.tree.map(jnp.maximum, *gradients),)
)


def _merge_state(old: jax.Array, new: jax.Array, writes: jax.Array, first: jax.Array) -> jax.Array:
    """Where a stage writes: ``new`` from the first microbatch, and the maximum of both from later ones."""

    def expand(a: jax.Array) -> jax.Array:
        return a.reshape(a.shape + (1,) * (old.ndim - a.ndim))

    new = jnp.where(expand(first[None]), new, jnp.maximum(old, new))
    return jnp.where(expand(writes), new, old)


# --- from layers to stages and rounds ---------------------------------------------------------------------


def _to_stages(variables: nnx.State, schedule: Schedule) -> nnx.State:
    """(L, …) to (R, P, J, …): in round r, stage p runs the J layers from (r P + p) J on.

    Layers are stored in order, split over the stages. With more than one round they move to where
    they run.
    """
    P, _, R = schedule
    if R == 1:
        return jax.tree.map(lambda a: a.reshape(1, P, -1, *a.shape[1:]), variables)
    routes = _routes(P, R)

    def move(local: jax.Array) -> jax.Array:
        return _exchange(local.reshape(R, -1, *local.shape[1:]), routes)[:, None]

    def move_all(a: jax.Array, stored: jax.P) -> jax.Array:
        return jax.shard_map(move, in_specs=stored, out_specs=_spec_in_stages(stored))(a)

    return jax.tree.map(move_all, variables, _specs(variables))


def _from_stages(variables_RPJ: nnx.State, like: nnx.State, schedule: Schedule) -> nnx.State:
    """The inverse of `_to_stages`.

    Args:
      like: the variables as they were stored.
    """
    P, _, R = schedule
    if R == 1:
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), variables_RPJ)
    routes = [route.reversed() for route in _routes(P, R)]

    def move(local: jax.Array) -> jax.Array:
        blocks = _exchange(local[:, 0], routes)
        return blocks.reshape(-1, *blocks.shape[2:])

    def move_all(a: jax.Array, stored: jax.P) -> jax.Array:
        return jax.shard_map(move, in_specs=_spec_in_stages(stored), out_specs=stored)(a)

    return jax.tree.map(move_all, variables_RPJ, _specs(like))


def _specs(variables: nnx.State) -> nnx.State:
    """The PartitionSpec of each stacked variable, in place of its value."""

    def one(variable: nnx.Variable) -> nnx.Variable:
        names = variable.get_metadata("out_sharding", None)
        return variable.replace(spec(*(names or ("layers",) + (None,) * (len(variable.shape) - 1))))

    return jax.tree.map(one, variables, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _spec_in_stages(stored: jax.P) -> jax.P:
    return jax.P(None, STAGE, None, *stored[1:])


class _Route(NamedTuple):
    """A permutation of blocks: ``source_block[p]`` of stage p becomes ``target_block[q]`` of stage q.

    Attributes:
      pairs: (p, q) for every stage.
    """

    pairs: list[tuple[int, int]]
    source_block: list[int]
    target_block: list[int]

    def reversed(self) -> "_Route":
        return _Route([(q, p) for p, q in self.pairs], self.target_block, self.source_block)


def _exchange(blocks: jax.Array, routes: list[_Route]) -> jax.Array:
    """This stage's R blocks after all routes."""
    stage, received = jax.lax.axis_index(STAGE), []
    result = jnp.zeros_like(blocks)
    for route in routes:
        block = jnp.take(blocks, jnp.asarray(route.source_block)[stage], axis=0)
        place = jnp.asarray(route.target_block)[stage]
        received.append((place, _permute(block, route.pairs)))
    for place, block in received:
        result = jax.lax.dynamic_update_index_in_dim(result, block, place, 0)
    return result


def _routes(P: int, R: int) -> list[_Route]:
    """R permutations that bring P R blocks, stored in order with R on each stage, to where they run.

    Block q (J layers) runs on stage q % P in round q // P. The blocks of one permutation must
    differ both in the stage that stores them, q // R, and in the stage that runs them. Giving block
    q the colour (q + q // lcm(P, R)) % R achieves this. The R blocks of one storing stage are
    consecutive, and have all colours. The blocks of one running stage are q, q + P, q + 2 P, …:
    within a least common multiple their colours are all those that are congruent modulo gcd(P, R),
    and the next multiple continues with the next congruence class.
    """
    routes = []
    for colour in range(R):
        blocks = [q for q in range(P * R) if (q + q // math.lcm(P, R)) % R == colour]
        pairs = [(q // R, q % P) for q in blocks]
        source_block, target_block = [0] * P, [0] * P
        for q in blocks:
            source_block[q // R], target_block[q % P] = q % R, q // P
        routes.append(_Route(pairs, source_block, target_block))
    return routes


def _choose_round(a_RP: jax.Array, round_P: jax.Array) -> jax.Array:
    """The variables of the round that each stage is in: (R, P, …) to (P, …)."""
    if a_RP.shape[0] == 1:
        return a_RP[0]

    # A vmap over the stages would be a gather, which some backends do not lower to slices.
    def choose(a_RP: jax.Array, round_P: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(a_RP, round_P[0], 0, keepdims=False)

    specs = jax.P(None, STAGE), jax.P(STAGE)
    return jax.shard_map(choose, in_specs=specs, out_specs=specs[1], axis_names={STAGE})(a_RP, round_P)
