"""A closed form of a Llama train step: memory, collectives and FLOPs of one device, without a compiler.

The state is exact: it is that of the step itself, as shapes. The rest is arithmetic of the sizes below.
What XLA holds at the worst moment was read from its buffer assignment for a grid of settings, and
`tests/planning` holds the sum to it.

Shape letters, all of one microbatch: R rows of a device · S length · T tokens of a device (R S / context) ·
D embed · F mlp · N query heads · K kv heads · H head dim · V vocab · L layers · t the tensor axis.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from ml_collections import ConfigDict

from maxlp.core import train_step as step
from maxlp.nn import attention as kernels
from maxlp.nn.attention import flash_tile, ring
from maxlp.parallel import sharding
from maxlp.parallel.pipeline import Schedule
from maxlp.planning.hlo import Collective
from maxlp.run import build
from maxlp.run.config import ConfigError

HIGH = "high precision"  # `precision_table`'s word for the model's own dtype


@dataclasses.dataclass(frozen=True)
class State:
    """The training state as shapes and partition specs, which are the same on every mesh.

    recipes: path of each matmul to its precision.
    """

    tree: dict
    recipes: dict[str, str]

    @property
    def num_params(self) -> int:
        return build.num_params(self.tree["params"])

    def bytes_on(self, mesh: AbstractMesh, part: str) -> float:
        """Bytes of ``params``, ``opt_state`` or ``model_state`` on one device of a mesh."""
        total = 0.0
        for leaf in jax.tree.leaves(self.tree[part]):
            shape = NamedSharding(mesh, leaf.sharding.spec).shard_shape(leaf.shape)
            total += math.prod(shape) * leaf.dtype.itemsize
        return total


def abstract_mesh(axes: dict[str, int]) -> AbstractMesh:
    sizes = tuple(axes.get(name, 1) for name in sharding.MESH_AXES)
    return AbstractMesh(sizes, sharding.MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes))


def mesh_axes(c: ConfigDict, num_devices: int) -> dict[str, int]:
    """Sizes of the config's mesh on so many devices, as `sharding.make_mesh` would make it.

    Raises:
      ConfigError: sizes that do not multiply to them.
    """
    try:
        axes = sharding.resolve_axes(num_devices, **dict(c.mesh.items()))
    except ValueError as error:
        raise ConfigError(f"config.mesh: {error}") from error
    return axes | {"data": axes["data"] * c.mesh.get("dcn_data", 1)}


def abstract_state(c: ConfigDict, axes: dict[str, int]) -> State:
    """The state of the config's run; a second of tracing."""
    tx, _ = build.tx(c)
    mesh: Any = abstract_mesh(axes)  # no devices are asked for shapes
    return State(step.abstract_state(build.model(c), tx, mesh)[1], build.precision_table(c))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A step's sizes on one device; see the letters above.

    a, param: bytes of an activation and of a parameter.
    schedule: of the pipeline; one stage and one microbatch where there is none.
    released: each layer is updated in the backward pass.
    """

    R: int
    S: int
    D: int
    F: int
    N: int
    K: int
    H: int
    V: int
    L: int
    t: int
    fsdp: int
    context: int
    data: int
    microbatches: int
    chunks: int
    a: int
    param: int
    schedule: Schedule
    released: bool

    @property
    def T(self) -> int:
        return self.R * self.S // self.context

    @property
    def shards(self) -> int:
        """Into how many parts a weight is split, the tensor axis left out."""
        return self.fsdp * self.context

    @property
    def block_params(self) -> int:
        return self.D * (2 * self.N + 2 * self.K) * self.H + 3 * self.D * self.F

    @property
    def of_stage(self) -> "Sizes":
        """Those of the layers of one stage and of one of its microbatches."""
        stages, microbatches, _ = self.schedule
        return dataclasses.replace(self, R=self.R // microbatches, L=self.L // stages)


def sizes(c: ConfigDict, axes: dict[str, int]) -> Sizes:
    """Raises a ConfigError for a batch or a length that does not divide, as training would."""
    m, shards = c.model, axes["data"] * axes["fsdp"]
    if c.data.batch_size % (shards * c.train.microbatches):
        rows = shards * c.train.microbatches
        raise ConfigError(
            f"config.data.batch_size={c.data.batch_size} does not divide into {shards} data shards × "
            f"config.train.microbatches={c.train.microbatches}; use a multiple of {rows}"
        )
    context, tensor, chunks = axes.get("context", 1), axes["tensor"], c.loss.num_chunks
    if c.data.seq_len % (chunks * context) or c.data.seq_len % (tensor * context * (1 + (context > 1))):
        raise ConfigError(
            f"config.data.seq_len={c.data.seq_len} is not a multiple of config.loss.num_chunks={chunks} × "
            f"config.mesh.context={context} and of config.mesh.tensor={tensor} × config.mesh.context"
            + " × 2"
            * (context > 1)
        )
    if context > 1 and m.attention != "ring":
        raise ConfigError(f"config.mesh.context={context} needs config.model.attention=ring")
    if m.attention != "xla" and m.num_kv_heads % tensor:
        raise ConfigError(
            f"config.model.num_kv_heads={m.num_kv_heads} is not a multiple of config.mesh.tensor={tensor}, "
            f"which config.model.attention={m.attention} needs"
        )
    rows, stages = c.data.batch_size // (shards * c.train.microbatches), axes.get("stage", 1)
    if stages > 1 and c.data.seq_len % (chunks * context * stages):
        raise ConfigError(
            f"config.data.seq_len={c.data.seq_len} is not a multiple of config.loss.num_chunks={chunks} × "
            f"config.mesh.context={context} × config.mesh.stage={stages}"
        )
    return Sizes(
        R=rows,
        S=c.data.seq_len,
        D=m.embed_dim,
        F=m.mlp_dim,
        N=m.num_heads,
        K=m.num_kv_heads,
        H=m.head_dim,
        V=m.vocab_size,
        L=m.num_layers,
        t=axes["tensor"],
        fsdp=axes["fsdp"],
        context=context,
        data=axes["data"],
        microbatches=c.train.microbatches,
        chunks=c.loss.num_chunks,
        a=jnp.dtype(m.dtype).itemsize,
        param=jnp.dtype(m.param_dtype).itemsize,
        schedule=build.pipeline(c).over(stages) if stages > 1 else Schedule(1, 1, 1),
        released=c.train.release_gradients,
    )


# --- memory -----------------------------------------------------------------------------------------------


def memory(c: ConfigDict, axes: dict[str, int], state: State, platform: str) -> dict[str, float]:
    """Bytes of one device at the worst moment of a step, by what they hold.

    Args:
      platform: "tpu", "cuda", or "cpu", whose compiler does not order its work for memory: a block's
        activations take 1.45 times as much there.

    Three moments compete: the backward pass of a block, the loss of one chunk of the sequence, and the
    update, if it does more than go through the arrays once: moments in 8 bits are rounded with maxima of
    their blocks, and GaLore's updates are products of matrices. Two arrays of each parameter exist then.
    """
    s, mesh = sizes(c, axes), abstract_mesh(axes)
    build.check_stages(c, s.schedule.stages, s.R, state.recipes)
    check_attention(c, platform, s.S, s.H)
    held = {
        "parameters": state.bytes_on(mesh, "params"),
        "optimizer": state.bytes_on(mesh, "opt_state") + state.bytes_on(mesh, "model_state"),
        "batch": 17.0 * s.R * s.microbatches * s.S,  # four int32 and a bool a token
    }
    during = {
        "saved activations": kept(s, c.model.remat, c.model.attention),
        "gradients": gradients(s),
    }
    block = of_block(s.of_stage, c.model.remat, c.model.attention, platform)
    if s.released:
        block["a layer's update"] = s.block_params * 4.0 / (s.shards * s.t)
    if platform == "cpu":
        block["a block's activations"] *= 1.45
    moments = [during | block, during | of_loss(s, platform)]
    if not s.released and (c.optimizer.get("low_bit") or c.optimizer.get("galore")):
        moments.append({"gradients and updates": 2 * held["parameters"]})
    return held | max(moments, key=lambda parts: sum(parts.values()))


def check_attention(c: ConfigDict, platform: str, length: int, head_dim: int) -> None:
    """Raises a ConfigError for a kernel that is not of this platform, or not for these sizes."""
    name = c.model.attention
    try:
        kernels.check(name, platform)
    except ValueError as error:
        raise ConfigError(f"config.{error}") from error
    if name == "splash" and length % 128:
        raise ConfigError(f"config.model.attention=splash needs a length that 128 divides, not {length}")
    if name == "cudnn" and length % 2:
        raise ConfigError(f"config.model.attention=cudnn trains on even lengths, not {length}; use xla")
    if name == "cudnn" and (c.model.dtype not in ("bfloat16", "float16") or head_dim % 8 or head_dim > 256):
        raise ConfigError(
            f"config.model.attention=cudnn needs bfloat16 or float16 and a head dim of 8, 16, … 256, "
            f"not config.model.dtype={c.model.dtype} and {head_dim}"
        )


def kept(s: Sizes, remat: str, attention: str) -> float:
    """Bytes that the forward pass leaves: of a pipeline those of each tick, bubbles too, the microbatches
    that wait at its two ends, and with more than one round the weights where they run."""
    stages, _, rounds = s.schedule
    of_ticks = s.schedule.ticks * s.of_stage.L / rounds * saved(s.of_stage, remat, attention)
    if stages == 1:
        return of_ticks
    waiting = 2 * s.T * s.D * s.a / (stages * s.t)
    moved = s.of_stage.L * s.block_params * s.param / (s.shards * s.t) if rounds > 1 else 0.0
    return of_ticks + waiting + moved


def saved(s: Sizes, remat: str, attention: str) -> float:
    """Bytes that one block's forward pass leaves for its backward pass."""
    x, f = s.T * s.D * s.a / s.t, s.T * s.F * s.a / s.t
    q, k = s.T * s.N * s.H * s.a / s.t, s.T * s.K * s.H * s.a / s.t
    if remat == "offload":
        return 0.0
    if remat == "block":
        return x
    if remat == "dots":  # the block's input, and what q, k, v, o, gate and up return
        return x + q + 2 * k + x + 2 * f
    # What JAX keeps: six F-wide arrays, three float32 ones of each norm, both normed inputs, q, k, v, the
    # attention's output twice; and the weights in the dtype of the matmuls.
    norms = 6 * s.T * s.D * 4 / s.t + 2 * s.T * s.D * s.a
    probs = (4 + s.a) * squares(s) if attention == "xla" else 0.0
    return 6 * f + norms + 2 * q + 2 * k + x + probs + s.block_params * s.a / (s.shards * s.t)


