"""Accuracy of a linear classifier on frozen features (CLIP, arXiv:2103.00020, §3.2).

Shape letters: N images · E joint dim · C classes.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxlp.families.clip.evals import features
from maxlp.parallel import sharding

ROW_MULTIPLE = 512  # rows are padded to a multiple of this, so that up to 512 devices share them evenly


def linear_probe(
    encode_image: features.Encode,
    train_batches: Iterable[dict],
    test_batches: Iterable[dict],
    *,
    num_classes: int,
    l2: float,
    max_steps: int = 1000,
) -> dict[str, float]:
    """Accuracy of multinomial logistic regression on an encoder's features.

    Minimizes the mean cross-entropy over the training images plus ``l2 / 2`` times the squared weights
    (not the bias), with L-BFGS over all images at once. scikit-learn's C is 1 / (l2 · train_examples).

    Args:
      encode_image: images (B, H, W, 3) to features (B, E).
      train_batches, test_batches: with `image`, `label` int32 (B,) and `mask` bool (B,). Rows with a false
        mask or a negative label are left out.
      num_classes: C; all labels are below it.
      l2: weight of the penalty. With 0, the weights for separable features grow until ``max_steps``.
      max_steps: a bound of the steps; the optimization ends earlier if float32 cannot lower the loss.

    Returns:
      train_accuracy and test_accuracy in [0, 1], train_loss and test_loss without the penalty, steps,
      train_examples and test_examples.

    Raises:
      ValueError: no image with a label, or a label that is not below ``num_classes``.
    """
    train, test = (_labelled(encode_image, b, num_classes) for b in (train_batches, test_batches))
    weights, bias, steps = jax.device_get(_fit(*_padded(*train), num_classes, l2, max_steps))
    results: dict[str, float] = {"steps": float(steps)}
    for name, (x_NE, label_N) in (("train", train), ("test", test)):
        loss, accuracy = _measure(*_padded(x_NE, label_N), weights, bias)
        results |= {f"{name}_accuracy": float(accuracy), f"{name}_loss": float(loss)}
        results[f"{name}_examples"] = float(len(label_N))
    return results


def _labelled(
    encode_image: features.Encode, batches: Iterable[dict], num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """float32 features (N, E) and labels (N,) of all images with a label."""
    found = features.collect(lambda b: {"x": encode_image(b["image"]), "label": b["label"]}, batches)
    has_label = found["label"] >= 0
    x_NE, label_N = found["x"][has_label], found["label"][has_label]
    if not len(label_N):
        raise ValueError("the data has no image with a label; a linear probe needs labelled images")
    if label_N.max() >= num_classes:
        raise ValueError(
            f"an image has the label {label_N.max()}, of {num_classes} classes; list all of them in the "
            "file data.classes"
        )
    return x_NE.astype(np.float32), label_N


def _padded(x_NE: np.ndarray, label_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, labels, and the weight of each row in a mean (0 for padding)."""
    missing = -len(label_N) % ROW_MULTIPLE
    weight_N = np.full(len(label_N), 1 / len(label_N), np.float32)
    return (
        np.pad(x_NE, ((0, missing), (0, 0))),
        np.pad(label_N, (0, missing)),
        np.pad(weight_N, (0, missing)),
    )


def _logits(x_NE: jax.Array, weights_EC: jax.Array, bias_C: jax.Array) -> jax.Array:
    x_NE = sharding.constrain(x_NE, "batch", None)
    return jnp.einsum("ne,ec->nc", x_NE, weights_EC, precision=jax.lax.Precision.HIGHEST) + bias_C[None]


def _cross_entropy(x_NE, label_N, weight_N, weights_EC, bias_C) -> jax.Array:
    nll_N = optax.softmax_cross_entropy_with_integer_labels(_logits(x_NE, weights_EC, bias_C), label_N)
    return jnp.sum(weight_N * nll_N)


@functools.partial(jax.jit, static_argnums=3)
def _fit(
    x_NE: jax.Array, label_N: jax.Array, weight_N: jax.Array, num_classes: int, l2: float, max_steps: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights (E, C), bias (C,), and the number of steps until L-BFGS cannot lower the loss in float32."""
    solver = optax.lbfgs()

    def loss(params: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _cross_entropy(x_NE, label_N, weight_N, *params) + l2 / 2 * jnp.sum(jnp.square(params[0]))

    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry: tuple) -> tuple:
        params, state, count, _ = carry
        before, grad = value_and_grad(params, state=state)
        updates, state = solver.update(grad, state, params, value=before, grad=grad, value_fn=loss)
        after = optax.tree.get(state, "value")
        return optax.apply_updates(params, updates), state, count + 1, after < before

    params = jnp.zeros((x_NE.shape[1], num_classes)), jnp.zeros(num_classes)
    start = (params, solver.init(params), jnp.int32(0), jnp.bool_(True))
    (weights, bias), _, count, _ = jax.lax.while_loop(lambda c: c[3] & (c[2] < max_steps), step, start)
    return sharding.constrain(weights, None, None), sharding.constrain(bias, None), count


@jax.jit
def _measure(x_NE, label_N, weight_N, weights_EC, bias_C) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy and accuracy."""
    hit_N = features.ranks(_logits(x_NE, weights_EC, bias_C), label_N) < 1
    return _cross_entropy(x_NE, label_N, weight_N, weights_EC, bias_C), jnp.sum(weight_N * hit_N)
