import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.families.clip import vit, weights
from tests.families.clip.fixtures import SIGLIP, make_batch, make_clip
from tests.fixtures import matmul_types

encode_image = jax.jit(lambda model, *args: model.encode_image(*args))


def test_patches_equal_those_of_a_strided_convolution():
    rng = np.random.default_rng(0)
    image_BHWC = rng.standard_normal((2, 8, 12, 3), np.float32)
    kernel_HWIO = rng.standard_normal((4, 4, 3, 5), np.float32)
    expected = jax.lax.conv_general_dilated(
        image_BHWC, kernel_HWIO, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    got = vit.patches(jnp.asarray(image_BHWC), 4) @ kernel_HWIO.reshape(-1, 5)
    # 48 products per sum, in another order: 48 roundings of 6e-8 of sums up to 30
    np.testing.assert_allclose(got, expected.reshape(2, 6, 5), atol=1e-4)


def test_patch_dropout_keeps_a_random_half_of_the_patches_and_the_class_token():
    rng = np.random.default_rng(0)
    x_BSD = jnp.asarray(rng.standard_normal((64, 17, 2)), jnp.float32)
    kept = vit.drop_patches(x_BSD, 0.5, jax.random.uniform(jax.random.key(1), (64, 16)), first=1)
    assert kept.shape == (64, 9, 2)
    np.testing.assert_array_equal(kept[:, 0], x_BSD[:, 0])
    came_from = (kept[:, 1:, None] == x_BSD[:, None, 1:]).all(-1)
    assert (came_from.sum(-1) == 1).all() and (came_from.sum(1) <= 1).all(), "patches, each at most once"
    fraction = came_from.sum(1).mean(0)
    assert (abs(fraction - 0.5) < 0.25).all(), "every position is kept equally often"
    draws_BP = jax.random.uniform(jax.random.key(1), (64, 17))
    assert vit.drop_patches(x_BSD, 0.99, draws_BP, first=0).shape == (64, 1, 2)


@pytest.mark.full
def test_patches_are_dropped_only_with_draws():
    image, draws_BP = make_batch(2)["image"], jax.random.uniform(jax.random.key(0), (2, 16))
    without, model = make_clip(visual=dict(patch_dropout=0.0)), make_clip()
    features_BE = encode_image(model, image)
    np.testing.assert_array_equal(features_BE, encode_image(without, image))
    np.testing.assert_array_equal(features_BE, encode_image(without, image, draws_BP))
    assert jnp.abs(encode_image(model, image, draws_BP) - features_BE).max() > 1e-3


def test_resizing_interpolates_a_smooth_field_and_keeps_the_class_token():
    def field(size: int) -> np.ndarray:
        rows, columns = np.meshgrid(np.arange(size) + 0.5, np.arange(size) + 0.5, indexing="ij")
        return np.stack([rows / size, np.sin(columns / size)], -1).reshape(-1, 2)

    pos_SD = np.concatenate([[[7.0, 7.0]], field(8)]).astype(np.float32)
    resize = functools.partial(vit.resize_pos_embed, jnp.asarray(pos_SD), first=1)
    resized = resize(256)
    np.testing.assert_array_equal(resized[0], pos_SD[0])
    inner, expected = (np.asarray(x).reshape(16, 16, 2)[4:-4, 4:-4] for x in (resized[1:], field(16)))
    # The error of cubic interpolation of this field, whose values span 1.
    np.testing.assert_allclose(inner, expected, atol=1e-3)
    np.testing.assert_allclose(resize(64), pos_SD, atol=1e-6)
    with pytest.raises(ValueError, match="64 or 50 patches do not form a square grid"):
        resize(50)


def test_images_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"images of 20 × 16 × 3 do not match model.visual.image_size=16"):
        encode_image(make_clip(), jnp.zeros((2, 20, 16, 3)))


@pytest.mark.parametrize("changes", [{}, SIGLIP], ids=["clip", "siglip"])
def test_towers_in_bfloat16_multiply_only_bfloat16_and_sum_float32(changes):
    """Forward and backward, with each way of pooling."""

    def total(model, batch):
        return jnp.sum(model.encode_image(batch["image"])) + jnp.sum(model.encode_text(batch["text"]))

    model = jax.eval_shape(lambda: make_clip(**{"dtype": "bfloat16"} | changes))
    program = jax.jit(jax.grad(total, allow_int=True)).lower(model, make_batch())
    types = matmul_types(program)
    assert types and {operand for *operands, _ in types for operand in operands} == {"bf16"}
    # GPUs and TPUs would add up the gradients of a parameter's copies in bfloat16, too.
    sums = re.findall(r"applies stablehlo.add .*: \(tensor<[\dx]*x(\w+)>", program.as_text())
    assert set(sums) == {"f32"}


def test_an_image_tower_without_a_class_token_is_resized_whole():
    model = make_clip(**SIGLIP)
    params, rng = nnx.to_pure_dict(nnx.state(model, nnx.Param)), np.random.default_rng(0)
    params["visual"]["pos_embed"] = pos_SD = rng.standard_normal((16, 32)).astype(np.float32)
    resized, config = weights.resize(params, model.config, image_size=24)
    assert config.visual.image_size == 24 and config.visual.num_patches == 36
    np.testing.assert_array_equal(resized["visual"]["pos_embed"], vit.resize_pos_embed(pos_SD, 36, first=0))
    np.testing.assert_array_equal(params["visual"]["pos_embed"], pos_SD)
