"""The mesh, and one table from logical axes to mesh axes.

Models name the axes of their parameters and activations and are independent of devices; this file
turns the names into shardings. The mesh has five axes, ordered from the slowest network to the
fastest:

* ``stage``: splits the layers; microbatches pass through the stages (`parallel.pipeline`);
* ``data``: replicas of the parameters, each with its own part of the batch (slow network, DCN);
* ``fsdp``: splits the batch *and* the parameters (ZeRO-3; fast network);
* ``context``: splits the sequence and the parameters (`nn.attention.ring`);
* ``tensor``: splits heads, MLP width and vocabulary (Megatron). Between the matmuls it splits the
  sequence, so that norms and residuals are neither stored nor computed twice.

Shape letters: B batch · S length · D embed · V vocab.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from maxlp.schema import INT32, Count, Range


@dataclasses.dataclass(frozen=True)
class _NotZero:
    def error(self, value: Any) -> str | None:
        return None if value else "must not be 0; 1 is no split, and -1 takes the remaining devices"


AxisSize = Annotated[int, Range(at_least=-1), _NotZero(), INT32]
MESH_AXES = ("stage", "data", "fsdp", "context", "tensor")
_AXIS_TYPES = (AxisType.Auto,) * len(MESH_AXES)

RULES: dict[str, str | tuple[str, ...] | None] = {
    # parameters
    "vocab": "tensor",  # and no other axis: `lookup` and `all_gather_params` count on it
    "embed": ("fsdp", "context"),
    "q_heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "norm": None,  # vectors of the residual stream: norms, gains, biases, positions
    "patch": None,  # the pixels of a patch
    "joint": None,  # the features that CLIP compares
    "layers": "stage",
    "replica": "data",  # the first axis of state that each replica has for itself
    # activations
    "batch": ("data", "fsdp"),
    "seq": "context",
    "act_seq": ("context", "tensor"),  # the sequence between matmuls (residual stream and norms)
    "lookup": "data",  # batch and sequence at the embedding lookup: no axis that splits the table
    "lookup_seq": "stage",
    "sent_seq": ("stage", "context"),  # on the way from there to the batch and "embed_seq"
    "sent_embed": "fsdp",
    "embed_seq": ("context", "stage", "tensor"),  # between embedding and blocks, outside the pipeline
    "logits_seq": ("context", "stage"),  # in the head, outside the pipeline
    "batch_seq": ("data", "fsdp", "context", "stage"),  # batch and logits_seq merged into one dim
    "act_embed": None,
    "act_heads": "tensor",
    "act_mlp": "tensor",
    "act_vocab": "tensor",
}


# --- the mesh -------------------------------------------------------------------------------------------


def make_mesh(
    *,
    stage: AxisSize = 1,
    data: AxisSize = 1,
    fsdp: AxisSize = -1,
    context: AxisSize = 1,
    tensor: AxisSize = 1,
    dcn_data: Count = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """The device mesh, with automatic (GSPMD) axes; the config's ``mesh`` section.

    Args:
      stage, data, fsdp, context, tensor: sizes of the axes. One of them may be -1, which takes the
        remaining devices.
      dcn_data: number of slices or hosts that the ``data`` axis spans over the slow network (HSDP).
        The mesh's ``data`` axis has size ``dcn_data * data``; the other axes stay inside one slice
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
        sizes = (sizes[0], sizes[1] // dcn_data, *sizes[2:])
        grid = mesh_utils.create_hybrid_device_mesh(
            sizes, (1, dcn_data, 1, 1, 1), devices, process_is_granule=not on_slices
        )
    else:
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=_AXIS_TYPES)


def dcn_sizes(devices: Sequence[jax.Device]) -> tuple[int, ...]:
    """The sizes that ``dcn_data`` can have: the number of slices; except on TPUs also 1 and that of hosts.

    No other axis can span TPU slices, and the hosts of a slice do not count: a fast network connects them.
    """
    slices = len({getattr(d, "slice_index", 0) for d in devices})
    if devices[0].platform == "tpu":
        return (slices,)
    return 1, slices, len({d.process_index for d in devices})


