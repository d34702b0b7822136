"""Where arrays live: the mesh, and one table from logical axes to mesh axes.

Models name the axes of their parameters and activations; nothing in them knows of devices. This file
turns names into shardings. Five mesh axes, from the slowest network to the fastest:

* ``stage``: the layers are split, and microbatches pass through them (`models.pipeline`);
* ``data``: replicas of the parameters, each with its own part of the batch (slow network, DCN);
* ``fsdp``: the batch *and* the parameters are split (ZeRO-3; fast network);
* ``context``: the sequence and the parameters are split (`models.ring`);
* ``tensor``: heads, MLP width and vocabulary are split (Megatron); between the matmuls the sequence is
  split over the same axis, so that norms and residuals are neither stored nor computed twice.
"""

import collections
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("stage", "data", "fsdp", "context", "tensor")

RULES: dict[str, str | tuple[str, ...] | None] = {
    # parameters
    "vocab": "tensor",
    "embed": ("fsdp", "context"),
    "q_heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "norm": None,  # vectors of the residual stream: norms, gains, biases, positions
    "patch": None,  # the pixels of a patch
    "joint": None,  # the features that CLIP compares
    "layers": "stage",
    # activations
    "batch": ("data", "fsdp"),
    "seq": "context",
    "act_seq": ("context", "tensor"),  # the sequence between matmuls (residual stream and norms)
    "lookup": "data",  # batch and sequence where the embeddings are looked up: not split as the table is
    "lookup_seq": "stage",
    "embed_seq": ("context", "stage", "tensor"),  # outside of the pipeline: between embedding and blocks
    "ends_seq": ("context", "stage"),  # and in the head
    "parts": ("data", "fsdp", "context", "stage"),  # those of batch and ends_seq as one dim
    "act_embed": None,
    "act_heads": "tensor",
    "act_mlp": "tensor",
    "act_vocab": "tensor",
}


