"""Images of characters with their Unicode names as captions: image-text data without a download.

The faces are those of matplotlib with Unicode character tables: twelve of DejaVu and four of STIX.
(Its Computer Modern faces have tables of their own.) A caption is the character's Unicode name in
lower case, "latin small letter a with diaeresis". Names are composed of parts, so that a model can
name a character that it has never seen. Training excludes some faces and some characters; validation
uses one of three combinations:

    faces        training characters in excluded faces
    characters   excluded characters in training faces; every word of their names occurs in the name
                 of a training character
    both         excluded characters in excluded faces

An epoch goes over the characters and draws each in a random one of its faces, so that no caption
occurs twice. A linear probe is fitted to each training character in each of its faces. Of characters
that look the same in all faces (Latin A, Greek Alpha, Cyrillic A), only the first is used, because no
image could distinguish their names.

In training, a glyph is slightly rotated, sheared, scaled and shifted, and drawn with dark ink on
light paper, both of random colour. In validation it is black on white, upright and centred.

The captions depend on the Unicode version of Python and on matplotlib's fonts, so they may differ
between machines.

Letters: H height, W width.
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

from maxlp.data import fingerprint
from maxlp.data.images import Example

VALIDATION_FACES = "DejaVuSansMono-Oblique"
VALIDATION_CHARACTERS = 0.1

_FAMILIES = {
    "DejaVuSans": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSerif": ("", "-Bold", "-Italic", "-BoldItalic"),
    "STIXGeneral": ("", "Bol", "Italic", "BolIta"),
}
FACES = tuple(family + style for family, styles in _FAMILIES.items() for style in styles)
# Only characters that all of these faces have are used; otherwise a caption could identify a face.
COMMON = tuple(face for face in FACES if face.startswith("DejaVu"))

CHARACTERS = {
    "latin": r"latin (small|capital) letter .*",
    "alphabets": r"(latin|greek|cyrillic|armenian|georgian) (small |capital )?letter .*",
    "all": r"(?!combining).*",
}

CAP_HEIGHT, BASELINE = 0.45, 0.77  # fractions of the canvas; the baseline is measured from the top
# Largest values; the rotation in radians, the shift as a fraction of the side.
ROTATION, SHEAR, LOG_SCALE, SHIFT = 0.12, 0.2, 0.12, 0.06
DARKEST_PAPER, LIGHTEST_INK = 95, 95  # largest distances from white and from black


class Glyphs:
    """The examples of one split; see `image_text.Examples`.

    Attributes:
      classes: all captions, including those of excluded characters.
      templates: "{}" alone, because a caption is already a description.
    """

    templates = ("{}",)

    def __init__(
        self,
        split: str,
        image_size: int,
        each_face: bool = False,
        *,
        characters: str = "latin",
        validation: str = "faces",
        validation_faces: str = VALIDATION_FACES,
        validation_characters: float = VALIDATION_CHARACTERS,
        augment: float = 1.0,
    ):
        """Chooses characters and faces.

        Args:
          split: "train" or "validation".
          image_size: side of the images in pixels.
          each_face: whether each face of a training character is an example, as it is in validation.
          characters: a key of `CHARACTERS`.
          validation: what the validation split consists of: "faces", "characters" or "both", see the
            top of the file. Training is the same for all three.
          validation_faces: the excluded faces: names from `FACES`, joined by commas.
          validation_characters: approximate excluded fraction of the characters with a composed name.
          augment: strength of the random variation of training images, 0 to 1.

        Raises:
          ValueError: an unknown name, a fraction out of range, or an empty split.
        """
        excluded = tuple(face for face in validation_faces.split(",") if face)
        for key, value, known in (
            ("split", split, ("train", "validation")),
            ("characters", characters, tuple(CHARACTERS)),
            ("validation", validation, ("faces", "characters", "both")),
            *(("validation_faces", face, FACES) for face in excluded),
        ):
            if value not in known:
                raise ValueError(f"{key}={value!r} is unknown; one of {', '.join(known)}")
        if not 0 <= validation_characters <= 0.5:
            raise ValueError(
                f"validation_characters={validation_characters} must be a fraction from 0 to 0.5"
            )
        if not 0 <= augment <= 1:
            raise ValueError(f"augment={augment} must be from 0 to 1")
        self._image_size, self._augment = image_size, augment
        chosen = _characters(characters)
        captions = {character: caption_of(character) for character in chosen}
        self.classes = list(captions.values())
        self._label = {character: label for label, character in enumerate(chosen)}

        is_train = split == "train"
        new_characters = not is_train and validation != "faces"
        new_faces = not is_train and validation != "characters"
        excluded_captions = _excluded_captions(tuple(self.classes), validation_characters)
        faces = [face for face in FACES if (face in excluded) == new_faces]
        drawn = {
            character: tuple(face for face in faces if character in _charmap(face))
            for character in chosen
            if (captions[character] in excluded_captions) == new_characters
        }
        # A row is a character with all its faces, of which training draws one, or with a single face.
        self._rows = [(character, own) for character, own in drawn.items() if own]
        if each_face or not is_train:
            self._rows = [(character, (face,)) for character, own in self._rows for face in own]
        if not self._rows:
            raise ValueError(
                f"the split {split!r} is empty with validation_faces={validation_faces} and"
                f" validation_characters={validation_characters}; change one of them"
            )

    @property
    def fingerprint(self) -> str:
        """Changes with the characters and the faces."""
        return fingerprint.of_json(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def example(self, index: int, rng: np.random.Generator | None) -> Example:
        """Example `index`, augmented if there is an `rng`."""
        character, faces = self._rows[index]
        label = self._label[character]
        if rng is None:
            image = draw_plain(faces[0], character, self._image_size)
        else:
            face = faces[int(rng.integers(len(faces)))]
            image = draw_varied(face, character, self._image_size, rng, self._augment)
        return Example(image, self.classes[label], label)


def caption_of(character: str) -> str:
    """The Unicode name of a character in lower case."""
    return unicodedata.name(character).lower()


# --- drawing --------------------------------------------------------------------------------------


def draw_plain(face: str, character: str, image_size: int) -> np.ndarray:
    """Draws black on white, uint8 [image_size, image_size, 3]."""
    mask_HW = np.asarray(_resample(_glyph(face, character, _canvas(image_size)), image_size, np.eye(2)))
    return np.repeat(255 - mask_HW[..., None], 3, axis=-1)


def draw_varied(
    face: str, character: str, image_size: int, rng: np.random.Generator, strength: float
) -> np.ndarray:
    """As `draw_plain`, with random rotation, shear, scale, shift and colours."""
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
    return 2 * min(image_size, 64)  # twice the image size, so that bilinear sampling averages 2 × 2 pixels


def _resample(
    glyph: Image.Image, size: int, matrix: np.ndarray, shift: np.ndarray | tuple[float, float] = (0, 0)
) -> Image.Image:
    """Samples the canvas to `size` × `size`; `matrix` maps offsets in the result to the canvas."""
    canvas = glyph.width
    (a, b), (d, e) = (matrix * (canvas / size)).tolist()
    x, y = size / 2 + shift[0], size / 2 + shift[1]
    coefficients = (a, b, canvas / 2 - a * x - b * y, d, e, canvas / 2 - d * x - e * y)
    return glyph.transform((size, size), Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)


@functools.lru_cache(maxsize=2**15)  # 16 kB per glyph for 64-pixel images
def _glyph(face: str, character: str, canvas: int) -> Image.Image:
    """The character on its baseline, as coverage from 0 to 255 on a square canvas."""
    image = Image.new("L", (canvas, canvas))
    position = (canvas / 2, BASELINE * canvas)
    ImageDraw.Draw(image).text(position, character, fill=255, font=_font(face, canvas), anchor="ms")
    return image


@functools.cache
def _font(face: str, canvas: int) -> ImageFont.FreeTypeFont:
    """A face, scaled so that capitals have the same height in all faces."""
    probe = ImageFont.truetype(_path(face), 1000, layout_engine=ImageFont.Layout.BASIC)
    _, top, _, bottom = probe.getbbox("H", anchor="ls")
    return probe.font_variant(size=CAP_HEIGHT * canvas * 1000 / (bottom - top))


# --- faces and characters -------------------------------------------------------------------------


def _path(face: str) -> str:
    import matplotlib

    return os.path.join(matplotlib.get_data_path(), "fonts", "ttf", f"{face}.ttf")


@functools.cache
def _charmap(face: str) -> frozenset[str]:
    """The characters that a face contains."""
    from matplotlib.ft2font import FT2Font

    return frozenset(map(chr, FT2Font(_path(face)).get_charmap()))


@functools.cache
def _characters(kind: str) -> tuple[str, ...]:
    """The characters of a kind in Unicode order, without those that look like an earlier one."""
    pattern = re.compile(CHARACTERS[kind])
    common = sorted(frozenset.intersection(*map(_charmap, COMMON)))
    seen, chosen = set(), []
    for character in common:
        if not pattern.fullmatch(unicodedata.name(character, "").lower()) or not character.isprintable():
            continue
        look = b"".join(_glyph(face, character, 32).tobytes() for face in COMMON[::4])
        if not any(look) or look in seen:  # blank, or identical to an earlier character
            continue
        seen.add(look)
        chosen.append(character)
    return tuple(chosen)


@functools.cache
def _excluded_captions(captions: tuple[str, ...], fraction: float) -> frozenset[str]:
    """Captions "… with …", chosen by their hash, whose words all occur in the remaining captions."""
    words = Counter(word for caption in captions for word in set(caption.split()))
    excluded = set()
    for caption in captions:
        own = set(caption.split())
        if " with " not in caption or zlib.crc32(caption.encode()) >= fraction * 2**32:
            continue
        if all(words[word] > 1 for word in own):
            excluded.add(caption)
            words.subtract(own)
    return frozenset(excluded)