def squares(s: Sizes) -> float:
    """Entries of the (S, S) matrices of plain attention: 5/8 of all, see `models.attention.xla`."""
    return 5 / 8 * s.R * s.N / s.t * s.S**2


def gradients(s: Sizes) -> float:
    """Those of the blocks and of the head, split; summed over microbatches, or over the ticks of a
    pipeline, they exist a second time. Where layers are updated in the backward pass, those of one."""
    layers = 1 if s.released else s.of_stage.L
    blocks = layers * s.block_params * s.param / (s.shards * s.t)
    ends = s.V * s.D * s.param / (s.shards * s.t)
    if s.released:
        return blocks + 2 * ends
    twice = blocks if s.schedule.stages > 1 else 0.0
    return blocks + ends + twice + (blocks + 2 * ends if s.microbatches > 1 else 0.0)


def of_block(s: Sizes, remat: str, attention: str, platform: str) -> dict[str, float]:
    """The backward pass of one block.

    Of the MLP, gate, up, their product and the gradients of two of them; of attention its inputs and output
    (plain attention: probabilities and their gradient in float32 and once more rounded, before the MLP is
    recomputed; ring attention: see `of_ring`); of the residual stream four whole rows, and
    with a tensor axis up to five more, as gathered for what is recomputed and as sums to scatter. Seven
    tenths of the weights are in use at that moment, gathered, and rounded if they are kept wider.
    """
    x, f = s.T * s.D * s.a, s.T * s.F * s.a / s.t
    q, k = s.T * s.N * s.H * s.a / s.t, s.T * s.K * s.H * s.a / s.t
    bias = s.R * s.S**2 * s.a if attention == "cudnn" else 0.0
    gathered = remat in ("block", "offload") and platform != "cpu"
    split = (5 * (x - x / s.t) if gathered else x / s.t) if s.t > 1 else 0.0
    mlp = 5 * f + bias + 2 * q + 2 * k + 4 * x + split
    plain = (8 + s.a) * squares(s) + 2 * q + 2 * k + 2 * x + split if attention == "xla" else 0.0
    if attention == "ring":
        plain = of_ring(s, platform) + 4 * x + split
    weights = s.block_params * s.a / s.t
    outside = s.param != s.a and not s.released  # of the loop
    rounded = s.L * weights / s.shards if outside else 0.0
    return {
        "a block's activations": max(mlp, plain) + x / s.t,
        "a block's weights": 0.7 * (weights + rounded),
        "embedding's gradient": s.V * s.D * s.a / (s.shards * s.t),
    }


