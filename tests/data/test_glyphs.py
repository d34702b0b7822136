"""Training never draws validation data, and captions name the characters that are drawn."""

import os
import types
import unicodedata

import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from maxlp.data import glyphs
from maxlp.data.glyphs import Glyphs
from maxlp.data.image_text import ImageTextDataConfig, make_data

EXCLUDED = glyphs.VALIDATION_FACES


def rng(seed=0):
    return np.random.default_rng(seed)


def test_training_draws_no_validation_face(monkeypatch):
    drawn = set()
    glyph = glyphs._glyph

    def record(face, character, canvas):
        drawn.add((face, character))
        return glyph(face, character, canvas)

    train, faces, characters, both = (
        Glyphs(split, 16, validation=kind, validation_faces=f"{EXCLUDED},STIXGeneral")
        for split, kind in [
            ("train", "both"),
            ("validation", "faces"),
            ("validation", "characters"),
            ("validation", "both"),
        ]
    )
    monkeypatch.setattr(glyphs, "_glyph", record)
    seen = {}
    for name, data in dict(train=train, faces=faces, characters=characters, both=both).items():
        drawn.clear()
        for index in range(len(data)):
            for seed in range(8 if data is train else 1):
                data.example(index, rng([seed, index]) if data is train else None)
        seen[name] = {face for face, _ in drawn}, {character for _, character in drawn}
    excluded = {EXCLUDED, "STIXGeneral"}
    assert seen["train"][0] == set(glyphs.FACES) - excluded
    assert seen["faces"] == (excluded, seen["train"][1])
    assert seen["characters"][0] == seen["train"][0]
    assert seen["both"] == (excluded, seen["characters"][1])
    assert not seen["train"][1] & seen["characters"][1]
    # Each word of an excluded name occurs in the name of a training character.
    words = {word for character in seen["train"][1] for word in glyphs.caption_of(character).split()}
    assert all(set(glyphs.caption_of(character).split()) <= words for character in seen["characters"][1])
    assert 0.05 < len(seen["characters"][1]) / len(train.classes) < 0.15


def test_words_of_many_excluded_names_occur_in_training():
    options = {"validation": "characters", "validation_characters": 0.5}
    train, characters = (Glyphs(split, 16, **options) for split in ("train", "validation"))
    trained, excluded = (
        {glyphs.caption_of(character) for character, _ in data._rows} for data in (train, characters)
    )
    words = {word for caption in trained for word in caption.split()}
    assert len(excluded) > 100 and not excluded & trained
    assert all(set(caption.split()) <= words for caption in excluded)


def test_captions_are_unicode_names_of_what_is_drawn():
    data = Glyphs("validation", 32, validation="faces")
    path = os.path.join(matplotlib.get_data_path(), "fonts", "ttf", f"{EXCLUDED}.ttf")
    font = ImageFont.truetype(path, 200)
    captions = []
    for index in range(0, len(data), 29):
        image, caption, label = data.example(index, None)
        captions.append(caption)
        assert data.classes[label] == caption
        character = unicodedata.lookup(caption.upper())
        assert data._rows[index] == (character, (EXCLUDED,))
        # Drawn independently, the ink has the same aspect ratio.
        other = Image.new("L", (400, 400))
        ImageDraw.Draw(other).text((200, 300), character, fill=255, font=font, anchor="ms")
        (left, top, right, bottom), ink = other.getbbox(), 255 - image[..., 0]
        rows, columns = np.flatnonzero(ink.max(1) > 100), np.flatnonzero(ink.max(0) > 100)
        shape = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert abs(shape[0] / (bottom - top) - shape[1] / (right - left)) < 0.05, caption
    assert len(set(captions)) == len(captions) > 10


def test_captions_and_shapes_are_unique():
    for kind in glyphs.CHARACTERS:
        train = Glyphs("train", 32, characters=kind)
        assert len(set(train.classes)) == len(train.classes) > 600
        labels = [train._label[character] for character, _ in train._rows]
        assert len(set(labels)) == len(train), "an epoch has each caption once"
    alphabets = Glyphs("train", 32, characters="alphabets").classes
    assert "latin capital letter a" in alphabets and "greek capital letter alpha" not in alphabets


def test_glyphs_are_whole_and_legible():
    """No glyph is cut by the border, and augmentation leaves each with ink and contrast."""
    train = Glyphs("train", 32)
    for index in range(0, len(train), 7):
        character, faces = train._rows[index]
        for face in set(faces) & set(glyphs.COMMON):  # in STIX some cedillas hang far below
            ink_HW = np.asarray(glyphs._glyph(face, character, 64))
            border = np.concatenate([ink_HW[0], ink_HW[-1], ink_HW[:, 0], ink_HW[:, -1]])
            assert not border.any(), (face, glyphs.caption_of(character))
        image = train.example(index, rng(index)).image.astype(float).mean(-1)
        assert np.percentile(image, 95) - image.min() > 30


def test_training_characters_without_augmentation_come_in_each_of_their_faces():
    """As a linear probe reads them."""
    train, each = Glyphs("train", 16), Glyphs("train", 16, each_face=True)
    assert each._rows == [(character, (face,)) for character, faces in train._rows for face in faces]
    sizes = dict(image_size=16, text_len=8, batch_size=64)
    config = ImageTextDataConfig(source="glyphs?split=train", tokenizer="bytes", **sizes)
    assert make_data(config, split="train").steps_per_epoch == len(train) // 64
    assert make_data(config, split="validation").describe() == f"{len(each):,} examples"


def test_augmentation_depends_on_the_generator_alone():
    train = Glyphs("train", 32)
    first, second, other = (train.example(5, rng(seed)).image for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()


@pytest.mark.parametrize("number", [0, 1, 4], ids=["rotation", "shear", "shift"])
def test_augmentation_to_both_sides_is_the_same(number):
    """A mirror-symmetric letter is rotated, sheared and shifted by as much to the left as to the right."""

    def draw(chance: float) -> np.ndarray:
        chances = np.full(12, 0.5)
        chances[number] = chance
        fixed = types.SimpleNamespace(random=lambda _: chances)
        return np.float64(glyphs.draw_varied("DejaVuSans", "A", 64, fixed, 1.0)).mean(-1)

    left, middle, right = map(draw, (0.0, 0.5, 1.0))
    moved = np.abs(left - middle).mean()
    assert moved > 1
    assert np.abs(left[:, ::-1] - right).mean() < moved / 10  # the font's A is not quite symmetric
    if number == 1:  # about the centre
        assert np.abs(left - middle)[31:33].mean() < moved / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(split="all"), "split='all' is unknown; one of train, validation"),
        (dict(characters="runes"), "characters='runes' is unknown; one of latin"),
        (dict(validation="fonts"), "validation='fonts' is unknown; one of faces"),
        (dict(validation_faces="Arial"), "validation_faces='Arial' is unknown; one of DejaVuSans"),
        (dict(validation_characters=0.9), "validation_characters=0.9 must be"),
        (dict(validation_faces=",".join(glyphs.FACES)), "the split 'train' is empty"),
    ],
)
def test_errors_are_one_line(options, message):
    with pytest.raises(ValueError, match=message) as error:
        Glyphs(**dict(split="train", image_size=32) | options)
    assert "\n" not in str(error.value)
