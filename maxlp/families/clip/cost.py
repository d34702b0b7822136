"""A closed form of a CLIP train step, as `estimate` has one of Llama: two towers and a loss over all pairs.

Shape letters, all of one device and microbatch: R rows · S positions (of the patches that are kept; of a
text) · T tokens R S · D embed · F mlp · N heads · L layers · t the tensor axis; and B pairs of the global
batch · E joint dim.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from maxlp.families.llama import cost as estimate
from maxlp.families.llama.cost import State, Work
from maxlp.planning.hlo import Collective
from maxlp.run.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Tower:
    """One tower on one device; see the letters above.

    a, param: bytes of an activation and of a parameter.
    shards: into how many parts a weight is split, the tensor axis left out.
    tile: what the compiler rounds the last two dims of an (S, S) matrix up to.
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
    shards: int
    causal: bool
    attention: str
    remat: str
    tile: tuple[int, int]

    @property
    def x(self) -> float:
        """Bytes of the tokens at width D."""
        return self.R * self.S * self.D * self.a

    @property
    def f(self) -> float:
        return self.R * self.S * self.F * self.a / self.t

    @property
    def block_params(self) -> int:
        return 4 * self.D**2 + 2 * self.D * self.F

    @property
    def squares(self) -> float:
        """Entries of the (S, S) matrices of plain attention."""
        if self.attention != "xla":
            return 0.0
        rows, columns = (-(-self.S // multiple) * multiple for multiple in self.tile)
        heads = self.N / self.t if self.N % self.t == 0 else self.N
        return self.part * self.R * heads * rows * columns

    @property
    def part(self) -> float:
        """The part of a square that is computed: see `models.attention.xla`."""
        return 5 / 8 if self.causal and self.S % 256 == 0 else 1.0

    @property
    def saved(self) -> float:
        """Bytes that one block's forward pass leaves for its backward pass. Over the tensor axis XLA splits
        the positions, or the rows if it does not divide those.

        remat none: four F-wide arrays, six float32 ones of the norms, both normed inputs, q, k, v and the
        attention's output, probabilities in float32 and rounded; the weights in the matmuls' dtype.
        """
        if self.remat == "offload":
            return 0.0
        if self.remat == "block":
            return self.x / self.t
        if self.remat == "dots":  # the block's input, q, k, v, o and up
            return 5 * self.x / self.t + self.f
        weights = self.block_params * self.a / (self.shards * self.t)
        norms = 6 * self.x / self.a * 4 / self.t
        return 4 * self.f + norms + 6 * self.x / self.t + (4 + self.a) * self.squares + weights

    @property
    def block(self) -> float:
        """The backward pass of one block.

        Of the MLP three arrays (what gradients replace is not needed again), and two when the probabilities
        get their gradient; these in float32 and rounded, and in the end the gradient too; of the residual
        stream, q, k, v and the output eight and a half; and seven tenths of the block's weights, gathered
        and, of all blocks, rounded.
        """
        weights = self.block_params * self.a / self.t
        rounded = self.L * weights / self.shards if self.param != self.a else 0.0
        stream = 4.5 * self.x / self.t + 4 * self.x
        of_mlp = 3 * self.f + (4 + self.a) * self.squares
        of_attention = 2 * self.f + (4 + 2 * self.a) * self.squares
        return max(of_mlp, of_attention) + stream + 0.7 * (weights + rounded)


# What the compilers round (S, S) up to: the alignment of matmuls on GPU, the tiles of memory on TPU.
TILES = {"cuda": (8, 8), "tpu": (8, 128), "cpu": (1, 1)}


def towers(c: ConfigDict, axes: dict[str, int], platform: str = "cuda") -> tuple[Tower, Tower]:
    """The image tower and the text tower.

    Raises:
      ConfigError: a batch that does not divide, or a mesh that CLIP does not have.
    """
    m, shards = c.model, axes["data"] * axes["fsdp"]
    for axis in ("stage", "context"):
        if axes.get(axis, 1) > 1:
            raise ConfigError(f"config.mesh.{axis}={axes[axis]} is for Llama; set it to 1")
    rows = shards * c.train.microbatches
    if c.data.batch_size % rows:
        raise ConfigError(
            f"config.data.batch_size={c.data.batch_size} does not divide into {shards} data shards × "
            f"config.train.microbatches={c.train.microbatches}; use a multiple of {rows}"
        )

    def tower(sizes: Any, positions: int, causal: bool) -> Tower:
        return Tower(
            R=c.data.batch_size // rows,
            S=positions,
            D=sizes.width,
            F=sizes.mlp_dim,
            N=sizes.num_heads,
            L=sizes.num_layers,
            t=axes["tensor"],
            a=jnp.dtype(m.dtype).itemsize,
            param=jnp.dtype(m.param_dtype).itemsize,
            shards=axes["fsdp"],
            causal=causal,
            attention=m.attention,
            remat=m.remat,
            tile=TILES[platform],
        )

    return tower(m.visual, kept(m.visual), False), tower(m.text, c.data.text_len, m.text.causal)


def patches(visual: Any) -> int:
    return (visual.image_size // visual.patch_size) ** 2


def kept(visual: Any) -> int:
    """Positions that a training image has in the blocks: see `models.vit.drop_patches`."""
    of_patches = patches(visual)
    if visual.patch_dropout:
        of_patches = max(1, int(of_patches * (1 - visual.patch_dropout)))
    return of_patches + (visual.pool == "cls")


def memory(c: ConfigDict, axes: dict[str, int], state: State, platform: str) -> dict[str, float]:
    """Bytes of one device at the worst moment of a step, by what they hold; arguments as `estimate.memory`.

    Two moments compete: the loss, and the backward pass of a block. Which tower XLA takes first, while the
    other's activations wait, differs from run to run: it is taken to be the one with the larger blocks. In
    several microbatches the loss has the features alone.
    """
    image, text = towers(c, axes, platform)
    for tower in (image, text):
        estimate.check_attention(c, platform, tower.S, tower.D // tower.N)
        if tower.attention != "xla" and tower.N % tower.t:
            raise ConfigError(
                f"config.mesh.tensor={tower.t} does not divide the {tower.N} heads of a tower, which "
                f"config.model.attention={tower.attention} needs"
            )
    mesh, M = estimate.abstract_mesh(axes), c.train.microbatches
    pixels = image.R * 3 * c.data.image_size**2
    held = {
        "parameters": state.bytes_on(mesh, "params"),
        "optimizer": state.bytes_on(mesh, "opt_state") + state.bytes_on(mesh, "model_state"),
        "batch": M * (pixels + 4.0 * text.R * text.S),
        "features": features(c, axes) if M > 1 else 0.0,
        "gradients": gradients(c, axes, state),
    }
    both = {"saved activations": kept_by(image) + kept_by(text), "pixels": pixels * image.a}
    if c.model.visual.patch_dropout:
        both["dropped patches"] = image.R * patches(c.model.visual) * image.D * image.a  # their gradient
    block = max(image.block, text.block)
    moments = [both | {"a block's activations": block}, {"loss": loss(c, axes)} | (both if M == 1 else {})]
    return held | max(moments, key=lambda parts: sum(parts.values()))


def kept_by(tower: Tower) -> float:
    """Bytes that a forward pass leaves: of the blocks, and outside of them the inputs of the norms at both
    end and the gradient of what is pooled; for plain causal attention its mask, and what stands for hidden
    logits, which XLA makes once."""
    masks = 5 * tower.squares if tower.causal else 0.0
    return tower.L * tower.saved + 3 * tower.x / tower.t + masks


def gradients(c: ConfigDict, axes: dict[str, int], state: State) -> float:
    """Those of all parameters, split; summed over microbatches they exist a second time, in float32."""
    split = state.bytes_on(estimate.abstract_mesh(axes), "params")
    again = split * 4 / jnp.dtype(c.model.param_dtype).itemsize if c.train.microbatches > 1 else 0.0
    return split + again


def features(c: ConfigDict, axes: dict[str, int]) -> float:
    """float32 features of both towers, and their gradients."""
    rows = c.data.batch_size / (axes["data"] * axes["fsdp"])
    return 4 * rows * c.model.embed_dim * 4


def loss(c: ConfigDict, axes: dict[str, int]) -> float:
    """float32 logits of a device and what is made of them: see `contrastive`."""
    B, devices = c.data.batch_size, math.prod(axes.values())
    rows = B / devices
    gathered = 2 * B * c.model.embed_dim * 4
    if c.loss.method == "tiled":
        tile = min(rows, c.loss.tile_size)
        return 3 * tile**2 * 4 + 8 * rows * c.model.embed_dim * 4
    return 3 * rows * B * 4 + gathered


# --- work and collectives -----------------------------------------------------------------------------


def work(c: ConfigDict, axes: dict[str, int], state: State, platform: str) -> Work:
    """As `estimate.work`. In microbatches both towers run forward once more, for the features. The loss's
    float32 products are six bfloat16 ones each."""
    devices, M = math.prod(axes.values()), c.train.microbatches
    again = (c.model.remat in ("block", "offload")) + (M > 1)
    flops = {"bfloat16": 0.0, "float8": 0.0, "int8": 0.0}
    moved = 0.0
    for tower, name in zip(towers(c, axes), ("visual", "text"), strict=True):
        tokens = c.data.batch_size * tower.S
        square = tower.part if tower.attention == "xla" else 1 / 2 if tower.causal else 1.0
        for path, width in _matmuls(name, tower).items():
            dtype = estimate.matmul_dtype(state.recipes.get(path, estimate.HIGH))
            flops[dtype] += (6 + 2 * again) * tokens * tower.L * tower.D * width
        passes = (3 if tower.attention == "xla" else 3.5) + (c.model.remat != "none") + (M > 1)
        flops["bfloat16"] += square * passes * 4 * tokens * tower.S * tower.L * tower.D
        widths = 30 * tower.D + 12 * tower.F / tower.t
        if tower.attention == "xla":
            widths += 24 * tower.S * tower.N / tower.t * square
        moved += tower.L * tower.R * tower.S * M * tower.a * widths * (1 + again / 3)
        moved += (3 + again) * 2 * tower.L * tower.block_params * tower.a / tower.t * M
    visual = c.model.visual
    pixels = c.data.batch_size * patches(visual) * 3 * visual.patch_size**2
    flops["bfloat16"] += (4 + 2 * (M > 1)) * pixels * visual.width
    products = 6 * 2 * c.data.batch_size**2 * c.model.embed_dim
    flops["bfloat16"] += (4 if c.loss.method == "tiled" else 3) * products
    mesh = estimate.abstract_mesh(axes)
    once = 2 * (state.bytes_on(mesh, "params") + state.bytes_on(mesh, "opt_state"))
    moved += once + 2 * gradients(c, axes, state)
    return Work({k: v / devices for k, v in flops.items() if v}, moved)


def _matmuls(name: str, tower: Tower) -> dict[str, int]:
    """Path of each matmul of a block, and its width beside D."""
    attn = {f"{name}/layers/attn/{one}_proj": tower.D for one in "qkvo"}
    return attn | {f"{name}/layers/mlp/{one}_proj": tower.F for one in ("up", "down")}


def collectives(c: ConfigDict, axes: dict[str, int]) -> list[Collective]:
    """What the mesh makes necessary.

    * fsdp: weights gathered for each pass, gradients scattered, for every microbatch; what is looked up in
      the table of embeddings, and its gradient;
    * tensor: the residual stream gathered before and scattered after attention and MLP;
    * data: gradients summed;
    * all: the features of the texts gathered, or sent round the ring, and their gradients.
    """
    found, add = estimate.ledger(axes)
    M = c.train.microbatches
    again = c.model.remat in ("block", "offload")
    forward = 1 + (M > 1)
    for tower in towers(c, axes):
        weights = tower.block_params * tower.a / tower.t
        add("all-gather", ("fsdp",), weights, (forward + 1) * tower.L * M)
        add("reduce-scatter", ("fsdp",), weights, tower.L * M)
        add("all-gather", ("tensor",), tower.x, (2 * forward + 2 + 2 * again) * tower.L * M)
        add("reduce-scatter", ("tensor",), tower.x, (2 * forward + 2 + again) * tower.L * M)
        add("all-reduce", ("data",), tower.L * weights / tower.shards, M)
    add("all-to-all", ("fsdp",), towers(c, axes)[1].x, (forward + 1) * M)
    every, B, E = tuple(axes), c.data.batch_size, c.model.embed_dim
    devices = math.prod(axes.values())
    if c.loss.method == "tiled":  # texts twice round, their sums and gradients with them
        add("collective-permute", every, B / devices * E * 4, 3 * devices)
    else:
        add("all-gather", every, B * E * 4, 1)
        add("reduce-scatter", every, B * E * 4, 1)
    return found
