"""Next-token prediction on packed text: Llama."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxlp.core import gradients as gradients_lib
from maxlp.data import sources
from maxlp.families.llama import losses
from maxlp.families.llama.flops import train_flops_per_token
from maxlp.families.llama.perplexity import make_perplexity
from maxlp.nn import attention
from maxlp.parallel import sharding
from maxlp.run.config import ConfigError, bind

UNIT = "tokens"
BPE_BYTES = 4_000_000  # of text that a tokenizer learns from: 2 seconds on 2 cores


def next_token_loss(
    model: nnx.Module, batch: dict, *, num_chunks: int = 1, z_loss: float = 0.0
) -> dict[str, jax.Array]:
    """Sums over a batch of packed text; see `losses.next_token`. The ``loss`` section of a Llama's config.

    Args:
      num_chunks: pieces in which the logits are made, so that they never all exist. Divides the length.
      z_loss: weight of the squared log-partition; 0 is off, 1e-4 is PaLM's.
    """
    x_BSD, _ = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])
    targets_BS, mask_BS = batch["targets"], batch["loss_mask"]
    with jax.named_scope("head"):
        if num_chunks == 1:
            return losses.next_token(model.logits(x_BSD), targets_BS, mask_BS, z_loss=z_loss)
        logits_fn, weights = model.head()
        return losses.next_token_in_chunks(
            logits_fn, weights, x_BSD, targets_BS, mask_BS, num_chunks=num_chunks, z_loss=z_loss
        )


def num_targets(batch: dict) -> jax.Array:
    return jnp.sum(batch["loss_mask"], dtype=jnp.float32)


def loss(c: ConfigDict) -> Callable:
    return bind(next_token_loss, "loss", c.loss, "model", "batch")


def gradients(c: ConfigDict) -> gradients_lib.Gradients:
    return gradients_lib.of_sums(loss(c), num_targets, microbatches=c.train.microbatches)


def evaluator(c: ConfigDict, graphdef: nnx.GraphDef, data: Any) -> Callable:
    """Loss, perplexity and bits per byte of held-out text."""
    loss_fn = loss(c)

    def sums(state: dict, batch: dict) -> dict[str, jax.Array]:
        return loss_fn(nnx.merge(graphdef, state["params"], state["model_state"]), batch)

    perplexity = make_perplexity(sums, data.tokenizer.byte_lengths)
    return lambda state, batches: perplexity(state, batches())


def abstract_batch(c: ConfigDict, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """int32 (B, S), and a bool mask."""
    dtypes: dict[str, Any] = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), jnp.int32)
    dtypes["loss_mask"] = jnp.bool_
    of = functools.partial(
        jax.ShapeDtypeStruct, (c.data.batch_size, c.data.seq_len), sharding=sharding.batch_sharding(mesh)
    )
    return {name: of(dtype) for name, dtype in dtypes.items()}


def vocabulary(c: ConfigDict) -> tuple[str, int]:
    return "model.vocab_size", c.model.vocab_size


def texts(c: ConfigDict) -> Iterator[str | bytes]:
    """A random sample of the training text, for a tokenizer to learn from."""
    return sources.sample_texts(sources.make_source(c.data.source, "train"), BPE_BYTES, c.train.seed)


def units(c: ConfigDict) -> int:
    return c.data.batch_size * c.data.seq_len


def flops(c: ConfigDict, num_params: int) -> tuple[float, float]:
    """Training FLOPs per token with full and with causal attention."""
    m = c.model
    looked_up = 0 if m.tie_embeddings else m.vocab_size * m.embed_dim
    return train_flops_per_token(
        num_params - looked_up, m.num_layers, m.num_heads, m.head_dim, c.data.seq_len
    )


def describe(c: ConfigDict) -> str:
    return f"{c.data.batch_size} × {c.data.seq_len} = {units(c):,} tokens"


def check(c: ConfigDict, mesh: Mesh, matmuls: dict[str, str]) -> None:
    """Raises a ConfigError for sections that do not fit each other.

    Args:
      matmuls: path to precision recipe.
    """
    loss(c)
    seq = c.data.seq_len
    attention.check(c.model.attention, mesh.devices.flat[0].platform)
    if seq > c.model.max_seq_len:
        raise ConfigError(
            f"config.data.seq_len={seq} is beyond config.model.max_seq_len={c.model.max_seq_len}, "
            "the range of the rotary embedding"
        )
    if seq % c.loss.num_chunks:
        raise ConfigError(
            f"config.data.seq_len={seq} is not a multiple of config.loss.num_chunks={c.loss.num_chunks}"
        )
    if c.loss.num_chunks > 1 and "delayed" in matmuls.get("lm_head", ""):
        raise ConfigError(
            f"config.loss.num_chunks={c.loss.num_chunks} runs lm_head several times a step, which its "
            "delayed scaling cannot follow; use num_chunks=1 or a rule with another recipe for lm_head"
        )
    stages = mesh.shape["stage"]
    if stages > 1 and seq % (c.loss.num_chunks * mesh.shape["context"] * stages):
        raise ConfigError(
            f"config.data.seq_len={seq} is not a multiple of config.loss.num_chunks={c.loss.num_chunks} × "
            f"config.mesh.context={mesh.shape['context']} × config.mesh.stage={stages}, over which the "
            "head splits it; use fewer chunks"
        )
    if seq % mesh.shape["tensor"]:
        raise ConfigError(
            f"config.data.seq_len={seq} is not a multiple of config.mesh.tensor={mesh.shape['tensor']}"
        )
    if mesh.shape["context"] > 1:
        _check_context(c, mesh)


def _check_context(c: ConfigDict, mesh: Mesh) -> None:
    """Raises a ConfigError if the sequence cannot be split over devices."""
    seq, axes = c.data.seq_len, mesh.shape
    context = f"config.mesh.context={axes['context']}"
    if c.model.attention != "ring":
        raise ConfigError(
            f"config.model.attention={c.model.attention!r} does not see a sequence that {context} splits; "
            "use config.model.attention=ring"
        )
    if c.train.release_gradients:
        raise ConfigError(
            f"config.train.release_gradients=True does not go with {context}; set one of them off"
        )
    for parts, name in (
        (2 * axes["stage"] * axes["tensor"], "2 × config.mesh.stage × config.mesh.tensor"),
        (c.loss.num_chunks, f"config.loss.num_chunks={c.loss.num_chunks}"),
    ):
        if seq % (axes["context"] * parts):
            raise ConfigError(f"config.data.seq_len={seq} is not a multiple of {context} × {name}")
    heads = c.model.num_kv_heads  # divides num_heads
    if heads % axes["tensor"]:
        raise ConfigError(
            f"config.model.num_kv_heads={heads} is not a multiple of config.mesh.tensor={axes['tensor']}, "
            "which ring attention needs"
        )