def abstract_mesh(axes: Mapping[str, int]) -> AbstractMesh:
    """A mesh of these sizes without devices; an axis that is not given has size 1."""
    return AbstractMesh(tuple(axes.get(name, 1) for name in MESH_AXES), MESH_AXES, axis_types=_AXIS_TYPES)


def resolve_axes(num_devices: int, *, dcn_data: int = 1, **axes: int) -> dict[str, int]:
    """The sizes of all axes, with -1 filled in and ``dcn_data`` multiplied into ``data``.

    Their product is ``num_devices``.

    Raises:
      ValueError: sizes that do not multiply to the number of devices.
    """
    sizes = {name: axes.get(name, 1) for name in MESH_AXES}
    given = {name: size for name, size in (sizes | {"dcn_data": dcn_data}).items() if size != 1}
    text = ", ".join(f"mesh.{name}={size}" for name, size in given.items()) or "mesh has one device"
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1 or dcn_data < 1 or any(s < 1 and s != -1 for s in sizes.values()):
        raise ValueError(
            f"{text}: sizes must be positive, and at most one of {', '.join(MESH_AXES)} may be -1"
        )
    taken = dcn_data * math.prod(s for s in sizes.values() if s != -1)
    if free and num_devices % taken == 0:
        sizes[free[0]] = num_devices // taken
        taken = num_devices
    if taken != num_devices:
        needed = f"a multiple of {taken}" if free else f"{taken}"
        raise ValueError(
            f"{text}: the number of devices, {num_devices}, is not {needed}; change the sizes or the "
            "number of devices"
        )
    return sizes | {"data": dcn_data * sizes["data"]}


def describe(axes: Mapping[str, int]) -> str:
    """The mesh axes larger than 1, as in "fsdp 4 × tensor 2"."""
    return " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one device"


def axes_size(mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...] | None) -> int:
    """The product of the sizes of these mesh axes."""
    return math.prod(mesh.shape[axis] for axis in axis_names(axes))


def axis_names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """One entry of a PartitionSpec as a tuple of mesh axes."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else axes


# --- activations ----------------------------------------------------------------------------------------


def spec(*names: str | None) -> PartitionSpec:
    """The PartitionSpec of an array whose dims have these logical names (None: not split).

    It leaves out axes that a `jax.shard_map` around the caller has split already.
    """
    axes = [None if name is None else RULES[name] for name in names]
    if manual := jax.sharding.get_abstract_mesh().manual_axes:
        axes = [tuple(a for a in axis_names(dim) if a not in manual) or None for dim in axes]
    return PartitionSpec(*axes)


def sum_of_replicas(x: jax.Array) -> jax.Array:
    """The sum over the axes that are manual here; the identity where none is."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.psum(x, manual) if manual else x


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains the sharding of an activation; the identity without a mesh.

    A dim that its mesh axes do not divide is not split (a batch of one prompt on eight devices).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return x
    axes = spec(*names)
    fit = [a if dim % axes_size(mesh, a) == 0 else None for dim, a in zip(x.shape, axes, strict=True)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*fit))


def gather_sequence(x_BSD: jax.Array) -> jax.Array:
    """Gathers a norm's output over the tensor axis, because matmuls read all positions.

    The first constraint makes XLA gather the rounded output; of a recomputed norm it would gather the
    float32 values. The second does not hold for the gradient: XLA would gather gradients that are split
    already (the sum over an input's adapters), only to split them again. With a context axis it holds for
    the gradient too; otherwise XLA would gather positions over context.
    """
    x_BSD = constrain(x_BSD, "batch", "act_seq", "act_embed")
    if jax.sharding.get_abstract_mesh().shape.get("context", 1) > 1:
        return constrain(x_BSD, "batch", "seq", "act_embed")
    return _constrained_forward(x_BSD, ("batch", "seq", "act_embed"))


