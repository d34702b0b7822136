"""Images of characters with their Unicode names as captions: image-text data without a download.

The faces are those that matplotlib brings along and whose tables are Unicode: twelve of DejaVu and four
of STIX. (Its Computer Modern faces have tables of their own.) A caption is a name of the Unicode
Character Database in lower case, "latin small letter a with diaeresis". Names are composed of parts,
so that a model can name a character it never saw, and two kinds of data are held out from training:

    faces        the characters of training in faces that it does not have
    characters   characters that it does not have, in its faces; each word of their names it has
    both         those characters in those faces

One pass goes over the characters, each drawn in a random one of its faces, so that no caption comes
twice in a pass. Characters that look the same in all faces (Latin A, Greek Alpha, Cyrillic A) are one,
the first of them: no image would tell their names apart.

In training a glyph is slightly rotated, sheared, scaled and moved, and gets dark ink on light paper, each
of random colour. Held out, it is black on white, straight and in the middle.

The captions are not the same on every machine: they depend on the Unicode version of Python and on
matplotlib's fonts, both of which only ever grew.
"""

import functools
import math
import os
import re
import unicodedata
import zlib
from collections import Counter

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from maxlp.data.images import Example

HELDOUT_FACES = "DejaVuSansMono-Oblique"
HELDOUT_CHARACTERS = 0.1

_FAMILIES = {
    "DejaVuSans": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSerif": ("", "-Bold", "-Italic", "-BoldItalic"),
    "STIXGeneral": ("", "Bol", "Italic", "BolIta"),
}
FACES = tuple(family + style for family, styles in _FAMILIES.items() for style in styles)
# A character is taken if all of these have it, or a caption could be of one face alone.
COMMON = tuple(face for face in FACES if face.startswith("DejaVu"))

CHARACTERS = {
    "latin": r"latin (small|capital) letter .*",
    "alphabets": r"(latin|greek|cyrillic|armenian|georgian) (small |capital )?letter .*",
    "all": r"(?!combining).*",
}

CAP_HEIGHT, BASELINE, BLACK = 0.45, 0.77, 255  # of the side of the canvas, from the top
ROTATION, SHEAR, LOG_SCALE, SHIFT = 0.12, 0.2, 0.12, 0.06  # at most; radians, -, -, of the side
DARKEST_PAPER, LIGHTEST_INK = 95, 95  # at most so far from white and from black


class Glyphs:
    """Examples of one split: `example(index, rng)` is an image, its caption and the caption's class.

    Attributes:
      classes: all captions, those of held-out characters too.
      templates: ["{}"], for a caption is a description already.
      name: what the examples are, for errors.
    """

    templates = ("{}",)

    def __init__(
        self,
        split: str,
        image_size: int,
        *,
        characters: str = "latin",
        heldout: str = "faces",
        heldout_faces: str = HELDOUT_FACES,
        heldout_characters: float = HELDOUT_CHARACTERS,
        augment: float = 1.0,
    ):
        """Chooses characters and faces.

        Args:
          split: "train" or "heldout".
          image_size: side of the images in pixels.
          characters: a key of `CHARACTERS`.
          heldout: what the split "heldout" holds: "faces", "characters" or "both"; training has none of
            either whatever it is.
          heldout_faces: names out of `FACES`, joined by commas.
          augment: strength of what is random about the images of training, 0 to 1.
          heldout_characters: about which part of the characters with a composed name is held out.

        Raises:
          ValueError: an unknown name, a fraction out of range, nothing left to train on.
        """
        faces = tuple(face for face in heldout_faces.split(",") if face)
        for key, value, known in (
            ("characters", characters, tuple(CHARACTERS)),
            ("heldout", heldout, ("faces", "characters", "both")),
            *(("heldout_faces", face, FACES) for face in faces),
        ):
            if value not in known:
                raise ValueError(f"{key}={value!r} is unknown; choose of {', '.join(known)}")
        if not 0 <= heldout_characters <= 0.5:
            raise ValueError(f"heldout_characters={heldout_characters} must be a fraction from 0 to 0.5")
        if not 0 <= augment <= 1:
            raise ValueError(f"augment={augment} must be from 0 to 1")
        self.augment = augment
        chosen = _characters(characters)
        captions = {character: caption_of(character) for character in chosen}
        held = _held_out(tuple(captions.values()), heldout_characters)
        self.name, self.image_size = f"glyphs ({characters}, {split})", image_size
        self.classes = list(captions.values())
        self._label = {character: label for label, character in enumerate(chosen)}

        is_train = split == "train"
        new_characters = not is_train and heldout != "faces"
        new_faces = not is_train and heldout != "characters"
        wanted = [face for face in FACES if (face in faces) == new_faces]
        drawn = [
            (character, tuple(face for face in wanted if character in _charmap(face)))
            for character in chosen
            if (captions[character] in held) == new_characters
        ]
        # Training has a character once, with all its faces; what is held out has it once a face.
        self._rows = [(character, faces) for character, faces in drawn if faces]
        if not is_train:
            self._rows = [(character, (face,)) for character, faces in self._rows for face in faces]
        if not self._rows:
            raise ValueError(f"{self.name}: nothing is left; hold out fewer faces, or other things")

    def __len__(self) -> int:
        return len(self._rows)

    def example(self, index: int, rng: np.random.Generator | None) -> Example:
        """A character, drawn plainly without `rng`."""
        character, faces = self._rows[index]
        label = self._label[character]
        if rng is None:
            image = plain(faces[0], character, self.image_size)
        else:
            face = faces[int(rng.integers(len(faces)))]
            image = varied(face, character, self.image_size, rng, self.augment)
        return Example(image, self.classes[label], label)

    def where(self, index: int) -> str:
        """Names an example."""
        character, faces = self._rows[index]
        return f"U+{ord(character):04X} in {', '.join(faces)}"


