"""Contrastive losses over all pairs of a global batch: softmax (CLIP) and sigmoid (SigLIP).

A batch of B pairs has B² logits, X_ij = scale · <image_i, text_j> + bias, and pair i is right where i = j.
The two losses weigh them differently, and each can be had in three ways that differ only in memory:

* ``plain``: all logits exist, split over the devices as XLA likes;
* ``sharded``: a device gathers all texts and holds the logits of its own images, O(B²/devices);
* ``tiled``: no more than one tile of logits exists on a device, O(B/devices) in all (Inf-CL,
  arXiv:2410.17243). Texts go around a ring of devices; each device meets the texts that are with it one
  tile at a time and keeps, per image and per text, the running maximum and the sum of exponentials under
  it. The texts' own running sums travel with them, so that one round serves both directions. The backward
  pass goes around once more: it makes each tile again, and the gradients of the texts travel with them.

The logits are float32 with float32 matmuls: at CLIP's largest scale of 100 a bfloat16 product would be
wrong by up to 0.4.

Shape letters: B global batch · b this device's part of it · E embed · n tiles · t, s rows and columns of a
tile.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxlp.parallel.sharding import MESH_AXES

LOSSES = ("softmax", "sigmoid")
METHODS = ("plain", "sharded", "tiled")

NO_LOGIT = -1e30  # of padding: its exponential is 0, and no difference of two of them is undefined
PADDING = -1  # id of a row that fills up the last tile


def contrastive(
    image_BE: jax.Array,
    text_BE: jax.Array,
    scale: jax.Array | float,
    bias: jax.Array | float,
    *,
    kind: str,
    method: str,
    tile_size: int = 4096,
) -> dict[str, jax.Array]:
    """Sums over the pairs of a batch; ``loss / examples`` is the loss of the papers.

    Args:
      image_BE, text_BE: the features, of unit norm, pair i in row i of both. Under a mesh
        (`jax.set_mesh`) they are global arrays, and `sharded` and `tiled` split the pairs over every
        axis of the mesh, the tensor axis too, as long as the axes divide B.
      scale: the factor of the products (CLIP's exp(logit_scale)).
      bias: added to each logit. The softmax does not see a constant: its gradient is zero there.
      kind: "softmax", the mean of the cross-entropies of image → text and text → image (CLIP,
        arXiv:2103.00020, fig. 3); or "sigmoid", -Σ_j log σ(±X_ij) with plus where i = j, summed over
        the B texts and not averaged (SigLIP, arXiv:2303.15343, eq. 1).
      method: "plain", "sharded" or "tiled".
      tile_size: the most rows and columns of a tile; it need not divide anything. Only `tiled` reads it.

    Returns:
      float32 scalars: ``loss``, summed over the pairs; ``correct``, the images for which no text has a
      larger logit than their own; ``examples``, B. Differentiable in the first four arguments.

    Raises:
      ValueError: an unknown kind or method, or a tile size below 1.
    """
    if kind not in LOSSES:
        raise ValueError(f"kind={kind!r} is unknown; one of {', '.join(LOSSES)}")
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; one of {', '.join(METHODS)}")
    if tile_size < 1:
        raise ValueError(f"tile_size={tile_size} must be at least 1; 4096 suits large batches")
    image_BE, text_BE = image_BE.astype(jnp.float32), text_BE.astype(jnp.float32)
    scale = jnp.asarray(scale, jnp.float32)
    bias = jnp.asarray(bias if kind == "sigmoid" else 0.0, jnp.float32)
    with jax.named_scope(f"contrastive_{method}"):
        if method == "tiled":
            total, correct = _tiled(image_BE, text_BE, scale, bias, kind, tile_size)
        else:
            axes = _axes(len(image_BE)) if method == "sharded" else ()
            rows, dense = (image_BE, text_BE, _ids(image_BE)), functools.partial(_dense, loss=kind)
            _, (total, correct) = _on_each_device(dense, axes)(rows, (scale, bias))
    return {"loss": total, "correct": correct, "examples": jnp.float32(len(image_BE))}


# --- devices ------------------------------------------------------------------------------------------


def _axes(batch_size: int) -> tuple[str, ...]:
    """The first axes of the mesh, as many as divide the batch; none without a mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    axes: tuple[str, ...] = ()
    for axis in MESH_AXES:
        if batch_size % math.prod(sizes.get(a, 1) for a in (*axes, axis)):
            break
        axes += (axis,) * (sizes.get(axis, 1) > 1)
    return axes


def _on_each_device(function: Callable, axes: tuple[str, ...]) -> Callable:
    """``function(rows, scalars, axes=…) -> (rows, scalars)`` on each device's part of the rows."""
    function = functools.partial(function, axes=axes)
    if not axes:
        return function
    specs = (PartitionSpec(axes), PartitionSpec())
    return jax.shard_map(function, in_specs=specs, out_specs=specs)


def _sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x


def _shift(tree: Any, axes: tuple[str, ...]) -> Any:
    """Each array to the next device of the ring."""
    if not axes:
        return tree
    n = jax.lax.axis_size(axes)
    return jax.lax.ppermute(tree, axes, [(i, (i + 1) % n) for i in range(n)])


def _zeros(shape: tuple[int, ...], axes: tuple[str, ...], value: float = 0.0) -> jax.Array:
    """An array that each device will fill with values of its own."""
    x = jnp.full(shape, value, jnp.float32)
    return jax.lax.pcast(x, axes, to="varying") if axes else x


# --- all logits of a device's images -----------------------------------------------------------------


def _logits(image_tE: jax.Array, text_sE: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return scale * _matmul("te,se->ts", image_tE, text_sE) + bias


_matmul = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _ids(image_BE: jax.Array) -> jax.Array:
    return jnp.arange(len(image_BE), dtype=jnp.int32)


def _dense(rows: tuple, scalars: tuple, *, loss: str, axes: tuple[str, ...]) -> tuple:
    """Loss and hits of this device's images with all texts; differentiated by JAX."""
    image_bE, text_bE, id_b = rows
    text_BE, id_B = text_bE, id_b
    if axes:
        text_BE, id_B = jax.lax.all_gather((text_bE, id_b), axes, tiled=True)
    logits_bB = _logits(image_bE, text_BE, *scalars)
    own_bB = id_b[:, None] == id_B
    own_logits_bB = jnp.where(own_bB, logits_bB, 0.0)
    own_b = jnp.sum(own_logits_bB, axis=1)
    fixed_bB = jax.lax.stop_gradient(logits_bB)
    correct = _sum(jnp.sum(own_b >= jnp.max(fixed_bB, axis=1), dtype=jnp.float32), axes)
    if loss == "sigmoid":
        return (), (_sum(jnp.sum(_sigmoid_loss(logits_bB, own_bB)), axes), correct)
    best_B = jnp.max(fixed_bB, axis=0)
    best_B = jax.lax.pmax(best_B, axes) if axes else best_B
    by_text_B = best_B + jnp.log(_sum(jnp.sum(jnp.exp(logits_bB - best_B), axis=0), axes))
    # Each direction's small differences are summed, not its large terms.
    text_loss_B = by_text_B - _sum(jnp.sum(own_logits_bB, axis=0), axes)
    image_loss_b = jax.nn.logsumexp(logits_bB, axis=1) - own_b
    return (), ((_sum(jnp.sum(image_loss_b), axes) + jnp.sum(text_loss_B)) / 2, correct)


def _sigmoid_loss(logits: jax.Array, own: jax.Array) -> jax.Array:
    return jax.nn.softplus(jnp.where(own, -logits, logits))


# --- one tile at a time --------------------------------------------------------------------------------


def _tiled_fwd(image_BE, text_BE, scale, bias, loss, tile_size):
    forward = functools.partial(_forward, loss=loss, tile_size=tile_size)
    rows = (image_BE, text_BE, _ids(image_BE))
    log_sums, sums = _on_each_device(forward, _axes(len(image_BE)))(rows, (scale, bias))
    return sums, (image_BE, text_BE, scale, bias, log_sums)


def _tiled_bwd(loss, tile_size, saved, cotangents):
    image_BE, text_BE, scale, bias, log_sums = saved
    backward = functools.partial(_backward, loss=loss, tile_size=tile_size)
    rows = (image_BE, text_BE, _ids(image_BE), *log_sums)
    d_features, d_scalars = _on_each_device(backward, _axes(len(image_BE)))(rows, (scale, bias))
    return jax.tree.map(lambda g: cotangents[0] * g, (*d_features, *d_scalars))


def _tiled_value(
    image_BE: jax.Array, text_BE: jax.Array, scale: jax.Array, bias: jax.Array, loss: str, tile_size: int
) -> tuple[jax.Array, jax.Array]:
    return _tiled_fwd(image_BE, text_BE, scale, bias, loss, tile_size)[0]


_tiled = jax.custom_vjp(_tiled_value, nondiff_argnums=(4, 5))
_tiled.defvjp(_tiled_fwd, _tiled_bwd)


def _forward(rows: tuple, scalars: tuple, *, loss: str, tile_size: int, axes: tuple[str, ...]) -> tuple:
    """The log-sums of exponentials by image and by text (softmax only), and loss and hits."""
    image_bE, text_bE, id_b = rows
    tiles = functools.partial(cut, tile_size=tile_size)
    image_ntE, text_nsE, id_nt = tiles(image_bE), tiles(text_bE), tiles(id_b, fill=PADDING)

    def visit(image: tuple, text: tuple, by_image: tuple, by_text: tuple) -> tuple[tuple, tuple]:
        logits_ts, own_ts = _tile(image, text, *scalars)
        best_t, total_t, own_t = by_image
        own_t += jnp.sum(jnp.where(own_ts, logits_ts, 0.0), axis=1)
        if loss == "sigmoid":
            best_t = jnp.maximum(best_t, jnp.max(logits_ts, axis=1))
            total_t += jnp.sum(_sigmoid_loss(logits_ts, own_ts), axis=1)
            return (best_t, total_t, own_t), ()
        best_t, total_t = _add_exponentials(best_t, total_t, logits_ts, axis=1)
        best_s, total_s = by_text
        return (best_t, total_t, own_t), _add_exponentials(best_s, total_s, logits_ts, axis=0)

    zeros, lowest = (_zeros(id_nt.shape, axes, value) for value in (0.0, NO_LOGIT))
    by_image, by_text = (lowest, zeros, zeros), (lowest, zeros) if loss == "softmax" else ()
    by_image, by_text = _ring(visit, (image_ntE, id_nt), (text_nsE, id_nt), by_image, by_text, axes)

    join = lambda x_nt: x_nt.reshape(-1)[: len(id_b)]  # noqa: E731
    best_b, total_b, own_b = map(join, by_image)
    correct = _sum(jnp.sum(own_b >= best_b, dtype=jnp.float32), axes)
    if loss == "sigmoid":
        return (), (_sum(jnp.sum(total_b), axes), correct)
    log_sums = best_b + jnp.log(total_b), join(by_text[0] + jnp.log(by_text[1]))
    return log_sums, (_sum(jnp.sum(sum(log_sums) / 2 - own_b), axes), correct)


def _backward(rows: tuple, scalars: tuple, *, loss: str, tile_size: int, axes: tuple[str, ...]) -> tuple:
    """Gradients of the loss by the features, and by scale and bias.

    With G the gradient by the logits, that by the images is scale · G @ text, and that by the scale is
    Σ G_ij <image_i, text_j> = Σ_i <image_i, (G @ text)_i>: no tile is needed for it.
    """
    image_bE, text_bE, id_b, *log_sums_b = rows
    tiles = functools.partial(cut, tile_size=tile_size)
    image_ntE, text_nsE, id_nt = tiles(image_bE), tiles(text_bE), tiles(id_b, fill=PADDING)
    # softmax: that by image goes with the images, that by text with the texts
    image_sums, text_sums = map(tiles, log_sums_b[:1]), map(tiles, log_sums_b[1:])

    def visit(image: tuple, text: tuple, by_image: tuple, by_text: jax.Array) -> tuple[tuple, jax.Array]:
        logits_ts, own_ts = _tile(image[:2], text[:2], *scalars)
        if loss == "sigmoid":
            chance_ts = jax.nn.sigmoid(logits_ts)
        else:
            by_row, by_column = jnp.exp(logits_ts - image[2][:, None]), jnp.exp(logits_ts - text[2])
            chance_ts = (by_row + by_column) / 2
        g_ts = chance_ts - own_ts
        g_text_tE, g_t = by_image
        by_image = g_text_tE + _matmul("ts,se->te", g_ts, text[0]), g_t + jnp.sum(g_ts, axis=1)
        return by_image, by_text + _matmul("ts,te->se", g_ts, image[0])

    by_image = _zeros(image_ntE.shape, axes), _zeros(id_nt.shape, axes)
    images, texts = (image_ntE, id_nt, *image_sums), (text_nsE, id_nt, *text_sums)
    (g_text_ntE, g_nt), g_image_nsE = _ring(visit, images, texts, by_image, by_image[0], axes)

    join = lambda x_ntE: x_ntE.reshape(-1, x_ntE.shape[-1])[: len(id_b)]  # noqa: E731
    d_scale = _sum(jnp.sum(g_text_ntE * image_ntE), axes)
    d_features = tuple(scalars[0] * join(g) for g in (g_text_ntE, g_image_nsE))
    return d_features, (d_scale, _sum(jnp.sum(g_nt), axes))


def _ring(
    visit: Callable, images: tuple, texts: tuple, by_image: Any, by_text: Any, axes: tuple[str, ...]
) -> tuple[Any, Any]:
    """Lets every tile of images meet every tile of texts of all devices.

    ``visit(image, text, by_image, by_text) -> (by_image, by_text)`` is given one tile of ``images`` and
    ``texts`` and what has been summed up for it; all arrays here are stacks (n, t, …) of tiles. The texts
    and their sums make the round and are home at the end.
    """

    def turn(_: jax.Array, carry: tuple) -> tuple:
        texts, by_image, by_text = carry
        coming = _shift(texts, axes)  # not needed by this turn: it travels while the turn computes
        by_text, by_image = jax.lax.scan(
            lambda by_text, image: _along(visit, image, texts, by_text), by_text, (images, by_image)
        )
        return coming, by_image, _shift(by_text, axes)

    n = jax.lax.axis_size(axes) if axes else 1
    _, by_image, by_text = jax.lax.fori_loop(0, n, turn, (texts, by_image, by_text))
    return by_image, by_text


def _along(visit: Callable, image: tuple, texts: tuple, by_text: Any) -> tuple[Any, Any]:
    """One tile of images with each tile of texts: the texts' sums and the images'."""
    features, by_image = image
    by_image, by_text = jax.lax.scan(
        lambda by_image, text: visit(features, text[0], by_image, text[1]), by_image, (texts, by_text)
    )
    return by_text, by_image


def _tile(image: tuple, text: tuple, scale: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logits of a tile, and which are of a pair."""
    (image_tE, id_t), (text_sE, id_s) = image, text
    real_ts = (id_t[:, None] != PADDING) & (id_s != PADDING)
    logits_ts = jnp.where(real_ts, _logits(image_tE, text_sE, scale, bias), NO_LOGIT)
    return logits_ts, real_ts & (id_t[:, None] == id_s)


def _add_exponentials(
    best: jax.Array, total: jax.Array, logits_ts: jax.Array, axis: int
) -> tuple[jax.Array, jax.Array]:
    """The running maximum, and the sum of exp(logit - maximum), with a tile's logits added."""
    new = jnp.maximum(best, jnp.max(logits_ts, axis=axis))
    exponentials = jnp.exp(logits_ts - jnp.expand_dims(new, axis))
    return new, total * jnp.exp(best - new) + jnp.sum(exponentials, axis=axis)


def cut(x: jax.Array, *, tile_size: int, fill: int = 0) -> jax.Array:
    """(b, …) into tiles (n, t, …) of equal size, at most ``tile_size``; the last is filled up."""
    n = math.ceil(len(x) / tile_size)
    t = math.ceil(len(x) / n)
    padding = [(0, n * t - len(x))] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding, constant_values=fill).reshape(n, t, *x.shape[1:])