def split_sequence(x_BSD: jax.Array) -> jax.Array:
    """Splits positions over the tensor axis, as the residual stream and norms use them.

    With a context axis, x and its gradient are constrained to "seq" first. By default XLA gathers positions
    over context: those of the input of the matmul that makes x, because context also splits the output dim
    of its kernel ("embed"), and those of both operands of the kernel's gradient.
    """
    if jax.sharding.get_abstract_mesh().shape.get("context", 1) > 1:
        x_BSD = constrain(x_BSD, "batch", "seq", "act_embed")
    return constrain(x_BSD, "batch", "act_seq", "act_embed")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _constrained_forward(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    return constrain(x, *names)


_constrained_forward.defvjp(lambda x, names: (constrain(x, *names), None), lambda names, _, g: (g,))


def split_chunks(x: jax.Array, n: int) -> jax.Array:
    """(B, S, …) in ``n`` chunks of the sequence, (n, P, B/b, S/s/n, …), of which each device has a part.

    P = b × s: at the head, the mesh splits the batch in b parts and the sequence in s. ``n`` is lowered to
    its largest divisor that S/s has too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    b, s = (1 if mesh.empty else axes_size(mesh, axes) for axes in spec("batch", "logits_seq"))
    B, S = x.shape[:2]
    assert B % b == S % s == 0, "see run.constraints"
    n = math.gcd(n, S // s)
    x = x.reshape(b, B // b, s, n, S // (s * n), *x.shape[2:])
    x = jnp.moveaxis(x, (3, 0, 2), (0, 1, 2))
    x = x.reshape(n, b * s, *x.shape[3:])
    return constrain(x, None, "batch_seq", *[None] * (x.ndim - 2))


def lookup(table_VD: jax.Array, ids_BS: jax.Array) -> jax.Array:
    """Rows of a parameter with the axes ``("vocab", "embed")``: (B, S, D).

    In a `jax.shard_map`, jaxlib 0.11 and 0.12 abort when they partition a lookup in a table of which both
    dims are split (``ExpandDeviceGroupsWithIota``). There each device looks up what it has of the
    vocabulary, and the parts are added: in float32, as XLA for CPUs aborts on such a sum in bfloat16.
    """
    mesh, axis = jax.sharding.get_abstract_mesh(), RULES["vocab"]
    if not mesh.manual_axes or mesh.shape[axis] == 1:
        return jnp.take(table_VD, ids_BS, axis=0)

    def find(rows_VD: jax.Array, ids_BS: jax.Array) -> jax.Array:
        at = rows_VD.at[ids_BS - jax.lax.axis_index(axis) * len(rows_VD)]
        found = at.get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return jax.lax.psum(found.astype(jnp.float32), axis).astype(found.dtype)

    part, whole = PartitionSpec(axis), PartitionSpec()
    run = jax.shard_map(find, in_specs=(part, whole), out_specs=whole, axis_names={axis}, check_vma=False)
    return run(table_VD, ids_BS)


# --- parameters -----------------------------------------------------------------------------------------


def constrain_params(variables: nnx.State, *, gathered: bool = False) -> nnx.State:
    """Constrains parameters to their shards; if ``gathered``, then gathers them except over tensor."""

    def one(variable: nnx.Variable) -> nnx.Variable:
        names = variable.get_metadata("out_sharding")
        shard = constrain(variable[...], *names)
        left = (name if name and RULES[name] == "tensor" else None for name in names)
        return variable.replace(constrain(shard, *left) if gathered else shard)

    return jax.tree.map(one, variables, is_leaf=lambda v: isinstance(v, nnx.Variable))


def all_gather_params(variables: nnx.State) -> nnx.State:
    """Gathers every parameter, with one copy for each of the P parts of `split_chunks` as first axis.

    A copy is split by the tensor axis only. Each parameter is gathered once, and its gradient, the sum
    over the copies, is scattered once to the parameter's shards. Only then are shards added between
    replicas or stages, whose network is slower.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def one(variable: nnx.Variable) -> nnx.Variable:
        if mesh.size <= 1:
            return variable.replace(variable[...][None])
        axes = spec(*variable.get_metadata("out_sharding"))
        split = [(dim, axis) for dim, axis in enumerate(axes) if axis not in (None, "tensor")]
        gathered = {name for _, axis in split for name in axis_names(axis)}
        replicas = tuple(name for name in axis_names(spec("batch_seq")[0]) if name not in gathered)

        def gather(shard: jax.Array) -> jax.Array:
            # Before the gathers: its transpose, which adds gradients of replicas, then sees shards only.
            shard = jax.lax.pcast(shard, replicas, to="varying")
            for dim, axis in split:
                shard = _all_gather(shard, axis, dim)
            return shard[None]

        whole = PartitionSpec(*spec("batch_seq"), *(axis if axis == "tensor" else None for axis in axes))
        return variable.replace(jax.shard_map(gather, in_specs=axes, out_specs=whole)(variable[...]))

    return jax.tree.map(one, variables, is_leaf=lambda v: isinstance(v, nnx.Variable))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather(shard: jax.Array, axis: str | tuple[str, ...], dim: int) -> jax.Array:
    """Gathers a dim over mesh axes; the gradient is scattered with the other dims padded to round sizes.

    libtpu scatters on the SparseCores of a TPU only what it can cut into tiles. It cannot cut a vocabulary
    of 1,002 × 128 entries, and would sum the whole gradient on every device: twice the bytes.
    """
    return jax.lax.all_gather(shard, axis, axis=dim, tiled=True)


def _all_gather_bwd(axis: str | tuple[str, ...], dim: int, _: None, g: jax.Array) -> tuple[jax.Array]:
    others = [(0, 0 if i == dim else _round_size(n) - n) for i, n in enumerate(g.shape)]
    scattered = jax.lax.psum_scatter(jnp.pad(g, others), axis, scatter_dimension=dim, tiled=True)
    return (scattered[tuple(slice(None if i == dim else n) for i, n in enumerate(g.shape))],)


_all_gather.defvjp(lambda shard, axis, dim: (_all_gather(shard, axis, dim), None), _all_gather_bwd)


def _round_size(n: int) -> int:
    """The next multiple of a power of two, at most 1/32 above ``n``."""
    step = 2 ** max(0, n.bit_length() - 6)
    return -(-n // step) * step


def param_shardings(variables: nnx.State, mesh: Mesh | AbstractMesh) -> dict:
    """NamedShardings of a model's variables, as a pure dict, from their logical names.

    Raises:
      ValueError: a dim that its mesh axes do not divide; the message names the parameter.
    """
    flat = nnx.to_flat_state(variables)

    def names_of(variable: nnx.Variable) -> tuple[str | None, ...]:
        return variable.get_metadata("out_sharding", None) or (None,) * len(variable.shape)

    def one(path: tuple, variable: nnx.Variable) -> NamedSharding:
        names = names_of(variable)
        axes = spec(*names)
        for dim, name, axis in zip(variable.shape, names, axes, strict=True):
            if dim % axes_size(mesh, axis):
                split = [f"mesh.{a}={mesh.shape[a]}" for a in axis_names(axis) if mesh.shape[a] > 1]
                raise ValueError(
                    f"{' × '.join(split)} does not divide the axis {name!r} of size {dim} of "
                    f"{'/'.join(map(str, path))}; {largest_size(axis)} divides all of them, with the other "
                    "devices on mesh.data"
                )
        return NamedSharding(mesh, axes)

    def largest_size(axis: str | tuple[str, ...]) -> int:
        """The largest divisor of the size of these mesh axes that divides every dim which they split."""
        placed = [pair for _, v in flat for pair in zip(v.shape, spec(*names_of(v)), strict=True)]
        return math.gcd(axes_size(mesh, axis), *(dim for dim, place in placed if place == axis))

    return nnx.traversals.unflatten_mapping({path: one(path, v) for path, v in flat})


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The sharding of an array that every device holds as a whole."""
    return NamedSharding(mesh, PartitionSpec())


# --- the batch ------------------------------------------------------------------------------------------


def split_rows(x: jax.Array, n: int) -> jax.Array:
    """(B, …) to (n, B/n, …). Part i takes rows i, n+i, 2n+i, …: each device keeps its own rows."""
    return jnp.moveaxis(x.reshape(x.shape[0] // n, n, *x.shape[1:]), 1, 0)


def batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """How many parts the batch dim is split into."""
    return axes_size(mesh, RULES["batch"])


def batch_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The sharding of a batch's arrays: the first dim is split, the others are not."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))