def of_ring(s: Sizes, platform: str) -> float:
    """The backward pass of ring attention, in bytes.

    Of one pair of tiles, where it is no kernel, three float32 squares and two rounded ones; q, the output,
    its gradient and the residual stream, as they come and in tiles (ten arrays of the size of q); the
    gradient of q twice in float32 (a loop's input and its result); k and v as they come, in tiles and on
    their way; their gradients, float32: of this turn, of those before, on their way, and a loop's input.
    """
    tile = ring.tile_size(s.S // s.context, s.context)
    squares = 0.0 if fused_ring(s, platform) else s.R * s.N / s.t * tile**2 * (3 * 4 + 2 * s.a)
    q, k = s.T * s.N * s.H / s.t, s.T * s.K * s.H / s.t
    return squares + q * (10 * s.a + 2 * 4) + k * (6 * s.a + 8 * 4)


def fused_ring(s: Sizes, platform: str) -> bool:
    """Whether the tiles of ring attention are kernels, as `models.ring` decides it."""
    return platform == "tpu" and ring.tile_size(s.S // s.context, s.context, flash_tile) > 0


def of_loss(s: Sizes, platform: str) -> dict[str, float]:
    """The loss of one chunk: logits in float32, their gradient rounded; the head and its gradient whole.

    Chunks add their gradients up in float32, and leave that of the residual stream. The TPU compiler
    multiplies by parts of the head, and holds less of it and of its gradient.
    """
    tokens, head = s.T / s.schedule.stages, s.V * s.D / s.t
    parts = {"logits": tokens / s.chunks * s.V / s.t * (4 + s.a)}
    if s.chunks == 1:
        return parts | {"head": (1.5 if platform == "tpu" else 3) * head * s.a}
    copies = 1 if platform == "tpu" else 1.5
    return parts | {"head": head * (copies * s.a + 4), "gradient of the blocks": tokens * s.D * s.a}


# --- work and collectives -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device does in a step, recomputation counted: FLOPs by dtype, and bytes of its memory."""

    flops: dict[str, float]
    bytes: float


def work(c: ConfigDict, axes: dict[str, int], state: State, platform: str) -> Work:
    """Matmuls that causal attention needs are counted in half, as flash kernels do them; plain ones 5/8.

    Those of a flash kernel's backward pass are counted as five, though some make the logits twice. What a
    pipeline computes in its bubbles is counted: all wait for it.
    """
    s, remat = sizes(c, axes), c.model.remat
    of_stage, ticks, rounds = s.of_stage, s.schedule.ticks, s.schedule.rounds
    busy = 1 - s.schedule.bubble
    tokens, devices = c.data.batch_size * s.S, math.prod(axes.values())
    again = {"none": 0, "dots": 0}.get(remat, 1)  # forward passes that run again
    flops = {"bfloat16": 0.0, "float8": 0.0, "int8": 0.0}
    widths = {
        "q": s.N * s.H,
        "k": s.K * s.H,
        "v": s.K * s.H,
        "o": s.N * s.H,
        "gate": s.F,
        "up": s.F,
        "down": s.F,
    }
    recipes = {path.rsplit("/", 1)[-1]: recipe for path, recipe in state.recipes.items()}
    for name, width in widths.items():
        dtype = matmul_dtype(recipes.get(f"{name}_proj", HIGH))
        flops[dtype] += (6 + 2 * again) * tokens * s.L * s.D * width
    flops["bfloat16"] += 6 * tokens * s.D * s.V
    of_square = 5 / 8 if c.model.attention == "xla" else 1 / 2
    passes = 1 + (2 if c.model.attention == "xla" else 2.5) + (remat != "none")
    flops["bfloat16"] += of_square * passes * 4 * tokens * s.S * s.L * s.N * s.H

    # Weights are written gathered and read in each pass; the optimizer reads and writes the state; about
    # thirty arrays of width D and twelve of F pass through memory for each block and token.
    mesh = abstract_mesh(axes)
    once = 2 * (state.bytes_on(mesh, "params") + state.bytes_on(mesh, "opt_state")) + 2 * gradients(s)
    runs = ticks * of_stage.L / rounds * s.microbatches  # of a block on this device
    weights = (3 + again) * 2 * runs * s.block_params * s.a / s.t
    widths_of_token = 30 * s.D + 12 * s.F / s.t
    attention = c.model.attention  # the squares pass through memory, in tiles or not
    if attention == "xla" or (attention == "ring" and not fused_ring(s, platform)):
        widths_of_token += 24 * s.S * s.N / s.t * of_square
    activations = runs * of_stage.T * s.a * widths_of_token * (1 + again / 3)
    logits = 4 * s.T / s.schedule.stages * s.microbatches * s.V / s.t * 4
    moved = once + weights + activations + logits
    return Work({k: v / devices / busy for k, v in flops.items() if v}, moved)


def matmul_dtype(recipe: str) -> str:
    """In which units a precision recipe multiplies."""
    return "int8" if recipe.startswith("int8") else "bfloat16" if recipe == HIGH else "float8"


def ledger(axes: dict[str, int]) -> tuple[list[Collective], Callable[..., None]]:
    """A list of collectives, and a function (kind, mesh axes, bytes, times) that adds one of those that
    the mesh needs."""
    found: list[Collective] = []

    def add(kind: str, names: tuple[str, ...], size: float, times: int) -> None:
        over = tuple(name for name in names if axes.get(name, 1) > 1)
        if over and size and times:
            n = math.prod(axes[name] for name in over)
            found.append(Collective(kind, over, n, int(size), times, overlapped=True))

    return found, add


def collectives(c: ConfigDict, axes: dict[str, int]) -> list[Collective]:
    """What the mesh makes necessary; XLA runs about that, in other pieces.

    * fsdp and context: weights gathered for the forward and again for the backward pass, gradients
      scattered, each for every microbatch, and so the head; what is looked up in the table of embeddings,
      and its gradient;
    * context: the ring; keys and values in every pass (the first turns of the backward pass and of what it
      recomputes share them), their gradients in float32, and rounded on the last way, home; after the
      blocks the residual stream back into its order;
    * tensor: the residual stream gathered before and scattered after attention and MLP;
    * data: gradients summed;
    * stage: in each tick and on both ways a microbatch's activations, those of one that waits and those of
      one that is done; with more than one round the weights to where they run, and their gradients.
    """
    s, (found, add) = sizes(c, axes), ledger(axes)
    of_stage, (stages, _, rounds) = s.of_stage, s.schedule
    m, weights, x = s.microbatches, s.block_params * s.a / s.t, of_stage.T * s.D * s.a
    runs = int(s.schedule.ticks * of_stage.L / rounds) * m  # of a block on this device
    head, whole_x = s.V * s.D * s.a / s.t, s.T * s.D * s.a / stages
    again = c.model.remat in ("block", "offload")
    split, turns = ("fsdp", "context"), s.context - 1
    add("all-gather", split, weights, 2 * runs)
    add("reduce-scatter", split, weights, runs)
    add("all-gather", split, head, m)
    add("reduce-scatter", split, head, m)
    add("all-to-all", split, whole_x, 2 * m)
    k = of_stage.T * s.K * s.H / s.t
    passes = 2 + (c.model.remat != "none")
    keys = passes * turns - (passes == 3) + 1 if turns else 0
    add("collective-permute", ("context",), k * s.a, 2 * keys * runs)
    add("collective-permute", ("context",), k * 4, 2 * turns * runs)
    add("collective-permute", ("context", "tensor") if turns else (), whole_x / s.t / 2, 4 * m)
    add("all-gather", ("tensor",), x, (4 + 2 * again) * runs)
    add("reduce-scatter", ("tensor",), x, (4 + again) * runs)
    add("all-reduce", ("data",), (of_stage.L * weights + 2 * head) / s.shards, m)
    add("collective-permute", ("stage",), x / s.t, 2 * 3 * s.schedule.ticks * m)
    if rounds > 1:
        share = of_stage.L * s.block_params * s.param / (s.shards * s.t)
        add("collective-permute", ("stage",), share, 2 * m)
    return found
