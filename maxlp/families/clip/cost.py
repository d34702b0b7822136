"""A closed form of a CLIP train step: memory, collectives and FLOPs of one device, without a compiler.

The state is exact: it is the state of the step itself, as shapes. The rest is arithmetic on the sizes of
two towers and of a loss over all pairs; `tests/planning` compares the sum with compiled peaks.

Shape letters, of one device and microbatch: R rows · S positions (patches that are kept, or tokens of a
text) · D embed · F mlp · N heads · L layers · t the tensor axis; and of the global batch: B pairs ·
E joint dim.
"""

import collections
import dataclasses
import math

import jax.numpy as jnp

from maxlp.core.train_state import num_params
from maxlp.families.clip.model import TextConfig
from maxlp.families.clip.vit import VisualConfig
from maxlp.nn.attention import cudnn
from maxlp.parallel.sharding import abstract_mesh
from maxlp.planning.cost_model import (
    Blocks,
    Cost,
    Ledger,
    StateShapes,
    Work,
    add_update,
    gathered_gradient_itemsize,
    gathered_kernels,
    held_state,
    linear_flops,
    scatter_of_gradients,
    shared_sizes,
    unsampled,
)
from maxlp.planning.hlo import Collective
from maxlp.run.settings import Machine, Settings

# Multiples to which compilers pad the last two dims of an (S, S) matrix: alignment of matmuls on GPU, tiles
# of memory on TPU.
TILES = {"cuda": (8, 8), "gpu": (8, 8), "tpu": (8, 128), "cpu": (1, 1)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tower(Blocks):
    """One tower on one device; see the letters above.

    Attributes:
      name: "visual" or "text".
      shards: how many parts a weight is split into, not counting the tensor axis.
      tile: see `TILES`.
    """

    name: str
    shards: int
    causal: bool
    tile: tuple[int, int]

    @property
    def x(self) -> float:
        """Bytes of the tokens at width D."""
        return self.R * self.S * self.D * self.a

    @property
    def f(self) -> float:
        """Bytes of the tokens at width F."""
        return self.R * self.S * self.F * self.a / self.t

    @property
    def widths(self) -> dict[str, int]:
        attn = {f"{self.name}/layers/attn/{one}_proj": self.D for one in "qkvo"}
        return attn | {f"{self.name}/layers/mlp/{one}_proj": self.F for one in ("up", "down")}

    @property
    def computed_part(self) -> float:
        """The part of an (S, S) matrix that dense attention computes, see `attention.dense`."""
        return 5 / 8 if self.causal and self.S % 256 == 0 else 1.0

    @property
    def squares(self) -> float:
        """Entries of the (S, S) matrices of dense attention."""
        if self.attention != "xla":
            return 0.0
        rows, columns = (-(-self.S // multiple) * multiple for multiple in self.tile)
        heads = self.N / self.t if self.N % self.t == 0 else self.N
        return self.computed_part * self.R * heads * rows * columns

    @property
    def saved(self) -> float:
        """Bytes that one block's forward pass saves for its backward pass.

        The tensor axis splits the positions, of joined rows where it does not divide those of one row.
        """
        if self.remat == "offload":
            return 0.0
        if self.remat == "block":
            return self.x / self.t
        if self.remat == "dots":  # the block's input, q, k, v, o and up, and what attention computed
            if self.attention_again:
                return 5 * self.x / self.t + self.f
            log_sums = 4 * self.R * self.S * self.N / self.t
            return 6 * self.x / self.t + self.f + log_sums
        # Two F-wide arrays, one if the weights are frozen, six float32 arrays of the norms, both normed
        # inputs, q, k, v, the output of attention, probabilities in float32 and rounded, and the weights in
        # the dtype of the matmuls; of what the gradients of kernels alone need, only the tokens that they
        # are computed from.
        weights = self.block_params * self.a / (self.shards * self.t)
        norms = 6 * self.x / self.a * 4 / self.t
        *of_stream, of_down = self.unsampled
        stream = (6 - sum(of_stream)) * self.x / self.t
        return (2 - self.frozen - of_down) * self.f + norms + stream + (4 + self.a) * self.squares + weights

    @property
    def saved_by_all(self) -> float:
        """Bytes that the forward pass of all blocks saves.

        Outside of the blocks these are the inputs of the first and last norm, the gradient of what is
        pooled, and for causal dense attention a mask and the value of masked logits, which XLA computes
        once for all layers.
        """
        masks = 5 * self.squares if self.causal else 0.0
        return self.L * self.saved + 3 * self.x / self.t + masks

    @property
    def backward_of_block(self) -> float:
        """Bytes of the backward pass of one block.

        It holds three F-wide arrays (gradients replace what is no longer needed), two once
        attention is differentiated; the probabilities in float32 and rounded, and in the end
        their gradient and that of the logits; eight and a half arrays of the residual stream, q, k, v and
        the output; and seven tenths of the block's gathered weights and of the weights of all blocks, which
        are rounded before they are gathered.

        Next to a kernel of attention XLA may postpone the gradients of the weights until the end, and then
        all that they are computed from exists at once, D wide: q, k, v, the output and the gradients of
        these four, the inputs of both branches and the gradient between them, and three gradients of normed
        inputs.
        """
        weights = self.block_params * self.a / self.t
        rounded = self.L * weights / self.shards if self.param != self.a and self.shards > 1 else 0.0
        stream = 4.5 * self.x / self.t + 4 * self.x
        mlp = 3 * self.f + (4 + self.a) * self.squares
        attention = 2 * self.f + (4 + 3 * self.a) * self.squares
        if self.attention != "xla" and not self.frozen:
            attention += 10 * self.x / self.t + 4 * self.x - stream
        if self.attention == "cudnn":
            attention += cudnn.workspace(self.x / self.a / self.t, packed=False)
        return max(mlp, attention) + stream + 0.7 * (weights + rounded)


def towers(settings: Settings, machine: Machine) -> tuple[Tower, Tower]:
    """The image tower and the text tower of a step that fulfils `run.constraints`."""
    m, shared = settings.model, shared_sizes(settings, machine)

    def tower(name: str, sizes: VisualConfig | TextConfig, positions: int) -> Tower:
        return Tower(
            **shared,
            name=name,
            S=positions,
            D=sizes.width,
            F=sizes.mlp_dim,
            N=sizes.num_heads,
            L=sizes.num_layers,
            shards=machine.axes["fsdp"],
            causal=sizes.causal,
            tile=TILES[machine.platform],
            unsampled=unsampled(settings, *_readers(name)),
        )

    return (
        tower("visual", m.visual, m.visual.train_seq_len),
        tower("text", m.text, settings.data.text_len),
    )


# --- memory ---------------------------------------------------------------------------------------------


def memory(settings: Settings, machine: Machine, state: StateShapes) -> dict[str, float]:
    """Bytes of one device at the worst moment of a step, by what they hold.

    Three moments compete: the loss, and the backward pass of a block of either tower, which XLA may take
    first: the activations of the other one wait, or its gradients exist already, of which this counts the
    larger. With several microbatches the towers do not depend on each other, XLA finishes one before it
    starts the other, and the loss holds features only. On several devices, however, XLA may allocate the
    array for what the text tower's blocks save, full of zeros, before the image tower runs; this counts it.
    """
    image, text = towers(settings, machine)
    mesh, M = abstract_mesh(machine.axes), settings.train.microbatches
    pixels = image.R * 3 * settings.data.image_size**2
    held = held_state(settings, mesh, state) | {
        "batch": M * (pixels + 4.0 * text.R * text.S),
        "features": features(settings, machine) if M > 1 else 0.0,
    }
    if M > 1:  # XLA copies the batch, so that the rows of each microbatch are together
        held["microbatches"] = held["batch"]
    of_images = {} if image.frozen else {"pixels": pixels * image.a}
    visual = settings.model.visual
    if visual.patch_dropout:  # their gradient
        of_images["dropped patches"] = image.R * visual.num_patches * image.D * image.a
    of_all = gradients(settings, machine, state)
    params = state.tree["params"]
    of_param = state.bytes_on(mesh, "params") / num_params(params)

    def backward(tower: Tower, other: Tower) -> dict[str, float]:
        waiting = other.saved_by_all if M == 1 else 0.0
        early = text.L * text.saved if M > 1 and mesh.size > 1 and tower is image else 0.0
        parts = {
            "saved activations": tower.saved_by_all + waiting + early,
            "gradients": of_all,
            "a block's activations": tower.backward_of_block,
        }
        if settings.train.release_gradients:
            parts["a layer's update"] = max(
                one.block_params * 4 / (one.shards * one.t) for one in (image, text)
            )
        else:
            of_other = of_param * num_params(params[other.name])
            parts["gradients"] -= min(of_other, waiting) if M == 1 else of_other
        return parts | of_images

    at_loss = {"loss": loss(settings, machine)}
    if M == 1:
        at_loss |= {"saved activations": image.saved_by_all + text.saved_by_all} | of_images
    moments = [backward(image, text), backward(text, image), at_loss]
    return held | max(moments, key=lambda parts: sum(parts.values()))


def gradients(settings: Settings, machine: Machine, state: StateShapes) -> float:
    """Bytes of the gradients of all parameters, sharded.

    Summed over microbatches they exist a second time, in float32. Where layers are updated in the backward
    pass, only the gradients of one layer exist. Those outside of the blocks exist twice, because two parts
    of the model contribute to them.
    """
    params = state.bytes_on(abstract_mesh(machine.axes), "params")
    if settings.train.release_gradients:
        sizes = [
            (one.L, one.block_params * one.param / (one.shards * one.t))
            for one in towers(settings, machine)
        ]
        rest = params - sum(layers * block for layers, block in sizes)
        return max(block for _, block in sizes) + 2 * rest
    itemsize = jnp.dtype(settings.model.param_dtype).itemsize
    return params + (params * 4 / itemsize if settings.train.microbatches > 1 else 0.0)


def features(settings: Settings, machine: Machine) -> float:
    """Bytes of the float32 features of both towers, and of their gradients."""
    rows = settings.data.batch_size / machine.batch_shards
    return 4 * rows * settings.model.embed_dim * 4


def loss(settings: Settings, machine: Machine) -> float:
    """Bytes of the float32 logits of a device and of what is computed from them, see `contrastive`."""
    B, E = settings.data.batch_size, settings.model.embed_dim
    rows = B / math.prod(machine.axes.values())
    if settings.loss.method == "tiled":
        tile = min(rows, settings.loss.tile_size)
        return 3 * tile**2 * 4 + 8 * rows * E * 4
    gathered = 2 * B * E * 4
    logits = 3 if settings.loss.kind == "sigmoid" else 1  # XLA computes the softmax in place
    return logits * rows * B * 4 + gathered


# --- work and collectives -------------------------------------------------------------------------------


def work(settings: Settings, machine: Machine, state: StateShapes) -> Work:
    """FLOPs and memory traffic of one device.

    With several microbatches both towers run forward once more, for the features. A float32 product of the
    loss costs as much as six in bfloat16.
    """
    devices, M = math.prod(machine.axes.values()), settings.train.microbatches
    B, E = settings.data.batch_size, settings.model.embed_dim
    flops: dict[str, float] = collections.defaultdict(float)
    moved = host = 0.0
    features_again = 1 if M > 1 else 0
    image, text = towers(settings, machine)
    for tower in (image, text):
        again = tower.again + features_again
        tokens = B * tower.S
        square = 1 / 2 if tower.causal else 1.0
        if tower.attention == "xla":
            square = tower.computed_part
        for path, width in tower.widths.items():
            once = 2 * tokens * tower.L * tower.D * width
            # The backward pass needs the output of a branch only for the gradient of its gain.
            unused = path.endswith("/down_proj") and settings.model.layer_scale is None
            repeats = features_again if unused else again
            for dtype, n in linear_flops(settings, path, once, repeats).items():
                flops[dtype] += n
        passes = (3 if tower.attention == "xla" else 3.5) + features_again + tower.attention_again
        flops["bfloat16"] += square * passes * 4 * tokens * tower.S * tower.L * tower.D
        widths = 30 * tower.D + 12 * tower.F / tower.t
        if tower.attention == "xla":
            widths += 24 * tower.S * tower.N / tower.t * square
        moved += tower.L * tower.R * tower.S * M * tower.a * widths * (1 + again / 3)
        moved += (3 + again) * 2 * tower.L * tower.block_params * tower.a / tower.t * M
        if tower.remat == "offload":
            host += 2 * tower.L * tower.x / tower.t * M
    visual = settings.model.visual
    pixels = B * visual.num_patches * 3 * visual.patch_size**2
    flops["bfloat16"] += (4 + 2 * features_again) * pixels * visual.width
    by_weights, scores = visual.pool_products
    runs = 3 + features_again
    flops["bfloat16"] += 2 * B * ((runs - image.frozen) * by_weights + runs * scores)
    products = 6 * 2 * B**2 * E
    flops["bfloat16"] += (4 if settings.loss.method == "tiled" else 3) * products
    add_update(flops, settings, machine, state, image.L)
    mesh = abstract_mesh(machine.axes)
    once = 2 * (state.bytes_on(mesh, "params") + state.bytes_on(mesh, "opt_state"))
    moved += once + 2 * gradients(settings, machine, state)
    host += 2 * state.offloaded_on(mesh)
    return Work({dtype: n / devices for dtype, n in flops.items() if n}, moved, host)


def _readers(name: str) -> list[tuple[str, ...]]:
    """For each input of the matmuls of a block, the paths of those that read it."""
    attn, mlp = f"{name}/layers/attn", f"{name}/layers/mlp"
    qkv = tuple(f"{attn}/{one}_proj" for one in "qkv")
    return [qkv, (f"{attn}/o_proj",), (f"{mlp}/up_proj",), (f"{mlp}/down_proj",)]


def collectives(settings: Settings, machine: Machine) -> list[Collective]:
    """The collectives that the mesh needs.

    * fsdp: weights gathered for each pass, gradients scattered, for every microbatch; the looked-up
      embeddings, and their gradient (adapters' gradients are neglected);
    * tensor: the residual stream gathered before and scattered after attention and MLP;
    * data: gradients summed, those of the embeddings in float32;
    * fsdp and tensor: what optimizers such as Muon send, to have whole matrices;
    * all axes: the features of the texts gathered or sent around the ring, and their gradients.
    """
    axes, M = machine.axes, settings.train.microbatches
    ledger = Ledger(axes)
    image, text = towers(settings, machine)
    forward = 1 + (M > 1)
    for tower in (image, text):
        weights = tower.block_params * tower.a / tower.t
        ledger.add("all-gather", ("fsdp",), gathered_kernels(settings, tower), (forward + 1) * tower.L * M)
        summed = 0 if tower.frozen else M
        kind, size = scatter_of_gradients(settings, tower)
        ledger.add(kind, ("fsdp",), size, tower.L * summed)
        ledger.add("all-gather", ("tensor",), tower.x, (2 * forward + 2 * tower.again) * tower.L * M)
        for path in (f"{tower.name}/layers/attn/o_proj", f"{tower.name}/layers/mlp/down_proj"):
            sent = gathered_gradient_itemsize(settings, machine, path, tower.a)
            ledger.add("all-gather", ("tensor",), tower.x / tower.a * sent, tower.L * M)
        ledger.add("reduce-scatter", ("tensor",), tower.x, (2 * forward + 2 + tower.again) * tower.L * M)
        ledger.add("all-reduce", ("data",), tower.L * weights / tower.shards, summed)
        if summed and not settings.train.release_gradients:
            matrices = tower.L * weights / tower.a * 4 / tower.shards
            ledger.add_moves(settings.optimizer.kind, tower.L, matrices)
    ledger.add("all-to-all", ("fsdp",), text.x, (forward + (not text.frozen)) * M)
    embeddings = settings.model.text.vocab_size * text.D * 4 / text.t
    ledger.add("all-reduce", ("data",), embeddings / text.shards, 0 if text.frozen else M)
    every, B, E = tuple(axes), settings.data.batch_size, settings.model.embed_dim
    devices = math.prod(axes.values())
    if settings.loss.method == "tiled":
        # The texts travel around the ring twice, and their sums and gradients with them.
        ledger.add("collective-permute", every, B / devices * E * 4, 3 * devices)
    else:
        ledger.add("all-gather", every, B * E * 4, 1)
        ledger.add("reduce-scatter", every, B * E * 4, 1)
    return ledger.collectives


COST = Cost(memory, work, collectives)
