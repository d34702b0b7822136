"""Crops against slow references, and broken images."""

import contextlib
import io
import os
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxlp.data import images
from maxlp.data.readers import BrokenExample

GOLDENS = Path(__file__).parent.parent / "goldens"


def photo(width, height):
    """A smooth picture with some noise, so that resampling filters differ on it."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width]
    waves = [128 + 90 * np.sin(x / (7 + 3 * c) + c) * np.cos(y / (11 - 2 * c)) for c in range(3)]
    return np.clip(np.stack(waves, -1) + rng.normal(0, 12, (height, width, 3)), 0, 255).astype(np.uint8)


def encoded(pixels, kind="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def bicubic(x):
    """Keys' kernel with a = -0.5, as in Pillow's BICUBIC."""
    x = np.abs(x)
    return np.where(
        x < 1, 1.5 * x**3 - 2.5 * x**2 + 1, np.where(x < 2, -0.5 * (x**3 - 5 * x**2 + 8 * x - 4), 0)
    )


def slow_resize(pixels_LXC, size):
    """Antialiased bicubic along the first axis, rounded to bytes as Pillow does after each axis."""
    length = len(pixels_LXC)
    scale = length / size
    centers = (np.arange(size) + 0.5) * scale
    weights = bicubic((np.arange(length) + 0.5 - centers[:, None]) / max(scale, 1))
    weights /= weights.sum(1, keepdims=True)
    return np.clip(np.floor(np.einsum("sl,lxc->sxc", weights, pixels_LXC) + 0.5), 0, 255)


@pytest.mark.parametrize(("width", "height"), [(61, 40), (40, 61), (47, 47), (20, 33), (32, 32), (33, 150)])
def test_eval_crop_is_resize_of_the_short_side_and_the_middle(width, height):
    size, pixels = 32, photo(width, height)
    # torchvision: the long side is truncated to an integer, the offset of the crop rounded half to even.
    long = int(size * max(width, height) / min(width, height))
    new_width, new_height = (size, long) if width <= height else (long, size)
    left, top = round((new_width - size) / 2), round((new_height - size) / 2)
    found = images.eval_crop(images.open_image(encoded(pixels)), size)
    assert found.dtype == np.uint8
    # Pillow rounds to bytes between the two axes; the order of the axes is an implementation detail.
    sides = (new_height, new_width)
    for order in ((1, 0), (0, 1)):
        expected = pixels.astype(float)
        for axis in order:
            expected = np.moveaxis(slow_resize(np.moveaxis(expected, axis, 0), sides[axis]), 0, axis)
        difference = np.abs(found - expected[top : top + size, left : left + size])
        if (difference > 0).mean() < 0.01:  # Pillow's weights are fixed-point numbers
            break
    assert difference.max() <= 1 and (difference > 0).mean() < 0.01


def test_random_crop_shows_the_box_it_drew():
    """Pixels whose value is their position tell which part of the image a crop is."""
    height, width, size = 120, 180, 40
    y, x = np.mgrid[:height, :width]
    position = np.stack([x, y, 0 * x], -1).astype(np.uint8)
    areas, ratios = [], []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        crop = images.random_crop(images.open_image(encoded(position)), size, rng, (0.2, 0.5)).astype(float)
        # A pixel of the crop is 1/size of the box, away from the borders where the filter is cut.
        box_width = (crop[20, 30, 0] - crop[20, 10, 0]) / 20 * size
        box_height = (crop[30, 20, 1] - crop[10, 20, 1]) / 20 * size
        areas.append(box_width * box_height / (width * height))
        ratios.append(box_width / box_height)
    # Positions are whole numbers: 1/20 of the size is 2 pixels of error in some 60.
    assert 0.18 < min(areas) < 0.23 and 0.46 < max(areas) < 0.54
    assert 0.70 < min(ratios) < 0.80 and 1.25 < max(ratios) < 1.42
    assert abs(np.mean(np.log(ratios))) < 0.05  # wide and tall crops are equally frequent


@pytest.mark.parametrize("interpolation", images.INTERPOLATIONS)
def test_a_squashed_image_is_seen_whole_in_training_too(interpolation):
    how, whole = images.Preprocessing("squash", interpolation), ((1.0, 1.0), (1.0, 1.0))
    for width, height in ((90, 30), (20, 50)):
        image = images.open_image(encoded(photo(width, height)))
        found = images.random_crop(image, 16, np.random.default_rng(0), *whole, how)
        np.testing.assert_array_equal(found, images.eval_crop(image, 16, how))
        smaller = images.random_crop(image, 16, np.random.default_rng(0), (0.5, 0.6), how=how)
        assert not np.array_equal(smaller, found)


def test_reduced_jpeg_shows_the_same_crop():
    """A large JPEG is decoded at half or a quarter of its size, which does not move the crop."""
    smooth = np.asarray(Image.fromarray(photo(20, 15)).resize((800, 600), Image.Resampling.BICUBIC))
    jpeg, png = encoded(smooth, "JPEG", quality=95), encoded(smooth)
    for seed in range(5):
        crops = [
            images.random_crop(images.open_image(data), 32, np.random.default_rng(seed), (0.5, 1.0))
            for data in (jpeg, png)
        ]
        assert np.abs(crops[0].astype(int) - crops[1]).mean() < 2


def test_a_small_crop_of_a_jpeg_is_decoded_with_as_many_pixels_as_it_needs():
    image = images.open_image(encoded(photo(800, 600), "JPEG"))
    # A square of 155 pixels, resized to 64: at a quarter of the image's size it would have 39.
    images.random_crop(image, 64, np.random.default_rng(0), (0.05, 0.05), (1.0, 1.0))
    assert image.size == (400, 300)


def test_crops_lie_everywhere_in_the_image():
    boxes = [
        images._crop_box((100, 50), np.random.default_rng(seed), (0.96, 0.96), (2.0, 2.0))
        for seed in range(100)
    ]
    assert {box[2:] for box in boxes} == {(98, 49)}
    assert {box[0] for box in boxes} == {0, 1, 2} and {box[1] for box in boxes} == {0, 1}


@pytest.mark.parametrize(("size", "box"), [((1000, 10), (493, 0, 13, 10)), ((10, 1000), (0, 493, 10, 13))])
def test_fallback_is_the_largest_central_part(size, box):
    assert images._crop_box(size, np.random.default_rng(0), (0.9, 1.0), images.CROP_RATIO) == box


def test_eval_crop_is_that_of_open_clip():
    """Every mode and format, byte for byte; tools/make_crop_goldens.py makes the file."""
    golden = np.load(GOLDENS / "eval_crops.npz")
    names = [name for name in golden if not name.endswith(".file")]
    assert len(names) == 77 + 21
    for name in names:
        file, *how = name.split(".")
        image = Image.open(io.BytesIO(golden[f"{file}.file"].tobytes()))  # some in formats that are refused
        found = images.eval_crop(image, len(golden[name]), images.Preprocessing(*how))
        np.testing.assert_array_equal(found, golden[name], err_msg=name)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "LA"])
def test_training_crops_of_every_mode_are_rgb(mode):
    image = Image.fromarray(photo(40, 40)).convert(mode)
    found, expected = (
        images.random_crop(each, 8, np.random.default_rng(0)) for each in (image, image.convert("RGB"))
    )
    np.testing.assert_array_equal(found, expected)


def test_exif_orientation_is_not_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: rotated by 90 degrees
    data = encoded(photo(40, 40), "JPEG", exif=exif, quality=100)
    plain = encoded(photo(40, 40), "JPEG", quality=100)
    found, expected = (images.eval_crop(images.open_image(each), 40) for each in (data, plain))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_the_usual_formats_are_decoded(kind):
    image = images.open_image(encoded(photo(40, 40), kind))
    assert image.format == kind and images.eval_crop(image, 8).shape == (8, 8, 3)


def test_no_other_decoder_is_reached(tmp_path, monkeypatch):
    """Pillow hands an EPS to Ghostscript, which runs the program in it."""
    trace = tmp_path / "started"
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f'#!/bin/sh\necho "$@" >> {trace}\nexit 1\n')
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # found anew on the PATH
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        Image.open(io.BytesIO(eps)).load()
    assert trace.exists(), "the stand-in is found where Pillow decodes an EPS"
    trace.unlink()
    others = [encoded(photo(8, 8), kind) for kind in ("GIF", "BMP", "TIFF", "PPM", "ICO")]
    for data in (eps, *others):
        with pytest.raises(BrokenExample, match="bytes are not a JPEG, PNG or WebP"):
            images.eval_crop(images.open_image(data), 8)
    assert not trace.exists()


def test_broken_images_are_reported(monkeypatch):
    jpeg = encoded(photo(64, 64), "JPEG")
    for data in (b"", b"<html>not found</html>", jpeg[:10]):
        with pytest.raises(BrokenExample, match="bytes are not a JPEG, PNG or WebP"):
            images.open_image(data)
    for cut in (len(jpeg) // 2, len(jpeg) * 9 // 10):
        with pytest.raises(BrokenExample, match="JPEG cannot be decoded"):
            images.eval_crop(images.open_image(jpeg[:cut]), 32)
        with pytest.raises(BrokenExample, match="JPEG cannot be decoded"):
            images.random_crop(images.open_image(jpeg[:cut]), 32, np.random.default_rng(0))
    with pytest.raises(BrokenExample, match=r"64 × 64 pixels are more than max_pixels=4095"):
        images.open_image(jpeg, 4095)
    bomb = bytearray(encoded(np.zeros((1, 1, 3), np.uint8)))
    bomb[16:24] = b"\0\1\0\0" * 2  # width and height in the header, before its checksum
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    with pytest.raises(BrokenExample, match="decompression bomb"):
        images.open_image(bytes(bomb))
    monkeypatch.setattr(images.Image, "MAX_IMAGE_PIXELS", images.Image.MAX_IMAGE_PIXELS)
    assert images.open_image(bytes(bomb), 2**32).size == (2**16, 2**16)
    with pytest.raises(BrokenExample, match="65536 × 65536 pixels are more than max_pixels=50000000"):
        images.open_image(bytes(bomb))
    with pytest.raises(BrokenExample, match="20000 × 1 pixels are too narrow to be resized to 64"):
        images.eval_crop(images.open_image(encoded(np.zeros((1, 20000, 3), np.uint8))), 64)


def test_the_ratio_of_a_crop_is_width_to_height():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        _, _, width, height = images._crop_box((400, 400), rng, (0.1, 0.4), (1.9, 2.1))
        assert 1.85 < width / height < 2.15