def caption_of(character: str) -> str:
    """The Unicode name of a character in lower case."""
    return unicodedata.name(character).lower()


# --- drawing --------------------------------------------------------------------------------------


def plain(face: str, character: str, image_size: int) -> np.ndarray:
    """Black on white, uint8 (image_size, image_size, 3)."""
    mask_HW = np.asarray(_resample(_glyph(face, character, _canvas(image_size)), image_size, np.eye(2)))
    return np.repeat(255 - mask_HW[..., None], 3, axis=-1)


def varied(
    face: str, character: str, image_size: int, rng: np.random.Generator, strength: float
) -> np.ndarray:
    """Rotated, sheared, scaled, moved and coloured at random, uint8 (image_size, image_size, 3)."""
    chance = rng.random(12)
    angle, shear, *logs = strength * (2 * chance[:4] - 1) * (ROTATION, SHEAR, LOG_SCALE, LOG_SCALE)
    cos, sin = math.cos(angle), math.sin(angle)
    stretch = np.array([[math.exp(logs[0]), shear], [0.0, math.exp(logs[1])]])
    shift = strength * (2 * chance[4:6] - 1) * SHIFT * image_size
    glyph = _glyph(face, character, _canvas(image_size))
    mask_HW = np.asarray(_resample(glyph, image_size, np.array([[cos, -sin], [sin, cos]]) @ stretch, shift))
    paper, ink = 255 - strength * chance[6:9] * DARKEST_PAPER, strength * chance[9:12] * LIGHTEST_INK
    colours = (paper + _COVERAGE * (ink - paper)).astype(np.uint8)
    return np.take(colours, mask_HW, axis=0)


_COVERAGE = np.linspace(0, 1, 256)[:, None]


def _canvas(image_size: int) -> int:
    return 2 * min(image_size, 64)  # twice the image, so that bilinear sampling averages 2 × 2 pixels


def _resample(
    glyph: Image.Image, size: int, matrix: np.ndarray, shift: np.ndarray | tuple[float, float] = (0, 0)
) -> Image.Image:
    """The canvas in a square of `size` pixels: `matrix` maps offsets in it to offsets in the canvas."""
    canvas = glyph.width
    (a, b), (d, e) = (matrix * (canvas / size)).tolist()
    x, y = size / 2 + shift[0], size / 2 + shift[1]
    coefficients = (a, b, canvas / 2 - a * x - b * y, d, e, canvas / 2 - d * x - e * y)
    return glyph.transform((size, size), Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)


@functools.lru_cache(maxsize=2**15)  # 16 kB each for 64-pixel images
def _glyph(face: str, character: str, canvas: int) -> Image.Image:
    """The character on its baseline, as coverage 0 to 255 on a square canvas."""
    image = Image.new("L", (canvas, canvas))
    position = (canvas / 2, BASELINE * canvas)
    ImageDraw.Draw(image).text(position, character, fill=255, font=_font(face, canvas), anchor="ms")
    return image


@functools.cache
def _font(face: str, canvas: int) -> ImageFont.FreeTypeFont:
    """A face scaled so that capitals are as high in all of them."""
    probe = ImageFont.truetype(_path(face), 1000, layout_engine=ImageFont.Layout.BASIC)
    _, top, _, bottom = probe.getbbox("H", anchor="ls")
    return probe.font_variant(size=CAP_HEIGHT * canvas * 1000 / (bottom - top))


# --- faces and characters -------------------------------------------------------------------------


def _path(face: str) -> str:
    import matplotlib

    return os.path.join(matplotlib.get_data_path(), "fonts", "ttf", f"{face}.ttf")


@functools.cache
def _charmap(face: str) -> frozenset[str]:
    """The characters that a face has."""
    from matplotlib.ft2font import FT2Font

    return frozenset(map(chr, FT2Font(_path(face)).get_charmap()))


@functools.cache
def _characters(kind: str) -> tuple[str, ...]:
    """The characters of a kind in the order of Unicode, each with a look of its own."""
    pattern = re.compile(CHARACTERS[kind])
    common = sorted(frozenset.intersection(*map(_charmap, COMMON)))
    seen, chosen = set(), []
    for character in common:
        if not pattern.fullmatch(unicodedata.name(character, "").lower()) or not character.isprintable():
            continue
        look = b"".join(_glyph(face, character, 32).tobytes() for face in COMMON[::4])
        if not any(look) or look in seen:  # a space, or of the look of another
            continue
        seen.add(look)
        chosen.append(character)
    return tuple(chosen)


@functools.cache
def _held_out(captions: tuple[str, ...], fraction: float) -> frozenset[str]:
    """Captions "… with …" chosen by their hash, if all their words are in what remains."""
    words = Counter(word for caption in captions for word in set(caption.split()))
    held = set()
    for caption in captions:
        own = set(caption.split())
        if " with " not in caption or zlib.crc32(caption.encode()) >= fraction * 2**32:
            continue
        if all(words[word] > 1 for word in own):
            held.add(caption)
            words.subtract(own)
    return frozenset(held)
