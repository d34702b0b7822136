"""A closed form of a Llama train step: memory, collectives and FLOPs of one device, without a compiler.

The state is exact: it is the state of the step itself, as shapes. The rest is arithmetic on the sizes
below. What XLA holds at the worst moment was read from its buffer assignment for a grid of settings;
`tests/planning` compares the sum with compiled peaks.

Shape letters, all of one microbatch: R rows of a device · S length · T tokens of a device (R S / context) ·
D embed · F mlp · N query heads · K kv heads · H head dim · V vocab · L layers · t the tensor axis.
"""

import collections
import dataclasses
import functools
import math

from maxlp.families.llama import losses
from maxlp.nn.attention import cudnn, flash, flash_tile, ring
from maxlp.parallel.exchange import num_bytes
from maxlp.parallel.schedule import Schedule
from maxlp.parallel.sharding import abstract_mesh
from maxlp.planning.cost_model import (
    Blocks,
    Cost,
    Ledger,
    StateShapes,
    Work,
    add_update,
    gathered_gradient_itemsize,
    gathered_itemsize,
    gathered_kernels,
    held_state,
    linear_flops,
    scatter_of_gradients,
    shared_sizes,
    unsampled,
    workspace_of_matmuls,
)
from maxlp.planning.hlo import Collective
from maxlp.run.settings import Machine, Settings

