"""Handwritten digits of 8 × 8 pixels, from the file that scikit-learn contains.

Letters: H height, W width, C channels.
"""

import csv
import gzip
import importlib.util
import os
from typing import Any

import numpy as np

from maxlp.data.sources import Source, Spec

CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = ("a photo of the digit {}", "the number {} in handwriting", "a handwritten {}", "{}")


class Digits:
    """Images with labels, dark on white."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("sklearn")
        folders = list(found.submodule_search_locations or []) if found else []
        paths = [os.path.join(folder, "datasets", "data", "digits.csv.gz") for folder in folders]
        if not paths or not os.path.isfile(paths[0]):
            raise ValueError("the digits come with scikit-learn; run pip install scikit-learn")
        self._path = paths[0]
        with gzip.open(self._path, "rt", encoding="ascii") as file:
            rows = np.array([[int(float(value)) for value in row] for row in csv.reader(file)])
        self._pixels_NHW = (255 - rows[:, :-1] * 255 // 16).astype(np.uint8).reshape(-1, 8, 8)
        self._labels_N = rows[:, -1]

    def __len__(self) -> int:
        return len(self._labels_N)

    def __getitem__(self, row: int) -> dict[str, Any]:
        image_HWC = np.repeat(self._pixels_NHW[row][..., None], 3, axis=-1)
        return {"image": image_HWC, "text": None, "label": int(self._labels_N[row])}

    def where(self, row: int) -> str:
        return f"digit {row}"

    def paths(self) -> list[str]:
        return [self._path]


def open_digits(spec: Spec, *, validation: float = 0.2) -> Source:
    """Opens the 1,797 digits."""
    return Source(spec, Digits(), validation=validation, classes=CLASSES, templates=TEMPLATES)
