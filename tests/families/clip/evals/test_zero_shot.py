"""Zero-shot classification with images and tokens themselves as features, so that every score is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.families.clip.evals.zero_shot import class_embeddings, zero_shot
from maxlp.parallel import sharding
from maxlp.parallel.batches import global_batch

CLASSES = ["a", "b", "c", "d", "e", "f", "g"]
# In two dimensions, class i points at the angle 10 i degrees; its prompts lie on both sides of it.
ANGLE = {name: 10.0 * i for i, name in enumerate(CLASSES)}
TEMPLATES = ["{} -", "{} +"]


def tokenize(texts):
    shift = {"-": -4, "+": 4}
    return np.array([[ANGLE[t[0]] + shift[t[-1]]] for t in texts], np.int32)


def direction(degrees):
    radians = jnp.deg2rad(jnp.asarray(degrees, jnp.float32))
    return jnp.concatenate([jnp.cos(radians), jnp.sin(radians)], axis=-1)


def batches(angles, labels, mask=None, size=4):
    mask = np.ones(len(angles), bool) if mask is None else np.asarray(mask)
    for i in range(0, len(angles), size):
        yield {
            "image": np.asarray(angles, np.float32)[i : i + size, None],
            "label": np.asarray(labels, np.int32)[i : i + size],
            "mask": mask[i : i + size],
        }


def run(data, batch_size=4, **changes):
    options = {"classes": CLASSES, "templates": TEMPLATES, "tokenize": tokenize} | changes
    return zero_shot(direction, direction, data, batch_size=batch_size, **options)


def test_hits_are_counted():
    # Nearest of the angles 0, 10, … 60: right; right; second; fifth; sixth.
    angles, labels = [0, 21, 16, 34, 36], [0, 2, 1, 1, 1]
    assert run(batches(angles, labels)) == {"top1": 2 / 5, "top5": 4 / 5, "examples": 5.0}


def test_padding_and_rows_without_a_label_do_not_count():
    angles, labels, mask = [0, 0, 0, 30, 0], [0, -1, 3, 1, len(CLASSES)], [True, True, False, True, True]
    assert run(batches(angles, labels, mask)) == {"top1": 1 / 2, "top5": 1.0, "examples": 2.0}
    with pytest.raises(ValueError, match="no image with a label"):
        run(batches([0], [-1]))


def test_ties_and_nan_count_against_an_example():
    def constant(x):
        return jnp.ones((len(x), 2)) / jnp.sqrt(2.0)

    def nan(x):
        return jnp.full((len(x), 2), jnp.nan)

    options = {"classes": CLASSES, "templates": TEMPLATES, "tokenize": tokenize, "batch_size": 4}
    assert zero_shot(constant, constant, batches([0] * 4, [0] * 4), **options)["top5"] == 0
    assert zero_shot(nan, constant, batches([0] * 4, [0] * 4), **options)["top5"] == 0


def test_a_class_is_the_normalized_mean_of_its_normalized_prompts():
    want = np.asarray(direction(np.array([[ANGLE[c]] for c in CLASSES])))
    for batch_size in (3, 14, 100):  # a class in two batches; all prompts in one; padding
        rows = []
        got = class_embeddings(
            lambda x, rows=rows: rows.append(len(x)) or 3 * direction(x),
            *(CLASSES, TEMPLATES, tokenize, batch_size),
        )
        np.testing.assert_allclose(got, want, atol=2e-7)  # float32 angles
        assert set(rows) == {batch_size}  # one shape: compiled once, and split evenly over the devices


def test_a_mesh_equals_one_device():
    angles, labels = np.arange(16) * 4.0, np.arange(16) % 7
    want = run(batches(angles, labels, size=8), batch_size=8)
    with jax.set_mesh(mesh := sharding.make_mesh(data=2, fsdp=4)):
        placed = (global_batch(b, mesh) for b in batches(angles, labels, size=8))
        assert run(placed, batch_size=8) == want


def test_missing_classes_and_templates_without_a_place_for_them_are_refused():
    with pytest.raises(ValueError, match=r"no prompts from 0 classes and 2 templates; set data\.classes"):
        run(batches([0], [0]), classes=[])
    with pytest.raises(ValueError, match="template 'a photo' has no"):
        run(batches([0], [0]), templates=["a photo"])


def test_a_long_prompt_weighs_as_much_as_a_short_one():
    """Features of an encoder need not have unit norm: that of one template is nine times as long here."""

    def encode(degrees):
        is_second = jnp.asarray(degrees) % 10 == 4
        return jnp.where(is_second, 9.0, 1.0) * direction(degrees)

    want = np.asarray(direction(np.array([[ANGLE[c]] for c in CLASSES])))
    got = class_embeddings(encode, CLASSES, TEMPLATES, tokenize, batch_size=4)
    np.testing.assert_allclose(got, want, atol=2e-7)  # float32 angles