# Paths of the matmuls of a block, those that read the same input together.
QKV = ("layers/attn/q_proj", "layers/attn/k_proj", "layers/attn/v_proj")
GATE_UP = ("layers/mlp/gate_proj", "layers/mlp/up_proj")
OUT, DOWN = "layers/attn/o_proj", "layers/mlp/down_proj"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Blocks):
    """A step's sizes on one device; see the letters above.

    Attributes:
      ends: 2, the embedding and the head, or 1 if they are one array.
      pieces: of the logits, one of which is in float32 at a time; there are at least as many as ``chunks``.
      schedule: of the pipeline; one stage and one microbatch if there is none.
      in_parts: the blocks run in several loops, because not all of their matmuls are quantized.
      released: each layer is updated in the backward pass.
      qk_norm, platform: see `LlamaConfig` and `Machine`.
    """

    K: int
    H: int
    V: int
    ends: int
    fsdp: int
    context: int
    microbatches: int
    chunks: int
    pieces: int
    schedule: Schedule
    in_parts: bool
    released: bool
    qk_norm: bool
    platform: str

    @property
    def log_sums(self) -> float:
        """Bytes of the logits' log-sum-exp of every query and head, float32."""
        return 4 * self.T * self.N / self.t

    @property
    def T(self) -> int:
        return self.R * self.S // self.context

    @property
    def shards(self) -> int:
        """How many parts a weight is split into, not counting the tensor axis."""
        return self.fsdp * self.context

    @property
    def end(self) -> float:
        """Elements of the embedding or of the head on one device."""
        return self.V * self.D / (self.shards * self.t)

    @property
    def widths(self) -> dict[str, int]:
        q, kv, F = self.N * self.H, self.K * self.H, self.F
        return dict(zip((*QKV, OUT, *GATE_UP, DOWN), (q, kv, kv, q, F, F, F), strict=True))

    @property
    def runs(self) -> float:
        """How many times this device runs a block in the forward passes of a step."""
        return self.schedule.ticks * self.of_stage.L / self.schedule.rounds * self.microbatches

    @functools.cached_property
    def of_stage(self) -> "Sizes":
        """The sizes of the layers of one stage and of one of its microbatches."""
        stages, microbatches, _ = self.schedule
        return dataclasses.replace(self, R=self.R // microbatches, L=self.L // stages)


def sizes(s: Settings, machine: Machine) -> Sizes:
    """The sizes of a step that fulfils `run.constraints`."""
    m, axes = s.model, machine.axes
    stages = axes["stage"]
    # See `Llama.has_plain_head`.
    plain_head = s.recipe("lm_head").is_plain and s.train.lora is None and m.dtype != "float16"
    return Sizes(
        **shared_sizes(s, machine),
        S=s.data.seq_len,
        D=m.embed_dim,
        F=m.mlp_dim,
        N=m.num_heads,
        K=m.num_kv_heads,
        H=m.head_dim,
        V=m.vocab_size,
        L=m.num_layers,
        ends=1 if m.tie_embeddings else 2,
        fsdp=axes["fsdp"],
        context=axes["context"],
        microbatches=s.train.microbatches,
        chunks=s.loss.num_chunks,
        pieces=s.loss.num_chunks if s.loss.num_chunks > 1 or not plain_head else losses.PIECES,
        schedule=m.pipeline.schedule(stages) if stages > 1 else Schedule(1, 1, 1),
        in_parts=len(s.parts.get("layers", ())) > 1,
        released=s.train.release_gradients,
        unsampled=unsampled(s, QKV, (OUT,), GATE_UP, (DOWN,)),
        qk_norm=m.qk_norm,
        platform=machine.platform,
    )


# --- memory -----------------------------------------------------------------------------------------------


def memory(settings: Settings, machine: Machine, state: StateShapes) -> dict[str, float]:
    """Bytes of one device at the worst moment of a step, by what they hold.

    Four moments compete: the loss of one chunk of the sequence, the end of the loss, see `of_scatter`,
    the backward pass of a block, and the update, see `of_update`. (The CPU's compiler does not order its
    work for memory: a block's activations take 1.45 times as much.)
    """
    s, mesh = sizes(settings, machine), abstract_mesh(machine.axes)
    held = held_state(settings, mesh, state) | {
        "batch": 17.0 * s.R * s.microbatches * s.S,  # four int32 and a bool per token
    }
    forward, block = {"saved activations": kept(s)}, of_block(s.of_stage)
    if s.platform == "cpu":
        block["a block's activations"] *= 1.45
    rounded = {"rounded weights": rounded_weights(s)} if s.released else {}
    sides, refresh = state.sides_on(mesh, s.released)
    turning = {"refresh of the bases": refresh} if sides else {}
    fetched = max(state.offloaded_on(mesh) - sides, 0) / state.num_params
    moments = [
        forward | {"gradients": summed(s)} | rounded | of_loss(s),
        forward | {"gradients": gradients(s)} | of_scatter(s),
        forward | {"gradients": gradients(s)} | block,
        {"gradients and updates": of_update(settings, s, held["parameters"], fetched)} | turning,
    ]
    return held | max(moments, key=lambda parts: sum(parts.values()))


def kept(s: Sizes) -> float:
    """Bytes that the forward pass saves for the backward pass.

    A pipeline saves them for every tick, bubbles included, and also the microbatches that wait at its two
    ends, and with several rounds the weights on the devices where they run.
    """
    stages, _, rounds = s.schedule
    of_ticks = s.schedule.ticks * s.of_stage.L / rounds * saved(s.of_stage)
    if stages == 1:
        return of_ticks
    waiting = 2 * s.T * s.D * s.a / (stages * s.t)
    moved = s.of_stage.L * s.block_params * s.param / (s.shards * s.t) if rounds > 1 else 0.0
    return of_ticks + waiting + moved


def saved(s: Sizes) -> float:
    """Bytes that one block's forward pass saves for its backward pass."""
    x, f = s.T * s.D * s.a / s.t, s.T * s.F * s.a / s.t
    q, k = s.T * s.N * s.H * s.a / s.t, s.T * s.K * s.H * s.a / s.t
    if s.remat == "offload":
        return 0.0
    if s.remat == "block":
        return x
    if s.remat == "dots":  # the block's input, the outputs of q, k, v, o, gate and up, and of attention
        return x + q + 2 * k + x + 2 * f + (0.0 if s.attention_again else q + s.log_sums)
    # JAX saves six F-wide arrays, three float32 arrays of each norm, both normed inputs, q, k, v, the
    # output of attention twice, and the weights in the dtype of the matmuls, unless that is how they are
    # stored; of what the gradients of kernels alone need, only the tokens that they are computed from.
    of_qkv, of_o, of_gate, of_down = s.unsampled
    norms = 6 * s.T * s.D * 4 / s.t + (2 - of_qkv - of_gate) * s.T * s.D * s.a + 3 * normed_heads(s)
    heads = (2 - of_o) * q + 2 * k
    probs = (4 + s.a) * squares(s) if s.attention == "xla" else 0.0
    weights = s.block_params * s.a / (s.shards * s.t) if s.param != s.a else 0.0
    return (6 - of_down) * f + norms + heads + x + probs + weights


def normed_heads(s: Sizes) -> float:
    """Bytes of q and k in float32, if they are normed."""
    return s.T * (s.N + s.K) * s.H * 4 / s.t if s.qk_norm else 0.0


def squares(s: Sizes) -> float:
    """Entries of the (S, S) matrices of dense attention: 5/8 of all, see `attention.dense`."""
    return 5 / 8 * s.R * s.N / s.t * s.S**2


def gradients(s: Sizes) -> float:
    """Bytes of the gradients during the backward pass of the blocks, sharded.

    They are those of the blocks, which begin as zeros after the loss, and that of the head in the dtype of
    the matmuls. Where gradients are summed over the ticks of a pipeline, those of the blocks exist twice.
    Where layers are updated in the backward pass, a layer's take the place of its activations.
    """
    if s.frozen:
        return 0.0
    blocks = 0.0 if s.released else of_blocks(s)
    twice = blocks if s.schedule.stages > 1 else 0.0
    return blocks + twice + s.end * s.a + summed(s)


def of_blocks(s: Sizes) -> float:
    """Bytes of the gradients of the blocks, sharded."""
    return s.of_stage.L * s.block_params * s.param / (s.shards * s.t)


def summed(s: Sizes) -> float:
    """Bytes of the sums of gradients over microbatches, in float32."""
    if s.frozen or s.microbatches == 1:
        return 0.0
    return 4 * (of_blocks(s) / s.param + s.ends * s.end)


def of_block(s: Sizes) -> dict[str, float]:
    """The backward pass of one block.

    Of the MLP it holds gate, up, their product and two gradients. Of attention it holds the inputs and the
    output; dense attention peaks before the MLP is recomputed, with nearly all probabilities and their
    gradient in float32, and rounded; for ring attention see `of_ring`, and for cuDNN `cudnn.workspace`,
    which compilers without a GPU do not count. Of the residual stream it holds four whole arrays, and with
    a tensor axis up to five more: gathered for what is recomputed, and sums to scatter. On one device
    nothing is gathered, and the peak is later: one gradient of the MLP is left, and six arrays of the
    residual stream, unless adapters read their inputs again. The TPU compiler holds normed queries and keys
    in float32 twice. Seven tenths of the gathered weights are in use at that moment, and as much of the
    rounded ones, see `rounded_weights`.
    """
    x, f = s.T * s.D * s.a, s.T * s.F * s.a / s.t
    q, k = s.T * s.N * s.H * s.a / s.t, s.T * s.K * s.H * s.a / s.t
    gathered = s.remat in ("block", "offload") and s.platform != "cpu"
    split = 0.0
    if s.t > 1:
        split = 5 * (x - x / s.t) if gathered else x / s.t
    gathers = s.shards * s.t > 1 or s.platform == "cpu" or s.frozen
    mlp = 5 * f + 2 * q + 2 * k + 4 * x + x / s.t + split if gathers else 4 * f + 2 * q + 2 * k + 6 * x
    attention = (7 + s.a) * squares(s) + 2 * q + 2 * k + 2 * x + split if s.attention == "xla" else 0.0
    if s.attention == "ring":
        attention = of_ring(s) + 4 * x + split
    if s.attention == "cudnn":
        attention = cudnn.workspace(q / s.a, packed=True) + 2 * q + 2 * k + 2 * x + split
    attention += x / s.t
    if s.platform == "tpu" and s.remat != "none":  # else they are saved
        mlp, attention = mlp + 2 * normed_heads(s), attention + 2 * normed_heads(s)
    weights = s.block_params * s.a / s.t
    parts = {
        "a block's activations": max(mlp, attention),
        "a block's weights": 0.7 * weights + rounded_weights(s),
    }
    if not s.frozen:
        return parts | {"embedding's gradient": s.V * s.D * s.a / (s.shards * s.t)}
    # A frozen head stays gathered on TPUs, and where a loop over microbatches shares it.
    loop = s.microbatches > 1 or s.schedule.stages > 1
    held = s.shards > 1 and (s.platform == "tpu" or loop)
    return parts | ({"head": s.V * s.D * s.a / s.t} if held else {})


def rounded_weights(s: Sizes) -> float:
    """Bytes of weights in the dtype of the matmuls, if parameters are stored in a wider one.

    Those of all layers are rounded before they are gathered; seven tenths are in use at the worst moment.
    """
    if s.param == s.a or s.shards == 1:
        return 0.0
    return 0.7 * s.L * s.block_params * s.a / (s.t * s.shards)


def of_ring(s: Sizes) -> float:
    """The backward pass of ring attention, in bytes.

    It holds three float32 squares and two rounded ones of a pair of tiles, unless the tiles are kernels; q,
    the output, its gradient and the residual stream, whole and in tiles (ten arrays of the size of q); the
    gradient of q twice in float32 (a loop's input and its result); k and v whole, in tiles and in transit;
    their gradients in float32: of this turn, of those before, in transit, and a loop's input.
    """
    tile = ring.tile_size(s.S // s.context, s.context)
    tiles = 0.0 if fused_ring(s) else s.R * s.N / s.t * tile**2 * (3 * 4 + 2 * s.a)
    q, k = s.T * s.N * s.H / s.t, s.T * s.K * s.H / s.t
    return tiles + q * (10 * s.a + 2 * 4) + k * (6 * s.a + 8 * 4)


def fused_ring(s: Sizes) -> bool:
    """Whether the tiles of ring attention are kernels; `attention.ring` decides it the same way."""
    if s.platform == "tpu":
        return ring.tile_size(s.S // s.context, s.context, flash_tile) > 0
    return s.platform != "cpu" and flash.supports(s.H, s.a)


def of_loss(s: Sizes) -> dict[str, float]:
    """Bytes of the loss of one chunk: logits in float32 with their rounded gradient, the head with its own.

    One chunk keeps the gradient of all logits, beside one piece of them; where the head is not plain, both
    are whole. With several chunks the head's gradient is accumulated in float32, and the gradient of the
    residual stream is kept. The TPU compiler multiplies by parts of the head, and holds less of it and of
    its gradient.
    """
    tokens, head = s.T / s.schedule.stages, s.V * s.D / s.t
    parts = {"logits": tokens / s.chunks * s.V / s.t * (4 + s.a)}
    if s.chunks < s.pieces:  # one of these, then the head's gradient
        wide = 4 * tokens / s.pieces * s.V / s.t
        gradient = 0 if s.platform == "tpu" else head * s.a
        return {"logits": tokens * s.V / s.t * s.a, "head": head * s.a + max(wide, gradient)}
    if s.frozen:  # their gradient is multiplied by the head alone, on TPUs as it is made
        wide = 4 if s.platform == "tpu" and s.chunks == 1 else 4 + s.a
        return {"logits": tokens / s.chunks * s.V / s.t * wide, "head": 1.5 * head * s.a}
    if s.chunks == 1:
        return parts | {"head": (1.5 if s.platform == "tpu" else 3) * head * s.a}
    copies = 1 if s.platform == "tpu" else 1.5
    return parts | {"head": head * (copies * s.a + 4), "gradient of the blocks": tokens * s.D * s.a}


def of_scatter(s: Sizes) -> dict[str, float]:
    """Bytes at the end of the loss on several GPUs.

    While the gradient of the head is scattered, XLA fills those of the blocks and, in float32, that of the
    embedding with zeros.
    """
    if s.frozen or s.shards == 1 or s.platform not in ("cuda", "gpu"):
        return {}
    return {
        "head": s.V * s.D * s.a / s.t,
        "embedding's gradient": 4 * s.end,
        "rounded weights": rounded_weights(s),
    }


def of_update(settings: Settings, s: Sizes, params: float, fetched: float) -> float:
    """Bytes of the update of all parameters, besides what is held.

    The gradients exist, and if they are sums over microbatches, in float32. If not, the embedding's is in
    float32, and that of a head of its own in the dtype of the matmuls. Updates are made in place, except
    that compiled steps hold:

    * where rounding keeps its errors, the largest array in float32 and the update of the embedding;
    * else with GaLore the largest array in float32, and where the blocks are in parts what `of_refresh`
      says;
    * else with low-bit moments what `of_low_bit_update` says, or if the optimizer has matmuls, two arrays
      of the largest size in float32;
    * else what `workspace_of_matmuls` says.

    Released layers are updated one by one. What is outside of them is left, and if it is rounded or has
    low-bit moments, updates of all of it in float32, one of which takes the place of the head's gradient.
    State in the host's memory is fetched for it; its new state and a byte of new codes exist for one array
    at a time, but with low-bit moments of float32 parameters two float32 arrays for each.

    Args:
      params: bytes of the parameters.
      fetched: bytes in the host's memory for one parameter.
    """
    optimizer = settings.optimizer
    low_bit, rounding = optimizer.low_bit, optimizer.param_rounding
    largest = 4 * max(s.of_stage.L * s.D * s.F / (s.shards * s.t), s.end)
    if s.frozen:
        return 0.0
    if optimizer.offload:
        if low_bit is not None and rounding is None and optimizer.galore is None:
            updates = 4 * s.ends
        else:
            updates = 1 if rounding else 0
        return s.end * (4 + (s.ends - 1) * s.param + (s.ends + 1) * fetched + updates)
    if s.microbatches > 1:
        return 4 * params / s.param
    if s.released:
        return 4 * (1 + s.ends) * s.end if low_bit or optimizer.galore or rounding else 0.0
    grads = of_blocks(s) + (s.ends - 1) * s.end * s.a + 4 * s.end
    if rounding not in (None, "stochastic"):
        return grads + largest + 4 * s.end
    if optimizer.galore:
        return grads + largest + (of_refresh(s, optimizer.galore.rank) if s.in_parts else 0.0)
    if not low_bit:
        return grads + workspace_of_matmuls(optimizer.kind.matmuls, largest)
    if optimizer.kind.matmuls != "none":
        return grads + 2 * largest
    return of_low_bit_update(s, grads)


def of_refresh(s: Sizes, rank: int) -> float:
    """Bytes of a refresh of GaLore's bases where the blocks are in parts.

    Of the largest stack it holds which entries of the gradient are zero, a byte each, and of attention the
    new bases in float32.
    """
    sides = 2 * min(s.D, s.N * s.H) + 2 * min(s.D, s.K * s.H)
    return s.of_stage.L * (s.D * s.F + 4 * rank * sides) / (s.shards * s.t)


def of_low_bit_update(s: Sizes, grads: float) -> float:
    """Bytes of the update of parameters with low-bit moments, gradients included.

    The embedding and the head are updated first, then the blocks, whose largest stacks are those of the
    MLP. The new codes of both moments of an array, a byte each, are written beside the old ones. XLA
    computes the moments in float32 twice, for the scales and for the codes, rather than keep them, except
    where parameters are float32:

    * those of a tied embedding, whose gradient is a sum: that of the lookup in float32 and that of the head
      in the dtype of the matmuls;
    * those of all arrays where the blocks are in parts. There the smallest arrays come first, so that only
      the gradients of the MLP are left when its stacks are updated.

    Args:
      grads: bytes of all gradients.
    """
    stack, wide = s.of_stage.L * s.D * s.F / (s.shards * s.t), 2 * 4
    end, blocks = grads + 2 * s.end, of_blocks(s) + 2 * stack
    if s.ends == 1:
        end = grads + s.end * (s.a + (wide if s.param == 4 else 2))
    if s.in_parts and s.param == 4:
        blocks = (3 * s.param + wide) * stack
    return max(end, blocks)


# --- work and collectives -----------------------------------------------------------------------------


def work(settings: Settings, machine: Machine, state: StateShapes) -> Work:
    """FLOPs and memory traffic of one device.

    Half of the attention matmuls are counted, as causal flash kernels compute them; of dense attention 5/8.
    A flash kernel's backward pass counts as five matmuls, although some compute the logits twice. A
    pipeline's computation in bubbles counts too: all stages wait for it. Frozen weights have no gradient.
    """
    s = sizes(settings, machine)
    mesh, devices = abstract_mesh(machine.axes), math.prod(machine.axes.values())
    tokens = settings.data.batch_size * s.S
    passed = tokens / (1 - s.schedule.bubble)  # through the blocks
    flops: dict[str, float] = collections.defaultdict(float)
    for path, width in s.widths.items():
        repeats = s.again if path != DOWN else 0  # the backward pass does not need the output of a block
        for dtype, n in linear_flops(settings, path, 2 * passed * s.L * s.D * width, repeats).items():
            flops[dtype] += n
    logits_again = 1 if settings.model.dtype == "float16" and s.chunks > 1 else 0  # see `losses`
    for dtype, n in linear_flops(settings, "lm_head", 2 * tokens * s.D * s.V, logits_again).items():
        flops[dtype] += n
    square = 5 / 8 if s.attention == "xla" else 1 / 2
    passes = (3 if s.attention == "xla" else 3.5) + s.attention_again
    flops["bfloat16"] += square * passes * 4 * passed * s.S * s.L * s.N * s.H
    if settings.model.qk_clip is not None:  # all logits once more, see `qk_clip.max_logits`
        flops["bfloat16"] += 2 * passed * s.S * s.L * s.N * s.H
    add_update(flops, settings, machine, state, s.L)
    params, opt_state = (state.bytes_on(mesh, key) for key in ("params", "opt_state"))
    return Work(
        {dtype: n / devices for dtype, n in flops.items() if n},
        traffic(s, params, opt_state, square),
        host=2 * (state.offloaded_on(mesh) + offloaded(s)),
    )


def offloaded(s: Sizes) -> float:
    """Bytes of the blocks' inputs that remat moves to the host, and back."""
    if s.remat != "offload":
        return 0.0
    return s.runs * s.of_stage.T * s.D * s.a / s.t


def traffic(s: Sizes, params: float, opt_state: float, square: float) -> float:
    """Bytes that one device reads from and writes to its memory.

    Weights are written gathered and read in each pass; the optimizer reads and writes the state; about
    thirty arrays of width D and twelve of width F pass through memory for each block and token; dense
    attention's squares too, in tiles or not.

    Args:
      params, opt_state: bytes on one device.
      square: the part of a square of logits that is computed.
    """
    once = 2 * (params + opt_state) + 2 * gradients(s)
    weights = (3 + s.again) * 2 * s.runs * s.block_params * s.a / s.t
    token_widths = 30 * s.D + 12 * s.F / s.t
    if s.attention == "xla" or (s.attention == "ring" and not fused_ring(s)):
        token_widths += 24 * s.S * s.N / s.t * square
    activations = s.runs * s.of_stage.T * s.a * token_widths * (1 + s.again / 3)
    logits = 4 * s.T / s.schedule.stages * s.microbatches * s.V / s.t * 4
    return once + weights + activations + logits


def collectives(settings: Settings, machine: Machine) -> list[Collective]:
    """The collectives that the mesh needs; XLA's are about the same, divided differently.

    * fsdp and context: weights gathered for the forward and again for the backward pass, gradients
      scattered, for every microbatch; the same for the head; the looked-up embeddings, and their
      gradient, also over tensor;
    * context: the ring. Keys and values in every pass (the first turns of the backward pass share them with
      what is recomputed), their gradients in float32, rounded on the last hop; after the blocks the
      residual stream back into its natural order; for QK-clip all keys in the forward pass;
    * tensor: the residual stream gathered before and scattered after attention and MLP, in the dtype of the
      matmuls (XLA for TPUs adds quantized products as int32 or float32);
    * data: gradients summed, that of the embedding in float32; in 8 bits with scales once a step instead of
      for every microbatch; those of adapters are neglected. With local steps outer gradients, as a share of
      a step;
    * fsdp, context and tensor: what optimizers such as Muon send, to have whole matrices;
    * stage: in each tick, in both directions, a microbatch's activations, one that waits and one that is
      done; with several rounds the weights to where they run, and their gradients; and the gradients of
      embedding and head, summed.
    """
    s, ledger = sizes(settings, machine), Ledger(machine.axes)
    of_stage, (stages, _, rounds) = s.of_stage, s.schedule
    m, weights, x = s.microbatches, s.block_params * s.a / s.t, of_stage.T * s.D * s.a
    runs = int(s.runs)
    head, whole_x = s.V * s.D * s.a / s.t, s.T * s.D * s.a / stages
    directions = 1 if s.frozen else 2  # frozen weights send no gradients back
    split, turns = ("fsdp", "context"), s.context - 1
    ledger.add("all-gather", split, gathered_kernels(settings, s), 2 * runs)
    ledger.add("all-gather", split, head / s.a * gathered_itemsize(settings, "lm_head", s.a), m)
    if not s.frozen:
        kind, size = scatter_of_gradients(settings, s)
        ledger.add(kind, split, size, runs)
        ledger.add("reduce-scatter", split, head, m)
    ledger.add("all-to-all", ("context",), whole_x, directions * m)
    ledger.add("all-to-all", ("fsdp",), whole_x / s.t, directions * m)
    ledger.add("all-reduce", ("tensor",), whole_x, m)
    ledger.add("all-gather", ("tensor",), whole_x, 0 if s.frozen else m)
    k = of_stage.T * s.K * s.H / s.t
    keys = (2 + s.attention_again) * turns + 1 - s.attention_again if turns else 0
    ledger.add("collective-permute", ("context",), k * s.a, 2 * keys * runs)
    ledger.add("collective-permute", ("context",), k * 4, 2 * turns * runs)
    if settings.model.qk_clip is not None:
        ledger.add("all-gather", ("context",), k * s.context * s.a, runs)
    ledger.add("collective-permute", ("context", "tensor") if turns else (), whole_x / s.t / 2, 4 * m)
    ledger.add("all-gather", ("tensor",), x, (2 + 2 * s.again) * runs)
    for path in (OUT, DOWN):
        sent = gathered_gradient_itemsize(settings, machine, path, s.a)
        ledger.add("all-gather", ("tensor",), x / s.a * sent, runs)
    ledger.add("reduce-scatter", ("tensor",), x, (4 + s.again) * runs)
    summed, exchange = (of_stage.L * weights + 2 * head) / s.shards, settings.precision.exchange
    tables = (head + head / s.a * 4) / s.shards
    local = settings.train.local
    steps = 1 if local is None else local.steps
    if exchange != "none":
        for kind in ("all-to-all", "all-gather"):
            ledger.add(kind, ("data",), num_bytes(summed / s.a, exchange) / steps, 1)
    elif local is not None:
        ledger.add("all-reduce", ("data",), summed / s.a * 4 / steps, 1)
    else:
        ledger.add("all-reduce", ("data",), of_stage.L * weights / s.shards + tables, 0 if s.frozen else m)
    if not (s.frozen or s.released):
        ledger.add_moves(settings.optimizer.kind, s.L, of_blocks(s) / s.param * 4)
    ledger.add("all-reduce", ("stage",), tables, 0 if s.frozen else m)
    ledger.add("collective-permute", ("stage",), x / s.t, 2 * 3 * s.schedule.ticks * m)
    if rounds > 1:
        share = of_stage.L * s.block_params * s.param / (s.shards * s.t)
        ledger.add("collective-permute", ("stage",), share, directions * m)
    return ledger.collectives


COST = Cost(memory, work, collectives)
