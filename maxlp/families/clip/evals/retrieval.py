"""Retrieval: finding an image's text among all texts, and a text's image among all images.

Shape letters: N images · K texts of an image · E joint dim · S text length · Q queries · C candidates ·
t, s rows and columns of a tile.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from maxlp.families.clip.contrastive import split_tiles
from maxlp.families.clip.evals import features
from maxlp.parallel import sharding

RECALL_AT = (1, 5, 10)
# Rounding of a float32 product of two unit vectors; scores that differ by less are ties.
TIE = 1e-6


def retrieval(
    encode_image: features.Encode,
    encode_text: features.Encode,
    batches: Iterable[dict],
    *,
    tile_size: int = 4096,
) -> dict[str, float]:
    """Recall at 1, 5 and 10 in both directions, over the examples of all batches.

    An image is found if one of its texts is among the k nearest of all texts; a text is found if its image
    is among the k nearest images. Ties count against both, so that the order of the data is irrelevant and
    collapsed features find nothing. Images with the same texts share them: any of these texts counts.

    Args:
      encode_image, encode_text: as for `zero_shot`, of unit norm.
      batches: with `image`, `text` int32 (B, S), or (B, K, S) for K texts an image, and `mask` bool (B,).
      tile_size: the largest number of queries, and of candidates, whose scores are in memory at a time.

    Returns:
      image_to_text_recall_k and text_to_image_recall_k in [0, 1] for k = 1, 5, 10, images and texts.
    """

    def encode(batch: dict) -> dict[str, jax.Array]:
        *rows, S = batch["text"].shape
        text_NE = encode_text(batch["text"].reshape(-1, S))
        text = {"text": text_NE.reshape(*rows, -1), "tokens": batch["text"].reshape(rows[0], -1)}
        return {"image": encode_image(batch["image"])} | text

    found = features.collect(encode, batches)
    image_NE, E = found["image"], found["image"].shape[1]
    text_NKE = found["text"].reshape(len(image_NE), -1, E)
    N, K, _ = text_NKE.shape
    own_NK = np.einsum("ne,nke->nk", image_NE, text_NKE)
    _, id_N = np.unique(found["tokens"], axis=0, return_inverse=True)
    id_N = id_N.reshape(-1).astype(np.int32)  # images with the same texts have the same id
    nearest_NK = np.full_like(own_NK, -np.inf)  # score of the nearest image with this id
    np.maximum.at(nearest_NK, id_N, own_NK)
    images, texts = (image_NE, id_N), (text_NKE.reshape(-1, E), np.repeat(id_N, K))
    rank = {
        "image_to_text": _ranks(images, own_NK.max(axis=1), texts, tile_size=tile_size),
        "text_to_image": _ranks(texts, nearest_NK[id_N].reshape(-1), images, tile_size=tile_size),
    }
    recall = {
        f"{way}_recall_{k}": float(np.mean(jax.device_get(rank[way]) < k))
        for way in rank
        for k in RECALL_AT
    }
    return recall | {"images": float(N), "texts": float(N * K)}


@functools.partial(jax.jit, static_argnames="tile_size")
def _ranks(queries: tuple, own_Q: jax.Array, candidates: tuple, *, tile_size: int) -> jax.Array:
    """For each query, the number of candidates with another id that score not below ``own_Q``: int32 (Q,).

    Queries and candidates are features (Q, E), (C, E) and ids; the queries are split over the devices.
    """
    query_QE, id_Q = queries
    candidate_tiles = split_tiles(candidates[0], tile_size), split_tiles(candidates[1], tile_size, fill=-1)

    def rank(query: tuple) -> jax.Array:
        query_tE, id_t, own_t = query
        query_tE = sharding.constrain(query_tE, "batch", None)

        def add(rank_t: jax.Array, candidate: tuple) -> tuple[jax.Array, None]:
            candidate_sE, id_s = candidate
            score_ts = jnp.einsum("te,se->ts", query_tE, candidate_sE, precision=jax.lax.Precision.HIGHEST)
            other_ts = (id_s[None, :] != id_t[:, None]) & (id_s[None, :] >= 0)
            return rank_t + jnp.sum(other_ts & ~(score_ts < own_t[:, None] - TIE), axis=1), None

        return jax.lax.scan(add, jnp.zeros(len(id_t), jnp.int32), candidate_tiles)[0]

    # Padded, because a tile whose queries the devices cannot divide would be computed on all of them.
    mesh = jax.sharding.get_abstract_mesh()
    multiple = 1 if mesh.empty else sharding.batch_shards(mesh)
    query_tiles = tuple(split_tiles(x, tile_size, multiple=multiple) for x in (query_QE, id_Q, own_Q))
    rank_nt = jax.lax.map(rank, query_tiles)
    return sharding.constrain(rank_nt.reshape(-1)[: len(id_Q)], None)
