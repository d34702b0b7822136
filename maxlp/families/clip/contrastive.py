"""Contrastive losses over all pairs of a global batch: softmax (CLIP) and sigmoid (SigLIP).

A batch of B pairs has B² logits, X_ij = scale · <image_i, text_j> + bias; the entries i = j are the pairs.
The losses weigh the logits differently. Each can be computed by three methods that differ only in memory:

* ``plain``: all logits are materialized, split over the devices as XLA decides;
* ``sharded``: a device gathers all texts and holds the logits of its own images, O(B² / devices);
* ``tiled``: a device holds one tile of logits at a time, O(B / devices) in total (Inf-CL,
  arXiv:2410.17243). Texts travel around a ring of devices. Each device combines the texts that it has with
  its own images, one tile at a time, and keeps a running maximum and a sum of exponentials for every image
  and every text. The sums of the texts travel with them, so that one round serves both directions. The
  backward pass is a second round, which recomputes each tile; the gradients of the texts travel with them.

The logits are float32 products at the highest matmul precision. At CLIP's largest scale of 100, features in
bfloat16 would change a logit by up to 0.8.

Shape letters: B global batch · b this device's part of it · E joint dim · n tiles · t, s rows (images) and
columns (texts) of a tile.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxlp import schema
from maxlp.parallel.sharding import MESH_AXES
from maxlp.schema import Count, OneOf

LOSSES = ("softmax", "sigmoid")
METHODS = ("plain", "sharded", "tiled")

NO_LOGIT = -1e30  # logit of padding: its exponential is 0, and the difference of two of them is finite
PADDING = -1  # id of a row that fills up the last tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastiveConfig:
    """The config's ``loss`` section of a CLIP.

    Attributes:
      kind: "softmax", the mean of the cross-entropies of image to text and text to image (CLIP,
        arXiv:2103.00020, fig. 3); or "sigmoid", -Σ_j log σ(±X_ij) with plus where i = j, which is summed
        over the B texts, not averaged (SigLIP, arXiv:2303.15343, eq. 1).
      method: "plain", "sharded" or "tiled".
      tile_size: the largest number of rows and columns of a tile; any number. Only "tiled" reads it.

    Raises:
      ValueError: an unknown kind or method, or a tile size below 1.
    """

    kind: Annotated[str, OneOf(LOSSES)]
    method: Annotated[str, OneOf(METHODS)]
    tile_size: Count = 4096

    def __post_init__(self):
        schema.check(self)


def contrastive_sums(
    image_BE: jax.Array,
    text_BE: jax.Array,
    scale: jax.Array | float,
    bias: jax.Array | float,
    config: ContrastiveConfig,
) -> dict[str, jax.Array]:
    """Sums over the pairs of a batch; ``loss / examples`` is the loss of the papers.

    Args:
      image_BE, text_BE: features of unit norm; row i of both is a pair. Under a mesh (`jax.set_mesh`) they
        are global arrays, and ``sharded`` and ``tiled`` split the pairs over every axis of the mesh
        (tensor too) as long as the axes divide B.
      scale: the factor of the products (CLIP's exp(logit_scale)).
      bias: added to every logit. The softmax is invariant to it: its gradient is zero there.

    Returns:
      float32 scalars: ``loss``, summed over the pairs; ``correct``, the number of images whose own text has
      the largest logit (ties count); ``examples``, B. Differentiable in the first four arguments.
    """
    kind, method, tile_size = config.kind, config.method, config.tile_size
    image_BE, text_BE = image_BE.astype(jnp.float32), text_BE.astype(jnp.float32)
    scale = jnp.asarray(scale, jnp.float32)
    bias = jnp.asarray(bias if kind == "sigmoid" else 0.0, jnp.float32)
    with jax.named_scope(f"contrastive_{method}"):
        if method == "tiled":
            total, correct = _tiled(image_BE, text_BE, scale, bias, kind, tile_size)
        else:
            axes = _axes(len(image_BE)) if method == "sharded" else ()
            rows, dense = (image_BE, text_BE, _ids(image_BE)), functools.partial(_dense, kind=kind)
            _, (total, correct) = _on_each_device(dense, axes)(rows, (scale, bias))
    return {"loss": total, "correct": correct, "examples": jnp.float32(len(image_BE))}


# --- devices ------------------------------------------------------------------------------------------


def _axes(batch_size: int) -> tuple[str, ...]:
    """The leading axes of the mesh, as many as divide the batch; none without a mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    axes: tuple[str, ...] = ()
    for axis in MESH_AXES:
        if batch_size % math.prod(sizes.get(a, 1) for a in (*axes, axis)):
            break
        if sizes.get(axis, 1) > 1:
            axes += (axis,)
    return axes


def _on_each_device(function: Callable, axes: tuple[str, ...]) -> Callable:
    """Runs ``function(rows, scalars, axes=…) -> (rows, scalars)`` on each device's part of the rows."""
    function = functools.partial(function, axes=axes)
    if not axes:
        return function
    specs = (PartitionSpec(axes), PartitionSpec())
    return jax.shard_map(function, in_specs=specs, out_specs=specs)


def _psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x


def _to_next_device(tree: Any, axes: tuple[str, ...]) -> Any:
    """Sends every array to the next device of the ring."""
    if not axes:
        return tree
    n = jax.lax.axis_size(axes)
    return jax.lax.ppermute(tree, axes, [(i, (i + 1) % n) for i in range(n)])


def _full(shape: tuple[int, ...], value: float, axes: tuple[str, ...]) -> jax.Array:
    """A constant array, typed as varying between the devices: a loop replaces it with one that varies."""
    x = jnp.full(shape, value, jnp.float32)
    return jax.lax.pcast(x, axes, to="varying") if axes else x


# --- all logits of a device's images --------------------------------------------------------------------

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _logits(image_tE: jax.Array, text_sE: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return scale * _einsum("te,se->ts", image_tE, text_sE) + bias


def _ids(image_BE: jax.Array) -> jax.Array:
    return jnp.arange(len(image_BE), dtype=jnp.int32)


def _dense(rows: tuple, scalars: tuple, *, kind: str, axes: tuple[str, ...]) -> tuple:
    """Loss, and number of hits, of this device's images against all texts; differentiated by JAX."""
    image_bE, text_bE, id_b = rows
    text_BE, id_B = text_bE, id_b
    if axes:
        text_BE, id_B = jax.lax.all_gather((text_bE, id_b), axes, tiled=True)
    logits_bB = _logits(image_bE, text_BE, *scalars)
    is_pair_bB = id_b[:, None] == id_B[None, :]
    pair_logits_bB = jnp.where(is_pair_bB, logits_bB, 0.0)
    pair_logit_b = jnp.sum(pair_logits_bB, axis=1)
    fixed_bB = jax.lax.stop_gradient(logits_bB)
    correct = _psum(jnp.sum(pair_logit_b >= jnp.max(fixed_bB, axis=1), dtype=jnp.float32), axes)
    if kind == "sigmoid":
        return (), (_psum(jnp.sum(_sigmoid_loss(logits_bB, is_pair_bB)), axes), correct)
    max_B = jnp.max(fixed_bB, axis=0)
    max_B = jax.lax.pmax(max_B, axes) if axes else max_B
    log_sum_B = max_B + jnp.log(_psum(jnp.sum(jnp.exp(logits_bB - max_B[None, :]), axis=0), axes))
    # Sum the small differences of each direction, not its large terms.
    text_loss_B = log_sum_B - _psum(jnp.sum(pair_logits_bB, axis=0), axes)
    image_loss_b = jax.nn.logsumexp(logits_bB, axis=1) - pair_logit_b
    return (), ((_psum(jnp.sum(image_loss_b), axes) + jnp.sum(text_loss_B)) / 2, correct)


def _sigmoid_loss(logits: jax.Array, is_pair: jax.Array) -> jax.Array:
    return jax.nn.softplus(jnp.where(is_pair, -logits, logits))


# --- one tile at a time ---------------------------------------------------------------------------------


def _tiled_fwd(image_BE, text_BE, scale, bias, kind, tile_size):
    forward = functools.partial(_forward, kind=kind, tile_size=tile_size)
    rows = (image_BE, text_BE, _ids(image_BE))
    partitions, sums = _on_each_device(forward, _axes(len(image_BE)))(rows, (scale, bias))
    return sums, (image_BE, text_BE, scale, bias, partitions)


def _tiled_bwd(kind, tile_size, saved, cotangents):
    image_BE, text_BE, scale, bias, partitions = saved
    backward = functools.partial(_backward, kind=kind, tile_size=tile_size)
    rows = (image_BE, text_BE, _ids(image_BE), partitions)
    d_features, d_scalars = _on_each_device(backward, _axes(len(image_BE)))(rows, (scale, bias))
    return jax.tree.map(lambda g: cotangents[0] * g, (*d_features, *d_scalars))


def _tiled_sums(
    image_BE: jax.Array, text_BE: jax.Array, scale: jax.Array, bias: jax.Array, kind: str, tile_size: int
) -> tuple[jax.Array, jax.Array]:
    """Loss, and number of hits: images whose own text has the largest logit."""
    return _tiled_fwd(image_BE, text_BE, scale, bias, kind, tile_size)[0]


_tiled = jax.custom_vjp(_tiled_sums, nondiff_argnums=(4, 5))
_tiled.defvjp(_tiled_fwd, _tiled_bwd)


def _forward(rows: tuple, scalars: tuple, *, kind: str, tile_size: int, axes: tuple[str, ...]) -> tuple:
    """Loss and hits, and for the backward pass (maximum, sum of exponentials) of each image and each text.

    The two stay apart: in one float32, maximum + log(sum), a maximum of 100 would leave the logarithm an
    error of 4e-6, and the gradient that error in every probability. The sigmoid loss has no such sums.
    """
    image_bE, text_bE, id_b = rows
    image_ntE, text_nsE = split_tiles(image_bE, tile_size), split_tiles(text_bE, tile_size)
    id_nt = split_tiles(id_b, tile_size, fill=PADDING)

    def visit(image: tuple, text: tuple, image_sums: tuple, text_sums: tuple) -> tuple[tuple, tuple]:
        logits_ts, is_pair_ts = _tile(image, text, *scalars)
        max_t, total_t, pair_t = image_sums
        pair_t += jnp.sum(jnp.where(is_pair_ts, logits_ts, 0.0), axis=1)
        if kind == "sigmoid":
            max_t = jnp.maximum(max_t, jnp.max(logits_ts, axis=1))
            total_t += jnp.sum(_sigmoid_loss(logits_ts, is_pair_ts), axis=1)
            return (max_t, total_t, pair_t), ()
        max_t, total_t = _add_exponentials(max_t, total_t, logits_ts, axis=1)
        max_s, total_s = text_sums
        return (max_t, total_t, pair_t), _add_exponentials(max_s, total_s, logits_ts, axis=0)

    zeros, lowest = _full(id_nt.shape, 0.0, axes), _full(id_nt.shape, NO_LOGIT, axes)
    image_sums, text_sums = (lowest, zeros, zeros), (lowest, zeros) if kind == "softmax" else ()
    image_sums, text_sums = _ring(visit, (image_ntE, id_nt), (text_nsE, id_nt), image_sums, text_sums, axes)

    max_b, total_b, pair_b = (_join_tiles(x_nt, len(id_b)) for x_nt in image_sums)
    correct = _psum(jnp.sum(pair_b >= max_b, dtype=jnp.float32), axes)
    if kind == "sigmoid":
        return (), (_psum(jnp.sum(total_b), axes), correct)
    partitions = (max_b, total_b), tuple(_join_tiles(x_nt, len(id_b)) for x_nt in text_sums)
    loss_b = sum((max_b - pair_b) + jnp.log(total_b) for max_b, total_b in partitions) / 2
    return partitions, (_psum(jnp.sum(loss_b), axes), correct)


def _backward(rows: tuple, scalars: tuple, *, kind: str, tile_size: int, axes: tuple[str, ...]) -> tuple:
    """Gradients of the loss with respect to the features, and with respect to scale and bias.

    With G the gradient of the logits, that of the images is scale · G @ text, and that of the scale is
    Σ G_ij <image_i, text_j> = Σ_i <image_i, (G @ text)_i>, which needs no tile.
    """
    image_bE, text_bE, id_b, partitions = rows
    image_ntE, text_nsE = split_tiles(image_bE, tile_size), split_tiles(text_bE, tile_size)
    id_nt = split_tiles(id_b, tile_size, fill=PADDING)
    images, texts = (image_ntE, id_nt), (text_nsE, id_nt)
    if kind == "softmax":
        of_images, of_texts = jax.tree.map(lambda x_b: split_tiles(x_b, tile_size, fill=1), partitions)
        images, texts = (*images, *of_images), (*texts, *of_texts)

    def visit(image: tuple, text: tuple, image_sums: tuple, g_image_sE: jax.Array) -> tuple:
        logits_ts, is_pair_ts = _tile(image[:2], text[:2], *scalars)
        if kind == "sigmoid":
            probability_ts = jax.nn.sigmoid(logits_ts)
        else:
            by_row_ts = jnp.exp(logits_ts - image[2][:, None]) / image[3][:, None]
            by_column_ts = jnp.exp(logits_ts - text[2][None, :]) / text[3][None, :]
            probability_ts = (by_row_ts + by_column_ts) / 2
        g_ts = probability_ts - is_pair_ts
        g_text_tE, g_t = image_sums
        image_sums = g_text_tE + _einsum("ts,se->te", g_ts, text[0]), g_t + jnp.sum(g_ts, axis=1)
        return image_sums, g_image_sE + _einsum("ts,te->se", g_ts, image[0])

    zeros_ntE = _full(image_ntE.shape, 0.0, axes)
    image_sums = zeros_ntE, _full(id_nt.shape, 0.0, axes)
    (g_text_ntE, g_nt), g_image_nsE = _ring(visit, images, texts, image_sums, zeros_ntE, axes)

    d_scale = _psum(jnp.sum(g_text_ntE * image_ntE), axes)
    d_features = tuple(scalars[0] * _join_tiles(g, len(id_b)) for g in (g_text_ntE, g_image_nsE))
    return d_features, (d_scale, _psum(jnp.sum(g_nt), axes))


def _ring(
    visit: Callable, images: tuple, texts: tuple, image_sums: Any, text_sums: Any, axes: tuple[str, ...]
) -> tuple[Any, Any]:
    """Calls ``visit`` with every tile of images and every tile of texts, of all devices.

    The texts and their sums travel around the ring; in the end they are back on their own device.

    Args:
      visit: (image, text, image_sums, text_sums) to the new sums; each argument is one tile.
      images, texts, image_sums, text_sums: stacks (n, t, …) of tiles.

    Returns:
      The sums of all images and of all texts of this device.
    """

    def turn(_: jax.Array, carry: tuple) -> tuple:
        texts, image_sums, text_sums = carry
        next_texts = _to_next_device(texts, axes)  # before the work of this turn, to overlap with it
        text_sums, image_sums = jax.lax.scan(
            lambda text_sums, image: _visit_texts(visit, image, texts, text_sums),
            text_sums,
            (images, image_sums),
        )
        if axes:
            # Without this order, XLA for GPUs sends both in one permute, once the sums are complete.
            next_texts, text_sums = jax.lax.optimization_barrier((next_texts, text_sums))
        return next_texts, image_sums, _to_next_device(text_sums, axes)

    n = jax.lax.axis_size(axes) if axes else 1
    _, image_sums, text_sums = jax.lax.fori_loop(0, n, turn, (texts, image_sums, text_sums))
    return image_sums, text_sums


def _visit_texts(visit: Callable, image: tuple, texts: tuple, text_sums: Any) -> tuple[Any, Any]:
    """Visits one tile of images, with its sums, and each tile of texts; returns both sums, texts first."""
    features, image_sums = image
    image_sums, text_sums = jax.lax.scan(
        lambda image_sums, text: visit(features, text[0], image_sums, text[1]),
        image_sums,
        (texts, text_sums),
    )
    return text_sums, image_sums


def _tile(image: tuple, text: tuple, scale: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logits of a tile, and which of them belong to a pair."""
    (image_tE, id_t), (text_sE, id_s) = image, text
    is_real_ts = (id_t[:, None] != PADDING) & (id_s[None, :] != PADDING)
    logits_ts = jnp.where(is_real_ts, _logits(image_tE, text_sE, scale, bias), NO_LOGIT)
    return logits_ts, is_real_ts & (id_t[:, None] == id_s[None, :])


def _add_exponentials(
    maximum: jax.Array, total: jax.Array, logits_ts: jax.Array, axis: int
) -> tuple[jax.Array, jax.Array]:
    """Adds a tile's logits to a running maximum and to a sum of exp(logit - maximum)."""
    new = jnp.maximum(maximum, jnp.max(logits_ts, axis=axis))
    exponentials = jnp.exp(logits_ts - jnp.expand_dims(new, axis))
    return new, total * jnp.exp(maximum - new) + jnp.sum(exponentials, axis=axis)


def split_tiles(x: jax.Array, tile_size: int, fill: int = 0, multiple: int = 1) -> jax.Array:
    """(b, …) to tiles of equal size (n, t, …) with t at most ``tile_size``; the last one is padded.

    Args:
      multiple: t is rounded up to a multiple of it.
    """
    n = math.ceil(len(x) / tile_size)
    t = math.ceil(len(x) / n / multiple) * multiple
    padding = [(0, n * t - len(x))] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding, constant_values=fill).reshape(n, t, *x.shape[1:])


def _join_tiles(x: jax.Array, b: int) -> jax.Array:
    """(n, t, …) to (b, …): the inverse of `split_tiles`."""
    return x.reshape(-1, *x.shape[2:])[:b]
