"""Whole matrices on each device: arrays (*layers, m, n), split by layers instead of by rows and columns.

For optimizers that orthogonalize or factorize matrices (Muon, SOAP). Mesh axes that do not divide the
number of layers split the last dim instead. Replicas (the axis ``data``) have the same layers.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from maxlp.parallel.opt_state import SplitByLayers
from maxlp.parallel.sharding import spec

# `context` splits the parts into which `fsdp` splits a dim, and has to leave it first.
ORDER = ("stage", "context", "fsdp", "tensor")


class LikeParams(NamedTuple):
    """What `SplitByLayers` holds, but sharded like the parameters."""

    state: Any


def like_params(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transformation with `LikeParams` for `SplitByLayers`: all devices update one layer at a time."""

    def init(params: optax.Params) -> optax.OptState:
        state = tx.init(params)
        return jax.tree.map(lambda x: LikeParams(*x) if is_split(x) else x, state, is_leaf=is_split)

    def is_split(x: Any) -> bool:
        return isinstance(x, SplitByLayers)

    return optax.GradientTransformation(init, tx.update)


def spec_of_layers(shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The split of an array (*layers, m, n) with at most one dim of layers."""
    layers, last = _split(shape, mesh)
    if not layers:
        # `spread_state` moves them to the layers in order, and XLA gathers an array to move any but the
        # innermost.
        last = last[::-1]
    return PartitionSpec(*[layers or None] * (len(shape) - 2), None, last or None)


def num_filled(num_layers: int, axis_sizes: Mapping[str, int], *, with_state: bool) -> int:
    """The number of layers after `spread`, for a mesh with axes of these sizes.

    It is the next one that the devices divide. There are no layers of zeros where stages split the layers
    already (all zeros would be on the last stage), nor for a single layer, as with released gradients (one
    device would have all the work).

    Args:
      with_state: whether `SplitByLayers` is spread too. Then there are none where any axis splits its
        layers: XLA would gather it to append zeros.
    """
    sizes = [axis_sizes.get(axis, 1) for axis in ORDER]
    if num_layers == 1 or axis_sizes.get("stage", 1) > 1:
        return num_layers
    if with_state and any(size > 1 and num_layers % size == 0 for size in sizes):
        return num_layers
    devices = math.prod(sizes)
    return -(-num_layers // devices) * devices


def spread(x: jax.Array, *, with_state: bool = False) -> jax.Array:
    """Splits (*layers, m, n) by layers, behind which zeros make the number of layers `num_filled`.

    The axes of the mesh move one after the other, since XLA would gather an array to move two at once.
    """
    if added := _num_added(x, with_state=with_state):
        x = jnp.pad(x, ((0, added), (0, 0), (0, 0)))
    return keep_spread(_constrained(x, [_param_spec(x), *_moves(x)]))


def gather_back(x: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of `spread`; the result has the shape of ``like``."""
    x = _constrained(keep_spread(x), [*_moves(x)[::-1], _param_spec(x)])
    return x[: len(like)] if x.shape != like.shape else x


def spread_state(x: jax.Array) -> jax.Array:
    """An array in `SplitByLayers` as `spread` would split it; as it is unless zeros are appended."""
    return spread(x, with_state=True) if _num_added(x, with_state=True) else x


def gather_back_state(x: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of `spread_state`; the result has the shape of ``like``."""
    return keep_spread(gather_back(x, like)) if x.shape != like.shape else x


def keep_spread(x: jax.Array) -> jax.Array:
    """Constrains an array to its split by layers, which XLA does not infer for all results of a `cond`."""
    return _constrained(x, [spec_of_layers(x.shape, jax.sharding.get_abstract_mesh())])


def by_layer(fn: Callable[..., Any], into: Any, *others: Any, alone: bool = True) -> Any:
    """``fn(into, *others)`` of arrays (*layers, m, n), in place and one layer at a time.

    Devices that share the layers take all of theirs at once.

    Args:
      into: one or several arrays; the result has their shapes and is written over them.
      alone: False lets a device that is alone take all layers at once, too.
    """
    mesh, shape = jax.sharding.get_abstract_mesh(), jax.tree.leaves(into)[0].shape
    if len(shape) < 3 or not (alone or mesh.size > 1):
        return fn(into, *others)
    if _split(shape, mesh)[0]:
        if not (alone and mesh.manual_axes):
            return fn(into, *others)
        # In a `jax.shard_map`, XLA aborts where it splits a gather by layers and by columns.
        into, others = jax.tree.map(_layers_only, (into, others))
        return jax.tree.map(_layers_only, fn(into, *others))

    def step(i: jax.Array, into: Any) -> Any:
        new = fn(*jax.tree.map(lambda x: x[i], (into, *others)))
        return jax.tree.map(lambda x, of_layer: x.at[i].set(of_layer), into, new)

    return jax.lax.fori_loop(0, shape[0], step, into)


def _num_added(x: jax.Array, *, with_state: bool) -> int:
    """The number of layers of zeros that `spread` appends."""
    if x.ndim < 3:
        return 0
    return num_filled(len(x), jax.sharding.get_abstract_mesh().shape, with_state=with_state) - len(x)


def _layers_only(x: jax.Array) -> jax.Array:
    """The array, split by layers alone: no axis splits its last dim."""
    layers, _ = _split(x.shape, jax.sharding.get_abstract_mesh())
    return _constrained(x, [PartitionSpec(layers or None)])


def _param_spec(x: jax.Array) -> PartitionSpec:
    """The split of a parameter, whose layers only stages share; that of its matrices is left to XLA.

    It keeps the split by layers from spreading to the matmul or sum that makes a gradient: XLA would add a
    gradient by layers, on all devices, and would move each term of a sum instead of the sum.
    """
    layers = spec("layers") if x.ndim > 2 else ()
    return PartitionSpec(*layers, *[PartitionSpec.UNCONSTRAINED] * 2)


def _moves(x: jax.Array) -> list[PartitionSpec]:
    """The splits on the way, after each axis of the layers but the last has moved."""
    layers, _ = _split(x.shape, jax.sharding.get_abstract_mesh())
    free = [PartitionSpec.UNCONSTRAINED] * 2
    return [PartitionSpec(layers[: i + 1], *free) for i in range(len(layers) - 1)]


def _constrained(x: jax.Array, specs: list[PartitionSpec]) -> jax.Array:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return x
    for one in specs:
        x = jax.lax.with_sharding_constraint(x, one)
    return x


def _split(shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> tuple[tuple, tuple]:
    """The axes of the mesh that split the layers, and those that split the last dim."""
    *layers, _, last = shape
    num_layers = layers[0] if layers else 1
    axes: list[tuple] = [(), ()]
    for axis in (a for a in ORDER if mesh.shape.get(a, 1) > 1):
        for i, dim in enumerate((num_layers, last)):
            if dim % math.prod(mesh.shape[a] for a in (*axes[i], axis)) == 0:
                axes[i] += (axis,)
                break
    return axes[0], axes[1]
