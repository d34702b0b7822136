"""Placement of optimizer state: every array follows the parameter it belongs to."""

from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from maxlp.numerics.formats import Quantized
from maxlp.parallel.sharding import axes_size, axis_names, replicated, spec


class PerReplica(NamedTuple):
    """State that each of the R replicas of the ``data`` axis has for itself: arrays (R, …)."""

    state: Any


class SplitByLayers(NamedTuple):
    """State of whole matrices, split by layers (`by_layers.spec_of_layers`)."""

    state: Any


def opt_state_shardings(tx: optax.GradientTransformation, params: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Shardings of ``tx.init(params)``, so that the state is initialized already sharded; see `places`.

    What ``tx.init`` puts into the host's memory (`optim.offload`) is initialized and kept there.

    Args:
      params: the parameters as `jax.ShapeDtypeStruct` with shardings.
    """
    jaxpr, shapes = jax.make_jaxpr(tx.init, return_shape=True)(params)
    where, structure = jax.tree.flatten(places(shapes, params, mesh))
    # JAX drops the memory kind for devices without memories, such as a GPU that is only compiled for.
    has_memories = isinstance(mesh, AbstractMesh) or mesh.devices.flat[0].addressable_memories()
    mesh_of_host = mesh if has_memories else mesh.abstract_mesh

    def one(place: NamedSharding, aval: Any) -> NamedSharding:
        if aval.memory_space != jax.memory.Space.Host:
            return place
        return NamedSharding(mesh_of_host, place.spec, memory_kind="pinned_host")

    return structure.unflatten(one(*each) for each in zip(where, jaxpr.out_avals, strict=True))


def places(opt_state: Any, params: Any, mesh: Mesh | AbstractMesh) -> Any:
    """How a mesh splits the state of an optimizer.

    A leaf belongs to the parameter whose path is part of its own path; counters belong to none and are
    replicated. A leaf that belongs to a parameter

    * is split like it, if it has its shape (moments);
    * keeps the axes of the dims that both share, if it has the same rank but one dim of another size
      (low-rank moments and projectors). The axes of that dim go to the largest shared one: a device then
      holds as small a fraction as of the parameter, and GaLore's products with its projector sum over a
      dim that is not split;
    * is replicated otherwise (one number a layer, factored moments).

    The first dim of `PerReplica` is split over ``data``, and the others as above; `SplitByLayers` is
    split by layers.

    Args:
      opt_state: as shapes.
      params: the parameters as `jax.ShapeDtypeStruct` with shardings on this mesh.
    """
    by_path = dict(jax.tree.flatten_with_path(params)[0])

    def owner(path: tuple) -> Any:
        for start in range(len(path)):
            for stop in range(start + 1, len(path) + 1):
                if path[start:stop] in by_path:
                    return by_path[path[start:stop]]
        return None

    def one(path: tuple, leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            mine = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), leaf.state)
            split = jax.tree.map_with_path(one, mine, is_leaf=_is_container)
            first = spec("replica")
            return PerReplica(jax.tree.map(lambda x: x.update(spec=PartitionSpec(*first, *x.spec)), split))
        if isinstance(leaf, SplitByLayers):
            from maxlp.parallel.by_layers import spec_of_layers

            return jax.tree.map(lambda x: NamedSharding(mesh, spec_of_layers(x.shape, mesh)), leaf)
        param = owner(path)
        if not isinstance(leaf, Quantized):
            return _like_param(leaf.shape, param, mesh)
        codes = _like_param(leaf.codes.shape, param, mesh)
        return leaf._replace(codes=codes, scale=_divisible(codes, leaf.scale.shape))

    return jax.tree.map_with_path(one, opt_state, is_leaf=_is_container)


def _is_container(x: Any) -> bool:
    return isinstance(x, Quantized | PerReplica | SplitByLayers)


def _like_param(shape: tuple[int, ...], param: Any, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The sharding of state of this shape that belongs to a parameter (None: no owning parameter)."""
    if param is None or len(shape) != len(param.shape):
        return replicated(mesh)
    if shape == param.shape:
        return param.sharding
    axes = _dim_axes(param.sharding, len(shape))
    shared = [i for i, (a, b) in enumerate(zip(shape, param.shape, strict=True)) if a == b]
    moved = tuple(axis for i, dim_axes in enumerate(axes) if i not in shared for axis in dim_axes)
    axes = [dim_axes if i in shared else () for i, dim_axes in enumerate(axes)]
    for i in sorted(shared, key=lambda i: shape[i], reverse=True):
        if shape[i] % axes_size(mesh, axes[i] + moved) == 0:
            axes[i] += moved
            break
    return NamedSharding(mesh, PartitionSpec(*(dim_axes or None for dim_axes in axes)))


def _divisible(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding without the axes that do not divide their dim."""
    axes = zip(shape, _dim_axes(sharding, len(shape)), strict=True)
    fit = (a if a and dim % axes_size(sharding.mesh, a) == 0 else None for dim, a in axes)
    return NamedSharding(sharding.mesh, PartitionSpec(*fit))


def _dim_axes(sharding: NamedSharding, rank: int) -> list[tuple[str, ...]]:
    """The mesh axes of each dim."""
    named = [axis_names(axes) for axes in sharding.spec]
    return named + [()] * (rank - len(named))
