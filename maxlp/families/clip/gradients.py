"""Loss and gradients of a batch of pairs, in one pass or in several microbatches.

Every image of the batch is compared with every text, so the loss is not a sum over microbatches. Several
microbatches use cached contrastive gradients (GradCache, Gao et al. 2021, arXiv:2101.06983):

    1  the features of all microbatches, without activations
    2  the loss of the whole batch, and its gradient with respect to the features
    3  each microbatch again: its features' gradient is propagated to the parameters

The result is the gradient of the whole batch, with the activations of one microbatch in memory.

Shape letters: B batch · E joint dim.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxlp.core import gradients
from maxlp.core.gradients import Batch, Metrics, forward_state, join_trees, split_model_state
from maxlp.core.train_state import State
from maxlp.families.clip.contrastive import ContrastiveConfig, contrastive_sums

Features = tuple[jax.Array, jax.Array]  # image_BE, text_BE


def batch_loss(config: ContrastiveConfig, seed: int = 0) -> gradients.Loss:
    """The mean contrastive loss over the pairs of a batch.

    Args:
      seed: determines which patches are dropped.
    """

    def loss(model: nnx.Module, batch: Batch, step: jax.Array) -> tuple[jax.Array, Metrics]:
        return _mean_loss(model, _encode(model, _with_draws(model, batch, seed, step)), config)

    return loss


def loss_gradients(
    config: ContrastiveConfig, seed: int = 0, microbatches: int = 1, measure_noise: bool = False
) -> gradients.Gradients:
    """The gradients of `batch_loss`.

    Args:
      seed: determines which patches are dropped.
      microbatches: divides the rows of the batch.
      measure_noise: refused by the family's rules.
    """
    assert not measure_noise, "the loss is not a mean over examples"
    if microbatches == 1:
        return gradients.batch_gradients(batch_loss(config, seed))
    return functools.partial(_cached_gradients, config=config, seed=seed, microbatches=microbatches)


def _encode(model: nnx.Module, batch: Batch) -> Features:
    return model.encode_image(batch["image"], batch.get("draws")), model.encode_text(batch["text"])


def _with_draws(model: nnx.Module, batch: Batch, seed: int, step: jax.Array) -> Batch:
    """The batch with random numbers by which `vit.drop_patches` chooses, if the model drops patches.

    Those of the whole batch are drawn at once, so that its microbatches drop the same patches.
    """
    visual = model.config.visual
    if not visual.patch_dropout:
        return batch
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), 0)
    return batch | {"draws": jax.random.uniform(key, (len(batch["image"]), visual.num_patches))}


def _mean_loss(
    model: nnx.Module, features: Features, config: ContrastiveConfig
) -> tuple[jax.Array, Metrics]:
    scale, bias = model.scale_and_bias()
    sums = contrastive_sums(*features, scale, bias, config)
    count = sums["examples"]
    means = {"loss": sums["loss"] / count, "accuracy": sums["correct"] / count}
    return means["loss"], means | {"examples": count, "logit_scale": scale}


def _cached_gradients(
    graphdef: nnx.GraphDef,
    state: State,
    batch: Batch,
    loss_scale: jax.Array | None,
    *,
    config: ContrastiveConfig,
    seed: int,
    microbatches: int,
) -> tuple[dict, dict, Metrics]:
    """A `core.gradients.Gradients`; see the top of the file."""
    params = state["params"]
    forward, backward = split_model_state(graphdef, state)
    batch = _with_draws(nnx.merge(graphdef, params, forward, backward), batch, seed, state["step"])

    def encode(params: dict, backward: dict, part: Batch) -> tuple[Features, dict]:
        model = nnx.merge(graphdef, params, forward, backward)
        return _encode(model, part), forward_state(model)

    def loss(params: dict, features: Features) -> tuple[jax.Array, Metrics]:
        value, metrics = _mean_loss(nnx.merge(graphdef, params, forward, backward), features, config)
        return gradients.scaled(value, loss_scale), metrics

    def part_gradients(part_and_gradients: tuple) -> tuple[dict, dict]:
        part, feature_grads = part_and_gradients

        def product(params: dict, backward: dict) -> tuple[jax.Array, dict]:
            features, new_forward = encode(params, backward, part)
            return jnp.asarray(optax.tree.vdot(features, feature_grads)), new_forward

        grad_fn = jax.grad(product, argnums=(0, 1), has_aux=True)
        (grads, new_backward), new_forward = grad_fn(params, backward)
        return grads, join_trees(new_forward, new_backward)

    parts = gradients.split_batch(batch, microbatches)
    features = jax.lax.map(lambda part: encode(params, backward, part)[0], parts)
    loss_grads = jax.grad(loss, argnums=(0, 1), has_aux=True)
    (head_grads, feature_grads), metrics = loss_grads(params, jax.tree.map(gradients.join_batch, features))
    feature_grads = gradients.split_batch(feature_grads, microbatches)
    grads, model_state = gradients.accumulate(part_gradients, params, (parts, feature_grads))
    grads = jax.tree.map(lambda a, g: a + g.astype(a.dtype), grads, head_grads)
    return gradients.unscaled(grads, loss_scale), gradients.join_model_states(state, model_state), metrics
