"""Next-token prediction on packed text. Shape letters: B batch · S length · D embed."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp import schema
from maxlp.core import gradients
from maxlp.core.train_step import AfterUpdate, keep_update
from maxlp.data import sources, text
from maxlp.families import Evaluate, Family
from maxlp.families.llama import losses
from maxlp.families.llama.constraints import RULES
from maxlp.families.llama.model import Llama, LlamaConfig
from maxlp.families.llama.perplexity import make_perplexity
from maxlp.nn.attention import Use
from maxlp.parallel import sharding
from maxlp.schema import Count, NotNegative

BPE_BYTES = 4_000_000  # of text that a tokenizer learns from: 2 seconds on 2 cores


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextTokenConfig:
    """The config's ``loss`` section of a Llama.

    Attributes:
      num_chunks: pieces of the sequence whose logits are computed one after another; divides its length.
      z_loss: weight of the squared log-partition, which is a part of ``train/loss`` but not of
        ``eval/loss``; 0 is off, 1e-4 is PaLM's.
    """

    num_chunks: Count = 1
    z_loss: NotNegative = 0.0

    def __post_init__(self):
        schema.check(self)

    @property
    def terms(self) -> dict[str, float]:
        """The keywords of `losses.next_token`: all fields but the number of chunks."""
        return {key: value for key, value in vars(self).items() if key != "num_chunks"}


# --- the loss -------------------------------------------------------------------------------------------


def next_token_sums(model: nnx.Module, batch: dict, config: NextTokenConfig) -> dict[str, jax.Array]:
    """Sums over a batch of packed text; see `losses.next_token`."""
    x_BSD, _ = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])
    targets_BS, mask_BS = batch["targets"], batch["loss_mask"]
    with jax.named_scope("head"):
        if config.num_chunks == 1 and not model.has_plain_head:
            return losses.next_token(model.logits(x_BSD), targets_BS, mask_BS, **config.terms)
        product, weights = model.head()
        return losses.next_token_in_chunks(
            product, weights, x_BSD, targets_BS, mask_BS, cap=model.cap, **vars(config)
        )


def own_targets(batch: dict) -> jax.Array:
    """The number of tokens that these rows predict, float32."""
    return jnp.sum(batch["loss_mask"], dtype=jnp.float32)


def num_targets(batch: dict) -> jax.Array:
    """The number of tokens that a batch predicts, float32; the same where a replica sees only its rows."""
    return sharding.sum_of_replicas(own_targets(batch))


def batch_loss(config: NextTokenConfig, seed: int = 0) -> gradients.Loss:
    """The mean loss over the predicted tokens of a batch."""
    del seed  # nothing is random
    return gradients.token_loss(lambda model, batch: next_token_sums(model, batch, config), num_targets)


def loss_gradients(
    config: NextTokenConfig,
    seed: int = 0,
    microbatches: int = 1,
    measure_noise: bool = False,
    alone: bool = False,
) -> gradients.Gradients:
    """The gradients of `batch_loss`; if ``alone``, of the mean over this replica's tokens only."""
    del seed
    return gradients.token_gradients(
        lambda model, batch: next_token_sums(model, batch, config),
        own_targets if alone else num_targets,
        microbatches=microbatches,
        measure_noise=measure_noise,
    )


# --- evaluation -----------------------------------------------------------------------------------------


def evaluator(
    graphdef: nnx.GraphDef,
    model: LlamaConfig,
    data: text.TextDataConfig,
    config: NextTokenConfig,
    validation: Any,
) -> Evaluate:
    """Loss, perplexity and bits per byte of validation text."""

    def sums(state: dict, batch: dict) -> dict[str, jax.Array]:
        model = nnx.merge(graphdef, state["params"], state["model_state"])
        return next_token_sums(model, batch, config)

    perplexity = make_perplexity(sums, validation.tokenizer)
    return lambda state, batches: perplexity(state, batches())


