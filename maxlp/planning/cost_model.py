"""What the closed forms of all families share: the state as shapes, work, and a ledger of collectives."""

import dataclasses
import math
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from maxlp import families
from maxlp.core.train_state import State, num_params
from maxlp.optim.config import OptimizerKind
from maxlp.optim.muon import TOGETHER
from maxlp.optim.soap import Side
from maxlp.parallel.by_layers import ORDER, num_filled
from maxlp.parallel.opt_state import places
from maxlp.parallel.sharding import abstract_mesh
from maxlp.planning.hlo import Collective
from maxlp.planning.jaxpr_flops import decompositions, matmul_flops
from maxlp.precision import blocks, scatter
from maxlp.precision.recipes import GEMMS
from maxlp.run.experiment import assemble
from maxlp.run.settings import Machine, Settings


@dataclasses.dataclass(frozen=True)
class StateShapes:
    """The training state as shapes.

    Attributes:
      tree: on one mesh. On every mesh its parameters have the same partition specs, and the state of the
        optimizer those of `opt_state.places`.
      update_flops: FLOPs of the optimizer's matmuls in a step, of all layers once.
      decompositions: those of the optimizer, see `jaxpr_flops.decompositions`; no closed form counts them.
    """

    tree: State
    update_flops: float = 0.0
    decompositions: frozenset[str] = frozenset()
    _bytes: dict = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def num_params(self) -> int:
        """The number of parameters of the model."""
        return num_params(self.tree["params"])

    def bytes_on(self, mesh: AbstractMesh, part: str) -> float:
        """Bytes of ``params``, ``opt_state`` or ``model_state`` in one device's memory.

        Raises:
          ValueError: a dim that the mesh does not divide.
        """
        on_device, _ = self._bytes_on(mesh, part)
        return on_device

    def offloaded_on(self, mesh: AbstractMesh) -> float:
        """Bytes of the optimizer's state that are in the host's memory, of one device."""
        _, on_host = self._bytes_on(mesh, "opt_state")
        return on_host

    def sides_on(self, mesh: AbstractMesh, released: bool) -> tuple[float, float]:
        """Bytes of SOAP's sides (`soap.Side`) on one device, and of the workspace of their refresh.

        Decomposing the side of one layer takes 1.5 times its size. Where devices share the layers, each
        decomposes all of its own at once, which takes 4 times their size. Where they cannot share them and
        layers are not released, the largest stack of sides is also copied to another layout, and gradients
        and first moments are split like it.
        """
        held, workspace = 0.0, 0.0

        def is_side(x: Any) -> bool:
            return isinstance(x, Side)

        if not any(map(is_side, jax.tree.leaves(self.tree["opt_state"], is_leaf=is_side))):
            return held, workspace
        for side in filter(is_side, jax.tree.leaves(self._on(mesh, "opt_state"), is_leaf=is_side)):
            *layers, m, n = side.gram.sharding.shard_shape(side.gram.shape)
            stack, whole = 4.0 * math.prod((*layers, m, n)), 4.0 * side.gram.shape[-1] ** 2
            held += 2 * stack
            if [*layers] != [*side.gram.shape[:-2]]:
                needed = 4.0 * math.prod(layers) * whole
            elif mesh.size == 1 or released:
                needed = 1.5 * whole
            else:
                needed = 1.5 * whole + stack + 2 * 4 * self.num_params / mesh.size
            workspace = max(workspace, needed)
        return held, workspace

    def _bytes_on(self, mesh: AbstractMesh, part: str) -> tuple[float, float]:
        """Bytes of a part of the state in the memory of one device and, for that device, of its host."""
        if (mesh, part) not in self._bytes:
            on_device = on_host = 0.0
            for leaf in jax.tree.leaves(self._on(mesh, part)):
                size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
                if leaf.sharding.memory_kind == "pinned_host":
                    on_host += size
                else:
                    on_device += size
            self._bytes[mesh, part] = on_device, on_host
        return self._bytes[mesh, part]

    def _on(self, mesh: AbstractMesh, part: str) -> Any:
        """A part of the state as shapes with their shardings on a mesh."""

        def place(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            where = NamedSharding(mesh, spec, memory_kind=leaf.sharding.memory_kind)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        if part != "opt_state":
            return jax.tree.map(lambda leaf: place(leaf, leaf.sharding.spec), self.tree[part])
        opt_state = self.tree[part]
        where = places(opt_state, self._on(mesh, "params"), mesh)
        return jax.tree.map(lambda leaf, at: place(leaf, at.spec), opt_state, where)


def held_state(s: Settings, mesh: AbstractMesh, state: StateShapes) -> dict[str, float]:
    """Bytes of the state on one device, by part: what it holds before, during and after a step."""
    rest = state.bytes_on(mesh, "model_state")  # state of precision, and weights that adapters freeze
    optimizer = state.bytes_on(mesh, "opt_state")
    held = {"parameters": state.bytes_on(mesh, "params")}
    if s.precision.exchange != "none":
        held["errors of the exchange"] = held["parameters"] * 4 / jnp.dtype(s.model.param_dtype).itemsize
    if s.train.local is not None:  # those of the device's replica, and the outer momentum
        held["local steps"] = 2 * held["parameters"]
    if s.train.lora is None:
        return held | {"optimizer": optimizer + rest}
    return held | {"frozen weights": rest, "optimizer": optimizer}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """The sizes of a stack of blocks on one device, all of one microbatch; a family's class adds its own.

    Shape letters: R rows of a device · S positions · D embed · F mlp · N heads · L layers · t the tensor
    axis.

    Attributes:
      a, param: bytes of one element of an activation and of a parameter.
      attention, remat: of the config's model; released gradients keep the inputs of the blocks and
        recompute the rest.
      frozen: only adapters are trained, whose size is neglected.
      unsampled: shares of the tokens that are not saved as inputs of the matmuls of a block: of q, k and v,
        of o, of the MLP, and of down; see `unsampled`.
    """

    R: int
    S: int
    D: int
    F: int
    N: int
    L: int
    t: int
    a: int
    param: int
    attention: str
    remat: str
    frozen: bool
    unsampled: list[float]

    @property
    def widths(self) -> dict[str, int]:
        """Path of each matmul of a block -> the dim of its kernel that is not D."""
        raise NotImplementedError

    @property
    def block_params(self) -> int:
        return self.D * sum(self.widths.values())

    @property
    def again(self) -> int:
        """How many times the backward pass runs a block forward again."""
        return 1 if self.remat in ("block", "offload") else 0

    @property
    def attention_again(self) -> int:
        """How many times it computes attention again.

        What kernels save has a name for the policies of `nn.stack`; what dense attention saves has none.
        """
        return 0 if self.remat == "none" or (self.remat == "dots" and self.attention != "xla") else 1


def shared_sizes(s: Settings, machine: Machine) -> dict[str, Any]:
    """Those fields of `Blocks` that are the same for all stacks of a model."""
    m = s.on(machine).model
    return dict(
        R=s.device_rows(machine),
        t=machine.axes["tensor"],
        a=jnp.dtype(m.dtype).itemsize,
        param=jnp.dtype(m.param_dtype).itemsize,
        attention=m.attention,
        remat="block" if s.train.release_gradients else m.remat,
        frozen=s.train.lora is not None,
    )


def workspace_of_matmuls(matmuls: str, largest: float) -> float:
    """Bytes of the float32 arrays that an optimizer with matmuls allocates for its update, on one device.

    It needs one array of the size of the largest stack of matrices: an update, or a clipped gradient that a
    matmul reads. Muon's iterations need three more for the matrices that they process at a time.

    Args:
      matmuls: see `optim.config.OptimizerKind`.
      largest: bytes of the largest stack in float32.
    """
    if matmuls == "none":
        return 0.0
    return largest + (3 * min(4 * TOGETHER, largest) if matmuls == "iterated" else 0.0)


def state_shapes(s: Settings, machine: Machine) -> StateShapes:
    """The state of a run; takes about a second of tracing.

    It leaves out state that each replica has for itself, whose shape depends on the mesh: see `held_state`.

    Raises:
      ValueError: a parameter that the mesh does not divide.
    """
    precision, train = s.precision, s.train
    s = dataclasses.replace(
        s,
        precision=dataclasses.replace(precision, exchange="none"),
        train=dataclasses.replace(train, local=None),
    )
    mesh = abstract_mesh(machine.axes)
    run = assemble(s, machine, cast(Mesh, mesh))  # shapes and shardings need no devices
    _, state = run.abstract_state()
    if s.optimizer.kind.matmuls == "none" and s.optimizer.galore is None:
        return StateShapes(state)
    update = jax.make_jaxpr(run.tx.update)(state["params"], state["opt_state"], state["params"])
    return StateShapes(state, matmul_flops(update.jaxpr), decompositions(update.jaxpr))


def add_update(flops: dict[str, float], s: Settings, machine: Machine, state: StateShapes, L: int) -> None:
    """Adds the optimizer's matmuls to the FLOPs of all devices, by dtype.

    Replicas repeat them, and layers of zeros are multiplied like others.

    Args:
      L: the number of layers of the (largest) stack.
    """
    if state.update_flops:
        filled = _num_filled(s.optimizer.kind, L, machine.axes) / L
        flops["float32"] = filled * machine.axes["data"] * state.update_flops


def _num_filled(optimizer: OptimizerKind, layers: int, axes: Mapping[str, int]) -> int:
    """The number of layers on which the optimizer computes, with those of zeros that it appends."""
    if not optimizer.moves:
        return layers
    return num_filled(layers, axes, with_state=optimizer.matmuls == "once")


def scatter_of_gradients(s: Settings, blocks: Blocks) -> tuple[str, float]:
    """The kind of the collective that sums the gradients of a block's kernels over ``fsdp``, and its bytes.

    ``fsdp`` splits the dim D of the kernels; of the other one, a device has only the shard of ``tensor``.
    """
    widths = [width // blocks.t for width in blocks.widths.values()]
    if s.precision.scatter == "none":
        return "reduce-scatter", blocks.D * sum(widths) * blocks.a
    return "all-to-all", blocks.D * sum(scatter.num_bytes(width, s.precision.scatter) for width in widths)


def gathered_kernels(s: Settings, blocks: Blocks) -> float:
    """Bytes of a block's kernels, without what ``tensor`` splits off, as ``fsdp`` all-gathers them."""
    sizes = (blocks.D * w * gathered_itemsize(s, path, blocks.a) for path, w in blocks.widths.items())
    return sum(sizes) / blocks.t


def gathered_itemsize(s: Settings, path: str, itemsize: int) -> float:
    """Bytes per element of a kernel that ``fsdp`` all-gathers, averaged over the layers of its stack.

    Where a tensor has one scale, XLA quantizes each shard and gathers the result. Kernels with other scales
    are counted unquantized, although with row-wise scales, for which a kernel is quantized along either
    axis, XLA gathers only half to three quarters of that.

    Args:
      itemsize: of the dtype of the matmuls.
    """
    rates = {rate for gemm, rate in matmul_dtypes(s, path).items() if gemm != "drhs"}
    scales = {use.granularity for use in s.recipe(path).operands["kernel"]}
    if scales != {"tensor"} or not rates <= {"float8", "int8"}:
        return itemsize
    plain = _plain_share(s, path)
    return plain * itemsize + (1 - plain)


def gathered_gradient_itemsize(s: Settings, machine: Machine, path: str, itemsize: int) -> float:
    """Bytes per element of an output's gradient that ``tensor`` all-gathers, averaged over the layers.

    On GPUs each matmul gathers its operand as it is quantized for it, and two matmuls that quantize it in
    the same way gather it once (`precision.mesh_product`). Other devices, block scales and adapters count
    as in high precision.

    Args:
      itemsize: of the dtype of the matmuls.
    """
    gemms, on_gpu = s.recipe(path).gemms, machine.platform in ("cuda", "gpu")
    forms = [gemms[gemm][n] if gemm in gemms else None for gemm, n in (("dlhs", 0), ("drhs", 1))]
    in_blocks = any(form is not None and form.in_blocks for form in forms)
    if not on_gpu or forms == [None, None] or in_blocks or s.train.lora or s.replicas_are_separate:
        return itemsize
    if forms[0] == forms[1] and forms[0].granularity == "tensor":
        forms.pop()
    plain = _plain_share(s, path)
    sent = sum(itemsize if form is None else form.itemsize for form in forms)
    return plain * itemsize + (1 - plain) * sent


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device does in a step, recomputation included.

    Attributes:
      flops: FLOPs of the matmuls by the dtype whose peak rate they run at, as in `hardware.PEAK_TFLOPS`.
      bytes: bytes read from and written to the device's memory.
      host: bytes moved between the device and the host's memory.
    """

    flops: dict[str, float]
    bytes: float
    host: float = 0.0


class Cost(NamedTuple):
    """The closed form of a family; a family's ``cost.py`` holds one as COST.

    Attributes:
      memory: (settings, machine, state) to the bytes in use on one device at the peak of a step, by
        purpose.
      work: (settings, machine, state) to the work of one device.
      collectives: (settings, machine) to the collectives of one device.
    """

    memory: Callable[[Settings, Machine, StateShapes], dict[str, float]]
    work: Callable[[Settings, Machine, StateShapes], Work]
    collectives: Callable[[Settings, Machine], list[Collective]]


def cost_of(s: Settings) -> Cost:
    """The closed form of the family of these settings."""
    return pkgutil.resolve_name(f"{families.FAMILIES[s.family.name]}.cost:COST")


def matmul_dtypes(s: Settings, path: str) -> dict[str, str]:
    """The peak rate (`blocks.rate`) of each of the three matmuls of a layer (`recipes.GEMMS`)."""
    quantized, apart = s.recipe(path).gemms, s.replicas_are_separate
    rates = {gemm: blocks.rate(pair, replicas_are_separate=apart) for gemm, pair in quantized.items()}
    return dict.fromkeys(GEMMS, "bfloat16") | rates


def linear_flops(s: Settings, path: str, once: float, recomputed: int) -> dict[str, float]:
    """FLOPs of a `Linear`'s matmuls in a step, by their dtype; frozen weights have no gradient.

    A matmul over a share of the tokens counts with that share, and the layers of a stack in which a matmul
    stays in high precision count as bfloat16.

    Args:
      once: FLOPs of one of the three matmuls, in all layers of the stack.
      recomputed: forward passes that run again.
    """
    runs = {"fwd": 1 + recomputed, "dlhs": 1, "drhs": 0 if s.train.lora else 1}
    kept = {"drhs": s.recipe(path).keep}
    plain = _plain_share(s, path)
    flops = {"bfloat16": plain * sum(runs.values()) * once}
    for gemm, dtype in matmul_dtypes(s, path).items():
        flops[dtype] = flops.get(dtype, 0.0) + (1 - plain) * kept.get(gemm, 1) * runs[gemm] * once
    return flops


def unsampled(s: Settings, *inputs: tuple[str, ...]) -> list[float]:
    """The share of the tokens of each input that no gradient of a kernel needs (`precision.sampling`).

    Args:
      inputs: paths of the matmuls that read the same input.
    """

    def of_matmul(path: str) -> float:
        return (1 - _plain_share(s, path)) * (1 - s.recipe(path).keep)

    return [min(map(of_matmul, readers)) for readers in inputs]


def _plain_share(s: Settings, path: str) -> float:
    """The share of its stack's layers in which a matmul stays in high precision despite its recipe."""
    for stack, parts in s.parts.items():
        inside = path.removeprefix(f"{stack}/")
        if parts and inside != path:
            return sum(part.stop - part.start for part in parts if inside in part.plain) / parts[-1].stop
    return 0.0


class Ledger:
    """Collects the collectives that a mesh needs."""

    def __init__(self, axes: Mapping[str, int]):
        self._axes = axes
        self.collectives: list[Collective] = []

    def add(self, kind: str, names: tuple[str, ...], size: float, times: int) -> None:
        """Adds a collective unless it has nothing to do.

        Args:
          kind: "all-gather", "reduce-scatter", ….
          names: the mesh axes that it goes over; those of size 1 are ignored.
          size: bytes of the whole array.
          times: how often it runs in a step.
        """
        over = tuple(name for name in names if self._axes[name] > 1)
        if over and size and times:
            n = math.prod(self._axes[name] for name in over)
            self.collectives.append(Collective(kind, over, n, int(size), times, overlapped=True))

    def add_moves(self, optimizer: OptimizerKind, layers: int, size: float) -> None:
        """Adds the all-to-alls that distribute stacked matrices by layer (`parallel.by_layers`).

        There is one for each mesh axis among which the number of layers, with those of zeros, can be
        divided. Those of SOAP's state, which needs them where there are layers of zeros, are not counted.

        Args:
          layers: the number of layers, in all stages.
          size: bytes of a device's part of the matrices, in float32.
        """
        filled = _num_filled(optimizer, layers, self._axes)
        layers, size = filled, size * filled / layers
        taken = self._axes["stage"]
        for axis in ORDER[1:]:
            if layers % (taken * self._axes[axis]) == 0:
                taken *= self._axes[axis]
                self.add("all-to-all", (axis,), size, optimizer.moves)