def make_mesh(
    *,
    stage: int = 1,
    data: int = 1,
    fsdp: int = -1,
    context: int = 1,
    tensor: int = 1,
    dcn_data: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """The device mesh, with automatic (GSPMD) axes.

    Args:
      stage, data, fsdp, context, tensor: sizes of the axes; one of them may be -1 and takes the devices
        that are left.
      dcn_data: number of slices or hosts that the ``data`` axis spans over the slow network (HSDP): the
        mesh's ``data`` axis has ``dcn_data * data`` entries, and the other axes stay inside one slice
        (TPU) or one host (elsewhere).
      devices: defaults to all devices of all processes.

    Raises:
      ValueError: sizes that do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    axes = dict(stage=stage, data=data, fsdp=fsdp, context=context, tensor=tensor)
    sizes = tuple(resolve_axes(len(devices), dcn_data=dcn_data, **axes).values())
    if dcn_data > 1:
        on_slices = len({getattr(d, "slice_index", 0) for d in devices}) == dcn_data
        grid = mesh_utils.create_hybrid_device_mesh(
            sizes, (1, dcn_data, 1, 1, 1), devices, process_is_granule=not on_slices
        )
    else:
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def resolve_axes(num_devices: int, *, dcn_data: int = 1, **axes: int) -> dict[str, int]:
    """The sizes of all axes in one slice, with -1 filled in.

    ``dcn_data`` times their product is ``num_devices``.
    """
    sizes = {name: axes.get(name, 1) for name in MESH_AXES}
    text = ", ".join(f"mesh.{k}={v}" for k, v in (sizes | {"dcn_data": dcn_data}).items())
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1 or dcn_data < 1 or any(s < 1 and s != -1 for s in sizes.values()):
        raise ValueError(f"{text}: sizes are positive, and at most one of {', '.join(MESH_AXES)} may be -1")
    taken = dcn_data * math.prod(s for s in sizes.values() if s != -1)
    if free and num_devices % taken == 0:
        sizes[free[0]] = num_devices // taken
        taken = num_devices
    if taken != num_devices:
        raise ValueError(
            f"{text}: the axes ask for a multiple of {taken} devices, there are {num_devices}; "
            "set one axis to -1 or run with that many devices"
        )
    return sizes


def describe(axes: Mapping[str, int]) -> str:
    """The axes of a mesh that split anything, as in "fsdp 4 × tensor 2"."""
    return " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one device"


def spec(*names: str | None) -> PartitionSpec:
    """The PartitionSpec of an array whose dims have these logical names (None: not split)."""
    return PartitionSpec(*(None if name is None else RULES[name] for name in names))


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Tells XLA how an activation is split; the identity without a mesh.

    A dim that its mesh axes do not divide stays whole (a batch of one prompt on eight devices).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    axes = spec(*names)
    fit = [a if dim % _size(mesh, a) == 0 else None for dim, a in zip(x.shape, axes, strict=True)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*fit))


def constrain_gradient(x: jax.Array, *names: str | None) -> jax.Array:
    """The identity, whose gradient is `constrain`-ed on a mesh with a context axis.

    There the gradient of a weight sums over positions that are split over context in one operand and over
    context and tensor in the other, and XLA, told nothing, gathers both over all axes. Without a context
    axis it finds the way by itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.shape.get("context", 1) == 1 else _constrain_gradient(x, names)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _constrain_gradient(x: jax.Array, names: tuple) -> jax.Array:
    return x


_constrain_gradient.defvjp(lambda x, names: (x, None), lambda names, _, g: (constrain(g, *names),))


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def _size(mesh: Any, axes: str | tuple[str, ...] | None) -> int:
    return math.prod(mesh.shape[a] for a in _names(axes))


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts the batch dim is split."""
    return _size(mesh, RULES["batch"])


def chunks(x: jax.Array, n: int) -> jax.Array:
    """(B, S, …) in ``n`` pieces of the sequence that all devices share: (n, P, B/b, S/s/n, …).

    P = b × s parts of rows and sequence, one for each device that has tokens of its own in the head.
    """
    mesh = jax.sharding.get_abstract_mesh()
    b, s = (1 if mesh.empty else _size(mesh, RULES[name]) for name in ("batch", "ends_seq"))
    B, S = x.shape[:2]
    assert B % b == S % (s * n) == 0, "checked with the config"
    x = x.reshape(b, B // b, s, n, S // (s * n), *x.shape[2:])
    x = jnp.moveaxis(x, (3, 0, 2), (0, 1, 2))
    x = x.reshape(n, b * s, *x.shape[3:])
    return constrain(x, None, "parts", *[None] * (x.ndim - 2))


def copies(variables: nnx.State) -> nnx.State:
    """Every parameter whole, once for each of the parts of `chunks`, which are its first axis.

    Only tensor still splits a copy. A parameter is gathered once; its gradient, a sum over the parts, is
    scattered once to where the parameter lies.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def one(variable: nnx.Variable) -> nnx.Variable:
        if mesh.empty or mesh.size == 1:
            return variable.replace(variable[...][None])
        axes = spec(*variable.get_metadata("out_sharding"))
        split = [(dim, axis) for dim, axis in enumerate(axes) if axis not in (None, "tensor")]

        def gather(shard: jax.Array) -> jax.Array:
            for dim, axis in split:
                shard = jax.lax.all_gather(shard, axis, axis=dim, tiled=True)
            return shard[None]

        whole = PartitionSpec(RULES["parts"], *(axis if axis == "tensor" else None for axis in axes))
        return variable.replace(jax.shard_map(gather, in_specs=axes, out_specs=whole)(variable[...]))

    return jax.tree.map(one, variables, is_leaf=lambda v: isinstance(v, nnx.Variable))


def batch_part(mesh: Mesh) -> tuple[int, int]:
    """Which of how many equal parts of the global batch this process reads.

    Processes that hold the same rows (other stages, other parts of the sequence) read the same part.

    Raises:
      ValueError: processes whose rows overlap in part.
    """
    if mesh.empty:
        return jax.process_index(), jax.process_count()
    rows = np.indices(mesh.devices.shape)
    which = [MESH_AXES.index(axis) for axis in RULES["batch"] or ()]
    shard = np.ravel_multi_index([rows[i] for i in which], [mesh.devices.shape[i] for i in which])
    held: dict[int, set[int]] = {}
    for device, part in zip(mesh.devices.flat, shard.flat, strict=True):
        held.setdefault(device.process_index, set()).add(int(part))
    parts = sorted({tuple(sorted(one)) for one in held.values()})
    if sum(map(len, parts)) != batch_shards(mesh):
        raise ValueError(
            f"mesh {dict(mesh.shape)}: the parts of the batch that processes hold overlap; let "
            "mesh.context × mesh.tensor fill whole processes, or one process a whole number of them"
        )
    return parts.index(tuple(sorted(held[jax.process_index()]))), len(parts)


def param_shardings(variables: nnx.State, mesh: Mesh) -> dict:
    """NamedShardings of a model's variables, as a pure dict, from their logical names.

    Raises:
      ValueError: a dim that its mesh axis does not divide, with the parameter's path and the fix.
    """

    def one(path: tuple, variable: nnx.Variable) -> NamedSharding:
        names = variable.get_metadata("out_sharding", None) or (None,) * len(variable.shape)
        axes = spec(*names)
        for dim, name, axis in zip(variable.shape, names, axes, strict=True):
            if dim % _size(mesh, axis):
                sizes = " × ".join(f"mesh.{a}={mesh.shape[a]}" for a in _names(axis))
                raise ValueError(
                    f"{'/'.join(map(str, path))}: axis {name!r} of size {dim} does not divide by {sizes}; "
                    "change the mesh or the model"
                )
        return NamedSharding(mesh, axes)

    flat = nnx.to_flat_state(variables)
    return nnx.traversals.unflatten_mapping({path: one(path, v) for path, v in flat})


def opt_state_shardings(tx: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """Shardings of ``tx.init(params)``, so that the state is born sharded.

    A leaf belongs to the parameter whose path is part of its own; counters belong to none and lie on
    every device. What belongs to a parameter

    * lies like it, if it has its shape (moments);
    * keeps the axes of the dims that it shares, if it has its rank but one dim of another size (low-rank
      moments and projectors). The axes of the other dim go to the largest shared one: a device holds as
      small a part as of the parameter, and what GaLore multiplies by its projector is not split where
      it is summed over;
    * lies on every device otherwise (one number a layer, factored moments).

    A quantized array is a node with ``codes`` and ``scale``; the scale lies like the codes.

    Args:
      params: the parameters as `jax.ShapeDtypeStruct` with shardings.
    """
    by_path = dict(jax.tree.flatten_with_path(params)[0])

    def owner(path: tuple) -> Any:
        parts = (path[i:j] for i in range(len(path)) for j in range(i + 1, len(path) + 1))
        return next((by_path[part] for part in parts if part in by_path), None)

    def one(path: tuple, leaf: Any) -> Any:
        param = owner(path)
        if not hasattr(leaf, "codes"):
            return _beside(leaf.shape, param, mesh)
        codes = _beside(leaf.codes.shape, param, mesh)
        return leaf._replace(codes=codes, scale=_fitted(codes, leaf.scale.shape))

    state = jax.eval_shape(tx.init, params)
    return jax.tree.map_with_path(one, state, is_leaf=lambda x: hasattr(x, "codes"))


def _beside(shape: tuple[int, ...], param: Any, mesh: Mesh) -> NamedSharding:
    """The sharding of a state of this shape that belongs to a parameter (None: to no one)."""
    if param is None or len(shape) != len(param.shape):
        return replicated(mesh)
    if shape == param.shape:
        return param.sharding
    axes = _dim_axes(param.sharding, len(shape))
    shared = [i for i, (a, b) in enumerate(zip(shape, param.shape, strict=True)) if a == b]
    moved = tuple(axis for i, dim_axes in enumerate(axes) if i not in shared for axis in dim_axes)
    axes = [dim_axes if i in shared else () for i, dim_axes in enumerate(axes)]
    for i in sorted(shared, key=lambda i: -shape[i]):
        if shape[i] % _size(mesh, axes[i] + moved) == 0:
            axes[i] += moved
            break
    return NamedSharding(mesh, PartitionSpec(*(dim_axes or None for dim_axes in axes)))


def _fitted(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding with those dims whole that it does not divide."""
    axes = zip(shape, _dim_axes(sharding, len(shape)), strict=True)
    fit = (a if a and dim % _size(sharding.mesh, a) == 0 else None for dim, a in axes)
    return NamedSharding(sharding.mesh, PartitionSpec(*fit))


def _dim_axes(sharding: NamedSharding, rank: int) -> list[tuple[str, ...]]:
    """The mesh axes of each dim."""
    named = [tuple(_names(axes)) for axes in sharding.spec]
    return named + [()] * (rank - len(named))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def global_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Global device arrays from this process's rows of the batch: those of its `batch_part`."""
    sharding = batch_sharding(mesh)
    return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}


def device_batches(
    batches: Iterator[dict], mesh: Mesh, limit: int = 0, ahead: int = 2
) -> Iterator[tuple[dict[str, jax.Array], dict]]:
    """Global device batches, ``ahead`` of their use, each with the iterator's state after it.

    The state of a batch still waiting here is not yet that of the run: a checkpoint takes the state that
    came with the last batch trained on. ``limit`` batches are taken, 0 for all.
    """
    waiting: collections.deque = collections.deque()
    for count, batch in enumerate(batches, 1):
        waiting.append((global_batch(batch, mesh), batches.get_state()))
        if count == limit:
            break
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting
