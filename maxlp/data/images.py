"""From encoded images to uint8 pixels: decoding within limits, and the crops for training and
evaluation.

Resampling is Pillow's with antialiasing, and sizes are computed as in torchvision, so that evaluation
crops are byte for byte equal to those of open_clip. As in open_clip, EXIF orientation is
not applied, transparency is dropped, and 16-bit grey is not scaled: what is above 255 is white. For
evaluation, images are converted to RGB only after resizing, as there: Pillow resizes palette and 1-bit
images without a filter, and weights colours by their opacity. For training they are converted first.

Letters: H height, W width, C channels.
"""

import contextlib
import io
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image

from maxlp.data.readers import BrokenExample

# Pillow has decoders for some fifty formats, and one of them (EPS) runs Ghostscript on the file.
FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 50_000_000
CROP_SCALE = (0.9, 1.0)  # fraction of the area, as in open_clip
CROP_RATIO = (3 / 4, 4 / 3)  # width over height
CROP_ATTEMPTS = 10
RESIZE_MODES = ("shortest", "squash")  # names of open_clip
INTERPOLATIONS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


class Preprocessing(NamedTuple):
    """How an image becomes a square.

    Attributes:
      resize: "shortest" keeps the proportions and cuts off what is beyond the square; "squash" keeps all of
        the image and stretches it to the square.
      interpolation: a key of `INTERPOLATIONS`.
    """

    resize: str = "shortest"
    interpolation: str = "bicubic"


AS_OPEN_CLIP = Preprocessing()


class Example(NamedTuple):
    """An image uint8 [H, W, 3], its caption, and its class or -1."""

    image: np.ndarray
    text: str
    label: int


def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Reads the header of an encoded image; pixels are decoded when they are used.

    Raises:
      BrokenExample: not an image in one of the `FORMATS`, or one with more than `max_pixels` pixels (a
        decompression bomb).
    """
    if max_pixels > (Image.MAX_IMAGE_PIXELS or math.inf):
        Image.MAX_IMAGE_PIXELS = max_pixels  # in this process; its own limit would come first
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise BrokenExample(str(error)) from None
    except Exception:  # decoders raise errors of any type on broken files
        raise BrokenExample(f"{len(data)} bytes are not a JPEG, PNG or WebP") from None
    if image.width * image.height > max_pixels:
        raise BrokenExample(f"{image.width} × {image.height} pixels are more than max_pixels={max_pixels}")
    return image


def eval_crop(image: Image.Image, size: int, how: Preprocessing = AS_OPEN_CLIP) -> np.ndarray:
    """Resizes the shorter side to `size` and takes the central square, or squashes: uint8 [size, size, 3].

    Raises:
      BrokenExample: the pixels cannot be decoded, or the image is so narrow that it would be resized
        to more than `MAX_PIXELS` pixels.
    """
    short, long = sorted(image.size)
    resized = size, int(size * long / short)
    width, height = resized if image.width <= image.height else resized[::-1]
    if how.resize == "squash":
        width = height = size
    if width * height > MAX_PIXELS:
        raise BrokenExample(f"{image.width} × {image.height} pixels are too narrow to be resized to {size}")
    left, top = round((width - size) / 2), round((height - size) / 2)
    with _decoding(image):
        if image.size != (width, height):
            image = image.resize((width, height), INTERPOLATIONS[how.interpolation])
        return np.asarray(image.crop((left, top, left + size, top + size)).convert("RGB"))


def random_crop(
    image: Image.Image,
    size: int,
    rng: np.random.Generator,
    scale: tuple[float, float] = CROP_SCALE,
    ratio: tuple[float, float] = CROP_RATIO,
    how: Preprocessing = AS_OPEN_CLIP,
) -> np.ndarray:
    """Resizes a random part of the image to uint8 [size, size, 3]: RandomResizedCrop of Inception.

    A JPEG that is at least twice as large as needed is decoded at a half, a quarter or an eighth of its
    size, which is several times faster.

    Args:
      image: from `open_image`, not yet decoded.
      scale: smallest and largest fraction of the area.
      ratio: smallest and largest width over height, of the squashed image if images are squashed.

    Raises:
      BrokenExample: the pixels cannot be decoded.
    """
    full_width, full_height = image.size
    if how.resize == "squash":
        ratio = ratio[0] * full_width / full_height, ratio[1] * full_width / full_height
    left, top, width, height = _crop_box(image.size, rng, scale, ratio)
    image.draft(None, (math.ceil(full_width * size / width), math.ceil(full_height * size / height)))
    x, y = image.width / full_width, image.height / full_height
    box = (left * x, top * y, (left + width) * x, (top + height) * y)
    with _decoding(image):
        rgb = image.convert("RGB")
        return np.asarray(rgb.resize((size, size), INTERPOLATIONS[how.interpolation], box=box))


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
    """Left, top, width, height; if no random box fits, the largest central one with an allowed ratio."""
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
    except Exception as error:  # decoders raise errors of any type on broken files
        raise BrokenExample(f"the {image.format} cannot be decoded ({error})") from None
