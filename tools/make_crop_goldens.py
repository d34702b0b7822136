"""Writes tests/goldens/eval_crops.npz: crops of small images by open_clip's evaluation transform.

    pip install torch torchvision open_clip_torch numpy pillow
    python tools/make_crop_goldens.py tests/goldens

For each image the file holds ``NAME``, the uint8 crop (size, size, 3), and ``NAME.file``, the image file;
for some also ``NAME.RESIZE.INTERPOLATION``, the crop with other settings than open_clip's defaults.
"""

import io
from collections.abc import Callable

import numpy as np
from goldens_folder import goldens_folder
from open_clip.transform import image_transform
from PIL import Image

# (width, height, size of the crop): shrunk, enlarged, odd, square, unchanged, long and narrow
SIZES = [(37, 23, 8), (23, 38, 12), (21, 20, 20), (16, 16, 16), (9, 7, 20), (4, 29, 6), (48, 5, 5)]
OTHER_SETTINGS = [("shortest", "bilinear"), ("squash", "bicubic"), ("squash", "bilinear")]


def picture(width: int, height: int) -> Image.Image:
    """Ramps, edges and a little noise."""
    y, x = np.mgrid[:height, :width]
    noise = np.random.default_rng(width * height).integers(0, 40, (height, width, 3))
    ramps = np.stack([255 * x // width, 255 * y // height, 255 * ((x // 5 + y // 3) % 2)], -1)
    return Image.fromarray(np.clip(ramps + noise - 20, 0, 255).astype(np.uint8))


def versions(width: int, height: int) -> dict[str, bytes]:
    """The picture as a file in each mode that image files have."""
    rgb = picture(width, height)
    y, x = np.mgrid[:height, :width]
    alpha = Image.fromarray(((x * 37 + y * 11) % 256).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: rotated by 90 degrees
    palette = rgb.quantize(23)

    def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
        file = io.BytesIO()
        image.save(file, kind, **options)
        return file.getvalue()

    def with_alpha(image: Image.Image) -> Image.Image:
        image.putalpha(alpha)
        return image

    return {
        "rgb": encoded(rgb),
        "gray": encoded(rgb.convert("L")),
        "rgba": encoded(with_alpha(rgb.copy())),
        "gray_alpha": encoded(with_alpha(rgb.convert("L"))),
        "palette": encoded(palette),
        "palette_transparent": encoded(palette, transparency=3),
        "bits": encoded(rgb.convert("1")),
        "gray16": encoded(Image.fromarray(np.asarray(rgb.convert("L")).astype(np.uint16) * 257)),
        "cmyk": encoded(rgb.convert("CMYK"), "TIFF"),
        "jpeg": encoded(rgb, "JPEG", quality=90, exif=exif),
        "webp": encoded(rgb, "WEBP", lossless=True),
    }


def pixels(transform: Callable, data: bytes) -> np.ndarray:
    crop_CHW = transform(Image.open(io.BytesIO(data))).numpy()
    return np.rint(crop_CHW.transpose(1, 2, 0) * 255).astype(np.uint8)


def main(folder: str) -> None:
    found = {}
    for width, height, size in SIZES:
        transform = image_transform(size, is_train=False, mean=(0, 0, 0), std=(1, 1, 1))
        for name, data in versions(width, height).items():
            name = f"{name}_{width}x{height}"
            found[name] = pixels(transform, data)
            found[f"{name}.file"] = np.frombuffer(data, np.uint8)
        for resize, interpolation in OTHER_SETTINGS:
            other = dict(resize_mode=resize, interpolation=interpolation)
            transform = image_transform(size, is_train=False, mean=(0, 0, 0), std=(1, 1, 1), **other)
            name = f"rgb_{width}x{height}"
            found[f"{name}.{resize}.{interpolation}"] = pixels(transform, found[f"{name}.file"].tobytes())
    np.savez_compressed(f"{folder}/eval_crops.npz", **found)


if __name__ == "__main__":
    main(str(goldens_folder()))
