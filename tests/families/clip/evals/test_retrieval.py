"""Retrieval with the images and texts themselves as features, so that every score is known."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.families.clip.evals.retrieval import _ranks, retrieval
from maxlp.parallel import sharding
from maxlp.parallel.batches import global_batch


def batches(images, texts, mask=None, size=4):
    mask = np.ones(len(images), bool) if mask is None else np.asarray(mask)
    for i in range(0, len(images), size):
        stop = i + size
        yield {"image": images[i:stop], "text": texts[i:stop], "mask": mask[i:stop]}


def identity(x):
    return jnp.asarray(x)


def unit(x):
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def points(N, K=None, E=6, noise=0.5, seed=0):
    """Images, and texts near them."""
    rng = np.random.default_rng(seed)
    images = unit(rng.normal(size=(N, E)))
    around = images if K is None else images[:, None]
    return images, unit(around + noise * rng.normal(size=(N, E) if K is None else (N, K, E)))


def by_sorting(images, texts):
    if texts.ndim == 2:
        texts = texts[:, None]
    N, K, E = texts.shape
    score = images.astype(np.float64) @ texts.reshape(N * K, E).T
    owner = np.repeat(np.arange(N), K)
    text_order, image_order = np.argsort(-score, axis=1), np.argsort(-score, axis=0)
    results = {}
    for k in (1, 5, 10):
        found = [i in owner[text_order[i, :k]] for i in range(N)]
        results[f"image_to_text_recall_{k}"] = np.mean(found)
        found = [owner[j] in image_order[:k, j] for j in range(N * K)]
        results[f"text_to_image_recall_{k}"] = np.mean(found)
    return results | {"images": N, "texts": N * K}


@pytest.mark.parametrize("K", [None, 3])
@pytest.mark.parametrize("tile_size", [7, 1000])
def test_equals_sorting(K, tile_size):
    images, texts = points(30, K, noise=1.0)
    want = by_sorting(images, texts)
    assert 0.1 < want["image_to_text_recall_1"] < want["text_to_image_recall_10"] < 1
    got = retrieval(identity, identity, batches(images, texts), tile_size=tile_size)
    np.testing.assert_allclose(list(got.values()), [want[key] for key in got], rtol=1e-12)  # float64


def test_padding_is_not_a_candidate():
    images, texts = points(12)
    images[8:], texts[8:] = images[:4], texts[:4]  # ties, if they counted
    mask = np.arange(12) < 8
    got = retrieval(identity, identity, batches(images, texts, mask))
    np.testing.assert_allclose(
        list(got.values()), list(retrieval(identity, identity, batches(images[:8], texts[:8])).values())
    )
    with pytest.raises(ValueError, match="no example"):
        retrieval(identity, identity, batches(images, texts, mask & False))


def test_ties_count_against_an_example_in_any_order():
    images, texts = points(16, noise=0.0)
    assert retrieval(identity, identity, batches(images, texts))["image_to_text_recall_1"] == 1
    texts[7] = texts[3] = images[3]  # a tie for image 3, and a wrong text for image 7
    number = np.arange(16)[:, None].astype(np.float32)

    def run(images, texts):
        numbered = np.append(texts, number, axis=1)  # so that no two texts are equal
        return retrieval(identity, lambda x: x[:, :-1], batches(images, numbered))

    got = run(images, texts)
    assert got["image_to_text_recall_1"] == 14 / 16
    assert got["text_to_image_recall_1"] == 15 / 16
    collapsed = np.ones_like(images) / np.sqrt(6).astype(np.float32)
    for broken in (collapsed, collapsed * np.nan):
        results = run(broken, broken)
        assert results["text_to_image_recall_10"] == results["image_to_text_recall_10"] == 0


def test_images_with_equal_texts_share_them():
    images, texts = points(16, noise=0.0)
    texts[7] = texts[3]  # the text of 7 is nearest to image 3, which has the same one; image 7 is not found
    got = retrieval(identity, identity, batches(images, texts))
    assert got["image_to_text_recall_1"] == 15 / 16
    assert got["text_to_image_recall_1"] == 1


def test_images_that_share_one_of_several_texts_are_different():
    images, texts = points(16, K=2, noise=0.0)
    texts[1, 0] = texts[0, 0]  # a tie for image 0; it is nearest to image 0, and not to its own, 1
    got = retrieval(identity, identity, batches(images, texts))
    assert got["image_to_text_recall_1"] == 15 / 16
    assert got["text_to_image_recall_1"] == 31 / 32


def test_a_mesh_equals_one_device():
    images, texts = points(40)
    want = retrieval(identity, identity, batches(images, texts, size=8))
    with jax.set_mesh(mesh := sharding.make_mesh(fsdp=4, tensor=2)):
        placed = (global_batch(b, mesh) for b in batches(images, texts, size=8))
        assert retrieval(identity, identity, placed, tile_size=16) == want


@pytest.mark.parametrize("size, t", [(1000, 10), (16, 4)])
def test_each_device_ranks_its_part_of_any_number_of_queries(size, t):
    queries = jnp.ones((37, 6)), jnp.arange(37)
    with jax.set_mesh(sharding.make_mesh(fsdp=4, tensor=2)):
        program = _ranks.lower(queries, jnp.ones(37), queries, tile_size=size).compile().as_text()
    assert re.findall(r"= f32\[(\d+),\d+\]\S* dot\(", program) == [str(t)]


def test_what_fills_up_a_tile_is_not_a_candidate():
    """All scores are at most zero, which is the score of padding."""
    images = np.eye(3, dtype=np.float32)
    texts = unit(images - 1)
    for tile_size in (2, 3):  # two tiles of two; one of three
        results = retrieval(identity, identity, batches(images, texts), tile_size=tile_size)
        assert results["image_to_text_recall_1"] == results["text_to_image_recall_1"] == 1
