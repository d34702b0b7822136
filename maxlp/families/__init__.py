"""Families of models: what ``config.model.name`` chooses.

A family is a folder with the modules below and an entry in `FAMILIES`. It is imported only when a config
names it: training a Llama imports nothing of CLIP. A family that differs little from another one imports
that one's modules and holds only the differences, as `qwen3` does.

    task.py     FAMILY: the model, its data, its loss, its evaluation (`Family`)
    cost.py     COST: a closed form of the memory, work and collectives of a step
                (`planning.cost_model.Cost`)
    export.py   FORMATS: weight formats of other libraries (`families.weights.WeightFormat`)
"""

import dataclasses
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any

import jax
from flax import nnx

from maxlp import schema
from maxlp.core.gradients import Gradients, Loss
from maxlp.core.train_step import AfterUpdate, keep_update
from maxlp.nn.attention import Use
from maxlp.schema import OneOf

FAMILIES = {
    "llama": "maxlp.families.llama",
    "qwen3": "maxlp.families.qwen3",
    "clip": "maxlp.families.clip",
}

# (state, a function that gives the validation batches) to named numbers
Evaluate = Callable[[dict, Callable[[], Iterable[dict]]], dict[str, float]]
Measure = Callable[[dict, dict], dict[str, float]]  # (state, batch) to named numbers


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A family of models, as the commands and the train step use it.

    Below, ``(a, b) to c`` stands for a function that maps a and b to c; ``model``, ``data`` and ``loss``
    are instances of the three config classes.

    Attributes:
      Model, Data, Loss: classes of the config's sections ``model``, ``data`` and ``loss``.
      make_model: (model, rngs=) to the NNX module.
      make_data: (model, data, split=, seed=, process_index=, process_count=) to the batches of this
        process.
      loss: (loss, seed) to the loss of a batch in one pass.
      gradients: (loss, seed, microbatches, measure_noise) to the gradients of that loss, in that number of
        passes; measure_noise is for AdaScale, see `core.gradients.token_gradients`. Families whose loss is
        a sum over rows also take ``alone``: the gradients of a replica's own loss (`core.local_steps`).
      evaluator: (graphdef, model, data, loss, validation) to an `Evaluate`; validation is the result of
        make_data for that split.
      batch_shapes: data to the arrays of a global batch.
      unit: what throughput counts: "tokens" or "images".
      units_per_step: data to the number of units in a global batch.
      flops_per_unit: (model, data, num_params, frozen) to training FLOPs per unit with (full, causal)
        attention; frozen weights have no gradients.
      attention_uses: (model, data) to the uses of attention in a training step.
      rules: those of this family alone; see `run.constraints`.
      vocabulary: model to (the config key, the number of token ids that the model has room for).
      tokenizer_texts: (data, seed) to the texts that a tokenizer ("bpe:V") is trained on.
      gated_products: patterns of the matmuls whose input is a gated product, where Smooth-SwiGLU acts.
      search_choices: further settings that the planner's search tries: config key to values.
      loss_parts: (data, mesh axes) to the config key that splits the loss, and its values, ascending. Parts
        do not change the time of a step, and from two on more of them need less memory.
      describe_batch: data to a phrase, as in "8 × 256 = 2,048 tokens".
      generates_text: whether the model has the caches and logits with which `generate` samples.
      linear_probe: (graphdef, state, train batches, validation batches, num_classes=, l2=) to named
        numbers; None for families without image features.
      sharpness: "module:function" of (state, batch, graphdef=) to a scalar; None for families without it.
      after_update: model to its `core.train_step.AfterUpdate`, which may correct updated parameters.
      free_keys: config keys of this family that a resumed run may change, besides `run.changes.FREE`.
      initial_keys: keys of the model that decide only initial values of weights, or the length of texts.
      training_keys: keys of the model that act in training alone.
      plain_loss: values of keys of Loss with which it traces no `shard_map`.
    """

    name: str
    Model: type
    Data: type
    Loss: type
    make_model: Callable[..., nnx.Module]
    make_data: Callable[..., Any]
    loss: Callable[[Any, int], Loss]
    gradients: Callable[..., Gradients]
    evaluator: Callable[[nnx.GraphDef, Any, Any, Any, Any], Evaluate]
    batch_shapes: Callable[[Any], dict[str, jax.ShapeDtypeStruct]]
    unit: str
    units_per_step: Callable[[Any], int]
    flops_per_unit: Callable[[Any, Any, int, bool], tuple[float, float]]
    attention_uses: Callable[[Any, Any], tuple[Use, ...]]
    rules: tuple[Callable[..., str | None], ...]
    vocabulary: Callable[[Any], tuple[str, int]]
    tokenizer_texts: Callable[[Any, int], Iterator[str | bytes]]
    gated_products: tuple[str, ...]
    describe_batch: Callable[[Any], str]
    search_choices: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    loss_parts: Callable[[Any, Mapping[str, int]], tuple[str, list[int]]] | None = None
    generates_text: bool = False
    linear_probe: Callable[..., dict[str, float]] | None = None
    sharpness: str | None = None
    after_update: Callable[[Any], AfterUpdate] = lambda model: keep_update
    free_keys: tuple[str, ...] = ()
    initial_keys: tuple[str, ...] = ()
    training_keys: tuple[str, ...] = ()
    plain_loss: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def get(name: Annotated[str, OneOf(FAMILIES)]) -> Family:
    """The family of this name.

    Raises:
      ValueError: an unknown name.
    """
    schema.check_arguments(get, name=name)
    return pkgutil.resolve_name(f"{FAMILIES[name]}.task:FAMILY")
