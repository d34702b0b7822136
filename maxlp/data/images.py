"""Encoded images to uint8 pixels: decoding within limits, the crops of training and of evaluation.

The resampling is Pillow's bicubic with antialiasing, and the arithmetic of sizes is torchvision's, so
that what an image becomes for evaluation is equal to the byte to what open_clip makes of it. As there,
an orientation in EXIF is not applied and transparency is dropped, and only the resized image becomes RGB:
Pillow resizes palettes and bits without a filter, and colours in the measure that they are opaque.
"""

import contextlib
import io
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image

MAX_PIXELS = 50_000_000
CROP_SCALE = (0.9, 1.0)  # open_clip's, of the area
CROP_RATIO = (3 / 4, 4 / 3)
CROP_ATTEMPTS = 10


class Example(NamedTuple):
    """An image uint8 (H, W, 3), its caption, and its class or -1."""

    image: np.ndarray
    text: str
    label: int


class BrokenExample(ValueError):
    """An example that cannot be used: not an image, cut short, too large."""


def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Reads the header of an encoded image; its pixels are decoded when they are used.

    Raises:
      BrokenExample: not an image, or one of more than `max_pixels` (a decompression bomb).
    """
    try:
        image = Image.open(io.BytesIO(data))
    except Image.DecompressionBombError as error:
        raise BrokenExample(str(error)) from None
    except Exception:  # of any type, as broken files make decoders raise
        raise BrokenExample(f"{len(data)} bytes are not an image") from None
    if image.width * image.height > max_pixels:
        raise BrokenExample(f"{image.width} × {image.height} pixels are more than max_pixels={max_pixels}")
    return image


def eval_crop(image: Image.Image, size: int) -> np.ndarray:
    """The middle square of the image with its shorter side resized, uint8 (size, size, 3).

    Raises:
      BrokenExample: the pixels cannot be decoded, or the image is a line that would be resized to
        more than `MAX_PIXELS`.
    """
    short, long = sorted(image.size)
    resized = size, int(size * long / short)
    width, height = resized if image.width <= image.height else resized[::-1]
    if width * height > MAX_PIXELS:
        raise BrokenExample(f"{image.width} × {image.height} pixels are too narrow to be resized to {size}")
    left, top = round((width - size) / 2), round((height - size) / 2)
    with _decoding(image):
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        return np.asarray(image.crop((left, top, left + size, top + size)).convert("RGB"))


def random_crop(
    image: Image.Image,
    size: int,
    rng: np.random.Generator,
    scale: tuple[float, float] = CROP_SCALE,
    ratio: tuple[float, float] = CROP_RATIO,
) -> np.ndarray:
    """A random part of the image, resized to uint8 (size, size, 3): Inception's RandomResizedCrop.

    A JPEG of which only every second (4th, 8th) pixel is needed is decoded at that size, which is
    several times faster.

    Args:
      image: as `open_image` gives it, not yet decoded.
      scale: least and greatest part of the area.
      ratio: least and greatest width over height.

    Raises:
      BrokenExample: the pixels cannot be decoded.
    """
    full_width, full_height = image.size
    left, top, width, height = _crop_box(image.size, rng, scale, ratio)
    image.draft(None, (math.ceil(full_width * size / width), math.ceil(full_height * size / height)))
    x, y = image.width / full_width, image.height / full_height
    box = (left * x, top * y, (left + width) * x, (top + height) * y)
    with _decoding(image):
        return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC, box=box))


def encode_png(pixels_HWC: np.ndarray) -> bytes:
    """A PNG file of uint8 pixels."""
    file = io.BytesIO()
    Image.fromarray(pixels_HWC).save(file, "PNG")
    return file.getvalue()


def _crop_box(
    image_size: tuple[int, int],
    rng: np.random.Generator,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[int, int, int, int]:
    """Left, top, width and height; the largest central part of a fitting ratio if none is found."""
    full_width, full_height = image_size
    for area, logratio, x, y in rng.random((CROP_ATTEMPTS, 4)):
        pixels = full_width * full_height * (scale[0] + area * (scale[1] - scale[0]))
        aspect = math.exp(math.log(ratio[0]) + logratio * math.log(ratio[1] / ratio[0]))
        width, height = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
        if 0 < width <= full_width and 0 < height <= full_height:
            left, top = int(x * (full_width - width + 1)), int(y * (full_height - height + 1))
            return left, top, width, height
    width = max(1, min(full_width, round(full_height * ratio[1])))
    height = max(1, min(full_height, round(full_width / ratio[0])))
    return (full_width - width) // 2, (full_height - height) // 2, width, height


@contextlib.contextmanager
def _decoding(image: Image.Image) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any type, as broken files make decoders raise
        raise BrokenExample(f"the {image.format} cannot be decoded ({error})") from None
