"""Pipeline parallelism: the mesh axis ``stage`` splits the layers, and microbatches pass through them.

A circular schedule (Huang et al. 2019, arXiv:1811.06965, for one round; Narayanan et al. 2021,
arXiv:2104.04473, for more), as one program for all devices: the activations of all stages are one array
whose first axis is split over ``stage``, and a tick runs every stage's layers on its part of it at once. In
between each part goes to the next stage (a collective-permute). A scan over the ticks keeps compile time
independent of depth and of the number of microbatches; its derivative is the pipeline run backwards.

Four layers in two stages: three microbatches a, b, c in one round, and two in two rounds::

    tick       0    1    2    3             tick       0    1    2    3    4
    stage 0    a01  b01  c01  ·             stage 0    a0   b0   a2   b2   ·
    stage 1    ·    a23  b23  c23           stage 1    ·    a1   b1   a3   b3

``stages - 1`` ticks of ``rounds · microbatches + stages - 1`` are bubbles, in which a stage computes on
zeros and what it computes is thrown away.

Shape letters: P stages · M microbatches · R rounds · B batch · S length · D embed · L layers ·
J = L / (P R) layers of a stage in a round.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp.parallel.schedule import Schedule
from maxlp.parallel.sharding import constrain, spec

STAGE = "stage"  # the mesh axis

Block = Callable[[jax.Array, Any, Any, Any], tuple[jax.Array, Any]]


def run(
    block: Block,
    x_BSD: jax.Array,
    rows: Any,
    params: nnx.State,
    state: nnx.State,
    *,
    schedule: Schedule,
    remat: Callable[[Callable], Callable],
    remat_tick: Callable[[Callable], Callable],
) -> tuple[jax.Array, nnx.State]:
    """All layers, microbatch by microbatch; the result is that of the layers one after the other.

    Microbatch i has rows i, M+i, 2M+i, …, as in `gradients.split`: each device keeps its own rows. Every
    microbatch sees the old state. The new state is the maximum over the microbatches, and so is the
    gradient of the state, which must not be negative: for state of the backward pass that is its new value.

    Args:
      block: (x, params, state, rows) of one layer and one microbatch to x and the layer's new state.
      rows: arrays with a leading batch axis, of which each microbatch gets its own part.
      params, state: stacked over layers.
      remat, remat_tick: wrap the function of a layer, and that of a tick.

    Returns:
      x_BSD, its length split over the stages too (where it divides), and the new state.
    """
    P, M, R = schedule
    waiting = M // P  # microbatches that wait at each stage
    # The last stage's output arrives where it must be to reach stage 0 in time: `late` stages before.
    late, extra = divmod(P - 1, waiting)
    stage_P = jnp.arange(P)
    at_stage = lambda tree: jax.tree.map(_at_stage, tree)  # noqa: E731

    names = [_names(v) for v in jax.tree.leaves(params, is_leaf=_is_variable)]
    weights_RPJ = _to_stages(params, schedule, names)
    state_names = [_names(v) for v in jax.tree.leaves(state, is_leaf=_is_variable)]
    state_RPJ = _to_stages(state, schedule, state_names)
    rows_M = jax.tree.map(lambda a: _rows(a, M), rows)

    def layers(x_P: jax.Array, r_P: jax.Array, m_P: jax.Array, state_RPJ: Any) -> tuple[jax.Array, Any]:
        """One tick's work of all stages."""
        mine = jax.tree.map(lambda a: jnp.take(a, m_P, axis=0), rows_M)
        chosen = jax.tree.map(lambda a: _choose(a, r_P), (weights_RPJ, state_RPJ))
        chosen_JP = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), chosen)

        def one(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            params, state = layer
            return jax.vmap(block, spmd_axis_name=STAGE)(x, params, state, mine)

        x_P, new_JP = jax.lax.scan(remat(one), x_P, chosen_JP)
        return x_P, jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1), new_JP)

    layers = remat_tick(layers)

    def tick(carry: tuple, t: jax.Array) -> tuple[tuple, None]:
        slots, next_P, old, written = carry
        i_P = t - stage_P
        busy_P = (i_P >= 0) & (i_P < R * M)
        r_P, m_P = jnp.clip(i_P // M, 0, R - 1), i_P % M
        slot_P = _place(slots, t)
        x_P = _where(stage_P == 0, slot_P, next_P)
        old, mine = _fork_all(old)
        # Zeros in a bubble: what it makes is never seen, but infinity times a gradient of 0 would be.
        out_P, new = layers(at_stage(_where(busy_P, x_P, 0)), r_P, m_P, mine)
        out_P = at_stage(out_P)
        hit_RP = busy_P & (r_P == jnp.arange(R)[:, None])
        written = jax.tree.map(lambda a, n: _maximum(a, n[None], hit_RP, m_P == 0), written, new)
        next_P = at_stage(_sent(out_P, _ring(P, 1)))
        slots = _placed(slots, _sent(slot_P, _ring(P, -1)), t)
        done = t - (P - 1)  # what the last stage ends
        back_P = next_P if late == P - 1 else _sent(out_P, [(P - 1, P - 1 - late)])
        here_P = (stage_P == P - 1 - late) & (done >= 0)
        slots = _placed(slots, _where(here_P, back_P, _place(slots, done)), done)
        return (at_stage(slots), next_P, old, written), None

    # Microbatch m waits at stage m // waiting in place m % waiting; each tick one place moves by a stage.
    x_BSD = constrain(x_BSD, *_ends(x_BSD))
    x_M = _split(x_BSD, M)
    slots = at_stage(x_M.reshape(P, waiting, *x_M.shape[1:]))
    start = (slots, at_stage(jnp.zeros_like(slots[:, 0])), state_RPJ, state_RPJ)
    (slots, _, _, written), _ = jax.lax.scan(tick, start, jnp.arange(schedule.ticks))
    ahead = _sent(slots[:, :extra], _ring(P, late + 1))  # these moved once more than the others
    behind = _sent(slots[:, extra:], _ring(P, late))
    x_M = at_stage(jnp.concatenate([ahead, behind], axis=1)).reshape(x_M.shape)
    x_M = constrain(x_M, None, *_ends(x_BSD))
    x_BSD = constrain(jnp.moveaxis(x_M, 0, 1).reshape(x_BSD.shape), *_ends(x_BSD))
    return x_BSD, _from_stages(written, schedule, state_names)


# --- activations --------------------------------------------------------------------------------------


def _ends(x: jax.Array) -> tuple[str | None, ...]:
    """Outside of the pipeline the sequence is split over the stages: embedding and head run there."""
    return ("batch", "logits_seq", *(None,) * (x.ndim - 2))


def _at_stage(x: jax.Array) -> jax.Array:
    """(P, B, S, D), or (P, waiting, B, S, D) of what waits: split over stages, batch and sequence."""
    return constrain(x, "layers", *(None,) * (x.ndim - 4), "batch", "act_seq", "act_embed")


def _split(x: jax.Array, n: int) -> jax.Array:
    """(B, …) to (n, B/n, …)."""
    return jnp.moveaxis(x.reshape(x.shape[0] // n, n, *x.shape[1:]), 1, 0)


def _rows(a: jax.Array, n: int) -> jax.Array:
    axes = (None, "batch", "seq", *(None,) * a.ndim)
    return constrain(_split(a, n), *axes[: a.ndim + 1])


def _where(condition_P: jax.Array, x: jax.Array, y: Any) -> jax.Array:
    return jnp.where(condition_P.reshape(-1, *(1,) * (x.ndim - 1)), x, y)


def _sent(x_P: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    """Parts of stages to other stages, zeros where nothing comes.

    A roll says the same, but by more than one place XLA makes three all-to-alls of it.
    """
    axis = jax.P(STAGE)
    send = lambda x: jax.lax.ppermute(x, STAGE, pairs)  # noqa: E731
    return jax.shard_map(send, in_specs=axis, out_specs=axis, axis_names={STAGE})(x_P)


def _ring(P: int, by: int) -> list[tuple[int, int]]:
    return [(stage, (stage + by) % P) for stage in range(P)]


def _place(slots: jax.Array, t: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(slots, t % slots.shape[1], 1, keepdims=False)


def _placed(slots: jax.Array, x_P: jax.Array, t: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(slots, x_P, t % slots.shape[1], 1)


# --- state --------------------------------------------------------------------------------------------


@jax.custom_vjp
def _fork(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The array twice; the gradients of the two meet by maximum."""
    return a, a


_fork.defvjp(lambda a: ((a, a), None), lambda _, gradients: (jnp.maximum(*gradients),))


def _fork_all(tree: Any) -> tuple[Any, Any]:
    leaves, treedef = jax.tree.flatten(tree)
    forked = [_fork(a) for a in leaves]
    return treedef.unflatten([a for a, _ in forked]), treedef.unflatten([b for _, b in forked])


def _maximum(old: jax.Array, new: jax.Array, hit: jax.Array, first: jax.Array) -> jax.Array:
    """``new`` where the first microbatch hits, the larger of both where a later one does."""
    wide = lambda a: a.reshape(a.shape + (1,) * (old.ndim - a.ndim))  # noqa: E731
    new = jnp.where(wide(first[None]), new, jnp.maximum(old, new))
    return jnp.where(wide(hit), new, old)


# --- weights ------------------------------------------------------------------------------------------


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _names(v: nnx.Variable) -> tuple[str | None, ...]:
    return v.get_metadata("out_sharding", None) or ("layers",) + (None,) * (len(v.shape) - 1)


def _to_stages(tree: Any, s: Schedule, names: list) -> Any:
    """(L, …) to (R, P, J, …): of round r, stage s has the layers (r P + s) J and following.

    They are stored in order, split over stages; with more than one round they move to where they run.
    """
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([_moved(a, s, n, to=True) for a, n in zip(leaves, names, strict=True)])


def _from_stages(tree: Any, s: Schedule, names: list) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([_moved(a, s, n, to=False) for a, n in zip(leaves, names, strict=True)])


def _moved(a: jax.Array, s: Schedule, names: tuple, to: bool) -> jax.Array:
    P, _, R = s
    if R == 1:
        return a.reshape(1, P, -1, *a.shape[1:]) if to else a.reshape(-1, *a.shape[3:])
    in_order = spec(*names)
    at_stages = jax.P(None, STAGE, None, *in_order[1:])
    routes = _routes(P, R)

    def move(local: jax.Array) -> jax.Array:
        parts = local.reshape(R, -1, *local.shape[1:]) if to else local[:, 0]
        me, moved = jax.lax.axis_index(STAGE), []
        result = jnp.zeros_like(parts)
        for route in routes:
            away, home = (route.stored, route.used) if to else (route.used, route.stored)
            pairs = [(h, d) if to else (d, h) for h, d in route.pairs]
            part = jnp.take(parts, jnp.asarray(away)[me], axis=0)
            moved.append((jnp.asarray(home)[me], jax.lax.ppermute(part, STAGE, pairs)))
        for place, part in moved:
            result = jax.lax.dynamic_update_index_in_dim(result, part, place, 0)
        return result[:, None] if to else result.reshape(-1, *result.shape[2:])

    specs = (in_order, at_stages) if to else (at_stages, in_order)
    return jax.shard_map(move, in_specs=specs[0], out_specs=specs[1])(a)


class _Route(NamedTuple):
    """One permutation of blocks: ``stored[h]`` of device h becomes round ``used[d]`` of device d."""

    pairs: list[tuple[int, int]]
    stored: list[int]
    used: list[int]


def _routes(P: int, R: int) -> list[_Route]:
    """R permutations that take P R blocks, held R by R in order, to where block q runs: stage q % P.

    The blocks of a permutation must differ in holder q // R and in stage q % P. The colour
    (q + q // lcm(P, R)) % R does that: R neighbours have all colours; and q, q + P, q + 2 P, … have all
    multiples of gcd(P, R) within a least common multiple, and the others one after another.
    """
    routes = []
    for colour in range(R):
        blocks = [q for q in range(P * R) if (q + q // math.lcm(P, R)) % R == colour]
        pairs = [(q // R, q % P) for q in blocks]
        stored, used = [0] * P, [0] * P
        for q in blocks:
            stored[q // R], used[q % P] = q % R, q // P
        routes.append(_Route(pairs, stored, used))
    return routes


def _choose(a_RP: jax.Array, r_P: jax.Array) -> jax.Array:
    """The round that each stage is in: (R, P, …) to (P, …)."""
    if a_RP.shape[0] == 1:
        return a_RP[0]
    # As a map over the stages it is a gather, of which some of XLA's compilers make no slices.
    pick = lambda a_RP, r_P: jax.lax.dynamic_index_in_dim(a_RP, r_P[0], 0, keepdims=False)  # noqa: E731
    specs = jax.P(None, STAGE), jax.P(STAGE)
    return jax.shard_map(pick, in_specs=specs, out_specs=specs[1], axis_names={STAGE})(a_RP, r_P)