def after_update(model: LlamaConfig) -> AfterUpdate:
    if model.qk_clip is None:
        return keep_update
    from maxlp.families.llama import qk_clip  # few runs need it

    return functools.partial(qk_clip.clip, threshold=model.qk_clip)


# --- sizes, FLOPs, descriptions -------------------------------------------------------------------------


def batch_shapes(data: text.TextDataConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """int32 (B, S), and a bool mask."""
    shape = (data.batch_size, data.seq_len)
    names = ("tokens", "targets", "segment_ids", "positions")
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in names} | {
        "loss_mask": jax.ShapeDtypeStruct(shape, jnp.bool_)
    }


def units_per_step(data: text.TextDataConfig) -> int:
    return data.batch_size * data.seq_len


def flops_per_unit(
    model: LlamaConfig, data: text.TextDataConfig, num_params: int, frozen: bool = False
) -> tuple[float, float]:
    """Training FLOPs per token, forward and backward, with (full, causal) attention.

    ``6 P + 12 L N H S`` for full attention: 6 FLOPs for each of the P parameters that multiply the token (4
    if they are frozen and have no gradients), and 12 N H S per layer for the two attention products (PaLM,
    arXiv:2204.02311, appendix B). That counts every query against every key, as nanoGPT and TorchTitan do.
    A causal mask leaves half of the products; MaxText has counted that half since July 2025. Neither counts
    rematerialization. P includes the output head, tied or not, and the norm scales (4e-5 of the sum at 8B).
    """
    looked_up = 0 if model.tie_embeddings else model.vocab_size * model.embed_dim
    weights = (4 if frozen else 6) * (num_params - looked_up)
    attention = 12 * model.num_layers * model.num_heads * model.head_dim * data.seq_len
    return float(weights + attention), float(weights + attention / 2)


def attention_uses(model: LlamaConfig, data: text.TextDataConfig) -> tuple[Use, ...]:
    use = Use(
        seq_len=data.seq_len,
        num_heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
        packed=True,
        max_documents=data.max_documents,
    )
    return (use,)


def tokenizer_texts(data: text.TextDataConfig, seed: int) -> Iterator[str | bytes]:
    """A random sample of the training text."""
    from maxlp.data.tokenizers.training import sample_texts  # few runs train one

    return sample_texts(sources.make_source(data.source, "train"), BPE_BYTES, seed)


def describe_batch(data: text.TextDataConfig) -> str:
    return f"{data.batch_size} × {data.seq_len} = {units_per_step(data):,} tokens"


def loss_parts(data: text.TextDataConfig, axes: Mapping[str, int]) -> tuple[str, list[int]]:
    """The numbers of chunks in which a sequence can be split on a mesh."""
    length = data.seq_len // (axes["context"] * axes["stage"])
    return "loss.num_chunks", [n for n in range(1, length + 1) if length % n == 0]


FAMILY = Family(
    name="llama",
    Model=LlamaConfig,
    Data=text.TextDataConfig,
    Loss=NextTokenConfig,
    make_model=Llama,
    make_data=lambda model, data, **how: text.make_data(data, **how),
    loss=batch_loss,
    gradients=loss_gradients,
    evaluator=evaluator,
    batch_shapes=batch_shapes,
    unit="tokens",
    units_per_step=units_per_step,
    flops_per_unit=flops_per_unit,
    attention_uses=attention_uses,
    rules=RULES,
    vocabulary=lambda model: ("model.vocab_size", model.vocab_size),
    tokenizer_texts=tokenizer_texts,
    gated_products=("layers/mlp/down_proj",),
    describe_batch=describe_batch,
    search_choices={"model.attention": ("ring",)},
    loss_parts=loss_parts,
    generates_text=True,
    sharpness="maxlp.families.llama.sharpness:measure",
    after_update=after_update,
    free_keys=("model.pipeline", "loss.num_chunks"),
    initial_keys=("model.init_std", "model.max_seq_len"),
    training_keys=("model.qk_clip",),
    plain_loss={"num_chunks": 1},
)
