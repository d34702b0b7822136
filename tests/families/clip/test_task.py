"""The functions of CLIP's `families.Family`."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.data.image_text import ImageTextDataConfig, encode_texts, make_data
from maxlp.data.images import encode_png
from maxlp.data.tokenizers import make_tokenizer
from maxlp.families.clip import task
from maxlp.families.clip.contrastive import ContrastiveConfig
from maxlp.families.clip.evals.retrieval import retrieval
from maxlp.families.clip.model import CLIP
from maxlp.nn.attention import Use
from maxlp.run.config import ConfigError
from tests.data.corpora import write_files
from tests.families.clip.fixtures import TEXT, VISUAL, make_batch, tiny_clip
from tests.fixtures import walk_jaxpr

DATA = ImageTextDataConfig(source="glyphs", tokenizer="bytes", text_len=12, image_size=16, batch_size=8)
LOSS = ContrastiveConfig(kind="softmax", method="plain")


def test_batch_shapes_are_those_of_the_data():
    batch = next(iter(make_data(DATA, split="train")))
    shapes = task.batch_shapes(DATA)
    assert {key: (x.shape, x.dtype) for key, x in batch.items()} == {
        key: (s.shape, s.dtype) for key, s in shapes.items()
    }
    assert task.describe_batch(DATA) == "8 pairs of 16² pixels and 12 tokens"


@pytest.mark.parametrize("split", ["train", "validation"])
def test_images_are_resized_as_the_model_asks(split, tmp_path):
    """A picture that is red, green and blue from left to right: of its middle, all is green."""
    colours = 255 * np.eye(3, dtype=np.uint8)[None, [0, 1, 1, 1, 2]]
    png = encode_png(colours.repeat(8, axis=0).repeat(8, axis=1))
    pairs = [(f"{i}.{kind}", x) for i in range(8) for kind, x in (("png", png), ("txt", b"a"))]
    source = f"tar:{write_files(tmp_path / 'a.tar', pairs)}?split=all"
    data = dataclasses.replace(DATA, source=source, validation_source=source, crop_scale=(1.0, 1.0))
    for resize, edge in (("shortest", (0, 255, 0)), ("squash", (255, 0, 0))):
        model = tiny_clip(image_resize=resize)
        image_BHWC = next(iter(task.FAMILY.make_data(model, data, split=split)))["image"]
        np.testing.assert_array_equal(image_BHWC[:, 8, 1], [edge] * 8)


def test_attention_is_used_once_in_each_tower():
    """In training half of the 16 patches are dropped; the class token is not."""
    assert task.attention_uses(tiny_clip(), DATA) == (
        Use(seq_len=9, num_heads=2, kv_heads=2, head_dim=16, dtype="float32", packed=False),
        Use(seq_len=12, num_heads=2, kv_heads=2, head_dim=16, dtype="float32", packed=False),
    )


@pytest.mark.parametrize("pool", [pytest.param("cls", marks=pytest.mark.full), "map"])
def test_flops_count_every_matmul_of_the_forward_pass_three_times(pool):
    """Against the FLOPs of the dots in the forward pass of unrolled towers."""
    config = tiny_clip(scan_layers=False, visual=dict(pool=pool))
    graphdef, state = nnx.split(CLIP(config, rngs=nnx.Rngs(0)))

    def forward(state, image, text):
        model = nnx.merge(graphdef, state)
        return model.encode_image(image, jnp.zeros((8, 16))), model.encode_text(text)  # drops patches

    batch = make_batch(8)
    jaxpr = jax.make_jaxpr(forward)(state, batch["image"], batch["text"])
    full, causal = task.flops_per_unit(config, DATA, num_params=0)
    projections = 2 * (VISUAL["width"] + TEXT["width"]) * config.embed_dim  # not counted
    assert full == pytest.approx(3 * (dot_flops(jaxpr.jaxpr) / 8 - projections))
    scores = 12 * 12**2 * TEXT["num_layers"] * TEXT["width"]
    assert causal == full - scores / 2


def dot_flops(jaxpr) -> int:
    total = 0
    for equation in walk_jaxpr(jaxpr):
        if equation.primitive.name == "dot_general":
            (contract, _), _ = equation.params["dimension_numbers"]
            inner = np.prod([equation.invars[0].aval.shape[dim] for dim in contract])
            total += 2 * int(inner * equation.outvars[0].aval.size)
    return total


# --- evaluation -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_evaluation_is_zero_shot_and_retrieval_on_validation_data():
    config = tiny_clip(text=dict(vocab_size=300, pool="eos", eos_id=257))
    graphdef, params, _ = nnx.split(CLIP(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    state = {"params": nnx.to_pure_dict(params), "model_state": {}}
    batch = make_batch(8) | {"label": jnp.arange(8) % 2, "mask": jnp.ones(8, bool)}
    validation = types.SimpleNamespace(
        tokenizer=make_tokenizer("bytes"),
        classes=["zero", "one"],
        templates=["a {}."],
        encode=lambda texts: encode_texts(make_tokenizer("bytes"), texts, 12)[0],
    )
    passes = iter([[batch]])  # one
    found = task.evaluator(graphdef, config, DATA, LOSS, validation)(state, lambda: next(passes))
    assert 0 <= found["zero_shot_top1"] <= found["zero_shot_top5"] == 1, "of two classes"
    model = nnx.merge(graphdef, params)
    assert found == found | retrieval(model.encode_image, model.encode_text, [batch])
    validation.classes = []
    found = task.evaluator(graphdef, config, DATA, LOSS, validation)(state, lambda: [batch])
    assert "zero_shot_top1" not in found and "image_to_text_recall_1" in found


def tokenizer(eos_id: int):
    return types.SimpleNamespace(eos_id=eos_id, vocab_size=64)


@pytest.mark.parametrize(
    "pool, eos_id, end",
    [("argmax", None, 63), ("eos", 5, 5), ("last", None, 5)],
)
def test_pools_that_find_the_end_of_a_text_are_accepted(pool, eos_id, end):
    task.check_pool(tiny_clip(text=dict(pool=pool, eos_id=eos_id)).text, tokenizer(end), "a.json")


@pytest.mark.parametrize("pool, eos_id", [("argmax", None), ("eos", 6)])
def test_pools_that_miss_the_end_of_a_text_are_refused(pool, eos_id):
    text = tiny_clip(text=dict(pool=pool, eos_id=eos_id)).text
    message = r"misses the end of a text, id 5 in a.json; set config.model.text.pool=eos"
    with pytest.raises(ConfigError, match=message):
        task.check_pool(text, tokenizer(5), "a.json")


@pytest.mark.full
def test_a_linear_probe_learns_labels_from_the_features():
    config = tiny_clip()
    graphdef, params, _ = nnx.split(CLIP(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    state = {"params": nnx.to_pure_dict(params), "model_state": {}}
    image = make_batch(8)["image"]
    labelled = {"image": image, "label": jnp.arange(8) % 2, "mask": jnp.ones(8, bool)}
    found = task.linear_probe(graphdef, state, [labelled], [labelled], num_classes=2, l2=1e-6)
    assert found["train_accuracy"] == found["test_accuracy"] == 1
